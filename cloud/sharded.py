"""What moves at a boundary where no rank holds the whole model: parameters sharded by ``fully_shard`` (FSDP2).

Each rank exchanges its own shards with the parent. A shard may begin anywhere, an interval on the wire begins with a block of 512
elements: a block belongs to the rank that holds its first element, and the others that hold some of it hand those over inside
the site, in one all-to-all before an update and one after a version. The codec's blocks are thus the same as an unsharded site's.

A rank has about one interval for each tensor. Where that is more than a stream may have (``MAX_RANGES``), or not all ranks reach
the parent (``uplink``), blocks belong to the carriers as they do in an unsharded site, in one run each, and the all-to-all moves
all that lies elsewhere. Averaged buffers are not sharded; they are the first carrier's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fleetddp.cloud.exchange import Exchange
from fleetddp.cloud.outgoing import Outgoing, Pieces
from fleetddp.common.codecs import BLOCK, get
from fleetddp.common.errors import ConfigError
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.transport.limits import MAX_RANGES
from fleetddp.common.update import Interval


class Span(NamedTuple):
    """Elements [start, stop) of the flat vector that ``rank`` has, in the ``place``-th of its shards or intervals."""

    start: int
    stop: int
    rank: int
    place: int


class Part(NamedTuple):
    """Elements [start, stop) of this rank's ``place``-th shard or interval, of which the rank ``other`` has the other end."""

    place: int
    start: int
    stop: int
    other: int


class ShardedExchange(Exchange):
    """One rank's end. Raises ``ConfigError``, naming the parameter, unless each is ``Shard(0)`` of a 1-D mesh over ``group``."""

    def share_out(self, carriers: Sequence[int]) -> list[tuple[Interval, ...]]:
        """Who exchanges what, by rank."""
        if self.fragments > 1:
            raise ConfigError(f"fragments is {self.fragments}: a model under fully_shard sends whole updates (fragments: 1)")
        world, mine, parameters = self._group.size(), self._group.rank(), self.layout.parameters
        self._names, held = shards(self._module, self.layout, self._group)
        shares = own_blocks(held, world, parameters)
        if len(carriers) < world or max(map(len, shares)) >= MAX_RANGES:
            shares = super().share_out(carriers)
        elif self.layout.buffer_elements:
            shares[carriers[0]] += ((self.layout.buffer_start, self.layout.elements),)
        owned = sorted(Span(*i, rank, n) for rank, own in enumerate(shares) for n, i in enumerate(own) if i[0] < parameters)
        common = list(intersections(held, owned))
        # By the rank at the other end, then by place in the vector: what one rank sends is what another expects.
        leaving = sorted((o.rank, start, stop, h) for start, stop, h, o in common if h.rank == mine)
        coming = sorted((h.rank, start, stop, o) for start, stop, h, o in common if o.rank == mine)
        self._leaving = [Part(s.place, start - s.start, stop - s.start, other) for other, start, stop, s in leaving]
        self._coming = [Part(s.place, start - s.start, stop - s.start, other) for other, start, stop, s in coming]
        return shares

    # ---- out --------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self) -> Pieces:
        """This rank's intervals of the weights, in float32. A collective."""
        pieces = [torch.empty(stop - start, device=self._device) for start, stop in self.intervals]
        self._move(self._local(), self._leaving, pieces, self._coming)
        for interval, piece in zip(self.intervals, pieces, strict=True):
            if interval[0] >= self.layout.buffer_start:
                self.layout.read(self._module, piece, interval)
        return pieces

    def snapshot(self, fragment: int = 0) -> Outgoing:
        """This rank's intervals of the update, from the anchor to the weights as they are. A collective."""
        self._now = self.read()
        pieces = [self._back(*both) for both in zip(self.intervals, self.anchor, self._now, strict=True)]
        return Outgoing(pieces, self.residual, partial(self._encode, range(len(pieces))), self._device)

    def commit(self, outgoing: Outgoing, fragment: int = 0) -> None:
        """``outgoing`` is being sent: the next update starts at the weights as they are."""
        self._before = self.residual
        self._last = outgoing
        self.anchor = self._now

    def _back(self, interval: Interval, base: Tensor, now: Tensor) -> Tensor:
        """As ``Layout.outgoing``: base - now for parameters, now for buffers."""
        if interval[0] >= self.layout.parameters:
            return now
        back = base.clone()
        for spec in self.layout.tensors:
            start, stop = max(spec.start, interval[0]) - interval[0], min(spec.stop, interval[1]) - interval[0]
            dtype = self._module.get_parameter(spec.name).dtype if start < stop else torch.float32
            if dtype.itemsize < 4:  # it held the base rounded
                back[start:stop] = back[start:stop].to(dtype)
        return back.sub_(now)

    # ---- in ---------------------------------------------------------------------------------------------------------------

    def adopt(self, codec: str, landed: Tensor, *, carry: bool, fragments: Sequence[int] = (0,)) -> None:
        """Set the module, on all ranks, to the version of which each rank's ``landed`` holds the bytes. A collective."""
        geometry = Geometry(self.layout, get(codec))
        anchor = self._decode(geometry, landed.to(self._device, non_blocking=True), self.intervals)
        self._write(self._with_progress(anchor, range(len(anchor))) if carry else anchor)
        self.anchor = anchor

    def _with_progress(self, version: Pieces, places: Sequence[int]) -> Pieces:
        """w + (t - a) of this rank's parameters, w of its buffers."""
        both = zip(self.intervals, version, self.anchor, self.read(), strict=True)
        return [w if i[0] >= self.layout.parameters else w - self._back(i, anchor, now) for i, w, anchor, now in both]

    @torch.no_grad()
    def _write(self, pieces: Pieces) -> None:
        """Set every rank's shards, and buffers, to the values that their owners pass."""
        self._move(pieces, self._coming, self._local(), self._leaving)
        for source, intervals in enumerate(self.shares):
            for place, interval in enumerate(intervals):
                if interval[0] >= self.layout.buffer_start:
                    mine = source == self._group.rank()
                    values = pieces[place] if mine else torch.empty(interval[1] - interval[0], device=self._device)
                    dist.broadcast(values, self._sources[source], group=self._group)
                    self.layout.write_(self._module, values, interval)

    # ---- inside the site ----------------------------------------------------------------------------------------------------

    def _move(self, source: Pieces, leaving: list[Part], target: Pieces, coming: list[Part]) -> None:
        """Copy the parts ``leaving`` of all ranks' sources to the parts ``coming`` of their targets, as float32."""
        sent, due = ([0] * self._group.size() for _ in range(2))
        for parts, sizes in ((leaving, sent), (coming, due)):
            for part in parts:
                sizes[part.other] += part.stop - part.start
        empty = torch.empty(0, device=self._device)
        data = torch.cat([empty, *(source[p.place][p.start : p.stop].float() for p in leaving)])
        received = torch.empty(sum(due), device=self._device)
        dist.all_to_all_single(received, data, due, sent, group=self._group)
        for part, values in zip(coming, torch.split(received, [p.stop - p.start for p in coming]), strict=True):
            target[part.place][part.start : part.stop].copy_(values)

    def _local(self) -> Pieces:
        """This rank's shards, flat; to be read and written."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # where the script keeps parameters gathered between steps
        named = dict(self._module.named_parameters())
        return [_shard_of(named[name]).view(-1) for name in self._names]


def is_sharded(module: nn.Module) -> bool:
    """Whether a trainable parameter is a ``DTensor``."""
    return any(isinstance(p, DTensor) for p in module.parameters() if p.requires_grad)


def shards(module: nn.Module, layout: Layout, group: dist.ProcessGroup) -> tuple[list[str], list[Span]]:
    """Whose shards this rank has, by name of the parameter; and all ranks' shards, by where they lie, without empty ones."""
    world, names, held = group.size(), [], []
    counts = [0] * world
    parameters = dict(module.named_parameters())
    for spec in layout.tensors:
        if spec.role != "parameter":
            continue
        rows = _require_rows(spec.name, parameters[spec.name], group)
        row = spec.size // max(1, spec.shape[0])
        for rank in range(world):
            start, stop = (min((rank + n) * rows, spec.shape[0]) * row for n in (0, 1))  # as torch.chunk cuts
            if rank == group.rank() and _shard_of(parameters[spec.name]).numel() != stop - start:
                raise ConfigError(f"parameter {spec.name!r} is not cut as torch.chunk would cut it; only that is supported")
            if start < stop:
                held.append(Span(spec.start + start, spec.start + stop, rank, counts[rank]))
                counts[rank] += 1
                names += [spec.name] if rank == group.rank() else []
    return names, held


