"""From hard samples to proxy data: what a node offers, learns and takes back, against an aggregator in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.soft_tasks import Corners, cloud, proxy_set, soft_config
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fleetddp.common import codecs
from fleetddp.common.clock import VirtualClock
from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import ConfigError, Reason, Refused, Unreachable
from fleetddp.common.events import Join, Share
from fleetddp.common.knowledge import Knowledge
from fleetddp.common.open_items import bytes_of_sample
from fleetddp.common.transport.memory import MemoryFleet, MemoryParent
from fleetddp.common.update import Tier, UpdateId
from fleetddp.edge.closed_loop import ClosedLoop
from fleetddp.edge.reservoir import Reservoir, digest_of, open_reservoir, was_shared

PROXY = proxy_set(Corners({}))  # 40 items
POINTS, CLASSES = cloud(12, 5)
TRUTH = {digest_of(point): int(label) for point, label in zip(POINTS, CLASSES, strict=True)}
RUN = "test/layout"


class Loop:
    """One track with room for samples, in memory, and its devices."""

    def __init__(self, folder: Path, **room: Any) -> None:
        self.folder, self.clock = folder, VirtualClock(1000.0)
        self.room = {"items": 10, "retention_hours": 1.0, "shape": [2], **room}
        self.fleet = MemoryFleet(self.config(), self.clock)
        self.parent = self.fleet.parent()
        self.open: list[Reservoir] = []

    def config(self, **kept: Any) -> FleetConfig:
        """The fleet file of a device that permits so much."""
        return soft_config(
            self.folder,
            PROXY,
            source={"open": self.room},
            cascade={"hard_samples": {"state": str(self.folder / "hard"), **kept}},
            window={"preset": "async"},
        )

    def device(self, name: str, *points: int, **kept: Any) -> tuple[ClosedLoop, Reservoir | None]:
        """One that has found these points hard; it permits sharing unless ``kept`` says otherwise."""
        kept = {"consent": True, "share": True, "retention_hours": 1.0, "label_share": 1.0, **kept}
        config = self.config(**kept)
        reservoir = open_reservoir(config.cascade.hard_samples, name, clock=self.clock)
        if reservoir is not None:
            self.open.append(reservoir)
            reservoir.add(POINTS[list(points)], torch.ones(len(points)))
        self.parent.join(Join(node=name, tier=Tier.EDGE, incarnation=1))
        source = lambda sample: TRUTH[digest_of(sample)]  # noqa: E731
        return ClosedLoop(config, name, reservoir=reservoir, label_source=source), reservoir

    def exchange(self, loop: ClosedLoop, parent: MemoryParent | None = None) -> None:
        loop.exchange(parent or self.parent, 1, RUN)

    def items(self) -> set[int]:
        """Which of the points are open items."""
        store = self.fleet.driver.items
        assert store is not None
        found = [store.tensor(slot) for slot in store.held()]
        return {next(i for i, point in enumerate(POINTS) if torch.equal(point, item)) for item in found if item is not None}

    def close(self) -> None:
        for reservoir in self.open:
            reservoir.close()
        self.fleet.stop()


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Callable[..., Loop]]:
    made: list[Loop] = []

    def make(**room: Any) -> Loop:
        made.append(Loop(tmp_path / str(len(made)), **room))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Silent(MemoryParent):
    """Nothing may be said to it."""

    def share(self, offer: Share, data: Callable[[str], bytes]) -> Any:
        raise AssertionError("something left the device")

    def withdraw(self, share: Share) -> int:
        raise AssertionError("something was taken back")


# ---- what leaves the device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [{"consent": False, "share": False, "retention_hours": None}, {"share": False}])
def test_nothing_leaves_a_device_unasked(loop: Callable[..., Loop], kept: dict[str, Any]) -> None:
    """Neither by default nor with the consent to keep samples."""
    one = loop()
    device, reservoir = one.device("a", 0, 1, **kept)
    one.exchange(device, Silent(one.fleet, ""))
    if reservoir is not None:
        assert len(reservoir) == 2
        with pytest.raises(ConfigError, match="share is false"):
            reservoir.unshared(RUN, 1)
    assert one.items() == set()


def test_share_needs_consent_and_a_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share: true needs consent: true"):
        soft_config(tmp_path, PROXY, cascade={"hard_samples": {"share": True}})
    with pytest.raises(ConfigError, match=r"open\.shape"):
        soft_config(tmp_path, PROXY, source={"open": {"items": 3, "retention_hours": 1.0}})
    with pytest.raises(ConfigError, match="open: Field required"):
        soft_config(tmp_path, PROXY, source={"open": {"items": 3, "shape": [2]}})
    with pytest.raises(ConfigError, match="at most 16777216 are taken"):
        soft_config(tmp_path, PROXY, source={"open": {"items": 3, "retention_hours": 1.0, "shape": [2**22 + 1]}})


def test_what_devices_share_is_one_set_each_sample_once(loop: Callable[..., Loop]) -> None:
    one = loop()
    a, kept = one.device("a", 0, 1, 2)
    b, _ = one.device("b", 2, 3)
    for device in (a, b, a, b):
        one.exchange(device)
    assert one.items() == {0, 1, 2, 3}
    assert one.parent.status()["open_items"] == {"filled": 4, "held": 4}
    one.exchange(a, Silent(one.fleet, ""))  # all is known there: nothing is offered
    assert kept is not None
    kept.add(POINTS[4:5], torch.ones(1))
    one.exchange(a)
    assert one.items() == {0, 1, 2, 3, 4}


def test_on_a_metered_network_nothing_is_offered_but_all_is_taken_back(loop: Callable[..., Loop]) -> None:
    one = loop()
    device, reservoir = one.device("a", 0, 1)
    device.exchange(Silent(one.fleet, ""), 1, RUN, offers=False)
    one.exchange(device)
    assert reservoir is not None
    reservoir.remove([digest_of(POINTS[0])])
    device.exchange(one.parent, 1, RUN, offers=False)
    assert one.items() == {1}


def test_after_a_restart_nothing_is_offered_again(loop: Callable[..., Loop]) -> None:
    one = loop()
    device, reservoir = one.device("a", 0, 1)
    one.exchange(device)
    assert reservoir is not None
    reservoir.close()
    device, reservoir = one.device("a")
    assert reservoir is not None
    one.exchange(device, Silent(one.fleet, ""))
    device.exchange(one.parent, 1, "another run")  # of which it must be told anew
    assert len(reservoir.unshared("a third", 10)) == 2


class Losing(MemoryParent):
    """Its answer to an offer gets lost."""

    def share(self, offer: Share, data: Callable[[str], bytes]) -> Any:
        super().share(offer, data)
        raise Unreachable("the answer got lost")


def test_an_offer_whose_answer_got_lost_is_made_again_and_counts_once(loop: Callable[..., Loop]) -> None:
    one = loop()
    device, reservoir = one.device("a", 0, 1)
    assert reservoir is not None
    with pytest.raises(Unreachable):
        one.exchange(device, Losing(one.fleet, ""))
    assert len(reservoir.unshared(RUN, 10)) == 2
    one.exchange(device)
    assert reservoir.unshared(RUN, 10) == []
    assert one.parent.status()["open_items"] == {"filled": 2, "held": 2}


def test_when_there_is_no_more_room_it_keeps_what_it_has(loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture) -> None:
    one = loop(items=2)
    device, reservoir = one.device("a", 0, 1, 2)
    one.exchange(device)
    assert "no more room" in caplog.text
    one.exchange(device, Silent(one.fleet, ""))
    assert reservoir is not None
    assert (len(one.items()), len(reservoir)) == (2, 3)
    late, _ = one.device("b", 5)
    one.exchange(late)
    assert "ITEMS_FULL" in caplog.text


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], Reason]] = {
    "not permitted": ({"allow": ["b*"]}, {}, Reason.NOT_PERMITTED),
    "another shape": ({"shape": [2]}, {"shape": (3,)}, Reason.WRONG_SHAPE),
    "for another": ({}, {"of": "b"}, Reason.WRONG_IDENTITY),
    "not joined": ({}, {"node": "b", "of": "b"}, Reason.UNKNOWN_NODE),
    "an older process": ({}, {"incarnation": 0}, Reason.SUPERSEDED),
    "of another run": ({}, {"run": "other"}, Reason.WRONG_RUN),
    "nothing": ({}, {"digests": ()}, Reason.MALFORMED),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_offer_that_is_refused_says_why(loop: Callable[..., Loop], name: str) -> None:
    room, fields, reason = REFUSALS[name]
    one = loop(**room)
    one.parent.join(Join(node="a", tier=Tier.EDGE, incarnation=1))
    digest = digest_of(POINTS[0])
    given = {"node": "a", "incarnation": 1, "of": "a", "shape": (2,), "digests": (digest,), **fields}
    with pytest.raises(Refused) as caught:
        one.parent.share(Share(**given), lambda digest: bytes_of_sample(POINTS[0]))
    assert caught.value.reason is reason
    assert one.items() == set()
    assert one.parent.status()["counters"]["refused"] == ({} if reason is Reason.WRONG_SHAPE else {reason.value: 1})


def test_a_refusal_ends_the_sharing_and_nothing_else(loop: Callable[..., Loop], caplog: pytest.LogCaptureFixture) -> None:
    one = loop(allow=["b*"])
    device, _ = one.device("a", 0)
    one.exchange(device)
    assert "a: no more hard samples are shared: NOT_PERMITTED: 'a' matches no pattern of proxy.open.allow" in caplog.text
    one.exchange(device, Silent(one.fleet, ""))


def test_a_track_without_room_takes_none(tmp_path: Path) -> None:
    fleet = MemoryFleet(soft_config(tmp_path, PROXY), VirtualClock())
    parent = fleet.parent()
    parent.join(Join(node="a", tier=Tier.EDGE, incarnation=1))
    offer = Share(node="a", incarnation=1, of="a", shape=(2,), digests=(digest_of(POINTS[0]),))
    for ask in (lambda: parent.share(offer, lambda digest: b""), lambda: parent.pull_items(0, -1, (), lambda *_: None)):
        with pytest.raises(Refused) as caught:
            ask()
        assert caught.value.reason is Reason.NO_OPEN_ITEMS
    fleet.stop()


# ---- what is taken back -----------------------------------------------------------------------------------------------------


def test_what_somebody_removes_is_taken_back(loop: Callable[..., Loop]) -> None:
    one = loop()
    device, reservoir = one.device("a", 0, 1, 2)
    other, _ = one.device("b", 2)
    for each in (device, other):
        one.exchange(each)
    assert reservoir is not None
    reservoir.remove([digest_of(POINTS[0]), digest_of(POINTS[2])])
    one.exchange(device)
    assert one.items() == {1, 2}  # the other device shares it still
    reservoir.add(POINTS[:1], torch.ones(1))  # it is found hard again
    one.exchange(device, Silent(one.fleet, ""))
    assert one.items() == {1, 2}


@pytest.mark.parametrize("kept", [{"consent": False, "share": False, "retention_hours": None}, {"share": False}])
def test_without_the_permission_all_is_taken_back(loop: Callable[..., Loop], kept: dict[str, Any]) -> None:
    """Also while the coordinator could not be reached at first, and when the reservoir is gone with the consent."""
    one = loop()
    device, reservoir = one.device("a", 0, 1)
    one.exchange(device)
    assert reservoir is not None
    folder = reservoir.folder
    assert was_shared(folder)
    reservoir.close()
    device, reservoir = one.device("a", **kept)
    assert (reservoir is None) == (not kept.get("consent", True))
    gone = one.fleet.parent()
    gone.close()
    with pytest.raises(Unreachable):
        one.exchange(device, gone)
    one.exchange(device)
    assert one.items() == set()
    assert not was_shared(folder)
    assert folder.exists() == (reservoir is not None)
    one.exchange(device, Silent(one.fleet, ""))


def test_too_old_ones_are_erased_while_nobody_asks(loop: Callable[..., Loop]) -> None:
    one = loop()
    device, _ = one.device("a", 0)
    one.exchange(device)
    one.clock.advance(1800.0)
    other, _ = one.device("b", 1)
    one.exchange(other)
    one.clock.advance(1800.0)
    one.fleet.tick()
    assert one.items() == {1}
    one.clock.advance(1800.0)
    one.fleet.tick()
    assert one.items() == set()


# ---- what the node learns ---------------------------------------------------------------------------------------------------


def test_labelled_ones_join_the_data_as_they_come(loop: Callable[..., Loop]) -> None:
    one = loop()
    task = Corners({"a": (0, 1)})
    device, reservoir = one.device("a", 2, 7, label_after_s=60.0)
    assert reservoir is not None
    knowledge = Knowledge(PROXY, one.config(), Tier.EDGE, clock=one.clock)
    data = device.task(task).data("a", 0, 1)
    own = len(task.data("a", 0, 1))  # type: ignore[arg-type]
    device.learn(knowledge)
    assert len(data) == own  # type: ignore[arg-type]
    one.clock.advance(61.0)
    device.learn(knowledge)
    rows = [row for batch in DataLoader(data, 16) for row in zip(*batch, strict=True)]
    added = {digest_of(point): int(label) for point, label in rows[own:]}  # type: ignore[arg-type]
    assert added == {digest_of(POINTS[i]): int(CLASSES[i]) for i in (2, 7)}
    last = data[own + 1]
    reservoir.remove([digest_of(POINTS[i]) for i in (2, 7)])
    device.learn(knowledge)
    assert len(data) == own  # type: ignore[arg-type]
    assert torch.equal(data[own + 1][0], data[1][0])  # a batch that was begun before
    assert not torch.equal(last[0], data[1][0])
    assert device.task(task).evaluate(task.model()) == task.evaluate(task.model())


def test_what_a_task_iterates_over_stays_as_it_is(loop: Callable[..., Loop]) -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(POINTS)

    class Streaming(Corners):
        def data(self, member: str, index: int, count: int) -> Any:
            return stream

    stream = Stream()
    one = loop()
    assert one.device("a", 0)[0].task(Streaming({})).data("a", 0, 1) is stream
    task = Corners({})
    assert one.device("b", consent=False, share=False)[0].task(task) is task


def test_a_label_is_said_of_the_item_in_its_slot(loop: Callable[..., Loop]) -> None:
    """The device that knows the class of an open item says it with ``known_weight``; others say what their models think."""
    one = loop()
    device, _ = one.device("a", 3, label_after_s=60.0)
    one.exchange(device)
    edges = {name: Knowledge(PROXY, one.config(), Tier.EDGE, clock=one.clock) for name in ("a", "b")}
    one.parent.join(Join(node="b", tier=Tier.EDGE, incarnation=1))
    say(one, "b", edges["b"], 1)  # version 1: the item is labelled from now on
    one.clock.advance(60.0)
    for knowledge in edges.values():
        knowledge.take(one.parent, 1)
        assert knowledge.due().tolist() == [*range(9, 18), 40]
    device.learn(edges["a"])
    for name, knowledge in edges.items():
        update = say(one, name, knowledge, 2 if name == "b" else 1)
        row = codecs.get("prob16:4").decode(torch.frombuffer(update.payload, dtype=torch.uint8), 50).view(10, 5)[-1]
        if name == "a":
            assert row.tolist() == [10.0 * (c == CLASSES[3]) for c in range(4)] + [10.0]
        else:
            assert row[-1] < 1.01
    assert one.parent.status()["version"] == 3


def say(one: Loop, name: str, knowledge: Knowledge, sequence: int) -> Any:
    if knowledge.version < 0:
        knowledge.take(one.parent, one.fleet.driver.version)
    opinion = knowledge.rows_of(20 * torch.eye(4)[torch.zeros(len(knowledge.due()), dtype=torch.int64)])
    update = knowledge.say(UpdateId(name, 1, sequence), opinion)
    one.parent.push(*update)
    return update


def test_what_is_known_for_certain_outweighs_every_opinion(tmp_path: Path) -> None:
    """It is said with weight ``known_weight``, and learnt whatever the others say."""
    config = soft_config(tmp_path, PROXY, distill={"known_weight": 8.0})
    edge = Knowledge(PROXY, config, Tier.EDGE)
    classes = torch.full((40,), -1)
    classes[3] = 2
    edge.know(classes)
    edge.adopt(0, torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0]]).repeat(40, 1))
    opinion = edge.rows_of(20 * torch.eye(4)[torch.zeros(10, dtype=torch.int64)])
    payload = edge.say(UpdateId("e1", 1, 1), opinion).payload
    said = codecs.get("prob16:4").decode(torch.frombuffer(payload, dtype=torch.uint8), 50).view(10, 5)
    assert said[3].tolist() == [0.0, 0.0, 8.0, 0.0, 8.0]
    assert torch.allclose(said[2], opinion[2], rtol=1e-3, atol=1e-6)
    right = 30 * torch.eye(4)[torch.tensor([2, 0])]
    assert float(edge.loss(right, torch.tensor([3, 0]))) == pytest.approx(0.0, abs=1e-3)
    for wrong in (torch.full((39,), -1), torch.full((40,), 4)):
        with pytest.raises(ConfigError, match="known classes"):
            edge.know(wrong)
    with pytest.raises(ConfigError, match="known classes of hard samples"):
        edge.know_opened({"x": 4})
