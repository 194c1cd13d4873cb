"""The edge node that trades soft labels: what it learns, what it keeps, what becomes of what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes import eventually
from helpers.soft_tasks import Corners, cloud, proxy_set, soft_config

from fleetddp.common.clock import SystemClock
from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import LayoutMismatch, Refused, Unreachable
from fleetddp.common.knowledge import Knowledge
from fleetddp.common.open_items import bytes_of_sample
from fleetddp.common.predictor import Served
from fleetddp.common.proxy import ProxySet
from fleetddp.common.transport.memory import MemoryFleet, MemoryParent
from fleetddp.common.update import Receipt, Slice, Tier, UpdateHeader
from fleetddp.edge.distilled import DistilledNode, DistilledTrainer, Memory
from fleetddp.edge.reservoir import Reservoir, digest_of

SEES = {"e1": (0, 1, 2), "e2": (1, 2, 3)}
TASK = Corners(SEES)
PROXY = proxy_set(TASK)


class Running:
    """A node in a thread."""

    def __init__(self, node: DistilledNode) -> None:
        self.node, self.outcome = node, ""
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def _live(self) -> None:
        try:
            self.outcome = self.node.run()
        except Exception as error:
            self.error = error

    def end(self) -> str:
        self.thread.join(30.0)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.outcome


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., tuple[MemoryFleet, dict[str, Running]]]]:
    fleets: list[MemoryFleet] = []
    nodes: list[DistilledNode] = []

    def make(*names: str, task: Corners = TASK, fleet: MemoryFleet | None = None, **sections: Any) -> Any:
        config = config_of(tmp_path, **sections)
        if fleet is None:
            fleet = MemoryFleet(config, SystemClock())
            fleets.append(fleet)
        running = {}
        for name in names:
            nodes.append(DistilledNode(config, task, fleet.parent(), name=name))
            running[name] = Running(nodes[-1])
        return fleet, running

    yield make
    for node in nodes:
        node.stop()
    for fleet in fleets:
        fleet.stop()


def config_of(folder: Path, **sections: Any) -> FleetConfig:
    edge = {"steps": 10, "batch_size": 16, "state": str(folder / "state")}
    window = {"preset": "semi_sync", "quorum": 2, "require": [], "min_updates": 2, "deadline_s": 60.0}
    return soft_config(folder, PROXY, **{"edge": edge, "window": window, "until": {"versions": 8}, **sections})


def test_two_members_learn_what_only_the_other_has_seen(start: Callable[..., Any]) -> None:
    """Of four classes each sees three; their models need not be alike."""
    _, running = start("e1", "e2")
    points, labels = cloud(200, 3)
    for name, one in running.items():
        assert one.end() == "version 8 is published"
        unseen = ({0, 1, 2, 3} - set(SEES[name])).pop()
        with torch.no_grad():
            right = one.node.model(points).argmax(1) == labels
        assert float(right[labels == unseen].float().mean()) > 0.8
        assert one.node.metrics["accuracy"] > 0.9
        assert one.node.counts["units"] == one.node.counts["merged"] == 8


def test_a_restart_goes_on_with_model_and_consensus(start: Callable[..., Any], tmp_path: Path) -> None:
    fleet, running = start("e1", "e2", until={"versions": 3})
    for one in running.values():
        one.end()
    before = running["e1"].node
    again = DistilledNode(config_of(tmp_path), TASK, fleet.parent(), name="e1")
    assert again._prepare()
    assert torch.equal(again._trainer.weights(), before._trainer.weights())
    assert torch.equal(again.knowledge.rows, before.knowledge.rows)
    assert again.knowledge.version == before.knowledge.version == 2
    assert again.knowledge.known > 0
    assert again._incarnation > before._incarnation
    assert again.run() == "version 3 is published"


def test_of_another_run_nothing_is_taken_up(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    knowledge = Knowledge(PROXY, config, Tier.EDGE)
    trainer = DistilledTrainer(TASK, "e1", config, knowledge)
    first = trainer.weights()
    memory = Memory(tmp_path / "m", "one", trainer)
    incarnation = memory.enter(knowledge)
    trainer.adopt(first + 1)
    memory.save(knowledge)
    trainer.adopt(first)
    assert Memory(tmp_path / "m", "other", trainer).enter(knowledge) > incarnation
    assert torch.equal(trainer.weights(), first)


def test_after_a_divergence_it_goes_on_from_what_was_saved(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    label, calls = DistilledTrainer.label, []

    def bad_once(self: DistilledTrainer) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            self.adopt(torch.full_like(self.weights(), torch.nan))
        return label(self)

    monkeypatch.setattr(DistilledTrainer, "label", bad_once)
    _, running = start("e1", "e2", until={"versions": 3})
    for one in running.values():
        one.end()
        assert bool(torch.isfinite(one.node._trainer.weights()).all())
    assert sum(one.node.counts["diverged"] for one in running.values()) == 1


class Flaky(MemoryParent):
    """Loses the first push after it has arrived."""

    lost = False

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        receipt = super().push(header, slice, payload)
        if not self.lost:
            self.lost = True
            raise Unreachable("the answer got lost")
        return receipt


def test_a_push_whose_answer_got_lost_is_repeated_and_counts_once(start: Callable[..., Any], tmp_path: Path) -> None:
    fleet, running = start("e2", until={"versions": 2})
    node = DistilledNode(config_of(tmp_path, until={"versions": 2}), TASK, Flaky(fleet, ""), name="e1")
    other = Running(node)
    running["e2"].end()
    other.end()
    assert node.counts["merged"] == node.counts["units"] == 2
    assert not node._open


def test_another_proxy_set_is_refused_by_name(tmp_path: Path) -> None:
    fleet = MemoryFleet(config_of(tmp_path), SystemClock())
    other = ProxySet("corners", 4, PROXY.items + 1)
    config = soft_config(tmp_path, other, edge={"state": str(tmp_path / "state")})
    node = DistilledNode(config, TASK, fleet.parent(), name="e1", proxy=other)
    with pytest.raises((LayoutMismatch, Refused), match="corners@"):
        node.run()
    fleet.stop()


HARD = cloud(6, 11)
OF_ALL = {"preset": "sync", "quorum": None, "require": None, "grace_s": None, "min_updates": 2, "deadline_s": 60.0}


def sharing(folder: Path, name: str, **kept: Any) -> tuple[FleetConfig, Reservoir]:
    """The fleet file of a device that permits sharing, and what it found hard: six samples."""
    given = {"consent": True, "share": True, "retention_hours": 1.0, "label_share": 1.0, "state": str(folder / "hard"), **kept}
    room = {"items": 20, "retention_hours": 1.0, "shape": [2]}
    config = config_of(folder, source={"open": room}, cascade={"hard_samples": given}, window=OF_ALL)
    reservoir = Reservoir(folder / "hard" / name, config.cascade.hard_samples)
    reservoir.add(HARD[0], torch.ones(6))
    return config, reservoir


def test_hard_samples_are_learnt_by_all_and_a_restarted_coordinator_goes_on_with_them(tmp_path: Path) -> None:
    """One process answers, keeps, shares and trains; the other node permits nothing, and gets the samples with the versions. The
    aggregator is stopped and started again while they are on their way; no word of the operator's is needed."""
    config, reservoir = sharing(tmp_path, "e1")
    truth = {digest_of(point): int(label) for point, label in zip(*HARD, strict=True)}
    asked: list[str] = []

    def source(sample: torch.Tensor) -> int:
        asked.append(digest_of(sample))
        return truth[asked[-1]]

    served = Served()
    fleets = [MemoryFleet(config, SystemClock())]
    one = DistilledNode(config, TASK, fleets[0].parent(), name="e1", reservoir=reservoir, label_source=source, served=served)
    first = Running(one)
    eventually(lambda: fleets[0].driver.status()["open_items"]["held"] == 6, "the samples are there")
    assert fleets[0].driver.version == 0  # a version takes two
    fleets[0].stop()
    one.stop()
    first.thread.join(30.0)
    fleets.append(MemoryFleet(config, SystemClock()))
    other = config_of(tmp_path, source={"open": {"items": 20, "retention_hours": 1.0, "shape": [2]}}, window=OF_ALL)
    again = DistilledNode(config, TASK, fleets[1].parent(), name="e1", reservoir=reservoir, label_source=source, served=served)
    nodes = {"e1": again, "e2": DistilledNode(other, TASK, fleets[1].parent(), name="e2")}
    for running in [Running(node) for node in nodes.values()]:
        assert running.end() == "version 8 is published"
    assert sorted(asked) == sorted(truth)  # each once
    for node in nodes.values():
        opened = node.knowledge.opened
        assert {digest_of(item) for item in opened.held.values()} == set(truth)
        for item in opened.items:
            row = node.knowledge.rows[40 + item.slot]
            assert int(row[:4].argmax()) == truth[item.digest]
            assert float(row[4]) > 5.0  # with the weight of what is known
        assert node.metrics["accuracy"] > 0.9
    assert served.version == 7
    for name in nodes:  # the run is over: nobody's samples stay with others
        left = (tmp_path / "state" / name / "items.db").read_bytes()
        assert not any(bytes_of_sample(point) in left for point in HARD[0])
    fleets[1].stop()
    reservoir.close()
