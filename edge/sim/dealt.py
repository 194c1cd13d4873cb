"""A task whose data is dealt out to simulated devices, as the scenario's populations say (``partition``).

A population's pool is what the task gives to a member of the population's own name; each of its devices gets its part of that.
With ``kind: own`` nothing is dealt: the task is asked for each device by the device's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset, TensorDataset

from fleetddp.common.errors import ConfigError
from fleetddp.common.task import Task, part
from fleetddp.edge.sim import partition
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.scenario import Dirichlet, Drawn, Iid, Natural, Own, PopulationConfig, Scenario, Shards


class DealtTask:
    """The scenario's task, with each device's data. Raises ``ConfigError`` where the data cannot be dealt so."""

    def __init__(self, task: Task, scenario: Scenario, draws: Draws) -> None:
        self._task = task
        self._data: dict[str, Dataset[Any]] = {}
        for name, section in scenario.populations.items():
            if not isinstance(section.partition, Own):
                pool = task.data(name, 0, 1)
                rows = _deal(name, section, pool, draws)
                self._data |= {f"{name}-{k}": Subset(pool, torch.as_tensor(own)) for k, own in enumerate(rows)}  # type: ignore[arg-type]

    def model(self) -> nn.Module:
        """See ``Task``."""
        return self._task.model()

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        """See ``Task``."""
        if member in self._data:
            return part(self._data[member], index, count)
        return self._task.data(member, index, count)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """See ``Task``."""
        return self._task.loss(model, batch)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """See ``Task``."""
        return self._task.optimizer(parameters)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """See ``Task``."""
        return self._task.evaluate(model)


def _deal(name: str, section: PopulationConfig, pool: Dataset[Any], draws: Draws) -> list[partition.Indices]:
    """Rows of the pool, by device."""
    how, count, rng = section.partition, section.count, draws.generator("partition", name)
    try:
        samples = len(pool)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(
            f"populations.{name}.partition: the task's data for {name!r} has no length, so it cannot be dealt"
        ) from None
    if isinstance(how, Iid):
        return partition.iid(samples, count, rng)
    if isinstance(how, Natural):
        return partition.natural(_column(name, pool, "ids"), count)
    labels = _column(name, pool, "targets")
    if isinstance(how, Shards):
        return partition.shards(labels, count, rng, each=how.each)
    if isinstance(how, Dirichlet):
        return partition.dirichlet(labels, count, rng, alpha=how.alpha)
    assert isinstance(how, Drawn)
    return partition.drawn(labels, count, rng, alpha=how.alpha, each=round(section.samples))


def _column(name: str, pool: Dataset[Any], attribute: str) -> Any:
    """One label or id for each sample: the pool's attribute of that name, or for labels a ``TensorDataset``'s last column."""
    found = getattr(pool, attribute, None)
    if found is None and attribute == "targets" and isinstance(pool, TensorDataset) and len(pool.tensors) > 1:
        found = pool.tensors[-1]
    if found is None:
        raise ConfigError(f"populations.{name}.partition: the task's data for {name!r} has no attribute {attribute!r}")
    return np.asarray(found)
