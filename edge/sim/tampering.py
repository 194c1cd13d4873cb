"""What faults do: to messages on their way, and to the updates of Byzantine members."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import google_crc32c
import torch

from fleetddp.common.checksum import checksum
from fleetddp.common.codecs import get
from fleetddp.common.errors import Reason, Refused, Unreachable
from fleetddp.common.events import SliceStaged
from fleetddp.common.files import Data
from fleetddp.common.payload import Geometry, bytes_of, tensor_over
from fleetddp.common.staging import Stream
from fleetddp.common.update import Kind, UpdateId, Version
from fleetddp.edge.sim.calls import Call, Held, Network, Pulled, Upload
from fleetddp.edge.sim.faults import Faults, Lie
from fleetddp.edge.sim.learning import Learning, Parcel, Unit, Weights
from fleetddp.edge.sim.loop import EventLoop
from fleetddp.edge.sim.network import Path

GHOST_S = 0.5  # that each further message takes of a push that is made again


class _Ghost:
    """Sends a member's message once more. Nobody hears the answer."""

    life = 0

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path


class _Doubtful(Stream):
    """In ``timing`` mode, where no bytes can be wrong: a slice of which the staging area will say so."""

    def __init__(self, stream: Any, outcome: Callable[[SliceStaged], SliceStaged]) -> None:
        self._stream, self._outcome = stream, outcome
        self.held = stream.held

    def write(self, offset: int, crc32c: int, data: Data) -> None:
        raise AssertionError("no bytes travel in timing mode")

    def finish(self) -> SliceStaged:
        return self._outcome(self._stream.finish())


class FaultyNetwork(Network):
    """A network in which messages meet their fate. ``sent`` hears of each update's payload as its sender meant it."""

    def __init__(self, loop: EventLoop, progress_s: float, faults: Faults) -> None:
        super().__init__(loop, progress_s)
        self.sent: Callable[[UpdateId, memoryview], None] = lambda update_id, payload: None
        self._faults = faults
        self._held: dict[tuple[str, bool], tuple[Call, Callable[[Call], None]]] = {}

    def call(self, caller: Any, request: Any, then: Callable[[Any], None], size: int = 0) -> None:
        """See ``Network``."""
        if type(request) is Upload:
            self.sent(request.offer.header.update_id, request.payload)
            lie = self._faults.lies.get(caller.name)
            if lie is not None and not request.payload:
                request = request._replace(stream=_Doubtful(request.stream, lambda staged: _lied(staged, lie)))
        super().call(caller, request, then, size)

    def send(self, call: Call, up: bool, deliver: Callable[[Call], None]) -> float:
        """See ``Network``."""
        if isinstance(call.caller, _Ghost):
            self._loop.after(GHOST_S, deliver, call)
            return self._loop.now() + GHOST_S
        name, key = call.caller.name, (call.caller.name, up)
        due = self.arrival(call, up)
        fate = self._faults.fate(name, type(call.request if up else call.answer).__name__, due)
        if fate == "drop":
            return self._drop(call)
        if fate == "duplicate" and up:
            self._loop.at(due + self._faults.delay_s(name), self._haunt, call)
        elif fate == "corrupt":
            self._corrupt(call, up)
        elif fate == "delay":
            due += self._faults.delay_s(name)
        if fate == "reorder" and key not in self._held:
            self._held[key] = call, deliver
            due += self._faults.delay_s(name)
            self._loop.at(due, self._overdue, (key, call))
            return due
        self._loop.at(due, deliver, call)
        overtaken = self._held.pop(key, None)
        if overtaken is not None:
            self._loop.at(due, overtaken[1], overtaken[0])
        return due

    def _overdue(self, what: tuple[tuple[str, bool], Call]) -> None:
        """No other message came that could have overtaken it."""
        key, call = what
        held = self._held.get(key)
        if held is not None and held[0] is call:
            del self._held[key]
            held[1](call)

    def _drop(self, call: Call) -> float:
        call.answer, call.size = Unreachable("the connection broke"), 0
        self._loop.after(self._faults.config.messages.timeout_s, self._at_member, call)
        return math.inf

    # ---- again ----------------------------------------------------------------------------------------------------------------

    def _haunt(self, call: Call) -> None:
        """A request comes again; an upload, as a push from its beginning."""
        ghost, request = _Ghost(call.caller.name, call.caller.path), call.request
        if type(request) is not Upload:
            self.root.receive(Call(ghost, request, _unheard, 0))
            return
        payload = request.payload if request.sent is None else request.sent

        def upload(answer: Any) -> None:
            if isinstance(answer, Held):
                self.call(ghost, Upload(request.offer, answer.stream, payload), _unheard, call.size)

        self.root.receive(Call(ghost, request.offer, upload, 0))

    # ---- damage ---------------------------------------------------------------------------------------------------------------

    def _corrupt(self, call: Call, up: bool) -> None:
        stream = self._faults.stream(call.caller.name)
        if up and type(call.request) is Upload:
            request = call.request
            if not request.payload:
                call.request = request._replace(stream=_Doubtful(request.stream, _damaged))
                return
            on_the_wire = stream.random() < 0.5  # else in the sender's memory: only the slice's digest tells
            damaged = _with_a_wrong_byte(request.payload, stream.randrange(len(request.payload)))
            call.request = request._replace(payload=damaged, sent=request.payload if on_the_wire else None)
        elif not up and type(call.answer) is Pulled:
            version, payload = call.answer
            damaged = _with_a_wrong_byte(memoryview(payload), stream.randrange(len(payload))) if payload else memoryview(b"")
            # The uplink compares.
            if not payload or google_crc32c.value(bytes(damaged)) != version.digest:
                call.answer = Refused(Reason.BAD_CHECKSUM, f"version {version.number} arrived damaged")


