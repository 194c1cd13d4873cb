"""Whole simulations in ``timing`` mode, against times and counts worked out by hand."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from helpers.simulated import DISK_S, HEARTBEAT_S, LATENCY_S, MERGE_S, PAYLOAD, Record, add, simulation

from fleetddp.common.errors import Unreachable
from fleetddp.common.events import Heartbeat, Join, Leave, Merge, Offer, Persisted, Published, SliceStaged
from fleetddp.common.update import Kind, State, Tier
from fleetddp.edge.sim.availability import Trace
from fleetddp.edge.sim.calls import Call, Network, Upload
from fleetddp.edge.sim.loop import EventLoop
from fleetddp.edge.sim.network import Cuts
from fleetddp.edge.sim.observer import ROOT
from fleetddp.edge.sim.scenario import parse
from fleetddp.edge.sim.simulator import Simulation
from fleetddp.edge.sim.timeline import Timeline

SMALL: dict[str, Any] = {
    "seed": 7,
    "horizon_s": 40_000,
    "fleet": {"members": {"heartbeat_s": 60, "lease_s": 150, "stall_s": 40}, "window": {"deadline_s": 300}},
    "populations": {
        "phones": {
            "count": 30,
            "profile": "phones",
            "samples": 200,
            "availability": {"kind": "nights", "utc_offsets_h": [0, 8]},
            "dropout": 0.1,
            "partial": 0.2,
            "clock_skew_s": 30,
        },
        "gateways": {
            "count": 3,
            "profile": "gateways",
            "samples": 100,
            "region": "eu",
            "outages": {"daily": 0.9, "mean_s": 2000},
        },
    },
    "regions": {"eu": {"up_bytes_per_s": 1e5, "cuts": [[8000, 9000]]}},
}


def run(data: dict[str, Any], **changes: Any) -> tuple[Timeline, str]:
    """The timeline and the log."""
    log = io.StringIO()
    return Simulation(parse({**data, **changes}), log=log).run(), log.getvalue()


# ---- times ------------------------------------------------------------------------------------------------------------------


def test_every_step_of_an_update_takes_the_time_that_it_should() -> None:
    record = Record()
    fleet = simulation(60 + HEARTBEAT_S, window={"preset": "async"}, record=record)
    add(fleet, "phone", train_s=10.0)
    timeline = fleet.run()

    started = record.times("started", "phone")[0]
    joined = started + 2 * LATENCY_S
    adopted = joined + LATENCY_S + PAYLOAD / 1000 + LATENCY_S
    trained = adopted + 10.0
    opened = trained + LATENCY_S + DISK_S  # of the stream
    uploaded = opened + LATENCY_S + PAYLOAD / 500 + LATENCY_S
    accepted = uploaded + DISK_S
    published = accepted + MERGE_S
    heard = published + LATENCY_S
    again = heard + LATENCY_S + PAYLOAD / 1000 + LATENCY_S

    assert record.handled_at(Join) == pytest.approx([started + LATENCY_S])
    assert record.times("adopted", "phone")[:2] == pytest.approx([adopted, again])
    assert record.times("trained", "phone")[0] == pytest.approx(trained)
    assert record.handled_at(Offer)[0] == pytest.approx(trained + LATENCY_S)
    assert record.handled_at(SliceStaged)[0] == pytest.approx(uploaded)
    assert record.handled_at(Persisted)[0] == pytest.approx(accepted)
    assert record.handled_at(Published)[0] == pytest.approx(published)
    told = [(t, receipt.state) for t, _, receipt in record.receipts[:2]]
    assert told == [(pytest.approx(accepted + LATENCY_S), State.ACCEPTED), (pytest.approx(heard), State.MERGED)]

    row = timeline.rows[0]
    assert (row.version, row.arrived, row.late, row.samples) == (1, 1, 0, 10.0)
    assert (row.decided_at, row.published_at) == (pytest.approx(accepted), pytest.approx(published))
    assert (row.bytes_up, row.bytes_down) == (PAYLOAD, PAYLOAD)
    usage = fleet.members["phone"].usage
    assert sum(usage.seconds.values()) == pytest.approx(timeline.virtual_s)
    assert usage.seconds["down"] == pytest.approx(started)
    assert usage.seconds["pull"] == pytest.approx((adopted - joined) * timeline.totals.counts["adopted"])


def test_heartbeats_keep_a_lease_and_take_three_events_each() -> None:
    record = Record()
    fleet = simulation(10_000, window={"preset": "sync", "deadline_s": 1e6}, record=record)
    add(fleet, "slow", train_s=1e6)
    fleet.run()
    beats = record.handled_at(Heartbeat)
    gaps = [b - a for a, b in pairwise(beats)]
    assert len(beats) > 90
    assert all(0.8 * HEARTBEAT_S <= gap - 2 * LATENCY_S <= HEARTBEAT_S for gap in gaps)
    assert len(record.handled_at(Join)) == 1
    # Beside those: its start, the join and the pull (two messages each), the wake-ups of its lease, and the timer of a last beat.
    assert 3 * len(beats) <= fleet.loop.handled <= 3 * len(beats) + 60


def test_staleness_counts_from_the_version_pulled() -> None:
    """When the slow one is merged, the fast one has made a few more versions: it is that many stale."""
    record = Record()
    fleet = simulation(400, window={"preset": "async"}, record=record)
    add(fleet, "fast", train_s=10.0)
    add(fleet, "slow", train_s=150.0)
    timeline = fleet.run()
    bases = {
        event.header.update_id: event.header.base_version for _, event in record.events if isinstance(event, Offer)
    }  # what each was trained from
    expected: dict[int, int] = {}
    for effect in record.wanted(Merge):
        for update_id in effect.decision.ids:
            staleness = effect.decision.version - 1 - bases[update_id]
            expected[staleness] = expected.get(staleness, 0) + 1
    slow = next(effect.decision for effect in record.wanted(Merge) if effect.decision.ids[0].node == "slow")
    sent = record.times("adopted", "slow")[0] - LATENCY_S - PAYLOAD / 1000
    published = sum(t <= sent for t in record.handled_at(Published))
    assert bases[slow.ids[0]] == published
    assert slow.version - 1 - published > 3
    assert timeline.staleness[Tier.EDGE] == expected
    assert sum(row.late for row in timeline.rows) == sum(n for staleness, n in expected.items() if staleness > 0) > 0


def test_a_slow_upload_makes_progress_and_is_not_dropped() -> None:
    record = Record()
    fleet = simulation(2000, window={"preset": "async"}, record=record)
    add(fleet, "thin", train_s=10.0, up=0.5)  # 800 s for an update; a transfer without a byte for 40 s has stalled
    timeline = fleet.run()
    assert timeline.version >= 1
    assert timeline.totals.refused == {}


def test_an_upload_that_stands_still_is_dropped_and_sent_again() -> None:
    record = Record()
    fleet = simulation(3000, window={"preset": "async"}, record=record)
    add(fleet, "phone", train_s=10.0, up=5.0, cuts=Cuts([(150, 600)]))  # the upload takes 80 s from about second 15 to 115 on
    timeline = fleet.run()
    assert timeline.version >= 1
    assert set(timeline.totals.refused) <= {"STALLED", "UNKNOWN_NODE"}
    assert all(len(versions) == 1 for versions in record.merged().values())


# ---- whole runs ---------------------------------------------------------------------------------------------------------------


def test_synchronous_rounds_hold_everyone() -> None:
    record = Record()
    fleet = simulation(1e5, window={"preset": "sync"}, until={"versions": 4}, record=record)
    for k in range(5):
        add(fleet, f"m{k}", train_s=150.0 + 10 * k)
    timeline = fleet.run()
    assert [row.version for row in timeline.rows] == [1, 2, 3, 4]
    assert [row.arrived for row in timeline.rows[1:]] == [5, 5, 5]
    assert [row.late for row in timeline.rows] == [0, 0, 0, 0]
    assert [row.bytes_up for row in timeline.rows[1:]] == [5 * PAYLOAD] * 3
    assert [row.bytes_down for row in timeline.rows[1:]] == [5 * PAYLOAD] * 3
    # A round: everyone hears, pulls, trains; the slowest decides.
    round_s = 3 * LATENCY_S + PAYLOAD / 1000 + 190 + LATENCY_S + 2 * LATENCY_S + PAYLOAD / 500 + MERGE_S
    for before, after in pairwise(timeline.rows[1:]):
        assert after.published_at - before.published_at == pytest.approx(round_s + 2 * DISK_S)
    assert timeline.finished == "version 4 is published"
    assert sorted(node for _, node, what in record.notes if what == "left") == [f"m{k}" for k in range(5)]
    assert len(record.handled_at(Leave)) == 5
    assert timeline.virtual_s == timeline.rows[-1].published_at
    assert len(fleet.loop) == 0  # nobody sends heartbeats any more


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    first, log = run(SMALL)
    again, same_log = run(SMALL)
    other, other_log = run(SMALL, seed=8)
    assert len(first.rows) > 10
    assert first.rows == again.rows
    assert log == same_log
    assert first.totals == again.totals
    assert other.rows != first.rows
    assert log != other_log


def test_the_log_is_json_lines_in_the_order_of_time() -> None:
    timeline, log = run(SMALL)
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["t"] for line in lines] == sorted(line["t"] for line in lines)
    versions = [line for line in lines if line["what"] == "version"]
    assert [line["version"] for line in versions] == [row.version for row in timeline.rows]
    assert [line["arrived"] for line in versions] == [row.arrived for row in timeline.rows]
    words = {line["what"] for line in lines}
    assert {"started", "stopped", "lost work", "joined", "lost", "version", "usage"} <= words


def test_a_mixed_fleet_adds_up() -> None:
    timeline, _ = run(SMALL)
    assert [row.version for row in timeline.rows] == list(range(1, len(timeline.rows) + 1))
    merged = sum(row.arrived for row in timeline.rows)
    assert merged == sum(timeline.staleness[Tier.EDGE].values())
    assert 0 < merged <= timeline.totals.counts["trained"]
    assert timeline.totals.counts["lost work"] > 0
    usage = timeline.usage[Tier.EDGE]
    assert usage.devices == 33
    assert usage.down_s + usage.available_s == pytest.approx(33 * timeline.virtual_s)
    assert 0 < usage.utilisation < 1
    full = 30 * 200.0  # some updates are partial
    assert all(row.samples < full + 3 * 100 for row in timeline.rows)
    assert any(row.samples % 100 for row in timeline.rows)


def test_a_device_more_does_not_change_what_others_are() -> None:
    more = {**SMALL, "populations": {**SMALL["populations"], "late": {"count": 1, "profile": "jetsons"}}}
    few, many = Simulation(parse(SMALL)), Simulation(parse(more))
    for name, member in few.members.items():
        twin = many.members[name]
        assert member._profile == twin._profile
        assert member._rng.random() == twin._rng.random()


# ---- sites --------------------------------------------------------------------------------------------------------------------


def test_a_site_brings_the_first_weights_and_the_edge_waits_for_them() -> None:
    scenario = parse(
        {
            "horizon_s": 4000,
            "fleet": {
                "members": {"sites": ["site-0"]},
                "window": {"preset": "semi_sync"},
                "site": {"sync_every": 20, "codec": "int8"},
            },
            "model": {"parameters": 5000, "buffers": 10},
            "populations": {
                "phones": {"count": 4, "profile": "phones", "samples": 50},
                "site": {"count": 1, "profile": "datacenter", "tier": "site", "samples": 64},
            },
        }
    )
    record = Record()
    timeline = Simulation(scenario, observers=[record]).run()
    offers = [(t, event.header, event.slice) for t, event in record.events if isinstance(event, Offer)]
    _, init, _ = offers[0]
    assert (init.kind, init.tier, init.codec) == (Kind.INIT, Tier.SITE, "float32")
    assert [header.kind for _, header, _ in offers[1:]] == [Kind.DELTA] * (len(offers) - 1)
    site = [(header, part) for _, header, part in offers[1:] if header.tier is Tier.SITE]
    assert {(header.codec, header.steps, part.samples) for header, part in site} == {("int8", 20, 64 * 20)}
    assert timeline.version > 5
    assert set(timeline.staleness) == {Tier.SITE, Tier.EDGE}
    assert set(timeline.usage) == {Tier.SITE, Tier.EDGE}
    assert min(t for t, _, what in record.notes if what == "adopted") > record.handled_at(Published)[0]


def test_a_site_that_may_not_wait_trains_on() -> None:
    record = Record()
    fleet = simulation(1000, window={"preset": "sync", "deadline_s": 1e6}, record=record)
    add(fleet, "site", train_s=10.0, tier=Tier.SITE, wait_s=5.0)
    add(fleet, "slow", train_s=1e6)
    fleet.run()
    # Until the slow one has joined, every update of the site makes a version.
    trained = [t for t in record.times("trained", "site") if t > HEARTBEAT_S + 30]
    assert len(trained) > 50
    assert {round(b - a, 6) for a, b in pairwise(trained)} == {15.0}
    # Each unit is an update of its own, on the same base: the parent takes them in faster than they are made.
    offers = [event for t, event in record.events if isinstance(event, Offer) and t > HEARTBEAT_S + 30]
    assert {event.slice.samples for event in offers} == {10.0}
    assert len({event.header.base_version for event in offers}) == 1


# ---- faults -------------------------------------------------------------------------------------------------------------------


def test_a_device_that_stops_loses_its_work_and_comes_back_as_a_new_incarnation() -> None:
    record = Record()
    fleet = simulation(1000, window={"preset": "async"}, record=record)
    add(fleet, "phone", train_s=300.0, availability=Trace(True, [200.0, 350.0]))
    timeline = fleet.run()
    assert record.times("lost work", "phone") == [200.0]
    assert record.times("stopped", "phone") == [200.0]
    assert record.times("started", "phone")[1] == 350.0
    joins = [event for _, event in record.events if isinstance(event, Join)]
    assert joins[1].incarnation > joins[0].incarnation
    assert timeline.version >= 1


def test_a_device_that_is_never_available_does_nothing() -> None:
    record = Record()
    fleet = simulation(1000, window={"preset": "async"}, record=record)
    add(fleet, "off", train_s=1.0, availability=Trace(False, []))
    timeline = fleet.run()
    assert record.events == []
    assert timeline.usage[Tier.EDGE].down_s == 1000


def test_what_is_owed_survives_a_crash_of_its_member() -> None:
    record = Record()
    fleet = simulation(2000, window={"preset": "async"}, record=record)
    phone = add(fleet, "phone", train_s=10.0, up=5.0)  # the upload takes 80 s
    seen: list[Any] = []

    def crash(_: None) -> None:
        assert record.handled_at(SliceStaged) == []
        seen.extend(phone.owed.open())
        phone.crash(down_s=30)

    fleet.loop.at(80, crash)
    fleet.run()
    assert len(seen) == 1
    assert record.merged()[seen[0]] == {1}
    assert [event.header.update_id for _, event in record.events if isinstance(event, Offer)][:2] == seen * 2


@pytest.mark.parametrize("down_s", [1.0, 90.0, 1000.0])
def test_a_crash_of_the_root_loses_nothing_that_was_acknowledged(down_s: float) -> None:
    record = Record()
    fleet = simulation(20_000, window={"preset": "semi_sync", "deadline_s": 200}, record=record)
    for k in range(6):
        add(fleet, f"m{k}", train_s=50.0 + 20 * k)
    for time in (1000, 5003, 9007.5):
        fleet.loop.at(time, lambda _: fleet.root.crash())
        fleet.loop.at(time + down_s, lambda _: fleet.root.start())
    timeline = fleet.run()
    assert record.times("started", ROOT) == [0.0, 1000 + down_s, 5003 + down_s, 9007.5 + down_s]
    numbers = [row.version for row in timeline.rows]
    assert numbers == list(range(1, len(numbers) + 1))
    assert timeline.rows[-1].decided_at > 19_000
    merged = record.merged()
    assert all(len(versions) == 1 for versions in merged.values())
    told_late = {i for t, _, r in record.receipts if t > 19_000 for i in [r.update_id]}
    assert record.accepted() - told_late <= merged.keys()


def test_a_member_that_is_cut_off_trains_on_and_its_unseen_update_grows() -> None:
    record = Record()
    fleet = simulation(4000, window={"preset": "async"}, record=record)
    add(fleet, "phone", train_s=130.0)
    fleet.loop.at(100, lambda _: fleet.root.crash())  # it has pulled version 0 and trains
    fleet.loop.at(2100, lambda _: fleet.root.start())
    fleet.run()
    offers = [(t, event) for t, event in record.events if isinstance(event, Offer)]
    assert offers[0][0] > 2100
    assert offers[0][1].slice.samples == 10.0  # tried before it knew that it was cut off: it may not change any more
    second = next(event for _, event in offers if event.header.update_id.sequence == 2)
    units = second.slice.samples / 10
    assert units == second.header.steps / 5 > 10  # about 2000 s in units of 130 s
    assert second.header.base_version == 0
    assert second.header.seconds == pytest.approx(130 * units)


class Lossy(Network):
    """Loses the third message of each kind of request, on its way up, and the fifth on its way down."""

    def __init__(self, loop: EventLoop, progress_s: float) -> None:
        super().__init__(loop, progress_s)
        self.seen: dict[tuple[type, bool], int] = {}
        self.lost: list[type] = []

    def send(self, call: Call, up: bool, deliver: Callable[[Call], None]) -> float:
        key = (type(call.request), up)
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] != (3 if up else 5):
            return super().send(call, up, deliver)
        self.lost.append(type(call.request))
        call.answer, call.size = Unreachable("lost"), 0
        super().send(call, False, self._at_member)
        return math.inf


def test_lost_messages_are_failed_calls_and_nothing_is_lost_by_them() -> None:
    record = Record()
    fleet = simulation(
        20_000, window={"preset": "semi_sync", "deadline_s": 200}, until={"versions": 30}, record=record, network=Lossy
    )
    for k in range(8):
        add(fleet, f"m{k}", train_s=50.0 + 20 * k)
    timeline = fleet.run()
    assert isinstance(fleet.network, Lossy)
    assert {Join, Heartbeat, Offer, Upload} <= set(fleet.network.lost)
    assert timeline.version == 30
    assert all(len(versions) == 1 for versions in record.merged().values())


def test_dropouts_come_back() -> None:
    record = Record()
    fleet = simulation(50_000, window={"preset": "async"}, record=record)
    add(fleet, "phone", train_s=100.0, dropout=0.5, restart_s=30.0)
    timeline = fleet.run()
    lost, trained = timeline.totals.counts["lost work"], timeline.totals.counts["trained"]
    assert 0.35 < lost / (lost + trained) < 0.65
    stopped, started = record.times("stopped", "phone"), record.times("started", "phone")
    assert len(started) - 1 in (len(stopped), len(stopped) - 1)
    assert [b - a for a, b in zip(stopped, started[1:], strict=False)] == pytest.approx([30.0] * (len(started) - 1))
    assert sum(row.dropped for row in timeline.rows) <= lost
