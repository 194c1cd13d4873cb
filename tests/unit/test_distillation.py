"""A site's part in a track of soft labels, with one rank: its loss, its labels, its ensemble steps."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.one_rank import OneRank, process_group
from helpers.processes import eventually
from helpers.soft_tasks import Corners, cloud, proxy_set, soft_config
from torch.nn.parallel import DistributedDataParallel

from fleetddp.cloud import Distillation, FleetDDP
from fleetddp.common.clock import SystemClock, VirtualClock
from fleetddp.common.distill import soft_loss
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.events import Join, Share
from fleetddp.common.knowledge import Knowledge
from fleetddp.common.open_items import bytes_of_sample, digest_of
from fleetddp.common.proxy import ProxySet
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.update import Tier, UpdateId

TASK = Corners({"lab": (0, 1)})
PROXY = proxy_set(TASK)


class Track:
    """A track of soft labels in memory, an edge that says what the corners are, and sites."""

    def __init__(self, folder: Path, **distill: Any) -> None:
        window = {"preset": "async"}
        self.config = soft_config(folder, PROXY, window=window, site={"sync_every": 2}, distill={"label_items": 40, **distill})
        self.fleet = MemoryFleet(self.config, SystemClock())
        self.edge = Knowledge(PROXY, self.config, Tier.EDGE)
        self.parent = self.fleet.parent()
        self.parent.join(Join(node="e1", tier=Tier.EDGE, incarnation=1, layout=self.edge.layout.fingerprint))
        self.sites: list[Distillation] = []

    def teach(self) -> None:
        """The edge labels everything, rightly and surely."""
        self.edge.take(self.parent, self.version)
        right = 12 * torch.eye(4)[cloud(40, 1)[1]]
        self.parent.push(*self.edge.say(UpdateId("e1", 1, 1), self.edge.rows_of(right)))

    @property
    def version(self) -> int:
        return int(self.parent.status()["version"])

    def site(self, model: DistributedDataParallel) -> Distillation:
        made = Distillation(model, self.config, proxy=PROXY, coordinator=lambda node: self.fleet.parent(), site="lab", task=TASK)
        self.sites.append(made)
        return made

    def close(self) -> None:
        for site in self.sites:
            site.close()
        self.fleet.stop()


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with process_group():
        yield


@pytest.fixture
def track(tmp_path: Path) -> Iterator[Track]:
    made = Track(tmp_path / "knowledge", ensemble_steps=40)
    yield made
    made.close()


def taken_up(teacher: Distillation, version: int, optimizer: torch.optim.Optimizer | None = None) -> None:
    def look() -> bool:
        teacher.step(optimizer)
        return teacher.version >= version

    eventually(look, f"version {version} taken up")


def test_a_site_of_an_architecture_of_its_own_learns_from_the_edges_and_labels(track: Track) -> None:
    """Plain DDP will do: no weights are exchanged. It has never seen a label of any class."""
    model = DistributedDataParallel(Corners({}, width=7).model())
    teacher = track.site(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    track.teach()
    taken_up(teacher, 1, optimizer)
    assert teacher.known == 40
    assert TASK.evaluate(model.module)["accuracy"] > 0.95
    eventually(lambda: track.version >= 2, "the site's own labels merged")
    track.edge.take(track.parent, track.version)
    said = track.edge.rows[:, :4]  # both tiers', and the site's are now as the edge's
    assert torch.equal(said.argmax(1), cloud(40, 1)[1])
    assert model.training


def test_the_loss_of_a_fleet_ddp_is_the_divergence_from_the_consensus(track: Track, tmp_path: Path) -> None:
    fleet = OneRank(tmp_path)
    model = fleet.site(TASK.model())
    indices = torch.tensor([3, 0, 39])
    with pytest.raises(ConfigError, match="make a fleetddp"):
        model.distillation_loss(torch.zeros(3, 4), indices)
    teacher = track.site(model)
    assert float(model.distillation_loss(torch.zeros(3, 4), indices)) == 0.0
    track.teach()
    taken_up(teacher, 1)
    outputs = model(teacher.items(indices))
    loss = model.distillation_loss(outputs, indices)
    consensus = teacher.knowledge.rows[indices, :4] / teacher.knowledge.rows[indices, 4:]
    assert float(loss.detach()) == pytest.approx(float(soft_loss(outputs.detach(), consensus, 2.0)), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert isinstance(model, FleetDDP)
    with pytest.raises(ConfigError, match="make a fleetddp"):  # a copy is no member
        copy.deepcopy(model).distillation_loss(outputs, indices)
    fleet.close()


def test_its_state_goes_into_a_checkpoint(track: Track) -> None:
    teacher = track.site(DistributedDataParallel(TASK.model()))
    track.teach()
    taken_up(teacher, 1)
    other = track.site(DistributedDataParallel(TASK.model()))
    other.load_state_dict(teacher.state_dict())
    assert other.version == 1
    assert torch.equal(other.knowledge.rows, teacher.knowledge.rows)


def test_a_restart_keeps_what_it_held_until_it_is_renewed(tmp_path: Path) -> None:
    """Only five rows of each tier are brought for a version; the other 35 are those of the checkpoint."""
    track = Track(tmp_path, pull_items=10)
    teacher = track.site(DistributedDataParallel(TASK.model()))
    rows = torch.tensor([[0.0, 0.0, 0.0, 2.0, 2.0]]).repeat(40, 1)
    teacher.load_state_dict({"version": 0, "rows": rows})
    track.teach()
    taken_up(teacher, 1)
    assert teacher.known == 40
    assert torch.equal(teacher.knowledge.rows[5:], rows[5:])
    assert torch.equal(teacher.knowledge.rows[:5, :4].argmax(1), cloud(40, 1)[1][:5])
    track.close()


def test_what_ends_the_exchange_is_raised(track: Track, tmp_path: Path) -> None:
    """The track is of other items than this site's."""
    other = ProxySet(PROXY.name, 4, PROXY.items + 1)
    config = soft_config(tmp_path / "other", other, site={"sync_every": 1})
    model = DistributedDataParallel(TASK.model())
    teacher = Distillation(model, config, proxy=other, coordinator=lambda node: track.fleet.parent(), site="lab")
    track.sites.append(teacher)

    def ended() -> bool:
        try:
            teacher.step()
        except Refused as refusal:
            return refusal.reason is Reason.WRONG_LAYOUT
        return False

    eventually(ended, "a refusal")


