"""Rank 0's part of a boundary: it alone listens to the fleet, decides what all ranks of the site do next, and says so.

Nothing here blocks for long: each look at the news and the tallies is followed by a short pause, and ``wait_s`` is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from fleetddp.cloud.courier import Courier
from fleetddp.cloud.rendezvous import Order, Rendezvous, polls
from fleetddp.common.errors import FleetError, LayoutMismatch, Reason, Refused, Unreachable
from fleetddp.common.events import Joined
from fleetddp.common.layout import Layout
from fleetddp.common.transport import Parent
from fleetddp.common.transport.session import Session
from fleetddp.common.update import NO_VERSION, Tier

FAREWELL_S = 60.0  # at most, for the last version, once the run is over: the coordinator may be gone
FIRST = 1  # sequence of an init; deltas follow
REMIND_S = 30.0  # between two lines of the log while nothing happens

_log = logging.getLogger(__name__)


class Lead:
    """The orders of one site. ``pushers`` ranks have a slice to push, ``carriers`` ranks can reach the parent."""

    def __init__(
        self, parent: Parent, session: Session, rendezvous: Rendezvous, courier: Courier, *, pushers: int, carriers: int
    ) -> None:
        self.session = session
        self._parent, self._rendezvous, self._courier = parent, rendezvous, courier
        self._pushers, self._carriers = pushers, carriers
        self._run = ""
        self._base = NO_VERSION
        self._in_flight: int | None = None  # sequence of the update that ranks are pushing
        self._pulling: Order | None = None
        self._refresh = False  # the site's own progress was refused: any version will do, even the one it started from
        self._pulls = 0
        self._finished_at: float | None = None

    def opening(self, layout: Layout, codec: str, tier: Tier, base: int, run: str) -> Iterator[Order]:
        """Found the fleet if it has no weights yet, or else adopt its newest version unless the site holds it.

        ``base`` and ``run``: the version that the site resumes from and the run it is of, or ``NO_VERSION`` and empty.
        """
        try:
            joined = self._await_joined()
            self._run = joined.run
            self._check(joined, layout, codec)
            if run not in ("", joined.run):
                raise Refused(Reason.WRONG_RUN, f"the checkpoint is of run {run!r}, the coordinator's run is {joined.run!r}")
            if NO_VERSION < joined.version < base:
                raise Refused(Reason.FUTURE_BASE, f"the checkpoint is of version {base}, run {run!r} is at {joined.version}")
            self._base = min(base, joined.version)
            if joined.wants_init and tier is Tier.SITE:
                yield Order(do="init", number=FIRST)
                self._in_flight = FIRST
            settled = self._base > NO_VERSION and self._base == self.session.version
            if not settled:
                yield from self._steer(None, "the first version")
        except FleetError as error:
            yield _failure(error)
        else:
            yield self._go()

    def orders(self, *, pushed: int | None, dropped: bool, wait_s: float | None) -> Iterator[Order]:
        """Those of one boundary: at most ``wait_s`` for a version newer than the site's base.

        ``pushed``: sequence of the update that the ranks have begun to push; None: the one before is still on its way, or
        (``dropped``) the site's progress was refused.
        """
        if pushed is not None:
            self._in_flight = pushed
        if dropped:
            self._in_flight, self._refresh = None, True
        try:
            yield from self._steer(wait_s, f"a version after {self._base}")
        except FleetError as error:
            yield _failure(error)
        else:
            yield self._go()

    # ---- one look after another -----------------------------------------------------------------------------------------------

    def _steer(self, wait_s: float | None, awaited: str) -> Iterator[Order]:
        """Orders until a version was adopted, the time is up, or the run is over."""
        remind_at = REMIND_S
        for waited_s in polls():
            self._raise_failure()
            order = self._next()
            if order is not None:
                yield order
                if order.do == "adopt":
                    return
            elif self._is_over() or (wait_s is not None and waited_s >= wait_s):
                return
            elif waited_s >= remind_at:
                _log.info("waiting for %s since %.0f s (newest known: %d)", awaited, waited_s, self.session.version)
                remind_at += REMIND_S

    def _next(self) -> Order | None:
        """What can be done now; None: only wait."""
        if self._in_flight is not None:
            if self._rendezvous.tally(f"answered/{self._in_flight}") < self._pushers:
                return None
            self._refresh = self._refresh or self._rendezvous.tally(f"refused/{self._in_flight}") > 0
            self._rendezvous.drop(f"answered/{self._in_flight}", f"refused/{self._in_flight}")
            self._in_flight = None
        if self._pulling is not None:
            return self._landed(self._pulling)
        newest = self.session.version
        if newest > self._base or (self._refresh and newest > NO_VERSION):
            self._pulls += 1
            self._pulling = Order(do="pull", version=newest, number=self._pulls)
            return self._pulling
        return None

    def _landed(self, pull: Order) -> Order | None:
        """Adopt what was pulled, once all carriers hold their slice of it."""
        done, gone = f"pulled/{pull.number}", f"gone/{pull.number}"
        if self._rendezvous.tally(done) < self._carriers:
            return None
        in_vain = self._rendezvous.tally(gone) > 0
        self._rendezvous.drop(done, gone)
        self._pulling = None
        if in_vain:
            return None
        self._base, self._refresh = pull.version, False
        self.session.base_version = pull.version
        return Order(do="adopt", version=pull.version, codec=self._courier.published)

    def _is_over(self) -> bool:
        """Whether the run has ended and nothing more is to be had of it."""
        if not self.session.finished:
            return False
        if self._finished_at is None:
            self._finished_at = time.monotonic()
        busy = self._in_flight is not None or self._pulling is not None
        return not busy or time.monotonic() - self._finished_at > FAREWELL_S

    def _go(self) -> Order:
        return Order(do="go", run=self._run, finished=self.session.finished)

    def _raise_failure(self) -> None:
        if self.session.failure is not None:
            raise self.session.failure
        failure = self._rendezvous.failure()
        if failure is not None:
            reason, message = failure
            raise Refused(Reason(reason), message) if reason else FleetError(message)

    # ---- entering -------------------------------------------------------------------------------------------------------------

    def _await_joined(self) -> Joined:
        waited = 0.0
        while (joined := self.session.joined(REMIND_S)) is None:
            waited += REMIND_S
            _log.warning("no coordinator has answered for %.0f s; the site goes on waiting", waited)
        return joined

    def _check(self, joined: Joined, layout: Layout, codec: str) -> None:
        """Raise what would make every update of this site be refused."""
        if joined.layout and joined.layout != layout.fingerprint:
            difference = self._fleets_layout().first_difference(layout)
            raise LayoutMismatch(f"this model is not that of run {joined.run!r}: {difference}")
        if codec.split(":")[0] not in {known.split(":")[0] for known in joined.codecs}:
            raise Refused(Reason.UNKNOWN_CODEC, f"run {joined.run!r} takes {', '.join(joined.codecs)}; this site sends {codec}")

    def _fleets_layout(self) -> Layout:
        for _ in polls(1.0):
            try:
                return self._parent.layout()
            except Unreachable as error:
                _log.info("trying again: %s", error)
        raise AssertionError("polls never ends")


def _failure(error: FleetError) -> Order:
    reason = error.reason.value if isinstance(error, Refused) else ""
    return Order(do="fail", reason=reason, message=error.message if isinstance(error, Refused) else str(error))
