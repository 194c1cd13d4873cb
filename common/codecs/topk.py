"""``topk:R``: the largest elements of each block; the rest waits in the residual."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import torch
from torch import Tensor

from fleetddp.common.codecs.base import Codec, as_numbers
from fleetddp.common.errors import Reason, Refused

_DECIMAL = re.compile(r"(0|1)?\.[0-9]{1,9}|1", re.ASCII)


class TopK(Codec):
    """A block of m elements: k = ceil(R m) of its elements, 6 k bytes.

    First their k positions in the block (uint16, little-endian, ascending), then their k values (float32, little-endian).
    Sent are k elements of the largest magnitude (which of equal ones is open); the others decode to zero. R is read as an
    exact decimal, 0 < R <= 1: a full block of ``topk:0.03`` holds 16 elements in 96 bytes.
    """

    def __init__(self, ratio: str) -> None:
        self.ratio = Fraction(ratio)
        super().__init__(f"topk:{ratio}")

    @staticmethod
    def accepts(ratio: str) -> bool:
        """Whether this is a decimal fraction with 0 < R <= 1."""
        return _DECIMAL.fullmatch(ratio) is not None and 0 < Fraction(ratio) <= 1

    def kept(self, m: int) -> int:
        """How many elements of a block of m are sent."""
        return math.ceil(self.ratio * m)

    def _size(self, m: int) -> int:
        return 6 * self.kept(m)

    def _encode(self, x: Tensor, out: Tensor) -> None:
        k = self.kept(x.shape[1])
        positions = x.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
        values = x.gather(1, positions)
        self.require_finite(values)  # inf and nan count as the largest, so they are among these
        out[:, : 2 * k].copy_(positions.to(torch.int16).view(torch.uint8))
        out[:, 2 * k :].copy_(values.view(torch.uint8))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        k, m = self.kept(out.shape[1]), out.shape[1]
        positions = as_numbers(data[:, : 2 * k], torch.int16).to(torch.int64)
        values = as_numbers(data[:, 2 * k :], torch.float32)
        if int(positions.amin()) < 0 or int(positions.amax()) >= m:  # those from 32768 on read as negative
            raise Refused(Reason.MALFORMED, f"{self.spec}: a position lies outside its block of {m}")
        if k > 1 and not bool((positions[:, 1:] > positions[:, :-1]).all()):
            raise Refused(Reason.MALFORMED, f"{self.spec}: positions within a block are not ascending")
        self.require_finite(values)
        out.zero_().scatter_(1, positions, values)
