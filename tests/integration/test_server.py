"""The server over real gRPC, spoken to with bare stubs: what it answers to bad input, and that nothing is lost or merged by it.

The member behind ``dial`` writes each message itself, so that it can write wrong ones.
"""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import pytest
import torch
from helpers.fleet import RunningCoordinator, fleet_config, running
from helpers.models import batch_norm, odd, wide

from fleetddp.common.errors import REASONS, Reason
from fleetddp.common.layout import Layout
from fleetddp.common.transport import limits
from fleetddp.protos import fleet_pb2 as pb
from fleetddp.protos.fleet_pb2_grpc import FleetStub

WAIT_S = 20.0
MODULE = wide()
LAYOUT = Layout.from_module(MODULE)  # 2407 parameters: 4 blocks and 359 elements, 9628 bytes of float32
SIZE = 4 * LAYOUT.elements
CHUNK = 4096
NAN, INF = float("nan"), float("inf")


def values(*, at: int = 0, value: float = 0.0) -> bytes:
    """A delta of 1/8 everywhere, but for one element."""
    vector = torch.full((LAYOUT.elements,), 0.125)
    if value:
        vector[at] = value
    return vector.numpy().tobytes()


class Member:
    """One node, by hand."""

    def __init__(self, address: str, node: str) -> None:
        self.node = node
        self.channel = grpc.insecure_channel(address)
        self.stub: Any = FleetStub(self.channel)  # type: ignore[no-untyped-call]
        self.sequence = 0

    def join(self, **fields: Any) -> pb.JoinReply:
        request = {"node": self.node, "tier": pb.SITE, "incarnation": 1, "leaves": 1, **fields}
        reply: pb.JoinReply = self.stub.Join(pb.JoinRequest(**request), timeout=WAIT_S)
        return reply

    def header(self, payload: bytes = b"", **fields: Any) -> pb.PushHeader:
        """Of a good delta in one stream, unless told otherwise."""
        self.sequence += 1
        given: dict[str, Any] = {
            "run": "test",
            "update_id": pb.UpdateId(node=self.node, incarnation=1, sequence=self.sequence),
            "kind": pb.DELTA,
            "tier": pb.SITE,
            "base_version": 0,
            "codec": "float32",
            "layout": LAYOUT.fingerprint,
            "steps": 1,
            "intervals": [pb.Range(start=0, stop=LAYOUT.elements)],
            "samples": 8.0,
            "digest": google_crc32c.value(payload or values()),
        }
        return pb.PushHeader(**{**given, **fields})

    def begin(self, header: pb.PushHeader) -> Push:
        return Push(self.stub, header)

    def push(self, header: pb.PushHeader, payload: bytes) -> pb.Receipt:
        """All of an update in one stream; raises what the server ends the call with."""
        call = self.begin(header)
        reply = call.reply()
        if reply.HasField("receipt"):
            return reply.receipt
        call.send(*cut(payload, reply.held.bytes))
        return call.receipt()

    def pull(self, version: int = -1, ranges: Sequence[tuple[int, int]] = ()) -> tuple[pb.VersionInfo, list[pb.Chunk]]:
        request = pb.PullRequest(node=self.node, version=version, ranges=[pb.Range(start=a, stop=b) for a, b in ranges])
        first, *rest = self.stub.Pull(request, timeout=WAIT_S)
        return first.version, [reply.chunk for reply in rest]


class Push:
    """One push call, request by request."""

    def __init__(self, stub: Any, header: pb.PushHeader) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(pb.PushRequest(header=header))
        self.call = stub.Push(iter(self._requests.get, None), timeout=WAIT_S)

    def send(self, *requests: pb.PushRequest) -> None:
        for request in requests:
            self._requests.put(request)

    def reply(self) -> pb.PushReply:
        reply: pb.PushReply = next(self.call)
        return reply

    def end(self) -> None:
        self._requests.put(None)

    def receipt(self) -> pb.Receipt:
        self.end()
        return self.reply().receipt


def chunk(offset: int, data: bytes, crc32c: int | None = None) -> pb.PushRequest:
    return pb.PushRequest(
        chunk=pb.Chunk(offset=offset, crc32c=google_crc32c.value(data) if crc32c is None else crc32c, data=data)
    )


