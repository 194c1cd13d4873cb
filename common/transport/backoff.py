"""How long to wait before trying again: doubling, capped, jittered."""

from __future__ import annotations

import random


class Backoff:
    """Delays of ``first_s``, twice that, and so on up to ``cap_s``, each drawn between half of it and all of it.

    The jitter keeps a fleet that lost its coordinator at one moment from coming back at one moment.
    """

    __slots__ = ("_cap_s", "_first_s", "_next_s", "_rng")

    def __init__(self, rng: random.Random, *, first_s: float = 0.1, cap_s: float = 1.0) -> None:
        self._rng, self._first_s, self._cap_s = rng, first_s, cap_s
        self._next_s = first_s

    def delay(self) -> float:
        """Seconds to wait before the next attempt."""
        full = self._next_s
        self._next_s = min(2 * full, self._cap_s)
        return full * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It worked: begin anew."""
        self._next_s = self._first_s