def _unheard(answer: Any) -> None:
    """Nobody waits for it."""


def _with_a_wrong_byte(payload: memoryview, at: int) -> memoryview:
    damaged = bytearray(payload)
    damaged[at] ^= 0x55
    return memoryview(damaged)


def _damaged(staged: SliceStaged) -> SliceStaged:
    raise Refused(Reason.BAD_CHECKSUM, f"{staged.update_id}: a byte was changed on the way")


def _lied(staged: SliceStaged, lie: Lie) -> SliceStaged:
    if lie.kind == "nan":
        raise Refused(Reason.NOT_FINITE, f"{staged.update_id}: element 0 is nan")
    return replace(staged, squared_norm=staged.squared_norm * lie.factor**2) if lie.kind == "scale" else staged


class Byzantine:
    """A ``Learning`` some of whose members lie. What comes out is a well-formed payload; a lie is no damage."""

    def __init__(self, learning: Learning, lies: Mapping[str, Lie]) -> None:
        self.layout = learning.layout
        self._learning, self._lies = learning, lies

    def adopt(self, version: Version, payload: bytes) -> Weights:
        """See ``Learning``."""
        return self._learning.adopt(version, payload)

    def train(self, member: str, start: Weights, unit: Unit) -> Weights:
        """See ``Learning``."""
        return self._learning.train(member, start, unit)

    def evaluate(self, version: Version, payload: bytes) -> Mapping[str, float]:
        """See ``Learning``."""
        return self._learning.evaluate(version, payload)

    def encode(self, member: str, kind: Kind, codec: str, start: Weights, end: Weights, residual: Weights) -> Parcel:
        """See ``Learning``."""
        parcel = self._learning.encode(member, kind, codec, start, end, residual)
        lie = self._lies.get(member)
        if lie is None or kind is Kind.INIT or not parcel.payload:
            return parcel
        payload = self._twisted(parcel.payload, lie, Geometry(self.layout, get(codec), buffers=kind is not Kind.GRADIENT))
        return parcel._replace(payload=payload, digest=checksum(payload))

    def _twisted(self, payload: memoryview, lie: Lie, geometry: Geometry) -> memoryview:
        twisted = bytearray(payload)
        interval = geometry.required()[0]  # the parameters
        start, stop = geometry.byte_range(interval)
        if lie.kind == "nan":
            stop = min(stop, start + geometry.codec.block_bytes)
            twisted[start:stop] = b"\xff" * (stop - start)  # in every codec not a number, or an index that is none
            return memoryview(twisted)
        values = geometry.decode(tensor_over(bytes(payload[start:stop])), interval)
        bound = torch.finfo(torch.float32).max / 4
        values = (-values if lie.kind == "sign_flip" else values * lie.factor).clamp(-bound, bound)
        twisted[start:stop] = bytes_of(geometry.encode(values, interval))
        return memoryview(twisted)
