"""Each fault does what it says, where and when it says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.synthetic import LAYOUT, SyntheticLearning, SyntheticSimulation

from fleetddp.common import codecs
from fleetddp.common.config import LimitsConfig
from fleetddp.common.errors import ConfigError, Refused
from fleetddp.common.events import Event, Offer, SliceStaged
from fleetddp.common.journal import CRASH_POINTS
from fleetddp.common.payload import Geometry, tensor_over
from fleetddp.common.update import Interval, Kind, Receipt, State, UpdateId
from fleetddp.edge.sim.calls import Call
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.fault_config import FaultsConfig
from fleetddp.edge.sim.faults import Faults, Lie
from fleetddp.edge.sim.learning import Unit
from fleetddp.edge.sim.loop import EventLoop
from fleetddp.edge.sim.network import Path
from fleetddp.edge.sim.observer import ROOT, Observer
from fleetddp.edge.sim.scenario import Scenario, parse
from fleetddp.edge.sim.tampering import Byzantine, FaultyNetwork


class Seen(Observer):
    """What happened, in order."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, str, float]] = []
        self.events: list[Event] = []
        self.receipts: list[Receipt] = []

    def handled(self, event: Event | None, effects: Any, now: float) -> None:
        if event is not None:
            self.events.append(event)

    def told(self, node: str, receipt: Receipt, now: float) -> None:
        self.receipts.append(receipt)

    def noted(self, node: str, what: str, now: float) -> None:
        self.notes.append((node, what, now))

    def times(self, node: str, what: str) -> list[float]:
        return [at for who, noted, at in self.notes if (who, noted) == (node, what)]

    def offers(self, node: str) -> list[UpdateId]:
        return [e.header.update_id for e in self.events if isinstance(e, Offer) and e.header.update_id.node == node]


def fleet(faults: dict[str, Any], *, horizon_s: float = 2000, versions: int = 5, site: bool = False, **sections: Any) -> Scenario:
    populations: dict[str, Any] = {"phones": {"count": 3, "profile": "gateways", "work": 0.3}}
    if site:
        populations["site"] = {"count": 1, "profile": "datacenter", "tier": "site", "work": 100}
    return parse(
        {
            "seed": 3,
            "horizon_s": horizon_s,
            "fleet": {
                "window": {"preset": "sync", "deadline_s": 100},
                "members": {"heartbeat_s": 10, "lease_s": 40, "stall_s": 30},
                "until": {"versions": versions},
                "coordinator": {"keep_versions": 2},
                **sections,
            },
            "populations": populations,
            "faults": faults,
        }
    )


def run(scenario: Scenario) -> tuple[SyntheticSimulation, Seen]:
    """All invariants are checked, the bytes too."""
    seen = Seen()
    simulation = SyntheticSimulation(scenario, observers=[seen])
    assert simulation.run().version == scenario.fleet.until.versions
    return simulation, seen


def at(what: str, point: str, node: str = "phones-1", occurrence: int = 1, **more: Any) -> dict[str, Any]:
    return {"at": [{"what": what, "node": node, "point": point, "occurrence": occurrence, **more}]}


