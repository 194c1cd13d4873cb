"""The gRPC face of an aggregator: grpc.aio calls in, a ``Driver`` for each track behind them, all on one event loop.

The loop moves messages and stages what arrives; reading a version's bytes happens in a few threads, and what must be durable goes
through the driver's lanes (``host.py``). A refusal ends its call with the reason's status, the message as details and the
reason in the trailing metadata; nothing that one call does ends another.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from fleetddp.common import security
from fleetddp.common.config import FleetConfig
from fleetddp.common.driver import Driver, answered
from fleetddp.common.errors import REASONS, ConfigError, Reason, Refused, StorageError
from fleetddp.common.events import Heard, Joined, Left, Offer, Proceed, Say, Share, SliceRejected, SliceStaged
from fleetddp.common.staging import Stream
from fleetddp.common.transport import chunks, items, limits, offers, wire
from fleetddp.common.transport.item_calls import ItemCalls, store_of
from fleetddp.common.transport.tracks import Tracks
from fleetddp.common.update import NO_VERSION, Interval, Receipt, State
from fleetddp.protos import fleet_pb2 as pb

T = TypeVar("T")
Call = Callable[[Any, Any], Awaitable[Any]]  # (request, or its stream; the call's context) -> reply, or None of a stream

BYTE_THREADS = 4  # that read versions, and store arriving bytes while the disk is slow
SLOW_S = 0.05  # a chunk that takes longer to store finds a slow disk
CAREFUL_S = 10.0  # for so long after that, its stream's chunks are stored off the loop
WINDOW_BYTES = 3 * 2**19  # of one stream, received and not yet read: what bounds the memory that N streams can take

_OPTIONS = [
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.max_frame_size", 2**20),  # a chunk in one frame, not in 32
    ("grpc.http2.bdp_probe", 0),  # it would widen the window of each stream to many megabytes
    ("grpc.so_reuseport", 0),  # a second coordinator on this port must fail, not share its members
    # Members behind NAT ping to keep their way open; a server's default would end their connection for it.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]

_log = logging.getLogger(__name__)


class Readable(Protocol):
    """What bytes are sent from."""

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop)."""
        ...


