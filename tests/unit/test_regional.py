"""What a region decides between its members and its parent, one rule a test."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.region_steering import NODE, SteeredRegion, joined, made, told
from helpers.steering import LAYOUT, Steered, durable, fleet, founded, header, init, part, partial, uid, version

from fleetddp.common import events
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.recovered import Recovered, RecoveredRegion
from fleetddp.common.region_assembly import region_config
from fleetddp.common.sealing import MAX_ROWS, loads, sealing_of
from fleetddp.common.update import Group, Kind, Receipt, State, Tier, UpdateId

OVERLAP, STALE = Reason.OVERLAP.value, Reason.STALE.value
PAIRS: dict[str, Any] = {"preset": "fedbuff", "quorum": 2}  # a window is sealed at two updates


def pid(sequence: int) -> UpdateId:
    """The id of the region's partial number ``sequence``."""
    return UpdateId(NODE, 7, sequence)


def region(**options: Any) -> SteeredRegion:
    """Members a, b and c; ``own``: sections of the fleet file's ``region``."""
    own = {"window": PAIRS, **options.pop("own", {})}
    steered = SteeredRegion.of(**{"prompt": True, **options, "region": own})
    steered.join("a", "b", "c")
    return steered


def pair(**options: Any) -> SteeredRegion:
    """a and b have filled a window: partial 1 is being pushed."""
    steered = region(**options)
    steered.update("a")
    steered.update("b")
    return steered


# ---- sealing ------------------------------------------------------------------------------------------------------------------


def test_a_window_is_sealed_into_sums_by_leaf_tier_and_base() -> None:
    steered = region(own={"window": {"preset": "fedbuff", "quorum": 5}})
    steered.join("lab", tier=Tier.SITE)
    steered.join("south", tier=Tier.REGION, leaves=2)
    steered.fetch(1)
    steered.update("a", base_version=0)
    steered.push(header(uid("b"), kind=Kind.GRADIENT, base_version=1), part(intervals=((0, 3100),)))
    steered.update("lab", tier=Tier.SITE, base_version=1)
    steered.push(partial(uid("south"), [uid("s1"), uid("s2")], base_version=0))
    (sealing,) = steered.sealings()
    head = sealing.header
    assert (head.update_id, head.kind, head.tier, head.base_version, head.codec) == (
        pid(1),
        Kind.PARTIAL,
        Tier.REGION,
        1,
        "float64",
    )
    assert head.groups == (
        Group(tier=Tier.EDGE, base_version=0, samples=30.0, buffer_samples=30.0, ids=(uid("a"), uid("s1"), uid("s2"))),
        Group(tier=Tier.EDGE, base_version=1, samples=10.0, buffer_samples=0.0, ids=(uid("b"),)),
        Group(tier=Tier.SITE, base_version=1, samples=10.0, buffer_samples=10.0, ids=(uid("lab"),)),
    )
    assert sealing.ids == (uid("a"), uid("b"), uid("lab"), uid("south"))
    rows = [[(t.update_id.node, t.row, t.coefficient, t.buffer_coefficient) for t in terms] for terms in sealing.terms]
    # w u: ten samples each; a sum from below as it is; a gradient times the parent's gradient_lr of 0.5, and without buffers
    assert rows == [[("a", 0, 10.0, 10.0), ("south", 0, 1.0, 1.0)], [("b", 0, 5.0, 0.0)], [("lab", 0, 10.0, 10.0)]]


def test_updates_of_one_member_on_one_base_weigh_as_much_as_all_of_them() -> None:
    updates = [durable(header(uid("a", 1)), 2.0), durable(header(uid("a", 2)), 3.0), durable(header(uid("b", 1)), 7.0)]
    sealing = sealing_of(updates, pid(1), codec="float64", layout="", gradient_lr=1.0, at=0.0, reason="", residuals_from=0)
    assert [term.coefficient for term in sealing.terms[0]] == [5.0, 5.0, 7.0]
    assert [term.buffer_coefficient for term in sealing.terms[0]] == [2.0, 3.0, 7.0]
    assert sealing.header.groups[0].samples == 12.0


