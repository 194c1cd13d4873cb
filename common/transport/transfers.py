"""The state of one pull or push that outlives its connections: what has moved, what comes next, whether anything moves at all."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

from fleetddp.common.checksum import checksum, joined
from fleetddp.common.errors import Reason, Refused, Unreachable
from fleetddp.common.events import ByteRange
from fleetddp.common.payload import Geometry
from fleetddp.common.transport import Sink, chunks, wire
from fleetddp.common.transport.chunks import ChunkBytes
from fleetddp.common.transport.limits import CHUNK_BYTES
from fleetddp.common.update import ProxyInfo, Receipt, Slice, Version
from fleetddp.protos import fleet_pb2 as pb

Outcome = TypeVar("Outcome", covariant=True)


class Transfer(Protocol):
    """What the retry loop needs to know of a transfer."""

    moved_at: float  # when it last made progress (time.monotonic)


class StallWatch:
    """Cancels a call when nothing has moved for ``stall_s``. A context: inside, a thread looks on."""

    def __init__(self, cancel: Callable[[], object], stall_s: float) -> None:
        self.fired = False
        self._cancel, self._stall_s = cancel, stall_s
        self._since: float | None = time.monotonic()  # None: not waiting for the network
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="fleetddp-stall", daemon=True)

    def moved(self) -> None:
        """Something moved; the wait for the next begins."""
        self._since = time.monotonic()

    def pause(self) -> None:
        """Nothing is due from the network until ``moved`` is called again."""
        self._since = None

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        left = self._stall_s
        while not self._over.wait(left):
            since = self._since
            left = self._stall_s if since is None else since + self._stall_s - time.monotonic()
            if left <= 0:
                self.fired = True
                self._cancel()
                return


class PullTransfer:
    """Byte ranges of one version on their way to a sink."""

    method = "Pull"

    def __init__(self, node: str, version: int, ranges: Sequence[ByteRange], sink: Sink) -> None:
        self.version = version  # -1 (the newest) becomes its number with the first answer: the rest must be of the same one
        self.done = 0  # bytes given to the sink
        self.moved_at = time.monotonic()
        self._node, self._sink = node, sink
        self._ranges = tuple(ranges)
        self._info: Version | None = None
        self._described = False  # whether this attempt's description came
        self._digest = 0  # CRC32C of what was given to the sink

    def request(self) -> pb.PullRequest:
        """Ask for what is missing: the first message of an attempt."""
        self._described = False
        return wire.pack_pull(self._node, self.version, skip(self._ranges, self.done))

    @property
    def complete(self) -> bool:
        """Whether the sink has all that was asked for."""
        return self._info is not None and self.done == total(self._ranges)

    def take(self, reply: pb.PullReply | ChunkBytes) -> None:
        """Check one message and give its bytes to the sink. Raises ``Refused`` where it is not the one that is due."""
        if not self._described:
            self._describe(reply)
        elif not isinstance(reply, ChunkBytes):
            raise Refused(Reason.MALFORMED, "a pull's messages after the first are chunks")
        else:
            chunk = chunks.checked(reply)
            deliver(self, self._ranges, self._sink, chunk, f"version {self.version}")
            self._digest = joined(self._digest, chunk.crc32c, len(chunk.data))

    def verified(self) -> Version:
        """The version's description, after the check of the whole payload's digest if all of it was pulled."""
        assert self._info is not None
        if total(self._ranges) == self._info.payload_bytes and self._digest != self._info.digest:
            raise Refused(
                Reason.BAD_CHECKSUM,
                f"version {self.version} arrived with CRC32C {self._digest:08x}, published with {self._info.digest:08x}",
            )
        return self._info

    def _describe(self, reply: pb.PullReply | ChunkBytes) -> None:
        if isinstance(reply, ChunkBytes) or not reply.HasField("version"):
            raise Refused(Reason.MALFORMED, "a pull's first message describes the version")
        info = wire.unpack_version(reply.version)
        if self._info is not None and (info.number, info.digest) != (self._info.number, self._info.digest):
            raise Refused(Reason.UNKNOWN_VERSION, f"version {self.version} became another (now {info.number}) in mid-transfer")
        self._info, self.version, self._described = info, info.number, True
        self._ranges = self._ranges or ((0, info.payload_bytes),)


class ProxyTransfer:
    """Byte ranges of a proxy set's file on their way to a sink."""

    method = "PullProxy"

    def __init__(self, node: str, ranges: Sequence[ByteRange], sink: Sink) -> None:
        self.done = 0  # bytes given to the sink
        self.moved_at = time.monotonic()
        self.info: ProxyInfo | None = None
        self._node, self._ranges, self._sink = node, tuple(ranges), sink
        self._described = False

    def request(self) -> pb.ProxyRequest:
        """Ask for what is missing: the first message of an attempt."""
        self._described = False
        return wire.pack_proxy_ask(self._node, skip(self._ranges, self.done))

    @property
    def complete(self) -> bool:
        """Whether the sink has all that was asked for."""
        return self.info is not None and self.done == total(self._ranges)

    def take(self, reply: pb.ProxyReply | ChunkBytes) -> None:
        """Check one message and give its bytes to the sink. Raises ``Refused`` where it is not the one that is due."""
        if self._described and isinstance(reply, ChunkBytes):
            deliver(self, self._ranges, self._sink, chunks.checked(reply), "the proxy set")
            return
        if self._described or isinstance(reply, ChunkBytes) or not reply.HasField("proxy"):
            raise Refused(Reason.MALFORMED, "a proxy set comes as its description, then chunks")
        info = wire.unpack_proxy(reply.proxy)
        if self.info not in (None, info):
            raise Refused(Reason.UNKNOWN_VERSION, f"the proxy set became another (now {info.digest[:12]}) in mid-transfer")
        self.info, self._described = info, True