class Server:
    """The service of protos/fleet.proto over the drivers of its tracks. Made, started and stopped on its event loop."""

    def __init__(self, drivers: Mapping[str, Driver], config: FleetConfig) -> None:
        self._tracks = Tracks(drivers)
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(BYTE_THREADS, thread_name_prefix="fleet-bytes")
        self._items = ItemCalls()
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers((self._handlers(),))

    async def start(self) -> int:
        """Listen; returns the port. Raises ``ConfigError`` when the address cannot be had, or plaintext would be seen."""
        address = self._config.coordinator.listen or self._config.coordinator.address
        security.check_plaintext(address, self._config.security)
        credentials = security.server_credentials(self._config.security)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        return int(port)

    async def stop(self, grace: float) -> None:
        """Take no new calls; those open may end within ``grace`` seconds."""
        await self._server.stop(grace)
        await self._loop.run_in_executor(None, self._threads.shutdown)
        await self._loop.run_in_executor(None, self._items.close)

    def _handlers(self) -> Any:
        unary, download, both = (
            grpc.unary_unary_rpc_method_handler,
            grpc.unary_stream_rpc_method_handler,
            grpc.stream_stream_rpc_method_handler,
        )
        table: dict[str, tuple[Any, Call, Any]] = {
            "Join": (unary, self._join, pb.JoinRequest.FromString),
            "Heartbeat": (unary, self._heartbeat, pb.HeartbeatRequest.FromString),
            "Leave": (unary, self._leave, pb.LeaveRequest.FromString),
            "Status": (unary, self._status, pb.StatusRequest.FromString),
            "GetLayout": (unary, self._layout, pb.LayoutRequest.FromString),
            "Pull": (download, self._pull, pb.PullRequest.FromString),
            "PullProxy": (download, self._pull_proxy, pb.ProxyRequest.FromString),
            "PullItems": (download, self._pull_items, pb.ItemsRequest.FromString),
            "Share": (both, self._share, chunks.deserializer(pb.ShareRequest)),
            "Withdraw": (unary, self._withdraw, pb.WithdrawRequest.FromString),
            "Push": (both, self._push, chunks.deserializer(pb.PushRequest)),
            "Watch": (download, self._watch, pb.WatchRequest.FromString),
        }
        methods = {name: kind(self._with_status(call), parse, chunks.serialize) for name, (kind, call, parse) in table.items()}
        return grpc.method_handlers_generic_handler(chunks.SERVICE, methods)

    def _with_status(self, call: Call) -> Call:
        """Turn what a call raises into its status."""

        async def with_status(request: Any, context: Any) -> Any:
            try:
                return await call(request, context)
            except Refused as error:
                refusal = self._tracks.explain(error)
            except StorageError as error:
                refusal = Refused(Reason.STORAGE, str(error))
            except Exception as error:
                _log.exception("%s failed", call.__name__)
                self._tracks.first.telemetry.count("failed")
                return await context.abort(grpc.StatusCode.INTERNAL, limits.text(f"the coordinator failed on this: {error!r}"))
            status = getattr(grpc.StatusCode, REASONS[refusal.reason].status)
            return await context.abort(status, limits.text(refusal.message), ((wire.REASON_KEY, refusal.reason.value),))

        return with_status

    def _off_loop(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._threads, work, *args)

    def _admit(
        self, unpack: Callable[[Any], T], message: Any, context: Any, node: Callable[[T], str] = attrgetter("node")
    ) -> tuple[Driver, T]:
        """Check a message and who sent it: its certificate must name the node it speaks for, and its track's members allow that.

        Returns the track's driver with what was asked.
        """
        claimed, driver = "", self._tracks.first
        try:
            asked = unpack(message)
            claimed = node(asked)
            proven = security.node_id(context.auth_context())
            if proven is not None and proven != claimed:
                raise Refused(Reason.WRONG_IDENTITY, f"the certificate is of {proven!r}; the call claims to be {claimed!r}")
            driver = self._tracks.driver(_track_of(message))
            if not any(fnmatch.fnmatchcase(claimed, pattern) for pattern in driver.config.members.allow):
                raise Refused(Reason.WRONG_IDENTITY, f"{claimed!r} matches no pattern of members.allow")
        except Refused as error:
            # The aggregator never hears of it.
            driver.telemetry.say(Say(what="refused", message=str(error), node=claimed, reason=error.reason))
            raise
        return driver, asked

    # ---- control calls ----------------------------------------------------------------------------------------------------

    async def _join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        driver, join = self._admit(wire.unpack_join, request, context)
        return wire.pack_joined(driver.ask(join, Joined))

    async def _heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:
        driver, heartbeat = self._admit(wire.unpack_heartbeat, request, context)
        return wire.pack_heard(driver.ask(heartbeat, Heard))

    async def _leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:
        driver, leave = self._admit(wire.unpack_leave, request, context)
        driver.ask(leave, Left)
        return pb.LeaveReply()

    async def _status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        return pb.StatusReply(json=json.dumps(self._tracks.status(_track_of(request))).encode())

    async def _layout(self, request: pb.LayoutRequest, context: Any) -> pb.LayoutReply:
        layout = self._tracks.driver(_track_of(request)).layout
        if layout is None:
            raise Refused(Reason.NO_VERSION, "the run has no layout yet: it waits for the first weights")
        return pb.LayoutReply(json=layout.to_json())

    async def _watch(self, request: pb.WatchRequest, context: Any) -> None:
        driver, ask = self._admit(wire.unpack_watch, request, context)
        wake = asyncio.Event()
        watcher = driver.watch(ask.node, ask.after_version, wake.set)
        try:
            finished = False
            while not finished:
                await wake.wait()
                wake.clear()
                if (news := watcher.take()) is not None:
                    await context.write(wire.pack_news(news))
                    finished = bool(news.finished)
        finally:
            driver.unwatch(watcher)

    # ---- versions ---------------------------------------------------------------------------------------------------------

    async def _pull(self, request: pb.PullRequest, context: Any) -> None:
        driver, ask = self._admit(wire.unpack_pull, request, context)
        if driver.version == NO_VERSION:
            raise Refused(Reason.NO_VERSION, "no version is published yet: the run waits for the first weights")
        number = driver.version if ask.version == NO_VERSION else ask.version
        reader = await self._off_loop(driver.journal.read_version, number)
        try:
            size = reader.info.payload_bytes
            ranges = ask.ranges or ((0, size),)
            if ranges[-1][1] > size:
                raise Refused(Reason.WRONG_INTERVALS, f"bytes up to {ranges[-1][1]} asked for; version {number} has {size}")
            await context.write(pb.PullReply(version=wire.pack_version(reader.info)))
            await self._send(reader, ranges, context, driver)
        finally:
            reader.close()

    async def _pull_proxy(self, request: pb.ProxyRequest, context: Any) -> None:
        driver, ask = self._admit(wire.unpack_proxy_ask, request, context)
        shelf = driver.shelf
        if shelf is None:
            raise Refused(Reason.NO_PROXY, "this track has no proxy set, or only its name (proxy.file in the fleet file)")
        reader = await self._off_loop(shelf.open)
        try:
            if ask.ranges and ask.ranges[-1][1] > reader.size:
                raise Refused(Reason.WRONG_INTERVALS, f"bytes up to {ask.ranges[-1][1]} asked for; the file has {reader.size}")
            await context.write(pb.ProxyReply(proxy=wire.pack_proxy(shelf.info)))
            await self._send(reader, ask.ranges, context, driver)
        finally:
            reader.close()

    async def _pull_items(self, request: pb.ItemsRequest, context: Any) -> None:
        driver, ask = self._admit(items.unpack_items_ask, request, context)
        store = store_of(driver)
        catalogue = await self._off_loop(store.catalogue, ask.pool, ask.known, driver.version)
        await context.write(pb.ItemsReply(items=items.pack_catalogue(catalogue)))
        if ask.ranges and ask.pool != catalogue.pool:
            raise Refused(Reason.ITEM_GONE, f"the items asked for are of another pool than {catalogue.pool}")
        await self._send(store, ask.ranges, context, driver)

    async def _share(self, requests: Any, context: Any) -> None:
        driver, offer = self._admit(_unpack_offer, await context.read(), context)
        await self._items.share(driver, offer, context)

    async def _withdraw(self, request: pb.WithdrawRequest, context: Any) -> pb.WithdrawReply:
        driver, share = self._admit(items.unpack_withdraw, request, context)
        return await self._items.withdraw(driver, share)

    async def _send(self, reader: Readable, ranges: tuple[Interval, ...], context: Any, driver: Driver) -> None:
        """The bytes of ``ranges``; the next chunk is read while one is sent."""
        reading: asyncio.Future[bytes] | None = None
        try:
            for start, stop in _cut(ranges):
                ready, reading = reading, self._off_loop(_read_chunk, reader, start, stop)
                await self._send_chunk(ready, context, driver)
            await self._send_chunk(reading, context, driver)
        finally:
            if reading is not None:
                await asyncio.wait({reading})  # the reader is closed next

    async def _send_chunk(self, reading: asyncio.Future[bytes] | None, context: Any, driver: Driver) -> None:
        if reading is not None:
            message = await reading
            await context.write(message)
            driver.telemetry.bytes_out(len(message))

    # ---- updates ----------------------------------------------------------------------------------------------------------

    async def _push(self, requests: Any, context: Any) -> None:
        driver, offer = self._admit(_unpack_first, await context.read(), context, lambda offer: offer.header.update_id.node)
        settled: asyncio.Future[Receipt] = self._loop.create_future()
        forget = driver.wait(offer.header.update_id, lambda receipt: _resolve(settled, receipt))
        try:
            answer = driver.handle(offer)
            if isinstance(answer, Proceed):
                answer = await self._ingest(driver, offer, context, settled)
            elif isinstance(answer, Receipt) and answer.state is State.STAGED:  # a repeat of one that is being made durable
                answer = replace(await settled, duplicate=True)
        finally:
            forget()
        if isinstance(answer, Refused):
            raise answer
        if not isinstance(answer, Receipt):
            raise TypeError(f"an offer was answered with {answer!r}")
        await context.write(pb.PushReply(receipt=wire.pack_receipt(answered(answer))))

    async def _ingest(self, driver: Driver, offer: Offer, context: Any, settled: asyncio.Future[Receipt]) -> Receipt:
        """Take one stream's bytes, then wait until the update that it belongs to is durable, or refused."""
        try:
            staged = await self._receive(driver, offer, context, settled)
        except Refused as refusal:
            rejected = SliceRejected(update_id=offer.header.update_id, slice=offer.slice, refusal=refusal)
            driver.handle(rejected)
            raise
        if staged is not None:
            driver.handle(staged)
        return await settled

    async def _receive(self, driver: Driver, offer: Offer, context: Any, settled: asyncio.Future[Receipt]) -> SliceStaged | None:
        """The stream's bytes, checked and stored; None when the update was settled meanwhile (dropped, superseded)."""
        opening: asyncio.Future[Stream] = self._loop.create_future()
        driver.open(offer, lambda outcome: _resolve(opening, outcome))
        stream = await opening
        await context.write(pb.PushReply(held=pb.Held(bytes=stream.held)))
        stall_s = driver.config.members.stall_s
        transfer = _Transfer(driver, offer, stream, self._off_loop)
        receiving = asyncio.ensure_future(transfer.run(context))
        stalling = asyncio.ensure_future(transfer.stalled(stall_s))
        try:
            ends: set[asyncio.Future[Any]] = {receiving, stalling, settled}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if settled.done():
                return None
            if receiving.done():
                return receiving.result()
            raise Refused(Reason.STALLED, f"{offer.header.update_id}: no byte came for {stall_s:g} s")
        finally:
            stalling.cancel()
            receiving.cancel()
            await asyncio.wait(ends - {settled})


