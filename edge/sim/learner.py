"""``train`` mode: what members do with weights when they learn for real.

A unit of work is trained when somebody first needs what it led to; then all units that have begun by that time are trained
together, so that an engine can spread them over its workers. What comes of a unit does not depend on when that is.

Where a simulated member differs from a real one: a site's optimizer starts anew at each boundary, as an edge node's does at each
version; and the order of a member's samples is drawn anew for each unit, instead of going through epoch after epoch.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common.checksum import checksum
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of, tensor_over
from fleetddp.common.task import Task
from fleetddp.common.update import Kind, Version
from fleetddp.edge.sim.batches import Job
from fleetddp.edge.sim.learning import Parcel, Unit, Weights
from fleetddp.edge.sim.training import Trained


class Trainer(Protocol):
    """An engine (``training.py``), or ``Inline``."""

    layout: Layout

    def put(self, version: int, weights: Tensor) -> None:
        """Hold these weights under this number."""
        ...

    def drop(self, version: int) -> None:
        """Give them up."""
        ...

    def train(self, jobs: Iterable[Job]) -> Iterable[Trained]:
        """What they came to, in any order."""
        ...


class _Held:
    """Weights that somebody holds; the trainer knows them by ``number`` until nobody does."""

    def __init__(self, values: Tensor, number: int, trainer: Trainer) -> None:
        self.values = values
        self.number = number
        trainer.put(number, values)
        weakref.finalize(self, trainer.drop, number).atexit = False


class _Promise:
    """The weights that a unit of work leads to, once it is trained."""

    __slots__ = ("__weakref__", "held", "member", "result", "start", "unit")

    def __init__(self, member: str, start: _Held | _Promise, unit: Unit) -> None:
        self.member, self.start, self.unit = member, start, unit
        self.result: Trained | None = None
        self.held: _Held | None = None  # where it led to, if somebody trains on from there


class RealLearning:
    """A ``Learning`` over one task. ``batch_sizes``: by member."""

    def __init__(self, task: Task, trainer: Trainer, batch_sizes: Mapping[str, int], seed: int) -> None:
        self.layout = trainer.layout
        self._task, self._trainer, self._batch_sizes, self._seed = task, trainer, batch_sizes, seed
        self._model = task.model()  # to evaluate, and for the first weights
        self.first = self.layout.read(self._model)  # weights
        self._numbers = 0
        self._promised = 0
        # Whoever stops in the middle of a unit forgets its promise, which is then never trained.
        self._open: weakref.WeakValueDictionary[int, _Promise] = weakref.WeakValueDictionary()
        self._versions: weakref.WeakValueDictionary[tuple[int, int], _Held] = weakref.WeakValueDictionary()
        self._measured: tuple[int, Mapping[str, float]] = (-1, {})

    # ---- see ``Learning`` -----------------------------------------------------------------------------------------------------

    def adopt(self, version: Version, payload: bytes) -> Weights:
        """See ``Learning``. Decoded once for all who adopt it."""
        key = version.number, version.digest
        held = self._versions.get(key)
        if held is None:
            held = self._versions[key] = self._hold(self._decode(version, payload))
        return held

    def train(self, member: str, start: Weights, unit: Unit) -> Weights:
        """See ``Learning``."""
        promise = _Promise(member, start, unit)
        self._open[self._promised] = promise
        self._promised += 1
        return promise

    def encode(self, member: str, kind: Kind, codec: str, start: Weights, end: Weights, residual: Weights) -> Parcel:
        """See ``Learning``."""
        layout, metrics = self.layout, dict[str, float]()
        if kind is Kind.INIT:
            meant = self.first
        else:
            self._keep(end)
            meant, metrics = _since(end, start, layout), _metrics(end, start)
        coder = codecs.get(codec)
        payload, left = coder.encode_with_feedback(meant[: layout.parameters], residual)
        geometry = Geometry(layout, coder)
        buffers = [geometry.encode(meant[a:b], (a, b)) for a, b in geometry.required() if a >= layout.parameters]
        encoded = bytes_of(torch.cat([payload, *buffers]) if buffers else payload)
        return Parcel(len(encoded), encoded, checksum(encoded), metrics, left)

    def evaluate(self, version: Version, payload: bytes) -> Mapping[str, float]:
        """See ``Learning``."""
        if self._measured[0] != version.number:
            self.layout.write_(self._model, self._decode(version, payload))
            self._measured = version.number, self._task.evaluate(self._model)
        return self._measured[1]

    # ---- training -------------------------------------------------------------------------------------------------------------

    def _keep(self, promise: _Promise) -> None:
        """Train all that was promised, first what others go on from."""
        while promise.result is None:
            ready = [p for p in self._open.values() if isinstance(p.start, _Held) or p.start.result is not None]
            jobs = {self._job(p): p for p in ready}
            for result in self._trainer.train(jobs):
                jobs[result.job].result = result
            for number in [n for n, p in self._open.items() if p.result is not None]:
                del self._open[number]

    def _job(self, promise: _Promise) -> Job:
        unit, start = promise.unit, promise.start
        if isinstance(start, _Promise):
            if start.held is None:
                start.held = self._hold(_values(start, self.layout))
            start = start.held
        return Job(
            promise.member,
            start.number,
            steps=unit.steps,
            batch_size=self._batch_sizes[promise.member],
            seed=zlib.crc32(f"{self._seed}/{unit.number}".encode()),
            samples=round(unit.samples),
        )

    def _hold(self, values: Tensor) -> _Held:
        self._numbers += 1
        return _Held(values, self._numbers, self._trainer)

    def _decode(self, version: Version, payload: bytes) -> Tensor:
        geometry = Geometry(self.layout, codecs.get(version.codec))
        weights = torch.zeros(self.layout.elements)
        for start, stop in geometry.required():
            first, last = geometry.byte_range((start, stop))
            weights[start:stop] = geometry.decode(tensor_over(memoryview(payload)[first:last]), (start, stop))
        return weights


def _values(weights: _Held | _Promise, layout: Layout) -> Tensor:
    """float32[elements]; a promise must be kept."""
    if isinstance(weights, _Held):
        return weights.values
    assert weights.result is not None
    values = weights.result.delta.clone()
    learnt = values[: layout.parameters]
    torch.sub(_values(weights.start, layout)[: layout.parameters], learnt, out=learnt)
    return values


def _since(end: _Promise, start: _Held | _Promise, layout: Layout) -> Tensor:
    """What an update from ``start`` to ``end`` carries: differences of parameters, values of buffers."""
    assert end.result is not None
    if end.result.diverged:
        raise Refused(Reason.NOT_FINITE, f"{end.member}: training diverged")
    if end.start is start:
        return end.result.delta
    carried = _values(end, layout)
    learnt = carried[: layout.parameters]
    torch.sub(_values(start, layout)[: layout.parameters], learnt, out=learnt)
    return carried


def _metrics(end: _Promise, start: _Held | _Promise) -> dict[str, float]:
    """Means over the samples of the units from ``start`` to ``end``."""
    sums: dict[str, float] = {}
    samples = 0.0
    unit: _Held | _Promise = end
    while isinstance(unit, _Promise) and unit is not start:
        assert unit.result is not None
        samples += unit.result.samples
        for name, value in unit.result.metrics.items():
            sums[name] = sums.get(name, 0.0) + value * unit.result.samples
        unit = unit.start
    return {name: total / samples for name, total in sums.items()}
