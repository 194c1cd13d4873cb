"""High-water marks: what was settled long ago, in a few bytes for each process of a node.

A node offers its updates in order, so that nearly all below its largest settled sequence is settled too. Nearly: what went
another way (through a region that is cut off, while its node has moved on to another parent) may come later. So of the last
``KNOWN`` sequences below a mark each is known one by one, and only those before are taken for settled: more than a node may have
open (``MAX_IDS``). Of a node the marks of its newest processes are kept; what older ones sent has been settled.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fleetddp.common.update import UpdateId

INCARNATIONS = 8  # marks kept for one node, those of its newest processes
KNOWN = 512  # sequences up to a mark that are known one by one
_ALL = (1 << KNOWN) - 1


@dataclass(frozen=True, slots=True)
class Mark:
    """Of one process: its largest settled sequence. Bit k of ``settled``: whether ``sequence - k`` is settled."""

    sequence: int
    settled: int = _ALL

    @classmethod
    def at(cls, sequence: int, gaps: Collection[int] = ()) -> Mark:
        """A mark below which all but ``gaps`` is settled."""
        return cls(sequence, _ALL & ~sum(1 << (sequence - gap) for gap in set(gaps) if 0 <= sequence - gap < KNOWN))

    @classmethod
    def of_row(cls, sequence: int, settled: str | None) -> Mark:
        """As a journal keeps it: ``settled`` in hexadecimal; None: all of it."""
        return cls(sequence) if settled is None else cls(sequence, int(settled, 16))

    def covers(self, sequence: int) -> bool:
        """Whether this sequence is settled."""
        behind = self.sequence - sequence
        return behind >= KNOWN or (behind >= 0 and bool(self.settled >> behind & 1))

    def with_(self, sequence: int) -> Mark:
        """This sequence is settled, too."""
        if sequence <= self.sequence:
            return Mark(self.sequence, self.settled | (1 << (self.sequence - sequence) & _ALL))
        return Mark(sequence, (self.settled << (sequence - self.sequence) | 1) & _ALL)

    @property
    def gaps(self) -> tuple[int, ...]:
        """Sequences below, the newest first, that are not settled."""
        return tuple(self.sequence - k for k in range(min(KNOWN, self.sequence + 1)) if not self.settled >> k & 1)


class HighWater:
    """The marks of all nodes."""

    def __init__(self) -> None:
        self._marks: dict[str, dict[int, Mark]] = {}  # node -> incarnation -> mark

    def put(self, node: str, incarnation: int, mark: Mark) -> None:
        """A mark as it was written down."""
        marks = self._marks.setdefault(node, {})
        marks[incarnation] = mark
        if len(marks) > INCARNATIONS:
            del marks[min(marks)]

    def settle(self, update_id: UpdateId) -> None:
        """This update is settled."""
        mark = self._marks.get(update_id.node, {}).get(update_id.incarnation)
        self.put(update_id.node, update_id.incarnation, after(mark, update_id.sequence))

    def covers(self, update_id: UpdateId) -> bool:
        """Whether this update is known to be settled."""
        marks = self._marks.get(update_id.node, {})
        if len(marks) == INCARNATIONS and update_id.incarnation < min(marks):
            return True
        mark = marks.get(update_id.incarnation)
        return mark is not None and mark.covers(update_id.sequence)

    def newest(self, node: str) -> int:
        """The newest incarnation of this node that there is a mark of; -1 for none."""
        return max(self._marks.get(node, ()), default=-1)


def after(mark: Mark | None, sequence: int) -> Mark:
    """The mark of a process when ``sequence`` is settled, too; None: nothing of it was before."""
    return Mark(sequence, 1) if mark is None else mark.with_(sequence)