class _Transfer:
    """One push stream's bytes on their way from the network to the staging area.

    Chunks are stored on the loop: into the page cache that takes a fraction of what handing them to a thread costs. Only
    while the disk is slow do they go through a thread, so that the fleet's other calls do not wait for it.
    """

    def __init__(self, driver: Driver, offer: Offer, stream: Stream, off_loop: Callable[..., asyncio.Future[Any]]) -> None:
        self._driver = driver
        self._update_id = offer.header.update_id
        self._stream = stream
        self._off_loop = off_loop
        self._loop = asyncio.get_running_loop()
        self._moved_at = self._loop.time()
        self._slow_until = 0.0

    async def run(self, context: Any) -> SliceStaged:
        """Receive and store until the sender is done."""
        while request := await context.read():  # the end of the stream is false
            chunk = _unpack_next(request)
            begun = self._loop.time()
            if begun < self._slow_until:
                await self._off_loop(self._stream.write, *chunk)
            else:
                self._stream.write(*chunk)
            self._moved_at = self._loop.time()
            if self._moved_at - begun > SLOW_S:
                self._slow_until = self._moved_at + CAREFUL_S
            self._driver.arrived(self._update_id, len(chunk.data))
        return self._stream.finish()

    async def stalled(self, seconds: float) -> None:
        """Return once no byte came for so long."""
        while (idle := self._loop.time() - self._moved_at) < seconds:
            await asyncio.sleep(seconds - idle)


