"""Making versions: from the first weights, and from a journaled decision.

What is published is what a version *is*: members compute their deltas against the published, possibly rounded, weights. The exact
weights stay in the version file, and the next outer step starts from them, so that a rounding is made up for in the next version
and never adds up (error feedback at the publisher).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fleetddp.common import codecs
from fleetddp.common.config import FleetConfig
from fleetddp.common.consensus import Consensus
from fleetddp.common.errors import ConfigError, Refused, StorageError
from fleetddp.common.events import Decision, Term
from fleetddp.common.files import File, OsFiles
from fleetddp.common.fragments import cut
from fleetddp.common.journal import Journal
from fleetddp.common.layout import Buffers, Layout
from fleetddp.common.merge import Operand, weighted_sum
from fleetddp.common.outer import OuterOptimizer
from fleetddp.common.payload import Geometry
from fleetddp.common.stored import storage
from fleetddp.common.update import Interval, Update, Version
from fleetddp.common.version_file import BLOCK_ELEMENTS, VersionFile, VersionWriter, blocks

Weights = Callable[[Interval, Tensor], Tensor]  # (elements, out f32[n]) -> out, holding those elements


class Publisher:
    """Writes versions into a journal, as the fleet file's ``publish`` and ``outer`` say.

    Raises ``ConfigError`` for an outer optimizer that torch refuses. Memory is a few blocks of ``BLOCK_ELEMENTS``, whatever the
    model and the number of updates. The same decision and payloads always give the same bytes.
    """

    def __init__(self, journal: Journal, config: FleetConfig) -> None:
        self._journal = journal
        self._labels = config.kind == "logits"
        proxy = config.proxy
        self._codec = codecs.get(f"prob16:{proxy.classes}" if proxy and config.publish == "prob16" else config.publish)
        self._outer = OuterOptimizer(config.outer)
        self._fragments = config.site.fragments

    def found(self, update: Update, at: float) -> Version:
        """Make version 0 from an accepted ``init``."""
        layout = Layout.from_json(update.header.layout_spec)
        first = self._operand(update, layout)
        return self.found_weights(layout, lambda interval, out: out.copy_(first.values(0, interval)), at)

    def found_file(self, path: Path, at: float) -> Version:
        """Make version 0 from a file that ``save_init`` wrote, or from a version file; ``ConfigError`` if it is neither."""
        try:
            file = OsFiles().open(path)
        except OSError as error:
            raise ConfigError(f"start.file: cannot read {path}: {error.strerror}") from error
        with contextlib.closing(file):
            try:
                source = VersionFile(file)
            except StorageError as error:
                hint = "fleetddp.common.publish.save_init(module, path) writes one"
                raise ConfigError(f"start.file: {path} is {error}; {hint}") from error
            if file.size() < source.size:
                raise ConfigError(f"start.file: {path} is cut short: {file.size()} bytes of {source.size}")
            return self.found_weights(source.head.layout, source.weights, at)

    def found_labels(self, layout: Layout, at: float) -> Version:
        """Make version 0 of a track of soft labels: nobody has said anything yet."""
        return self.found_weights(layout, lambda interval, out: out.zero_(), at)

    def found_weights(self, layout: Layout, weights: Weights, at: float) -> Version:
        """Make version 0 from these weights."""
        with self._draft(0) as file:
            changed = (0,) * self._fragments if self._fragments > 1 else ()
            cut(layout, self._fragments)  # refused here, where the layout is known, or never
            writer = VersionWriter(file, layout, self._codec, changed=changed)
            version = Version(
                number=0,
                changed=changed,
                layout=layout.fingerprint,
                codec=self._codec.spec,
                payload_bytes=writer.payload_bytes,
                digest=_copy(weights, writer, layout),
                published_at=at,
            )
            self._journal.publish(version, file, payload_start=writer.payload_start, layout=layout, decision=None)
        return version

    def merge(self, decision: Decision) -> Version:
        """Make the version that ``decision`` describes; from its journaling on the bytes are fixed."""
        self._journal.decide(decision)
        with self._journal.read_version(decision.version - 1) as reader:
            previous = VersionFile(reader)
            layout = previous.head.layout
            if self._labels:
                return self._consensus(Consensus(previous, decision, self._operands(decision, layout)), decision, layout)
            step = _Step(previous, self._outer, decision, self._operands(decision, layout))
            with self._draft(decision.version) as file:
                changed = () if decision.changes is None else decision.changes.last
                writer = VersionWriter(
                    file,
                    layout,
                    self._codec,
                    optimizer=self._outer.name,
                    slots=self._outer.slots,
                    scalars=step.names,
                    changed=changed,
                    optimizer_since=step.since,
                )
                for fragment, interval in step.blocks():
                    if interval[0] < layout.parameters:
                        writer.parameters(interval, *step.parameters(fragment, interval))
                    else:
                        writer.buffers(step.buffers(fragment, interval))
                return self._finish(writer, file, decision, layout, step.scalars)

    def _consensus(self, consensus: Consensus, decision: Decision, layout: Layout) -> Version:
        with self._draft(decision.version) as file:
            writer = VersionWriter(file, layout, self._codec)
            for interval in consensus.blocks():
                writer.parameters(interval, consensus.rows(interval), {})
            return self._finish(writer, file, decision, layout, {})

    def _finish(
        self, writer: VersionWriter, file: File, decision: Decision, layout: Layout, scalars: Mapping[str, float]
    ) -> Version:
        version = Version(
            number=decision.version,
            changed=() if decision.changes is None else decision.changes.last,
            layout=layout.fingerprint,
            codec=self._codec.spec,
            payload_bytes=writer.payload_bytes,
            digest=writer.finish(number=decision.version, updates=len(decision.leaf_ids), scalars=scalars),
            published_at=decision.at,
            updates=len(decision.leaf_ids),
            metrics=decision.metrics,
        )
        self._journal.publish(version, file, payload_start=writer.payload_start, layout=layout, decision=decision)
        return version

    @contextlib.contextmanager
    def _draft(self, number: int) -> Iterator[File]:
        file = self._journal.begin_version(number)
        with contextlib.closing(file), storage(f"cannot write version {number}"):
            try:
                yield file
            except Refused as error:
                diverged = "training diverged; set limits.max_norm, or lower the learning rate in outer.options"
                cure = diverged if number else "the fleet needs another model to start from"
                raise ConfigError(f"version {number} would hold weights that are not finite ({error.message}): {cure}") from error

    def _operands(self, decision: Decision, layout: Layout) -> Callable[[Term], Operand]:
        operands = {update_id: self._operand(self._journal.update(update_id), layout) for update_id in decision.ids}
        return lambda term: operands[term.update_id]

    def _operand(self, update: Update, layout: Layout) -> Operand:
        return accepted_operand(self._journal, update, layout)


def accepted_operand(journal: Journal, update: Update, layout: Layout) -> Operand:
    """The decoded rows of an accepted update."""

    # Opened for each block anew: a window may hold more updates than a process may have open files.
    def read(start: int, stop: int) -> bytes:
        with journal.payload(update.update_id) as payload:
            return payload.read(start, stop)

    return Operand(Geometry.of_update(update.header, layout), read)


class _Step:
    """One outer step, block by block, in buffers that are used again for each block.

    Each fragment is stepped by itself, with scalars of its own; one that no update covers stays as it is, with its state.
    """

    def __init__(
        self, previous: VersionFile, outer: OuterOptimizer, decision: Decision, operand: Callable[[Term], Operand]
    ) -> None:
        self._previous, self._outer, self._operand = previous, outer, operand
        head = previous.head
        self._layout = head.layout
        self._count = 1 if decision.changes is None else len(decision.changes.at)
        self._terms = [[t for t in decision.terms if t.fragment == index] for index in range(self._count)]
        self.names = [self._name(scalar, index) for index in range(self._count) for scalar in outer.scalars]
        # Another optimizer than the last one starts afresh, as do other options that keep other state.
        kept = (head.optimizer, set(head.slots), set(head.scalars)) == (outer.name, set(outer.slots), set(self.names))
        self.since = head.optimizer_since if kept else decision.version  # the first version that this optimizer made
        self._resumed = [kept and (not head.changed or at >= self.since) for at in head.changed or (0,)]
        self.scalars = {name: head.scalars.get(name, 0.0) if kept else 0.0 for name in self.names}
        size = min(BLOCK_ELEMENTS, self._layout.elements)
        self._sum, self._product = (torch.empty(size, dtype=torch.float64) for _ in range(2))
        self._weights, self._merged = (torch.empty(size, dtype=torch.float32) for _ in range(2))
        self._state = {slot: torch.empty(size, dtype=torch.float32) for slot in outer.slots}

    def blocks(self) -> Iterator[tuple[int, Interval]]:
        """All elements in order, each block with the fragment that it lies in."""
        for index, intervals in enumerate(cut(self._layout, self._count)):
            for interval in intervals:
                for block in blocks(*interval):
                    yield index, block

    def parameters(self, fragment: int, interval: Interval) -> tuple[Tensor, dict[str, Tensor]]:
        """The next exact weights of a block, and the optimizer's state vectors."""
        n = interval[1] - interval[0]
        weights = self._previous.weights(interval, self._weights[:n])
        state = {slot: vector[:n] for slot, vector in self._state.items()}
        resumed = self._resumed[fragment]
        for slot, vector in state.items():
            if resumed:
                self._previous.slot(slot, interval, vector)
            else:
                vector.zero_()
        if self._terms[fragment]:
            names = {scalar: self._name(scalar, fragment) for scalar in self._outer.scalars}
            before = {scalar: self._previous.head.scalars[name] for scalar, name in names.items()} if resumed else None
            after = self._outer.step(weights, self._mean(fragment, interval), state, before)
            self.scalars |= {names[scalar]: value for scalar, value in after.items()}
        return weights, state

    def buffers(self, fragment: int, interval: Interval) -> Tensor:
        """The next buffers of a block: the mean of those that arrived, else the ones before."""
        if any(term.buffer_coefficient for term in self._terms[fragment]):
            return self._mean(fragment, interval)
        return self._previous.weights(interval, self._weights[: interval[1] - interval[0]])

    def _mean(self, fragment: int, interval: Interval) -> Tensor:
        n = interval[1] - interval[0]
        terms = self._terms[fragment]
        weighted_sum(self._operand, terms, self._layout, interval, out=self._sum[:n], product=self._product[:n])
        return self._merged[:n].copy_(self._sum[:n])

    def _name(self, scalar: str, fragment: int) -> str:
        return scalar if self._count == 1 else f"{scalar}.{fragment}"


