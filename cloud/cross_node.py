"""The slow leg of a hierarchical all-reduce: sum each shard of the gradients over the nodes, in their precision or in fewer bits.

In fewer bits it is compressed twice, each time with error feedback (DoubleSqueeze: Tang et al., 2019, algorithm 1): every node
sends each piece of its shard to the node that owns the piece; that one sums the pieces in float32 and sends the sum to all. What
the first rounding left out is kept by its sender, what the second left out by the owner, and each is added the next time. So the
sum of all results, plus the residuals that are left, is the sum of all that was put in, within float32 rounding. All nodes get
the same bits.

inf and nan arrive as inf or nan, so that a GradScaler skips the step on all ranks alike, and leave no residual. Nothing here
waits for a device, which is why the codecs of the wire are not used: they refuse what is not finite, and have to look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

CrossNode = Literal["float32", "bfloat16", "int8"]
Finish = Callable[[Any], None]  # waits for a torch.distributed.Work, as the backend needs it

BLOCK = 512  # elements that share a scale in int8
LEVELS = 127

gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has renamed them
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Plain:
    """No compression: an all-reduce in the dtype of the gradients."""

    def __init__(self, group: dist.ProcessGroup, finish: Finish) -> None:
        self._group, self._finish = group, finish
        self.multiple = 1  # what a shard's length is a multiple of

    def all_reduce(self, shard: Tensor, bucket: int, parameters: tuple[int, ...]) -> Tensor:
        """The sum of all nodes' shards; may overwrite ``shard``."""
        self._finish(dist.all_reduce(shard, group=self._group, async_op=True))
        return shard


class Compressed:
    """bfloat16, or int8 with one float32 scale (max|x| / 127) for 512 elements: 2 or 1.008 bytes an element and way."""

    def __init__(self, group: dist.ProcessGroup, finish: Finish, codec: Literal["bfloat16", "int8"]) -> None:
        self._group, self._finish, self._nodes = group, finish, group.size()
        self._pack, self._unpack = (_int8, _from_int8) if codec == "int8" else (_bfloat16, _from_bfloat16)
        self.multiple = self._nodes * BLOCK
        # By bucket: whose gradients it holds, and what the first and the second rounding left out.
        self._residuals: dict[int, tuple[tuple[int, ...], Tensor, Tensor]] = {}

    def all_reduce(self, shard: Tensor, bucket: int, parameters: tuple[int, ...]) -> Tensor:
        """The sum of all nodes' shards (any float dtype, length a multiple of ``multiple``).

        Residuals are kept by ``bucket`` and dropped when it holds other ``parameters`` than before: DDP forms its buckets anew
        after the first step.
        """
        sent, owned = self._residuals_of(shard, bucket, parameters)
        mine, left = self._round(shard.float() + sent)
        theirs = torch.empty_like(mine)
        self._finish(dist.all_to_all_single(theirs, mine, group=self._group, async_op=True))
        sums = self._unpack(theirs).view(self._nodes, -1).sum(0)
        total, left_of_sum = self._round(sums + owned)
        everything = total.new_empty(self._nodes * total.numel())
        self._finish(gather_single(everything, total, group=self._group, async_op=True))
        self._residuals[bucket] = parameters, left, left_of_sum
        return self._unpack(everything).to(shard.dtype)

    def _residuals_of(self, shard: Tensor, bucket: int, parameters: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        known = self._residuals.get(bucket)
        if known is not None and known[0] == parameters:
            return known[1], known[2]
        if known is not None:
            self._residuals.clear()
        zeros = torch.zeros(shard.numel(), dtype=torch.float32, device=shard.device)
        return zeros, zeros[: shard.numel() // self._nodes]

    def _round(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f32[n] to bytes, and what they leave out."""
        packed = self._pack(x)
        left = x - self._unpack(packed)
        return packed, torch.where(torch.isfinite(left), left, 0.0)


def _bfloat16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).view(torch.uint8)


def _from_bfloat16(data: Tensor) -> Tensor:
    return data.view(torch.bfloat16).float()


def _int8(x: Tensor) -> Tensor:
    """f32[b * 512] to u8[b * 516]: each block's scale, then its codes."""
    blocks = x.view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True) / LEVELS
    codes = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-LEVELS, LEVELS)
    codes = torch.where(
        torch.isfinite(scale), codes, 1.0
    )  # an inf or nan of the block: its scale, and so all of it, is inf or nan
    return torch.cat([scale.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], dim=1).flatten()


def _from_int8(data: Tensor) -> Tensor:
    rows = data.view(-1, BLOCK + 4)
    scale = rows[:, :4].contiguous().view(torch.float32)
    return (rows[:, 4:].view(torch.int8) * scale).flatten()
