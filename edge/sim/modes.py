"""What ``timing`` and ``train`` mode differ in: who learns, what the root keeps, how much data a device has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from fleetddp.common.errors import ConfigError
from fleetddp.common.layout import Layout
from fleetddp.common.task import Task, load
from fleetddp.common.update import Tier
from fleetddp.edge.sim.dealt import DealtTask
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.durable import DurableStore
from fleetddp.edge.sim.inline import Inline
from fleetddp.edge.sim.learner import RealLearning
from fleetddp.edge.sim.learning import Learning
from fleetddp.edge.sim.root import Store
from fleetddp.edge.sim.scenario import Scenario
from fleetddp.edge.sim.timing import FactsStore, NoLearning
from fleetddp.edge.sim.training import Engine


@dataclass(frozen=True, slots=True)
class Mode:
    """One of the two."""

    learning: Learning
    store: Store
    samples: Callable[[str], float | None]  # that a device has; None: as many as its population says
    close: Callable[[], None]  # ends what was started for it


def timing(scenario: Scenario) -> Mode:
    """Nobody learns anything."""
    model = scenario.model
    layout = Layout.of([("weights", (model.parameters,))], [("statistics", (model.buffers,))] if model.buffers else [])
    store = FactsStore(scenario.fleet)
    if not _sites(scenario):
        store.found(layout, 0.0)  # else the first site brings the first weights
    return Mode(NoLearning(layout), store, lambda device: None, lambda: None)


def train(scenario: Scenario, draws: Draws, task: Task | None) -> Mode:
    """Everybody does. ``task``: instead of the fleet file's."""
    config, trainer = scenario.fleet, scenario.trainer
    if task is None:
        if config.task is None:
            raise ConfigError("mode: train needs a task: give fleet.task.target")
        task = load(config.task)
    if config.edge.update != "delta":
        raise ConfigError(f"mode: train simulates fleet.edge.update: delta, not {config.edge.update}")
    dealt = DealtTask(task, scenario, draws)
    engine: Engine | Inline
    if trainer.workers == 0:
        if trainer.path != "single":
            raise ConfigError(f"trainer.path: {trainer.path} needs worker processes; trainer.workers is 0")
        engine = Inline(dealt, buffers=config.edge.buffers)
    else:
        path = None if trainer.path == "auto" else trainer.path
        engine = Engine(dealt, workers=trainer.workers, buffers=config.edge.buffers, path=path)
    batches = {name: _batch(scenario, section.tier, section.samples) for name, _, section in scenario.devices}
    learning = RealLearning(dealt, engine, batches, scenario.seed)
    store = DurableStore(config)
    if not _sites(scenario):
        store.found(engine.layout, lambda interval, out: out.copy_(learning.first[slice(*interval)]), 0.0)
    return Mode(learning, store, lambda device: _length(dealt.data(device, 0, 1)), engine.close)


def _batch(scenario: Scenario, tier: Tier, samples: float) -> int:
    return max(1, round(samples)) if tier is Tier.SITE else scenario.fleet.edge.batch_size


def _sites(scenario: Scenario) -> bool:
    return any(section.tier is Tier.SITE for section in scenario.populations.values())


def _length(dataset: Dataset[Any]) -> float | None:
    try:
        return len(dataset)  # type: ignore[arg-type]
    except TypeError:  # an IterableDataset
        return None
