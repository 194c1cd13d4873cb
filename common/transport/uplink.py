"""The gRPC client of a parent: ``Uplink`` implements ``Parent`` with threads, for use inside training processes.

What an answer means: a call that the parent ended with a ``fleet-reason`` raises that ``Refused``; whatever else went wrong (no
connection, a proxy's answer, a crash of the handler, a deadline, a stall) did not come from the fleet and raises ``Unreachable``.
A connection on which nothing moves is dialled anew: behind NAT, or when a device changes networks, it never breaks by itself.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from fleetddp.common import fork
from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import FleetError, Reason, Refused, Unreachable
from fleetddp.common.events import ByteRange, Heard, Heartbeat, Join, Joined, News, Offer, Share
from fleetddp.common.layout import Layout
from fleetddp.common.open_items import Catalogue, Shared
from fleetddp.common.payload import Geometry
from fleetddp.common.security import channel_credentials, check_plaintext, explain
from fleetddp.common.transport import MEMBER_REASONS, Sink, chunks, items, limits, offers, wire
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.transport.items import ItemsTransfer, ShareAttempt
from fleetddp.common.transport.transfers import Attempt, ProxyTransfer, PullTransfer, PushTransfer, StallWatch, Transfer
from fleetddp.common.update import Kind, ProxyInfo, Receipt, Slice, State, UpdateHeader, Version
from fleetddp.protos import fleet_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an uplink waits for what. All in seconds."""

    call_s: float = 10.0  # for the answer of a control call
    leave_s: float = 2.0  # for that of ``leave``: if it gets lost, the lease runs out
    stall_s: float = 20.0  # for the next byte of a transfer; then it is broken off and tried again on a new connection
    give_up_s: float = 30.0  # through all tries without a byte of progress; then the transfer raises what went wrong last
    retry_s: float = 0.1  # before the second try; doubling, up to ...
    retry_cap_s: float = 1.0  # ... so much: a restarted parent hears from everyone within seconds
    connect_s: float = 10.0  # for one attempt to connect
    keepalive_s: float = 20.0  # between pings on a silent connection, and for the answer to one


