"""The root of a simulated fleet: the real driver and aggregator, hosted by the event loop.

Disk work takes virtual time: each lane does one piece of work after another, and what it does happens at the end of its time.
A crash forgets all that the store does not hold, and breaks every connection; a start recovers from the store, as a coordinator
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import google_crc32c

from fleetddp.common.aggregator import Aggregator
from fleetddp.common.config import FleetConfig
from fleetddp.common.driver import Driver
from fleetddp.common.errors import FleetError, Refused
from fleetddp.common.events import Effect, Event, Heartbeat, Join, Leave, Offer, Proceed, Say, SliceRejected
from fleetddp.common.host import Lane
from fleetddp.common.journal import Journal
from fleetddp.common.news import Watcher
from fleetddp.common.payload import Geometry
from fleetddp.common.publish import Publisher
from fleetddp.common.recovered import Recovered
from fleetddp.common.staging import Staging
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport.limits import CHUNK_BYTES
from fleetddp.common.update import NO_VERSION, Receipt, State, UpdateId
from fleetddp.edge.sim.calls import Call, Caller, Held, Network, Pull, Pulled, Upload
from fleetddp.edge.sim.loop import EventLoop
from fleetddp.edge.sim.observer import ROOT, Observer

T = TypeVar("T")


class Store(Protocol):
    """What a root keeps, and what is left of it after a crash."""

    def open(self) -> tuple[Journal, Staging, Publisher]:
        """At each start of the root, over what is durable."""
        ...

    def crash(self) -> None:
        """The root has crashed: forget what is not durable."""
        ...


class Listener(Caller, Protocol):
    """A member that may watch for news."""

    newest: int  # the version that it knows of

    def hear(self, news: Any) -> None:
        """News of a watch stream, or an exception that says why there are no more."""
        ...


class Watched(Aggregator):
    """The real aggregator, with somebody looking on."""

    def __init__(self, config: FleetConfig, recovered: Recovered, observer: Observer) -> None:
        super().__init__(config, recovered)
        self._observer = observer

    def start(self, now: float) -> list[Effect]:
        """See ``Aggregator``."""
        effects = super().start(now)
        self._observer.handled(None, effects, now)
        return effects

    def handle(self, event: Event, now: float) -> list[Effect]:
        """See ``Aggregator``."""
        effects = super().handle(event, now)
        self._observer.handled(event, effects, now)
        return effects


class PlugPulled(BaseException):
    """The root's machine loses power in the middle of something, and starts again ``down_s`` seconds later. Faults raise it from
    within the store. Not an ``Exception``: no production code may catch it."""

    def __init__(self, point: str, down_s: float) -> None:
        super().__init__(point)
        self.down_s = down_s


class _Quiet(Telemetry):
    """Counts, and leaves the words to the timeline: nobody reads a log of millions of events. Failures are noted."""

    def __init__(self, failed: Callable[[], None]) -> None:
        super().__init__()
        self._failed = failed

    def say(self, what: Say) -> None:
        """Count."""
        self.count(what.what)

    def count(self, what: str) -> None:
        """See ``Telemetry``."""
        super().count(what)
        if what == "failed":
            self._failed()


class SimRoot:
    """One aggregator's process: up or down. It is the ``Host`` of its driver and the far end of every call."""

    def __init__(
        self,
        config: FleetConfig,
        store: Store,
        loop: EventLoop,
        network: Network,
        observer: Observer,
        *,
        disk_s: float,
        merge_s: float,
    ) -> None:
        self._config, self._store, self._loop, self._network, self._observer = config, store, loop, network, observer
        self._seconds = {Lane.JOURNAL: disk_s, Lane.MERGE: merge_s, Lane.SWEEP: 0.0}
        self._free_at = dict.fromkeys(Lane, -math.inf)
        self.starts = 0  # so far
        self._life = 0
        self._driver: Driver | None = None
        self._waiting: dict[Call, None] = {}  # calls that wait for the disk or for a receipt
        self._watchers: dict[str, Watcher] = {}
        self._ready: list[Listener] = []
        self._newest: Pulled | None = None  # the payload read last
        self._receivers: dict[type, Callable[[Call, Driver], None]] = {
            Heartbeat: self._ask,
            Join: self._ask,
            Leave: self._ask,
            Offer: self._offer,
            Pull: self._pull,
            Upload: self._upload,
        }
        network.root = self

    # ---- life -----------------------------------------------------------------------------------------------------------------

    @property
    def driver(self) -> Driver | None:
        """The driver that is running; None while the root is down."""
        return self._driver

    @property
    def finished(self) -> str:
        """Why the run is over; empty while it goes on, or while the root is down."""
        return self._driver.finished if self._driver is not None else ""

    def start(self) -> None:
        """Recover from the store and begin to answer. Does nothing if it is up."""
        if self._driver is not None:
            return
        try:
            journal, staging, publisher = self._store.open()
            recovered = journal.recover()
            self._observer.recovered(recovered, self._loop.now())
            aggregator = Watched(self._config, recovered, self._observer)
            telemetry = _Quiet(lambda: self._observer.noted(ROOT, "failed", self._loop.now()))
            driver = Driver(aggregator, staging, journal, publisher, clock=self._loop, host=self, telemetry=telemetry)
            self._driver = driver
            self.starts += 1
            self._observer.noted(ROOT, "started", self._loop.now())
            driver.start()
            self._flush()
        except PlugPulled as pulled:
            self._fall(pulled)

    def crash(self) -> None:
        """Stop at once. Does nothing if it is down."""
        if self._driver is not None:
            self._end()

    def _fall(self, pulled: PlugPulled) -> None:
        self._end()
        self._loop.after(pulled.down_s, lambda _: self.start())

    def _end(self) -> None:
        if self._driver is not None:
            self._driver.stop()
            self._driver = None
        self._life += 1
        self._free_at = dict.fromkeys(Lane, -math.inf)
        self._watchers.clear()
        self._ready.clear()
        self._newest = None
        self._store.crash()
        self._observer.noted(ROOT, "stopped", self._loop.now())
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            self._network.fail(call, "the coordinator crashed")

    # ---- the driver's host ----------------------------------------------------------------------------------------------------

    def submit(self, lane: Lane, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """See ``Host``."""
        free = max(self._loop.now(), self._free_at[lane]) + self._seconds[lane]
        self._free_at[lane] = free
        self._loop.at(free, self._work, (self._life, work, done))

    def _work(self, job: tuple[int, Callable[[], Any], Callable[[Any], None]]) -> None:
        life, work, done = job
        if life != self._life:
            return
        try:
            try:
                outcome = work()
            except Exception as error:
                outcome = error
            if life == self._life:  # the work may have been what crashed it
                done(outcome)
                self._flush()
        except PlugPulled as pulled:
            self._fall(pulled)

    def later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """See ``Host``."""
        timer = [call]
        self._loop.after(seconds, self._ring, (self._life, timer))
        return timer.clear

    def _ring(self, due: tuple[int, list[Callable[[], None]]]) -> None:
        life, timer = due
        if not timer or life != self._life:
            return
        try:
            timer[0]()
            self._flush()
        except PlugPulled as pulled:
            self._fall(pulled)

    # ---- calls ----------------------------------------------------------------------------------------------------------------

    def receive(self, call: Call) -> None:
        """A request has arrived."""
        driver = self._driver
        if driver is None:
            self._network.fail(call, "the coordinator is down")
            return
        try:
            self._receivers[type(call.request)](call, driver)
        except FleetError as error:  # Refused (it travels), or a defect of the aggregator, which the driver has logged
            self._network.reply(call, error)
        except PlugPulled as pulled:
            self._fall(pulled)
            if call.answer is None:
                self._network.fail(call, "the coordinator crashed")
        if self._ready:
            self._flush()

    def progressed(self, call: Call) -> None:
        """See ``Root``."""
        if self._driver is not None:
            self._driver.arrived(call.request.offer.header.update_id, 0)

    def _ask(self, call: Call, driver: Driver) -> None:
        self._network.reply(call, driver.handle(call.request))

    def _pull(self, call: Call, driver: Driver) -> None:
        number = driver.version if call.request.version == NO_VERSION else call.request.version
        if self._newest is None or self._newest.version.number != number:
            with driver.journal.read_version(number) as reader:
                self._newest = Pulled(reader.info, reader.read(0, reader.size))
        self._network.reply(call, self._newest, self._newest.version.payload_bytes)

    def _offer(self, call: Call, driver: Driver) -> None:
        offer: Offer = call.request
        answer = driver.handle(offer)
        if isinstance(answer, Proceed):
            self._waiting[call] = None
            driver.open(offer, partial(self._opened, call))
        elif isinstance(answer, Receipt) and answer.state is State.STAGED:
            self._await(call, offer.header.update_id, driver)
        else:
            self._network.reply(call, answer)

    def _opened(self, call: Call, stream: Any) -> None:
        del self._waiting[call]
        self._network.reply(call, stream if isinstance(stream, Exception) else Held(stream))

    def _upload(self, call: Call, driver: Driver) -> None:
        """The bytes of a slice have arrived: what a server does chunk by chunk is done at once, at the time of the last."""
        offer, stream, payload, sent = call.request
        update_id = offer.header.update_id
        try:
            if payload:
                at = 0
                geometry = Geometry.of_update(offer.header, driver.layout)
                for start, stop in geometry.chunks((geometry.byte_range(i) for i in offer.slice.intervals), CHUNK_BYTES):
                    data = bytes(payload[at : at + stop - start])
                    crc = google_crc32c.value(data if sent is None else bytes(sent[at : at + stop - start]))
                    at += stop - start
                    if at > stream.held:
                        stream.write(start, crc, data)
            staged = stream.finish()
        except Refused as refusal:
            driver.handle(SliceRejected(update_id=update_id, slice=offer.slice, refusal=refusal))
            raise
        self._await(call, update_id, driver)
        driver.handle(staged)

    def _await(self, call: Call, update_id: UpdateId, driver: Driver) -> None:
        """Answer with the receipt, when there is one."""
        self._waiting[call] = None
        driver.wait(update_id, partial(self._answer, call))

    def _answer(self, call: Call, receipt: Receipt) -> None:
        del self._waiting[call]
        self._network.reply(call, receipt)

    # ---- news -----------------------------------------------------------------------------------------------------------------

    def listen(self, member: Listener) -> None:
        """A member watches until it gets one piece of news, then it asks again.

        In production the stream stays open while the member is busy; what comes meanwhile waits for it. Here a busy member does
        not watch at all, which spares a message to each member for each version; it hears at most one latency later.
        """
        driver = self._driver
        if driver is None or member.name in self._watchers:
            return
        self._watchers[member.name] = driver.watch(member.name, member.newest, partial(self._ready.append, member))
        if self._ready:
            self._flush()

    def unlisten(self, member: Listener) -> None:
        """A member stopped: its stream broke."""
        watcher = self._watchers.pop(member.name, None)
        if watcher is not None and self._driver is not None:
            self._driver.unwatch(watcher)

    def _flush(self) -> None:
        """Send the news that the last event brought, one message a member."""
        if not self._ready:
            return
        driver, ready = self._driver, self._ready.copy()
        self._ready.clear()  # the watchers hold on to this list
        for member in ready:
            watcher = self._watchers.get(member.name)
            news = watcher.take() if watcher is not None else None
            if news is None or watcher is None or driver is None:
                continue
            # That an update was accepted, its sender hears as the answer of its push.
            if news.finished or news.version > member.newest or any(r.state.final for r in news.receipts):
                del self._watchers[member.name]
                driver.unwatch(watcher)
                self._network.tell(member, member.hear, news)
