"""Time as something handed in: production reads the system's clock, tests and the simulator set it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Anything that tells the time in seconds since the epoch, never going back."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...


class SystemClock:
    """Wall time that never goes back within a process: a window's opening time must survive a restart."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch, as of process start, advanced monotonically."""
        return self._offset + time.monotonic()


class VirtualClock:
    """A clock that stands still until it is moved."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """The time it was last moved to."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Move forward by ``seconds`` (>= 0); returns the new time."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back (asked for {seconds} s)")
        self._now += seconds
        return self._now
