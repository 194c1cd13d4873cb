"""The uplink against a parent of our own making (``helpers.raw_fleet``) and a network that breaks (``helpers.proxy``)."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import pytest
from helpers.certificates import make_ca, security
from helpers.proxy import Proxy
from helpers.raw_fleet import CHUNK, RawFleet, Serving, abort

from fleetddp.common import codecs
from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import REASONS, ConfigError, Reason, Refused, Unreachable
from fleetddp.common.events import Heartbeat, Join
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.security import node_id, server_credentials
from fleetddp.common.transport import MEMBER_REASONS, chunks, transfers
from fleetddp.common.transport.session import Session
from fleetddp.common.transport.transfers import StallWatch
from fleetddp.common.transport.uplink import Patience, Uplink
from fleetddp.common.update import Interval, Kind, Receipt, Slice, State, Tier, UpdateHeader, UpdateId
from fleetddp.protos import fleet_pb2 as pb

PLAIN = SecurityConfig()
WAIT_S = 20.0  # no test waits so long unless it fails
QUICK = Patience(call_s=5.0, stall_s=5.0, give_up_s=0.3, retry_s=0.01, retry_cap_s=0.05)
PATIENT = Patience(call_s=5.0, stall_s=5.0, give_up_s=WAIT_S, retry_s=0.01, retry_cap_s=0.05)
LAYOUT = Layout.of([("weight", (1000, 300)), ("bias", (301,))], [("mean", (700,))])
PAYLOAD = random.Random(0).randbytes(5 * CHUNK + 1234)
ID = UpdateId("edge-1", 7, 1)


@pytest.fixture
def fleet() -> RawFleet:
    return RawFleet(LAYOUT, PAYLOAD)


@pytest.fixture
def server(fleet: RawFleet) -> Iterator[Serving]:
    serving = Serving(fleet)
    yield serving
    serving.stop()


@pytest.fixture
def proxy(server: Serving) -> Iterator[Proxy]:
    between = Proxy(server.port)
    yield between
    between.close()


@pytest.fixture
def dial() -> Iterator[Callable[..., Uplink]]:
    uplinks: list[Uplink] = []

    def start(address: str, patience: Patience = QUICK, config: SecurityConfig = PLAIN) -> Uplink:
        uplinks.append(Uplink(address, config, node="edge-1", run="fleet", patience=patience, rng=random.Random(0)))
        return uplinks[-1]

    yield start
    for uplink in uplinks:
        uplink.close()


@pytest.fixture
def background() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


class Gathered:
    """A sink that knows what it was given."""

    def __init__(self) -> None:
        self.data = bytearray(len(PAYLOAD))
        self.offsets: list[tuple[int, int]] = []

    def __call__(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data
        self.offsets.append((offset, offset + len(data)))

    def once(self) -> list[Interval]:
        """What was given, merged; fails if a byte was given twice."""
        merged: list[Interval] = []
        for start, stop in self.offsets:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                assert not merged or merged[-1][1] < start
                merged.append((start, stop))
        return merged


def header(codec: str = "float32", kind: Kind = Kind.DELTA, **changes: Any) -> UpdateHeader:
    values: dict[str, Any] = {
        "update_id": ID,
        "kind": kind,
        "tier": Tier.EDGE,
        "base_version": 4,
        "codec": codec,
        "layout": LAYOUT.fingerprint,
    }
    return UpdateHeader(**(values | changes))


def stream(intervals: tuple[Interval, ...], codec: str = "float32") -> tuple[Slice, memoryview]:
    """Random bytes of the size that the intervals take."""
    geometry = Geometry(LAYOUT, codecs.get(codec))
    payload = random.Random(1).randbytes(sum(b - a for a, b in map(geometry.byte_range, intervals)))
    return Slice(intervals=intervals, samples=8.0, digest=google_crc32c.value(payload)), memoryview(payload)


WHOLE = Geometry(LAYOUT, codecs.get("float32")).required()


# ---- control calls -----------------------------------------------------------------------------------------------------------


def test_control_calls_carry_what_they_should(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    uplink = dial(server.address)
    joined = uplink.join(Join(node="edge-1", tier=Tier.EDGE, incarnation=7, run="fleet", open=(ID,)))
    assert (joined.run, joined.version, joined.layout, joined.lease_s) == ("fleet", 5, LAYOUT.fingerprint, 2000.0)
    heard = uplink.heartbeat(Heartbeat(node="edge-1", incarnation=7, base_version=4, metrics={"loss": 0.5}, metrics_version=3))
    assert (heard.version, heard.closes_at) == (5, 12.5)
    assert uplink.layout() == LAYOUT
    assert uplink.status() == {"version": 5}
    uplink.leave("edge-1", 7)
    join, beat, leave = (fleet.requests(name)[0] for name in ("Join", "Heartbeat", "Leave"))
    assert (join.node, join.tier, join.incarnation, join.run, join.open[0].sequence) == ("edge-1", pb.EDGE, 7, "fleet", 1)
    assert (beat.base_version, dict(beat.metrics), beat.metrics_version) == (4, {"loss": 0.5}, 3)
    assert (leave.node, leave.incarnation) == ("edge-1", 7)


@pytest.mark.parametrize("reason", list(Reason))
def test_a_refusal_arrives_as_it_was_meant(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink], reason: Reason) -> None:
    fleet.script["Status"].append(lambda request, context: abort(context, reason, "because"))
    with pytest.raises(Refused) as raised:
        dial(server.address).status()
    assert (raised.value.reason, raised.value.message, raised.value.retry) == (reason, "because", REASONS[reason].retry)


def test_what_no_fleet_answered_is_unreachable(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    uplink = dial(server.address)
    fleet.script["Status"].append(lambda request, context: context.abort(grpc.StatusCode.PERMISSION_DENIED, "proxy says no"))
    with pytest.raises(Unreachable, match=rf"{server.address}: PERMISSION_DENIED: proxy says no"):
        uplink.status()
    fleet.script["Status"].append(
        lambda request, context: (
            context.set_trailing_metadata((("fleet-reason", "NEVER_HEARD"),)),
            context.abort(grpc.StatusCode.NOT_FOUND, "?"),
        )
    )
    with pytest.raises(Unreachable, match="NOT_FOUND"):
        uplink.status()


def test_nobody_there(dial: Callable[..., Uplink]) -> None:
    uplink = dial("127.0.0.1:1")
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        uplink.status()
    with pytest.raises(Unreachable):
        uplink.pull(-1, (), Gathered())


def test_a_dead_connection_is_dialled_anew(proxy: Proxy, dial: Callable[..., Uplink]) -> None:
    uplink = dial(proxy.address, Patience(call_s=0.2))
    assert uplink.status() == {"version": 5}
    proxy.freeze()
    with pytest.raises(Unreachable, match="DEADLINE_EXCEEDED"):
        uplink.status()
    assert uplink.status() == {"version": 5}
    assert proxy.connections == 2


# ---- pull --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [5, -1])
def test_pull_brings_the_whole_payload(server: Serving, dial: Callable[..., Uplink], version: int) -> None:
    sink = Gathered()
    info = dial(server.address).pull(version, (), sink)
    assert bytes(sink.data) == PAYLOAD
    assert sink.once() == [(0, len(PAYLOAD))]
    assert (info.number, info.payload_bytes, info.digest) == (5, len(PAYLOAD), google_crc32c.value(PAYLOAD))


def test_pull_brings_ranges_and_nothing_else(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    ranges = ((3, 100), (CHUNK - 1, 3 * CHUNK), (len(PAYLOAD) - 1, len(PAYLOAD)))
    sink = Gathered()
    dial(server.address).pull(5, ranges, sink)
    assert tuple(sink.once()) == ranges
    assert all(sink.data[a:b] == PAYLOAD[a:b] for a, b in ranges)
    (asked,) = fleet.requests("Pull")
    assert (asked.node, asked.version, [(r.start, r.stop) for r in asked.ranges]) == ("edge-1", 5, list(ranges))


def test_pull_goes_on_where_it_was_cut(fleet: RawFleet, proxy: Proxy, dial: Callable[..., Uplink]) -> None:
    draw = random.Random(2)
    for _ in range(12):  # connections cut after a random number of bytes, at any place within a frame
        before = len(fleet.requests("Pull"))
        proxy.budgets.extend((None, draw.randrange(1, len(PAYLOAD))) for _ in range(3))
        ranges = draw.choice([(), ((0, 2 * CHUNK), (2 * CHUNK + 7, len(PAYLOAD)))])
        sink = Gathered()
        uplink = dial(proxy.address, PATIENT)
        uplink.pull(-1, ranges, sink)
        uplink.close()
        wanted = list(ranges) or [(0, len(PAYLOAD))]
        assert sink.once() == wanted
        assert all(sink.data[a:b] == PAYLOAD[a:b] for a, b in wanted)
        asked = fleet.requests("Pull")[before:]
        versions = [r.version for r in asked]
        assert versions == sorted(versions)  # first the newest, whichever that is; once it is known, that one
        assert set(versions) <= {-1, 5}
        left = [sum(r.stop - r.start for r in a.ranges) or len(PAYLOAD) for a in asked]
        assert left == sorted(left, reverse=True)  # never asks for what it has
        proxy.budgets.clear()
    assert proxy.connections > 24


def test_a_damaged_chunk_is_asked_for_again(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    damaged = [2 * CHUNK]

    def damage(chunk: pb.Chunk) -> None:
        if chunk.offset in damaged:
            damaged.remove(chunk.offset)
            chunk.data = chunk.data[:-1] + bytes([chunk.data[-1] ^ 1])

    fleet.damage = damage
    sink = Gathered()
    dial(server.address).pull(5, (), sink)
    assert bytes(sink.data) == PAYLOAD
    assert [(r.start, r.stop) for r in fleet.requests("Pull")[1].ranges] == [(2 * CHUNK, len(PAYLOAD))]


def _flip(chunk: pb.Chunk) -> None:
    chunk.crc32c ^= 1


def _shift(chunk: pb.Chunk) -> None:
    chunk.offset += 1


def _lengthen(chunk: pb.Chunk) -> None:
    chunk.data += b"more"
    chunk.crc32c = google_crc32c.value(chunk.data)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flip, Reason.BAD_CHECKSUM),
        (_shift, Reason.OUT_OF_ORDER),
        (_lengthen, Reason.OUT_OF_ORDER),
    ],
)
def test_damage_that_recurs_is_reported(
    fleet: RawFleet, server: Serving, dial: Callable[..., Uplink], damage: Callable[[pb.Chunk], None], reason: Reason
) -> None:
    fleet.damage = damage
    sink = Gathered()
    with pytest.raises(Refused) as raised:
        dial(server.address).pull(5, ((0, CHUNK),), sink)
    assert raised.value.reason is reason
    assert len(fleet.requests("Pull")) > 2  # tried again, for give_up_s
    assert sink.offsets == []


def test_the_whole_payloads_digest_is_checked(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    fleet.info.digest ^= 1
    uplink = dial(server.address)
    with pytest.raises(Refused, match="arrived with CRC32C") as raised:
        uplink.pull(5, (), Gathered())
    assert raised.value.reason is Reason.BAD_CHECKSUM
    assert len(fleet.requests("Pull")) == 1  # pulling it again would bring the same
    uplink.pull(5, ((0, 10),), Gathered())


def test_a_version_that_changes_under_the_transfer_is_refused(
    fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]
) -> None:
    def restored_from_a_backup(chunk: pb.Chunk) -> None:
        if chunk.offset == CHUNK:
            chunk.crc32c ^= 1
            fleet.info.digest ^= 1

    fleet.damage = restored_from_a_backup
    with pytest.raises(Refused) as raised:
        dial(server.address).pull(5, (), Gathered())
    assert raised.value.reason is Reason.UNKNOWN_VERSION


def test_a_final_refusal_is_not_tried_again(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    fleet.script["Pull"].append(lambda request, context: abort(context, Reason.UNKNOWN_VERSION))
    with pytest.raises(Refused):
        dial(server.address).pull(9, (), Gathered())
    assert len(fleet.requests("Pull")) == 1


def test_a_slow_sink_is_no_stall(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    stall_s = 0.05
    uplink = dial(server.address, Patience(stall_s=stall_s, give_up_s=0.0))
    sink = Gathered()

    def slow(offset: int, data: memoryview) -> None:
        if offset == 0:
            longer_than_a_stall = threading.Event()
            with StallWatch(longer_than_a_stall.set, 2 * stall_s):
                assert longer_than_a_stall.wait(WAIT_S)
        sink(offset, data)

    uplink.pull(5, (), slow)
    assert bytes(sink.data) == PAYLOAD
    assert len(fleet.requests("Pull")) == 1


def test_a_fault_of_the_sink_is_the_callers(server: Serving, dial: Callable[..., Uplink]) -> None:
    def full(offset: int, data: memoryview) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        dial(server.address).pull(5, (), full)


def test_a_stalled_pull_goes_on_over_a_new_connection(proxy: Proxy, dial: Callable[..., Uplink]) -> None:
    sink = Gathered()
    proxy.silent = True
    proxy.budgets.append((None, len(PAYLOAD) // 2))
    dial(proxy.address, Patience(stall_s=0.2, give_up_s=WAIT_S, retry_s=0.01)).pull(5, (), sink)
    assert bytes(sink.data) == PAYLOAD
    assert sink.once() == [(0, len(PAYLOAD))]
    assert proxy.connections == 2


# ---- push --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "topk:0.03"])
@pytest.mark.parametrize("intervals", [WHOLE, ((512, 1024), (299_008, 300_301)), (WHOLE[1],)])
def test_push_cuts_the_stream_on_blocks(
    fleet: RawFleet, server: Serving, dial: Callable[..., Uplink], codec: str, intervals: tuple[Interval, ...]
) -> None:
    part, payload = stream(intervals, codec)
    receipt = dial(server.address).push(header(codec), part, payload)
    assert receipt == Receipt(update_id=ID, state=State.ACCEPTED)
    assert list(fleet.staged.values()) == [bytearray(payload)]
    geometry = Geometry(LAYOUT, codecs.get(codec))
    offsets = [b for start, size in fleet.chunks for b in range(start, start + size, size)]
    assert all(geometry.aligned(start) and geometry.aligned(start + size) for start, size in fleet.chunks)
    assert all(size <= 512 * 1024 for _, size in fleet.chunks)
    assert offsets == sorted(offsets)
    (sent,) = fleet.requests("Push")
    assert (sent.run, sent.samples, sent.digest, sent.codec) == ("fleet", 8.0, google_crc32c.value(bytes(payload)), codec)


def test_push_goes_on_where_it_was_cut(
    fleet: RawFleet, proxy: Proxy, dial: Callable[..., Uplink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", CHUNK)
    part, payload = stream(WHOLE)
    draw = random.Random(3)
    for sequence in range(12):
        fleet.chunks.clear()
        proxy.budgets.extend((draw.randrange(1, len(payload)), None) for _ in range(3))
        uplink = dial(proxy.address, PATIENT)
        receipt = uplink.push(header(update_id=UpdateId("edge-1", 7, sequence)), part, payload)
        uplink.close()
        assert receipt.state is State.ACCEPTED
        assert bytes(list(fleet.staged.values())[-1]) == bytes(payload)
        assert sum(size for _, size in fleet.chunks) == len(payload)  # no byte was staged twice
        proxy.budgets.clear()
    assert proxy.connections > 24
    assert len(fleet.requests("GetLayout")) >= 12  # once an uplink (more where that call was cut)


def test_a_known_update_is_answered_without_its_bytes(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    fleet.settled = pb.Receipt(
        update_id=pb.UpdateId(node="edge-1", incarnation=7, sequence=1), state=pb.MERGED, version=3, duplicate=True
    )
    part, payload = stream(WHOLE)
    receipt = dial(server.address).push(header(), part, payload)
    assert receipt == Receipt(update_id=ID, state=State.MERGED, version=3, duplicate=True)
    assert fleet.chunks == []


@pytest.mark.parametrize(
    ("reason", "when"),
    [(r, "Push") for r in Reason if not REASONS[r].retry] + [(Reason.NOT_FINITE, "Chunk"), (Reason.NORM_BOUND, "Receipt")],
)
def test_a_final_refusal_of_a_push(
    fleet: RawFleet, server: Serving, dial: Callable[..., Uplink], reason: Reason, when: str
) -> None:
    fleet.script[when].append(lambda request, context: abort(context, reason, "because"))
    part, payload = stream(WHOLE)
    uplink = dial(server.address)
    if reason in MEMBER_REASONS:
        with pytest.raises(Refused) as raised:
            uplink.push(header(), part, payload)
        assert raised.value.reason is reason
    else:
        receipt = uplink.push(header(), part, payload)
        assert receipt == Receipt(update_id=ID, state=State.REFUSED, reason=reason.value, message="because")
    assert len(fleet.requests("Push")) == 1


@pytest.mark.parametrize("reason", [r for r in Reason if REASONS[r].retry])
def test_a_refusal_that_a_retry_mends(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink], reason: Reason) -> None:
    fleet.script["Push"].append(lambda request, context: abort(context, reason))
    fleet.script["Receipt"].append(lambda request, context: abort(context, reason))
    part, payload = stream(WHOLE)
    assert dial(server.address).push(header(), part, payload).state is State.ACCEPTED
    assert len(fleet.requests("Push")) == 3
    assert sum(size for _, size in fleet.chunks) == len(payload)


def test_a_refusal_that_recurs_is_raised_in_the_end(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    def damaged(request: Any, context: Any) -> None:
        fleet.script["Chunk"].append(damaged)
        fleet.staged.clear()
        abort(context, Reason.BAD_CHECKSUM)

    fleet.script["Chunk"].append(damaged)
    part, payload = stream(WHOLE)
    with pytest.raises(Refused) as raised:  # though bytes move in every try: always the same ones
        dial(server.address).push(header(), part, payload)
    assert raised.value.reason is Reason.BAD_CHECKSUM
    assert len(fleet.requests("Push")) > 2


def test_an_init_brings_its_own_layout(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    part, payload = stream(WHOLE)
    receipt = dial(server.address).push(header(kind=Kind.INIT, layout_spec=LAYOUT.to_json()), part, payload)
    assert receipt.state is State.ACCEPTED
    assert fleet.requests("GetLayout") == []


def test_the_layout_is_asked_for_once(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    uplink = dial(server.address)
    part, payload = stream(WHOLE)
    for sequence in range(3):
        uplink.push(header(update_id=UpdateId("edge-1", 7, sequence)), part, payload)
    assert len(fleet.requests("GetLayout")) == 1


@pytest.mark.parametrize(
    ("changes", "intervals", "size", "reason"),
    [
        ({"layout": "0" * 64}, WHOLE, None, Reason.WRONG_LAYOUT),
        ({"codec": "zip"}, WHOLE, None, Reason.UNKNOWN_CODEC),
        ({}, ((1, 512),), None, Reason.WRONG_INTERVALS),
        ({}, WHOLE, 8, Reason.WRONG_SIZE),
    ],
)
def test_what_cannot_be_placed_is_not_sent(
    fleet: RawFleet,
    server: Serving,
    dial: Callable[..., Uplink],
    changes: dict[str, Any],
    intervals: tuple[Interval, ...],
    size: int | None,
    reason: Reason,
) -> None:
    part, payload = stream(WHOLE)
    part = Slice(intervals=intervals, samples=1.0, digest=part.digest)
    receipt = dial(server.address).push(header(**changes), part, payload[:size])
    assert (receipt.state, receipt.reason) == (State.REFUSED, reason.value)
    assert fleet.requests("Push") == []


def test_a_slow_parent_holds_the_sender_back(
    fleet: RawFleet, server: Serving, dial: Callable[..., Uplink], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, read = [0], [0]
    ahead: list[int] = []
    pack = chunks.pack

    def counted(offset: int, data: Any) -> bytes:
        made[0] += 1
        return pack(offset, data)

    def reading(request: Any, context: Any) -> None:
        read[0] += 1
        ahead.append(made[0] - read[0])
        fleet.script["Chunk"].append(reading)

    monkeypatch.setattr(chunks, "pack", counted)
    layout = Layout.of([("weight", (64 * 1024 * 256,))])  # 64 MiB: 128 chunks
    fleet.layout = layout
    fleet.script["Chunk"].append(reading)
    payload = memoryview(bytes(4 * layout.parameters))
    part = Slice(intervals=((0, layout.parameters),), samples=1.0, digest=google_crc32c.value(bytes(payload)))
    receipt = dial(server.address, PATIENT).push(header(layout=layout.fingerprint), part, payload)
    assert receipt.state is State.ACCEPTED
    assert made[0] == 128
    assert max(ahead) <= 32  # bounded by gRPC's windows, not by the payload


def test_a_stalled_push_is_broken_off_and_goes_on(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    over = threading.Event()
    fleet.script["Chunk"].append(lambda request, context: over.wait(WAIT_S))  # reads no more
    layout = Layout.of([("weight", (16 * 1024 * 256,))])  # more than the windows hold
    fleet.layout = layout
    payload = memoryview(bytes(4 * layout.parameters))
    part = Slice(intervals=((0, layout.parameters),), samples=1.0, digest=google_crc32c.value(bytes(payload)))

    def late(request: Any, context: Any) -> None:
        fleet.staged.clear()  # what the first call may still stage is its own
        fleet.script["Push"].append(late)

    fleet.script["Push"].append(late)
    uplink = dial(server.address, Patience(stall_s=0.3, give_up_s=WAIT_S, retry_s=0.01))
    assert uplink.push(header(layout=layout.fingerprint), part, payload).state is State.ACCEPTED
    assert len(fleet.requests("Push")) == 2
    over.set()


def test_a_parent_that_takes_its_time_for_the_receipt_is_no_stall(
    fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]
) -> None:
    def other_streams_are_missing(request: Any, context: Any) -> None:
        longer_than_a_stall = threading.Event()
        with StallWatch(longer_than_a_stall.set, 0.2):
            assert longer_than_a_stall.wait(WAIT_S)

    fleet.script["Receipt"].append(other_streams_are_missing)
    part, payload = stream(WHOLE)
    assert dial(server.address, Patience(stall_s=0.05, give_up_s=0.0)).push(header(), part, payload).state is State.ACCEPTED


# ---- watch, close, restart ---------------------------------------------------------------------------------------------------


def test_news_arrive_until_the_stream_breaks(fleet: RawFleet, server: Serving, dial: Callable[..., Uplink]) -> None:
    news = dial(server.address).watch("edge-1", 7, 5)
    fleet.tell(pb.News(version=6, closes_at=3.0))
    first = next(news)
    assert (first.version, first.closes_at) == (6, 3.0)
    (asked,) = fleet.requests("Watch")
    assert (asked.node, asked.incarnation, asked.after_version) == ("edge-1", 7, 5)
    server.stop()
    with pytest.raises(Unreachable):
        next(news)


@pytest.mark.parametrize("method", ["Watch", "Pull", "Push", "Chunk", "Receipt", "Status"])
def test_close_ends_calls_in_flight_at_once(
    fleet: RawFleet, server: Serving, dial: Callable[..., Uplink], background: Callable[..., Future[Any]], method: str
) -> None:
    reached, over = threading.Event(), threading.Event()

    def hold(request: Any, context: Any) -> None:
        reached.set()
        over.wait(WAIT_S)

    fleet.script[method].append(hold)
    uplink = dial(server.address, Patience())  # of default patience: nothing else ends the call
    part, payload = stream(WHOLE)
    calls: dict[str, Callable[[], Any]] = {
        "Watch": lambda: next(uplink.watch("edge-1", 7, 5)),
        "Pull": lambda: uplink.pull(5, (), Gathered()),
        "Status": uplink.status,
    }
    call = background(calls.get(method, lambda: uplink.push(header(), part, payload)))
    assert reached.wait(WAIT_S)
    uplink.close()
    with pytest.raises(Unreachable, match="closed"):
        call.result(2.0)
    over.set()


def test_close_ends_a_wait_between_tries(dial: Callable[..., Uplink], background: Callable[..., Future[Any]]) -> None:
    uplink = dial("127.0.0.1:1", Patience(retry_s=1000.0, retry_cap_s=1000.0))
    waiting = threading.Event()
    attempt = uplink._pull_once

    def tried(transfer: Any) -> None:
        waiting.set()
        attempt(transfer)

    uplink._pull_once = tried  # type: ignore[method-assign]
    call = background(uplink.pull, 5, (), Gathered())
    assert waiting.wait(WAIT_S)
    uplink.close()
    with pytest.raises(Unreachable):
        call.result(2.0)


def test_a_closed_uplink_answers_at_once(server: Serving, dial: Callable[..., Uplink]) -> None:
    uplink = dial(server.address, Patience())
    uplink.close()
    uplink.close()
    part, payload = stream(WHOLE)
    calls: list[Callable[[], Any]] = [
        lambda: uplink.join(Join(node="edge-1", tier=Tier.EDGE, incarnation=7)),
        lambda: uplink.heartbeat(Heartbeat(node="edge-1", incarnation=7)),
        lambda: uplink.leave("edge-1", 7),
        uplink.layout,
        uplink.status,
        lambda: uplink.pull(5, (), Gathered()),
        lambda: uplink.push(header(), part, payload),
        lambda: next(uplink.watch("edge-1", 7, 5)),
    ]
    for call in calls:
        with pytest.raises(Unreachable, match="closed"):
            call()


def test_a_member_is_back_within_five_seconds_of_a_restart(fleet: RawFleet, dial: Callable[..., Uplink]) -> None:
    first = Serving(fleet)
    uplink = dial(first.address, Patience())  # as in production
    session = Session(uplink, Join(node="edge-1", tier=Tier.EDGE, incarnation=7), rng=random.Random(0))
    session.start()
    assert session.joined(WAIT_S) is not None
    with fleet.changed:
        assert fleet.changed.wait_for(lambda: fleet.requests("Watch"), WAIT_S)
    first.stop()
    with pytest.raises(Unreachable):
        uplink.status()
    fleet.known = False  # who has joined is not in the journal
    fleet.info.number = 6
    second = Serving(fleet, port=first.port)
    assert session.wait_version(5, timeout_s=5.0) == 6
    assert len(fleet.requests("Join")) == 2
    with fleet.changed:
        assert fleet.changed.wait_for(lambda: len(fleet.requests("Watch")) == 2, 5.0)
    session.stop(leave=True)
    assert fleet.requests("Leave")[0].node == "edge-1"
    uplink.close()
    second.stop()


def test_a_server_of_default_settings_bears_the_keepalive(
    fleet: RawFleet, server: Serving, proxy: Proxy, dial: Callable[..., Uplink], background: Callable[..., Future[Any]]
) -> None:
    news = dial(proxy.address, Patience(keepalive_s=0.3)).watch("edge-1", 7, 5)  # in effect a ping a second
    fleet.tell(pb.News(version=6))
    next(news)
    # The measure: a client that began later and pings as often, without end, until the server has had enough of it.
    options = [("grpc.keepalive_time_ms", 300), ("grpc.http2.max_pings_without_data", 0)]
    with grpc.insecure_channel(server.address, options) as rude:
        answers = rude.unary_stream(
            "/fleetddp.v1.Fleet/Watch", request_serializer=None, response_deserializer=pb.News.FromString
        )(b"")
        with pytest.raises(grpc.RpcError, match="Too many pings"):
            background(list, answers).result(WAIT_S)
    fleet.tell(pb.News(version=7))
    assert next(news).version == 7
    assert proxy.connections == 1


# ---- security ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ca(tmp_path_factory.mktemp("certs"), "edge-1", "edge-2")


def test_mutual_tls_tells_each_who_the_other_is(fleet: RawFleet, ca: Path, dial: Callable[..., Uplink]) -> None:
    serving = Serving(fleet, credentials=server_credentials(security(ca, "coordinator")))
    names: list[str | None] = []
    fleet.script["Status"].append(lambda request, context: names.append(node_id(context.auth_context())))
    assert dial(serving.address, config=security(ca, "edge-1")).status() == {"version": 5}
    assert names == ["edge-1"]
    serving.stop()


def test_strangers_are_turned_away_and_told_why(
    fleet: RawFleet, ca: Path, tmp_path: Path, dial: Callable[..., Uplink], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(fleet, credentials=server_credentials(security(ca, "coordinator")))
    other = make_ca(tmp_path / "other", "edge-1", hosts=("elsewhere.example",))
    ours = security(ca, "edge-1")
    stranger = ours.model_copy(update={"cert": other / "edge-1.pem", "key": other / "edge-1.key"})
    plaintext, elsewhere = Serving(fleet), Serving(fleet, credentials=server_credentials(security(other, "coordinator")))
    monkeypatch.setenv("DAYS", "-1")
    late = make_ca(tmp_path / "late", "edge-1")
    expired = Serving(fleet, credentials=server_credentials(security(late, "coordinator")))
    for address, config, why in (
        (serving.address, SecurityConfig(), "security here names no certificates, and it may want them"),
        (serving.address, stranger, "it may not trust security.cert"),
        (serving.address, security(other, "edge-1"), "its certificate is not of the CA in security.ca"),
        (plaintext.address, ours, "it does not speak TLS"),
        (elsewhere.address, security(other, "edge-1"), "its certificate is not for this address"),
        (expired.address, security(late, "edge-1"), "its certificate has expired"),
    ):
        with pytest.raises(Unreachable, match=re.escape(why)):
            dial(address, config=config).status()
    assert fleet.calls == []
    for server in (serving, plaintext, elsewhere, expired):
        server.stop()


def test_a_node_cannot_play_the_coordinator(fleet: RawFleet, ca: Path, dial: Callable[..., Uplink]) -> None:
    serving = Serving(fleet, credentials=server_credentials(security(ca, "edge-2")))
    with pytest.raises(Unreachable, match="its certificate is not a coordinator's"):
        dial(serving.address, config=security(ca, "edge-1")).status()
    assert fleet.calls == []
    serving.stop()


def test_plaintext_is_refused_off_loopback() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:7070 is not on this machine"):
        Uplink("192.0.2.1:7070", SecurityConfig(), node="edge-1")
    Uplink("192.0.2.1:7070", SecurityConfig(insecure=True), node="edge-1").close()