def cut(payload: bytes, start: int = 0) -> list[pb.PushRequest]:
    return [chunk(at, payload[at : at + CHUNK]) for at in range(start, len(payload), CHUNK)]


@pytest.fixture
def dial() -> Iterator[Callable[[RunningCoordinator, str], Member]]:
    members: list[Member] = []

    def start(coordinator: RunningCoordinator, node: str) -> Member:
        members.append(Member(coordinator.address, node))
        return members[-1]

    yield start
    for member in members:
        member.channel.close()


def found(member: Member) -> None:
    """Join, and bring the first weights; returns when version 0 is published."""
    member.join()
    weights = LAYOUT.read(MODULE).numpy().tobytes()
    header = member.header(weights, kind=pb.INIT, base_version=-1, layout_spec=LAYOUT.to_json())
    assert member.push(header, weights).state in (pb.ACCEPTED, pb.MERGED)
    reached(member, 0)


def reached(member: Member, version: int) -> pb.News:
    """Watch until a version is published."""
    watch = member.stub.Watch(pb.WatchRequest(node=member.node, incarnation=1, after_version=-1), timeout=WAIT_S)
    for news in watch:
        if news.version >= version:
            watch.cancel()
            return news
    raise AssertionError(f"version {version} was never published")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RunningCoordinator]:
    """Windows close with two updates, so that none of one member's is merged behind the test's back."""
    with running(fleet_config(tmp_path, window={"quorum": 2, "min_updates": 2}, limits={"max_norm": 1e6})) as coordinator:
        yield coordinator


