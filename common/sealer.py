"""Making partials from journaled sealings, block by block: the region's counterpart of ``publish``.

Sums are taken in float64. In codec ``float64`` (of soft labels ``prob64``) they travel as they are. Any other codec leaves
something out; that is carried into the region's next partial (error feedback: Seide et al., 1-Bit Stochastic Gradient Descent,
2014; Karimireddy et al., 2019).
A residual is kept for each leaf tier t, as a mean: with S the sum of the tier's groups, W their samples and D what was sent,

    D = decode(encode(S + W r)),    next r = (S + W r - D) / W

so that it counts in the next partial as much as that one's samples do. It goes with the tier's newest group. A partial that will
not be merged gives back what it took: r = r - (next r - r), whatever was sealed after it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import google_crc32c
import torch
from torch import Tensor

from fleetddp.common.errors import StorageError
from fleetddp.common.events import Conclusion, Sealing, Term
from fleetddp.common.files import File
from fleetddp.common.layout import Layout
from fleetddp.common.merge import Operand, weighted_sum
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.publish import accepted_operand, buffer_blocks
from fleetddp.common.region_journal import RegionJournal, Residual, change_name, partial_name, residual_name
from fleetddp.common.stored import storage
from fleetddp.common.update import Interval, Slice, Tier, Update, UpdateId
from fleetddp.common.version_file import BLOCK_ELEMENTS, blocks

EXACT = ("float64", "prob64")  # before the colon of a codec's spec


class Sealer:
    """Makes the partials of one region durable, and undoes what they did to the residual. For one thread.

    Memory is a few blocks, whatever the model and the number of updates. The same sealing, payloads and residual always give
    the same bytes.
    """

    def __init__(self, journal: RegionJournal) -> None:
        self._journal = journal

    def seal(self, sealing: Sealing) -> Update:
        """Make the partial that ``sealing`` describes; from its journaling on the bytes are fixed."""
        journal = self._journal
        journal.decide_seal(sealing)
        made = journal.made(sealing.update_id)
        if made is not None:
            return made
        layout = journal.layout()
        if layout is None:
            raise StorageError("a partial is to be sealed, and there is no layout yet")
        with contextlib.ExitStack() as files, storage(f"cannot write {sealing.update_id}"):
            making = _Making(sealing, layout, journal, files)
            update = making.run()
            journal.seal(update, making.written, making.residual_after)
        return update

    def conclude(self, conclusion: Conclusion) -> None:
        """Make the end of updates durable."""
        partial, journal = conclusion.partial, self._journal
        residual = journal.residual()
        chain = None if partial is None else journal.chain_of(partial)
        undo = conclusion.undo and partial is not None and chain is not None
        if not undo or residual is None or residual.chain != chain:  # else what it did to the residual is gone already
            journal.conclude(conclusion, (), None)
            return
        assert partial is not None
        after = Residual(residual_name(partial, undone=True), residual.tiers, residual.version, residual.chain)
        with contextlib.ExitStack() as files, storage(f"cannot undo {partial}"):
            now, change = (
                files.enter_context(contextlib.closing(journal.sealed_file(n))) for n in (residual.name, change_name(partial))
            )
            out = files.enter_context(contextlib.closing(journal.begin_sealed(after.name)))
            for start, stop in blocks(0, now.size() // 4):
                # the change may lack tiers that came later: they follow, so that what it has lies where it lies in the residual
                both = min(stop, change.size() // 4)
                values = _read(now, start, stop)
                if both > start:
                    values[: both - start].sub_(_read(change, start, both))
                out.pwrite(bytes_of(values.view(torch.uint8)), 4 * start)
            journal.conclude(conclusion, (out,), after)


@dataclass(slots=True)
class _Carried:
    """One tier's part of the residual while a partial is made."""

    samples: float  # of all its groups
    newest: int  # the group that carries what was left out before
    row: int  # in the files


