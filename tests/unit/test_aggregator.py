"""The aggregator as a whole: windows over time, merges, the first weights, the end of a run, and restarts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers.steering import LAYOUT, Steered, durable, founded, header, init, part, partial, uid, version

from fleetddp.common import events
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.recovered import Recovered
from fleetddp.common.update import NO_VERSION, Receipt, State, Tier, UpdateId

SYNC = {"preset": "sync"}
HALF = {"quorum": 0.5, "grace_s": 4, "deadline_s": 30}
LEASES = {"heartbeat_s": 5, "lease_s": 20, "stall_s": 6}


def ids(steered: Steered) -> list[list[str]]:
    """The nodes in each decision."""
    return [[i.node for i in decision.ids] for decision in steered.merges()]


# ---- windows over time ------------------------------------------------------------------------------------------------------


def test_sync_merges_all_members_every_window() -> None:
    fleet = Steered.of(window=SYNC)
    fleet.join("a", "b", "c")
    for number in (1, 2):
        for node in "cab":
            assert fleet.merges() == [] if number == 1 else len(fleet.merges()) == 1
            assert fleet.update(node, number) == Receipt(update_id=uid(node, number), state=State.ACCEPTED)
        decision = fleet.merges()[-1]
        assert decision.version == number
        assert decision.ids == decision.leaf_ids == tuple(uid(node, number) for node in "abc")
        assert [term.coefficient for term in decision.terms] == pytest.approx([1 / 3] * 3, abs=1e-15)
        fleet.publish()
        assert fleet.aggregator.version == number
        assert fleet.receipt(uid("b", number)) == Receipt(update_id=uid("b", number), state=State.MERGED, version=number)
    assert [a.version for a in fleet.all(events.Announce)] == [1, 2]


def test_a_dead_member_delays_sync_until_its_lease_ends() -> None:
    fleet = Steered.of(window=SYNC, members=LEASES)
    fleet.join("a", "b", "c")
    fleet.at(3).update("a")
    fleet.update("b")
    fleet.at(10).beat("a", "b")
    fleet.at(19).beat("a", "b")
    fleet.at(19.999)
    assert fleet.merges() == []
    fleet.at(20)
    assert ids(fleet) == [["a", "b"]]
    assert fleet.merges()[0].at == 20  # 20 s after c was heard of last


@pytest.mark.parametrize("killed", [("d",), ("c", "d")])
def test_a_member_killed_in_mid_window_delays_it_by_no_more_than_the_grace(killed: tuple[str, ...]) -> None:
    fleet = Steered.of(window=HALF, members=LEASES)
    fleet.join("a", "b", "c", "d")
    fleet.at(2).update("a")
    fleet.at(3).update("b")  # the quorum
    for node in {"c", "d"} - set(killed):
        fleet.at(4).update(node)
    fleet.at(100)
    assert fleet.merges()[0].at == 3 + 4


def test_more_than_half_killed_delay_a_window_by_no_more_than_lease_or_deadline() -> None:
    fleet = Steered.of(window={**HALF, "deadline_s": 12}, members=LEASES)
    fleet.join("a", "b", "c", "d")
    fleet.at(2).update("a")
    fleet.at(100)
    assert fleet.merges()[0].at == 12
    assert fleet.merges()[0].reason == "deadline with 1 update of 4 members expected"


def test_a_poisoned_update_does_not_hold_the_window_open() -> None:
    fleet = Steered.of(window=SYNC)
    fleet.join("a", "b", "evil")
    fleet.update("a")
    assert isinstance(fleet.offer(header(uid("evil"))), events.Proceed)
    refusal = Refused(Reason.NOT_FINITE, "element 3 is nan")
    fleet.send(events.SliceRejected(update_id=uid("evil"), slice=part(), refusal=refusal))
    assert fleet.merges() == []
    fleet.update("b")
    assert ids(fleet) == [["a", "b"]]
    # it is expected again in the next window
    fleet.publish()
    fleet.update("a", 1)
    fleet.update("b", 1)
    assert fleet.reason == "waiting for a quorum: 2 of 3 members (3 expected)"


def test_a_member_that_made_good_for_its_bad_update_counts() -> None:
    fleet = Steered.of(window=SYNC, limits={"max_norm": 2.0})
    fleet.join("a", "b")
    fleet.offer(header(uid("b")))
    fleet.staged(uid("b"), squared_norm=9.0)
    assert fleet.window["expected"] == 1
    fleet.update("b", 1)
    assert (fleet.window["expected"], fleet.window["arrived_members"]) == (2, 1)


def test_a_stalled_transfer_is_no_longer_waited_for() -> None:
    fleet = Steered.of(window={**HALF, "grace_s": 25}, members=LEASES)
    fleet.join("a", "b")
    fleet.at(1).offer(header(uid("b")))
    fleet.at(2).update("a")
    assert fleet.reason == "quorum with 1 update: waiting at most 25 s for 1 on their way"
    fleet.at(5).send(events.Progressed(update_id=uid("b")))
    fleet.at(10.9)
    assert fleet.merges() == []
    fleet.at(11)  # 6 s without a byte
    assert ids(fleet) == [["a"]]


def test_progress_after_a_stall_counts_again() -> None:
    fleet = Steered.of(window=SYNC, members=LEASES)
    fleet.join("a", "b")
    fleet.offer(header(uid("b")))
    fleet.at(7)
    assert fleet.window["outstanding"] == 1  # a alone
    fleet.send(events.Progressed(update_id=uid("b")))
    assert fleet.window["outstanding"] == 2
    fleet.at(12).staged(uid("b"))
    assert fleet.receipt(uid("b")) == Receipt(update_id=uid("b"), state=State.ACCEPTED)
    assert fleet.window["outstanding"] == 1


def test_a_fast_member_that_sends_twice_is_one_member() -> None:
    fleet = Steered.of(window=SYNC)
    fleet.join("fast", "slow")
    fleet.update("fast", 0)
    fleet.update("fast", 1)
    assert fleet.merges() == []
    fleet.update("slow")
    assert ids(fleet) == [["fast", "fast", "slow"]]


def test_fedbuff_counts_updates_also_of_one_member() -> None:
    fleet = Steered.of(window={"preset": "fedbuff", "quorum": 3})
    fleet.join("a", "b")
    for sequence in range(3):
        assert fleet.merges() == []
        fleet.update("a", sequence)
    assert ids(fleet) == [["a", "a", "a"]]


def test_a_member_that_leaves_is_not_expected_any_more() -> None:
    fleet = Steered.of(window=SYNC)
    fleet.join("a", "b")
    fleet.update("a")
    assert fleet.send(events.Leave(node="b", incarnation=1)) == events.Left()
    assert ids(fleet) == [["a"]]
    assert fleet.send(events.Leave(node="b", incarnation=1)) == events.Left()


def test_an_extended_window_says_so_once_and_merges_when_there_is_enough() -> None:
    fleet = Steered.of(window={"preset": "periodic", "deadline_s": 10, "min_updates": 2})
    fleet.join("a", "b")
    fleet.at(1).update("a")
    fleet.at(15).beat("a", "b")
    assert fleet.merges() == []
    said = [say.message for say in fleet.all(events.Say) if say.what == "window"]
    assert said[-1] == "deadline with 1 update, at least 2 needed: extended by 10 s"
    fleet.update("b")
    assert fleet.merges() == []
    fleet.at(25)
    assert (ids(fleet), fleet.merges()[0].at) == ([["a", "b"]], 20)


def test_the_grace_learns_from_those_who_missed_the_window() -> None:
    fleet = Steered.of(window={"quorum": 2, "grace_s": "auto"}, members={"lease_s": 1000})
    fleet.join("a", "b", "slow")
    fleet.at(10).update("a")
    fleet.update("b")
    assert fleet.window["grace_s"] == 10  # as long again as the quorum took
    fleet.at(20)
    assert ids(fleet) == [["a", "b"]]
    fleet.publish()
    fleet.at(23).update("slow", base_version=0)  # 13 s after the quorum it was meant for
    fleet.at(34).update("a", 1)  # the next quorum, 14 s after its window opened: 13 s are worth waiting
    assert fleet.window["grace_s"] == 13


# ---- one merge at a time ----------------------------------------------------------------------------------------------------


def test_the_next_window_gathers_while_a_merge_is_in_flight_and_closes_after_it() -> None:
    fleet = Steered.of(window={"preset": "async"})
    fleet.join("a", "b")
    fleet.at(1).update("a")
    fleet.at(2).update("b")
    fleet.update("a", 1)
    assert ids(fleet) == [["a"]]
    assert fleet.reason == "making version 1; 2 updates for the next one so far"
    fleet.at(3).publish()
    assert ids(fleet) == [["a"], ["a", "b"]]
    assert fleet.merges()[1].at == 3
    # b and the second of a stand on version 0; the version below the one being made is 1
    assert fleet.aggregator.status(3)["members"][1]["staleness"] == 1


def test_each_version_opens_the_next_window_at_its_decision() -> None:
    fleet = Steered.of(window={"preset": "async", "deadline_s": 10})
    fleet.join("a")
    fleet.at(4).update("a")
    assert fleet.window["opened_at"] == 4
    fleet.at(6).publish()
    assert fleet.aggregator.closes_at == 14
    assert fleet.beat("a").closes_at == 14


def test_a_repeated_published_changes_nothing() -> None:
    fleet = Steered.of(window={"preset": "async"})
    fleet.join("a")
    fleet.update("a")
    fleet.publish()
    before = len(fleet.effects)
    fleet.send(events.Published(version=version(1)))
    assert fleet.effects[before:] == []
    assert fleet.aggregator.version == 1


def test_metrics_of_a_decision_are_means_weighted_by_samples() -> None:
    fleet = Steered.of(window=SYNC)
    fleet.join("a", "b", "c")
    fleet.push(header(uid("a"), metrics={"loss": 1.0, "lr": 0.5}), part(samples=30))
    fleet.push(header(uid("b"), metrics={"loss": 4.0}), part(samples=10))
    fleet.push(header(uid("c"), metrics={"loss": float("nan")}), part(samples=1000))
    assert fleet.merges()[0].metrics == {"loss": 1.75, "lr": 0.5}


# ---- the first weights ------------------------------------------------------------------------------------------------------


def empty(**sections: Any) -> Steered:
    return Steered.of(Recovered.empty("fleet"), **sections)


def test_the_first_site_brings_version_0_and_opens_the_first_window() -> None:
    fleet = empty()
    joined = fleet.join("paris", tier=Tier.SITE)
    assert (joined.wants_init, joined.version, joined.layout) == (True, NO_VERSION, "")
    assert not fleet.join("watch").wants_init
    assert fleet.window == {"reason": ""}
    fleet.at(5).push(init(uid("paris")))
    found = fleet.all(events.Found)
    assert [(f.update.update_id, f.at) for f in found] == [(uid("paris"), 5)]
    assert fleet.receipt(uid("paris")).state is State.ACCEPTED  # type: ignore[union-attr]
    assert not fleet.join("rome", tier=Tier.SITE).wants_init
    fleet.at(6).publish()
    assert fleet.receipt(uid("paris")) == Receipt(update_id=uid("paris"), state=State.MERGED, version=0)
    assert fleet.all(events.Opened) == [events.Opened(at=6)]
    assert fleet.all(events.Announce) == [events.Announce(version=0)]
    assert fleet.join("rome", tier=Tier.SITE).layout == LAYOUT.fingerprint
    assert fleet.aggregator.layout == LAYOUT


def test_of_two_sites_that_bring_weights_the_first_to_be_whole_wins() -> None:
    fleet = empty()
    fleet.join("paris", "rome", tier=Tier.SITE)
    for site in ("paris", "rome"):
        assert isinstance(fleet.offer(init(uid(site))), events.Proceed)
    fleet.staged(uid("rome"))
    fleet.staged(uid("paris"))
    assert [f.update.update_id.node for f in fleet.all(events.Found)] == ["rome"]
    refused = fleet.receipt(uid("paris"))
    assert refused is not None
    assert (refused.state, refused.reason) == (State.REFUSED, "INIT_TAKEN")
    assert fleet.offer(init(uid("paris", 1))).reason is Reason.INIT_TAKEN
    fleet.publish()
    assert fleet.offer(init(uid("paris", 2))).reason is Reason.INIT_TAKEN


def test_an_init_that_the_disk_refused_leaves_the_place_free() -> None:
    fleet = empty(prompt=False)
    fleet.join("paris", "rome", tier=Tier.SITE)
    fleet.push(init(uid("paris")))
    fleet.send(events.PersistFailed(update=fleet.all(events.Persist)[0].update, message="disk full"))
    assert fleet.receipt(uid("paris")) == Receipt(
        update_id=uid("paris"), state=State.UNKNOWN, reason="STORAGE", message="disk full"
    )
    assert fleet.join("rome", tier=Tier.SITE).wants_init
    assert isinstance(fleet.offer(init(uid("rome"))), events.Proceed)


def test_weights_from_a_file_are_not_asked_of_a_site() -> None:
    fleet = empty(start={"bootstrap": "file", "file": "w.safetensors"})
    assert not fleet.join("paris", tier=Tier.SITE).wants_init
    assert fleet.offer(init(uid("paris"))).reason is Reason.INIT_TAKEN


# ---- the end ----------------------------------------------------------------------------------------------------------------


def test_the_last_version_ends_the_run_and_settles_what_came_too_late() -> None:
    fleet = Steered.of(window={"preset": "async"}, until={"versions": 1})
    fleet.join("a", "b", "c")
    fleet.update("a")
    fleet.update("b")
    fleet.offer(header(uid("c")))
    fleet.publish()
    why = "version 1 is published"
    assert fleet.aggregator.finished == why
    assert fleet.all(events.Ended) == [events.Ended(reason=why)]
    assert fleet.all(events.Announce)[-1] == events.Announce(version=1, finished=why)
    assert [fleet.receipt(uid(node)).state for node in "abc"] == [State.MERGED, State.EXPIRED, State.REFUSED]  # type: ignore[union-attr]
    assert fleet.beat("b").finished == why
    assert fleet.join("d").finished == why
    assert fleet.offer(header(uid("a", 1), base_version=1)).reason is Reason.FINISHED
    assert fleet.offer(header(uid("b"))).state is State.EXPIRED


def test_an_update_made_durable_after_the_end_expires() -> None:
    fleet = Steered.of(window={"preset": "async"}, until={"hours": 1}, prompt=False)
    fleet.at(3599).join("a")
    fleet.offer(header(uid("a")))
    fleet.staged(uid("a"))
    fleet.at(3600)
    assert fleet.aggregator.finished == "1 hours have passed"
    fleet.send(events.Persisted(update=fleet.all(events.Persist)[0].update))
    assert [receipt.state for receipt in fleet.receipts[uid("a")]] == [State.ACCEPTED, State.EXPIRED]
    assert fleet.merges() == []


def test_the_hours_of_a_run_go_on_through_a_restart() -> None:
    recovered = founded(3, began_at=1000.0, window_opened_at=4000.0, accepted=(durable(header(uid("a"), base_version=3)),))
    fleet = Steered.of(recovered, now=4000.0, until={"hours": 1})
    assert not fleet.at(4599).aggregator.finished
    assert fleet.at(4600).aggregator.finished == "1 hours have passed"
    # over before it was started again: nothing is merged any more
    fleet = Steered.of(recovered, now=5000.0, until={"hours": 1}, window={"preset": "async"})
    assert fleet.aggregator.finished == "1 hours have passed"
    assert fleet.merges() == []
    assert fleet.receipts[uid("a")][-1].state is State.EXPIRED


def test_a_metric_of_a_version_ends_the_run() -> None:
    fleet = Steered.of(until={"metric": "accuracy", "at_least": 0.9})
    fleet.join("a")
    fleet.beat("a", metrics={"accuracy": 0.95})  # of its training
    fleet.beat("a", metrics={"accuracy": 0.95}, metrics_version=1)  # not published yet
    fleet.beat("a", metrics={"accuracy": 0.89}, metrics_version=0)
    assert fleet.aggregator.finished == ""
    assert fleet.beat("a", metrics={"accuracy": 0.9}, metrics_version=0).finished == "accuracy of version 0 is 0.9"


def test_a_merge_in_flight_at_the_end_is_still_published() -> None:
    fleet = Steered.of(window={"preset": "async"}, until={"metric": "accuracy", "at_least": 0.9})
    fleet.join("a")
    fleet.update("a")
    fleet.beat("a", metrics={"accuracy": 0.9}, metrics_version=0)
    fleet.publish()
    assert fleet.receipt(uid("a")) == Receipt(update_id=uid("a"), state=State.MERGED, version=1)
    assert fleet.all(events.Announce)[-1] == events.Announce(version=1, finished="accuracy of version 0 is 0.9")


# ---- restarts ---------------------------------------------------------------------------------------------------------------


def recovered(**fields: Any) -> Recovered:
    """After version 1 of a, b and c; a's next update is accepted."""
    given: dict[str, Any] = {
        "window_opened_at": 100.0,
        "accepted": (durable(header(uid("a", 1), base_version=1)),),
        "high_water": {("a", 1): 1, ("b", 1): 0, ("c", 1): 0},
        "merged": {uid("a"): 1, uid("b"): 1, uid("c"): 1},
    }
    return founded(1, **{**given, **fields})


