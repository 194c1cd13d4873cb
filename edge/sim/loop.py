"""The event loop: things to do, ordered by virtual time.

Nothing here waits. Running the loop jumps from one event to the next, so that a day of a fleet takes as long as its events take
to handle. Events at one time run in the order in which they were scheduled; with seeded draws (``draws.py``) a run is therefore
a function of its scenario and its seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

SLOT_S = 1.0  # a whole number of seconds, so that the edges of slots are exact

Event = tuple[float, int, Callable[[Any], object], Any]  # time, sequence, callback, argument


class EventLoop:
    """Runs ``callback(argument)`` at virtual times. It is a ``Clock`` (see ``common/clock.py``): hand it to whatever asks for
    one.

    An event is a plain tuple and a callback takes exactly one argument: the loop handles millions of them. Only those of the
    slot of time that is under way are in a heap, which stays small enough for the processor's cache. The others lie in lists, one
    a slot, until it begins.
    """

    __slots__ = ("_edge", "_heap", "_later", "_now", "_sequence", "_slots", "_stopped", "handled")

    def __init__(self, start: float = 0.0) -> None:
        self._heap: list[Event] = []  # before _edge
        self._edge = -math.inf
        self._later: dict[float, list[Event]] = {}  # by slot
        self._slots: list[float] = []  # a heap of the keys of _later
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
        self._sequence = sequence = self._sequence + 1
        if time < self._edge:
            heappush(self._heap, (time, sequence, callback, argument))
            return
        slot = time // SLOT_S
        events = self._later.get(slot)
        if events is None:
            self._later[slot] = [(time, sequence, callback, argument)]
            heappush(self._slots, slot)
        else:
            events.append((time, sequence, callback, argument))

    def after(self, delay: float, callback: Callable[[Any], object], argument: Any = None) -> None:
        """Run ``callback(argument)`` in ``delay`` seconds; ValueError if that is negative, infinite or not a number."""
        self.at(self._now + delay, callback, argument)

    def _next_slot(self) -> None:
        """The heap is empty, and something is scheduled: the next slot that holds anything begins."""
        slot = heappop(self._slots)
        self._heap.extend(self._later.pop(slot))
        heapify(self._heap)
        self._edge = (slot + 1.0) * SLOT_S

    def run(self, until: float = math.inf) -> float:
        """Handle every event up to and including time ``until``, or until ``stop``; returns the time then.

        With a finite ``until`` the clock ends there, even if the last event was earlier. An exception of a callback passes
        through; that event counts as handled, and ``run`` can be called again.
        """
        heap, handled = self._heap, self.handled
        self._stopped = False
        try:
            while (heap or self._slots) and not self._stopped:
                if not heap:
                    self._next_slot()
                if heap[0][0] > until:
                    break
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
        if not self._heap and self._slots:
            self._next_slot()
        return self._heap[0][0] if self._heap else math.inf

    def __len__(self) -> int:
        """Events that are scheduled."""
        return len(self._heap) + sum(map(len, self._later.values()))


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