def test_a_site_labels_open_items_and_forgets_those_that_are_too_old(tmp_path: Path) -> None:
    """They come with a version; when one is too old, it is gone before the next version comes."""
    room = {"items": 4, "retention_hours": 1.0, "shape": [2]}
    config = soft_config(
        tmp_path, PROXY, source={"open": room}, window={"preset": "async"}, site={"sync_every": 1}, distill={"label_items": 40}
    )
    clock = VirtualClock(time.time())  # the site's is the system's
    fleet = MemoryFleet(config, clock)
    edge, parent = Knowledge(PROXY, config, Tier.EDGE), fleet.parent()
    parent.join(Join(node="e1", tier=Tier.EDGE, incarnation=1, layout=edge.layout.fingerprint))
    samples = {digest_of(point): point for point in cloud(3, 9)[0]}
    offer = Share(node="e1", incarnation=1, of="e1", shape=(2,), digests=tuple(samples))
    assert parent.share(offer, lambda digest: bytes_of_sample(samples[digest])).room == 1
    edge.take(parent, 0)
    parent.push(*edge.say(UpdateId("e1", 1, 1), edge.rows_of(torch.zeros(len(edge.due()), 4))))
    model = DistributedDataParallel(TASK.model())
    connect = lambda node: fleet.parent()  # noqa: E731
    teacher = Distillation(model, config, proxy=PROXY, coordinator=connect, site="lab", task=TASK, folder=tmp_path / "lab")
    taken_up(teacher, 1)
    assert {digest_of(item) for item in teacher.knowledge.opened.held.values()} == set(samples)
    assert torch.equal(teacher.items(torch.tensor([41])), teacher.knowledge.opened.held[1].unsqueeze(0))
    taken_up(teacher, 2)
    assert torch.nonzero(teacher.knowledge.rows[40:, -1] > 0).flatten().tolist() == [0, 1, 2]  # its own, of version 1
    assert set(teacher.draw(400).tolist()) >= {40, 41, 42}
    assert teacher._envoy is not None
    envoy = teacher._envoy._knowledge
    assert envoy._store is not None
    envoy._store._clock = VirtualClock(time.time() + 3601)

    def forgotten() -> bool:
        teacher.step()
        return not teacher.knowledge.opened.held

    eventually(forgotten, "they are too old")
    assert set(teacher.draw(400).tolist()) <= set(range(40))
    teacher.close()
    fleet.stop()