def test_what_does_not_fit_one_partial_goes_into_several() -> None:
    updates = [durable(header(uid("a", n), base_version=n)) for n in range(2 * MAX_ROWS + 1)]
    assert [len(load) for load in loads(reversed(updates))] == [MAX_ROWS, MAX_ROWS, 1]
    wide = [durable(partial(uid(f"r{n}"), [uid(f"e{n}", k) for k in range(5000)])) for n in range(2)]
    assert [len(load) for load in loads(wide)] == [1, 1]


def test_a_partial_is_pushed_only_when_it_is_durable() -> None:
    steered = region(prompt=False)
    for node in "ab":
        steered.update(node)
        steered.send(events.Persisted(update=steered.all(events.Persist)[-1].update))
    (sealing,) = steered.sealings()
    assert steered.pushes() == []
    steered.send(events.Sealed(update=made(sealing)))
    assert [push.update_id for push in steered.pushes()] == [pid(1)]


def test_partials_are_pushed_one_after_another_in_order() -> None:
    steered = pair()
    for sequence in (1, 2):
        steered.update("a", sequence)
        steered.update("b", sequence)
    assert [push.update_id for push in steered.pushes()] == [pid(1)]
    steered.pushed()
    steered.pushed()
    assert [push.update_id for push in steered.pushes()] == [pid(1), pid(2), pid(3)]


def test_without_a_parent_it_gathers_and_seals_and_delivers_afterwards() -> None:
    steered = region(enrolled=False)
    for sequence in range(3):
        steered.update("a", sequence)
        steered.update("b", sequence)
    assert len(steered.sealings()) == 3
    assert steered.pushes() == []
    steered.send(events.Enrolled(joined=joined()))
    steered.pushed()
    steered.pushed()
    assert [push.update_id for push in steered.pushes()] == [pid(1), pid(2), pid(3)]


def test_a_push_that_fails_is_tried_again_after_a_heartbeat_as_it_was() -> None:
    steered = pair()
    steered.send(events.PushFailed(update_id=pid(1)))
    steered.at(4.9)
    assert len(steered.pushes()) == 1
    steered.at(5.0)
    assert steered.pushes() == [steered.pushes()[0]] * 2


# ---- receipts -----------------------------------------------------------------------------------------------------------------


def test_accepted_ends_nothing_and_merged_settles_what_is_inside_once_it_is_durable() -> None:
    steered = pair(prompt=True)
    steered.pushed()
    assert told(steered.receipt(uid("a"))) == ("accepted", -1)
    steered.prompt = False
    steered.answer(pid(1), State.MERGED, version=1)
    steered.answer(pid(1), State.MERGED, version=1)  # heard twice
    (conclusion,) = steered.conclusions()
    assert (conclusion.partial, conclusion.undo, conclusion.instead) == (pid(1), False, ())
    assert told(steered.receipt(uid("a"))) == ("accepted", -1)
    steered.send(events.Concluded(conclusion=conclusion))
    assert [told(steered.receipt(uid(node))) for node in "ab"] == [("merged", 1)] * 2
    assert steered.beat("a", open=(uid("a"),)).receipts == (Receipt(update_id=uid("a"), state=State.MERGED, version=1),)


def test_a_partial_that_the_parent_has_lost_is_pushed_again() -> None:
    steered = pair()
    steered.pushed()
    assert steered.asked == (pid(1),)
    steered.answer(pid(1), State.UNKNOWN)
    assert [push.update_id for push in steered.pushes()] == [pid(1), pid(1)]