# ---- the section --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"what": "drop"}, "give one of them"),
        ({"what": "crash", "point": "Upload", "at_s": 3}, "give one of them"),
        ({"what": "drop", "node": "phones-1", "at_s": 3}, "give its point"),
        ({"what": "drop", "point": "Upload"}, "whose Upload"),
        ({"what": "drop", "node": "phones-1", "point": "Uplaod"}, "there is no point 'Uplaod'; there are Join, "),
        ({"what": "crash", "node": "phones-1", "point": "accept:begun"}, "only a crash of it"),
        ({"what": "delay", "node": "root", "point": "accept:begun"}, "only a crash of it"),
    ],
)
def test_a_named_fault_that_cannot_happen(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fleet({"at": [fault]})


# ---- crashes ------------------------------------------------------------------------------------------------------------------

# The points of a run that has a site, forgets versions, and whose updates are all good.
PASSED = [point for point in CRASH_POINTS if not point.startswith(("create:", "recover:", "discard:"))]


@pytest.mark.parametrize("point", PASSED)
def test_the_root_loses_power_at_a_named_point(point: str) -> None:
    occurrence = 1 if point.startswith(("opened", "ended")) else 3
    simulation, seen = run(fleet(at("crash", point, ROOT, occurrence, down_s=7), site=True))
    assert simulation.root.starts == 2
    [stopped] = seen.times(ROOT, "stopped")
    assert seen.times(ROOT, "started")[1] == stopped + 7


def test_the_root_crashes_at_a_time_and_after_a_message() -> None:
    faults = {"at": [{"what": "crash", "at_s": 50, "down_s": 5}, *at("crash", "Upload", ROOT, 4)["at"]]}
    simulation, seen = run(fleet(faults))
    assert simulation.root.starts == 3
    first, second = seen.times(ROOT, "stopped")
    assert first == 50
    assert sum(isinstance(event, SliceStaged) for event in seen.events) >= 4
    assert second > 50


def test_a_member_crashes_as_it_sends() -> None:
    _, seen = run(fleet(at("crash", "Upload", occurrence=2, down_s=9)))
    [stopped] = seen.times("phones-1", "stopped")
    assert seen.times("phones-1", "started")[1] == stopped + 9
    offered = seen.offers("phones-1")
    assert len(offered) > len(set(offered))  # what it owed it pushes again


def test_crashes_come_at_their_rate_until_the_quiet_and_shift_nothing_else() -> None:
    def crashes(**more: Any) -> list[tuple[str, float]]:
        seen = Seen()
        faults = {"quiet_s": 2000, "members": {"crashes_per_h": 30, "down_s": 1}, **more}
        SyntheticSimulation(fleet(faults, horizon_s=14000, versions=10_000), observers=[seen]).run()
        return [(node, at) for node, what, at in seen.notes if what == "stopped" and node != ROOT]

    found = crashes()
    assert 3 * 12000 * 30 / 3600 == 300
    assert 300 - 4 * 300**0.5 < len(found) < 300 + 4 * 300**0.5
    assert max(at for _, at in found) < 12000
    # Whether a member is up when its crash comes may differ; the times at which they come do not.
    assert {at for _, at in crashes(messages={"drop": 0.01})} & {at for _, at in found}


# ---- messages -----------------------------------------------------------------------------------------------------------------


class Sink:
    """A root that notes what comes."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.received: list[tuple[float, str]] = []

    def receive(self, call: Call) -> None:
        self.received.append((self.loop.now(), call.request))

    def progressed(self, call: Call) -> None:
        pass


class Sender:
    name, life = "phones-1", 1

    def __init__(self) -> None:
        self.path = Path(down_bytes_per_s=1, up_bytes_per_s=1, latency_s=1.0, jitter=0, stream=random.Random(0))


def sent(faults: dict[str, Any], requests: dict[float, str]) -> tuple[list[tuple[float, str]], list[tuple[float, Any]]]:
    """What a root receives of these messages, each of which takes a second; and the answers that nobody gave."""
    loop = EventLoop()
    config = FaultsConfig.model_validate(faults)
    network = FaultyNetwork(loop, 10.0, Faults(config, Draws(1), loop, ["phones-1"], 1000.0))
    network.root = Sink(loop)
    sender, answers = Sender(), list[tuple[float, Any]]()
    for when, request in requests.items():
        loop.at(when, lambda request: network.call(sender, request, lambda a: answers.append((loop.now(), a))), request)
    loop.run()
    return network.root.received, answers


THREE = {0.0: "a", 10.0: "b", 20.0: "c"}


def test_without_faults_messages_come_as_they_were_sent() -> None:
    assert sent({}, THREE) == ([(1.0, "a"), (11.0, "b"), (21.0, "c")], [])


def test_a_dropped_message_is_a_call_that_fails() -> None:
    received, answers = sent({"messages": {"drop": 1, "timeout_s": 4}}, THREE)
    assert received == []
    assert [(when, type(answer).__name__) for when, answer in answers] == [(t, "Unreachable") for t in (4.0, 14.0, 24.0)]


def test_a_duplicate_comes_later_too() -> None:
    received, _ = sent({"messages": {"duplicate": 1, "delay_s": 2}}, {0.0: "a"})
    assert [request for _, request in received] == ["a", "a"]
    assert received[0][0] == 1.0 < received[1][0]


def test_a_delayed_message_comes_later() -> None:
    [(when, _)], _ = sent({"messages": {"delay": 1, "delay_s": 50}}, {0.0: "a"})
    assert when > 1.0


def test_reordered_messages_change_places() -> None:
    received, _ = sent({"messages": {"reorder": 1, "delay_s": 1e6}}, {0.0: "a", 2.0: "b", 4.0: "c"})
    assert [request for _, request in received] == ["b", "a", "c"]  # nothing comes after c that could overtake it
    assert received[0][0] == received[1][0] == 3.0


def test_no_message_is_touched_once_it_is_quiet() -> None:
    received, _ = sent({"quiet_s": 990, "messages": {"drop": 1}}, THREE)
    assert received == [(11.0, "b"), (21.0, "c")]


@pytest.mark.parametrize("point", ["Join", "Joined", "Offer", "Held", "Upload", "Receipt", "Pull", "Pulled", "News"])
def test_a_lost_message_delays_its_member_and_loses_nothing(point: str) -> None:
    _, seen = run(fleet(at("drop", point)))
    merged = {receipt.update_id for receipt in seen.receipts if receipt.state is State.MERGED}
    assert {update_id.node for update_id in merged} == {"phones-0", "phones-1", "phones-2"}


def test_a_push_that_comes_twice_is_merged_once() -> None:
    simulation, seen = run(fleet({**at("duplicate", "Upload"), "messages": {"delay_s": 1}}))
    offered = seen.offers("phones-1")
    assert offered[0] == offered[1]
    driver = simulation.root.driver
    assert driver is not None
    assert driver.status()["counters"]["duplicates"] >= 1


def test_damage_is_noticed_and_mended() -> None:
    faults = {"at": [{"what": "corrupt", "node": f"phones-{n}", "point": "Upload", "occurrence": 1 + n} for n in range(3)]}
    simulation, _ = run(fleet(faults))
    assert simulation.timeline.totals.refused == {"BAD_CHECKSUM": 3}
    simulation, _ = run(fleet(at("corrupt", "Pulled", occurrence=2)))
    assert simulation.timeline.totals.refused == {}  # a member refuses it, not the root


# ---- partitions ---------------------------------------------------------------------------------------------------------------


def test_partitions_cut_some_of_the_members_off_at_the_same_time() -> None:
    config = FaultsConfig.model_validate({"quiet_s": 1000, "partitions": {"per_h": 6, "mean_s": 100, "share": 0.5}})
    names = [f"phone-{n}" for n in range(40)]
    faults = Faults(config, Draws(5), EventLoop(), names, 101_000.0)
    cuts: dict[Interval, int] = {}
    for name in names:
        for cut in faults.cuts(name):
            cuts[cut] = cuts.get(cut, 0) + 1  # type: ignore[index, call-overload]
    assert 100_000 * 6 / 3600 - 40 < len(cuts) < 100_000 * 6 / 3600 + 40
    assert 0.4 < sum(cuts.values()) / len(cuts) / len(names) < 0.6
    assert all(stop - start > 0 and stop <= 100_000 for start, stop in cuts)
    everyone = Faults(
        config.model_copy(update={"partitions": config.partitions.model_copy(update={"share": 1.0})}),
        Draws(5),
        EventLoop(),
        names,
        101_000.0,
    )
    assert len({tuple(everyone.cuts(name)) for name in names}) == 1


def test_nothing_passes_during_a_partition() -> None:
    simulation, seen = run(fleet({"partitions": {"per_h": 20, "mean_s": 60, "share": 1}}))
    assert simulation.faults is not None
    for start, stop in simulation.faults.cuts("phones-0"):
        assert not [at for node, what, at in seen.notes if what == "adopted" and start < at < stop]


# ---- liars --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "topk:0.1"])
def test_what_a_liar_sends(codec: str) -> None:
    honest = SyntheticLearning(1)
    start = honest.first
    end = honest.train("liar", start, Unit(0, 10.0, 1, 1.0))
    geometry = Geometry(LAYOUT, codecs.get(codec))
    parameters, _ = geometry.required()

    def sends(lie: Lie | None, member: str = "liar") -> tuple[torch.Tensor, bytes]:
        liars = Byzantine(honest, {"liar": lie} if lie else {})
        parcel = liars.encode(member, Kind.DELTA, codec, start, end, None)
        first, last = geometry.byte_range(parameters)
        data = bytes(parcel.payload)
        return geometry.decode(tensor_over(data[first:last]), parameters), data[last:]

    truth, rest = sends(None)
    flipped, same = sends(Lie("sign_flip", 1.0))
    assert torch.equal(flipped, -truth)
    assert same == rest  # the buffers
    scaled, _ = sends(Lie("scale", 1000.0))
    torch.testing.assert_close(scaled, truth * 1000, rtol=0.01, atol=0)
    assert torch.equal(sends(Lie("nan", 1.0), member="honest")[0], truth)
    with pytest.raises(Refused, match="MALFORMED" if codec.startswith("topk") else "NOT_FINITE"):
        sends(Lie("nan", 1.0))


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "topk:0.1"])
def test_nothing_of_a_nan_is_merged(codec: str) -> None:
    lies = {"byzantine": {"members": ["phones-2"], "kind": "nan"}}
    simulation, seen = run(fleet(lies, edge={"codec": codec}))
    merged = {receipt.update_id.node for receipt in seen.receipts if receipt.state is State.MERGED}
    assert merged == {"phones-0", "phones-1"}
    refused = simulation.timeline.totals.refused
    assert set(refused) <= {"NOT_FINITE", "MALFORMED"}
    assert sum(refused.values()) >= 3


def test_the_limit_keeps_out_what_is_scaled() -> None:
    lies = {"byzantine": {"share": 0.0, "members": ["phones-2"], "kind": "scale", "factor": 1e5}}
    simulation, seen = run(fleet(lies, limits=LimitsConfig(max_norm=1000.0).model_dump()))
    assert simulation.timeline.totals.refused["NORM_BOUND"] >= 3
    assert {r.update_id.node for r in seen.receipts if r.state is State.MERGED} == {"phones-0", "phones-1"}
