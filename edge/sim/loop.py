"""The event loop: a heap of things to do, ordered by virtual time.

Nothing here waits. Running the loop jumps from one event to the next, so that a day of a fleet takes as long as its events take
to handle. Events at one time run in the order in which they were scheduled; with seeded draws (``draws.py``) a run is therefore
a function of its scenario and its seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventLoop:
    """Runs ``callback(argument)`` at virtual times. It is a ``Clock`` (see ``common/clock.py``): hand it to whatever asks for
    one.

    An event is a plain tuple and a callback takes exactly one argument: the loop handles millions of them.
    """

    __slots__ = ("_heap", "_now", "_sequence", "_stopped", "handled")

    def __init__(self, start: float = 0.0) -> None:
        self._heap: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._now = start
        self._sequence = 0  # breaks ties, so that two callbacks are never compared
        self._stopped = False
        self.handled = 0  # events run so far

    def now(self) -> float:
        """Virtual seconds since the epoch of the scenario."""
        return self._now

    def at(self, time: float, callback: Callable[[Any], object], argument: Any = None) -> None:
        """Run ``callback(argument)`` at ``time``; ValueError if that is past, infinite or not a number."""
        if not self._now <= time < math.inf:
            raise ValueError(f"cannot schedule an event at {time} s: it is {self._now} s, and the time must be finite")
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, callback, argument))

    def after(self, delay: float, callback: Callable[[Any], object], argument: Any = None) -> None:
        """Run ``callback(argument)`` in ``delay`` seconds; ValueError if that is negative, infinite or not a number."""
        now = self._now
        time = now + delay
        if not now <= time < math.inf:
            raise ValueError(f"cannot schedule an event at {time} s: it is {now} s, and the time must be finite")
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, callback, argument))

    def run(self, until: float = math.inf) -> float:
        """Handle every event up to and including time ``until``, or until ``stop``; returns the time then.

        With a finite ``until`` the clock ends there, even if the last event was earlier. An exception of a callback passes
        through; that event counts as handled, and ``run`` can be called again.
        """
        heap, handled = self._heap, self.handled
        self._stopped = False
        try:
            while heap and heap[0][0] <= until and not self._stopped:
                self._now, _, callback, argument = heappop(heap)
                handled += 1
                callback(argument)
        finally:
            self.handled = handled
        if not self._stopped and self._now < until < math.inf:
            self._now = until
        return self._now

    def stop(self) -> None:
        """Make ``run`` return after the event that is being handled; what is scheduled stays scheduled."""
        self._stopped = True

    def next_time(self) -> float:
        """When the next event is due; infinity if nothing is scheduled."""
        return self._heap[0][0] if self._heap else math.inf

    def __len__(self) -> int:
        """Events that are scheduled."""
        return len(self._heap)


class Timer:
    """One wake-up that can be moved, for callers that would otherwise leave a trail of outdated events in the heap.

    Moving it later leaves its one event where it is; that event finds on arrival that it came too soon and goes on to the new
    time. A deadline that is pushed back a thousand times before it is reached thus costs two events.
    """

    __slots__ = ("_callback", "_due", "_event_at", "_loop", "_token")

    def __init__(self, loop: EventLoop, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        self._due = math.inf  # when the caller wants to be woken
        self._event_at = math.inf  # when the one event that counts is due
        self._token = 0  # an event with an older token has been replaced by an earlier one

    @property
    def due(self) -> float:
        """When it will fire; infinity if it is not set."""
        return self._due

    def set(self, time: float | None) -> None:
        """Fire once, at ``time`` (now, if that is past) and at no other time; None: not at all."""
        if time is None:
            self._due = math.inf
            return
        self._due = max(time, self._loop.now())
        if self._due < self._event_at:
            self._schedule()

    def _schedule(self) -> None:
        self._loop.at(self._due, self._fire, self._token + 1)
        self._token += 1
        self._event_at = self._due

    def _fire(self, token: int) -> None:
        if token != self._token:
            return
        self._event_at = math.inf
        if self._due == math.inf:
            return
        if self._due > self._loop.now():
            self._schedule()
            return
        self._due = math.inf
        self._callback()