def test_overlap_seals_again_without_what_is_named_and_asks_about_it() -> None:
    steered = pair()
    steered.pushed(State.REFUSED, reason=OVERLAP, overlap=(uid("a"),))
    first, second = steered.sealings()
    assert second.header.update_id == pid(2)
    assert second.header.leaf_ids == (uid("b"),)
    assert steered.conclusions()[0].undo, "the residual before it is restored"
    assert told(steered.receipt(uid("a"))) == ("accepted", -1)
    assert set(steered.asked) == {pid(2), uid("a")}
    steered.answer(uid("a"), State.MERGED, version=3)
    assert told(steered.receipt(uid("a"))) == ("merged", 3)
    steered.pushed()
    steered.answer(pid(2), State.MERGED, version=4)
    assert told(steered.receipt(uid("b"))) == ("merged", 4)
    assert first.header.leaf_ids == (uid("a"), uid("b"))


def test_an_update_that_was_lost_elsewhere_goes_into_the_open_window() -> None:
    steered = pair()
    steered.pushed(State.REFUSED, reason=OVERLAP, overlap=(uid("a"), uid("b")))
    assert len(steered.sealings()) == 1, "nothing is left to seal"
    steered.answer(uid("a"), State.ACCEPTED)
    steered.answer(uid("a"), State.UNKNOWN)
    steered.answer(uid("b"), State.UNKNOWN)
    assert steered.sealings()[-1].header.leaf_ids == (uid("a"), uid("b"))
    assert steered.pushes()[-1].update_id == pid(2)


def test_what_is_too_stale_above_expires() -> None:
    steered = pair()
    steered.pushed(State.REFUSED, reason=STALE, overlap=(uid("b"),))
    assert steered.sealings()[-1].header.leaf_ids == (uid("a"),)
    receipt = steered.receipt(uid("b"))
    assert receipt is not None
    assert (receipt.state, receipt.reason) == (State.EXPIRED, STALE)


def test_a_refusal_for_good_travels_down() -> None:
    steered = pair()
    steered.pushed(State.REFUSED, reason=Reason.NORM_BOUND.value, message="long")
    expected = [Receipt(update_id=uid(n), state=State.REFUSED, reason=Reason.NORM_BOUND.value, message="long") for n in "ab"]
    assert [steered.receipt(uid(n)) for n in "ab"] == expected
    assert steered.conclusions()[0].undo
    assert len(steered.sealings()) == 1


def test_names_that_are_not_in_it_do_not_send_it_round_for_ever() -> None:
    steered = pair()
    steered.pushed(State.REFUSED, reason=OVERLAP, overlap=(uid("stranger"),))
    assert len(steered.sealings()) == 1
    assert told(steered.receipt(uid("a"))) == ("refused", -1)


# ---- regions below ------------------------------------------------------------------------------------------------------------


def middle() -> SteeredRegion:
    """A region with a region below: its partial and a's update are in partial 1, which the parent has accepted."""
    steered = region(own={"window": {"preset": "fedbuff", "quorum": 3}})
    steered.join("south", tier=Tier.REGION, leaves=2)
    steered.push(partial(uid("south"), [uid("s1"), uid("s2")]))
    steered.update("a")
    steered.pushed()
    return steered


def test_an_overlap_within_a_sum_from_below_is_passed_down() -> None:
    steered = middle()
    steered.answer(pid(1), State.REFUSED, reason=OVERLAP, message="there", overlap=(uid("s1"),))
    assert steered.receipt(uid("south")) == Receipt(
        update_id=uid("south"), state=State.REFUSED, reason=OVERLAP, message="there", overlap=(uid("s1"),)
    )
    assert steered.sealings()[-1].header.leaf_ids == (uid("a"),)
    # south seals again, without s1: that is no overlap here
    answer = steered.push(partial(uid("south", 1), [uid("s2")]))
    assert told(answer) == ("accepted", -1)
    # what became of s1 the parent knows
    assert told(steered.beat("south", open=(uid("s1"),)).receipts[0]) == ("accepted", -1)
    steered.answer(uid("s1"), State.MERGED, version=1)
    assert told(steered.beat("south", open=(uid("s1"),)).receipts[0]) == ("merged", 1)


