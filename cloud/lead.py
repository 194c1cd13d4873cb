"""Rank 0's part of a boundary: it alone listens to the fleet, decides what all ranks of the site do next, and says so.

Nothing here blocks for long: each look at the news and the tallies is followed by a short pause, and ``wait_s`` is kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from fleetddp.cloud.courier import Courier
from fleetddp.cloud.rendezvous import SIGN_S, Order, Rendezvous, polls
from fleetddp.cloud.unsettled import Unsettled
from fleetddp.common.errors import FleetError, GaveUp, LayoutMismatch, Reason, Refused, Unreachable
from fleetddp.common.events import Joined
from fleetddp.common.layout import Layout
from fleetddp.common.transport import Parent, Roaming
from fleetddp.common.transport.session import Session
from fleetddp.common.update import NO_VERSION, Tier

FAREWELL_S = 60.0  # at most, for the last version, once the run is over: the coordinator may be gone
LOST_S = 1800.0  # a rank without a sign of life for so long is lost: no launcher has noticed that its machine is gone
REMIND_S = 30.0  # between two lines of the log while nothing happens

_log = logging.getLogger(__name__)


class Lead:
    """The orders of one site of ``ranks``. ``pushers`` of them have a slice of all to push, ``carriers`` can reach the parent.

    ``bell`` rings when the session or this rank's courier has something new, and cuts a pause short. ``carry``: the site trains
    on while an update travels, and keeps what it learns meanwhile when it adopts a version. ``turns``: where an update is one
    fragment, how many ranks have a slice of each. ``unsettled``: the account of a site whose parent may be another one tomorrow.
    """

    def __init__(
        self,
        parent: Parent,
        session: Session,
        rendezvous: Rendezvous,
        courier: Courier,
        *,
        ranks: int,
        pushers: int,
        carriers: int,
        bell: threading.Event | None = None,
        carry: bool = False,
        turns: Sequence[int] = (),
        unsettled: Unsettled | None = None,
    ) -> None:
        self.session = session
        self._parent, self._rendezvous, self._courier = parent, rendezvous, courier
        self._ranks, self._pushers, self._carriers, self._carry = ranks, pushers, carriers, carry
        self._bell = bell or threading.Event()
        self._turns = tuple(turns) or (pushers,)
        self._unsettled = unsettled
        self._roaming = parent if isinstance(parent, Roaming) else None
        self._address = self._roaming.address if self._roaming else ""  # of the parent that all ranks call
        self._streams: dict[int, int] = {}  # of what is not settled, by sequence
        self._again: set[int] = set()  # sequences that are being sent once more
        self._turn: int | None = None  # the fragment that is next
        self._answers_due = pushers  # to the last update
        self._run = ""
        self._base = NO_VERSION
        self._sequence = 0  # of the last update
        self._sent_at = NO_VERSION  # the base of the last update: as old as the codec's residual
        self._max_staleness = 0
        self._pulls = 0
        self._in_flight = False  # the last update was not answered yet
        self._held = False  # the weights still hold what the last update sent: no version was adopted since
        self._refresh = False  # the site's progress is lost: any version will do, even the one it started from
        self._pulling: Order | None = None
        self._finished_at: float | None = None

    def opening(
        self, layout: Layout, codec: str, tier: Tier, base: int, run: str, awaiting: bool = False, turn: int | None = None
    ) -> Iterator[Order]:
        """Found the fleet if it has no weights yet, or else adopt its newest version unless the site holds it.

        ``base`` and ``run``: the version that the site resumes from and the run it is of, or ``NO_VERSION`` and empty;
        ``awaiting``: an update based on it was on its way then; ``turn``: the fragment that was next.
        """
        try:
            joined = self._await_joined(layout)
            self._run = joined.run
            if codec.split(":")[0] not in {known.split(":")[0] for known in joined.codecs}:
                raise Refused(
                    Reason.UNKNOWN_CODEC, f"run {joined.run!r} takes {', '.join(joined.codecs)}, this site sends {codec}"
                )
            if len(self._turns) not in (1, joined.fragments):
                cuts = f"site.fragments is {len(self._turns)}, run {joined.run!r} has {joined.fragments}"
                raise Refused(Reason.WRONG_INTERVALS, f"{cuts}; allowed are that, or 1")
            if run not in ("", joined.run):
                raise Refused(Reason.WRONG_RUN, f"the checkpoint is of run {run!r}, the coordinator's run is {joined.run!r}")
            if NO_VERSION < joined.version < base:
                raise Refused(Reason.FUTURE_BASE, f"the checkpoint is of version {base}, run {run!r} is at {joined.version}")
            self._base = self._sent_at = min(base, joined.version)
            self._held = awaiting
            self._max_staleness = joined.max_staleness
            while (order := self._elsewhere()) is not None:
                yield order
            if joined.wants_init and tier is Tier.SITE:
                yield self._send("init")
            self._turn = turn
            if self._base == NO_VERSION or self._base < self.session.version:
                yield from self._steer(None, may_push=False)
        except FleetError as error:
            yield _failure(error)
        else:
            yield self._go()

    def orders(self, wait_s: float | None, *, overlap: bool = False) -> Iterator[Order]:
        """Those of one boundary: at most ``wait_s`` for a version newer than the site's base; if they ``overlap``, than that of
        the last update.
        """
        try:
            yield from self._send_on(wait_s) if overlap else self._steer(wait_s, may_push=True)
        except FleetError as error:
            yield _failure(error)
        else:
            yield self._go()

    def glance(self) -> Iterator[Order]:
        """Those of a candidate step: what can be done without waiting."""
        try:
            self._raise_failure()
            self._look_for_answers()
            while (order := self._elsewhere()) is not None:
                yield order
            if self.session.finished:
                yield from self._steer(None, may_push=False)
            elif (order := self._next(at_once=False)) is not None:
                yield order
        except FleetError as error:
            yield _failure(error)
        else:
            yield self._go()

    def not_sent(self) -> None:
        """The update that was ordered last could not be made: a value was not finite."""
        self._in_flight, self._refresh = False, True
        if self._unsettled is not None:
            self._unsettled.over(self._sequence)

    # ---- one look after another -----------------------------------------------------------------------------------------------

    def _steer(self, wait_s: float | None, *, may_push: bool) -> Iterator[Order]:
        """Orders until a version was adopted, the time is up, or the run is over."""
        remind_at, roll_at = REMIND_S, 0.0
        signs: dict[int, tuple[int, float]] = {}
        for waited_s in polls(bell=self._bell):
            self._raise_failure()
            if waited_s >= roll_at:
                self._call_the_roll(signs, waited_s)
                roll_at = waited_s + SIGN_S
            self._look_for_answers()
            if (order := self._elsewhere()) is not None:
                yield order
                continue
            if may_push and self._may_send:
                may_push = False
                yield self._send("push")
                continue
            time_is_up = self._is_over() or (wait_s is not None and waited_s >= wait_s)
            # What was learnt since the last update must be in one before other weights take its place.
            if not may_push or self._refresh or self.session.finished:
                order = self._next(at_once=time_is_up)
                if order is not None:
                    yield order
                    if order.do == "adopt":
                        return
                    continue
            if time_is_up:
                return
            if waited_s >= remind_at:
                newest = self.session.version
                _log.info("waiting for a version after %d since %.0f s (newest known: %d)", self._base, waited_s, newest)
                remind_at += REMIND_S

    def _send_on(self, wait_s: float | None) -> Iterator[Order]:
        """Orders of a boundary that overlaps with training: adopt what is awaited, then send what was learnt, and no more."""
        if self._held or self._refresh or self.session.finished:
            for order in self._steer(wait_s, may_push=False):
                yield order
                if order.dropped:  # there is nothing to send
                    return
        if self._may_send:
            yield self._send("push")

    @property
    def _may_send(self) -> bool:
        room = self._unsettled is None or self._unsettled.room
        return room and not (self._in_flight or self._refresh or self.session.finished)

    def _elsewhere(self) -> Order | None:
        """What is to be done where the parent is another one now, or has lost an update."""
        if self._unsettled is None:
            return None
        if self._roaming is not None and self._roaming.address != self._address:
            self._address = self._roaming.address
            return Order(do="move", address=self._address)
        sequence = self._unsettled.next_lost()
        if sequence is None:
            return None
        self._again.add(sequence)
        return Order(do="again", number=sequence)

    def _send(self, do: Literal["init", "push"]) -> Order:
        self._sequence += 1
        self._sent_at = self._base
        self._in_flight = self._held = True
        if self._unsettled is not None:
            self._unsettled.sent(self._sequence)
        if do == "init":
            self._answers_due = self._streams[self._sequence] = self._pushers
            return Order(do=do, number=self._sequence)
        # Members at one version begin with the same fragment, so that windows hold what all have learnt of one.
        fragment = (max(self._base, 0) if self._turn is None else self._turn) % len(self._turns)
        self._turn = fragment + 1
        self._answers_due = self._streams[self._sequence] = self._turns[fragment]
        return Order(do=do, number=self._sequence, fragment=fragment)

    def _look_for_answers(self) -> None:
        for sequence in tuple(self._again):
            if self._answered(sequence, self._streams[sequence]) is not None:
                self._again.remove(sequence)
        if self._in_flight and (refused := self._answered(self._sequence, self._answers_due)) is not None:
            self._in_flight = False
            self._refresh = self._refresh or (self._held and refused)

    def _answered(self, sequence: int, streams: int) -> bool | None:
        """Whether an update was refused, once all its streams are answered; None before."""
        answered, refusals = f"answered/{sequence}", f"refused/{sequence}"
        if self._rendezvous.tally(answered) < streams:
            return None
        refused = self._rendezvous.tally(refusals) > 0
        self._rendezvous.drop(answered, refusals)
        if self._unsettled is not None:
            (self._unsettled.over if refused else self._unsettled.accepted)(sequence)
        return refused

    def _next(self, *, at_once: bool) -> Order | None:
        """Fetch or adopt a version, if that can be done now. ``at_once``: do not wait for the fate of the last update first."""
        if self._pulling is not None:
            return self._landed(self._pulling)
        newest = self.session.version
        wanted = newest > self._base or (self._refresh and newest > NO_VERSION)
        if not wanted or (self._in_flight and not at_once):
            return None
        self._pulls += 1
        self._pulling = Order(do="pull", version=newest, number=self._pulls, whole=self._whole())
        return self._pulling

    def _landed(self, pull: Order) -> Order | None:
        """Adopt what was pulled, once all carriers hold their slice of it."""
        done, gone = f"pulled/{pull.number}", f"gone/{pull.number}"
        if self._rendezvous.tally(done) < self._carriers:
            return None
        in_vain = self._rendezvous.tally(gone) > 0
        self._rendezvous.drop(done, gone)
        self._pulling = None
        if in_vain or (self._whole() and not pull.whole):
            return None
        dropped, forget = self._refresh, pull.version - self._sent_at > self._max_staleness * len(self._turns)
        carry = self._carry and not dropped and self._base != NO_VERSION and not self.session.finished
        self._base, self._refresh, self._held = pull.version, False, False
        self.session.base_version = pull.version
        codec = self._courier.published
        fragments = self._courier.brought if len(self._turns) > 1 else (0,)
        order = Order(do="adopt", version=pull.version, codec=codec, dropped=dropped, carry=carry, forget=forget)
        return replace(order, fragments=fragments)

    def _whole(self) -> bool:
        """Whether fragments that no version has changed are to be set back, too."""
        return len(self._turns) > 1 and (self._refresh or bool(self.session.finished))

    def _is_over(self) -> bool:
        """Whether the run has ended and nothing more is to be had of it."""
        if not self.session.finished:
            return False
        if self._finished_at is None:
            self._finished_at = time.monotonic()
        all_done = not self._in_flight and self._pulling is None and self.session.version <= self._base
        return all_done or time.monotonic() - self._finished_at > FAREWELL_S

    def _go(self) -> Order:
        is_open = () if self._unsettled is None else self._unsettled.sequences()
        self._streams = {sequence: n for sequence, n in self._streams.items() if sequence in {*is_open, *self._again}}
        return Order(do="go", run=self._run, finished=self.session.finished, open=is_open)

    def _raise_failure(self) -> None:
        if self.session.failure is not None:
            raise self.session.failure
        failure = self._rendezvous.failure()
        if failure is not None:
            reason, message = failure
            raise Refused(Reason(reason), message) if reason else FleetError(message)

    def _call_the_roll(self, signs: dict[int, tuple[int, float]], waited_s: float) -> None:
        """Raise if a rank is lost. ``signs``: how many each has given, and when that changed last."""
        for rank in range(1, self._ranks):
            count, since = signs.get(rank, (-1, 0.0))
            seen = self._rendezvous.signs(rank)
            if seen != count:
                signs[rank] = seen, waited_s
            elif waited_s - since > LOST_S:
                raise FleetError(f"rank {rank} of the site has given no sign of life for {LOST_S:g} s; its machine may be gone")

    # ---- entering -------------------------------------------------------------------------------------------------------------

    def _await_joined(self, layout: Layout) -> Joined:
        waited_s = 0.0
        try:
            while (joined := self.session.joined(REMIND_S)) is None:
                waited_s += REMIND_S
                _log.warning("no coordinator has answered for %.0f s; the site goes on waiting", waited_s)
        except Refused as refused:
            if refused.reason is Reason.WRONG_LAYOUT:
                raise self._mismatch(layout, refused.message) from refused
            raise
        return joined

    def _mismatch(self, layout: Layout, why: str) -> LayoutMismatch:
        """What is wrong with this model, by the fleet's layout."""
        for _ in polls(1.0):
            try:
                difference = self._parent.layout().first_difference(layout)
                break
            except Unreachable as error:
                _log.info("trying again: %s", error)
        return LayoutMismatch(f"this model is not the fleet's model: {difference} ({why})")


def _failure(error: FleetError) -> Order:
    reason = error.reason.value if isinstance(error, Refused) else ""
    message = error.message if isinstance(error, Refused) else str(error)
    return Order(do="fail", reason=reason, message=message, gave_up=isinstance(error, GaveUp))
