"""``train`` mode: real weights, real codecs and a real journal under the virtual clock, against the same sums done by hand."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tasks import LineTask
from torch.utils.data import TensorDataset

from fleetddp.common.codecs import get
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.layout import Layout
from fleetddp.common.payload import tensor_over
from fleetddp.common.update import Kind, Tier, Version
from fleetddp.edge.sim.batches import Job
from fleetddp.edge.sim.dealt import DealtTask
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.inline import Inline
from fleetddp.edge.sim.learner import RealLearning
from fleetddp.edge.sim.learning import Unit
from fleetddp.edge.sim.partition import drawn
from fleetddp.edge.sim.scenario import Scenario, parse, with_policy
from fleetddp.edge.sim.simulator import Simulation

MEMBERS = {"heartbeat_s": 60, "lease_s": 180, "stall_s": 60}


class Measured(LineTask):
    """A line whose accuracy is how much of the loss is gone."""

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        return {"accuracy": 1.0 - min(1.0, float(super().evaluate(model)["loss"]) / 2)}


def scenario(*, until: dict[str, Any] | None = None, window: str = "sync", **changes: Any) -> Scenario:
    data = {
        "seed": 3,
        "horizon_s": 3000,
        "mode": "train",
        "trainer": {"workers": 0},
        "fleet": {"members": MEMBERS, "window": {"preset": window}, "edge": {"batch_size": 8}, "until": until or {}},
        "populations": {"jetsons": {"count": 4, "profile": "jetsons", "work": 100.0}},
    }
    return parse({**data, **changes})


def run(made: Scenario, task: LineTask | None = None) -> Simulation:
    simulation = Simulation(made, task=task or Measured())
    simulation.run()
    return simulation


def weights(simulation: Simulation, number: int) -> torch.Tensor:
    driver = simulation.root.driver
    assert driver is not None
    with driver.journal.read_version(number) as reader:
        return tensor_over(reader.read(0, reader.size)).view(torch.float32).clone()


def test_a_synchronous_round_of_equal_members_is_one_step_of_gradient_descent() -> None:
    simulation = run(scenario(until={"versions": 8}))
    task = Measured()
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    for number in range(1, 9):
        optimizer.zero_grad()
        task.loss(model, (task.x, task.y)).backward()
        optimizer.step()
        if number > 5:  # the versions kept
            due = Layout.from_module(model).read(model)
            assert torch.allclose(weights(simulation, number), due, rtol=0, atol=1e-6), number
    rows = simulation.timeline.rows
    assert rows[7].arrived == 4  # the first few may lack those that came late
    assert rows[7].samples == 4 * 8
    assert rows[7].accuracy == pytest.approx(task.evaluate(model)["accuracy"])
    assert rows[0].loss == pytest.approx(float(task.loss(task.model(), (task.x, task.y)).detach()))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    def digests(seed: int) -> list[int]:
        data = {
            "phones": {"count": 6, "profile": "phones", "samples": 5, "dropout": 0.2, "partition": {"kind": "drawn", "alpha": 1}}
        }
        made = scenario(window="async", seed=seed, populations=data, until={"versions": 12})
        simulation = run(made.model_copy(update={"horizon_s": 5000.0}), Labelled())
        driver = simulation.root.driver
        assert driver is not None
        return [version.digest for version in driver.journal.versions()]

    assert digests(3) == digests(3)
    assert digests(3) != digests(4)


def test_a_crash_of_the_root_changes_nothing_that_was_acknowledged_and_the_run_goes_on() -> None:
    simulation = Simulation(scenario(window="async", until={"versions": 40}), task=Measured())
    for time in (31.0, 62.5, 100.0):
        simulation.loop.at(time, lambda _: simulation.root.crash())
        simulation.loop.at(time + 5, lambda _: simulation.root.start())
    timeline = simulation.run()
    assert [row.version for row in timeline.rows] == list(range(1, 41))
    assert timeline.rows[-1].accuracy > 0.99  # type: ignore[operator]


def test_a_site_brings_the_first_weights_and_its_evaluation_ends_the_run() -> None:
    populations = {
        "jetsons": {"count": 2, "profile": "jetsons", "work": 100.0},
        "site": {"count": 1, "profile": "datacenter", "tier": "site", "samples": 4, "work": 1000.0},
    }
    fleet = {
        "members": {**MEMBERS, "sites": ["site-0"]},
        "until": {"metric": "accuracy", "at_least": 0.9},
        "site": {"sync_every": 2},
    }
    timeline = run(scenario(populations=populations, fleet=fleet)).timeline
    assert "accuracy of version" in timeline.finished
    reached = timeline.seconds_to(0.9)
    assert reached is not None
    assert reached < timeline.virtual_s < 3000
    assert set(timeline.staleness) == {Tier.SITE, Tier.EDGE}


# ---- learning -----------------------------------------------------------------------------------------------------------------


def learner(task: LineTask) -> tuple[RealLearning, Inline]:
    engine = Inline(task)
    return RealLearning(task, engine, {"m": 8, "n": 8}, seed=0), engine


def version_of(values: torch.Tensor, number: int) -> tuple[Version, bytes]:
    payload = values.numpy().tobytes()
    return Version(
        number=number, layout="", codec="float32", payload_bytes=len(payload), digest=number, published_at=0.0
    ), payload


def unit(number: int, steps: int = 1) -> Unit:
    return Unit(number, samples=8.0 * steps, steps=steps, seconds=1.0)


def test_an_update_over_several_units_is_where_they_led_to_and_its_loss_their_mean() -> None:
    task = LineTask()
    learning, _ = learner(task)
    start = learning.adopt(*version_of(learning.first, 0))
    first = learning.train("m", start, unit(0))
    second = learning.train("m", first, unit(1, steps=3))
    parcel = learning.encode("m", Kind.DELTA, "float32", start, second, None)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = task.loss(model, (task.x, task.y))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    delta = learning.first - Layout.from_module(model).read(model)
    assert torch.allclose(tensor_over(parcel.payload).view(torch.float32), delta, rtol=0, atol=1e-6)
    assert parcel.metrics["train_loss"] == pytest.approx(sum(losses) / 4)
    assert parcel.size == 8


def test_only_what_somebody_still_wants_is_trained_and_weights_nobody_holds_are_dropped() -> None:
    learning, engine = learner(LineTask())
    asked: list[Job] = []
    train = engine.train
    engine.train = lambda jobs: train([asked.append(job) or job for job in jobs])  # type: ignore[method-assign,func-returns-value]
    start = learning.adopt(*version_of(learning.first, 0))
    kept, lost = learning.train("m", start, unit(0)), learning.train("n", start, unit(0))
    del lost
    learning.encode("m", Kind.DELTA, "float32", start, kept, None)
    assert [job.member for job in asked] == ["m"]
    assert len(engine.held) == 1
    assert learning.adopt(*version_of(learning.first, 0)) is start
    del start, kept
    assert engine.held == []


def test_training_that_diverged_has_nothing_to_send() -> None:
    learning, _ = learner(LineTask(lr=1e38))
    start = learning.adopt(*version_of(learning.first, 0))
    end = learning.train("m", start, unit(0, steps=3))
    with pytest.raises(Refused) as refusal:
        learning.encode("m", Kind.DELTA, "float32", start, end, None)
    assert refusal.value.reason is Reason.NOT_FINITE


def test_what_a_lossy_codec_leaves_out_is_in_the_residual() -> None:
    learning, _ = learner(LineTask(wide=600))
    start = learning.adopt(*version_of(learning.first, 0))
    ends = [learning.train("m", start, unit(0)) for _ in range(2)]
    exact = tensor_over(learning.encode("m", Kind.DELTA, "float32", start, ends[0], None).payload).view(torch.float32)
    first = learning.encode("m", Kind.DELTA, "int4", start, ends[0], None)
    second = learning.encode("m", Kind.DELTA, "int4", start, ends[1], first.residual)
    said = sum(get("int4").decode(tensor_over(p.payload), exact.numel()) for p in (first, second))
    assert torch.allclose(said + second.residual, 2 * exact, atol=1e-5)


# ---- data ---------------------------------------------------------------------------------------------------------------------


class Labelled(LineTask):
    """Forty points of four kinds for every population."""

    def data(self, member: str, index: int, count: int) -> TensorDataset:
        labels = torch.arange(40) % 4
        pool = TensorDataset(torch.randn(40, 2, generator=torch.Generator().manual_seed(1)), labels.float()[:, None])
        pool.targets = labels  # type: ignore[attr-defined]
        return pool


@pytest.mark.parametrize("kind", [{"kind": "iid"}, {"kind": "dirichlet", "alpha": 0.5}, {"kind": "shards"}])
def test_a_population_shares_its_data_without_rest(kind: dict[str, Any]) -> None:
    made = scenario(populations={"phones": {"count": 5, "profile": "phones", "partition": kind}})
    task = DealtTask(Flat(), made, Draws(1))
    parts = [[int(x) for x, _ in task.data(f"phones-{k}", 0, 1)] for k in range(5)]  # type: ignore[arg-type]
    assert sorted(chain.from_iterable(parts)) == list(range(40))
    assert {len(part) for part in parts} == {8}


class Flat(LineTask):
    def data(self, member: str, index: int, count: int) -> TensorDataset:
        return TensorDataset(torch.arange(40), torch.arange(40) % 4)


def test_natural_ids_and_missing_labels() -> None:
    made = scenario(populations={"phones": {"count": 2, "profile": "phones", "partition": {"kind": "natural"}}})
    with pytest.raises(ConfigError, match=r"populations\.phones\.partition: the task's data for 'phones' has no attribute 'ids'"):
        DealtTask(Flat(), made, Draws(1))


def test_drawn_samples_are_of_the_labels_that_were_drawn() -> None:
    labels = np.arange(1000) % 10
    few = drawn(labels, 300, np.random.default_rng(0), alpha=0.05, each=30)
    many = drawn(labels, 300, np.random.default_rng(0), alpha=1e4, each=30)
    assert {len(rows) for rows in few + many} == {30}
    kinds = [np.mean([len(set(labels[rows])) for rows in parts]) for parts in (few, many)]
    assert kinds[0] < 2 < 9 < kinds[1]
    counts = np.bincount(labels[np.concatenate(many)], minlength=10)
    assert counts.min() > 800  # of 900 due
    assert len(set(np.concatenate(many).tolist())) > 950  # with replacement: nearly all of them, some often


# ---- scenarios ----------------------------------------------------------------------------------------------------------------


def test_a_policy_changes_whole_sections_and_a_preset_only_the_window() -> None:
    policies = {"mine": {"window": {"preset": "fedbuff", "quorum": 3}, "outer": {"preset": "diloco"}}}
    made = scenario(policies=policies)
    mine, preset, asynchronous = (with_policy(made, name).fleet for name in ("mine", "periodic", "async"))
    assert (mine.window.quorum, mine.outer.preset, mine.members) == (3, "diloco", made.fleet.members)
    assert (preset.window.preset, preset.outer) == ("periodic", made.fleet.outer)
    assert asynchronous.outer.preset == "fedasync"
    with pytest.raises(ConfigError, match="there is no policy 'fast'; there are mine, sync, semi_sync, async, fedbuff, periodic"):
        with_policy(made, "fast")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"mode: train needs a task: give fleet\.task\.target"),
        ({"trainer": {"workers": 0, "path": "stacked"}}, r"trainer\.path: stacked needs worker processes; trainer\.workers is 0"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Simulation(scenario(**changes), task=LineTask() if changes else None)