def test_a_window_does_not_close_merely_because_nobody_has_come_back() -> None:
    fleet = Steered.of(recovered(), now=110, window=SYNC, members=LEASES)
    assert (fleet.window["opened_at"], fleet.window["expected"], fleet.window["arrived"]) == (100, 3, 1)
    assert fleet.reason == "restarted: waiting for the members to come back; 1 update so far"
    assert fleet.beat("a").reason is Reason.UNKNOWN_NODE
    fleet.at(112).join("a", "b")
    fleet.at(116).update("b", 1)
    assert fleet.reason == "waiting for a quorum: 2 of 3 members (3 expected)"  # c may still come
    fleet.at(129).beat("a", "b")
    assert fleet.merges() == []
    fleet.at(130)  # c's lease since the restart
    assert ids(fleet) == [["a", "b"]]


def test_members_that_come_back_are_not_waited_for_longer_than_without_a_restart() -> None:
    fleet = Steered.of(recovered(), now=110, window=SYNC, members=LEASES)
    fleet.at(111).join("a", "b", "c")
    fleet.at(112).update("b", 1)
    fleet.at(116).update("c", 1)
    assert (ids(fleet), fleet.merges()[0].at) == ([["a", "b", "c"]], 116)


def test_an_accepted_update_stays_counted_if_its_sender_never_comes_back() -> None:
    fleet = Steered.of(recovered(merged={}), now=110, window=SYNC, members=LEASES)
    fleet.at(114.9)
    assert fleet.merges() == []
    fleet.at(115)
    assert ids(fleet) == [["a"]]


