"""WHEN to merge: presets, the pure ``decide``, and the grace that learns (design §4).

What the counts mean:

- **expected**: the leaf members of this window, that is those whose lease runs (a region stands for its ``leaves``), and
  those whose update is in although their lease has ended since. A member whose update was refused as bad in this window
  (``NOT_FINITE``, ``NORM_BOUND``, ...) is not expected again before the next one, unless a good update of it arrives first.
- **arrived**: leaf updates accepted in this window; **arrived_members**: the different leaf members they come from.
- **outstanding**, "on its way": expected members that have not arrived and whose transfer has not stalled.

When a window closes:

1. A *quorum* is there once ``quorum`` is met (an int counts updates, a fraction counts members: two updates of one member
   are one), every tier of ``require`` has an update in, and there are ``min_updates``. Once there it stays: a member that
   joins later cannot undo it.
2. From then on the window waits for those outstanding, at most ``grace``. Nobody outstanding: it merges at once.
3. At ``deadline`` it merges with what there is, quorum, ``require`` or not, if that is at least ``min_updates``; else it is
   extended.

A member that dies delays a quorum until its lease ends or the deadline, and nothing once there is a quorum but the grace.

After a restart nobody has joined yet. Members seen lately (see ``Aggregator``) count as expected under a fresh lease, and
for one heartbeat (``settling_until``) neither a fraction nor the deadline closes a window; a count of updates does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from fleetddp.common.config import Preset, WindowConfig
from fleetddp.common.update import Tier, Update

_REMEMBERED_DELAYS = 32
_ROUNDING = 1e-9  # 0.1 * 30 is a little more than 3, and still asks for three


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPolicy:
    """``WindowConfig`` with the preset filled in; the meaning of each field is in the module's docstring."""

    quorum: int | float | None  # None: only the deadline closes the window
    require: tuple[Tier, ...] = ()
    grace_s: float | Literal["auto"] = 0.0
    deadline_s: float = math.inf
    min_updates: int = 1

    def members_needed(self, expected: int) -> int:
        """How many of ``expected`` members a fractional quorum asks for; at least one."""
        assert isinstance(self.quorum, float)
        return max(1, math.ceil(self.quorum * expected - _ROUNDING))


PRESETS: dict[Preset, WindowPolicy] = {
    # synchronous FedAvg: everyone, however long it takes
    "sync": WindowPolicy(quorum=1.0),
    # half of the members, then those nearly there; a window takes a minute at most
    "semi_sync": WindowPolicy(quorum=0.5, grace_s="auto", deadline_s=60.0),
    # FedAsync: each update makes a version (its outer lr of 0.6 is `outer.preset: fedasync`)
    "async": WindowPolicy(quorum=1),
    # FedBuff: a buffer of K updates, whoever sent them
    "fedbuff": WindowPolicy(quorum=10),
    # periodic averaging: by the clock alone
    "periodic": WindowPolicy(quorum=None, deadline_s=60.0),
}