def test_if_the_parent_does_not_know_it_after_all_whoever_sealed_it_hears_so() -> None:
    steered = middle()
    steered.answer(pid(1), State.REFUSED, reason=OVERLAP, overlap=(uid("s1"),))
    steered.answer(uid("s1"), State.UNKNOWN)
    assert told(steered.beat("south", open=(uid("s1"),)).receipts[0]) == ("unknown", -1)
    assert told(steered.push(partial(uid("south", 1), [uid("s1"), uid("s2")]))) == ("accepted", -1)


def test_staleness_within_a_sum_from_below_is_passed_down() -> None:
    steered = middle()
    steered.answer(pid(1), State.REFUSED, reason=STALE, overlap=(uid("s2"), uid("a")))
    receipt = steered.receipt(uid("south"))
    assert receipt is not None
    assert (receipt.state, receipt.reason, receipt.overlap) == (State.REFUSED, STALE, (uid("s2"),))
    assert told(steered.receipt(uid("a"))) == ("expired", -1)
    assert len(steered.sealings()) == 1


def test_a_merged_sum_settles_the_sums_in_it() -> None:
    steered = middle()
    steered.answer(pid(1), State.MERGED, version=1)
    assert [told(steered.receipt(i)) for i in (uid("south"), uid("s1"), uid("s2"), uid("a"))] == [("merged", 1)] * 4


# ---- members that come from elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.MERGED, State.EXPIRED, State.REFUSED])
def test_what_nobody_here_knows_the_parent_is_asked_about(state: State) -> None:
    steered = region()
    before = uid("d", 3)
    assert told(steered.join("d", open=(before,)).receipts[0]) == ("staged", -1)
    assert steered.asked == (before,)
    steered.answer(before, State.STAGED)
    assert told(steered.beat("d", open=(before,)).receipts[0]) == ("staged", -1)
    steered.answer(before, state)
    assert told(steered.receipt(before)) == (state.value, -1)
    assert steered.asked == ()


def test_what_the_parent_does_not_know_is_pushed_again() -> None:
    steered = region()
    before = uid("d", 3)
    steered.join("d", open=(before,))
    steered.answer(before, State.UNKNOWN)
    assert told(steered.receipt(before)) == ("unknown", -1)
    assert told(steered.beat("d", open=(before,)).receipts[0]) == ("unknown", -1)
    assert told(steered.push(header(before))) == ("accepted", -1)


def test_what_the_parent_has_accepted_is_in_good_hands() -> None:
    steered = region()
    before = uid("d", 3)
    steered.join("d", open=(before,))
    steered.answer(before, State.ACCEPTED)
    assert told(steered.receipt(before)) == ("accepted", -1)
    assert steered.asked == (before,), "until it is settled"
    again = steered.offer(header(before))
    assert (again.state, again.duplicate) == (State.ACCEPTED, True)
    steered.answer(before, State.MERGED, version=1)
    assert told(steered.receipt(before)) == ("merged", 1)


def test_a_base_that_is_not_known_here_yet_is_no_fault_of_the_sender() -> None:
    steered = region()
    answer = steered.offer(header(uid("a"), base_version=1))
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.retry) == (Reason.NO_VERSION, True)
    steered.send(events.Told(version=1))
    assert told(steered.push(header(uid("a"), base_version=1))) == ("accepted", -1)


# ---- versions and rules -------------------------------------------------------------------------------------------------------


def test_the_newest_version_is_fetched_once_and_announced_when_it_is_here() -> None:
    steered = region()
    steered.send(events.Told(version=1))
    steered.send(events.Told(version=3))
    assert [fetch.version for fetch in steered.all(events.Fetch)] == [1]
    steered.fetch(1)
    assert [fetch.version for fetch in steered.all(events.Fetch)] == [1, 3]
    assert steered.aggregator.version == 1
    assert steered.all(events.Announce)[-1].version == 1