def test_a_deadline_that_passed_during_the_outage_leaves_members_a_heartbeat_to_come_back() -> None:
    fleet = Steered.of(recovered(), now=1000, window={**HALF, "deadline_s": 30}, members=LEASES)
    fleet.at(1004.9)
    assert fleet.merges() == []
    fleet.at(1005)
    assert ids(fleet) == [["a"]]


def test_an_update_counts_although_the_opening_of_its_window_could_not_be_journaled() -> None:
    fleet = Steered.of(founded(accepted=(durable(header(uid("a"))),)), now=100.0, window={"preset": "fedbuff", "quorum": 2})
    assert fleet.all(events.Opened) == [events.Opened(at=100.0)]
    fleet.join("b")
    fleet.update("b")
    assert ids(fleet) == [["a", "b"]]


def test_a_clock_that_was_set_back_does_not_hold_a_window_open() -> None:
    fleet = Steered.of(founded(window_opened_at=1e9), now=1000.0, window={"preset": "periodic", "deadline_s": 60})
    fleet.join("a")
    fleet.update("a")
    fleet.at(1060)
    assert [decision.at for decision in fleet.merges()] == [1060.0]


def test_a_count_of_updates_does_not_wait_for_anybody_to_come_back() -> None:
    fleet = Steered.of(recovered(), now=110, window={"preset": "async"})
    assert (ids(fleet), fleet.merges()[0].at) == ([["a"]], 110)


