"""What may be watched of a simulation: all that the root is told and does, and what its members learn.

The timeline and the checkers of the invariants are observers. An observer looks on: it changes nothing and draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetddp.common.events import Effect, Event
    from fleetddp.common.recovered import Recovered
    from fleetddp.common.update import Receipt


class Observer:
    """Does nothing; observers override what they want to see. Times are in virtual seconds."""

    def handled(self, event: Event | None, effects: Sequence[Effect], now: float) -> None:
        """The root's aggregator handled an event (None: its start) and wants these effects, none of which is carried out yet."""

    def recovered(self, recovered: Recovered, now: float) -> None:
        """The root starts from this; its ``handled`` of None follows."""

    def told(self, node: str, receipt: Receipt, now: float) -> None:
        """A receipt has reached the member that it is for."""

    def noted(self, node: str, what: str, now: float) -> None:
        """Something happened to a node: ``started``, ``stopped``, ``lost work``, ``trained``, ``adopted``, ``failed``, ``left``.
        The root's name is ``ROOT``; of it, ``failed`` says that its driver logged a failure."""


ROOT = "root"


class Observers(Observer):
    """Several as one, told in order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers
        self._lookers = tuple(o.handled for o in observers if type(o).handled is not Observer.handled)  # at every event

    def handled(self, event: Event | None, effects: Sequence[Effect], now: float) -> None:
        """See ``Observer``."""
        for handled in self._lookers:
            handled(event, effects, now)

    def recovered(self, recovered: Recovered, now: float) -> None:
        """See ``Observer``."""
        for observer in self._observers:
            observer.recovered(recovered, now)

    def told(self, node: str, receipt: Receipt, now: float) -> None:
        """See ``Observer``."""
        for observer in self._observers:
            observer.told(node, receipt, now)

    def noted(self, node: str, what: str, now: float) -> None:
        """See ``Observer``."""
        for observer in self._observers:
            observer.noted(node, what, now)