def test_a_fetch_that_fails_is_tried_again() -> None:
    steered = region()
    steered.send(events.Told(version=1))
    steered.send(events.FetchFailed(version=1))
    steered.at(5.0)
    assert [fetch.version for fetch in steered.all(events.Fetch)] == [1, 1]
    steered.send(events.Told(version=2))
    steered.send(events.FetchFailed(version=1))  # the parent no longer keeps it
    assert [fetch.version for fetch in steered.all(events.Fetch)] == [1, 1, 2]


def test_the_parents_rules_are_the_members() -> None:
    steered = region(merge={"gradient_lr": 9.0, "tiers": {"edge": {"max_staleness": 2}, "site": {"max_staleness": 8}}})
    edge = steered.join("d")
    assert (edge.gradient_lr, edge.max_staleness, edge.wants_init) == (0.5, 2, False)
    assert steered.join("lab", tier=Tier.SITE).max_staleness == 3


def test_a_root_tells_a_region_the_bound_of_the_latest_tier() -> None:
    root = Steered.of(merge={"tiers": {"site": {"max_staleness": 18}}})
    assert root.join("west", tier=Tier.REGION).max_staleness == 18


def test_first_weights_are_not_taken() -> None:
    steered = SteeredRegion.of(Recovered.empty("fleet"))
    steered.join("lab", tier=Tier.SITE)
    answer = steered.offer(init(uid("lab")))
    assert isinstance(answer, Refused)
    assert answer.reason is Reason.WRONG_KIND


def test_before_version_0_members_wait() -> None:
    steered = SteeredRegion.of(Recovered.empty("fleet"), enrolled=False)
    assert steered.join("a").version == -1
    steered.send(events.Enrolled(joined=joined(version=4)))
    steered.send(events.Fetched(version=version(4), layout=LAYOUT))
    assert steered.aggregator.version == 4
    assert told(steered.update("a", base_version=4)) == ("accepted", -1)


# ---- windows ------------------------------------------------------------------------------------------------------------------


def slow(**own: Any) -> SteeredRegion:
    """A region that waits for all three members."""
    return region(own={"window": {"preset": "sync", **own}}, members={"lease_s": 1000.0})


def test_the_deadline_is_the_parents_minus_what_a_transfer_takes() -> None:
    steered = slow()
    steered.update("a")
    assert steered.window["deadline_at"] is None
    steered.send(events.Told(version=0, closes_at=30.0))
    assert steered.window["deadline_at"] == 30.0
    steered.at(30.0)
    assert len(steered.sealings()) == 1
    steered.pushed(took=4.0)
    steered.send(events.Told(version=0, closes_at=60.0))
    assert steered.window["deadline_at"] == 56.0
    steered.send(events.Told(version=0, closes_at=33.0))  # it cannot make that any more
    assert steered.window["deadline_at"] == 56.0
    steered.at(57.0)
    assert len(steered.sealings()) == 1, "nothing came: extended"
    assert (steered.window["closes_at"], steered.window["deadline_at"]) == (0.0, None)


def test_a_deadline_of_its_own_stays() -> None:
    steered = slow(deadline_s=100.0)
    steered.send(events.Told(version=0, closes_at=30.0))
    assert steered.window["deadline_at"] == 100.0


@pytest.mark.parametrize(
    ("fleet_window", "quorum", "deadline_s"),
    [
        ({"preset": "semi_sync"}, None, 60.0),
        ({"preset": "semi_sync", "quorum": 64}, 1.0, 60.0),
        ({"preset": "sync"}, None, 60.0),
        ({"preset": "fedbuff"}, 1.0, 60.0),
        ({"preset": "async"}, None, 60.0),
        ({"preset": "periodic", "deadline_s": 5.0}, None, 5.0),
    ],
)
def test_by_default_it_seals_as_the_fleet_merges(fleet_window: dict[str, Any], quorum: float | None, deadline_s: float) -> None:
    own = region_config(fleet(window=fleet_window, members={"sites": ["lab"]})).window
    assert (own.preset, own.quorum, own.deadline_s, own.require) == (fleet_window["preset"], quorum, deadline_s, ())