def test_a_journaled_decision_is_issued_again_as_it_was() -> None:
    first = Steered.of(window={"preset": "async"})
    first.join("a")
    first.update("a")
    decision = first.merges()[0]
    late = durable(header(uid("b")))
    journal = founded(0, window_opened_at=7.0, accepted=(durable(header(uid("a"))), late), decision=decision)
    again = Steered.of(journal, now=8, window={"preset": "async"})
    assert again.merges() == [decision]
    assert again.reason == "making version 1; 1 updates for the next one so far"
    assert again.window["opened_at"] == 7
    again.publish()
    assert again.receipt(uid("a")) == Receipt(update_id=uid("a"), state=State.MERGED, version=1)
    assert ids(again) == [["a"], ["b"]]


def test_accepted_weights_that_made_no_version_yet_are_found_again() -> None:
    journal = replace(Recovered.empty("fleet"), layout=LAYOUT, accepted=(durable(init(uid("paris"))),))
    fleet = Steered.of(journal, now=3)
    assert [(f.update.update_id, f.at) for f in fleet.all(events.Found)] == [(uid("paris"), 3)]
    assert not fleet.join("rome", tier=Tier.SITE).wants_init
    fleet.publish()
    assert fleet.receipt(uid("paris")) == Receipt(update_id=uid("paris"), state=State.MERGED, version=0)