class _Link:
    """One channel and its stub."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None, patience: Patience) -> None:
        milliseconds = {
            "grpc.keepalive_time_ms": patience.keepalive_s,
            "grpc.keepalive_timeout_ms": patience.keepalive_s,
            "grpc.initial_reconnect_backoff_ms": patience.retry_s,
            "grpc.max_reconnect_backoff_ms": patience.retry_cap_s,
            "grpc.min_reconnect_backoff_ms": patience.connect_s,
        }
        options = [(key, int(1000 * seconds)) for key, seconds in milliseconds.items()] + [
            # A server of default settings hangs up on a third ping without data between; so may a proxy.
            ("grpc.http2.max_pings_without_data", 2),
            ("grpc.max_receive_message_length", limits.MESSAGE_BYTES),
            ("grpc.enable_retries", 0),  # we retry ourselves, from where we were
            ("grpc.use_local_subchannel_pool", 1),  # else a channel dialled anew would share the dead connection
        ]
        if credentials is None:
            self.channel = grpc.insecure_channel(address, options)
        else:
            self.channel = grpc.secure_channel(address, credentials, options)
        self.stub = chunks.stub(self.channel)


class Uplink:
    """A parent at ``address`` (HOST:PORT or ``unix:PATH``), as seen by ``node``; a member's uplinks may be several (one a rank).

    ``track``: which of the parent's tracks all calls are about; empty where it has only one.
    Raises ``ConfigError`` where ``security`` is incomplete or would show plaintext to others. ``rng`` draws the retries' jitter.
    ``push`` cuts the payload on codec blocks: for that it asks the parent once for the run's layout (an ``init`` holds its own).
    """

    def __init__(
        self,
        address: str,
        security: SecurityConfig,
        *,
        node: str,
        run: str = "",
        track: str = "",
        patience: Patience = Patience(),
        rng: random.Random | None = None,
    ) -> None:
        fork.warn_once()
        check_plaintext(address, security)
        self.address = address
        self._credentials = channel_credentials(security)
        self._node, self._run, self._track = node, run, track
        self._patience = patience
        self._rng = rng or random.Random()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._link = self._dial()
        self._layout: Layout | None = None  # the last one asked for

    # ---- control calls: single attempts --------------------------------------------------------------------------------------

    def join(self, request: Join) -> Joined:
        """Enter the fleet."""
        return wire.unpack_joined(self._ask("Join", wire.pack_join(request)))

    def heartbeat(self, request: Heartbeat) -> Heard:
        """Extend the lease; hear about open updates."""
        return wire.unpack_heard(self._ask("Heartbeat", wire.pack_heartbeat(request)))

    def leave(self, node: str, incarnation: int) -> None:
        """Go for good."""
        self._ask("Leave", wire.pack_leave(node, incarnation), self._patience.leave_s)

    def layout(self) -> Layout:
        """The run's layout; ``Refused(NO_VERSION)`` before the first weights."""
        return Layout.from_json(self._ask("GetLayout", pb.LayoutRequest()).json)

    def status(self) -> dict[str, Any]:
        """What ``fleetddp status`` shows."""
        status: dict[str, Any] = json.loads(self._ask("Status", pb.StatusRequest()).json)
        return status

    # ---- streams -------------------------------------------------------------------------------------------------------------

    def watch(self, node: str, incarnation: int, after_version: int) -> Iterator[News]:
        """News as they come, until the stream breaks (``Unreachable``) or the parent is closed."""
        link = self._current()
        call = self._open(link, "Watch", self._of_track(wire.pack_watch(node, incarnation, after_version)))
        try:
            for message in call:
                yield wire.unpack_news(message)
        except grpc.RpcError as error:
            raise self._meaning(error) from None
        finally:
            call.cancel()

    def pull(self, version: int, ranges: Sequence[ByteRange], sink: Sink) -> Version:
        """Bring byte ranges of a version's published payload (none: all of it) to ``sink``, each byte once, checked.

        The ranges ascend and do not overlap. Each chunk's checksum is checked before ``sink`` sees it; where all of the
        payload was asked for, its digest is checked at the end.
        """
        transfer = PullTransfer(self._node, version, ranges, sink)
        self._persist(transfer, lambda: self._pull_once(transfer))
        return transfer.verified()

    def pull_proxy(self, ranges: Sequence[ByteRange], sink: Sink) -> ProxyInfo:
        """Bring byte ranges of the proxy set's file (none: nothing) to ``sink``; says what it is. See ``shelf.bring``."""
        transfer = ProxyTransfer(self._node, ranges, sink)
        self._persist(transfer, lambda: self._pull_once(transfer))
        assert transfer.info is not None  # it is complete
        return transfer.info

    def pull_items(self, pool: int, known: int, ranges: Sequence[ByteRange], sink: Sink) -> Catalogue:
        """What changed of the open items; byte ranges of them (none: nothing) go to ``sink``. See ``open_items.bring``."""
        transfer = ItemsTransfer(self._node, pool, known, ranges, sink)
        self._persist(transfer, lambda: self._pull_once(transfer))
        assert transfer.info is not None  # it is complete
        return transfer.info

    def share(self, offer: Share, data: Callable[[str], bytes]) -> Shared:
        """Offer samples, and send what is wanted of them. A single attempt: what arrived is known the next time."""
        attempt = ShareAttempt(self._of_track(items.pack_share(offer)), data)
        return self._send_once("Share", attempt, "an offer of samples without an answer")

    def withdraw(self, share: Share) -> int:
        """Take back what was shared. A single attempt."""
        return int(self._ask("Withdraw", items.pack_withdraw(share), self._patience.give_up_s).erased)

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        """Send one stream of an update; returns when the update is accepted, settled or refused (see ``Parent``).

        ``payload`` holds the encoded bytes of the slice's intervals, one after another.
        """
        transfer = PushTransfer(self._of_track(offers.pack(Offer(header=header, slice=slice, run=self._run))), payload)
        try:
            return self._persist(transfer, lambda: self._push_once(transfer, header, slice))
        except Refused as refused:
            if refused.retry or refused.reason in MEMBER_REASONS:
                raise
            return Receipt(update_id=header.update_id, state=State.REFUSED, reason=refused.reason.value, message=refused.message)

    def close(self) -> None:
        """Drop the connection; calls in flight end with ``Unreachable``."""
        with self._lock:
            self._closed.set()
            self._link.channel.close()

    # ---- one attempt ---------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        link = self._current()
        try:
            return self._open(link, method, self._of_track(request), timeout=timeout_s or self._patience.call_s)
        except grpc.RpcError as error:
            meaning = self._meaning(error)
            if isinstance(meaning, Unreachable) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._redial(link)
            raise meaning from None

    def _of_track(self, request: Any) -> Any:
        request.track = self._track
        return request

    def _pull_once(self, transfer: PullTransfer | ProxyTransfer | ItemsTransfer) -> None:
        link = self._current()
        call = self._open(link, transfer.method, self._of_track(transfer.request()))
        with StallWatch(call.cancel, self._patience.stall_s) as watch:
            try:
                for reply in call:
                    watch.pause()  # the sink may take its time
                    transfer.take(reply)
                    if transfer.complete:
                        return
                    watch.moved()
            except grpc.RpcError as error:
                raise self._broken(link, watch, error) from None
            finally:
                call.cancel()
        raise Refused(Reason.TRUNCATED, f"{self.address} ended a {transfer.method} after {transfer.done} bytes")

    def _push_once(self, transfer: PushTransfer, header: UpdateHeader, slice: Slice) -> Receipt:
        if not transfer.ranges:
            transfer.place(Geometry.of_update(header, self._layout_for(header)), slice)
        return self._send_once("Push", transfer.attempt(), f"the push of {header.update_id} without a receipt")

    def _send_once(self, method: str, attempt: Attempt[T], what: str) -> T:
        """One call that sends in a stream; its outcome. ``what``: it ended, if there is none."""
        link = self._current()
        call = self._open(link, method, attempt.requests())
        with StallWatch(call.cancel, self._patience.stall_s) as attempt.watch:
            try:
                for reply in call:
                    outcome = attempt.take(reply)
                    if outcome is not None:
                        return outcome
            except grpc.RpcError as error:
                raise self._broken(link, attempt.watch, error) from None
            finally:
                attempt.end()
                call.cancel()
        raise Unreachable(f"{self.address} ended {what}")

    def _layout_for(self, header: UpdateHeader) -> Layout | None:
        if header.kind is Kind.INIT:
            return None  # it brings its own
        layout = self._layout
        if layout is None or layout.fingerprint != header.layout:
            layout = self._layout = self.layout()
        if layout.fingerprint != header.layout:
            mine, theirs = header.layout[:12], layout.fingerprint[:12]
            raise Refused(Reason.WRONG_LAYOUT, f"the update is of layout {mine}..., the run's is {theirs}...")
        return layout

    # ---- trying again --------------------------------------------------------------------------------------------------------

    def _persist(self, transfer: Transfer, attempt: Callable[[], T]) -> T:
        """Attempts, until one succeeds, is refused for good, or ``give_up_s`` have passed without progress."""
        backoff = Backoff(self._rng, first_s=self._patience.retry_s, cap_s=self._patience.retry_cap_s)
        moved_at = transfer.moved_at
        while True:
            try:
                return attempt()
            except (Unreachable, Refused) as error:
                if transfer.moved_at > moved_at:
                    moved_at = transfer.moved_at
                    backoff.reset()
                final = isinstance(error, Refused) and not error.retry
                if final or self._closed.is_set() or time.monotonic() - moved_at > self._patience.give_up_s:
                    raise
            if self._closed.wait(backoff.delay()):
                raise self._gone()

    def _current(self) -> _Link:
        with self._lock:
            if self._closed.is_set():
                raise self._gone()
            return self._link

    def _open(self, link: _Link, method: str, request: Any, **options: Any) -> Any:
        """Begin a call; on a channel closed meanwhile (by ``close`` or ``_redial``) grpc raises ValueError."""
        try:
            return getattr(link.stub, method)(request, **options)
        except ValueError as error:
            if self._link is link and not self._closed.is_set():
                raise
            raise Unreachable(f"{self.address}: the connection was closed") from error

    def _dial(self) -> _Link:
        return _Link(self.address, self._credentials, self._patience)

    def _redial(self, link: _Link) -> None:
        """Replace a connection on which nothing moves; other calls on it end, and try again."""
        with self._lock:
            if self._link is link and not self._closed.is_set():
                link.channel.close()
                self._link = self._dial()

    def _broken(self, link: _Link, watch: StallWatch, error: Any) -> FleetError:
        if watch.fired:
            self._redial(link)
            return Unreachable(f"{self.address}: not a byte moved for {self._patience.stall_s:g} s")
        return self._meaning(error)

    def _meaning(self, error: Any) -> FleetError:
        if self._closed.is_set():
            return self._gone()
        details = error.details() or ""
        refused = wire.refusal(error.trailing_metadata(), details)
        if refused is not None:
            return refused
        why = explain(details, tls=self._credentials is not None)
        return Unreachable(f"{self.address}: {why + ': ' if why else ''}{error.code().name}: {details}")

    def _gone(self) -> Unreachable:
        return Unreachable(f"the uplink to {self.address} was closed")
