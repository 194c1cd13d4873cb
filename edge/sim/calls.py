"""Calls between members and the root: every message, in either direction, passes ``Network.send``.

A call is a request and its answer, each of which takes its time on the member's path. As over gRPC, a call always ends: with the
answer, or with ``Unreachable`` when the root is down or the connection broke. Who has crashed since hears nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from fleetddp.common.errors import Unreachable
from fleetddp.common.events import Offer
from fleetddp.common.staging import Stream
from fleetddp.common.update import Version
from fleetddp.edge.sim.loop import EventLoop
from fleetddp.edge.sim.network import Path


class Pull(NamedTuple):
    """Asks for a version's bytes."""

    version: int


class Pulled(NamedTuple):
    """The answer: what it is, and its payload (empty in ``timing`` mode, where only its size counts)."""

    version: Version
    payload: bytes


class Held(NamedTuple):
    """The answer to an Offer that may proceed; the upload that follows brings its bytes to ``stream``."""

    stream: Stream


class Upload(NamedTuple):
    """The bytes of an offered slice, from its beginning. In ``timing`` mode they are only counted."""

    offer: Offer
    stream: Stream
    payload: memoryview
    sent: memoryview | None = None  # what ``payload`` was before the network damaged it, and what its checksums are of


class Caller(Protocol):
    """A member, as the network sees it."""

    name: str
    path: Path
    life: int  # a new number each time it starts or stops: what was meant for an earlier life is not delivered


class Root(Protocol):
    """The other end."""

    def receive(self, call: Call) -> None:
        """Answer it, now or later, by ``Network.reply`` or ``Network.fail``."""
        ...

    def progressed(self, call: Call) -> None:
        """More bytes of an upload have arrived."""
        ...


class Call:
    """One call in flight."""

    __slots__ = ("answer", "caller", "due", "life", "over", "request", "size", "then")

    def __init__(self, caller: Caller, request: Any, then: Callable[[Any], None], size: int) -> None:
        self.caller = caller
        self.life = caller.life
        self.request = request
        self.then = then
        self.answer: Any = None
        self.size = size  # payload bytes of the message now on its way; a message without any takes one latency
        self.due = math.inf  # when that arrives
        self.over = False


class Network:
    """Carries messages. Bytes are those of payloads, as encoded, that have arrived."""

    def __init__(self, loop: EventLoop, progress_s: float) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.root: Root
        self._loop = loop
        self._progress_s = progress_s  # how often the root is told of an upload's progress

    def call(self, caller: Caller, request: Any, then: Callable[[Any], None], size: int = 0) -> None:
        """Send a request; ``then`` gets the answer, or an exception that says why there is none."""
        call = Call(caller, request, then, size)
        due = call.due = self.send(call, True, self._at_root)
        if size and self._loop.now() + self._progress_s < due < math.inf:
            self._loop.after(self._progress_s, self._progress, call)

    def reply(self, call: Call, answer: Any, size: int = 0) -> None:
        """Send the answer of a call."""
        call.answer, call.size = answer, size
        call.due = self.send(call, False, self._at_member)

    def fail(self, call: Call, why: str) -> None:
        """There will be no answer; the caller notices."""
        self.reply(call, Unreachable(why))

    def tell(self, caller: Caller, then: Callable[[Any], None], news: Any) -> None:
        """Send something that was not asked for (news of a watch stream)."""
        self.reply(Call(caller, None, then, 0), news)

    def send(self, call: Call, up: bool, deliver: Callable[[Call], None]) -> float:
        """The one way of every message: ``call`` with its request (up) or its answer is given to ``deliver`` when it has arrived.

        Returns when that is; infinity if never. Faults override this: a message that is dropped is a call that fails, a
        duplicate is delivered again, a late one is delivered later.
        """
        due = self.arrival(call, up)
        self._loop.at(due, deliver, call)
        return due

    def arrival(self, call: Call, up: bool) -> float:
        """When what is sent now arrives, if nothing happens to it."""
        path, now = call.caller.path, self._loop.now()
        if not call.size:  # most are
            return path.message(now)
        return path.upload(now, call.size) if up else path.download(now, call.size)

    def _at_root(self, call: Call) -> None:
        if call.size:
            if call.life != call.caller.life:  # its sender stopped before all was sent
                return
            self.bytes_up += call.size
        self.root.receive(call)

    def _at_member(self, call: Call) -> None:
        if call.life != call.caller.life or call.over:
            return
        call.over = True
        self.bytes_down += call.size
        call.then(call.answer)

    def _progress(self, call: Call) -> None:
        now = self._loop.now()
        if call.life != call.caller.life or call.answer is not None:
            return
        if call.caller.path.is_open(now):
            self.root.progressed(call)
        if now + self._progress_s < call.due:
            self._loop.after(self._progress_s, self._progress, call)
