"""What members do with weights: nothing in ``timing`` mode (``NoLearning``); they learn in ``train`` mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from fleetddp.common.layout import Layout
from fleetddp.common.update import Kind, Version

Weights = Any  # weights or a codec's residual, of whatever type the ``Learning`` at hand gives; only it looks inside
NO_BYTES = memoryview(b"")


class Unit(NamedTuple):
    """One unit of local work."""

    number: int  # of this member's units, from 0: with its name it says which data and draws
    samples: float
    steps: int
    seconds: float  # what it takes on the device


class Parcel(NamedTuple):
    """An update, ready to be sent."""

    size: int  # bytes of ``payload``, or what they would be
    payload: memoryview
    digest: int
    metrics: Mapping[str, float]
    residual: Weights  # what the codec could not say


class Learning(Protocol):
    """Weights pass through here as values that members only hold: the version they pulled, what training led to.

    ``train`` is called when training begins and may return a promise: nothing looks into it before ``encode``. An engine can so
    gather all units that have begun by then and train them together.
    """

    layout: Layout

    def adopt(self, version: Version, payload: bytes) -> Weights:
        """The weights of a version that was pulled."""
        ...

    def train(self, member: str, start: Weights, unit: Unit) -> Weights:
        """The weights that a unit of work leads to."""
        ...

    def encode(self, member: str, kind: Kind, codec: str, start: Weights, end: Weights, residual: Weights) -> Parcel:
        """The update that leads from ``start`` to ``end`` (of an ``init``: ``end``), on top of the residual of the one before.

        Raises ``Refused(NOT_FINITE)`` if training diverged.
        """
        ...

    def evaluate(self, version: Version, payload: bytes) -> Mapping[str, float]:
        """Metrics of a version, by name; empty where nothing is measured."""
        ...
