"""What moves at a boundary: this rank's slice of ``base - local`` out, its slice of a version in, and all slices to all ranks.

A rank keeps only its own slice of the weights that the next update counts from (the *anchor*), and of the codec's residual.

**Local progress.** Where the site trains on while its update travels (``overlap: steps``), a version w arrives when the weights
are no longer those that were sent. With a the anchor (the weights at the last update, or the version adopted since) and t the
weights now, on each element of a parameter

    progress  p  = t - a                 what the site has learnt that is in no update yet
    weights   t' = w + p                 what training goes on from
    anchor    a' = w                     so that the next update is a' - t'' = -(p + what is learnt until then)

Each step's work is thus in exactly one update, and where nothing was learnt meanwhile t' is w to the bit. This is the delayed
application of the outer step in Streaming DiLoCo (Douillard et al., Streaming DiLoCo with overlapping communication, 2025,
Algorithm 2, with its mixing factor alpha = 1: there the merged weights take the place of the local ones except for the tau steps
since they were sent; here those tau steps are kept instead of a mixture, as in Sun et al., CO2, 2024, and Wang et al., Overlap
Local-SGD, 2020). Averaged buffers are those of the version: a running variance plus a difference may be negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleetddp.cloud.outgoing import Outgoing, Pieces, Residual, on_host
from fleetddp.common.codecs import Codec, get
from fleetddp.common.events import ByteRange
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.update import Interval


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
        self.shares = self.share_out(carriers)
        self.intervals = self.shares[group.rank()]
        self.anchor: Pieces = []
        self._settled: Residual = [None] * len(self.intervals)  # the residual before the last update
        self._last: Outgoing | None = None  # the last update, until its residual has been asked for
        self._before = self._settled
        self._spare: Pieces = []  # memory of the update before
        self._sources = dist.get_process_group_ranks(group)

    def share_out(self, carriers: Sequence[int]) -> list[tuple[Interval, ...]]:
        """Which intervals each rank exchanges with the parent, by rank."""
        shares = dict(zip(carriers, self._out.split(len(carriers)), strict=True))
        return [shares.get(rank, ()) for rank in range(self._group.size())]

    # ---- out --------------------------------------------------------------------------------------------------------------

    def share_buffers(self) -> None:
        """Give all ranks rank 0's averaged buffers: each rank slices its own copy. A collective."""
        if not self.layout.buffer_elements:
            return
        section = (self.layout.buffer_start, self.layout.elements)
        buffers = self.layout.read(self._module, interval=section, device=self._device)
        dist.broadcast(buffers, self._sources[0], group=self._group)
        self.layout.write_(self._module, buffers, section)

    @property
    def residual(self) -> Residual:
        """What the codec has left out so far, for each interval. Waits until the last update is encoded."""
        if self._last is not None:
            self._settled, self._last = self._last.residual(), None
        return self._settled

    @residual.setter
    def residual(self, residual: Residual) -> None:
        self._settled, self._last = residual, None

    def snapshot(self) -> Outgoing:
        """This rank's slice of the update, from the anchor to the weights as they are. The one before must have been answered."""
        self._spare = self._spare or [torch.empty_like(base) for base in self.anchor]
        for interval, base, out in zip(self.intervals, self.anchor, self._spare, strict=True):
            self.layout.outgoing(self._module, base, interval, out=out)
        return Outgoing(self._spare, self.residual, self._encode, self._device)

    def _encode(self, index: int, values: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        interval = self.intervals[index]
        if interval[0] < self.layout.parameters:
            return self._out.codec.encode_with_feedback(values, before)
        return self._out.encode(values, interval), None

    def commit(self, outgoing: Outgoing) -> None:
        """``outgoing`` is being sent: the next update starts at the weights as they are."""
        self._before = self.residual
        self._last = outgoing
        for interval, base in zip(self.intervals, self.anchor, strict=True):
            self.layout.read(self._module, base, interval)

    def restore_residual(self) -> None:
        """The last update was refused: as if it had never been encoded."""
        self.residual = self._before

    def forget_residual(self) -> None:
        """What the codec left out is too old to be sent."""
        self.residual = [None] * len(self.intervals)

    def initial(self) -> memoryview:
        """This rank's slice of the weights, as an ``init`` carries it: float32 values."""
        geometry = Geometry(self.layout, get("float32"))
        return on_host([geometry.encode(v, i) for v, i in zip(self.read(), self.intervals, strict=True)], self._device)

    def read(self) -> Pieces:
        """This rank's slice of the module's weights, in float32."""
        return [self.layout.read(self._module, interval=i, device=self._device) for i in self.intervals]

    # ---- in ---------------------------------------------------------------------------------------------------------------

    def landing(self, codec: str) -> tuple[tuple[ByteRange, ...], Tensor]:
        """Which bytes of a version published in ``codec`` this rank fetches, and host memory (u8) for them."""
        ranges = self._ranges(Geometry(self.layout, get(codec)), self.intervals)
        size = sum(stop - start for start, stop in ranges)
        return ranges, torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def adopt(self, codec: str, landed: Tensor, *, carry: bool) -> None:
        """Set the module, on all ranks, to the version of which each rank's ``landed`` holds the bytes. A collective.

        ``carry``: plus this site's progress since the anchor. The slices are broadcast one after another, encoded unless they
        carry progress: a rank needs memory for one slice besides the weights, not for all.
        """
        geometry = Geometry(self.layout, get(codec))
        anchor: Pieces = []
        for source, intervals in enumerate(self.shares):
            if not intervals:
                continue
            if source == self._group.rank():
                data = landed.to(self._device, non_blocking=True)
                anchor = self._decode(geometry, data, intervals)
                values = self._with_progress(anchor) if carry else anchor
                data = _joined(values) if carry else data
            else:
                size = sum(stop - start for start, stop in (intervals if carry else self._ranges(geometry, intervals)))
                data = torch.empty(size, dtype=torch.float32 if carry else torch.uint8, device=self._device)
                values = []
            dist.broadcast(data, self._sources[source], group=self._group)
            if source != self._group.rank():
                values = _cut(data, intervals) if carry else self._decode(geometry, data, intervals)
            for interval, piece in zip(intervals, values, strict=True):
                self.layout.write_(self._module, piece, interval)
        self.anchor = anchor

    def _decode(self, geometry: Geometry, data: Tensor, intervals: Sequence[Interval]) -> Pieces:
        values, at = [], 0
        for interval, (start, stop) in zip(intervals, self._ranges(geometry, intervals), strict=True):
            values.append(geometry.decode(data[at : at + stop - start], interval))
            at += stop - start
        return values

    def _with_progress(self, version: Pieces) -> Pieces:
        """w + (t - a) of this rank's parameters, w of its buffers."""
        moved: Pieces = []
        for interval, values, anchor in zip(self.intervals, version, self.anchor, strict=True):
            if interval[0] < self.layout.parameters:
                back = self.layout.outgoing(self._module, anchor, interval)  # a - t
                values = torch.sub(values, back, out=back)
            moved.append(values)
        return moved

    @staticmethod
    def _ranges(geometry: Geometry, intervals: Sequence[Interval]) -> tuple[ByteRange, ...]:
        return tuple(geometry.byte_range(i) for i in intervals)


def _joined(pieces: Pieces) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _cut(data: Tensor, intervals: Sequence[Interval]) -> Pieces:
    return list(torch.split(data, [stop - start for start, stop in intervals]))
