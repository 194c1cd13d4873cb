"""What a member holds of others' soft labels, and what it says: against an aggregator in memory, by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.soft_tasks import Corners, proxy_set, soft_config
from torch import Tensor

from fleetddp.common.clock import VirtualClock
from fleetddp.common.distill import certainty, soft_loss, soften
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.events import Join, Share
from fleetddp.common.knowledge import Knowledge, Opened, outputs_of, proxy_of
from fleetddp.common.open_items import bytes_of_sample, digest_of
from fleetddp.common.proxy import ProxySet
from fleetddp.common.transport.memory import MemoryFleet, MemoryParent
from fleetddp.common.update import State, Tier, UpdateId

PROXY = proxy_set(Corners({}))  # 40 items of 4 classes
ROW = 2 * 4 + 4  # bytes, in prob16


class Fleet:
    """An aggregator, and members that say what a test wants."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        self.config = soft_config(folder, PROXY, **{"window": {"preset": "fedbuff", "min_updates": 2}, **sections})
        self.memory = MemoryFleet(self.config, VirtualClock())
        self.parent = self.memory.parent()
        self.sequence = 0

    def member(self, name: str, tier: Tier) -> Knowledge:
        knowledge = Knowledge(PROXY, self.config, tier)
        self.parent.join(Join(node=name, tier=tier, incarnation=1, layout=knowledge.layout.fingerprint))
        knowledge.take(self.parent, self.version)
        return knowledge

    @property
    def version(self) -> int:
        return int(self.parent.status()["version"])

    def say(self, name: str, knowledge: Knowledge, outputs: Tensor) -> State:
        self.sequence += 1
        saying = knowledge.say(UpdateId(name, 1, self.sequence), knowledge.rows_of(outputs), steps=1)
        return self.parent.push(*saying).state


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    made: list[Fleet] = []

    def make(**sections: Any) -> Fleet:
        made.append(Fleet(tmp_path / str(len(made)), **sections))
        return made[-1]

    yield make
    for one in made:
        one.memory.stop()


