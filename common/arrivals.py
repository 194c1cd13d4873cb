"""Updates that are arriving: which streams were offered, which are staged, and which make no progress."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from fleetddp.common.errors import Reason, Refused
from fleetddp.common.payload import Coverage, Geometry
from fleetddp.common.update import Interval, Slice, Update, UpdateHeader, UpdateId

DROPPED_AFTER = 3  # times stall_s without a byte


@dataclass(slots=True, eq=False)
class Arriving:
    """An update between its first Offer and its acceptance."""

    header: UpdateHeader
    geometry: Geometry
    progressed_at: float
    offered: dict[tuple[Interval, ...], Slice] = field(default_factory=dict)
    squared_norms: dict[tuple[Interval, ...], float] = field(default_factory=dict)  # of the slices staged
    coverage: Coverage = field(default_factory=Coverage)  # of the slices offered
    stalled: bool = False
    update: Update | None = None  # complete; being made durable
    gone: bool = False  # accepted or dropped

    def offer(self, part: Slice) -> None:
        """Another stream, or the same again. ``Refused``: ID_REUSED (other bytes), WRONG_INTERVALS (overlaps another stream)."""
        known = self.offered.get(part.intervals)
        if known is None:
            self.coverage.add(part.intervals)
            self.offered[part.intervals] = part
        elif known != part:
            raise Refused(
                Reason.ID_REUSED,
                f"{self.header.update_id}: elements {part.intervals[0]} were offered with {known.samples:g} samples and digest "
                f"{known.digest:#010x}, now {part.samples:g} and {part.digest:#010x}",
            )

    def stage(self, part: Slice, squared_norm: float) -> bool:
        """A stream arrived whole; True once the update is complete."""
        if self.offered.get(part.intervals) == part:
            self.squared_norms[part.intervals] = squared_norm
        return len(self.squared_norms) == len(self.offered) and self.coverage.complete(self.geometry.required())

    def complete(self) -> Update:
        """The update that its streams add up to, in an order that does not depend on theirs."""
        slices = tuple(self.offered[intervals] for intervals in sorted(self.offered))
        return Update(
            header=self.header,
            samples=math.fsum(part.samples for part in slices),
            squared_norm=math.fsum(self.squared_norms[part.intervals] for part in slices),
            payload_bytes=self.geometry.payload_bytes,
            slices=slices,
        )


class Arrivals:
    """All updates that are arriving, by node, and the time each is due to be looked at for progress."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._by_node: dict[str, dict[UpdateId, Arriving]] = {}
        self._due: list[tuple[float, int, Arriving]] = []  # one entry an arriving update
        self._order = count()  # heap entries of one time compare by it

    def __iter__(self) -> Iterator[Arriving]:
        return (arriving for node in self._by_node.values() for arriving in node.values())

    def get(self, update_id: UpdateId) -> Arriving | None:
        """The update of this id, if it is arriving."""
        node = self._by_node.get(update_id.node)
        return None if node is None else node.get(update_id)

    def of(self, node: str) -> int:
        """How many updates of this node are arriving."""
        return len(self._by_node.get(node, ()))

    def add(self, arriving: Arriving) -> None:
        """Begin."""
        update_id = arriving.header.update_id
        self._by_node.setdefault(update_id.node, {})[update_id] = arriving
        heapq.heappush(self._due, (arriving.progressed_at + self._stall_s, next(self._order), arriving))

    def remove(self, update_id: UpdateId) -> Arriving | None:
        """It is accepted or dropped."""
        node = self._by_node.get(update_id.node)
        arriving = None if node is None else node.pop(update_id, None)
        if not node:
            self._by_node.pop(update_id.node, None)
        if arriving is not None:
            arriving.gone = True
        return arriving

    def older(self, node: str, incarnation: int) -> list[Arriving]:
        """Incomplete updates of earlier processes of this node."""
        mine = self._by_node.get(node, {})
        return [a for a in mine.values() if a.update is None and a.header.update_id.incarnation < incarnation]

    @property
    def next_due(self) -> float:
        """A time before which nothing can be found to have stalled."""
        while self._due:
            due, _, arriving = self._due[0]
            if arriving.update is None and not arriving.gone:  # else it cannot stall any more: it is whole, or gone
                return due
            heapq.heappop(self._due)
        return math.inf

    def stalled(self, now: float) -> Iterator[tuple[Arriving, bool]]:
        """Those without a byte for ``stall_s`` (False: no longer on its way) or three times that (True: to be dropped)."""
        while self._due and self._due[0][0] <= now:
            _, _, arriving = heapq.heappop(self._due)
            if arriving.update is not None or arriving.gone:
                continue
            stalls_at = arriving.progressed_at + self._stall_s
            drops_at = arriving.progressed_at + DROPPED_AFTER * self._stall_s
            if now < drops_at:
                heapq.heappush(self._due, (stalls_at if now < stalls_at else drops_at, next(self._order), arriving))
            if now >= drops_at or (now >= stalls_at and not arriving.stalled):
                yield arriving, now >= drops_at