def test_repeats_after_a_restart_are_known() -> None:
    fleet = Steered.of(recovered(), now=110)
    fleet.join("a", "b")
    assert fleet.offer(header(uid("a"))) == Receipt(update_id=uid("a"), state=State.MERGED, version=1, duplicate=True)
    known = fleet.push(header(uid("a", 1), base_version=1))
    assert known == Receipt(update_id=uid("a", 1), state=State.ACCEPTED, duplicate=True)
    assert fleet.join("a", open=(uid("a"), uid("a", 9))).receipts == (
        Receipt(update_id=uid("a"), state=State.MERGED, version=1),
        Receipt(update_id=uid("a", 9), state=State.UNKNOWN),
    )


def test_a_process_older_than_one_whose_updates_are_merged_is_told_so_even_after_a_restart() -> None:
    fleet = Steered.of(founded(4, high_water={("a", 7): 3}), window=SYNC)
    refusal = fleet.join("a", incarnation=6)
    assert (refusal.reason, refusal.message) == (Reason.SUPERSEDED, "incarnation 6 of a was replaced by 7")
    assert isinstance(fleet.join("a", incarnation=7), events.Joined)
    assert isinstance(fleet.join("a", incarnation=8), events.Joined)


def test_an_update_that_a_decision_made_stale_before_it_was_acknowledged_is_refused_at_the_restart() -> None:
    stale = durable(header(uid("late"), base_version=0))
    fresh = durable(header(uid("a", 1), base_version=1))
    journal = recovered(accepted=(stale, fresh))
    fleet = Steered.of(journal, now=110, merge={"staleness": {"max_staleness": 0}}, window={"preset": "async"})
    assert fleet.receipt(uid("late")).reason == "STALE"  # type: ignore[union-attr]
    assert fleet.all(events.Discard) == [events.Discard(update_id=uid("late"))]
    assert ids(fleet) == [["a"]]