def _resolve(future: asyncio.Future[T], outcome: T | Exception) -> None:
    if future.done():  # its call was cancelled
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _track_of(request: Any) -> str:
    """That a message names; of a stream its header."""
    return limits.run(request.header.track if isinstance(request, (pb.PushRequest, pb.ShareRequest)) else request.track, "track")


def _unpack_first(request: Any) -> Offer:
    if not isinstance(request, pb.PushRequest) or not request.HasField("header"):
        raise Refused(Reason.MALFORMED, "a push begins with a header")
    return offers.unpack(request.header)


def _unpack_next(request: Any) -> chunks.ChunkBytes:
    if not isinstance(request, chunks.ChunkBytes):
        raise Refused(Reason.MALFORMED, "after its header a push holds nothing but chunks")
    return chunks.checked(request)


def _cut(ranges: Iterable[Interval]) -> Iterator[Interval]:
    """Byte ranges cut to chunks."""
    for start, stop in ranges:
        for begin in range(start, stop, limits.CHUNK_BYTES):
            yield begin, min(begin + limits.CHUNK_BYTES, stop)


def _unpack_offer(request: Any) -> Share:
    if not isinstance(request, pb.ShareRequest) or not request.HasField("header"):
        raise Refused(Reason.MALFORMED, "an offer of samples begins with a header")
    return items.unpack_share(request.header)


def _read_chunk(reader: Readable, start: int, stop: int) -> bytes:
    return chunks.pack(start, reader.read(start, stop))
