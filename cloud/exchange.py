"""What moves at a boundary: this rank's slice of ``base - local`` out, its slice of a version in, and all slices to all ranks.

A rank keeps only its own slice of the weights that the next update counts from (the *anchor*), and of the codec's residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleetddp.common.codecs import Codec, get
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import ByteRange
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.update import Interval

Pieces = list[Tensor]  # one for each interval of this rank's slice


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An encoded slice, before it is known whether it will be sent."""

    payload: memoryview
    residual: list[Tensor | None]


class Exchange:
    """One rank's end. ``carriers``: the ranks of ``group`` that exchange a slice with the parent; the others' is empty."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        codec: Codec,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        carriers: Sequence[int],
    ) -> None:
        self.layout = layout
        self._module, self._group, self._device = module, group, device
        self._out = Geometry(layout, codec)
        shares = dict(zip(carriers, self._out.split(len(carriers)), strict=True))
        self.shares = [shares.get(rank, ()) for rank in range(group.size())]
        self.intervals = self.shares[group.rank()]
        self.anchor: Pieces = []
        self.residual: list[Tensor | None] = [None] * len(self.intervals)
        self._residual_before = self.residual
        self._sources = dist.get_process_group_ranks(group)

    # ---- out --------------------------------------------------------------------------------------------------------------

    def share_buffers(self) -> None:
        """Give all ranks rank 0's averaged buffers: each rank slices its own copy. A collective."""
        if not self.layout.buffer_elements:
            return
        section = (self.layout.buffer_start, self.layout.elements)
        buffers = self.layout.read(self._module, interval=section, device=self._device)
        dist.broadcast(buffers, self._sources[0], group=self._group)
        self.layout.write_(self._module, buffers, section)

    def encode(self) -> Outgoing | None:
        """This rank's slice of the update, from the anchor to the weights as they are; None if a value is not finite."""
        encoded: Pieces = []
        residual: list[Tensor | None] = []
        try:
            for interval, base, before in zip(self.intervals, self.anchor, self.residual, strict=True):
                values = self.layout.outgoing(self._module, base, interval)
                if interval[0] < self.layout.parameters:
                    data, after = self._out.codec.encode_with_feedback(values, before)
                else:
                    data, after = self._out.encode(values, interval), None
                encoded.append(data)
                residual.append(after)
        except Refused as error:
            if error.reason is not Reason.NOT_FINITE:
                raise
            return None
        return Outgoing(self._on_host(encoded), residual)

    def commit(self, outgoing: Outgoing) -> None:
        """``outgoing`` is being sent: the next update starts at the weights as they are."""
        self._residual_before, self.residual = self.residual, outgoing.residual
        self.anchor = self.read()

    def restore_residual(self) -> None:
        """The last update was refused: as if it had never been encoded."""
        self.residual = self._residual_before

    def forget_residual(self) -> None:
        """What the codec left out is too old to be sent."""
        self.residual = [None] * len(self.intervals)

    def initial(self) -> memoryview:
        """This rank's slice of the weights, as an ``init`` carries it: float32 values."""
        geometry = Geometry(self.layout, get("float32"))
        return self._on_host([geometry.encode(v, i) for v, i in zip(self.read(), self.intervals, strict=True)])

    def read(self) -> Pieces:
        """This rank's slice of the module's weights, in float32."""
        return [self.layout.read(self._module, interval=i, device=self._device) for i in self.intervals]

    def _on_host(self, pieces: Pieces) -> memoryview:
        """The pieces, one after another, in host memory; from a GPU by way of pinned memory."""
        on_gpu = self._device.type == "cuda"
        host = torch.empty(sum(p.numel() for p in pieces), dtype=torch.uint8, pin_memory=on_gpu)
        at = 0
        for piece in pieces:
            host[at : at + piece.numel()].copy_(piece, non_blocking=on_gpu)
            at += piece.numel()
        if on_gpu:
            torch.cuda.current_stream(self._device).synchronize()  # the courier's thread reads it next
        return bytes_of(host)

    # ---- in ---------------------------------------------------------------------------------------------------------------

    def landing(self, codec: str) -> tuple[tuple[ByteRange, ...], Tensor]:
        """Which bytes of a version published in ``codec`` this rank fetches, and host memory (u8) for them."""
        ranges = self._ranges(Geometry(self.layout, get(codec)), self.intervals)
        size = sum(stop - start for start, stop in ranges)
        return ranges, torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def adopt(self, codec: str, landed: Tensor) -> None:
        """Set the module, on all ranks, to the version of which each rank's ``landed`` holds the bytes. A collective.

        The slices are broadcast one after another, encoded: a rank needs memory for one slice besides the weights, not for all.
        """
        geometry = Geometry(self.layout, get(codec))
        rank = self._group.rank()
        anchor: Pieces = []
        for source, intervals in enumerate(self.shares):
            if not intervals:
                continue
            ranges = self._ranges(geometry, intervals)
            if source == rank:
                data = landed.to(self._device, non_blocking=True)
            else:
                data = torch.empty(sum(stop - start for start, stop in ranges), dtype=torch.uint8, device=self._device)
            dist.broadcast(data, self._sources[source], group=self._group)
            at = 0
            for interval, (start, stop) in zip(intervals, ranges, strict=True):
                values = geometry.decode(data[at : at + stop - start], interval)
                at += stop - start
                self.layout.write_(self._module, values, interval)
                if source == rank:
                    anchor.append(values)
        self.anchor = anchor

    @staticmethod
    def _ranges(geometry: Geometry, intervals: Sequence[Interval]) -> tuple[ByteRange, ...]:
        return tuple(geometry.byte_range(i) for i in intervals)