def test_a_finished_run_stays_finished() -> None:
    fleet = Steered.of(recovered(finished="version 1 is published"), now=110)
    assert fleet.receipt(uid("a", 1)).state is State.EXPIRED  # type: ignore[union-attr]
    assert fleet.join("a").finished == "version 1 is published"
    assert fleet.at(1e6).merges() == []


def test_a_run_that_reached_its_end_before_it_was_told_ends_at_the_restart() -> None:
    fleet = Steered.of(recovered(), now=110, until={"versions": 1})
    assert fleet.all(events.Ended) == [events.Ended(reason="version 1 is published")]


# ---- members and answers ----------------------------------------------------------------------------------------------------


def test_joined_says_what_a_member_needs() -> None:
    fleet = Steered.of(members=LEASES, merge={"gradient_lr": 0.25})
    joined = fleet.join("a")
    assert joined == events.Joined(
        run="fleet",
        version=0,
        layout=LAYOUT.fingerprint,
        wants_init=False,
        heartbeat_s=5,
        lease_s=20,
        gradient_lr=0.25,
        max_staleness=10,
        codecs=("float32", "bfloat16", "int8", "int4", "topk", "float64"),
    )


def test_a_join_of_another_run_or_model_is_refused() -> None:
    fleet = Steered.of()
    assert fleet.join("a", run="other").reason is Reason.WRONG_RUN
    assert fleet.join("a", layout="f" * 64).reason is Reason.WRONG_LAYOUT
    assert isinstance(fleet.join("a", run="fleet", layout=LAYOUT.fingerprint), events.Joined)


