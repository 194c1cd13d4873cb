"""An aggregator in this process, and ``Parent``s that talk to it without a network: for tests and simulations.

Disk work is done at once, in the caller's thread. Timers fire when a call or ``tick`` finds them due by the clock, so that a
virtual clock moves everything; under the system's clock whoever waits looks again by itself.
"""

from __future__ import annotations

import heapq
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import google_crc32c

from fleetddp.common.assembly import assemble, open_journal
from fleetddp.common.clock import Clock
from fleetddp.common.config import FleetConfig
from fleetddp.common.driver import Driver, answered
from fleetddp.common.errors import Reason, Refused, Unreachable
from fleetddp.common.events import (
    ByteRange,
    Event,
    Heard,
    Heartbeat,
    Join,
    Joined,
    Leave,
    Left,
    News,
    Offer,
    Proceed,
    Share,
    SliceRejected,
)
from fleetddp.common.host import Lane
from fleetddp.common.journal import Journal
from fleetddp.common.layout import Layout
from fleetddp.common.open_items import Catalogue, Shared
from fleetddp.common.payload import Geometry
from fleetddp.common.staging import Stream
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport import MEMBER_REASONS, Parent, Sink
from fleetddp.common.transport.item_calls import desk_of, store_of
from fleetddp.common.transport.limits import CHUNK_BYTES, SHARE_BYTES
from fleetddp.common.update import NO_VERSION, ProxyInfo, Receipt, Slice, State, UpdateHeader, Version

T = TypeVar("T")

LOOK_AGAIN_S = 0.05  # how often one who waits looks whether a timer is due


@dataclass(order=True, slots=True)
class _Timer:
    """A call that is due; those of one time in the order they were asked for."""

    at: float
    order: int
    call: Callable[[], None] = field(compare=False)

    def cancel(self) -> None:
        """Nothing is due any more."""
        self.call = lambda: None


class InlineHost:
    """Runs a driver in the thread that calls it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: list[_Timer] = []
        self._order = itertools.count()

    def submit(self, lane: Lane, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """See ``Host``."""
        outcome: T | Exception
        try:
            outcome = work()
        except Exception as error:
            outcome = error
        done(outcome)

    def later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """See ``Host``."""
        timer = _Timer(self._clock.now() + seconds, next(self._order), call)
        heapq.heappush(self._timers, timer)
        return timer.cancel

    def run_due(self) -> None:
        """Fire the timers that are due."""
        while self._timers and self._timers[0].at <= self._clock.now():
            heapq.heappop(self._timers).call()


class MemoryFleet:
    """One aggregator over a journal on disk. Its members' parents come from ``parent``; all may be used from any thread."""

    def __init__(self, config: FleetConfig, clock: Clock, *, journal: Journal | None = None) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._journal = journal if journal is not None else open_journal(config)
        self._host = InlineHost(clock)
        self.driver = self._assemble(config, clock)
        self._stopped = False
        with self.turn():
            self.driver.start()

    def _assemble(self, config: FleetConfig, clock: Clock) -> Driver:
        return assemble(config, self._journal, clock=clock, host=self._host, telemetry=Telemetry())

    def parent(self, *, run: str = "") -> MemoryParent:
        """A member's (or a rank's) own connection."""
        return MemoryParent(self, run)

    def tick(self) -> None:
        """Fire the timers that are due: to be called after a virtual clock was moved."""
        with self.turn():
            pass

    def stop(self) -> None:
        """As the end of the process: parents become unreachable, the journal keeps the run."""
        with self._changed:
            self._stopped = True
            self.driver.stop()
            self._journal.close()
            self._changed.notify_all()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The driver's lock, the timers that are due fired; wakes those who wait afterwards."""
        with self._changed:
            self._let_time_pass()
            yield
            self._changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return once ``ready``; time passes and others have their turns meanwhile."""
        with self._changed:
            self._let_time_pass()
            while not ready():
                self._changed.wait(LOOK_AGAIN_S)
                self._let_time_pass()

    def wake(self) -> None:
        """Let those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def _let_time_pass(self) -> None:
        if self._stopped:
            raise Unreachable("the aggregator in this process was stopped")
        self._host.run_due()


