"""The event loop and its timer: order, time, and what is refused."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetddp.edge.sim.loop import EventLoop, Timer

times = st.floats(0, 1e9)


@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 1e9]), max_size=30))
def test_events_run_by_time_and_ties_by_insertion(due: list[float]) -> None:
    loop, seen = EventLoop(), []
    for k, t in enumerate(due):
        loop.at(t, lambda k: seen.append((loop.now(), k)), k)
    loop.run()
    assert seen == sorted((t, k) for k, t in enumerate(due))
    assert loop.handled == len(due)
    assert len(loop) == 0
    assert loop.next_time() == math.inf


def test_events_scheduled_by_events_are_run_in_their_turn() -> None:
    loop, seen = EventLoop(10.0), []

    def hop(left: int) -> None:
        seen.append(loop.now())
        if left:
            loop.after(0.5, hop, left - 1)

    loop.at(10.0, hop, 3)
    loop.at(11.0, lambda _: seen.append(-1.0))  # scheduled before the hop at the same time
    assert loop.run() == 11.5
    assert seen == [10.0, 10.5, -1.0, 11.0, 11.5]


def test_run_until_includes_its_end_and_leaves_the_clock_there() -> None:
    loop, seen = EventLoop(), []
    for t in (1.0, 2.0, 3.0):
        loop.at(t, seen.append, t)
    assert loop.run(2.0) == 2.0
    assert seen == [1.0, 2.0]
    assert loop.next_time() == 3.0
    assert loop.run(2.5) == 2.5
    assert loop.now() == 2.5
    assert loop.run() == 3.0
    assert seen == [1.0, 2.0, 3.0]


def test_stop_ends_after_the_event_in_hand() -> None:
    loop, seen = EventLoop(), []
    loop.at(1.0, seen.append, 1)
    loop.at(2.0, lambda _: loop.stop())
    loop.at(2.0, seen.append, 3)
    assert loop.run(10.0) == 2.0
    assert seen == [1]
    assert loop.run(10.0) == 10.0
    assert seen == [1, 3]


def test_an_exception_passes_and_the_loop_goes_on() -> None:
    loop, seen = EventLoop(), []

    def fail(_: Any) -> None:
        raise RuntimeError("found")

    loop.at(1.0, fail)
    loop.at(2.0, seen.append, 2)
    with pytest.raises(RuntimeError, match="found"):
        loop.run()
    assert loop.handled == 1
    loop.run()
    assert (seen, loop.handled) == ([2], 2)


@pytest.mark.parametrize("t", [4.999, -1.0, math.inf, math.nan])
def test_past_and_unreachable_times_are_refused(t: float) -> None:
    loop = EventLoop(5.0)
    with pytest.raises(ValueError, match=r"it is 5\.0 s"):
        loop.at(t, print)
    with pytest.raises(ValueError, match="cannot schedule"):
        loop.after(t - 5.0, print)
    assert len(loop) == 0


@given(st.lists(st.tuples(times, st.one_of(st.none(), times)), max_size=30))
def test_a_timer_fires_once_at_the_last_time_it_was_set_to(moves: list[tuple[float, float | None]]) -> None:
    """Against the plain model: the last order given before its due time wins, and it fires exactly then."""
    moves.sort(key=lambda move: move[0])
    expected: list[float] = []
    due = math.inf
    for when, to in moves:
        if due < when:
            expected.append(due)
            due = math.inf
        due = math.inf if to is None else max(to, when)
    if due < math.inf:
        expected.append(due)
    # An order given at the very time of firing: in the model it comes first, so let it do so here too.
    loop, fired = EventLoop(), []
    timer = Timer(loop, lambda: fired.append(loop.now()))
    for when, to in moves:
        loop.at(when, timer.set, to)
    loop.run()
    assert fired == expected
    assert timer.due == math.inf


def test_a_timer_that_is_pushed_back_leaves_one_event() -> None:
    loop, fired = EventLoop(), []
    timer = Timer(loop, lambda: fired.append(loop.now()))
    for t in range(1, 1001):
        timer.set(float(t))
    assert len(loop) == 1
    assert timer.due == 1000.0
    loop.run()
    assert fired == [1000.0]
    assert loop.handled == 2


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or coverage makes Python several times slower")
def test_a_bare_event_is_cheap() -> None:
    """Far below the figure of a quiet machine (above 600,000/s), so that only a change of its order of magnitude fails."""
    loop = EventLoop()

    def again(left: int) -> None:
        if left:
            loop.after(1.0, again, left - 1)

    for k in range(1000):
        loop.at(k / 1000, again, 49)
    began = time.process_time()
    loop.run()
    assert loop.handled == 50_000
    assert loop.handled / (time.process_time() - began) > 60_000
