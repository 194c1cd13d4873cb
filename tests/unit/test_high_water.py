"""Marks of what was settled long ago, and the gaps below them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetddp.common.high_water import INCARNATIONS, KNOWN, HighWater, Mark, after
from fleetddp.common.update import UpdateId


@given(st.lists(st.integers(0, 3 * KNOWN), min_size=1, max_size=60))
def test_of_the_last_sequences_each_is_known_and_all_before_are_settled(settled: list[int]) -> None:
    mark = None
    for sequence in settled:
        mark = after(mark, sequence)
    assert mark is not None
    newest = max(settled)
    assert mark.sequence == newest
    for sequence in range(newest + 5):
        recent = sequence > newest - KNOWN
        expected = sequence in settled if recent else True
        # what was noted while it was recent stays; what had fallen out of sight by then counts as settled anyway
        assert mark.covers(sequence) == expected, sequence
    assert set(mark.gaps) == {s for s in range(max(0, newest - KNOWN + 1), newest) if s not in settled}
    again = Mark.of_row(mark.sequence, f"{mark.settled:x}")
    assert again == mark
    assert Mark.at(mark.sequence, mark.gaps).gaps == mark.gaps


def test_an_update_that_comes_late_by_another_way_is_not_taken_for_settled() -> None:
    marks = HighWater()
    marks.settle(UpdateId("a", 1, 1))
    marks.settle(UpdateId("a", 1, 3))
    assert [marks.covers(UpdateId("a", 1, n)) for n in (1, 2, 3, 4)] == [True, False, True, False]
    marks.settle(UpdateId("a", 1, 2))
    assert marks.covers(UpdateId("a", 1, 2))


def test_marks_of_a_journal_of_schema_1_settle_all_below() -> None:
    marks = HighWater()
    marks.put("a", 1, Mark.of_row(9, None))
    assert all(marks.covers(UpdateId("a", 1, n)) for n in range(10))


def test_of_a_node_the_newest_processes_are_known() -> None:
    marks = HighWater()
    for incarnation in range(1, INCARNATIONS + 2):
        marks.settle(UpdateId("a", incarnation, 5))
    assert marks.covers(UpdateId("a", 1, 99)), "older than all that are known"
    assert not marks.covers(UpdateId("a", 2, 4))
    assert (marks.newest("a"), marks.newest("b")) == (INCARNATIONS + 1, -1)