def test_the_parent_hears_how_many_leaf_members_there_are() -> None:
    steered = region()
    steered.join("south", tier=Tier.REGION, leaves=5)
    assert steered.all(events.Stand)[-1] == events.Stand(version=0, leaves=8)
    steered.send(events.Leave(node="a", incarnation=1))
    assert steered.all(events.Stand)[-1].leaves == 7


def test_what_members_measure_on_a_version_goes_up() -> None:
    steered = region()
    steered.beat("a", metrics={"accuracy": 0.9}, metrics_version=0)
    steered.beat("a", metrics={"loss": 1.0})
    assert steered.all(events.Report) == [events.Report(metrics={"accuracy": 0.9}, version=0)]


# ---- the end, and restarts ----------------------------------------------------------------------------------------------------


def test_the_run_ends_when_the_parent_says_so() -> None:
    steered = pair(until={"versions": 1})
    steered.fetch(1)
    assert not steered.aggregator.finished, "the parent counts"
    steered.update("c")
    steered.pushed(State.REFUSED, reason=Reason.FINISHED.value)
    assert told(steered.receipt(uid("a"))) == ("accepted", -1)
    steered.send(events.Told(version=1, finished="enough"))
    assert steered.aggregator.finished == "enough"
    for node in "abc":
        receipt = steered.receipt(uid(node))
        assert receipt is not None
        assert (receipt.state, receipt.reason) == (State.EXPIRED, Reason.FINISHED.value)
    assert steered.beat("a").finished == "enough"


def test_what_is_told_before_the_end_counts() -> None:
    steered = pair()
    steered.pushed()
    steered.prompt = False
    steered.answer(pid(1), State.MERGED, version=1)
    steered.send(events.Told(version=1, finished="enough"))
    steered.send(events.Concluded(conclusion=steered.conclusions()[0]))
    assert [told(steered.receipt(uid(node))) for node in "ab"] == [("merged", 1)] * 2


def test_after_a_restart_it_goes_on_with_what_is_durable() -> None:
    accepted = tuple(durable(header(uid(node))) for node in "abcd")
    first, second = (
        sealing_of(pair_, pid(n), codec="float64", layout="", gradient_lr=1.0, at=0.0, reason="", residuals_from=0)
        for n, pair_ in ((1, accepted[:1]), (2, accepted[1:2]))
    )
    entered = RecoveredRegion(
        node=NODE,
        incarnation=9,
        sequence=2,
        sealings=((first, made(first)), (second, None)),
        rules=joined(),
        closed=(Receipt(update_id=uid("e"), state=State.EXPIRED, reason=STALE),),
    )
    steered = SteeredRegion.of(founded(accepted=accepted), entered, prompt=False, region={"window": PAIRS})
    assert steered.sealings()[0] == second, "decided before: made as decided"
    assert [push.update_id for push in steered.pushes()] == [pid(1)]
    assert steered.asked == (pid(1),)
    # c and d are in no partial: they fill the window
    assert steered.sealings()[-1].header.update_id == UpdateId(NODE, 9, 3)
    assert steered.sealings()[-1].header.leaf_ids == (uid("c"), uid("d"))
    steered.join("e")
    assert told(steered.beat("e", open=(uid("e"),)).receipts[0]) == ("expired", -1)


def test_what_was_acknowledged_stays_however_stale() -> None:
    old = durable(header(uid("a"), base_version=0))
    steered = SteeredRegion.of(founded(9, accepted=(old,)), region={"window": PAIRS})
    steered.join("a")
    assert told(steered.beat("a", open=(uid("a"),)).receipts[0]) == ("accepted", -1)