def save_init(module: nn.Module, path: str | Path, *, buffers: Buffers = "average", include: Sequence[str] = ()) -> None:
    """Write a module's weights as a file for ``start.file``, readable by any safetensors reader.

    ``buffers`` and ``include`` must be what the members use. Raises ``ConfigError`` if a weight is not finite, ``StorageError``
    if the disk refuses.
    """
    layout = Layout.from_module(module, buffers=buffers, include=include)
    with storage(f"cannot write {path}"), contextlib.closing(OsFiles().create(Path(path))) as file:
        writer = VersionWriter(file, layout, codecs.get("float32"))
        try:
            _copy(lambda interval, out: layout.read(module, out, interval), writer, layout)
        except Refused as error:
            raise ConfigError(f"a fleet cannot start from this module: {error.message}") from error
        file.fsync()


def _copy(weights: Weights, writer: VersionWriter, layout: Layout) -> int:
    """Write version 0; returns the payload's CRC32C."""
    block = torch.empty(min(BLOCK_ELEMENTS, layout.elements), dtype=torch.float32)
    for start, stop in blocks(0, layout.parameters, writer.block):
        writer.parameters((start, stop), weights((start, stop), block[: stop - start]), {})
    for start, stop in buffer_blocks(layout):
        writer.buffers(weights((start, stop), block[: stop - start]))
    return writer.finish(number=0, updates=0, scalars={})


def buffer_blocks(layout: Layout) -> Iterator[Interval]:
    """The buffers, cut as ``blocks`` does."""
    return blocks(layout.buffer_start, layout.buffer_start + layout.buffer_elements)
