"""What is remembered of settled updates, and for how long."""

from __future__ import annotations

import pytest
from helpers.steering import durable, header, partial, uid

from fleetddp.common.errors import Reason
from fleetddp.common.high_water import INCARNATIONS
from fleetddp.common.receipts import Receipts
from fleetddp.common.update import Receipt, State


def test_an_update_goes_from_accepted_to_merged() -> None:
    receipts = Receipts({}, {})
    assert receipts.find(uid("a")) is None
    assert receipts.accept(durable(header(uid("a")))) == (Receipt(update_id=uid("a"), state=State.ACCEPTED),)
    assert receipts.accepted(uid("a")) == durable(header(uid("a")))
    merged = Receipt(update_id=uid("a"), state=State.MERGED, version=4)
    assert receipts.merge(uid("a"), 4) == (merged,)
    assert receipts.find(uid("a")) == merged
    assert receipts.accepted(uid("a")) is None


def test_an_update_is_settled_once() -> None:
    receipts = Receipts({}, {})
    receipts.accept(durable(header(uid("a"))))
    receipts.merge(uid("a"), 4)
    with pytest.raises(KeyError):
        receipts.merge(uid("a"), 5)


def test_a_partial_settles_its_leaf_updates() -> None:
    receipts = Receipts({}, {})
    receipts.accept(durable(partial(uid("region"), [uid("a"), uid("b", 3)])))
    assert receipts.taken([uid("a"), uid("c"), uid("b", 3)]) == (uid("a"), uid("b", 3))
    expired = receipts.expire(uid("region"), Reason.FINISHED, "over")
    assert [r.update_id for r in expired] == [uid("region"), uid("a"), uid("b", 3)]
    assert {r.state for r in expired} == {State.EXPIRED}
    assert receipts.taken([uid("a")]) == (uid("a"),)  # whoever sent it knows by now: it must not be merged after all


def test_memory_is_bounded_and_what_is_forgotten_is_known_by_its_mark() -> None:
    receipts = Receipts({}, {}, remembered=2)
    for sequence in range(5):
        receipts.accept(durable(header(uid("a", sequence))))
        receipts.merge(uid("a", sequence), sequence)
    assert [receipts.find(uid("a", n)).version for n in (3, 4)] == [3, 4]  # type: ignore[union-attr]
    old = receipts.find(uid("a", 0))
    assert old is not None
    assert (old.state, old.version) == (State.MERGED, -1)
    assert receipts.find(uid("a", 5)) is None
    assert receipts.find(uid("a", 0, incarnation=2)) is None


def test_a_refusal_is_remembered_but_leaves_no_mark() -> None:
    receipts = Receipts({}, {}, remembered=1)
    refusal = Receipt(update_id=uid("a"), state=State.REFUSED, reason="NOT_FINITE", message="nan")
    receipts.note(refusal)
    assert receipts.find(uid("a")) == refusal
    receipts.note(Receipt(update_id=uid("b"), state=State.REFUSED, reason="STALE"))
    assert receipts.find(uid("a")) is None  # forgotten: it would be checked, and refused, again


def test_marks_and_merged_ids_come_back_from_the_journal() -> None:
    receipts = Receipts({("a", 1): 7, ("b", 2): 0}, {uid("c", 4): 9})
    assert receipts.find(uid("a", 7)) is not None
    assert receipts.find(uid("a", 8)) is None
    assert receipts.find(uid("b", 0, incarnation=1)) is None
    assert receipts.find(uid("c", 4)) == Receipt(update_id=uid("c", 4), state=State.MERGED, version=9)


def test_of_a_node_that_restarts_for_ever_the_oldest_processes_are_taken_as_settled() -> None:
    receipts = Receipts({("a", incarnation): 0 for incarnation in range(1, INCARNATIONS + 3)}, {})
    assert receipts.find(uid("a", 5, incarnation=2)) is not None  # its mark was dropped: never merge it twice
    assert receipts.find(uid("a", 5, incarnation=3)) is None
    assert receipts.find(uid("a", 0, incarnation=3)) is not None
    assert receipts.find(uid("b", 0, incarnation=0)) is None
    assert (receipts.newest("a"), receipts.newest("b")) == (INCARNATIONS + 2, -1)
