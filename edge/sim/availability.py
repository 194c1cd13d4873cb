"""When a device can take part: always, by a recorded trace, every night, and never during an outage.

Availability is a pure function of time: ``state_at(t)`` and ``next_change(t)`` depend on t alone, not on how often or in which
order they are asked. Generated availability draws each day from a hash of (seed, device, day), so that there is no state to
advance, no horizon to choose, and a device that is asked twice as often behaves the same.

At the very time of a change the new state holds. ``next_change(t, before)`` is later than t and earlier than ``before``, and
infinity where there is no such change: whoever looks ahead only so far says so, and saves the search for a change weeks away.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from fleetddp.common.errors import ConfigError
from fleetddp.edge.sim.draws import Draws, Name

HOUR = 3600.0
DAY = 24 * HOUR
GUARD_S = 60.0  # a generated session or outage keeps this far from its day's ends, so that two days' never touch
DAYS_SEARCHED = 400  # a generated device without any change in so many days is taken to stay as it is
_NORMAL = NormalDist()


class Availability(Protocol):
    """Whether a device takes part, as a pure function of virtual time."""

    def state_at(self, t: float) -> bool:
        """Whether it is available at ``t``."""
        ...

    def next_change(self, t: float, before: float = math.inf) -> float:
        """The first time after ``t`` at which the state changes; infinity: not before ``before``."""
        ...


class Always:
    """Available at all times."""

    def state_at(self, t: float) -> bool:
        """Always True."""
        return True

    def next_change(self, t: float, before: float = math.inf) -> float:
        """Infinity."""
        return math.inf


class Trace:
    """A recorded device: its state before the first change, and the times at which it changed.

    With ``period_s`` the record repeats: it covers [0, period_s), and each period begins in the start state. Without, the device
    keeps its last state for ever.
    """

    def __init__(self, start: bool, changes: Sequence[float], period_s: float | None = None) -> None:
        times = tuple(map(float, changes))
        if not all(map(math.isfinite, times)) or any(a >= b for a, b in pairwise(times)):
            raise ConfigError(f"the times of changes must be finite and rising; got {list(times)[:6]}")
        if period_s is not None and not (0 < period_s < math.inf and (not times or 0 < times[0] <= times[-1] < period_s)):
            raise ConfigError(f"a repeating trace needs 0 < every change < period_s; got {period_s} s and {list(times)[:6]}")
        self._start, self._times, self._period = start, times, period_s

    def state_at(self, t: float) -> bool:
        """By the number of changes up to ``t``, in its period."""
        return self._start ^ bool(bisect_right(self._times, t - self._begins(t)) % 2)

    def next_change(self, t: float, before: float = math.inf) -> float:
        """The next time of the record; where an odd number of changes repeats, also the end of the period."""
        begins, times = self._begins(t), self._times
        k = bisect_right(times, t - begins)
        if k < len(times):
            change = begins + times[k]
        elif self._period is None or not times:
            return math.inf
        else:
            change = begins + self._period + (0.0 if len(times) % 2 else times[0])
        return change if change < before else math.inf

    def _begins(self, t: float) -> float:
        """When the period of ``t`` began."""
        return 0.0 if self._period is None else math.floor(t / self._period) * self._period


def read_traces(path: Path) -> dict[str, Trace]:
    """Read a trace file: one JSON object a line, ``{"id": "phone-1", "start": true, "changes": [3600, 7200.5]}``.

    ``start`` is the state before the first change, ``changes`` are rising times in seconds of virtual time; ``"period_s": 86400``
    makes the record repeat. Raises ConfigError with the line that is wrong.
    """
    traces: dict[str, Trace] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict) or not {"id", "start", "changes"} <= row.keys() <= {"id", "start", "changes", "period_s"}:
            raise ConfigError(f"{where}: an object with id, start, changes and perhaps period_s is needed; got {line[:80]}")
        name, start, changes, period = row["id"], row["start"], row["changes"], row.get("period_s")
        numbers = [*changes, *([] if period is None else [period])] if isinstance(changes, list) else [None]
        if not isinstance(name, str) or type(start) is not bool or any(type(x) not in (int, float) for x in numbers):
            raise ConfigError(f"{where}: id is text, start true or false, changes and period_s are numbers; got {line[:80]}")
        if name in traces:
            raise ConfigError(f"{where}: {name!r} has a trace already")
        try:
            traces[name] = Trace(start, changes, period)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return traces


class _ByDay(ABC):
    """One interval, or none, in each day; ``within`` says which state holds inside it."""

    def __init__(self, draws: Draws, names: tuple[Name, ...], begins_s: float, within: bool) -> None:
        self._draws, self._names = draws, names
        self._begins = begins_s  # day 0 is [begins_s, begins_s + DAY)
        self._within = within
        self._day = math.nan  # the day last asked for, kept to save drawing it again
        self._interval: tuple[float, float] | None = None
        self._clear = (math.inf, -math.inf)  # between these is no change, likewise kept
        self._found = False  # and at the second there is one
        self._unsearched = 0  # the first day whose interval is not yet looked at

    @abstractmethod
    def _draw(self, day: int) -> tuple[float, float] | None:
        """Start and length of the interval in seconds from the beginning of ``day``; None: it has none."""

    def _uniform(self, day: int, what: str) -> float:
        return self._draws.uniform(*self._names, day, what)

    def _of(self, day: int) -> tuple[float, float] | None:
        if day != self._day:
            drawn, begins = self._draw(day), self._begins + day * DAY
            self._day, self._interval = day, None
            if drawn is not None:
                start = min(max(drawn[0], GUARD_S), DAY - 3 * GUARD_S)
                end = min(start + max(drawn[1], GUARD_S), DAY - GUARD_S)
                self._interval = (begins + start, begins + end)
        return self._interval

    def state_at(self, t: float) -> bool:
        """Whether ``t`` lies in its day's interval, or outside it."""
        interval = self._of(math.floor((t - self._begins) / DAY))
        return self._within if interval is not None and interval[0] <= t < interval[1] else not self._within

    def next_change(self, t: float, before: float = math.inf) -> float:
        """The next edge of an interval."""
        day = math.floor((t - self._begins) / DAY)
        before = min(before, self._begins + (day + DAYS_SEARCHED) * DAY)
        if not self._clear[0] <= t < self._clear[1]:
            self._clear, self._found, self._unsearched = (t, t), False, day
        while not self._found and self._clear[1] < before:
            later = [edge for edge in self._of(self._unsearched) or () if edge > self._clear[0]]
            self._unsearched += 1
            self._found = bool(later)
            self._clear = (self._clear[0], later[0] if later else self._begins + self._unsearched * DAY)
        return self._clear[1] if self._found and self._clear[1] < before else math.inf


