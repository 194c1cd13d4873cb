"""How much each edge node is to do: local steps for its next unit of work, so that fast and slow arrive together (design §4).

What a member's updates show is its *speed*: the seconds of a step, and those that pass besides (to pull, to wait, to push). A
unit of b steps takes it ``besides + b * step`` seconds, so that with the fleet file's bounds it can arrive at any time between
those of ``min_steps`` and of ``max_steps``. The *pace* is the time that lies within these spans of the most members, and of such
times the latest: the most work for one transfer. Each member gets as many steps as it can make by then, within the bounds. Where
all spans meet, the fastest thus makes ``max_steps`` and the others proportionally fewer, which is the rule of Liu et al.,
Asynchronous Local-SGD Training for Language Modeling, 2024 (§5.2, dynamic local updates); to bound the steps from both sides, and
to look for a time at which many can arrive together, is due to Li et al., FedCompass, 2023 (§3). A member whose span lies apart
is as early or as late as its bound makes it, and does not set the pace of all others.

Who is behind, because it joined late or missed a window, does not wait for the next version: it begins when it is ready. It gets
as many steps as it can make until the others are due, a pace after the newest version came (FedCompass); with a whole unit it
would be behind for ever. Give such a fleet a quorum of well over half: with less, two halves may take turns, each closing a
window of its own, so that nobody waits and every update is a version late.

A member that has shown nothing begins with ``min_steps``. Speeds are learned anew after a restart: no decision rests on them.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fleetddp.common.config import WorkConfig
from fleetddp.common.update import NO_VERSION, Kind, Tier, UpdateHeader

FRESH = 0.5  # how much the newest update says of a step's seconds; those before it say the rest
REMEMBERED_BESIDES = 4  # the least of so many counts: what is more than that was time in which the member could not begin
REMEMBERED_VERSIONS = 64  # whose times of publication are kept
REVIEW = 8  # the pace is looked for anew when one in so many speeds has changed: it takes a pass over all of them
WORTH_SAYING = 1.1  # a change of the pace by this factor is logged
_ROUNDING = 1e-9


@dataclass(slots=True)
class Speed:
    """What one member has shown, in seconds."""

    step_s: float
    accepted_at: float = -math.inf  # its newest update
    _besides: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_BESIDES))

    @property
    def besides_s(self) -> float:
        """What a unit of work takes besides its steps."""
        return min(self._besides, default=0.0)

    def learn(self, steps: int, seconds: float, turn_s: float | None) -> None:
        """An update of so many steps, which took ``seconds``; the member could begin ``turn_s`` ago, if that is known."""
        self.step_s += FRESH * (seconds / steps - self.step_s)
        if turn_s is not None:
            self._besides.append(max(0.0, turn_s - seconds))

    def unit_s(self, steps: int) -> float:
        """Seconds from a version to the update of so many steps."""
        return self.besides_s + steps * self.step_s

    def steps_in(self, seconds: float) -> int:
        """How many steps, at least 0, fit in a unit of so many seconds."""
        return max(0, math.floor((seconds - self.besides_s) / self.step_s + _ROUNDING))


def pace(speeds: Iterable[Speed], low: int, high: int) -> float | None:
    """The time of a unit of work that the most members can keep with ``low`` to ``high`` steps; of such times the latest. None if
    nobody has shown a speed."""
    edges: list[tuple[float, int]] = []
    for speed in speeds:
        edges += ((speed.unit_s(low), 0), (speed.unit_s(high), 1))  # at one time, who begins counts before another ends
    best, most, inside = None, 0, 0
    for at, ends in sorted(edges):
        if ends and inside >= most:
            best, most = at, inside
        inside += -1 if ends else 1
    return best


class Work:
    """Assigns steps on behalf of an aggregator; the speeds lie with its members."""

    def __init__(self, config: WorkConfig) -> None:
        self._config = config
        self._adaptive = config.steps == "adaptive"
        self._published_at: OrderedDict[int, float] = OrderedDict()
        self._version = NO_VERSION  # the newest
        self._changes = 0  # speeds that have changed since the pace was looked for
        self.pace_s: float | None = None
        self._said_s = 0.0

    def learn(self, known: Speed | None, header: UpdateHeader, joined_at: float, now: float) -> Speed | None:
        """The speed of a member, of which an update was accepted; it has been in the run since ``joined_at``."""
        usable = self._adaptive and header.tier is Tier.EDGE and header.kind is Kind.DELTA
        if not usable or not header.steps or not header.seconds > 0:
            return known
        speed = known or Speed(header.seconds / header.steps)
        published_at = self._published_at.get(header.base_version)
        began_at = None if published_at is None else max(published_at, joined_at, speed.accepted_at)
        speed.learn(header.steps, header.seconds, None if began_at is None else now - began_at)
        speed.accepted_at = now
        self._changes += 1
        return speed

    def published(self, version: int, live: Iterable[Speed], members: int, now: float) -> str:
        """A version is out. Looks for the pace of ``live`` if much has changed; a sentence if the pace has, else nothing."""
        if not self._adaptive:
            return ""
        self._published_at[version], self._version = now, version
        if len(self._published_at) > REMEMBERED_VERSIONS:
            self._published_at.popitem(last=False)
        if not self._changes or self._changes * REVIEW < members:
            return ""
        self._changes = 0
        low, high = self._config.min_steps, self._config.max_steps
        found = list(live)
        self.pace_s = pace(found, low, high)
        if self.pace_s is None or 1 / WORTH_SAYING < self.pace_s / (self._said_s or math.inf) < WORTH_SAYING:
            return ""
        self._said_s = self.pace_s
        assigned = [self._within(speed, self.pace_s) for speed in found]
        return f"a unit of work takes {self.pace_s:.3g} s: {min(assigned)} to {max(assigned)} steps for {len(found)} members"

    def steps(self, tier: Tier, speed: Speed | None, base_version: int, now: float) -> int:
        """For the next unit of work of a member that trains from ``base_version`` now; 0: as its own settings say."""
        if not self._adaptive or tier is not Tier.EDGE:
            return 0
        if speed is None or self.pace_s is None:
            return self._config.min_steps
        if base_version == self._version:  # the next unit begins with the next version
            return self._within(speed, self.pace_s)
        left_s = self._published_at[self._version] + self.pace_s - now
        return self._within(speed, left_s)

    def _within(self, speed: Speed, pace_s: float) -> int:
        return min(max(speed.steps_in(pace_s), self._config.min_steps), self._config.max_steps)