def test_refusals_are_counted_by_reason_and_said() -> None:
    fleet = Steered.of()
    fleet.beat("nobody")
    fleet.join("a")
    fleet.update("a", base_version=7)
    fleet.update("a", 1, base_version=7)
    assert fleet.aggregator.status(0)["counters"]["refused"] == {"FUTURE_BASE": 2, "UNKNOWN_NODE": 1}
    said = [say for say in fleet.all(events.Say) if say.what == "refused"]
    assert [say.node for say in said] == ["nobody", "a", "a"]
    assert "base_version 7; the newest version is 0" in said[1].message


def test_a_status_is_json_and_shows_how_the_run_stands() -> None:
    fleet = Steered.of(window=SYNC, members=LEASES)
    fleet.at(1).join("a", tier=Tier.SITE)
    fleet.join("region", tier=Tier.REGION, leaves=3)
    fleet.at(2).update("a", tier=Tier.SITE)
    fleet.beat("a", base_version=0, metrics={"loss": 0.5})
    fleet.beat("a", metrics={"accuracy": 0.7}, metrics_version=0)
    status = json.loads(json.dumps(fleet.aggregator.status(3), allow_nan=False))
    assert {key: status[key] for key in ("at", "run", "version", "finished", "scores")} == {
        "at": 3,
        "run": "fleet",
        "version": 0,
        "finished": "",
        "scores": {"0": {"accuracy": 0.7}},
    }
    assert status["window"]["reason"] == "waiting for a quorum: 1 of 4 members (4 expected)"
    assert status["window"]["live"] == {"site": 1, "edge": 0, "region": 1}
    first, second = status["members"]
    assert (first["node"], first["tier"], first["updates"], first["bytes"]) == ("a", "site", 1, 4 * 3107)
    assert (first["metrics"], first["last_seen_s"], first["live"]) == ({"loss": 0.5}, 2, True)
    assert (second["node"], second["leaves"]) == ("region", 3)


# ---- regions ----------------------------------------------------------------------------------------------------------------


