"""What moves at a boundary: this rank's slice of ``base - local`` out, its slice of a version in, and all slices to all ranks.

A rank keeps only its own slice of the weights that the next update counts from (the *anchor*), and of the codec's residual. Where
the layout is cut into fragments (``common/fragments.py``), an update is one fragment, and each is cut among the carriers.

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
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleetddp.cloud.outgoing import Outgoing, Pieces, Residual, on_host
from fleetddp.common.codecs import Codec, get
from fleetddp.common.events import ByteRange
from fleetddp.common.fragments import cut, deal
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
        fragments: int = 1,
    ) -> None:
        self.layout, self.fragments = layout, fragments
        self._module, self._group, self._device = module, group, device
        self._out = Geometry(layout, codec)
        self._cut = cut(layout, fragments)
        self.shares = self.share_out(carriers)
        self.intervals = self.shares[group.rank()]
        self.anchor: Pieces = []
        self._settled: Residual = [None] * len(self.intervals)  # the residual before the last update
        self._last: Outgoing | None = None  # the last update, until its residual has been asked for
        self._last_fragment = 0  # that it is
        self._before = self._settled
        self._spare: dict[int, Tensor] = {}  # memory of earlier updates, by place
        self._sources = dist.get_process_group_ranks(group)

    def share_out(self, carriers: Sequence[int]) -> list[tuple[Interval, ...]]:
        """Which intervals each rank exchanges with the parent, by rank; each lies in one fragment."""
        shares: list[tuple[Interval, ...]] = [()] * self._group.size()
        for within in self._cut:
            for rank, part in zip(carriers, deal(within, len(carriers)), strict=True):
                shares[rank] += part
        return shares

    def pushers(self, fragment: int) -> list[int]:
        """The ranks that have a slice of it."""
        return [rank for rank, own in enumerate(self.shares) if self._places(fragment, own)]

    def part(self, fragment: int) -> tuple[Interval, ...]:
        """This rank's slice of a fragment."""
        return tuple(self.intervals[place] for place in self._places(fragment))

    def _places(self, fragment: int, intervals: Sequence[Interval] | None = None) -> list[int]:
        """Which of this rank's intervals (or of these) lie in a fragment."""
        own = self.intervals if intervals is None else intervals
        within = self._cut[fragment]
        return [place for place, i in enumerate(own) if any(start <= i[0] < stop for start, stop in within)]

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
            settled = list(self._settled)
            for place, left in zip(self._places(self._last_fragment), self._last.residual(), strict=True):
                settled[place] = left
            self._settled, self._last = settled, None
        return self._settled

    @residual.setter
    def residual(self, residual: Residual) -> None:
        self._settled, self._last = residual, None

    def snapshot(self, fragment: int = 0) -> Outgoing:
        """This rank's slice of the update, from the anchor to the weights as they are. The one before must have been answered."""
        pieces, before, places = [], self.residual, self._places(fragment)
        for place in places:
            base = self.anchor[place]
            if place not in self._spare:
                self._spare[place] = torch.empty_like(base)
            pieces.append(self.layout.outgoing(self._module, base, self.intervals[place], out=self._spare[place]))
        return Outgoing(pieces, [before[place] for place in places], partial(self._encode, places), self._device)

    def _encode(self, places: Sequence[int], index: int, values: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        interval = self.intervals[places[index]]
        if interval[0] < self.layout.parameters:
            return self._out.codec.encode_with_feedback(values, before)
        return self._out.encode(values, interval), None

    def commit(self, outgoing: Outgoing, fragment: int = 0) -> None:
        """``outgoing`` is being sent: the next update of this fragment starts at the weights as they are."""
        self._before = self.residual
        self._last, self._last_fragment = outgoing, fragment
        for place in self._places(fragment):
            self.layout.read(self._module, self.anchor[place], self.intervals[place])

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

    def landing(self, codec: str, fragments: Sequence[int] = (0,)) -> tuple[tuple[ByteRange, ...], Tensor]:
        """Which bytes of these fragments of a version published in ``codec`` this rank fetches, and host memory (u8) for them."""
        wanted = [i for fragment in fragments for i in self.part(fragment)]
        ranges = self._ranges(Geometry(self.layout, get(codec)), wanted)
        size = sum(stop - start for start, stop in ranges)
        return ranges, torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def adopt(self, codec: str, landed: Tensor, *, carry: bool, fragments: Sequence[int] = (0,)) -> None:
        """Set these fragments, on all ranks, to the version of which each rank's ``landed`` holds the bytes. A collective.

        ``carry``: plus this site's progress since the anchor. The slices are broadcast one after another, encoded unless they
        carry progress: a rank needs memory for one slice besides the weights, not for all.
        """
        geometry = Geometry(self.layout, get(codec))
        own = [place for fragment in fragments for place in self._places(fragment)]
        anchor = dict(enumerate(self.anchor))
        for source, share in enumerate(self.shares):
            intervals = [share[place] for fragment in fragments for place in self._places(fragment, share)]
            if not intervals:
                continue
            mine = source == self._group.rank()
            if mine:
                data = landed.to(self._device, non_blocking=True)
                version = self._decode(geometry, data, intervals)
                values = self._with_progress(version, own) if carry else version
                data = _joined(values) if carry else data
                anchor.update(zip(own, version, strict=True))
            else:
                size = sum(stop - start for start, stop in (intervals if carry else self._ranges(geometry, intervals)))
                data = torch.empty(size, dtype=torch.float32 if carry else torch.uint8, device=self._device)
            dist.broadcast(data, self._sources[source], group=self._group)
            if not mine:
                values = _cut(data, intervals) if carry else self._decode(geometry, data, intervals)
            for interval, piece in zip(intervals, values, strict=True):
                self.layout.write_(self._module, piece, interval)
        self.anchor = [anchor[place] for place in range(len(self.intervals))]

    def _decode(self, geometry: Geometry, data: Tensor, intervals: Sequence[Interval]) -> Pieces:
        values, at = [], 0
        for interval, (start, stop) in zip(intervals, self._ranges(geometry, intervals), strict=True):
            values.append(geometry.decode(data[at : at + stop - start], interval))
            at += stop - start
        return values

    def _with_progress(self, version: Pieces, places: Sequence[int]) -> Pieces:
        """w + (t - a) of this rank's parameters, w of its buffers."""
        moved: Pieces = []
        for values, place in zip(version, places, strict=True):
            interval = self.intervals[place]
            if interval[0] < self.layout.parameters:
                back = self.layout.outgoing(self._module, self.anchor[place], interval)  # a - t
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
