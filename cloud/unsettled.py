"""A site's updates whose fate is not known yet, where it has several parents: what one has accepted may have to go to another.

Rank 0 keeps the account, and its session asks each parent about them. What a parent does not know that another had accepted is
*lost*, as far as anybody can tell, and all ranks push it again; should both have it, the tree counts it once, by its id.
"""

from __future__ import annotations

import threading

from fleetddp.common.update import Receipt, State, UpdateId

MAX_OPEN = 8  # updates that a site holds until they are settled; beyond it no other is made


class Unsettled:
    """Of one incarnation of a site. All methods may be called from any thread."""

    def __init__(self, node: str, incarnation: int) -> None:
        self._node, self._incarnation = node, incarnation
        self._lock = threading.Lock()
        self._accepted: dict[int, bool] = {}  # by sequence: whether all its streams are answered, and none waits to be sent again
        self._lost: list[int] = []

    @property
    def room(self) -> bool:
        """Whether another update may be made."""
        return len(self._accepted) < MAX_OPEN

    def sent(self, sequence: int) -> None:
        """It is on its way, for the first time or again."""
        with self._lock:
            self._accepted[sequence] = False

    def accepted(self, sequence: int) -> None:
        """A parent has all of it."""
        with self._lock:
            if sequence in self._accepted:
                self._accepted[sequence] = True

    def over(self, sequence: int) -> None:
        """It was refused, or never made."""
        with self._lock:
            self._accepted.pop(sequence, None)

    def open(self) -> tuple[UpdateId, ...]:
        """What to ask a parent about."""
        return tuple(UpdateId(self._node, self._incarnation, sequence) for sequence in self.sequences())

    def sequences(self) -> tuple[int, ...]:
        """Of those that must be kept."""
        with self._lock:
            return tuple(self._accepted)

    def take(self, receipt: Receipt) -> None:
        """Learn what a parent says of one."""
        sequence = receipt.update_id.sequence
        with self._lock:
            if receipt.state.final:
                self._accepted.pop(sequence, None)
            elif receipt.state is State.UNKNOWN and self._accepted.get(sequence):
                self._accepted[sequence] = False  # until it is sent again
                self._lost.append(sequence)

    def next_lost(self) -> int | None:
        """One that is to be sent again, told once."""
        with self._lock:
            while self._lost:
                sequence = self._lost.pop(0)
                if sequence in self._accepted:
                    return sequence
        return None
