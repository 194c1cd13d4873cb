"""Runs one aggregator, whatever carries its members' messages: feeds it events and carries out its effects.

Single-threaded: every method is called on one thread (the server's event loop) or under one lock (in memory). What touches the
disk is handed to a ``Host`` and comes back as an event. Nothing that goes wrong with one event or effect ends the process: it is
logged, counted, and answered if somebody waits; a merge that the disk refuses is tried again until the disk is mended.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, Union

from fleetddp.common.aggregator import Aggregator
from fleetddp.common.clock import Clock
from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import FleetError, Reason, Refused, StorageError
from fleetddp.common.events import (
    Announce,
    Discard,
    Effect,
    Ended,
    Event,
    Found,
    Heard,
    Joined,
    Left,
    Merge,
    News,
    Offer,
    Opened,
    Persist,
    Persisted,
    PersistFailed,
    Proceed,
    Progressed,
    Published,
    Reply,
    Say,
    Settle,
    Tick,
    Wake,
)
from fleetddp.common.host import Host, Lane
from fleetddp.common.item_pool import ItemPool
from fleetddp.common.journal import Journal
from fleetddp.common.layout import Layout
from fleetddp.common.news import Watcher
from fleetddp.common.open_items import ItemStore
from fleetddp.common.overview import MAX_STATUS_MEMBERS
from fleetddp.common.publish import Publisher
from fleetddp.common.shelf import Shelf
from fleetddp.common.staging import Staging, Stream
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport.limits import MESSAGE_BYTES
from fleetddp.common.update import Receipt, State, Update, UpdateId, Version

T = TypeVar("T")
Answer = Union[Joined, Heard, Left, Proceed, Receipt, Refused]

PROGRESS_EVERY_S = 1.0  # the aggregator hears of an update's arriving bytes at most so often
RETRY_MAX_S = 30.0  # between attempts at a merge that failed
MAX_TIMER_S = 86_400.0  # after so long the clock is looked at again
STATUS_ROOM = 16_384  # bytes of a message for what wraps a status: a word on each track
MAX_STATUS_VERSIONS = 100

_log = logging.getLogger(__name__)


class Driver:
    """The aggregator, its journal, staging area and publisher, run together. See the module."""

    def __init__(
        self,
        aggregator: Aggregator,
        staging: Staging,
        journal: Journal,
        publisher: Publisher | None,
        *,
        clock: Clock,
        host: Host,
        telemetry: Telemetry,
        shelf: Shelf | None = None,
        items: ItemStore | None = None,
    ) -> None:
        self.shelf = shelf  # the proxy set that is handed out
        self.items = items  # the open items of that set, where it has room for any
        self.staging = staging
        self.journal = journal
        self.telemetry = telemetry
        self._aggregator = aggregator
        self._publisher = publisher
        self._clock = clock
        self._host = host
        self._inbox: deque[Event] = deque()  # completions that wait for the event in hand
        self._busy = False
        self._stopped = False
        self._due: float | None = None
        self._cancel_wake: Callable[[], None] = lambda: None
        self._waiters: dict[UpdateId, list[Callable[[Receipt], None]]] = {}
        self._watchers: dict[str, list[Watcher]] = {}
        self._progress: dict[UpdateId, float] = {}  # of those arriving: when the aggregator is to hear of bytes again
        self._progress_every_s = min(PROGRESS_EVERY_S, aggregator.config.members.stall_s / 4)
        self._versions: deque[tuple[Version, str]] = deque(maxlen=MAX_STATUS_VERSIONS)
        self._cancel_erasing: Callable[[], None] = lambda: None

    # ---- what transports ask ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The newest published version, or ``NO_VERSION``."""
        return self._aggregator.version

    @property
    def finished(self) -> str:
        """Why the run is over; empty while it goes on."""
        return self._aggregator.finished

    @property
    def live_members(self) -> int:
        """How many members hold a lease."""
        return self._aggregator.live_members

    @property
    def has_regions(self) -> bool:
        """Whether members may come that were below a region so far."""
        return self._aggregator.has_regions

    @property
    def config(self) -> FleetConfig:
        """The fleet file as this aggregator sees it."""
        return self._aggregator.config

    @property
    def layout(self) -> Layout | None:
        """The run's layout, once known."""
        return self._aggregator.layout

    def start(self) -> None:
        """Take up what the journal holds: a merge that was decided, the open window."""
        for version in self.journal.versions():
            self._versions.append((version, ""))
            self.telemetry.published(version)
        self._carry_out_all(self._aggregator.start(self._clock.now()))
        self.keep_items()
        self._drain()

    def stop(self) -> None:
        """Do nothing more: no tick, no retry. Work in hand at the host may finish; its result is dropped (the journal has it)."""
        self._stopped = True
        self._cancel_wake()
        self._cancel_erasing()

    def handle(self, event: Event) -> Answer | None:
        """Feed one event; returns the aggregator's answer, None for an event that gets none.

        Raises ``FleetError`` when an event that needs an answer got none because of a defect, which is logged.
        """
        answer = self._step(event)
        self._drain()
        return answer

    def ask(self, event: Event, expected: type[T]) -> T:
        """``handle`` an event that gets one kind of answer; raises the ``Refused`` that it gets instead."""
        answer = self.handle(event)
        if isinstance(answer, Refused):
            raise answer
        if not isinstance(answer, expected):
            raise TypeError(f"{type(event).__name__} was answered with {answer!r}")
        return answer

    def wait(self, update_id: UpdateId, call: Callable[[Receipt], None]) -> Callable[[], None]:
        """Call ``call`` once when the update is accepted, settled or refused; returns what stops waiting."""
        waiters = self._waiters.setdefault(update_id, [])
        waiters.append(call)

        def cancel() -> None:
            if call in waiters:
                waiters.remove(call)
            if not waiters and self._waiters.get(update_id) is waiters:
                del self._waiters[update_id]

        return cancel

    def open(self, offer: Offer, done: Callable[[Stream | Exception], None]) -> None:
        """Open the stream of an offer that may proceed; ``done`` gets it, or the ``Refused`` that says why not."""
        self._progress.setdefault(offer.header.update_id, -math.inf)
        # On the journal's lane: what was discarded of this update before must be gone.
        self._host.submit(Lane.JOURNAL, lambda: self.staging.open(offer, self.layout), done)

    def watch(self, node: str, after_version: int, notify: Callable[[], None]) -> Watcher:
        """Watch for versions, the end, and receipts of ``node``.

        Where things stand otherwise than after ``after_version``, the first news is there at once.
        """
        watcher = Watcher(node, notify)
        self._watchers.setdefault(node, []).append(watcher)
        news = self._news()
        if news.version != after_version or news.finished:
            watcher.put(news)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """End a watch."""
        watchers = self._watchers.get(watcher.node, [])
        if watcher in watchers:
            watchers.remove(watcher)
        if not watchers:
            self._watchers.pop(watcher.node, None)

    def arrived(self, update_id: UpdateId, size: int) -> None:
        """Bytes of an update arrived: count them, and tell the aggregator now and then."""
        self.telemetry.bytes_in(size)
        now = self._clock.now()
        due = self._progress.get(update_id)
        if due is not None and now >= due:
            self._progress[update_id] = now + self._progress_every_s
            self.handle(Progressed(update_id=update_id))

    def keep_items(self) -> None:
        """Erase the open items that are too old, now and whenever one gets so. To be called when there are new ones."""
        items = self.items
        if items is None or self._stopped:
            return
        self._cancel_erasing()

        def done(due: float | Exception) -> None:
            if isinstance(due, Exception):
                self._failed(f"open items that are too old could not be erased; trying again in {RETRY_MAX_S:g} s", due)
                wait = RETRY_MAX_S
            else:
                wait = max(0.0, due - self._clock.now())
            if not self._stopped and wait < math.inf:
                self._cancel_erasing()
                self._cancel_erasing = self._host.later(min(wait, MAX_TIMER_S), self.keep_items)

        self._host.submit(Lane.SWEEP, items.erase_expired, done)

    def status(self) -> dict[str, Any]:
        """What ``fleetddp status`` shows, with so many members as fit one message; the schema is in WIRE.md."""
        most = MAX_STATUS_MEMBERS
        while len(json.dumps(status := self._status(most))) > MESSAGE_BYTES - STATUS_ROOM and most:
            most //= 2
        return status

    def _status(self, most: int) -> dict[str, Any]:
        status = self._aggregator.status(self._clock.now(), most)
        status["versions"] = [
            {
                "number": version.number,
                "published_at": version.published_at,
                "updates": version.updates,
                "metrics": dict(version.metrics),
                "reason": reason,
            }
            for version, reason in self._versions
        ]
        status["counters"].update(self.telemetry.totals())
        if self.items is not None:
            status["open_items"] = self.items.counts()
        return status

    # ---- events -----------------------------------------------------------------------------------------------------------

    def _step(self, event: Event) -> Answer | None:
        try:
            effects = self._aggregator.handle(event, self._clock.now())
        except Exception as error:
            self._failed(f"the aggregator failed on {type(event).__name__}", error)
            raise FleetError(f"the coordinator failed on this request ({error!r}); its operator finds more in its log") from error
        return self._carry_out_all(effects)

    def _drain(self) -> None:
        """Feed what disk work brought, unless an event is in hand (it will)."""
        while self._inbox and not self._busy:
            event = self._inbox.popleft()
            with suppress(FleetError):  # logged where it was raised; nobody waits for an answer
                self._step(event)

    def _report(self, event: Event) -> None:
        """Disk work is done."""
        if not self._stopped:
            self._inbox.append(event)
            self._drain()

    def _failed(self, what: str, error: BaseException) -> None:
        _log.error("%s: %s", what, error, exc_info=error)
        self.telemetry.count("failed")

    # ---- effects ----------------------------------------------------------------------------------------------------------

    def _carry_out_all(self, effects: list[Effect]) -> Answer | None:
        """All effects of one event come before the next event: what disk work brings meanwhile waits."""
        answer: Answer | None = None
        self._busy, outer = True, self._busy
        try:
            for effect in effects:
                if isinstance(effect, Reply):
                    answer = effect.value
                    continue
                try:
                    self._carry_out(effect)
                except Exception as error:
                    self._failed(f"the effect {type(effect).__name__} failed", error)
        finally:
            self._busy = outer
        return answer

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Persist):
            self._persist(effect.update, effect.at)
        elif isinstance(effect, (Found, Merge)):
            self._publish(effect)
        elif isinstance(effect, Settle):
            self._settle(effect.receipts)
        elif isinstance(effect, Discard):
            self._forget(effect.update_id)
        elif isinstance(effect, Announce):
            news = self._news()
            for watchers in self._watchers.values():
                for watcher in watchers:
                    watcher.put(news)
        elif isinstance(effect, Opened):
            at = effect.at
            self._write("the window's opening", lambda: self.journal.opened(at))
        elif isinstance(effect, Ended):
            self._end(effect.reason)
        elif isinstance(effect, Wake):
            self._wake(effect.at)
        elif isinstance(effect, Say):
            self.telemetry.say(effect)

    def _persist(self, update: Update, at: float) -> None:
        def done(result: Exception | None) -> None:
            if isinstance(result, Exception):
                self._failed(f"update {update.update_id} could not be stored", result)
                self._report(PersistFailed(update=update, message=str(result)))
            else:
                self._report(Persisted(update=update))

        self._host.submit(Lane.JOURNAL, lambda: self.staging.accept(update, at), done)

    def _publish(self, effect: Found | Merge) -> None:
        publisher = self._publisher
        assert publisher is not None  # a region's is none: it makes no versions
        if isinstance(effect, Found):
            found = effect
            self._make("version 0", lambda: publisher.found(found.update, found.at), "first weights")
        else:
            decision, items = effect.decision, self.items

            def merge() -> Version:
                if isinstance(items, ItemPool):
                    items.fix(decision.version)  # whoever hears of the version will find the same items, whenever it asks
                return publisher.merge(decision)

            self._make(f"version {decision.version}", merge, decision.reason)

    def _make(self, what: str, work: Callable[[], Version], reason: str, attempt: int = 0) -> None:
        """Make a version; again and again if that fails, since a decision stands."""

        def done(result: Version | Exception) -> None:
            if isinstance(result, Exception):
                wait = min(RETRY_MAX_S, 2.0**attempt)
                self._failed(f"{what} could not be made; trying again in {wait:g} s", result)
                self._host.later(wait, lambda: self._make(what, work, reason, attempt + 1))
                return
            self._versions.append((result, reason))
            self.telemetry.published(result)
            self._report(Published(version=result))
            if not self._stopped:
                self._sweep()

        if not self._stopped:
            self._host.submit(Lane.MERGE, work, done)

    def _sweep(self) -> None:
        def done(result: Exception | None) -> None:
            if isinstance(result, Exception):
                self._failed("files of what is settled could not be removed", result)

        self._host.submit(Lane.SWEEP, self.journal.sweep, done)

    def _write(self, what: str, work: Callable[[], None]) -> None:
        """Journal a fact that nobody waits for."""

        def done(result: Exception | None) -> None:
            if isinstance(result, Exception):
                self._failed(f"{what} could not be journaled", result)

        self._host.submit(Lane.JOURNAL, work, done)

    def _end(self, reason: str) -> None:
        """Journal the end, here and now, once in a run: what expires with it is settled by the effects that follow."""
        try:
            self.journal.ended(reason)
        except StorageError as error:
            self._failed(f"the end of the run could not be journaled; trying again in {RETRY_MAX_S:g} s", error)
            self._host.later(RETRY_MAX_S, lambda: None if self._stopped else self._end(reason))

    def _settle(self, receipts: tuple[Receipt, ...]) -> None:
        for receipt in receipts:
            if receipt.state is State.STAGED:
                continue  # nothing is settled; what settles it comes later
            self._progress.pop(receipt.update_id, None)
            for call in self._waiters.pop(receipt.update_id, ()):
                call(receipt)
            for watcher in self._watchers.get(receipt.update_id.node, ()):
                watcher.put(self._news((receipt,)))

    def _forget(self, update_id: UpdateId) -> None:
        self._progress.pop(update_id, None)
        # On the journal's lane, so that the same update offered again is not opened before the old bytes are gone.
        self._write(f"the discarding of {update_id}", lambda: self.staging.discard(update_id))

    def _news(self, receipts: tuple[Receipt, ...] = ()) -> News:
        return News(
            version=self._aggregator.version,
            receipts=receipts,
            finished=self._aggregator.finished,
            closes_at=self._aggregator.closes_at,
        )

    def _wake(self, at: float) -> None:
        if self._due is not None and self._due <= at:
            return
        self._cancel_wake()
        self._due = at
        self._cancel_wake = self._host.later(max(0.0, at - self._clock.now()), self._tick)

    def _tick(self) -> None:
        due, self._due = self._due, None
        if self._stopped:
            return
        if due is not None and self._clock.now() < due:  # a timer may be a little early, and the aggregator asks only once
            self._wake(due)
        else:
            with suppress(FleetError):
                self.handle(Tick())


def answered(receipt: Receipt) -> Receipt:
    """The receipt that answers a push; raises the ``Refused`` that it stands for, unless it names what overlaps."""
    if receipt.state is State.UNKNOWN:
        raise Refused(Reason(receipt.reason or Reason.STALLED), receipt.message or f"{receipt.update_id} was dropped meanwhile")
    if receipt.state is State.REFUSED and not receipt.overlap:
        raise Refused(Reason(receipt.reason), receipt.message)
    return receipt