def _require_rows(name: str, parameter: nn.Parameter, group: dist.ProcessGroup) -> int:
    """Rows of a full shard of a parameter; ``ConfigError`` where it is not cut by rows over the whole group."""
    if not isinstance(parameter, DTensor):
        raise ConfigError(f"parameter {name!r} is not sharded, others are: apply fully_shard to the root module, too")
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        raise ConfigError(
            f"parameter {name!r} lies on a mesh of {mesh.ndim} dimensions (HSDP, tensor parallelism); only 1-D is supported"
        )
    if tuple(parameter.placements) != (Shard(0),):
        raise ConfigError(f"parameter {name!r} is placed as {parameter.placements}; only (Shard(dim=0),) is supported")
    if mesh.mesh.tolist() != dist.get_process_group_ranks(group):
        raise ConfigError(f"parameter {name!r} is sharded over ranks {mesh.mesh.tolist()}; all ranks of the site's group are due")
    return -(-parameter.shape[0] // mesh.size())


def _shard_of(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor)
    local: Tensor = parameter.to_local().detach()
    return local


def own_blocks(held: Sequence[Span], world: int, parameters: int) -> list[tuple[Interval, ...]]:
    """By rank: the runs of blocks whose first element it holds."""
    shares: list[list[Interval]] = [[] for _ in range(world)]
    for span in held:
        start, stop = (-(-n // BLOCK) * BLOCK for n in (span.start, span.stop))
        stop = min(stop, parameters)
        if start >= stop:
            continue
        own = shares[span.rank]
        if own and own[-1][1] == start:
            own[-1] = (own[-1][0], stop)
        else:
            own.append((start, stop))
    return [tuple(own) for own in shares]


def intersections(left: Sequence[Span], right: Sequence[Span]) -> Iterator[tuple[int, int, Span, Span]]:
    """(start, stop, span of left, span of right) of each run of elements in both; both are ascending and without overlaps."""
    i = j = 0
    while i < len(left) and j < len(right):
        start, stop = max(left[i].start, right[j].start), min(left[i].stop, right[j].stop)
        if start < stop:
            yield start, stop, left[i], right[j]
        if left[i].stop == stop:
            i += 1
        else:
            j += 1
