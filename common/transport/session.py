"""A member's standing with its parent: joined, alive, up to date. What a site's rank 0, an edge node and a region share.

Two threads: one joins and then sends heartbeats, the other follows the parent's news. When either finds the parent gone it tries
again with short, jittered waits; when the parent has forgotten the member (it was restarted, or the lease ran out) the
session joins again. Only a refusal that no retry can mend, or the end of the run, ends it.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fleetddp.common.errors import FleetError, GaveUp, Reason, Refused, Unreachable
from fleetddp.common.events import Heard, Heartbeat, Join, Joined, News
from fleetddp.common.transport import MEMBER_REASONS, Parent
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.update import NO_VERSION, Receipt, UpdateId

_log = logging.getLogger(__name__)


class Session:
    """Keeps ``join.node`` a member of the fleet from ``start`` to ``stop``. All methods may be called from any thread.

    ``open_updates`` names the updates whose fate is not known yet; every join and heartbeat asks about them. ``on_receipt`` gets
    the answers, and those that come as news, one at a time, from the session's threads; it may get the same one twice.
    ``on_word`` gets every answer and news as a whole, after its receipts. What any of them raises ends the session. ``bell``
    rings whenever there may be something new to ask the session. ``give_up_s``: when no parent was heard of for so long, it ends
    with ``GaveUp``; None: never. The parent stays the caller's: close it after ``stop``, which
    also ends the news stream.
    """

    def __init__(
        self,
        parent: Parent,
        join: Join,
        *,
        open_updates: Callable[[], Sequence[UpdateId]] = tuple,
        on_receipt: Callable[[Receipt], None] = lambda receipt: None,
        on_word: Callable[[Joined | Heard | News], None] = lambda word: None,
        bell: threading.Event | None = None,
        rng: random.Random | None = None,
        retry_cap_s: float = 1.0,
        give_up_s: float | None = None,
    ) -> None:
        self.base_version = NO_VERSION  # what the member trains from; heartbeats tell it
        self.leaves = join.leaves  # of a region: how many leaf members stand behind it; heartbeats tell it
        self._parent, self._join = parent, join
        self._open_updates, self._on_receipt, self._on_word = open_updates, on_receipt, on_word
        self._rng, self._retry_cap_s, self._give_up_s = rng or random.Random(), retry_cap_s, give_up_s
        self._bell = bell or threading.Event()
        self._changed = threading.Condition()  # guards all below
        self._first: Joined | None = None
        self._member = False  # as far as we know
        self._version = NO_VERSION
        self._heartbeat_s = 0.0
        self._heard_at = time.monotonic()
        self._finished = ""
        self._closes_at = 0.0
        self._steps = 0
        self._failure: Exception | None = None
        self._stopped = False
        self._due = False  # a heartbeat is wanted at once
        self._metrics: dict[int, Mapping[str, float]] = {}  # to report, by the version they are of
        self._delivery = threading.Lock()  # one receipt at a time
        self._leaving = threading.Lock()  # taken by ``stop``

    # ---- what the member asks ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to join, in the background."""
        for work in (self._stay, self._follow):
            threading.Thread(target=self._guarded, args=(work,), name=f"fleetddp{work.__name__}", daemon=True).start()

    def joined(self, timeout_s: float | None = None) -> Joined | None:
        """Wait for the answer to the first join; None after ``stop`` or the timeout. Raises what ended the session."""
        with self._changed:
            self._changed.wait_for(lambda: self._first is not None or self._is_over(), timeout_s)
            self._raise_failure()
            return self._first

    def wait_version(self, after: int, timeout_s: float | None = None) -> int | None:
        """Wait for a version newer than ``after``; None when there is none by the timeout, the end of the run or ``stop``.

        Raises what ended the session.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._version > after or self._is_over(), timeout_s)
            self._raise_failure()
            return self._version if self._version > after else None

    @property
    def version(self) -> int:
        """The newest version that the parent told of."""
        return self._version

    @property
    def silent_s(self) -> float:
        """Seconds since the parent last answered or sent news; since the session was made, if it never did."""
        return time.monotonic() - self._heard_at

    @property
    def closes_at(self) -> float:
        """When the parent's window is expected to close, in seconds since the epoch; 0: unknown."""
        return self._closes_at

    @property
    def steps(self) -> int:
        """Local steps that the parent wants in the next unit of work; 0: it leaves that to the member."""
        return self._steps

    @property
    def finished(self) -> str:
        """Why the run is over; empty while it goes on."""
        return self._finished

    @property
    def failure(self) -> Exception | None:
        """What ended the session: a refusal for good, or a fault of ours; None while it lives."""
        return self._failure

    def hurry(self) -> None:
        """Send the next heartbeat at once."""
        with self._changed:
            self._hurry()

    def report(self, metrics: Mapping[str, float], version: int = NO_VERSION) -> None:
        """Tell the parent of metrics evaluated on ``version`` at once; of metrics of training (no version), by and by."""
        with self._changed:
            self._metrics[version] = dict(metrics)
            if version != NO_VERSION:
                self._hurry()

    def stop(self, *, leave: bool) -> None:
        """End the session without waiting for its threads; ``leave`` tells the parent that the member will not come back.

        Whoever calls it again meanwhile waits too: the parent may be closed when it returns.
        """
        with self._leaving:
            self._stop(leave)

    def _stop(self, leave: bool) -> None:
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            leave = leave and self._member
            self._changed.notify_all()
        if leave:
            try:
                self._parent.leave(self._join.node, self._join.incarnation)
            except FleetError as error:
                _log.info("%s could not take leave, its lease will run out: %s", self._join.node, error)

    # ---- the thread that joins and sends heartbeats --------------------------------------------------------------------------

    def _stay(self) -> None:
        backoff = self._backoff()
        lost = ""
        while not self._is_over():
            try:
                pause_s = self._beat() if self._member else self._enter()
            except (Unreachable, Refused) as error:
                if isinstance(error, Refused) and not self._bearable(error):
                    raise
                if isinstance(error, Unreachable) and self._give_up_s is not None and self.silent_s > self._give_up_s:
                    silent = (
                        f"{self._join.node}: no parent has answered for {self.silent_s:.0f} s (give_up_s: {self._give_up_s:g})"
                    )
                    raise GaveUp(f"{silent}; perhaps the run is over: {error}") from error
                if str(error) != lost:
                    _log.warning("%s: %s", self._join.node, error)
                lost = str(error)
                if isinstance(error, Refused) and error.reason is Reason.UNKNOWN_NODE:
                    backoff.reset()  # it is back, and only waits for us to join
                self._sleep(backoff.delay(), or_due=False)
            else:
                if lost:
                    _log.info("%s: back with its parent at version %d", self._join.node, self._version)
                lost = ""
                backoff.reset()
                self._sleep(pause_s, or_due=True)

    def _enter(self) -> float:
        """Join; returns the time to the next heartbeat."""
        joined = self._parent.join(replace(self._join, open=tuple(self._open_updates()), leaves=self.leaves))
        self._join = replace(self._join, run=joined.run)
        self._deliver(joined.receipts)
        self._on_word(joined)
        with self._changed:
            self._member = True
            self._heard_at = time.monotonic()
            self._first = self._first or joined
            self._version = joined.version  # even an older one: a parent restored from a backup
            self._heartbeat_s, self._steps = joined.heartbeat_s, joined.steps
            self._finished = self._finished or joined.finished
            self._tell_all()
        return self._heartbeat_s

    def _beat(self) -> float:
        """Send one heartbeat; returns the time to the next."""
        with self._changed:
            self._due = False
            version, metrics = next(iter(self._metrics.items()), (NO_VERSION, {}))
        heartbeat = Heartbeat(
            node=self._join.node,
            incarnation=self._join.incarnation,
            base_version=self.base_version,
            open=tuple(self._open_updates()),
            metrics=metrics,
            metrics_version=version,
            leaves=self.leaves,
        )
        try:
            heard = self._parent.heartbeat(heartbeat)
        except Refused as error:
            if not error.retry:  # perhaps for its metrics: the next goes without them
                self._reported(version, metrics)
            raise
        self._reported(version, metrics)
        self._steps = heard.steps
        self._learn(heard)
        return self._heartbeat_s * self._rng.uniform(0.8, 1.0)

    def _reported(self, version: int, metrics: Mapping[str, float]) -> None:
        with self._changed:
            if self._metrics.get(version) is metrics:  # not reported anew meanwhile
                del self._metrics[version]
            self._due = self._due or bool(self._metrics)

    def _bearable(self, error: Refused) -> bool:
        """Whether to go on after a refusal; may forget that we are a member, so that the session joins again."""
        with self._changed:
            entering = not self._member
            if error.reason is Reason.UNKNOWN_NODE:
                self._member = False
            if error.reason is Reason.FINISHED:
                self._finished = self._finished or error.message
                self._tell_all()
        if error.retry or error.reason is Reason.FINISHED:
            return True
        return not entering and error.reason not in MEMBER_REASONS

    # ---- the thread that follows the news ------------------------------------------------------------------------------------

    def _follow(self) -> None:
        backoff = self._backoff()
        while not self._is_over():
            with self._changed:
                self._changed.wait_for(lambda: self._member or self._is_over())
            if self._is_over():
                return
            try:
                for news in self._parent.watch(self._join.node, self._join.incarnation, self._version):
                    self._learn(news)
                    backoff.reset()
                    if self._is_over():
                        return
            except (Unreachable, Refused) as error:
                _log.debug("%s: news stream: %s", self._join.node, error)
            with self._changed:
                self._hurry()  # the heartbeat finds out what is wrong
            self._sleep(backoff.delay(), or_due=False)

    # ---- common to both ------------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._stopped or bool(self._finished) or self._failure is not None

    def _guarded(self, work: Callable[[], None]) -> None:
        """A thread's whole life: what it cannot bear ends the session and is raised to whoever waits."""
        try:
            work()
        except Exception as error:
            if not self._stopped:
                _log.error("%s: the session has ended: %s", self._join.node, error, exc_info=not isinstance(error, FleetError))
            with self._changed:
                self._failure = self._failure or error
                self._tell_all()

    def _learn(self, word: Heard | News) -> None:
        self._deliver(word.receipts)  # first: who is woken by a new version knows by then what is in it
        self._on_word(word)
        with self._changed:
            self._heard_at = time.monotonic()
            self._version = max(self._version, word.version)
            self._finished = self._finished or word.finished
            self._closes_at = word.closes_at or self._closes_at
            self._tell_all()

    def _deliver(self, receipts: Sequence[Receipt]) -> None:
        with self._delivery:
            for receipt in receipts:
                if self._stopped:
                    return
                self._on_receipt(receipt)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _tell_all(self) -> None:
        """Wake whoever waits; holds ``_changed``."""
        self._changed.notify_all()
        self._bell.set()

    def _hurry(self) -> None:
        """Ask for a heartbeat now; holds ``_changed``."""
        self._due = True
        self._changed.notify_all()

    def _sleep(self, seconds: float, *, or_due: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over() or (or_due and self._due), seconds)

    def _backoff(self) -> Backoff:
        return Backoff(self._rng, cap_s=self._retry_cap_s)