def test_a_consensus_is_the_mean_weighed_by_certainty(fleet: Callable[..., Fleet]) -> None:
    """Two edges label ten items; the site that learns from them divides sum(w p) by sum(w), and its loss is against that."""
    one = fleet()
    edges = {name: one.member(name, Tier.EDGE) for name in ("e1", "e2")}
    outputs = {name: 3 * torch.randn(10, 4, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(edges)}
    for name, knowledge in edges.items():
        assert one.say(name, knowledge, outputs[name]) is State.ACCEPTED
    site = one.member("lab", Tier.SITE)
    assert (one.version, site.version, site.known) == (1, 1, 10)
    labels = [soften(outputs[name], 2.0) for name in edges]
    weights = [certainty(p, power=2.0, floor=0.01).unsqueeze(1) for p in labels]
    mean = (labels[0] * weights[0] + labels[1] * weights[1]) / (weights[0] + weights[1])
    said = torch.randn(12, 4)
    loss = site.loss(said, torch.arange(12))  # of the last two nobody has an opinion
    assert float(loss) == pytest.approx(float(soft_loss(said[:10], mean, 2.0)), rel=2e-3)  # labels travel in float16


def test_others_are_of_the_other_tier(fleet: Callable[..., Fleet]) -> None:
    one = fleet(distill={"learn_from": "others"})
    site, edge = one.member("lab", Tier.SITE), one.member("e1", Tier.EDGE)
    for name, knowledge, answer in (("lab", site, 0), ("e1", edge, 1)):
        one.say(name, knowledge, 20 * torch.eye(4)[torch.full((10,), answer)])
    for knowledge, answer in ((site, 1), (edge, 0)):
        knowledge.take(one.parent, one.version)
        assert knowledge.rows[:10, :4].argmax(1).tolist() == [answer] * 10
        assert knowledge.draw(50, torch.Generator().manual_seed(0)).max() < 10
    everyone = fleet()
    both = everyone.member("e1", Tier.EDGE)
    everyone.say("e1", both, 20 * torch.eye(4)[torch.full((10,), 1)])
    everyone.say("lab", everyone.member("lab", Tier.SITE), 20 * torch.eye(4)[torch.full((10,), 0)])
    both.take(everyone.parent, everyone.version)
    assert both.rows[0, :2].tolist() == pytest.approx([1.0, 1.0], abs=3e-3)


def test_what_was_renewed_is_brought_and_no_more(fleet: Callable[..., Fleet]) -> None:
    """Each version renews ten items of the set of 40; with a limit it is the newest that are brought."""
    one = fleet(window={"preset": "async"})
    speaker, follower, late = (one.member(name, Tier.EDGE) for name in ("e1", "e2", "e3"))
    limited = Knowledge(
        PROXY, one.config.model_copy(update={"distill": one.config.distill.model_copy(update={"pull_items": 24})}), Tier.EDGE
    )
    for version in range(1, 4):
        one.say("e1", speaker, torch.randn(10, 4))
        speaker.take(one.parent, version)
        before = follower.bytes_pulled
        follower.take(one.parent, version)
        # Of both tiers: the ten labelled on the version before, and those before that, whose labels may have come late.
        assert follower.bytes_pulled - before == 2 * ROW * min(10 * version, 20)
    assert follower.known == 30
    late.take(one.parent, 3)
    assert late.bytes_pulled == 2 * ROW * 30
    assert torch.equal(late.rows, follower.rows)
    limited.take(one.parent, 3)
    assert limited.bytes_pulled == ROW * 24
    assert torch.nonzero(limited.rows[:, -1]).flatten().tolist() == [10, 11, *range(20, 30)]


def test_a_track_in_float32_is_brought_whole(fleet: Callable[..., Fleet]) -> None:
    one = fleet(publish="float32", window={"preset": "async"})
    edge = one.member("e1", Tier.EDGE)
    one.say("e1", edge, 20 * torch.eye(4)[torch.arange(10) % 4])
    edge.take(one.parent, 1)
    assert edge.rows[:10, :4].argmax(1).tolist() == [i % 4 for i in range(10)]
    assert edge.bytes_pulled == 2 * 40 * 5 * 4


def test_labels_may_be_the_largest_alone(fleet: Callable[..., Fleet]) -> None:
    one = fleet(distill={"codec": "probtop:1"}, window={"preset": "async"})
    edge = one.member("e1", Tier.EDGE)
    one.say("e1", edge, torch.tensor([[4.0, 0.0, 1.0, -1.0]]).expand(10, 4))
    assert edge.bytes_pushed == 10 * (3 + 4)
    edge.take(one.parent, 1)
    p = edge.rows[0, :4] / edge.rows[0, 4]
    assert p[1:].tolist() == pytest.approx([float(p[1])] * 3, rel=1e-3)
    assert float(p[0]) == pytest.approx(float(soften(torch.tensor([[4.0, 0.0, 1.0, -1.0]]), 2.0)[0, 0]), rel=1e-3)


def test_a_model_that_has_diverged_says_nothing(fleet: Callable[..., Fleet]) -> None:
    one = fleet()
    edge = one.member("e1", Tier.EDGE)
    with pytest.raises(Refused) as caught:
        one.say("e1", edge, torch.full((10, 4), torch.nan))
    assert caught.value.reason is Reason.NOT_FINITE


def test_the_loss_wants_logits_of_all_classes(fleet: Callable[..., Fleet]) -> None:
    edge = fleet().member("e1", Tier.EDGE)
    with pytest.raises(ConfigError, match=r"logits of shape \(3, 4\)"):
        edge.loss(torch.zeros(3, 5), torch.arange(3))


def test_before_anything_is_known_the_loss_is_nothing(fleet: Callable[..., Fleet]) -> None:
    edge = fleet().member("e1", Tier.EDGE)
    indices = edge.draw(6)
    outputs = outputs_of(object(), torch.nn.Linear(2, 4), edge.items(indices))
    loss = edge.loss(outputs, indices)
    loss.backward()
    assert float(loss.detach()) == 0.0


def test_another_set_is_not_the_fleets(tmp_path: Path) -> None:
    config = soft_config(tmp_path, PROXY)
    other = ProxySet(PROXY.name, PROXY.classes, PROXY.items + 1)
    with pytest.raises(ConfigError, match=f"digest: {other.digest}"):
        Knowledge(other, config, Tier.EDGE)
    with pytest.raises(ConfigError, match="a set 'squares' of 4 classes"):
        Knowledge(ProxySet("squares", 4, PROXY.items), config, Tier.EDGE)
    with pytest.raises(ConfigError, match="not one of soft labels"):
        Knowledge(PROXY, config.model_copy(update={"proxy": None}), Tier.EDGE)


def test_where_a_proxy_set_comes_from(tmp_path: Path) -> None:
    """The file where it is here; the task; else the coordinator."""
    config = soft_config(tmp_path, PROXY)
    nowhere = MemoryFleet(config, VirtualClock())
    assert proxy_of(config, Corners({}), nowhere.parent(), tmp_path).digest == PROXY.digest
    with pytest.raises(Refused) as caught:
        proxy_of(config, object(), nowhere.parent(), tmp_path)
    assert caught.value.reason is Reason.NO_PROXY
    nowhere.stop()
    path = tmp_path / "corners.safetensors"
    PROXY.save(path)
    named = {"name": PROXY.name, "classes": 4, "file": str(path), "items": None, "digest": None}
    shipped = soft_config(tmp_path / "shipped", PROXY, source=named)
    fleet = MemoryFleet(shipped, VirtualClock())
    parent: MemoryParent = fleet.parent()
    assert proxy_of(shipped, object(), parent, tmp_path).digest == PROXY.digest
    path.rename(tmp_path / "elsewhere.safetensors")
    path.symlink_to("elsewhere.safetensors")
    far = soft_config(tmp_path / "far", PROXY, source={**named, "file": str(tmp_path / "not-here.safetensors")})
    assert proxy_of(far, object(), parent, tmp_path / "brought").digest == PROXY.digest
    assert len(list((tmp_path / "brought").iterdir())) == 1
    fleet.stop()


def test_where_tiers_are_not_kept_apart_all_are_one_consensus(fleet: Callable[..., Fleet]) -> None:
    one = fleet(source={"by_tier": False})
    site, edge = one.member("lab", Tier.SITE), one.member("e1", Tier.EDGE)
    one.say("lab", site, 20 * torch.eye(4)[torch.zeros(10, dtype=torch.int64)])
    one.say("e1", edge, 20 * torch.eye(4)[torch.ones(10, dtype=torch.int64)])
    for member in (site, edge):
        member.take(one.parent, one.version)
        p = member.rows[:10, :4] / member.rows[:10, 4:]
        assert torch.allclose(p[:, :2], torch.full((10, 2), 0.5), atol=1e-3)
        assert member.bytes_pulled == 10 * ROW


def test_who_comes_late_has_the_open_items_and_their_labels_at_once(fleet: Callable[..., Fleet]) -> None:
    """And one that lacks an item labels the others: its row is left out."""
    one = fleet(source={"open": {"items": 4, "retention_hours": 1.0, "shape": [2]}}, window={"preset": "async"})
    speaker = one.member("e1", Tier.EDGE)
    samples = {digest_of(point): point for point in torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}
    offer = Share(node="e1", incarnation=1, of="e1", shape=(2,), digests=tuple(samples))
    one.parent.share(offer, lambda digest: bytes_of_sample(samples[digest]))
    one.say("e1", speaker, torch.randn(10, 4))
    speaker.take(one.parent, 1)
    assert speaker.due().tolist() == [*range(7, 14), 40, 41, 42]
    speaker.open(Opened(speaker.opened.items, {slot: speaker.opened.held[slot] for slot in (0, 2)}))
    assert speaker.due().tolist() == [*range(7, 14), 40, 42]
    one.say("e1", speaker, 20 * torch.eye(4)[torch.full((9,), 3)])
    late = one.member("e2", Tier.EDGE)
    assert torch.nonzero(late.rows[40:, -1]).flatten().tolist() == [0, 2]
    assert set(late.opened.held) == {0, 1, 2}
    assert {digest_of(late.items(torch.tensor([40 + slot]))[0]) for slot in range(3)} == set(samples)
    assert set(late.draw(300, torch.Generator().manual_seed(0)).tolist()) == {*range(10), *range(7, 14), 40, 42}
    loss = late.loss(30 * torch.eye(4)[torch.full((2,), 3)], torch.tensor([40, 42]))
    assert float(loss) == pytest.approx(0.0, abs=1e-2)