@dataclass(slots=True)
class _Making:
    """One partial that is being written."""

    sealing: Sealing
    layout: Layout
    journal: RegionJournal
    files: contextlib.ExitStack
    written: list[File] = field(default_factory=list)
    residual_after: Residual | None = None
    _before: Residual | None = None
    _old: File | None = None
    _next: File | None = None
    _change: File | None = None
    _crc: int = 0
    _at: int = 0
    _squared: float = 0.0

    def run(self) -> Update:
        """Write all files; returns what they hold."""
        header, layout = self.sealing.header, self.layout
        geometry = Geometry.of_update(header, layout)
        payload = self._create(partial_name(header.update_id))
        exact = header.codec.split(":")[0] in EXACT
        tiers = {} if exact else self._carry()
        operands = {i: accepted_operand(self.journal, self.journal.update(i), layout) for i in self.sealing.ids}
        size = min(BLOCK_ELEMENTS, layout.elements)
        out, product = (torch.empty(size, dtype=torch.float64) for _ in range(2))
        for index, terms in enumerate(self.sealing.terms):
            row = index * layout.elements
            tier = tiers.get(header.groups[index].tier)
            for interval in [*blocks(0, layout.parameters, geometry.codec.block), *buffer_blocks(layout)]:
                n = interval[1] - interval[0]
                total = out[:n]
                weighted_sum(_of(operands), terms, layout, interval, out=total, product=product[:n])
                parameters = interval[0] < layout.parameters
                if tier is not None and parameters and index == tier.newest:
                    total.add_(self._left(tier, interval).double().mul_(tier.samples))
                place = (row + interval[0], row + interval[1])
                data = geometry.encode(total if exact else total.float(), place)
                self._append(payload, data)
                if parameters:
                    decoded = total if exact else geometry.decode(data, place)
                    self._squared += float(torch.dot(decoded.double(), decoded.double()))
                    if tier is not None:
                        self._leave(tier, interval, total.sub_(decoded).div_(tier.samples))
        self._finish(tiers)
        samples = math.fsum(group.samples for group in header.groups)
        part = Slice(intervals=geometry.required(), samples=samples, digest=self._crc)
        return Update(header=header, samples=samples, squared_norm=self._squared, payload_bytes=self._at, slices=(part,))

    # ---- the residual -------------------------------------------------------------------------------------------------------

    def _carry(self) -> dict[Tier, _Carried]:
        """Which group carries what was left out, for each tier that is in this partial."""
        sealing, groups = self.sealing, self.sealing.header.groups
        before = self.journal.residual()
        chain = 0 if before is None else before.chain
        if before is not None and before.version < sealing.residuals_from:
            before, chain = None, chain + 1
        old = () if before is None else before.tiers
        tiers = (*old, *dict.fromkeys(g.tier for g in groups if g.tier not in old))
        self._before = before
        if before is not None:
            self._old = self.files.enter_context(contextlib.closing(self.journal.sealed_file(before.name)))
        name = residual_name(sealing.update_id)
        self._next, self._change = self._create(name), self._create(change_name(sealing.update_id))
        self.residual_after = Residual(name, tiers, sealing.header.base_version, chain)
        carried = {}
        for tier in dict.fromkeys(g.tier for g in groups):
            mine = [i for i, g in enumerate(groups) if g.tier is tier]
            newest = max(mine, key=lambda i: groups[i].base_version)
            carried[tier] = _Carried(math.fsum(groups[i].samples for i in mine), newest, tiers.index(tier))
        zeros = torch.zeros(min(BLOCK_ELEMENTS, len(tiers) * self.layout.parameters))
        for start, stop in blocks(0, len(tiers) * self.layout.parameters):
            self._next.pwrite(bytes_of(zeros[: stop - start].view(torch.uint8)), 4 * start)
        return carried

    def _left(self, tier: _Carried, interval: Interval) -> Tensor:
        """What partials before left out of a block."""
        start, stop = (tier.row * self.layout.parameters + n for n in interval)
        if self._old is None or 4 * stop > self._old.size():
            return torch.zeros(stop - start)
        return _read(self._old, start, stop)

    def _leave(self, tier: _Carried, interval: Interval, lost: Tensor) -> None:
        """This group leaves something out of a block."""
        assert self._next is not None
        start, stop = (tier.row * self.layout.parameters + n for n in interval)
        self._next.pwrite(bytes_of(_read(self._next, start, stop).add_(lost).view(torch.uint8)), 4 * start)

    def _finish(self, tiers: dict[Tier, _Carried]) -> None:
        """Tiers that are not in this partial keep their residual; the change is what it did to the others."""
        after = self.residual_after
        if after is None:
            return
        assert self._next is not None
        assert self._change is not None
        here = {carried.row for carried in tiers.values()}
        for row in range(len(after.tiers)):
            for interval in blocks(0, self.layout.parameters):
                start, stop = (row * self.layout.parameters + n for n in interval)
                old = self._left(_Carried(0.0, 0, row), interval)
                if row not in here:
                    self._next.pwrite(bytes_of(old.view(torch.uint8)), 4 * start)
                change = _read(self._next, start, stop).sub_(old)
                self._change.pwrite(bytes_of(change.view(torch.uint8)), 4 * start)

    # ---- files --------------------------------------------------------------------------------------------------------------

    def _create(self, name: str) -> File:
        file = self.files.enter_context(contextlib.closing(self.journal.begin_sealed(name)))
        self.written.append(file)
        return file

    def _append(self, file: File, data: Tensor) -> None:
        view = bytes_of(data)
        self._crc = google_crc32c.extend(self._crc, data.numpy())
        file.pwrite(view, self._at)
        self._at += len(view)
        file.start_flush()


def _of(operands: Mapping[UpdateId, Operand]) -> Callable[[Term], Operand]:
    return lambda term: operands[term.update_id]


def _read(file: File, start: int, stop: int) -> Tensor:
    """float32 elements [start, stop) of a file of nothing else."""
    return torch.frombuffer(bytearray(file.pread(4 * (stop - start), 4 * start)), dtype=torch.float32)