def ended(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, str]:
    """(status, reason, message) that the server ends a call with."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    error: Any = raised.value
    metadata = dict(error.trailing_metadata() or ())
    return error.code(), metadata.get("fleet-reason", ""), error.details()


# ---- bad input --------------------------------------------------------------------------------------------------------------

OTHER = Layout.from_module(odd())
LATER = pb.UpdateId(node="site", incarnation=1, sequence=900)


def stream(*requests: pb.PushRequest) -> Callable[[Member, pb.PushHeader], Any]:
    """Push these after the header."""

    def push(member: Member, header: pb.PushHeader) -> Any:
        call = member.begin(header)
        assert call.reply().held.bytes == 0
        call.send(*requests)
        return call.receipt()

    return push


def whole(payload: bytes) -> Callable[[Member, pb.PushHeader], Any]:
    return lambda member, header: member.push(header, payload)


GOOD = cut(values())
BAD: dict[str, tuple[dict[str, Any], Callable[[Member, pb.PushHeader], Any], Reason, str]] = {
    "truncated": ({}, stream(*GOOD[:-1]), Reason.TRUNCATED, "the stream ended after 8192 of 9628 bytes"),
    "no bytes at all": ({}, stream(), Reason.TRUNCATED, "the stream ended after 0 of 9628 bytes"),
    "reordered": ({}, stream(GOOD[1], GOOD[0], GOOD[2]), Reason.OUT_OF_ORDER, "4096 bytes came for byte 4096; byte 0 was due"),
    "a chunk twice": ({}, stream(GOOD[0], GOOD[0]), Reason.OUT_OF_ORDER, "byte 4096 was due"),
    "too many bytes": ({}, stream(*GOOD, chunk(SIZE, bytes(2048))), Reason.WRONG_SIZE, "a chunk up to byte 11676, beyond 9628"),
    "a chunk beyond the slice": ({}, stream(chunk(0, bytes(SIZE + 4))), Reason.WRONG_SIZE, "beyond 9628"),
    "a chunk within a block": ({}, stream(chunk(0, bytes(2044))), Reason.WRONG_SIZE, "within a block of float32 (2048 bytes)"),
    "an oversized chunk": ({}, stream(chunk(0, bytes(524_292))), Reason.TOO_LARGE, "524292 bytes; at most 524288"),
    "an empty chunk": ({}, stream(chunk(0, b"")), Reason.MALFORMED, "chunk.data is b''"),
    "two headers": (
        {},
        stream(pb.PushRequest(header=pb.PushHeader())),
        Reason.MALFORMED,
        "after its header a push holds nothing but chunks",
    ),
    "wrong layout": (
        {"layout": OTHER.fingerprint},
        whole(values()),
        Reason.WRONG_LAYOUT,
        f"layout {OTHER.fingerprint[:12]}; this run's is {LAYOUT.fingerprint[:12]}",
    ),
    "wrong checksum of a chunk": (
        {},
        stream(chunk(0, values()[:CHUNK], crc32c=1)),
        Reason.BAD_CHECKSUM,
        "the chunk at byte 0 does not have CRC32C 00000001",
    ),
    "wrong checksum of a slice": ({"digest": 7}, whole(values()), Reason.BAD_CHECKSUM, "not 00000007 as declared"),
    "NaN": ({}, whole(values(at=1500, value=NAN)), Reason.NOT_FINITE, "element 1500 is nan"),
    "infinity": ({}, whole(values(at=2406, value=-INF)), Reason.NOT_FINITE, "element 2406 is -inf"),
    "NaN as an int8 scale": (
        {"codec": "int8"},
        stream(chunk(0, struct.pack("<f", NAN) + bytes(512))),
        Reason.NOT_FINITE,
        "int8: block scales are nan",
    ),
    "a norm beyond the bound": (
        {"digest": google_crc32c.value(values(at=3, value=2e6))},
        whole(values(at=3, value=2e6)),
        Reason.NORM_BOUND,
        "the norm is 2e+06; allowed is 1e+06",
    ),
    "(1,) where (n,) is due": (
        {"intervals": [pb.Range(start=0, stop=1)]},
        whole(values()),
        Reason.WRONG_INTERVALS,
        "elements [0, 1) are not whole blocks",
    ),
    "beyond the vector": (
        {"intervals": [pb.Range(start=0, stop=LAYOUT.elements + 512)]},
        whole(values()),
        Reason.WRONG_INTERVALS,
        "of 2407 has parameters [0, 2407)",
    ),
    "negative weight": ({"samples": -1.0}, whole(values()), Reason.BAD_WEIGHT, "-1.0 samples"),
    "zero weight": ({"samples": 0.0}, whole(values()), Reason.BAD_WEIGHT, "0 samples behind the update"),
    "weight that is no number": ({"samples": NAN}, whole(values()), Reason.BAD_WEIGHT, "nan samples"),
    "too much weight": ({"samples": 1e10}, whole(values()), Reason.BAD_WEIGHT, "1e+09"),
    "future base_version": ({"base_version": 1}, whole(values()), Reason.FUTURE_BASE, "base_version 1; the newest version is 0"),
    "negative base_version": ({"base_version": -1}, whole(values()), Reason.MALFORMED, "base_version -1 is negative"),
    "unknown codec": ({"codec": "zstd"}, whole(values()), Reason.UNKNOWN_CODEC, "zstd"),
    "unknown node": (
        {"update_id": pb.UpdateId(node="stranger", incarnation=1, sequence=1)},
        whole(values()),
        Reason.UNKNOWN_NODE,
        "stranger has not joined",
    ),
    "a process that has not joined": (
        {"update_id": pb.UpdateId(node="site", incarnation=2, sequence=1)},
        whole(values()),
        Reason.UNKNOWN_NODE,
        "incarnation 2 of site has not joined",
    ),
    "another run": ({"run": "other"}, whole(values()), Reason.WRONG_RUN, "this is run test, not other"),
    "first weights again": (
        {"kind": pb.INIT, "base_version": -1, "layout_spec": LAYOUT.to_json()},
        whole(values()),
        Reason.INIT_TAKEN,
        "the first weights are there already",
    ),
    "soft labels": ({"kind": pb.LOGITS}, whole(values()), Reason.WRONG_KIND, "soft labels are not taken"),
    "a field beyond its limit": ({"metrics": {"loss": NAN}}, whole(values()), Reason.MALFORMED, "metric 'loss' is nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_and_neither_kept_nor_merged(name: str, fleet: RunningCoordinator, dial: Any) -> None:
    fields, push, reason, message = BAD[name]
    member, other = dial(fleet, "site"), dial(fleet, "other")
    found(member)
    other.join()
    assert other.push(other.header(samples=2.0), values()).state == pb.ACCEPTED
    before = fleet.status()["counters"]
    header = member.header(**fields)
    status, told, details = ended(lambda: push(member, header))
    assert (status.name, told) == (REASONS[reason].status, reason.value)
    assert message in details
    after = fleet.status()["counters"]
    assert after["refused"].get(reason.value, 0) == before["refused"].get(reason.value, 0) + 1
    assert {key: after[key] for key in ("accepted", "merged", "failed")} == {
        key: before[key] for key in ("accepted", "merged", "failed")
    }
    # The member goes on, with the same update where a retry can mend it; what the other sent is still there.
    good = values(at=0, value=0.5)
    again = member.header(good)
    if REASONS[reason].retry and not fields:
        again.update_id.sequence = header.update_id.sequence
        again.digest, good = header.digest, values()
    assert member.push(again, good).state in (pb.ACCEPTED, pb.MERGED)
    reached(member, 1)
    mean = (8 * torch.frombuffer(bytearray(good), dtype=torch.float32) + 2 * 0.125) / 10
    _, chunks = member.pull(1)
    pulled = torch.frombuffer(bytearray(b"".join(c.data for c in chunks)), dtype=torch.float32)
    torch.testing.assert_close(pulled, LAYOUT.read(MODULE) - mean, rtol=0, atol=1e-6)


def test_a_first_request_must_be_a_header(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    for requests in ([], [pb.PushRequest()], [GOOD[0]]):
        status, reason, details = ended(lambda requests=requests: list(member.stub.Push(iter(requests), timeout=WAIT_S)))
        assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED")
        assert details == "a push begins with a header"


def test_a_message_beyond_the_limit_is_refused_by_grpc(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    found(member)
    call = member.begin(member.header())
    call.reply()
    call.send(chunk(0, bytes(limits.MESSAGE_BYTES + 1)))
    status, _, _ = ended(call.receipt)
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert fleet.status()["counters"]["failed"] == 0


def test_an_id_cannot_be_used_for_other_bytes(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    found(member)
    header = member.header()
    assert member.push(header, values()).state == pb.ACCEPTED
    repeated = member.push(header, values())
    assert (repeated.state, repeated.duplicate) == (pb.ACCEPTED, True)
    other = pb.PushHeader()
    other.CopyFrom(header)
    other.digest = 5
    status, reason, details = ended(lambda: member.push(other, values()))
    assert (status, reason) == (grpc.StatusCode.ALREADY_EXISTS, "ID_REUSED")
    assert "was accepted already, with other bytes" in details
    assert fleet.status()["counters"]["accepted"] == 1


def test_a_refused_update_stays_refused(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    found(member)
    bad = values(at=0, value=NAN)
    header = member.header(bad)
    assert ended(lambda: member.push(header, bad))[1] == "NOT_FINITE"
    assert ended(lambda: member.push(header, bad))[1] == "NOT_FINITE"
    reply = member.stub.Heartbeat(
        pb.HeartbeatRequest(
            node="site", incarnation=1, base_version=0, metrics_version=-1, leaves=1, open=[header.update_id, LATER]
        )
    )
    assert [(r.state, r.reason) for r in reply.receipts] == [(pb.REFUSED, "NOT_FINITE"), (pb.UNKNOWN, "")]


# ---- streams ----------------------------------------------------------------------------------------------------------------


def test_a_broken_stream_goes_on_where_it_broke(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    found(member)
    header = member.header()
    broken = member.begin(header)
    assert broken.reply().held.bytes == 0
    broken.send(GOOD[0], GOOD[1])
    until(lambda: fleet.status()["counters"]["bytes_in"] == SIZE + 2 * CHUNK)
    broken.call.cancel()
    resumed = member.begin(header)
    assert resumed.reply().held.bytes == 2 * CHUNK
    resumed.send(GOOD[2])
    assert resumed.receipt().state == pb.ACCEPTED
    assert fleet.status()["counters"]["bytes_in"] == 2 * SIZE


def test_several_streams_of_one_update_end_together(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    found(member)
    cuts = ((0, 1024), (1024, 2048), (2048, LAYOUT.elements))
    update_id = pb.UpdateId(node="site", incarnation=1, sequence=77)
    calls = []
    for start, stop in cuts:
        part = values()[4 * start : 4 * stop]
        header = member.header(
            part, update_id=update_id, intervals=[pb.Range(start=start, stop=stop)], samples=2.5, digest=google_crc32c.value(part)
        )
        call = member.begin(header)
        assert call.reply().held.bytes == 0
        call.send(chunk(4 * start, part))
        calls.append(call)
    calls[0].end()
    calls[2].end()
    until(lambda: fleet.status()["counters"]["bytes_in"] == 2 * SIZE)
    assert fleet.status()["counters"]["accepted"] == 0
    calls[1].end()
    assert [call.reply().receipt.state for call in calls] == [pb.ACCEPTED] * 3
    assert fleet.status()["members"][0]["updates"] == 1


def test_one_bad_stream_ends_the_others_of_its_update(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    found(member)
    update_id = pb.UpdateId(node="site", incarnation=1, sequence=77)
    waiting = member.begin(member.header(update_id=update_id, intervals=[pb.Range(start=0, stop=2048)]))
    waiting.reply()
    bad = struct.pack("<f", INF) * 359
    header = member.header(
        update_id=update_id, intervals=[pb.Range(start=2048, stop=LAYOUT.elements)], digest=google_crc32c.value(bad)
    )
    breaking = member.begin(header)
    breaking.reply()
    breaking.send(chunk(8192, bad))
    for call in (breaking, waiting):
        assert ended(call.reply)[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_FINITE")


def test_a_stream_without_a_byte_is_ended_and_can_go_on(tmp_path: Path, dial: Any) -> None:
    with running(fleet_config(tmp_path, members={"stall_s": 0.2})) as coordinator:
        member = dial(coordinator, "site")
        found(member)
        header = member.header()
        stalled = member.begin(header)
        stalled.reply()
        stalled.send(GOOD[0])
        status, reason, details = ended(stalled.reply)
        assert (status, reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "STALLED")
        assert "no byte came for 0.2 s" in details
        resumed = member.begin(header)
        assert resumed.reply().held.bytes in (0, CHUNK)  # 0: three times stall_s passed meanwhile
        resumed.call.cancel()


def test_a_newer_process_takes_over(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    found(member)
    old = member.begin(member.header())
    old.reply()
    member.join(incarnation=2)
    assert ended(old.reply)[:2] == (grpc.StatusCode.ABORTED, "SUPERSEDED")
    heartbeat = pb.HeartbeatRequest(node="site", incarnation=1, base_version=0, metrics_version=-1, leaves=1)
    assert ended(lambda: member.stub.Heartbeat(heartbeat))[:2] == (grpc.StatusCode.ABORTED, "SUPERSEDED")


# ---- versions ---------------------------------------------------------------------------------------------------------------


def test_versions_are_served_by_ranges(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    found(member)
    info, chunks = member.pull()
    data = b"".join(c.data for c in chunks)
    assert data == LAYOUT.read(MODULE).numpy().tobytes()
    assert (info.number, info.payload_bytes, info.digest) == (0, SIZE, google_crc32c.value(data))
    info, chunks = member.pull(0, [(1, 5), (9000, SIZE)])
    assert [(c.offset, c.data) for c in chunks] == [(1, data[1:5]), (9000, data[9000:])]
    assert all(google_crc32c.value(c.data) == c.crc32c for c in chunks)


def test_what_cannot_be_served_is_refused(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    assert ended(member.pull)[:2] == (grpc.StatusCode.UNAVAILABLE, "NO_VERSION")
    assert ended(lambda: member.stub.GetLayout(pb.LayoutRequest()))[:2] == (grpc.StatusCode.UNAVAILABLE, "NO_VERSION")
    found(member)
    assert member.stub.GetLayout(pb.LayoutRequest()).json == LAYOUT.to_json()
    assert ended(lambda: member.pull(7))[:2] == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_VERSION")
    status, reason, details = ended(lambda: member.pull(0, [(0, SIZE + 1)]))
    assert (status, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "WRONG_INTERVALS")
    assert "version 0 has 9628" in details
    assert ended(lambda: member.pull(0, [(5, 5)]))[1] == "MALFORMED"


def test_buffers_travel_in_the_payload(tmp_path: Path, dial: Any) -> None:
    module = batch_norm()
    layout = Layout.from_module(module)
    with running(fleet_config(tmp_path)) as coordinator:
        member = dial(coordinator, "site")
        member.join()
        flat = layout.read(module)
        intervals = [(0, layout.parameters), (layout.buffer_start, layout.elements)]
        payload = b"".join(flat[a:b].numpy().tobytes() for a, b in intervals)
        header = member.header(
            payload,
            kind=pb.INIT,
            base_version=-1,
            layout=layout.fingerprint,
            layout_spec=layout.to_json(),
            intervals=[pb.Range(start=a, stop=b) for a, b in intervals],
        )
        call = member.begin(header)
        call.reply()
        at = 4 * layout.parameters
        call.send(chunk(0, payload[:at]), chunk(at, payload[at:]))
        assert call.receipt().state in (pb.ACCEPTED, pb.MERGED)
        reached(member, 0)
        assert b"".join(c.data for c in member.pull()[1]) == payload


# ---- the rest ---------------------------------------------------------------------------------------------------------------


def test_every_method_of_the_service_is_served(fleet: RunningCoordinator, dial: Any) -> None:
    member = dial(fleet, "site")
    methods = pb.DESCRIPTOR.services_by_name["Fleet"].methods
    assert len(methods) == 12
    for method in methods:
        call = member.channel.stream_stream(f"/fleetddp.v1.Fleet/{method.name}")
        answer = call(iter([b""]), timeout=WAIT_S)
        with contextlib.suppress(grpc.RpcError):
            list(answer)
        assert answer.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE), method.name


def test_only_names_that_are_allowed_may_join(tmp_path: Path, dial: Any) -> None:
    with running(fleet_config(tmp_path, members={"allow": ["site-*", "gw"]})) as coordinator:
        assert dial(coordinator, "site-a").join().run == "test"
        status, reason, details = ended(dial(coordinator, "SITE-B").join)
        assert (status, reason) == (grpc.StatusCode.PERMISSION_DENIED, "WRONG_IDENTITY")
        assert details == "'SITE-B' matches no pattern of members.allow"
        assert coordinator.status()["counters"]["refused"] == {"WRONG_IDENTITY": 1}


def test_a_defect_is_answered_and_the_server_goes_on(
    fleet: RunningCoordinator, dial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = dial(fleet, "site")
    found(member)
    journal = fleet.coordinator.driver.journal
    monkeypatch.setattr(journal, "read_version", lambda number: 1 // 0)
    status, reason, details = ended(member.pull)
    assert (status, reason) == (grpc.StatusCode.INTERNAL, "")
    assert "ZeroDivisionError" in details
    monkeypatch.undo()
    assert len(member.pull()[1]) == 1
    assert fleet.status()["counters"]["failed"] == 1


def test_a_disk_that_refuses_is_told_as_such(fleet: RunningCoordinator, dial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    member = dial(fleet, "site")
    found(member)
    real = fleet.coordinator.driver.staging.accept
    full = threading.Event()
    full.set()

    def accept(update: Any, at: float) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        real(update, at)

    monkeypatch.setattr(fleet.coordinator.driver.staging, "accept", accept)
    header = member.header()
    status, reason, details = ended(lambda: member.push(header, values()))
    assert (status, reason) == (grpc.StatusCode.UNAVAILABLE, "STORAGE")
    assert "No space left" in details
    full.clear()
    assert member.push(header, values()).state == pb.ACCEPTED


def test_the_news_end_with_the_run(tmp_path: Path, dial: Any) -> None:
    with running(fleet_config(tmp_path, until={"versions": 1})) as coordinator:
        member = dial(coordinator, "site")
        found(member)
        watch = member.stub.Watch(pb.WatchRequest(node="site", incarnation=1, after_version=0), timeout=WAIT_S)
        header = member.header()
        assert member.push(header, values()).state in (pb.ACCEPTED, pb.MERGED)
        news = list(watch)
        assert news[-1].finished == "version 1 is published"
        receipts = {r.update_id.sequence: r for n in news for r in n.receipts}
        assert (receipts[header.update_id.sequence].state, receipts[header.update_id.sequence].version) == (pb.MERGED, 1)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what happens in another thread."""
    waited = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if condition():
            return
        waited.wait(0.02)
    raise AssertionError("it never happened")
