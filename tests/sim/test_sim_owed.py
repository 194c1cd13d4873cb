"""What a simulated member owes follows the rules of the edge node's outbox."""

from __future__ import annotations

from fleetddp.common.update import Kind, Receipt, State, UpdateId
from fleetddp.edge.sim.learning import NO_BYTES, Parcel, Unit
from fleetddp.edge.sim.owed import Owed


def unit(number: int) -> Unit:
    return Unit(number, 10.0, 5, 2.0)


def owed_at(version: int) -> Owed:
    owed = Owed("phone")
    owed.restart(100)
    owed.adopt(version, f"v{version}", 10)
    return owed


def receipt(sequence: int, state: State, incarnation: int = 100) -> Receipt:
    return Receipt(update_id=UpdateId("phone", incarnation, sequence), state=state)


def test_an_update_that_nobody_has_seen_grows() -> None:
    owed = owed_at(3)
    owed.put(Kind.DELTA, unit(0), "a")
    owed.put(Kind.DELTA, unit(1), "b")
    entry = owed.offer()
    assert entry is not None
    assert (entry.update_id, entry.base_version) == (("phone", 100, 1), 3)
    assert (entry.samples, entry.steps, entry.seconds) == (20.0, 10, 4.0)
    assert (entry.start, entry.end) == ("v3", "b")


def test_once_offered_it_stays_and_the_next_starts_where_it_ended() -> None:
    owed = owed_at(0)
    owed.put(Kind.DELTA, unit(0), "a")
    assert owed.open() == ()
    first = owed.offer()
    owed.put(Kind.DELTA, unit(1), "b")
    assert first is owed.offer()  # still the oldest that the parent may not have
    assert owed.open() == (UpdateId("phone", 100, 1),)
    assert not owed.record(receipt(1, State.ACCEPTED))
    second = owed.offer()
    assert first is not None
    assert second is not None
    assert (first.end, first.samples) == ("a", 10.0)
    assert (second.start, second.end, second.samples) == ("a", "b", 10.0)
    assert owed.open() == (UpdateId("phone", 100, 1), UpdateId("phone", 100, 2))
    assert owed.record(receipt(1, State.MERGED))
    assert not owed.record(receipt(1, State.MERGED))
    assert len(owed) == 1


def test_a_refusal_leads_back_to_the_base() -> None:
    owed = owed_at(0)
    owed.put(Kind.DELTA, unit(0), "a")
    owed.offer()
    owed.put(Kind.DELTA, unit(1), "b")  # starts where the refused one ended: it goes with it
    assert owed.record(receipt(1, State.REFUSED))
    assert owed.rewinding
    owed.rewind()
    assert (len(owed), owed.local, owed.trained) == (0, "v0", False)
    owed.put(Kind.DELTA, unit(2), "c")
    entry = owed.offer()
    assert entry is not None
    assert (entry.start, entry.update_id.sequence) == ("v0", 3)


def test_a_refusal_of_an_older_base_leaves_this_one_alone() -> None:
    owed = owed_at(0)
    owed.put(Kind.DELTA, unit(0), "a")
    owed.offer()
    owed.adopt(1, "v1", 10)
    owed.put(Kind.DELTA, unit(1), "b")
    assert owed.record(receipt(1, State.REFUSED))
    assert not owed.rewinding
    assert (len(owed), owed.local) == (1, "b")


def test_a_lost_update_is_sent_again() -> None:
    owed = owed_at(0)
    owed.put(Kind.DELTA, unit(0), "a")
    first = owed.offer()
    owed.record(receipt(1, State.ACCEPTED))
    assert owed.offer() is None
    owed.record(receipt(1, State.UNKNOWN))
    assert owed.offer() is first


def test_a_crash_forgets_what_was_being_trained_and_nothing_else() -> None:
    owed = owed_at(4)
    owed.put(Kind.DELTA, unit(0), "a")
    owed.restart(100)  # its clock stands still: the incarnation moves on all the same
    assert owed.incarnation == 101
    assert (owed.base_version, owed.local, owed.trained, len(owed)) == (4, "a", True, 1)
    entry = owed.offer()
    assert entry is not None
    assert entry.update_id == ("phone", 100, 1)
    owed.restart(50)  # its clock was set back
    assert owed.incarnation == 102
    assert owed.local == "a"
    assert owed.open() == (("phone", 100, 1),)


def test_pending_updates_of_two_bases_stay_apart() -> None:
    owed = owed_at(0)
    owed.put(Kind.DELTA, unit(0), "a")
    owed.adopt(1, "v1", 10)
    owed.put(Kind.DELTA, unit(1), "b")
    assert len(owed) == 2
    first = owed.offer()
    assert first is not None
    assert (first.base_version, first.start, first.end) == (0, "v0", "a")
    assert owed.local == "b"
    owed.record(receipt(1, State.ACCEPTED))
    second = owed.offer()
    assert second is not None
    assert (second.base_version, second.start, second.end) == (1, "v1", "b")


def test_a_diverged_unit_is_dropped() -> None:
    owed = owed_at(0)
    owed.put(Kind.DELTA, unit(0), "nan")
    entry = owed.offer()
    assert entry is not None
    owed.drop(entry)
    assert (len(owed), owed.rewinding) == (0, True)


def encode(owed: Owed, residual: str) -> None:
    entry = owed.offer()
    assert entry is not None
    assert entry.parcel is None
    owed.encoded(entry, Parcel(4, NO_BYTES, 0, {}, residual))


def test_a_refusal_restores_the_residual_before_it() -> None:
    owed = owed_at(0)
    owed.put(Kind.DELTA, unit(0), "a")
    encode(owed, "r1")
    owed.record(receipt(1, State.MERGED))
    owed.adopt(1, "v1", 10)
    owed.put(Kind.DELTA, unit(1), "b")
    encode(owed, "r2")
    assert owed.residual == "r2"
    owed.record(receipt(2, State.REFUSED))
    assert owed.residual == "r1"


def test_a_residual_that_is_too_old_is_dropped_for_good() -> None:
    owed = owed_at(0)
    owed.put(Kind.DELTA, unit(0), "a")
    encode(owed, "r1")
    owed.record(receipt(1, State.MERGED))
    owed.adopt(2, "v2", 2)
    assert owed.residual == "r1"
    owed.put(Kind.DELTA, unit(1), "b")
    encode(owed, "r2")
    owed.adopt(5, "v5", 2)  # three versions after it was made
    assert owed.residual is None
    owed.record(receipt(2, State.REFUSED))  # what it restores is as old
    assert owed.residual is None