def test_a_status_shows_so_many_members_those_that_are_live_first() -> None:
    fleet = Steered.of()
    fleet.join("d", "a", "c", "b")
    for node in "ab":
        fleet.send(events.Leave(node=node, incarnation=1))
    assert fleet.aggregator.live_members == 2
    status = fleet.aggregator.status(0.0, 2)
    assert ([member["node"] for member in status["members"]], status["members_omitted"]) == (["c", "d"], 2)


def test_a_partial_counts_as_the_leaf_updates_in_it() -> None:
    fleet = Steered.of(window={"quorum": 1.0, "grace_s": 0})
    fleet.join("region", tier=Tier.REGION, leaves=3)
    fleet.join("a")
    leaves = [uid(f"leaf{n}") for n in range(3)]
    receipt = fleet.push(partial(uid("region"), leaves))
    assert receipt == Receipt(update_id=uid("region"), state=State.ACCEPTED)
    assert (fleet.window["expected"], fleet.window["arrived"], fleet.window["arrived_by_tier"]) == (4, 3, {"edge": 3})
    fleet.update("a")
    decision = fleet.merges()[0]
    assert decision.ids == (uid("a"), uid("region"))
    assert decision.leaf_ids == (uid("a"), *leaves)
    fleet.publish()
    for update_id in (uid("region"), *leaves):
        assert fleet.receipt(update_id) == Receipt(update_id=update_id, state=State.MERGED, version=1)


def test_a_partial_that_holds_what_is_here_already_is_told_which_ids() -> None:
    fleet = Steered.of(window={"quorum": 100})
    fleet.join("region", "other", tier=Tier.REGION, leaves=2)
    fleet.join("leaf1", "leaf2")
    fleet.update("leaf1")
    fleet.push(partial(uid("other"), [uid("leaf2")]))
    sealed = partial(uid("region"), [uid("leaf1"), uid("leaf2"), uid("leaf3")])
    answer = fleet.offer(sealed)
    assert (answer.state, answer.reason, answer.overlap) == (State.REFUSED, "OVERLAP", (uid("leaf1"), uid("leaf2")))
    assert fleet.offer(sealed) == replace(answer, duplicate=True)
    again = fleet.push(partial(uid("region", 1), [uid("leaf3")]))
    assert again == Receipt(update_id=uid("region", 1), state=State.ACCEPTED)


def test_a_leaf_that_was_taken_in_through_a_region_is_not_taken_in_again() -> None:
    fleet = Steered.of(window={"quorum": 100})
    fleet.join("region", tier=Tier.REGION)
    fleet.join("leaf")
    fleet.push(partial(uid("region"), [uid("leaf")]))
    expected = Receipt(update_id=uid("leaf"), state=State.ACCEPTED, duplicate=True)
    assert fleet.offer(header(uid("leaf"))) == expected


@pytest.mark.parametrize("first", ["region", "leaf"])
def test_of_a_leaf_and_a_partial_that_holds_it_the_first_to_be_whole_wins(first: str) -> None:
    fleet = Steered.of(window={"quorum": 100}, prompt=False)
    fleet.join("region", tier=Tier.REGION)
    fleet.join("leaf")
    fleet.offer(partial(uid("region"), [uid("leaf")]))
    fleet.offer(header(uid("leaf")))
    for node in sorted(["region", "leaf"], key=lambda n: n != first):
        fleet.staged(uid(node))
    persists = fleet.all(events.Persist)
    assert [p.update.update_id.node for p in persists] == [first]
    fleet.send(events.Persisted(update=persists[0].update))
    assert fleet.window["arrived"] == 1
    loser = uid("leaf" if first == "region" else "region")
    assert fleet.all(events.Discard) == [events.Discard(update_id=loser)]
    receipt = fleet.receipts[loser][0]
    if first == "region":
        assert receipt == Receipt(update_id=loser, state=State.STAGED, duplicate=True)
        assert fleet.receipt(loser) == Receipt(update_id=loser, state=State.ACCEPTED)
    else:
        assert (receipt.state, receipt.reason, receipt.overlap) == (State.REFUSED, "OVERLAP", (UpdateId("leaf", 1, 0),))
