"""What an offer must pass: each rule with what breaks it, and what a refusal leaves behind."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from helpers.steering import INTERVALS, LAYOUT, Steered, durable, fleet, founded, header, init, part, partial, uid

from fleetddp.common import events
from fleetddp.common.admission import Standing, check_complete
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.transport.limits import MAX_ARRIVING
from fleetddp.common.update import Group, Kind, Receipt, Slice, State, Tier, Update, UpdateHeader

A = uid("a")
LIMITS = {"max_samples": 1000, "max_norm": 2.0, "max_elements": 10_000}
GROUP = Group(tier=Tier.EDGE, base_version=5, samples=10.0, buffer_samples=10.0, ids=(uid("x"),))


def at_version_5(**sections: Any) -> Steered:
    """Version 5 is published; a has joined; edges may be two versions behind, sites three."""
    staleness = {"staleness": {"max_staleness": 2}, "tiers": {"site": {"max_staleness": 3}}}
    steered = Steered.of(founded(5), **{"merge": staleness, "limits": LIMITS, "window": {"quorum": 100}, **sections})
    steered.join("a")
    return steered


def of_groups(*groups: Group) -> UpdateHeader:
    return header(A, base_version=5, kind=Kind.PARTIAL, tier=Tier.REGION, groups=groups)


HEADERS: list[tuple[str, UpdateHeader, Reason, str]] = [
    ("logits", header(A, base_version=5, kind=Kind.LOGITS), Reason.WRONG_KIND, "soft labels"),
    ("an init when there is a version", init(A), Reason.INIT_TAKEN, "there already"),
    ("a partial of nothing", header(A, kind=Kind.PARTIAL, tier=Tier.REGION), Reason.MALFORMED, "with 0 groups"),
    ("a delta with groups", header(A, base_version=5, groups=(GROUP,)), Reason.MALFORMED, "with 1 groups"),
    ("a partial of an edge", replace(of_groups(GROUP), tier=Tier.EDGE), Reason.MALFORMED, "tier edge; regions send"),
    ("a delta of a region", header(A, base_version=5, tier=Tier.REGION), Reason.MALFORMED, "regions send partials"),
    ("an id twice", of_groups(GROUP, GROUP), Reason.MALFORMED, "names an update twice"),
    ("an empty group", of_groups(replace(GROUP, ids=())), Reason.MALFORMED, "with 0 updates"),
    ("a group of regions", of_groups(replace(GROUP, tier=Tier.REGION)), Reason.MALFORMED, "tier region"),
    ("a group of no weight", of_groups(replace(GROUP, samples=0.0)), Reason.BAD_WEIGHT, "0.0 samples"),
    ("a group of hardly any weight", of_groups(replace(GROUP, samples=5e-324)), Reason.BAD_WEIGHT, "allowed are 1e-09 to 1000"),
    ("a group too heavy for its one update", of_groups(replace(GROUP, samples=1001.0)), Reason.BAD_WEIGHT, "1e-09 to 1000"),
    ("hardly any buffers", of_groups(replace(GROUP, buffer_samples=5e-324)), Reason.BAD_WEIGHT, "5e-324 with buffers"),
    ("a group of NaN weight", of_groups(replace(GROUP, samples=math.nan)), Reason.BAD_WEIGHT, "nan samples"),
    ("more buffers than samples", of_groups(replace(GROUP, buffer_samples=11.0)), Reason.BAD_WEIGHT, "11.0 with buffers"),
    ("another layout", header(A, base_version=5, layout="0123456789abcdef"), Reason.WRONG_LAYOUT, "layout 0123456789ab; this"),
    ("an unknown codec", header(A, base_version=5, codec="zip"), Reason.UNKNOWN_CODEC, "'zip'"),
    ("a version to come", header(A, base_version=6), Reason.FUTURE_BASE, "base_version 6; the newest version is 5"),
    ("a negative version", header(A, base_version=-2), Reason.MALFORMED, "base_version -2"),
    ("a group of a version to come", of_groups(replace(GROUP, base_version=6)), Reason.FUTURE_BASE, "base_version 6"),
    ("of another tier", header(A, base_version=5, tier=Tier.SITE), Reason.MALFORMED, "of tier site; a joined as edge"),
    ("too old for an edge", header(A, base_version=2), Reason.STALE, "based on version 2, 3 behind; the bound of tier edge is 2"),
    ("too old for a site", header(A, base_version=1, tier=Tier.SITE), Reason.STALE, "the bound of tier site is 3"),
    ("a delta in float64", header(A, base_version=5, codec="float64"), Reason.UNKNOWN_CODEC, "for partials"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "reason", "words"), [row[1:] for row in HEADERS], ids=[row[0] for row in HEADERS])
def test_a_header_that_breaks_a_rule_is_refused_and_the_answer_remembered(head: UpdateHeader, reason: Reason, words: str) -> None:
    steered = at_version_5()
    answer = steered.offer(head)
    assert isinstance(answer, Refused)
    assert answer.reason is reason
    assert words in answer.message
    repeat = steered.offer(head)
    expected = Receipt(update_id=A, state=State.REFUSED, reason=reason.value, message=answer.message, duplicate=True)
    assert repeat == expected
    assert steered.all(events.Discard) == []  # nothing was staged
    # nothing else was harmed
    assert steered.push(header(uid("a", 1), base_version=5)) == Receipt(update_id=uid("a", 1), state=State.ACCEPTED)


SLICES: list[tuple[str, Slice, Reason, str]] = [
    ("negative samples", part(samples=-1.0), Reason.BAD_WEIGHT, "-1.0 samples"),
    ("NaN samples", part(samples=math.nan), Reason.BAD_WEIGHT, "nan samples"),
    ("endless samples", part(samples=math.inf), Reason.BAD_WEIGHT, "inf samples"),
    ("too many samples", part(samples=1001.0), Reason.BAD_WEIGHT, "0 to 1000"),
    ("nothing", part(intervals=()), Reason.WRONG_INTERVALS, "no element"),
    ("an empty interval", part(intervals=((512, 512),)), Reason.WRONG_INTERVALS, "[512, 512)"),
    ("within a block", part(intervals=((10, 3100),)), Reason.WRONG_INTERVALS, "[10, 3100)"),
    ("out of the layout", part(intervals=((0, 4096),)), Reason.WRONG_INTERVALS, "[0, 4096)"),
    ("the gap", part(intervals=((0, LAYOUT.buffer_start),)), Reason.WRONG_INTERVALS, f"[0, {LAYOUT.buffer_start})"),
    ("the same elements twice", part(intervals=((0, 1024), (512, 3100))), Reason.WRONG_INTERVALS, "covered twice"),
]


@pytest.mark.parametrize(("piece", "reason", "words"), [row[1:] for row in SLICES], ids=[row[0] for row in SLICES])
def test_a_stream_that_breaks_a_rule_refuses_its_update(piece: Slice, reason: Reason, words: str) -> None:
    steered = at_version_5()
    answer = steered.offer(header(A, base_version=5), piece)
    assert isinstance(answer, Refused)
    assert answer.reason is reason
    assert words in answer.message
    assert steered.offer(header(A, base_version=5)).state is State.REFUSED


def test_a_partial_may_weigh_as_much_as_its_updates() -> None:
    steered = at_version_5()
    steered.join("region", tier=Tier.REGION)
    head = partial(uid("region"), [uid(node) for node in "xyz"], base_version=5)
    assert steered.push(head, part(3000.0)).state is State.ACCEPTED  # type: ignore[union-attr]
    again = replace(head, update_id=uid("region", 1), groups=(replace(head.groups[0], ids=(uid("u"), uid("v"), uid("w"))),))
    assert steered.offer(again, part(3001.0)).reason is Reason.BAD_WEIGHT


def test_a_gradient_carries_no_buffers() -> None:
    steered = at_version_5()
    head = header(A, base_version=5, kind=Kind.GRADIENT)
    assert steered.offer(head).reason is Reason.WRONG_INTERVALS
    steered.push(header(uid("a", 1), base_version=5, kind=Kind.GRADIENT), part(intervals=INTERVALS[:1]))
    assert steered.receipt(uid("a", 1)) == Receipt(update_id=uid("a", 1), state=State.ACCEPTED)


@pytest.mark.parametrize(
    ("samples", "squared_norm", "reason", "words"),
    [
        (0.0, 1.0, Reason.BAD_WEIGHT, "0 samples behind the update"),
        (5e-324, 1.0, Reason.BAD_WEIGHT, "4.94066e-324 samples behind the update; allowed are 1e-09 to 1000"),
        (10.0, 4.0001, Reason.NORM_BOUND, "allowed is 2 (limits.max_norm)"),
        (10.0, math.nan, Reason.NORM_BOUND, "the norm is nan"),
    ],
)
def test_a_whole_update_that_breaks_a_rule_is_refused_and_its_bytes_dropped(
    samples: float, squared_norm: float, reason: Reason, words: str
) -> None:
    steered = at_version_5()
    steered.offer(header(A, base_version=5), part(samples))
    steered.staged(A, part(samples), squared_norm)
    receipt = steered.receipt(A)
    assert receipt is not None
    assert (receipt.state, receipt.reason) == (State.REFUSED, reason.value)
    assert words in receipt.message
    assert steered.all(events.Discard) == [events.Discard(update_id=A)]
    assert steered.all(events.Persist) == []


def test_the_norm_of_a_partial_is_bounded_as_its_updates_are() -> None:
    standing = Standing(run="fleet", config=fleet(limits={"max_norm": 2.0}), version=5, head=5, layout=LAYOUT)
    # two groups of sum(w u): |w u| <= 30 * 2 and 40 * 2, together at most sqrt(60^2 + 80^2) = 100
    groups = (replace(GROUP, samples=30.0), replace(GROUP, samples=40.0, base_version=4, ids=(uid("y"),)))
    update = durable(of_groups(*groups), samples=70.0)
    check_complete(replace(update, squared_norm=100.0**2), standing)
    with pytest.raises(Refused, match="NORM_BOUND"):
        check_complete(replace(update, squared_norm=100.1**2), standing)


def test_first_weights_need_neither_weight_nor_a_small_norm() -> None:
    standing = Standing(run="fleet", config=fleet(limits={"max_norm": 2.0}))
    check_complete(Update(header=init(A), samples=0.0, squared_norm=1e9, payload_bytes=1, slices=()), standing)
    with pytest.raises(Refused, match=r"NORM_BOUND.*allowed is 1e\+18"):
        check_complete(Update(header=init(A), samples=0.0, squared_norm=1.1e36, payload_bytes=1, slices=()), standing)


def test_without_a_bound_of_its_own_a_fleet_still_refuses_what_could_overflow() -> None:
    standing = Standing(run="fleet", config=fleet(), version=5, head=5, layout=LAYOUT)
    check_complete(replace(durable(header(A, base_version=5), samples=1.0), squared_norm=0.9e36), standing)
    with pytest.raises(Refused, match="NORM_BOUND"):
        check_complete(replace(durable(header(A, base_version=5), samples=1.0), squared_norm=1.1e36), standing)


def test_first_weights_must_be_what_their_header_says() -> None:
    steered = Steered.of(replace(founded(), version=None, layout=None), limits=LIMITS)
    steered.join("a", tier=Tier.SITE)
    for number, (changes, reason) in enumerate(
        [
            ({"layout": "f" * 64}, Reason.WRONG_LAYOUT),
            ({"layout_spec": b"nonsense"}, Reason.MALFORMED),
            ({"codec": "int8"}, Reason.UNKNOWN_CODEC),
            ({"tier": Tier.EDGE}, Reason.WRONG_KIND),
        ]
    ):
        answer = steered.offer(init(uid("a", number), **changes))
        assert isinstance(answer, Refused), changes
        assert answer.reason is reason, changes
    assert steered.offer(header(uid("a", 8), base_version=0)).reason is Reason.FUTURE_BASE
    assert isinstance(steered.offer(init(uid("a", 9))), events.Proceed)


def test_first_weights_of_a_model_that_is_too_large_are_refused() -> None:
    steered = Steered.of(replace(founded(), version=None, layout=None), limits={"max_elements": LAYOUT.elements - 1})
    steered.join("a", tier=Tier.SITE)
    assert steered.offer(init(A)).reason is Reason.TOO_LARGE


def test_a_member_cannot_fill_the_disk_with_updates_it_does_not_finish() -> None:
    steered = at_version_5()
    steered.join("b")
    half = part(intervals=INTERVALS[:1])
    for number in range(MAX_ARRIVING):
        assert isinstance(steered.offer(header(uid("a", number), base_version=5), half), events.Proceed)
    answer = steered.offer(header(uid("a", 9), base_version=5), half)
    assert isinstance(answer, Refused)
    assert (answer.reason, answer.retry) == (Reason.TOO_MANY, True)
    assert "4 updates of a are arriving" in answer.message
    assert isinstance(steered.offer(header(uid("a", 0), base_version=5), half), events.Proceed)  # one of them goes on
    assert isinstance(steered.offer(header(uid("b"), base_version=5), half), events.Proceed)  # nobody else is bound by it
    steered.at(3 * steered.aggregator.config.members.stall_s)  # they are forgotten
    steered.join("a")
    assert isinstance(steered.offer(header(uid("a", 9), base_version=5), half), events.Proceed)


# ---- who offers -------------------------------------------------------------------------------------------------------------


def test_an_offer_of_another_run_or_an_unknown_node_can_be_made_again_rightly() -> None:
    steered = at_version_5()
    head = header(A, base_version=5)
    assert steered.offer(head, run="other").reason is Reason.WRONG_RUN
    assert steered.offer(header(uid("b"), base_version=5)).reason is Reason.UNKNOWN_NODE
    assert steered.offer(header(uid("a", incarnation=2), base_version=5)).reason is Reason.UNKNOWN_NODE
    assert isinstance(steered.offer(head, run="fleet"), events.Proceed)


def test_an_outboxed_update_of_an_earlier_process_is_taken() -> None:
    steered = at_version_5()
    steered.join("a", incarnation=9)
    assert steered.push(header(A, base_version=5)) == Receipt(update_id=A, state=State.ACCEPTED)


def test_a_newer_process_discards_what_the_older_one_had_not_finished() -> None:
    steered = at_version_5()
    steered.offer(header(A, base_version=5))
    steered.join("a", incarnation=2)
    assert steered.all(events.Discard) == [events.Discard(update_id=A)]
    receipt = steered.receipt(A)
    assert receipt is not None
    assert (receipt.state, receipt.reason) == (State.UNKNOWN, "SUPERSEDED")
    steered.staged(A)  # a thread of the old process was not stopped in time
    assert steered.receipt(A) == Receipt(update_id=A, state=State.UNKNOWN)
    assert steered.push(header(A, base_version=5)) == Receipt(update_id=A, state=State.ACCEPTED)  # from its outbox


def test_a_process_that_joins_again_goes_on_with_what_its_predecessor_had_left_in_the_outbox() -> None:
    steered = at_version_5()
    steered.join("a", incarnation=2)
    first, second = part(intervals=INTERVALS[:1]), part(intervals=INTERVALS[1:])
    steered.offer(header(A, base_version=5), first)
    steered.staged(A, first)
    steered.join("a", incarnation=2)  # it was cut off for a while
    assert steered.all(events.Discard) == []
    steered.offer(header(A, base_version=5), second)
    steered.staged(A, second)
    assert steered.receipt(A) == Receipt(update_id=A, state=State.ACCEPTED)


# ---- repeats ----------------------------------------------------------------------------------------------------------------


def test_a_repeat_is_answered_with_how_the_update_stands() -> None:
    steered = at_version_5(prompt=False)
    head = header(A, base_version=5)
    assert isinstance(steered.offer(head), events.Proceed)
    assert isinstance(steered.offer(head), events.Proceed)  # a resumed stream
    steered.staged(A)
    steered.staged(A)
    assert len(steered.all(events.Persist)) == 1
    assert steered.offer(head) == Receipt(update_id=A, state=State.STAGED, duplicate=True)
    steered.send(events.Persisted(update=steered.all(events.Persist)[0].update))
    steered.send(events.Persisted(update=steered.all(events.Persist)[0].update))
    assert steered.receipts[A] == [Receipt(update_id=A, state=State.ACCEPTED)]
    assert steered.offer(head) == Receipt(update_id=A, state=State.ACCEPTED, duplicate=True)
    assert steered.window["arrived"] == 1


@pytest.mark.parametrize("stage", ["arriving", "persisting", "accepted"])
def test_one_id_with_other_bytes_is_refused_and_the_first_stands(stage: str) -> None:
    steered = at_version_5(prompt=False)
    head = header(A, base_version=5)
    steered.offer(head)
    if stage != "arriving":
        steered.staged(A)
    if stage == "accepted":
        steered.send(events.Persisted(update=steered.all(events.Persist)[0].update))
    for piece in (part(digest=8), part(samples=11.0)):
        assert steered.offer(head, piece).reason is Reason.ID_REUSED
    if stage == "arriving":
        assert steered.offer(replace(head, codec="int8")).reason is Reason.ID_REUSED
        steered.staged(A)
    if stage != "accepted":
        steered.send(events.Persisted(update=steered.all(events.Persist)[0].update))
    assert steered.receipts[A] == [Receipt(update_id=A, state=State.ACCEPTED)]
    assert steered.all(events.Persist)[0].update.slices == (part(),)
    assert steered.window["expected"] == 1  # the member is not punished in this window


# ---- several streams --------------------------------------------------------------------------------------------------------

THIRDS = (
    part(samples=1.0, intervals=((0, 1024),), digest=1),
    part(samples=0.0, intervals=((1024, 2048),), digest=2),
    part(samples=2.0, intervals=((2048, 3100), INTERVALS[1]), digest=3),
)


def test_streams_add_up_to_one_update_in_any_order() -> None:
    steered = at_version_5()
    head = header(A, base_version=5)
    for piece in (THIRDS[2], THIRDS[0]):
        steered.offer(head, piece)
        steered.staged(A, piece, squared_norm=0.5)
    assert steered.all(events.Persist) == []
    steered.offer(head, THIRDS[1])
    steered.staged(A, THIRDS[1], squared_norm=0.25)
    update = steered.all(events.Persist)[0].update
    assert (update.samples, update.squared_norm, update.slices) == (3.0, 1.25, THIRDS)
    assert update.payload_bytes == 4 * (3100 + 7)
    for piece in THIRDS:
        assert steered.offer(head, piece) == Receipt(update_id=A, state=State.ACCEPTED, duplicate=True)
    assert steered.offer(head).reason is Reason.ID_REUSED  # other streams than it came in


def test_overlapping_streams_refuse_the_update_and_wake_the_others() -> None:
    steered = at_version_5()
    head = header(A, base_version=5)
    steered.offer(head, THIRDS[0])
    steered.staged(A, THIRDS[0])
    answer = steered.offer(head, part(intervals=((512, 2048),)))
    assert answer.reason is Reason.WRONG_INTERVALS
    assert "covered twice" in answer.message
    assert steered.receipt(A).state is State.REFUSED  # type: ignore[union-attr]
    assert steered.all(events.Discard) == [events.Discard(update_id=A)]


def test_a_stream_that_a_retry_can_mend_leaves_the_update_arriving() -> None:
    steered = at_version_5()
    head = header(A, base_version=5)
    steered.offer(head)
    broken = Refused(Reason.BAD_CHECKSUM, "chunk 3")
    steered.send(events.SliceRejected(update_id=A, slice=part(), refusal=broken))
    assert steered.all(events.Settle) == []
    assert isinstance(steered.offer(head), events.Proceed)
    steered.staged(A)
    assert steered.receipt(A) == Receipt(update_id=A, state=State.ACCEPTED)


def test_a_transfer_that_stands_still_is_dropped_and_can_be_sent_again() -> None:
    steered = at_version_5(members={"heartbeat_s": 5, "lease_s": 100, "stall_s": 4})
    steered.at(1).offer(header(A, base_version=5))
    steered.at(12.9)
    assert steered.all(events.Settle) == []
    steered.at(13)  # three times 4 s
    receipt = steered.receipt(A)
    assert receipt == Receipt(update_id=A, state=State.UNKNOWN, reason="STALLED", message="no byte of it came for 12 s")
    assert steered.all(events.Discard) == [events.Discard(update_id=A)]
    assert steered.push(header(A, base_version=5)) == Receipt(update_id=A, state=State.ACCEPTED)


def test_bytes_that_arrive_are_a_sign_of_life() -> None:
    steered = at_version_5(members={"heartbeat_s": 1, "lease_s": 3, "stall_s": 10})
    steered.offer(header(A, base_version=5))
    for second in range(1, 9):
        steered.at(second).send(events.Progressed(update_id=A))
    assert steered.window["expected"] == 1
    steered.at(11)
    assert steered.window["expected"] == 0
    steered.staged(A)  # its lease has ended; what it sent is good all the same
    assert steered.receipt(A) == Receipt(update_id=A, state=State.ACCEPTED)
    assert steered.window["expected"] == 1


@pytest.mark.parametrize("meanwhile", ["time passes", "a newer process joins", "a stream is repeated, badly"])
def test_an_update_that_is_being_made_durable_is_not_dropped(meanwhile: str) -> None:
    steered = at_version_5(members={"heartbeat_s": 5, "lease_s": 100, "stall_s": 4}, prompt=False)
    steered.push(header(A, base_version=5))
    if meanwhile == "time passes":
        steered.at(90)
    elif meanwhile == "a newer process joins":
        steered.join("a", incarnation=2)
    else:
        steered.send(events.SliceRejected(update_id=A, slice=part(), refusal=Refused(Reason.NOT_FINITE, "nan")))
    assert steered.all(events.Discard) == []
    steered.send(events.Persisted(update=steered.all(events.Persist)[0].update))
    assert steered.receipts[A] == [Receipt(update_id=A, state=State.ACCEPTED)]


def test_an_update_that_the_disk_refused_can_be_sent_again() -> None:
    steered = at_version_5(prompt=False)
    steered.push(header(A, base_version=5))
    steered.send(events.PersistFailed(update=steered.all(events.Persist)[0].update, message="disk full"))
    assert steered.receipt(A) == Receipt(update_id=A, state=State.UNKNOWN, reason="STORAGE", message="disk full")
    assert steered.beat("a", open=(A,)).receipts == (Receipt(update_id=A, state=State.UNKNOWN),)
    assert isinstance(steered.offer(header(A, base_version=5)), events.Proceed)


# ---- time passes on the way -------------------------------------------------------------------------------------------------


def test_staleness_is_judged_against_the_version_that_the_update_is_merged_on_top_of() -> None:
    steered = at_version_5(window={"preset": "async"})
    steered.join("b")
    steered.update("b")  # version 6 is being made
    assert steered.offer(header(A, base_version=3)).reason is Reason.STALE  # 6 - 3
    assert isinstance(steered.offer(header(uid("a", 1), base_version=4)), events.Proceed)
    assert steered.offer(header(uid("a", 2), base_version=6)).reason is Reason.FUTURE_BASE  # not published yet


def test_an_update_that_becomes_stale_before_it_is_whole_is_refused() -> None:
    steered = at_version_5(window={"preset": "async"})
    steered.join("b")
    steered.offer(header(A, base_version=3))
    steered.update("b")
    steered.staged(A)
    receipt = steered.receipt(A)
    assert receipt is not None
    assert (receipt.state, receipt.reason) == (State.REFUSED, "STALE")
    assert steered.all(events.Discard) == [events.Discard(update_id=A)]


def test_an_update_that_becomes_stale_before_it_is_durable_is_refused_once_the_merge_is() -> None:
    """A crash before then loses the decision; the update would be accepted by the restart after its sender had dropped it."""
    steered = at_version_5(window={"preset": "async"}, prompt=False)
    steered.join("b")
    steered.push(header(A, base_version=3))
    steered.push(header(uid("b"), base_version=5))
    late, other = (persist.update for persist in steered.all(events.Persist))
    steered.send(events.Persisted(update=other))
    assert len(steered.merges()) == 1
    steered.send(events.Persisted(update=late))
    assert steered.receipt(A) is None
    assert steered.offer(header(A, base_version=3)) == Receipt(update_id=A, state=State.STAGED, duplicate=True)
    steered.publish()
    receipt = steered.receipt(A)
    assert receipt is not None
    assert (receipt.state, receipt.reason) == (State.REFUSED, "STALE")
    assert steered.all(events.Discard) == [events.Discard(update_id=A)]
    assert steered.window["arrived"] == 0


def test_a_partial_names_its_own_rows() -> None:
    steered = at_version_5()
    steered.join("a", tier=Tier.REGION, leaves=2)
    groups = (GROUP, replace(GROUP, tier=Tier.SITE, ids=(uid("y"),)))
    size = LAYOUT.elements
    rows = tuple((row * size + start, row * size + stop) for row in range(2) for start, stop in INTERVALS)
    assert steered.push(of_groups(*groups), part(intervals=rows)) == Receipt(update_id=A, state=State.ACCEPTED)
    assert steered.all(events.Persist)[0].update.payload_bytes == 2 * 4 * 3107
    assert steered.window["arrived_by_tier"] == {"edge": 1, "site": 1}
    assert steered.offer(partial(uid("a", 1), [uid("z")], 5), part(intervals=rows)).reason is Reason.WRONG_INTERVALS