@dataclass(frozen=True, slots=True)
class Nights:
    """Figures of a device that takes part while it is idle, charging and on an unmetered network: at night.

    That rule is the one of production as described by Bonawitz et al. 2019 (arXiv:1902.01046). The figures are assumptions,
    chosen for people who charge their phones while they sleep.
    """

    start_h: float = 22.5  # mean local time at which the device is put on its charger
    start_sd_h: float = 1.5
    length_h: float = 7.5
    length_sd_h: float = 1.5
    share: float = 0.85  # of nights on which it happens at all

    def __post_init__(self) -> None:
        if not (0 <= self.start_h < 24 and self.start_sd_h >= 0 and 0 < self.length_h < 24 and self.length_sd_h >= 0):
            raise ConfigError(f"nights need 0 <= start_h < 24, 0 < length_h < 24 and deviations >= 0; got {self}")
        if not 0 < self.share <= 1:
            raise ConfigError(f"the share of nights must be in (0, 1]; got {self.share}")


class Nightly(_ByDay):
    """Available for one session a night. ``utc_offset_h`` is the device's time zone; virtual time 0 is midnight UTC."""

    def __init__(self, draws: Draws, device: Name, nights: Nights, *, utc_offset_h: float = 0.0) -> None:
        # A day is centred on the mean session, which ends the next morning: from midnight to midnight it would be cut in two.
        middle = nights.start_h + nights.length_h / 2
        self._nights, self._lead_h = nights, 12 - nights.length_h / 2
        super().__init__(draws, ("nights", device), (middle - 12 - utc_offset_h) * HOUR, within=True)

    def _draw(self, day: int) -> tuple[float, float] | None:
        nights = self._nights
        if self._uniform(day, "share") >= nights.share:
            return None
        start_h = self._lead_h + nights.start_sd_h * _normal(self._uniform(day, "start"))
        length_h = nights.length_h + nights.length_sd_h * _normal(self._uniform(day, "length"))
        return start_h * HOUR, length_h * HOUR


class Outages(_ByDay):
    """Available except for at most one outage a day, with probability ``daily`` and of exponential length, mean ``mean_s``.

    Give every device of a region the region's name as ``subject`` and they fail together; a device's own name makes its own.
    """

    def __init__(self, draws: Draws, subject: Name, *, daily: float, mean_s: float) -> None:
        if not (0 <= daily <= 1 and 0 < mean_s < math.inf):
            raise ConfigError(f"outages need 0 <= daily <= 1 and a positive mean_s; got daily {daily}, mean_s {mean_s}")
        self._daily, self._mean = daily, mean_s
        super().__init__(draws, ("outages", subject), 0.0, within=False)

    def _draw(self, day: int) -> tuple[float, float] | None:
        if self._uniform(day, "happens") >= self._daily:
            return None
        return DAY * self._uniform(day, "start"), -self._mean * math.log1p(-self._uniform(day, "length"))


class Every:
    """Available when all its ``parts`` are: a night's session, no outage of the region, none of the device."""

    def __init__(self, *parts: Availability) -> None:
        self._parts = parts

    def state_at(self, t: float) -> bool:
        """Whether all parts are available."""
        return all(part.state_at(t) for part in self._parts)

    def next_change(self, t: float, before: float = math.inf) -> float:
        """Available: when the first part goes. Not: when the last missing part is back and none has gone meanwhile."""
        missing = [part for part in self._parts if not part.state_at(t)]
        if not missing:
            first = before
            for part in self._parts:
                first = min(first, part.next_change(t, first))
            return first if first < before else math.inf
        while missing:
            t = max(part.next_change(t, before) for part in missing)
            if t == math.inf:
                return t
            missing = [part for part in self._parts if not part.state_at(t)]
        return t


def _normal(uniform: float) -> float:
    """A standard normal draw from a uniform one."""
    return _NORMAL.inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))