def resolve(config: WindowConfig, sites_named: bool) -> WindowPolicy:
    """The preset, overridden by what the fleet file says. ``semi_sync`` requires a site if the file names one (design §4)."""
    base = PRESETS[config.preset]
    require = base.require
    if config.preset == "semi_sync" and sites_named:
        require = (Tier.SITE,)
    return WindowPolicy(
        quorum=base.quorum if config.quorum is None else config.quorum,
        require=require if config.require is None else config.require,
        grace_s=base.grace_s if config.grace_s is None else config.grace_s,
        deadline_s=base.deadline_s if config.deadline_s is None else config.deadline_s,
        min_updates=base.min_updates if config.min_updates is None else config.min_updates,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """All that ``decide`` looks at. Times are in seconds since the epoch; see the module's docstring for the words."""

    opened_at: float
    deadline_at: float = math.inf  # moved by an extension
    settling_until: float = -math.inf
    expected: int = 0
    arrived: int = 0
    arrived_members: int = 0
    arrived_by_tier: Mapping[Tier, int] = field(default_factory=dict)
    outstanding: int = 0
    quorum_at: float | None = None  # when the quorum was there first
    grace_s: float = 0.0  # fixed, or learned by the time of the quorum

    def status(self) -> dict[str, Any]:
        """What people see of it, as JSON-able values."""
        return {
            "opened_at": self.opened_at,
            "deadline_at": self.deadline_at if math.isfinite(self.deadline_at) else None,
            "expected": self.expected,
            "arrived": self.arrived,
            "arrived_members": self.arrived_members,
            "arrived_by_tier": {tier.value: n for tier, n in self.arrived_by_tier.items()},
            "outstanding": self.outstanding,
            "quorum_at": self.quorum_at,
            "grace_s": self.grace_s,
        }


class Action(str, Enum):
    """What to do with the window."""

    WAIT = "wait"
    MERGE = "merge"
    EXTEND = "extend"


class Why(str, Enum):
    """The kind of reason; a change of it is worth a log line, a change of the counts in the sentence is not."""

    SETTLING = "settling"
    QUORUM_MISSING = "quorum missing"
    TIER_MISSING = "tier missing"
    TOO_FEW = "too few"
    CLOCK = "clock"
    GRACE = "grace"
    ALL_IN = "all in"
    GRACE_OVER = "grace over"
    DEADLINE = "deadline"
    EXTENDED = "extended"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do, until when that holds if nothing else happens (None: for ever), and why."""

    action: Action
    until: float | None
    why: Why
    counts: Counts
    policy: WindowPolicy

    @property
    def reason(self) -> str:
        """The sentence that is logged and shown by ``fleetddp status``."""
        return _sentence(self.why, self.counts, self.policy)


def quorum_reached(now: float, counts: Counts, policy: WindowPolicy) -> bool:
    """Whether there is a quorum now (rule 1 of the module's docstring). The caller notes when it first was."""
    return _missing(now, counts, policy) is None


def decide(now: float, counts: Counts, policy: WindowPolicy) -> Verdict:
    """Whether to merge now. Pure, and reads counts only, so its cost does not depend on the number of members."""
    if counts.quorum_at is not None:
        closes = min(counts.quorum_at + counts.grace_s, counts.deadline_at)
        if counts.outstanding == 0:
            return Verdict(Action.MERGE, None, Why.ALL_IN, counts, policy)
        if now >= closes:
            return Verdict(Action.MERGE, None, Why.GRACE_OVER, counts, policy)
        return Verdict(Action.WAIT, closes, Why.GRACE, counts, policy)
    if now >= counts.deadline_at:
        if counts.arrived >= policy.min_updates:
            return Verdict(Action.MERGE, None, Why.DEADLINE, counts, policy)
        until = now + policy.deadline_s  # a region's may be infinite, and its window end in time for the parent's all the same
        return Verdict(Action.EXTEND, until if until < math.inf else None, Why.EXTENDED, counts, policy)
    until = counts.deadline_at
    if now < counts.settling_until:
        until = min(until, counts.settling_until)
    # a quorum that nobody noted yet is a matter of the caller's next look
    why = _missing(now, counts, policy) or Why.GRACE
    return Verdict(Action.WAIT, None if until == math.inf else until, why, counts, policy)


def _missing(now: float, counts: Counts, policy: WindowPolicy) -> Why | None:
    """What there is no quorum for want of, the hardest to get last; None if there is one."""
    if policy.quorum is None:
        return Why.CLOCK
    if isinstance(policy.quorum, int):
        if counts.arrived < policy.quorum:
            return Why.QUORUM_MISSING
    elif now < counts.settling_until:
        return Why.SETTLING
    elif counts.arrived_members < policy.members_needed(counts.expected):
        return Why.QUORUM_MISSING
    if counts.arrived < policy.min_updates:
        return Why.TOO_FEW
    if any(not counts.arrived_by_tier.get(tier) for tier in policy.require):
        return Why.TIER_MISSING
    return None


def _sentence(why: Why, counts: Counts, policy: WindowPolicy) -> str:
    have = f"{counts.arrived} update{'' if counts.arrived == 1 else 's'}"
    if why is Why.SETTLING:
        return f"restarted: waiting for the members to come back; {have} so far"
    if why is Why.QUORUM_MISSING:
        if isinstance(policy.quorum, int):
            return f"waiting for a quorum: {counts.arrived} of {policy.quorum} updates"
        if counts.expected == 0:
            return "waiting for members: none is live"
        needed = policy.members_needed(counts.expected)
        return f"waiting for a quorum: {counts.arrived_members} of {needed} members ({counts.expected} expected)"
    if why is Why.TIER_MISSING:
        missing = [tier.value for tier in policy.require if not counts.arrived_by_tier.get(tier)]
        return f"quorum, but waiting for tier {' and '.join(missing)}; {have} so far"
    if why is Why.TOO_FEW:
        return f"quorum, but waiting for at least {policy.min_updates} updates; {have} so far"
    if why is Why.CLOCK:
        return f"waiting for the clock; {have} so far"
    if why is Why.GRACE:
        return f"quorum with {have}: waiting at most {counts.grace_s:.3g} s for {counts.outstanding} on their way"
    if why is Why.ALL_IN:
        return f"quorum with {have}: nobody else is on the way"
    if why is Why.GRACE_OVER and counts.grace_s == 0:
        return f"quorum with {have}"
    if why is Why.GRACE_OVER:
        return f"quorum with {have}: the grace of {counts.grace_s:.3g} s is over, {counts.outstanding} still on their way"
    if why is Why.DEADLINE:
        return f"deadline with {have} of {counts.expected} members expected"
    by = f" by {policy.deadline_s:.3g} s" if math.isfinite(policy.deadline_s) else ""
    return f"deadline with {have}, at least {policy.min_updates} needed: extended{by}"


class Grace:
    """How long to wait after the quorum: fixed, or learned from how late after a quorum updates came in.

    ``auto`` waits for those who can still make it in reasonable time: at most as long again as the quorum itself took. Of
    the last 32 delays it takes those within that bound and waits for nine in ten of them; slower members are left to a later
    window, since waiting for part of their way would gain nothing. Before it has seen any delay it waits for the bound.
    """

    def __init__(self, policy: WindowPolicy) -> None:
        self._fixed = None if policy.grace_s == "auto" else policy.grace_s
        self._delays: deque[float] = deque(maxlen=_REMEMBERED_DELAYS)

    def observe(self, delay_s: float) -> None:
        """An update came in ``delay_s`` after the quorum of the window it was meant for."""
        self._delays.append(delay_s)

    def seconds(self, quorum_took_s: float) -> float:
        """The grace of a window whose quorum took ``quorum_took_s`` seconds."""
        if self._fixed is not None:
            return self._fixed
        if not self._delays:
            return quorum_took_s
        within = sorted(delay for delay in self._delays if delay <= quorum_took_s)
        return within[math.ceil(0.9 * len(within)) - 1] if within else 0.0


@dataclass(slots=True)
class Window:
    """The window that is open: its times and what has arrived in it."""

    opened_at: float
    deadline_at: float
    settling_until: float = -math.inf
    quorum_at: float | None = None
    grace_s: float = 0.0
    arrived: int = 0
    arrived_by_tier: dict[Tier, int] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)

    def counts(self, expected: int, arrived_members: int, outstanding: int) -> Counts:
        """What ``decide`` looks at; the arguments are ``Membership``'s running counts."""
        return Counts(
            opened_at=self.opened_at,
            deadline_at=self.deadline_at,
            settling_until=self.settling_until,
            expected=expected,
            arrived=self.arrived,
            arrived_members=arrived_members,
            arrived_by_tier=self.arrived_by_tier,
            outstanding=outstanding,
            quorum_at=self.quorum_at,
            grace_s=self.grace_s,
        )

    def add(self, update: Update) -> None:
        """Count an accepted update; a partial counts as the leaf updates in it."""
        self.updates.append(update)
        header = update.header
        for tier, ids in ((g.tier, len(g.ids)) for g in header.groups) if header.groups else ((header.tier, 1),):
            self.arrived += ids
            self.arrived_by_tier[tier] = self.arrived_by_tier.get(tier, 0) + ids
