"""A simulated fleet over real loopback gRPC: the production server and uplink carry the calls, the event loop still says when.

Every call of a simulated member goes through an ``Uplink`` to a ``Server`` over a driver on the virtual clock. The loop's thread
waits until the server has handled what it was sent, and until what the server then sends has come back, before it goes on to the
next event: so both arms, this one and ``SimRoot``, see the same events at the same virtual times.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from fleetddp.common.config import ONLY_TRACK, SecurityConfig
from fleetddp.common.errors import FleetError, Reason, Refused
from fleetddp.common.events import Event, Heartbeat, Join, Left, Offer, Proceed, SliceRejected, SliceStaged
from fleetddp.common.payload import Geometry
from fleetddp.common.transport.server import Server
from fleetddp.common.transport.transfers import PushTransfer
from fleetddp.common.transport.uplink import Patience, Uplink
from fleetddp.common.update import Receipt, State
from fleetddp.edge.sim.calls import Call, Held, Pulled
from fleetddp.edge.sim.root import SimRoot
from helpers.fleet import free_port

WAIT_S = 30.0  # of real time, for what must happen at once
ONCE = Patience(call_s=WAIT_S, stall_s=600.0, give_up_s=0.0)  # members try again by themselves


@dataclass(eq=False)
class Push:
    """One push call: the member offers, hears what is held, and uploads later."""

    call: Call
    payload: bytearray
    life: int
    held: int = 0
    upload: Call | None = None
    result: Any = None
    opened: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def run(self, uplink: Uplink) -> None:
        """In a thread of its own."""
        offer = self.call.request
        try:
            self.result = uplink.push(offer.header, offer.slice, memoryview(self.payload))
        except FleetError as error:
            self.result = error
        self.done.set()


@dataclass(eq=False)
class Stream:
    """One watch call."""

    member: Any
    uplink: Uplink
    news: queue.Queue[Any] = field(default_factory=queue.Queue)
    closed: bool = False

    def run(self, incarnation: int) -> None:
        """In a thread of its own."""
        with suppress(FleetError):
            for news in self.uplink.watch(self.member.name, incarnation, self.member.newest):
                self.news.put(news)

    def close(self) -> None:
        self.closed = True
        self.uplink.close()


@contextmanager
def gates() -> Iterator[dict[int, Push]]:
    """While it lasts, an uplink's chunks wait until their push may go on. The pushes by the address of their payload."""
    pushes: dict[int, Push] = {}
    chunks = PushTransfer.chunks

    def gated(self: PushTransfer, held: int) -> Iterator[bytes]:
        push = pushes[id(self.payload.obj)]
        push.held = held
        push.opened.set()
        assert push.go.wait(600)
        yield from chunks(self, held)

    PushTransfer.chunks = gated  # type: ignore[method-assign]
    try:
        yield pushes
    finally:
        PushTransfer.chunks = chunks  # type: ignore[method-assign]