class PushTransfer:
    """One stream of an update on its way to the parent."""

    def __init__(self, header: pb.PushHeader, payload: memoryview) -> None:
        self.header = header
        self.payload = payload.cast("B")
        self.moved_at = time.monotonic()
        self.ranges: tuple[ByteRange, ...] = ()  # of the canonical payload
        self.held = -1  # the most that the parent said it holds
        self._geometry: Geometry | None = None

    def place(self, geometry: Geometry, slice: Slice) -> None:
        """Learn where in the update's payload the stream lies. Raises ``Refused`` (``WRONG_INTERVALS``, ``WRONG_SIZE``)."""
        ranges = tuple(geometry.byte_range(i) for i in slice.intervals)
        if total(ranges) != len(self.payload):
            raise Refused(Reason.WRONG_SIZE, f"{len(self.payload)} bytes for intervals that take {total(ranges)}")
        self._geometry, self.ranges = geometry, ranges

    def attempt(self) -> PushAttempt:
        """A fresh try, to continue from what the parent will say it holds."""
        return PushAttempt(self)

    def chunks(self, held: int) -> Iterator[bytes]:
        """What comes after the first ``held`` bytes of the stream, cut on codec blocks and packed."""
        assert self._geometry is not None
        at = held
        for start, stop in self._geometry.chunks(skip(self.ranges, held), CHUNK_BYTES):
            yield chunks.pack(start, self.payload[at : at + stop - start])
            at += stop - start


class Attempt(Protocol[Outcome]):
    """One call that sends in a stream: ``requests`` runs in grpc's sending thread, the rest in the caller's."""

    watch: StallWatch

    def requests(self) -> Iterator[Any]:
        """What is sent, as far as the parent's answers allow."""
        ...

    def take(self, reply: Any) -> Outcome | None:
        """One answer: the outcome, or None while there is more to come."""
        ...

    def end(self) -> None:
        """The call is over: let the sending thread go."""
        ...


class PushAttempt:
    """One call: ``requests`` runs in grpc's sending thread, the rest in the caller's."""

    watch: StallWatch

    def __init__(self, transfer: PushTransfer) -> None:
        self._transfer = transfer
        self._held: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # the answer to the header; None: the call is over
        self._fresh = False  # whether the parent holds more than ever before: sending the same bytes again is no progress

    def requests(self) -> Iterator[pb.PushRequest | bytes]:
        """The header, then the missing chunks, each made when grpc has taken the one before."""
        transfer = self._transfer
        yield pb.PushRequest(header=transfer.header)
        held = self._held.get()
        if held is None:
            return
        for chunk in transfer.chunks(held):
            yield chunk
            self.watch.moved()
            if self._fresh:
                transfer.moved_at = time.monotonic()
        self.watch.pause()  # the receipt comes when the update's other streams are there too: no matter when

    def take(self, reply: pb.PushReply) -> Receipt | None:
        """One answer: the receipt, or None while there is more to come."""
        if reply.WhichOneof("what") == "receipt":
            return wire.unpack_receipt(reply.receipt)
        transfer, held = self._transfer, reply.held.bytes
        if held > len(transfer.payload):
            raise Unreachable(f"the parent says it holds {held} bytes of a stream of {len(transfer.payload)}")
        self._fresh = held > transfer.held
        transfer.held = max(held, transfer.held)
        self.watch.moved()
        self._held.put(held)
        return None

    def end(self) -> None:
        """The call is over: let the sending thread go."""
        self._held.put(None)


class _Delivering(Protocol):
    done: int
    moved_at: float


def deliver(transfer: _Delivering, ranges: Sequence[ByteRange], sink: Sink, chunk: ChunkBytes, what: str) -> None:
    """Give the next bytes of ``ranges`` to the sink; ``Refused`` where they are not those due, or damaged."""
    offset, crc, data = chunk
    start, stop = next(iter(skip(ranges, transfer.done)), (0, 0))
    if offset != start or len(data) > stop - start:
        raise Refused(Reason.OUT_OF_ORDER, f"bytes [{offset}, {offset + len(data)}) came where [{start}, {stop}) are due")
    if checksum(data) != crc:
        raise Refused(Reason.BAD_CHECKSUM, f"bytes [{offset}, {offset + len(data)}) of {what}")
    sink(offset, data)
    transfer.done += len(data)
    transfer.moved_at = time.monotonic()


def skip(ranges: Iterable[ByteRange], count: int) -> tuple[ByteRange, ...]:
    """What is left of ``ranges`` after their first ``count`` bytes."""
    left = []
    for start, stop in ranges:
        passed = min(count, stop - start)
        count -= passed
        if passed < stop - start:
            left.append((start + passed, stop))
    return tuple(left)


def total(ranges: Iterable[ByteRange]) -> int:
    """Bytes in all ranges together."""
    return sum(stop - start for start, stop in ranges)