class MemoryParent(Parent):
    """A ``Parent`` over a ``MemoryFleet``."""

    def __init__(self, fleet: MemoryFleet, run: str) -> None:
        self._fleet = fleet
        self._driver = fleet.driver
        self._run = run
        self._closed = False

    def join(self, request: Join) -> Joined:
        """See ``Parent``."""
        return self._ask(request, Joined)

    def heartbeat(self, request: Heartbeat) -> Heard:
        """See ``Parent``."""
        return self._ask(request, Heard)

    def leave(self, node: str, incarnation: int) -> None:
        """See ``Parent``."""
        self._ask(Leave(node=node, incarnation=incarnation), Left)

    def layout(self) -> Layout:
        """See ``Parent``."""
        with self._turn():
            layout = self._driver.layout
        if layout is None:
            raise Refused(Reason.NO_VERSION, "the run has no layout yet: it waits for the first weights")
        return layout

    def pull(self, version: int, ranges: Sequence[ByteRange], sink: Sink) -> Version:
        """See ``Parent``."""
        with self._turn():
            if self._driver.version == NO_VERSION:
                raise Refused(Reason.NO_VERSION, "no version is published yet: the run waits for the first weights")
            number = self._driver.version if version == NO_VERSION else version
            reader = self._driver.journal.read_version(number)
        with reader:
            for start, stop in ranges or ((0, reader.info.payload_bytes),):
                for begin in range(start, stop, CHUNK_BYTES):
                    self._require_open()
                    sink(begin, memoryview(reader.read(begin, min(begin + CHUNK_BYTES, stop))))
            return reader.info

    def pull_proxy(self, ranges: Sequence[ByteRange], sink: Sink) -> ProxyInfo:
        """See ``Parent``."""
        with self._turn():
            shelf = self._driver.shelf
        if shelf is None:
            raise Refused(Reason.NO_PROXY, "this track has no file of a proxy set")
        with shelf.open() as reader:
            for start, stop in ranges:
                for begin in range(start, stop, CHUNK_BYTES):
                    self._require_open()
                    sink(begin, memoryview(reader.read(begin, min(begin + CHUNK_BYTES, stop))))
        return shelf.info

    def pull_items(self, pool: int, known: int, ranges: Sequence[ByteRange], sink: Sink) -> Catalogue:
        """See ``Parent``."""
        with self._turn():
            store = store_of(self._driver)
            catalogue = store.catalogue(pool, known, self._driver.version)
        for start, stop in ranges:
            for begin in range(start, stop, CHUNK_BYTES):
                self._require_open()
                sink(begin, memoryview(store.read(begin, min(begin + CHUNK_BYTES, stop))))
        return catalogue

    def share(self, offer: Share, data: Callable[[str], bytes]) -> Shared:
        """See ``Parent``."""
        with self._turn():
            self._driver.ask(offer, Proceed)
        desk = desk_of(self._driver)
        found = {digest: data(digest) for digest in desk.wanted(offer, SHARE_BYTES)}
        shared = desk.take(offer, found)
        with self._turn():
            self._driver.keep_items()
        return shared

    def withdraw(self, share: Share) -> int:
        """See ``Parent``."""
        with self._turn():
            self._driver.ask(share, Proceed)
        return desk_of(self._driver).withdraw(share.of, share.digests)

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        """See ``Parent``. There is no network to lose a chunk, so a refusal that a retry can mend is raised at once."""
        try:
            return self._push(Offer(header=header, slice=slice, run=self._run), payload.cast("B"))
        except Refused as refused:
            if refused.retry or refused.reason in MEMBER_REASONS:
                raise
            return Receipt(update_id=header.update_id, state=State.REFUSED, reason=refused.reason.value, message=refused.message)

    def watch(self, node: str, incarnation: int, after_version: int) -> Iterator[News]:
        """See ``Parent``."""
        with self._turn():
            watcher = self._driver.watch(node, after_version, self._fleet.wake)
        taken: list[News] = []

        def ready() -> bool:
            self._require_open()
            news = watcher.take()
            taken.extend([] if news is None else [news])
            return bool(taken)

        try:
            finished = False
            while not finished:
                self._fleet.wait(ready)
                news = taken.pop()
                finished = bool(news.finished)
                yield news
        finally:
            with suppress(Unreachable), self._fleet.turn():
                self._driver.unwatch(watcher)

    def status(self) -> dict[str, Any]:
        """See ``Parent``."""
        with self._turn():
            status: dict[str, Any] = json.loads(json.dumps(self._driver.status()))
        return status

    def close(self) -> None:
        """See ``Parent``."""
        self._closed = True
        self._fleet.wake()

    def _require_open(self) -> None:
        if self._closed:
            raise Unreachable("this connection to the aggregator in this process was closed")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._require_open()
        with self._fleet.turn():
            yield

    def _ask(self, event: Event, expected: type[T]) -> T:
        with self._turn():
            return self._driver.ask(event, expected)

    def _push(self, offer: Offer, payload: memoryview) -> Receipt:
        settled: list[Receipt] = []
        opened: list[Stream | Exception] = []
        with self._turn():
            forget = self._driver.wait(offer.header.update_id, settled.append)
            answer = self._driver.handle(offer)
            if isinstance(answer, Proceed):
                self._driver.open(offer, opened.append)
        try:
            if isinstance(answer, Refused):
                raise answer
            if isinstance(answer, Receipt) and answer.state is not State.STAGED:
                return answered(answer)
            if opened:
                self._bring(offer, opened[0], payload)
            self._fleet.wait(lambda: self._closed or bool(settled))
            self._require_open()
            return replace(answered(settled[0]), duplicate=settled[0].duplicate or not opened)
        finally:
            forget()

    def _bring(self, offer: Offer, stream: Stream | Exception, payload: memoryview) -> None:
        """All of a stream's bytes, chunk by chunk as over a network, and their end."""
        update_id = offer.header.update_id
        try:
            if isinstance(stream, Exception):
                raise stream
            at = 0
            for start, stop in _chunks(offer, self._driver.layout):
                data = bytes(payload[at : at + stop - start])
                at += stop - start
                if at > stream.held:
                    stream.write(start, google_crc32c.value(data), data)
                    with self._turn():
                        self._driver.arrived(update_id, len(data))
            staged = stream.finish()
        except Refused as refusal:
            with self._turn():
                self._driver.handle(SliceRejected(update_id=update_id, slice=offer.slice, refusal=refusal))
            raise
        with self._turn():
            self._driver.handle(staged)


def _chunks(offer: Offer, layout: Layout | None) -> Iterator[ByteRange]:
    geometry = Geometry.of_update(offer.header, layout)
    return geometry.chunks((geometry.byte_range(i) for i in offer.slice.intervals), CHUNK_BYTES)
