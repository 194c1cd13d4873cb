"""Measures what the fleet publishes: pulls each version, as any member does, and evaluates it on the held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetddp.common.clock import SystemClock
from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import FleetError
from fleetddp.common.layout import Layout
from fleetddp.common.transport import Parent
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.transport.uplink import Uplink
from fleetddp.common.transport.weights import fetch
from fleetddp.edge.tasks.digits import Digits


@dataclass(frozen=True, slots=True)
class Point:
    """One version, measured."""

    version: int
    metrics: Mapping[str, float]

    @property
    def accuracy(self) -> float:
        """Over all classes."""
        return self.metrics["accuracy"]


class Observer:
    """What was published so far, measured; no member of the fleet, so that no window waits for it."""

    def __init__(self, config: FleetConfig, task: Digits) -> None:
        self.points: list[Point] = []
        self.status: dict[str, Any] = {}  # the last one heard
        self._config, self._task = config, task
        self._model = task.model()
        self._layout = Layout.from_module(self._model)
        self._parent = Uplink(config.coordinator.address, config.security, node="observer", run=config.run)

    @property
    def best(self) -> Point:
        """The version of the highest accuracy, the first of equals."""
        return max(self.points, key=lambda point: point.accuracy)

    def look(self) -> bool:
        """Ask for the status and measure what is new; whether the coordinator answered."""
        try:
            self.status = self._parent.status()
            self._measure(self._parent, self.status["version"])
        except FleetError:
            return False
        return True

    def look_into_journal(self) -> None:
        """Measure what was published after the last look; the coordinator must have ended."""
        fleet = MemoryFleet(self._config, SystemClock())
        try:
            parent = fleet.parent()
            self._measure(parent, parent.status()["version"])
        finally:
            fleet.stop()

    def close(self) -> None:
        """Drop the connection."""
        self._parent.close()

    def _measure(self, parent: Parent, newest: int) -> None:
        for number in range(len(self.points), newest + 1):
            self._layout.write_(self._model, fetch(parent, number, self._layout))
            self.points.append(Point(number, self._task.evaluate(self._model)))