class WireRoot(SimRoot):
    """See the module. To be used within ``gates``; ``close`` at the end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pushes: dict[int, Push] = {}
        self._streams: dict[str, Stream] = {}
        self._uplinks: dict[str, Uplink] = {}
        self._current: Any = None  # whose call the server is about to handle
        self._handled: queue.Queue[Any] = queue.Queue()  # what the driver answered to offers, and ends of slices
        self._due: list[tuple[str, Push]] = []  # what the server is about to send
        self._asyncio = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._asyncio.run_forever, daemon=True)
        self._thread.start()
        self._receivers |= {Join: self._ask, Heartbeat: self._ask}
        self.calls = 0  # that went through gRPC

    # ---- life -----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._driver is not None:
            return

        async def up() -> None:
            super(WireRoot, self).start()
            self._watch_over(self._driver)
            coordinator = self._config.coordinator.model_copy(update={"address": f"127.0.0.1:{free_port()}"})
            self._server = Server({ONLY_TRACK: self._driver}, self._config.model_copy(update={"coordinator": coordinator}))
            self._port = await self._server.start()

        self._await(up())

    def _end(self) -> None:
        for push in self.pushes.values():
            push.go.set()
        self._on_server(lambda: self._driver.stop() if self._driver else None)
        self._hang_up()
        super()._end()

    def _hang_up(self) -> None:
        self._await(self._server.stop(0))
        for closing in (*self._streams.values(), *self._uplinks.values()):
            closing.close()
        self._streams.clear()
        self._uplinks.clear()
        self._due.clear()

    def close(self) -> None:
        """The simulation is over."""
        if self._driver is not None:
            for push in self.pushes.values():
                push.go.set()
            self._on_server(self._driver.stop)
            self._hang_up()
        self._asyncio.call_soon_threadsafe(self._asyncio.stop)
        self._thread.join()
        self._asyncio.close()

    def _await(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._asyncio).result(WAIT_S)

    def _on_server(self, call: Callable[[], Any]) -> Any:
        """Do this on the server's thread, where its driver lives; what it is busy with ends first."""

        async def work() -> Any:
            return call()

        return self._await(work())

    def _watch_over(self, driver: Any) -> None:
        """Learn what the driver is told, and what it is about to say, on the server's thread."""
        handle, wait, open_, watch = driver.handle, driver.wait, driver.open, driver.watch

        def handled(event: Event) -> Any:
            answer = handle(event)
            if isinstance(event, (Offer, SliceStaged, SliceRejected)):
                self._handled.put(answer if isinstance(event, Offer) else event)
            return answer

        def waiting(update_id: Any, call: Callable[[Receipt], None]) -> Any:
            push = self._current

            def settled(receipt: Receipt) -> None:
                if receipt.state is not State.STAGED:
                    self._due.append(("receipt", push))
                call(receipt)

            return wait(update_id, settled)

        def opening(offer: Offer, done: Callable[[Any], None]) -> None:
            push = self._current

            def opened(outcome: Any) -> None:
                self._due.append(("refused" if isinstance(outcome, Exception) else "held", push))
                done(outcome)

            open_(offer, opened)

        def watching(node: str, after: int, notify: Callable[[], None]) -> Any:
            stream = self._current

            def noted() -> None:
                self._ready.append(stream)
                notify()

            return watch(node, after, noted)

        driver.handle, driver.wait, driver.open, driver.watch = handled, waiting, opening, watching

    # ---- events of the loop ---------------------------------------------------------------------------------------------------

    def _work(self, job: Any) -> None:
        if job[0] == self._life:
            self._on_server(lambda: SimRoot._work(self, job))
            self._settle()

    def _ring(self, due: Any) -> None:
        if due[0] == self._life:
            self._on_server(lambda: SimRoot._ring(self, due))
            self._settle()

    def receive(self, call: Call) -> None:
        self.calls += 1
        super().receive(call)
        self._settle()

    def progressed(self, call: Call) -> None:
        if self._driver is not None:
            self._on_server(lambda: SimRoot.progressed(self, call))
            self._settle()

    def _flush(self) -> None:
        """Not from the server's thread: ``_settle`` does it."""

    def _settle(self) -> None:
        """What the server has sent has come; it goes on to the members."""
        self._answers()
        ready, self._ready[:] = dict.fromkeys(self._ready), []
        for stream in ready:
            if stream.closed:
                continue
            news, member = stream.news.get(timeout=WAIT_S), stream.member
            if news.finished or news.version > member.newest or any(r.state.final for r in news.receipts):
                self._streams.pop(member.name).close()
                self._network.tell(member, member.hear, news)

    def _answers(self) -> None:
        due, self._due[:] = list(self._due), []
        for what, push in due:
            if what == "held":
                assert push.opened.wait(WAIT_S)
                self._waiting.pop(push.call, None)
                self._network.reply(push.call, Held(push))  # type: ignore[arg-type]
                continue
            assert push.done.wait(WAIT_S)
            call = push.upload or push.call
            if self._waiting.pop(call, call) is None:
                self._network.reply(call, push.result)

    # ---- calls ----------------------------------------------------------------------------------------------------------------

    def _uplink(self, name: str) -> Uplink:
        uplink = self._uplinks.get(name)
        if uplink is None:
            uplink = self._uplinks[name] = self._dial(name)
        return uplink

    def _dial(self, name: str) -> Uplink:
        return Uplink(f"127.0.0.1:{self._port}", SecurityConfig(), node=name, run=self._config.run, patience=ONCE)

    def _ask(self, call: Call, driver: Any) -> None:
        uplink, request = self._uplink(call.caller.name), call.request
        try:
            if isinstance(request, Join):
                answer: Any = uplink.join(request)
            elif isinstance(request, Heartbeat):
                answer = uplink.heartbeat(request)
            else:
                uplink.leave(request.node, request.incarnation)
                answer = Left()
        except Refused as refused:
            answer = refused
        self._on_server(lambda: None)
        self._answers()
        self._network.reply(call, answer)

    def _pull(self, call: Call, driver: Any) -> None:
        payload = bytearray()
        version = self._uplink(call.caller.name).pull(call.request.version, (), lambda offset, data: payload.extend(data))
        self._network.reply(call, Pulled(version, bytes(payload)), version.payload_bytes)

    def _offer(self, call: Call, driver: Any) -> None:
        offer = call.request
        geometry = Geometry.of_update(offer.header, driver.layout)
        size = sum(stop - start for start, stop in map(geometry.byte_range, offer.slice.intervals))
        push = self._current = Push(call, bytearray(size), self._life)
        self.pushes[id(push.payload)] = push
        threading.Thread(target=push.run, args=(self._uplink(call.caller.name),), daemon=True).start()
        answer = self._handled.get(timeout=WAIT_S)
        self._on_server(lambda: None)  # and what it did after that
        if isinstance(answer, Proceed) or (isinstance(answer, Receipt) and answer.state is State.STAGED):
            self._waiting[call] = None
            return
        assert push.done.wait(WAIT_S)
        self._network.reply(call, push.result)

    def _upload(self, call: Call, driver: Any) -> None:
        offer, push, payload, _ = call.request
        if push.done.is_set() or push.life != self._life:
            raise Refused(Reason.STALLED, f"{offer.header.update_id}: this stream was dropped")
        push.upload = call
        push.payload[:] = payload
        self._waiting[call] = None
        push.go.set()
        end = self._handled.get(timeout=WAIT_S)
        self._on_server(lambda: None)
        if isinstance(end, SliceRejected):
            assert push.done.wait(WAIT_S)
            del self._waiting[call]
            self._network.reply(call, push.result)

    # ---- news -----------------------------------------------------------------------------------------------------------------

    def listen(self, member: Any) -> None:
        if self._driver is None or member.name in self._streams:
            return
        stream = self._current = self._streams[member.name] = Stream(member, self._dial(member.name))
        registered = threading.Event()
        watch = self._driver.watch

        def watched(*args: Any) -> Any:
            watcher = watch(*args)
            registered.set()
            return watcher

        self._driver.watch = watched  # type: ignore[method-assign]
        threading.Thread(target=stream.run, args=(1,), daemon=True).start()
        assert registered.wait(WAIT_S)
        self._driver.watch = watch  # type: ignore[method-assign]
        self._on_server(lambda: None)
        self._settle()

    def unlisten(self, member: Any) -> None:
        stream = self._streams.pop(member.name, None)
        if stream is not None:
            stream.close()
