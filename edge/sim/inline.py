"""A training engine without processes of its own, for small fleets: nothing has to start, and nothing runs side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fleetddp.common.task import Task
from fleetddp.edge.sim.batches import Job
from fleetddp.edge.sim.single import Buffers, Single
from fleetddp.edge.sim.training import Trained


class Inline:
    """Trains in the caller's process, one job after another, to the same bits as ``Engine`` with ``path="single"``."""

    def __init__(self, task: Task, *, buffers: Buffers = "average") -> None:
        self._single = Single(task, buffers)
        self._weights: dict[int, Tensor] = {}
        self.layout = self._single.layout

    def put(self, version: int, weights: Tensor) -> None:
        """See ``Engine``."""
        self._weights[version] = weights

    def drop(self, version: int) -> None:
        """See ``Engine``."""
        self._weights.pop(version, None)

    @property
    def held(self) -> list[int]:
        """See ``Engine``."""
        return sorted(self._weights)

    def train(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        """See ``Engine``."""
        for job in jobs:
            delta = torch.zeros(1, self.layout.elements)
            with torch.random.fork_rng(devices=[]):  # the caller's own draws are none of the fleet's
                outcome = self._single.train([job], self._weights.__getitem__, delta)[0]
            metrics = {"train_loss": outcome.loss} if math.isfinite(outcome.loss) else {}
            yield Trained(job, delta[0], outcome.samples, outcome.steps, metrics, not outcome.finite)

    def close(self) -> None:
        """Nothing to end."""
