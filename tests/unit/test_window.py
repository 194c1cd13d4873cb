"""When to merge. The traces are short enough to be checked by hand: at each line the time, what is in, and what follows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from fleetddp.common.config import WindowConfig
from fleetddp.common.update import Tier
from fleetddp.common.window import PRESETS, Action, Counts, Grace, Verdict, WindowPolicy, decide, quorum_reached, resolve

WAIT, MERGE, EXTEND = Action.WAIT, Action.MERGE, Action.EXTEND


class Trace:
    """A window looked at again and again, as the aggregator does: it notes when the quorum was there first."""

    def __init__(self, policy: WindowPolicy, *, members: int, grace: Grace | None = None) -> None:
        self.policy = policy
        self.grace = grace or Grace(policy)
        self.counts = Counts(opened_at=0.0, deadline_at=policy.deadline_s, expected=members, outstanding=members)

    def look(self, now: float, edges: int = 0, sites: int = 0, **changes: Any) -> Verdict:
        """At ``now`` updates of so many edges and sites (one each) are in, and everyone else is on the way."""
        arrived = edges + sites
        self.counts = replace(
            self.counts,
            arrived=arrived,
            arrived_members=arrived,
            arrived_by_tier={Tier.EDGE: edges, Tier.SITE: sites},
            outstanding=changes.pop("outstanding", changes.get("expected", self.counts.expected) - arrived),
            **changes,
        )
        if self.counts.quorum_at is None and quorum_reached(now, self.counts, self.policy):
            self.counts = replace(self.counts, quorum_at=now, grace_s=self.grace.seconds(now))
        verdict = decide(now, self.counts, self.policy)
        if verdict.action is EXTEND:
            assert verdict.until is not None
            self.counts = replace(self.counts, deadline_at=verdict.until)
        return verdict


def facts(verdict: Verdict) -> tuple[Action, float | None, str]:
    return verdict.action, verdict.until, verdict.reason


# ---- one golden trace for each preset ---------------------------------------------------------------------------------------


def test_sync_waits_for_everyone_however_long_it_takes() -> None:
    trace = Trace(resolve(WindowConfig(preset="sync"), sites_named=True), members=3)
    assert facts(trace.look(0)) == (WAIT, None, "waiting for a quorum: 0 of 3 members (3 expected)")
    assert facts(trace.look(5, edges=2)) == (WAIT, None, "waiting for a quorum: 2 of 3 members (3 expected)")
    assert trace.look(1e6, edges=2).action is WAIT
    # its lease ended: two are expected, two are in
    assert facts(trace.look(1e6 + 1, edges=2, expected=2)) == (MERGE, None, "quorum with 2 updates: nobody else is on the way")


def test_semi_sync_gives_a_grace_after_the_quorum() -> None:
    policy = resolve(WindowConfig(preset="semi_sync", grace_s=4), sites_named=False)
    trace = Trace(policy, members=5)
    assert facts(trace.look(8, edges=2)) == (WAIT, 60, "waiting for a quorum: 2 of 3 members (5 expected)")
    assert facts(trace.look(10, edges=3)) == (WAIT, 14, "quorum with 3 updates: waiting at most 4 s for 2 on their way")
    assert facts(trace.look(12, edges=4)) == (WAIT, 14, "quorum with 4 updates: waiting at most 4 s for 1 on their way")
    expected = "quorum with 4 updates: the grace of 4 s is over, 1 still on their way"
    assert facts(trace.look(14, edges=4)) == (MERGE, None, expected)


def test_semi_sync_requires_a_site_where_one_is_named_until_the_deadline() -> None:
    policy = resolve(WindowConfig(preset="semi_sync", grace_s=4), sites_named=True)
    assert policy.require == (Tier.SITE,)
    trace = Trace(policy, members=4)
    assert facts(trace.look(10, edges=3)) == (WAIT, 60, "quorum, but waiting for tier site; 3 updates so far")
    assert facts(trace.look(59.9, edges=3))[:2] == (WAIT, 60)
    assert facts(trace.look(60, edges=3)) == (MERGE, None, "deadline with 3 updates of 4 members expected")
    # the same, and the site makes it
    trace = Trace(policy, members=4)
    trace.look(10, edges=2)
    assert facts(trace.look(20, edges=2, sites=1))[:2] == (WAIT, 24)
    assert trace.look(21, edges=3, sites=1).action is MERGE


def test_async_makes_a_version_of_each_update() -> None:
    trace = Trace(resolve(WindowConfig(preset="async"), sites_named=True), members=100)
    assert facts(trace.look(50)) == (WAIT, None, "waiting for a quorum: 0 of 1 updates")
    assert facts(trace.look(51, edges=1)) == (MERGE, None, "quorum with 1 update")


def test_fedbuff_merges_a_buffer_of_k_whoever_sent_them() -> None:
    trace = Trace(resolve(WindowConfig(preset="fedbuff", quorum=3), sites_named=True), members=2)
    assert facts(trace.look(1, edges=2)) == (WAIT, None, "waiting for a quorum: 2 of 3 updates")
    by_one_member = replace(trace.counts, arrived=3, arrived_members=1, quorum_at=2.0)
    assert quorum_reached(2, by_one_member, trace.policy)
    assert decide(2, by_one_member, trace.policy).action is MERGE


def test_periodic_goes_by_the_clock_alone() -> None:
    trace = Trace(resolve(WindowConfig(preset="periodic", deadline_s=30), sites_named=True), members=2)
    assert facts(trace.look(29.9, edges=2)) == (WAIT, 30, "waiting for the clock; 2 updates so far")
    assert facts(trace.look(30, edges=2)) == (MERGE, None, "deadline with 2 updates of 2 members expected")


# ---- the rules one by one ---------------------------------------------------------------------------------------------------


def test_a_window_with_too_little_at_its_deadline_is_extended_by_another() -> None:
    trace = Trace(WindowPolicy(quorum=1.0, deadline_s=30, min_updates=2), members=4)
    assert facts(trace.look(30, edges=1)) == (EXTEND, 60, "deadline with 1 update, at least 2 needed: extended by 30 s")
    assert facts(trace.look(31, edges=1)) == (WAIT, 60, "waiting for a quorum: 1 of 4 members (4 expected)")
    assert trace.look(60, edges=2).action is MERGE


def test_min_updates_also_holds_back_a_quorum() -> None:
    trace = Trace(WindowPolicy(quorum=0.5, min_updates=3), members=4)
    assert facts(trace.look(1, edges=2)) == (WAIT, None, "quorum, but waiting for at least 3 updates; 2 updates so far")
    assert trace.look(2, edges=3, outstanding=0).action is MERGE


def test_the_deadline_cuts_the_grace_short() -> None:
    trace = Trace(WindowPolicy(quorum=1, grace_s=100, deadline_s=30), members=4)
    assert facts(trace.look(20, edges=1))[:2] == (WAIT, 30)
    assert trace.look(30, edges=1).action is MERGE


def test_nobody_outstanding_ends_the_grace_at_once() -> None:
    trace = Trace(WindowPolicy(quorum=0.5, grace_s=100), members=4)
    assert trace.look(20, edges=2).action is WAIT
    # the two others stalled, or their leases ended
    assert facts(trace.look(21, edges=2, outstanding=0)) == (MERGE, None, "quorum with 2 updates: nobody else is on the way")


def test_members_that_join_after_the_quorum_do_not_undo_it() -> None:
    trace = Trace(WindowPolicy(quorum=0.5, grace_s=5), members=4)
    assert facts(trace.look(20, edges=2))[:2] == (WAIT, 25)
    assert facts(trace.look(21, edges=2, expected=100))[:2] == (WAIT, 25)
    assert trace.look(25, edges=2, expected=100).action is MERGE


def test_nobody_expected_is_no_quorum() -> None:
    trace = Trace(WindowPolicy(quorum=1.0), members=0)
    assert facts(trace.look(1)) == (WAIT, None, "waiting for members: none is live")


def test_a_fraction_counts_members_and_not_updates() -> None:
    policy = WindowPolicy(quorum=1.0)
    counts = Counts(opened_at=0, expected=2, arrived=2, arrived_members=1, outstanding=1)  # one member sent two
    assert not quorum_reached(1, counts, policy)
    assert quorum_reached(1, replace(counts, arrived_members=2), policy)


@pytest.mark.parametrize(
    ("quorum", "expected", "needed"),
    [(1.0, 7, 7), (0.5, 7, 4), (0.5, 6, 3), (0.1, 30, 3), (0.7, 10, 7), (0.01, 5, 1), (0.5, 0, 1), (0.34, 3, 2)],
)
def test_members_needed(quorum: float, expected: int, needed: int) -> None:
    assert WindowPolicy(quorum=quorum).members_needed(expected) == needed


def test_after_a_restart_only_a_count_closes_the_window_before_the_members_had_time_to_come_back() -> None:
    settling = {"settling_until": 5.0, "expected": 1, "outstanding": 0}
    trace = Trace(WindowPolicy(quorum=1.0), members=1)
    assert facts(trace.look(1, edges=1, **settling)) == (
        WAIT,
        5.0,
        "restarted: waiting for the members to come back; 1 update so far",
    )
    assert trace.look(5, edges=1, **settling).action is MERGE
    assert Trace(WindowPolicy(quorum=1), members=1).look(1, edges=1, **settling).action is MERGE


def test_require_names_each_tier_that_is_missing() -> None:
    trace = Trace(WindowPolicy(quorum=1, require=(Tier.SITE, Tier.EDGE)), members=4)
    trace.counts = replace(trace.counts, arrived=1)
    assert decide(1, trace.counts, trace.policy).reason == "quorum, but waiting for tier site and edge; 1 update so far"
    assert trace.look(2, edges=1).reason == "quorum, but waiting for tier site; 1 update so far"
    assert trace.look(2, edges=1, sites=1).action is MERGE


# ---- presets and the fleet file ---------------------------------------------------------------------------------------------


def test_what_the_file_says_overrides_the_preset() -> None:
    given = WindowConfig(preset="fedbuff", quorum=0.25, require=(Tier.EDGE,), grace_s=1.5, deadline_s=9, min_updates=2)
    policy = resolve(given, sites_named=True)
    assert policy == WindowPolicy(quorum=0.25, require=(Tier.EDGE,), grace_s=1.5, deadline_s=9, min_updates=2)


def test_only_semi_sync_requires_a_site_by_itself_and_the_file_can_say_no() -> None:
    requiring = [name for name in PRESETS if resolve(WindowConfig(preset=name), sites_named=True).require]
    assert requiring == ["semi_sync"]
    assert resolve(WindowConfig(require=()), sites_named=True).require == ()


def test_an_int_in_the_file_counts_updates_and_a_float_is_a_fraction() -> None:
    assert isinstance(WindowConfig(quorum=1).quorum, int)
    assert isinstance(WindowConfig(quorum=1.0).quorum, float)


# ---- the grace that learns --------------------------------------------------------------------------------------------------


def test_a_fixed_grace_is_what_it_is() -> None:
    grace = Grace(WindowPolicy(quorum=1, grace_s=3.0))
    grace.observe(100.0)
    assert grace.seconds(quorum_took_s=1.0) == 3.0


def test_a_grace_that_has_seen_nothing_waits_as_long_again_as_the_quorum_took() -> None:
    assert Grace(WindowPolicy(quorum=1, grace_s="auto")).seconds(quorum_took_s=7.0) == 7.0


def test_a_learned_grace_waits_for_nine_in_ten_of_those_who_can_make_it() -> None:
    grace = Grace(WindowPolicy(quorum=1, grace_s="auto"))
    for delay in [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]:
        grace.observe(delay)
    assert grace.seconds(quorum_took_s=60.0) == 9  # the 9th of 10
    assert grace.seconds(quorum_took_s=5.5) == 5  # of 1..5, the ceil(4.5) = 5th: those after it come too late anyway
    assert grace.seconds(quorum_took_s=0.5) == 0.0  # nobody is that quick: waiting gains nothing


def test_a_learned_grace_forgets_all_but_the_last_32_delays() -> None:
    grace = Grace(WindowPolicy(quorum=1, grace_s="auto"))
    for delay in [50.0] * 100 + [2.0] * 32:
        grace.observe(delay)
    assert grace.seconds(quorum_took_s=60.0) == 2.0


def test_decide_is_pure() -> None:
    counts = Counts(opened_at=0, expected=4, arrived=2, arrived_members=2, outstanding=2, quorum_at=3.0, grace_s=2.0)
    policy = WindowPolicy(quorum=2)
    assert [decide(4, counts, policy) for _ in range(3)] == [decide(4, counts, policy)] * 3
    assert decide(4, counts, policy).until == 5.0
    assert counts.deadline_at == math.inf
