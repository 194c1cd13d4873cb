"""A small parent written against fleet.proto alone, on grpc's own synchronous server: what the uplink is tested against.

It serves one version and stages pushes in memory. ``script`` makes it misbehave: each call takes the next entry under its
method's name, a function of (request, context) that runs before the call is answered and may abort it.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google_crc32c
import grpc

from fleetddp.common.errors import REASONS, Reason
from fleetddp.common.layout import Layout
from fleetddp.protos import fleet_pb2 as pb
from fleetddp.protos.fleet_pb2_grpc import FleetServicer, add_FleetServicer_to_server

CHUNK = 64 * 1024


def abort(context: Any, reason: Reason, message: str = "as scripted") -> None:
    """End a call as a coordinator does."""
    context.abort_with_status(
        _Status(getattr(grpc.StatusCode, REASONS[reason].status), message, (("fleet-reason", reason.value),))
    )


class _Status(grpc.Status):
    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str], ...]) -> None:
        self.code, self.details, self.trailing_metadata = code, details, trailing_metadata


class RawFleet(FleetServicer):
    """The servicer; ``serve`` runs it."""

    def __init__(self, layout: Layout, payload: bytes = b"", number: int = 5) -> None:
        self.layout, self.payload = layout, payload
        self.info = pb.VersionInfo(
            number=number,
            codec="float32",
            payload_bytes=len(payload),
            digest=google_crc32c.value(payload),
            layout=layout.fingerprint,
        )
        self.calls: list[tuple[str, Any]] = []  # method and request (of a push: its header)
        self.script: dict[str, deque[Callable[[Any, Any], object]]] = defaultdict(deque)
        self.changed = threading.Condition()
        self.staged: dict[str, bytearray] = defaultdict(bytearray)  # bytes of each push stream, by "id intervals"
        self.chunks: list[tuple[int, int]] = []  # (offset, size) of every chunk staged
        self.news: deque[pb.News] = deque()
        self.damage: Callable[[pb.Chunk], None] = lambda chunk: None  # done to every chunk served
        self.known = True  # whether the member has joined
        self.settled: pb.Receipt | None = None  # the answer to any offer from now on

    def requests(self, method: str) -> list[Any]:
        return [request for name, request in self.calls if name == method]

    def note(self, method: str, request: Any, context: Any) -> None:
        with self.changed:
            self.calls.append((method, request))
            self.changed.notify_all()
            step = self.script[method].popleft() if self.script[method] else None
        if step is not None:
            step(request, context)

    def tell(self, news: pb.News) -> None:
        with self.changed:
            self.news.append(news)
            self.changed.notify_all()

    # ---- control --------------------------------------------------------------------------------------------------------------

    def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:  # noqa: N802
        self.note("Join", request, context)
        self.known = True
        return pb.JoinReply(
            run="fleet",
            version=self.info.number,
            layout=self.layout.fingerprint,
            heartbeat_s=1000.0,
            lease_s=2000.0,
            gradient_lr=0.01,
            max_staleness=10,
            codecs=["float32"],
        )

    def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:  # noqa: N802
        self.note("Heartbeat", request, context)
        if not self.known:
            abort(context, Reason.UNKNOWN_NODE)
        return pb.HeartbeatReply(version=self.info.number, closes_at=12.5)

    def Leave(self, request: pb.LeaveRequest, context: Any) -> pb.LeaveReply:  # noqa: N802
        self.note("Leave", request, context)
        return pb.LeaveReply()

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:  # noqa: N802
        self.note("Status", request, context)
        return pb.StatusReply(json=json.dumps({"version": self.info.number}).encode())

    def GetLayout(self, request: pb.LayoutRequest, context: Any) -> pb.LayoutReply:  # noqa: N802
        self.note("GetLayout", request, context)
        return pb.LayoutReply(json=self.layout.to_json())

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.News]:  # noqa: N802
        self.note("Watch", request, context)
        context.add_callback(self._wake)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.news or not context.is_active())
                if not context.is_active():
                    return
                news = self.news.popleft()
            yield news

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    # ---- bytes ----------------------------------------------------------------------------------------------------------------

    def Pull(self, request: pb.PullRequest, context: Any) -> Iterator[pb.PullReply]:  # noqa: N802
        info = pb.VersionInfo()
        info.CopyFrom(self.info)
        self.note("Pull", request, context)
        yield pb.PullReply(version=info)
        for part in request.ranges or [pb.Range(start=0, stop=len(self.payload))]:
            for start in range(part.start, part.stop, CHUNK):
                data = self.payload[start : min(start + CHUNK, part.stop)]
                chunk = pb.Chunk(offset=start, crc32c=google_crc32c.value(data), data=data)
                self.damage(chunk)
                yield pb.PullReply(chunk=chunk)

    def Push(self, requests: Iterator[pb.PushRequest], context: Any) -> Iterator[pb.PushReply]:  # noqa: N802
        header = next(requests).header
        self.note("Push", header, context)
        if self.settled is not None:
            yield pb.PushReply(receipt=self.settled)
            return
        staged = self.staged[str((header.update_id, header.intervals))]
        yield pb.PushReply(held=pb.Held(bytes=len(staged)))
        for request in requests:
            chunk = request.chunk
            if google_crc32c.value(chunk.data) != chunk.crc32c:
                abort(context, Reason.BAD_CHECKSUM)
            staged += chunk.data
            self.chunks.append((chunk.offset, len(chunk.data)))
            self.note("Chunk", chunk.offset, context)
        if google_crc32c.value(bytes(staged)) != header.digest:
            abort(context, Reason.TRUNCATED, f"{len(staged)} bytes")
        self.note("Receipt", header, context)
        yield pb.PushReply(receipt=pb.Receipt(update_id=header.update_id, state=pb.ACCEPTED, version=-1))


class Serving:
    """A server of grpc's default settings for a servicer, on a port of loopback."""

    def __init__(self, fleet: RawFleet, *, port: int = 0, credentials: Any = None) -> None:
        self._threads = ThreadPoolExecutor(16)
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        add_FleetServicer_to_server(fleet, self._server)  # type: ignore[no-untyped-call]
        if credentials is None:
            self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        else:
            self.port = self._server.add_secure_port(f"127.0.0.1:{port}", credentials)
        assert self.port, f"port {port} is taken"
        self._fleet = fleet
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._fleet._wake()
        self._threads.shutdown()
