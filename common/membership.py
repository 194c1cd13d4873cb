"""Who takes part: leases, incarnations, and running counts of whom the window still waits for.

A member is *live* from its Join until it leaves or its lease ends. Its record outlives that: an older process of the same
node must go on being told that it was replaced. Of the members that are gone the last ``REMEMBERED`` are kept. No lease ends
while this process itself stood still. Counts change with the member that changes; nothing here walks over all members.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from fleetddp.common.config import MembersConfig
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import Heartbeat, Join
from fleetddp.common.recovered import Recovered
from fleetddp.common.update import NO_VERSION, Tier, Update
from fleetddp.common.work import Speed

REMEMBERED = 65_536  # members that are gone


@dataclass(slots=True, eq=False)
class Member:
    """What the aggregator knows of one member."""

    node: str
    tier: Tier
    incarnation: int
    leaves: int = 1
    seen_at: float = -math.inf
    live: bool = False
    presumed: bool = False  # known from the journal only: counted, but not answered before it joins again
    base_version: int = NO_VERSION
    metrics: dict[str, float] = field(default_factory=dict)
    accepted: int = 0  # updates, since this process started
    refused: int = 0
    payload_bytes: int = 0
    staleness: int = 0  # of its newest accepted update
    last_window: int = -1  # the window its newest update arrived in
    joined_at: float = -math.inf
    speed: Speed | None = None  # that it has shown
    # in the window that is open
    arrived: set[str] = field(default_factory=set)  # leaf nodes whose updates came through this member
    spoiled: bool = False  # its update was bad
    stalled: int = 0  # transfers of it that make no progress

    def status(self) -> dict[str, Any]:
        """What people see of it, as JSON-able values."""
        return {
            "node": self.node,
            "tier": self.tier.value,
            "live": self.live,
            "incarnation": self.incarnation,
            "last_seen_s": self.seen_at,
            "base_version": self.base_version,
            "updates": self.accepted,
            "refused": self.refused,
            "bytes": self.payload_bytes,
            "leaves": self.leaves,
            "staleness": self.staleness,
            "arrived": bool(self.arrived),
            "stalled": self.stalled > 0,
            "metrics": self.metrics,
            "step_s": None if self.speed is None else self.speed.step_s,
        }

    def weights(self) -> tuple[int, int, int]:
        """What it adds to (expected, arrived_members, outstanding); see window.py."""
        inside = len(self.arrived)
        if not self.live or (self.spoiled and not inside):
            return inside, inside, 0
        outstanding = 0 if inside or self.stalled else self.leaves
        return max(self.leaves, inside), inside, outstanding


class Membership:
    """All members by node name."""

    def __init__(self, config: MembersConfig, remembered: int = REMEMBERED) -> None:
        self._config, self._lease_s = config, config.lease_s
        self._remembered = remembered
        self._members: dict[str, Member] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()  # those not live, the longest gone first
        self._leases: OrderedDict[str, Member] = OrderedDict()  # the live ones, those silent the longest first
        self._spared_until = -math.inf  # no lease ends before
        self._touched: list[Member] = []  # those with anything to reset when the next window opens
        self.expected = 0
        self.arrived = 0
        self.outstanding = 0
        self.live_by_tier: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.changed = False  # have the counts changed since somebody set this to False?

    def __len__(self) -> int:
        return len(self._members)

    def status(self, most: int) -> list[dict[str, Any]]:
        """What people see of ``most`` members by name; those that are live before those that are gone."""
        shown = heapq.nsmallest(most, self._members.values(), key=lambda member: (not member.live, member.node))
        return [member.status() for member in sorted(shown, key=attrgetter("node"))]

    def get(self, node: str) -> Member | None:
        """The record of a node, live or not."""
        return self._members.get(node)

    @property
    def next_lease(self) -> float:
        """When the next lease ends, unless its member is heard of before."""
        for member in self._leases.values():
            ends_at = member.seen_at + self._lease_s
            return ends_at if ends_at > self._spared_until else self._spared_until
        return math.inf

    def join(self, event: Join, now: float) -> Member:
        """Enter or come back; ``Refused(SUPERSEDED)`` for a process older than the newest that joined."""
        member = self._members.get(event.node)
        if member is None:
            member = self._members[event.node] = Member(event.node, event.tier, event.incarnation)
        elif event.incarnation < member.incarnation:
            raise superseded(event.node, event.incarnation, member.incarnation)
        before = self._take_out(member)
        member.tier, member.incarnation, member.leaves = event.tier, event.incarnation, _leaves(event.tier, event.leaves)
        member.presumed, member.joined_at = False, now
        self._revive(member, now)
        self._put_back(member, before)
        return member

    def presume(self, recovered: Recovered, now: float) -> None:
        """Expect the members that the journal knows, for one lease. They must join before they are answered.

        Those whose updates came in a region's partials are the region's; how many they are it tells when it joins.
        """
        for update in recovered.accepted:
            header = update.header
            self._presume(header.update_id.node, header.tier, len({leaf.node for leaf in header.leaf_ids}), now)
        for update_id in recovered.merged:
            if update_id in recovered.partials:
                self._presume(update_id.node, Tier.REGION, 1, now)
            elif update_id not in recovered.inside:
                self._presume(update_id.node, Tier.SITE if update_id.node in self._config.sites else Tier.EDGE, 1, now)

    def _presume(self, node: str, tier: Tier, leaves: int, now: float) -> None:
        if node not in self._members:
            member = self._members[node] = Member(node, tier, 0, leaves=leaves, presumed=True)
            before = self._take_out(member)
            self._revive(member, now)
            self._put_back(member, before)

    def hear(self, event: Heartbeat, now: float) -> Member:
        """A heartbeat: extends the lease. Raises what ``process`` does."""
        member = self.process(event.node, event.incarnation)
        self.see(member, now)
        member.base_version = event.base_version
        leaves = _leaves(member.tier, event.leaves)
        if leaves != member.leaves:
            before = self._take_out(member)
            member.leaves = leaves
            self._put_back(member, before)
        return member

    def process(self, node: str, incarnation: int) -> Member:
        """The member whose process this is. ``Refused``: UNKNOWN_NODE (join first) or SUPERSEDED."""
        member = self.known(node)
        if incarnation < member.incarnation:
            raise superseded(node, incarnation, member.incarnation)
        if incarnation > member.incarnation:
            raise Refused(Reason.UNKNOWN_NODE, f"incarnation {incarnation} of {node} has not joined")
        return member

    def known(self, node: str) -> Member:
        """The member of this name; ``Refused(UNKNOWN_NODE)`` if it has not joined or its lease has ended."""
        member = self._members.get(node)
        if member is None or not member.live or member.presumed:
            raise Refused(Reason.UNKNOWN_NODE, f"{node} has not joined, or its lease of {self._config.lease_s:g} s ended")
        return member

    def touch(self, node: str, now: float) -> None:
        """A sign of life other than a heartbeat."""
        member = self._members.get(node)
        if member is not None:
            self.see(member, now)

    def leave(self, node: str, incarnation: int) -> bool:
        """Go for good; False if this process is not the one that is live."""
        member = self._members.get(node)
        if member is None or not member.live or incarnation < member.incarnation:
            return False
        self._end(member)
        return True

    def expire(self, now: float) -> list[Member]:
        """End the leases that ran out by ``now``; returns their members."""
        lost = []
        if now - self.next_lease > self._config.heartbeat_s:
            # Nobody looked for so long: this process was held up, and could not hear the members. They get time to be heard.
            self._spared_until = now + self._config.heartbeat_s
        while self.next_lease <= now:
            member = next(iter(self._leases.values()))
            self._end(member)
            lost.append(member)
        return lost

    def arrive(self, update: Update, window: int, staleness: int) -> None:
        """Count an accepted update for the member that sent it."""
        member = self._members.get(update.update_id.node)
        if member is None:  # forgotten while its last update was made durable: that counts, its member does not
            return
        member.accepted += 1
        member.payload_bytes += update.payload_bytes
        member.staleness = staleness
        before = self._take_out(member)
        member.arrived.update(leaf.node for leaf in update.header.leaf_ids)
        member.last_window = window
        self._put_back(member, before)
        self._touched.append(member)

    def spoil(self, member: Member) -> None:
        """Its update was bad: the open window does not wait for another."""
        if not member.spoiled:
            before = self._take_out(member)
            member.spoiled = True
            self._put_back(member, before)
            self._touched.append(member)

    def stall(self, node: str, change: int) -> None:
        """One more (+1) or one less (-1) of its transfers stands still."""
        member = self._members.get(node)
        if member is not None:
            before = self._take_out(member)
            member.stalled += change
            self._put_back(member, before)

    def open_window(self) -> None:
        """Nobody has arrived in the window that opens now."""
        for member in self._touched:
            before = self._take_out(member)
            member.arrived.clear()
            member.spoiled = False
            self._put_back(member, before)
        self._touched.clear()

    def _revive(self, member: Member, now: float) -> None:
        self._gone.pop(member.node, None)
        member.live = True
        self._leases[member.node] = member
        self.see(member, now)

    def see(self, member: Member, now: float) -> None:
        """A sign of life: its lease begins anew."""
        member.seen_at = now
        if member.live:
            self._leases.move_to_end(member.node)

    def speeds(self) -> Iterator[Speed]:
        """Those that the live members have shown."""
        return (member.speed for member in self._leases.values() if member.speed is not None)

    def knows(self, tier: Tier) -> bool:
        """Whether there is or was a member of a tier."""
        return any(member.tier is tier for member in self._members.values())

    def live(self) -> dict[str, int]:
        """How many members of each tier are live."""
        return {tier.value: n for tier, n in self.live_by_tier.items()}

    def _end(self, member: Member) -> None:
        before = self._take_out(member)
        member.live = False
        del self._leases[member.node]
        self._put_back(member, before)
        self._bury(member)

    def _bury(self, member: Member) -> None:
        """It is gone; so is the memory of another that has been for much longer."""
        self._gone[member.node] = None
        if len(self._gone) > self._remembered:
            oldest, _ = self._gone.popitem(last=False)
            del self._members[oldest]

    def _take_out(self, member: Member) -> tuple[tuple[int, int, int], Tier | None]:
        """What the member counts for now; to be handed to ``_put_back`` after the change."""
        return member.weights(), member.tier if member.live else None

    def _put_back(self, member: Member, before: tuple[tuple[int, int, int], Tier | None]) -> None:
        old, old_tier = before
        new = member.weights()
        self.changed = self.changed or new != old
        self.expected += new[0] - old[0]
        self.arrived += new[1] - old[1]
        self.outstanding += new[2] - old[2]
        if old_tier is not None:
            self.live_by_tier[old_tier] -= 1
        if member.live:
            self.live_by_tier[member.tier] += 1


def _leaves(tier: Tier, claimed: int) -> int:
    """Only a region stands for others: what any other member claims must not keep a quorum away."""
    return claimed if tier is Tier.REGION else 1


def superseded(node: str, incarnation: int, newest: int) -> Refused:
    """The refusal of a process that is not its node's newest."""
    return Refused(Reason.SUPERSEDED, f"incarnation {incarnation} of {node} was replaced by {newest}")
