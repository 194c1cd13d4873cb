"""The wire: round trips, every limit of WIRE.md, its golden vectors, and chunks packed by hand against protobuf."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

import fleetddp.protos
from fleetddp.common import codecs
from fleetddp.common.errors import REASONS, Reason, Refused
from fleetddp.common.events import Heard, Heartbeat, Join, Joined, Leave, News, Offer, Share
from fleetddp.common.open_items import NEVER, Catalogue, OpenItem, Shared
from fleetddp.common.transport import chunks, items, limits, offers, wire
from fleetddp.common.update import Group, Kind, ProxyInfo, Receipt, Slice, State, Tier, UpdateHeader, UpdateId, Version
from fleetddp.protos import fleet_pb2 as pb

FINGERPRINT = "0123456789abcdef" * 4
ID = UpdateId("edge-1", 1700000000000000, 7)
RECEIPT = Receipt(update_id=ID, state=State.MERGED, version=12, duplicate=True)
OVERLAP = Receipt(
    update_id=UpdateId("gw", 5, 0),
    state=State.REFUSED,
    reason="OVERLAP",
    message="2 of its updates are here already",
    overlap=(UpdateId("a", 1, 0), UpdateId("b", 2, 3)),
)
JOIN = Join(node="edge-1", tier=Tier.EDGE, incarnation=ID.incarnation, run="demo", layout=FINGERPRINT, leaves=3, open=(ID,))
JOINED = Joined(
    run="demo",
    version=4,
    layout=FINGERPRINT,
    wants_init=True,
    heartbeat_s=5.0,
    lease_s=20.0,
    gradient_lr=0.01,
    max_staleness=10,
    codecs=("float32", "int8"),
    receipts=(RECEIPT,),
    finished="",
    steps=12,
)
HEARTBEAT = Heartbeat(
    node="edge-1", incarnation=9, base_version=3, open=(ID,), metrics={"loss": 0.5}, metrics_version=2, leaves=1
)
HEARD = Heard(version=-1, closes_at=1.5e9, receipts=(RECEIPT, OVERLAP), finished="version 9 is published", steps=7)
NEWS = News(version=5, receipts=(RECEIPT,), finished="", closes_at=0.0)
VERSION = Version(
    number=3, layout=FINGERPRINT, codec="int8", payload_bytes=516, digest=0xDEADBEEF, published_at=1.5e9, updates=4,
    metrics={"accuracy": 0.75},
)  # fmt: skip
DELTA = Offer(
    header=UpdateHeader(
        update_id=ID, kind=Kind.DELTA, tier=Tier.EDGE, base_version=3, codec="topk:0.03", layout=FINGERPRINT, steps=20,
        seconds=1.25, metrics={"loss": 0.5},
    ),
    slice=Slice(intervals=((0, 512), (1024, 1100)), samples=64.0, digest=0x01020304),
    run="demo",
)  # fmt: skip
PARTIAL = Offer(
    header=UpdateHeader(
        update_id=UpdateId("gw", 5, 0), kind=Kind.PARTIAL, tier=Tier.REGION, base_version=2, codec="float32", layout=FINGERPRINT,
        groups=(Group(tier=Tier.EDGE, base_version=2, samples=10.0, buffer_samples=4.0, ids=(ID, UpdateId("b", 2, 3))),),
    ),
    slice=Slice(intervals=((0, 512),), samples=10.0, digest=0),
)  # fmt: skip
LABELS = Offer(
    header=UpdateHeader(
        update_id=ID, kind=Kind.LOGITS, tier=Tier.EDGE, base_version=3, codec="prob16:10", layout=FINGERPRINT,
        covers=((11, 33), (110, 121)),
    ),
    slice=Slice(intervals=((11, 33),), samples=2.0, digest=7),
    run="demo",
)  # fmt: skip
PROXY = ProxyInfo("digits", FINGERPRINT, 70000)
CATALOGUE = Catalogue(
    pool=77, version=6, shape=(1, 8), whole=True, gone=(1,), at=1.5e9,
    items=(OpenItem(0, FINGERPRINT, 4, NEVER, 1.5e9), OpenItem(1, FINGERPRINT[::-1], 5, 7, 2.0)),
)  # fmt: skip
SHARE = Share(node="gw", incarnation=9, of="pi", run="demo", shape=(64,), digests=(FINGERPRINT, FINGERPRINT[::-1]))
WITHDRAW = Share(node="pi", incarnation=9, of="pi", digests=(FINGERPRINT,), takes_back=True)
INIT = Offer(
    header=UpdateHeader(
        update_id=UpdateId("site", 1, 0), kind=Kind.INIT, tier=Tier.SITE, base_version=-1, codec="float32", layout=FINGERPRINT,
        layout_spec=b"{}",
    ),
    slice=Slice(intervals=((0, 1),), samples=1.0, digest=0),
)  # fmt: skip

PAIRS: dict[str, tuple[Any, Callable[[Any], Message], Callable[[Any], Any]]] = {
    "join": (JOIN, wire.pack_join, wire.unpack_join),
    "joined": (JOINED, wire.pack_joined, wire.unpack_joined),
    "heartbeat": (HEARTBEAT, wire.pack_heartbeat, wire.unpack_heartbeat),
    "heard": (HEARD, wire.pack_heard, wire.unpack_heard),
    "news": (NEWS, wire.pack_news, wire.unpack_news),
    "version": (VERSION, wire.pack_version, wire.unpack_version),
    "receipt": (OVERLAP, wire.pack_receipt, wire.unpack_receipt),
    "delta": (DELTA, offers.pack, offers.unpack),
    "partial": (PARTIAL, offers.pack, offers.unpack),
    "init": (INIT, offers.pack, offers.unpack),
    "logits": (LABELS, offers.pack, offers.unpack),
    "proxy": (PROXY, wire.pack_proxy, wire.unpack_proxy),
    "catalogue": (CATALOGUE, items.pack_catalogue, items.unpack_catalogue),
    "share": (SHARE, items.pack_share, items.unpack_share),
    "withdraw": (WITHDRAW, items.pack_withdraw, items.unpack_withdraw),
    "shared": (Shared((FINGERPRINT,), 3), items.pack_shared, lambda message: items.unpack_shared(message.shared)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_round_trip(name: str) -> None:
    value, pack, unpack = PAIRS[name]
    message = pack(value)
    assert unpack(type(message).FromString(message.SerializeToString())) == value


def test_small_requests_round_trip() -> None:
    assert wire.unpack_leave(wire.pack_leave("a", 3)) == Leave(node="a", incarnation=3)
    assert wire.unpack_pull(wire.pack_pull("a", -1, ())) == ("a", -1, ())
    assert wire.unpack_pull(wire.pack_pull("a", 4, ((0, 5), (5, 9)))) == ("a", 4, ((0, 5), (5, 9)))
    assert wire.unpack_proxy_ask(wire.pack_proxy_ask("a", ((3, 9),))) == ("a", ((3, 9),))
    assert wire.unpack_watch(wire.pack_watch("a", 3, -1)) == ("a", 3, -1)


def test_every_kind_tier_and_state_has_a_number_of_its_own() -> None:
    receipts = [wire.pack_receipt(Receipt(update_id=ID, state=state)).state for state in State]
    assert sorted(receipts) == list(range(1, len(pb.State.keys())))
    tiers = [wire.pack_join(Join(node="a", tier=tier, incarnation=0)).tier for tier in Tier]
    assert sorted(tiers) == list(range(1, len(pb.Tier.keys())))


# ---- limits -----------------------------------------------------------------------------------------------------------------


def changed(message: Any, **fields: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        copy.ClearField(name)
        if isinstance(value, dict):
            getattr(copy, name).update(value)
        elif isinstance(value, list):
            getattr(copy, name).extend(value)
        elif isinstance(value, Message):
            getattr(copy, name).CopyFrom(value)
        else:
            setattr(copy, name, value)
    return copy


IDS = [pb.UpdateId(node="a", incarnation=1, sequence=i) for i in range(limits.MAX_GROUP_IDS + 1)]
RANGES = [pb.Range(start=2 * i, stop=2 * i + 1) for i in range(limits.MAX_RANGES + 1)]
GROUP = offers.pack(PARTIAL).groups[0]

BROKEN: list[tuple[str, dict[str, Any], Reason]] = [
    ("catalogue", {"pool": 0}, Reason.MALFORMED),
    ("catalogue", {"shape": [0]}, Reason.MALFORMED),
    ("catalogue", {"at": -1.0}, Reason.MALFORMED),
    ("catalogue", {"gone": [limits.MAX_OPEN_ITEMS]}, Reason.MALFORMED),
    ("catalogue", {"items": [pb.OpenItem(digest=bytes(31))]}, Reason.MALFORMED),
    ("catalogue", {"items": [pb.OpenItem(digest=bytes(32), expires_at=math.nan)]}, Reason.MALFORMED),
    ("catalogue", {"items": [pb.OpenItem(digest=bytes(32))] * (limits.MAX_OPEN_ITEMS + 1)}, Reason.MALFORMED),
    ("share", {"of": ""}, Reason.MALFORMED),
    ("share", {"digests": [bytes(33)]}, Reason.MALFORMED),
    ("share", {"digests": [bytes(32)] * 2}, Reason.MALFORMED),
    ("share", {"digests": [bytes([i // 256, i % 256, *bytes(30)]) for i in range(limits.MAX_OFFERED + 1)]}, Reason.MALFORMED),
    ("share", {"shape": [1] * (limits.MAX_AXES + 1)}, Reason.MALFORMED),
    ("withdraw", {"incarnation": 2**63}, Reason.MALFORMED),
    ("join", {"node": ""}, Reason.MALFORMED),
    ("join", {"node": "n" * 65}, Reason.MALFORMED),
    ("join", {"node": "a/b"}, Reason.MALFORMED),
    ("join", {"node": "-a"}, Reason.MALFORMED),
    ("join", {"node": "a\n"}, Reason.MALFORMED),
    ("join", {"tier": 0}, Reason.MALFORMED),
    ("join", {"tier": 9}, Reason.MALFORMED),
    ("join", {"incarnation": 2**63}, Reason.MALFORMED),
    ("join", {"run": "a run"}, Reason.MALFORMED),
    ("join", {"layout": "0" * 63}, Reason.MALFORMED),
    ("join", {"layout": "G" * 64}, Reason.MALFORMED),
    ("join", {"leaves": limits.MAX_LEAVES + 1}, Reason.MALFORMED),
    ("join", {"open": IDS[: limits.MAX_IDS + 1]}, Reason.MALFORMED),
    ("join", {"open": [pb.UpdateId(node="a", incarnation=1, sequence=2**63)]}, Reason.MALFORMED),
    ("join", {"open": [pb.UpdateId(node="", incarnation=1, sequence=1)]}, Reason.MALFORMED),
    ("heartbeat", {"base_version": -2}, Reason.MALFORMED),
    ("heartbeat", {"base_version": 2**53 + 1}, Reason.MALFORMED),
    ("heartbeat", {"metrics": {"loss": math.nan}}, Reason.MALFORMED),
    ("heartbeat", {"metrics": {"loss": math.inf}}, Reason.MALFORMED),
    ("heartbeat", {"metrics": {"": 1.0}}, Reason.MALFORMED),
    ("heartbeat", {"metrics": {"a b": 1.0}}, Reason.MALFORMED),
    ("heartbeat", {"metrics": {"m" * 65: 1.0}}, Reason.MALFORMED),
    ("heartbeat", {"metrics": {f"m{i}": 1.0 for i in range(limits.MAX_METRICS + 1)}}, Reason.MALFORMED),
    ("heartbeat", {"metrics_version": -2}, Reason.MALFORMED),
    ("joined", {"codecs": ["float32"] * (limits.MAX_CODECS + 1)}, Reason.MALFORMED),
    ("joined", {"run": ""}, Reason.MALFORMED),
    ("joined", {"lease_s": math.nan}, Reason.MALFORMED),
    ("heard", {"closes_at": -1.0}, Reason.MALFORMED),
    ("heard", {"receipts": [wire.pack_receipt(RECEIPT)] * (limits.MAX_IDS + 1)}, Reason.MALFORMED),
    ("receipt", {"state": 0}, Reason.MALFORMED),
    ("version", {"number": -1}, Reason.MALFORMED),
    ("version", {"payload_bytes": 2**63}, Reason.MALFORMED),
    ("delta", {"kind": 0}, Reason.MALFORMED),
    ("delta", {"kind": 77}, Reason.MALFORMED),
    ("delta", {"update_id": pb.UpdateId(node="", incarnation=0, sequence=0)}, Reason.MALFORMED),
    ("delta", {"codec": ""}, Reason.MALFORMED),
    ("delta", {"codec": "c" * 65}, Reason.MALFORMED),
    ("delta", {"steps": 2**31}, Reason.MALFORMED),
    ("delta", {"seconds": -1.0}, Reason.MALFORMED),
    ("delta", {"seconds": math.inf}, Reason.MALFORMED),
    ("delta", {"intervals": []}, Reason.MALFORMED),
    ("delta", {"intervals": [pb.Range(start=5, stop=5)]}, Reason.MALFORMED),
    ("delta", {"intervals": [pb.Range(start=512, stop=1024), pb.Range(start=0, stop=512)]}, Reason.MALFORMED),
    ("delta", {"intervals": [pb.Range(start=0, stop=513), pb.Range(start=512, stop=1024)]}, Reason.MALFORMED),
    ("delta", {"intervals": [pb.Range(start=0, stop=2**53 + 1)]}, Reason.MALFORMED),
    ("delta", {"intervals": RANGES}, Reason.MALFORMED),
    ("delta", {"groups": [GROUP]}, Reason.MALFORMED),
    ("delta", {"layout_spec": b"{}"}, Reason.MALFORMED),
    ("partial", {"groups": []}, Reason.MALFORMED),
    ("partial", {"groups": [GROUP] * (limits.MAX_GROUPS + 1)}, Reason.MALFORMED),
    ("partial", {"groups": [changed(GROUP, ids=IDS)]}, Reason.MALFORMED),
    ("partial", {"groups": [changed(GROUP, tier=pb.REGION)]}, Reason.MALFORMED),
    ("partial", {"groups": [changed(GROUP, samples=math.nan)]}, Reason.MALFORMED),
    ("init", {"layout_spec": b""}, Reason.MALFORMED),
    ("init", {"layout_spec": bytes(limits.LAYOUT_BYTES + 1)}, Reason.TOO_LARGE),
]


@pytest.mark.parametrize(("name", "fields", "reason"), BROKEN)
def test_a_field_beyond_its_limit_is_refused(name: str, fields: dict[str, Any], reason: Reason) -> None:
    value, pack, unpack = PAIRS[name]
    message = pack(value)
    unpack(message)
    with pytest.raises(Refused) as refused:
        unpack(changed(message, **fields))
    assert refused.value.reason is reason
    assert len(refused.value.message) < 300  # a hostile field is not sent back whole


def test_a_field_at_its_limit_passes() -> None:
    at_limit = changed(wire.pack_join(JOIN), node="n" * 64, leaves=limits.MAX_LEAVES, open=IDS[: limits.MAX_IDS])
    assert len(wire.unpack_join(at_limit).open) == limits.MAX_IDS
    offer = changed(offers.pack(DELTA), codec="c" * 64, intervals=RANGES[: limits.MAX_RANGES], steps=2**31 - 1)
    assert len(offers.unpack(offer).slice.intervals) == limits.MAX_RANGES
    spec = changed(offers.pack(INIT), layout_spec=bytes(limits.LAYOUT_BYTES))
    assert len(offers.unpack(spec).header.layout_spec) == limits.LAYOUT_BYTES


def test_the_largest_layout_and_chunk_fit_a_message() -> None:
    header = changed(
        offers.pack(INIT),
        layout_spec=bytes(limits.LAYOUT_BYTES),
        intervals=[pb.Range(start=2**52 + 2 * i, stop=2**52 + 2 * i + 1) for i in range(limits.MAX_RANGES)],
        metrics={f"{i:064}": 1.0 for i in range(limits.MAX_METRICS)},
    )
    assert pb.PushRequest(header=header).ByteSize() <= limits.MESSAGE_BYTES
    assert len(chunks.pack(2**63 - 1, bytes(limits.CHUNK_BYTES))) <= limits.MESSAGE_BYTES


def test_samples_are_left_to_the_aggregator() -> None:
    assert math.isnan(offers.unpack(changed(offers.pack(DELTA), samples=math.nan)).slice.samples)


def test_metrics_that_are_not_finite_are_left_out_by_the_sender() -> None:
    heartbeat = Heartbeat(node="a", incarnation=0, metrics={"loss": math.nan, "accuracy": 0.5, "norm": math.inf})
    assert wire.unpack_heartbeat(wire.pack_heartbeat(heartbeat)).metrics == {"accuracy": 0.5}


def test_a_message_for_people_is_cut() -> None:
    message = wire.pack_receipt(Receipt(update_id=ID, state=State.REFUSED, message="x" * 5000)).message
    assert len(message) == limits.MAX_TEXT
    assert message.endswith("x...")


def test_a_refusal_is_told_from_other_failures() -> None:
    refused = wire.refusal(((wire.REASON_KEY, "STALE"), ("other", b"\x00")), "too old")
    assert refused is not None
    assert (refused.reason, refused.message) == (Reason.STALE, "too old")
    assert wire.refusal((), "UNAVAILABLE") is None
    assert wire.refusal(None, "UNAVAILABLE") is None
    assert wire.refusal(((wire.REASON_KEY, "NO_SUCH_REASON"),), "from a newer server") is None


# ---- chunks -----------------------------------------------------------------------------------------------------------------

unpack_push = chunks.deserializer(pb.PushRequest)


@given(st.integers(0, 2**64 - 1) | st.sampled_from([0, 127, 128, 2**14, 2**32]), st.binary(max_size=300))
def test_a_packed_chunk_is_what_protobuf_writes(offset: int, data: bytes) -> None:
    chunk = pb.Chunk(offset=offset, crc32c=google_crc32c.value(data), data=data)
    packed = chunks.pack(offset, data)
    if data:  # protobuf leaves an empty field out
        assert packed == pb.PushRequest(chunk=chunk).SerializeToString()
        assert packed == pb.PullReply(chunk=chunk).SerializeToString()
    assert pb.PushRequest.FromString(packed).chunk == chunk
    got = unpack_push(packed)
    assert isinstance(got, chunks.ChunkBytes)
    assert (got.offset, got.crc32c, bytes(got.data)) == (offset, chunk.crc32c, data)


def test_a_chunk_in_another_form_is_read_too() -> None:
    """Fields in another order, an unknown field, an over-long number: protobuf allows them, so another sender may write them."""
    for inner in (
        b"\x1a\x03abc\x08\x05\x15\x01\x02\x03\x04",
        b"\x08\x05\x15\x01\x02\x03\x04\x1a\x03abc\x50\x01",
        b"\x08\x85\x00\x15\x01\x02\x03\x04\x1a\x03abc",
    ):
        got = unpack_push(b"\x12" + bytes([len(inner)]) + inner)
        assert isinstance(got, chunks.ChunkBytes)
        assert (got.offset, got.crc32c, bytes(got.data)) == (5, 0x04030201, b"abc")


@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda tail: b"\x12" + tail))
def test_any_bytes_are_read_as_protobuf_reads_them(data: bytes) -> None:
    try:
        expected = pb.PushRequest.FromString(data)
    except Exception as error:  # protobuf's DecodeError
        with pytest.raises(type(error)):
            unpack_push(data)
        return
    got = unpack_push(data)
    if isinstance(got, chunks.ChunkBytes):
        assert (got.offset, got.crc32c, bytes(got.data)) == (expected.chunk.offset, expected.chunk.crc32c, expected.chunk.data)
    else:
        assert not expected.HasField("chunk")


def test_a_chunk_shares_the_memory_of_its_message() -> None:
    packed = chunks.pack(0, bytes(1000))
    got = unpack_push(packed)
    assert isinstance(got, chunks.ChunkBytes)
    assert got.data.obj is packed


def test_the_size_of_a_chunk_is_limited() -> None:
    chunks.checked(chunks.ChunkBytes(0, 0, memoryview(bytes(limits.CHUNK_BYTES))))
    with pytest.raises(Refused, match=r"TOO_LARGE: chunk\.data holds 524289 bytes; at most 524288"):
        chunks.checked(chunks.ChunkBytes(0, 0, memoryview(bytes(limits.CHUNK_BYTES + 1))))
    with pytest.raises(Refused, match="MALFORMED"):
        chunks.checked(chunks.ChunkBytes(0, 0, memoryview(b"")))
    with pytest.raises(Refused, match="MALFORMED"):
        chunks.checked(chunks.ChunkBytes(2**63, 0, memoryview(b"a")))


# ---- WIRE.md ----------------------------------------------------------------------------------------------------------------

WIRE_MD = (Path(str(fleetddp.protos.__file__)).parent / "WIRE.md").read_text(encoding="utf-8")
VECTOR = torch.tensor([0.0, 1.0, -0.5, 0.25, 3.0, -2.0, 0.125])  # the vector that WIRE.md encodes


def golden(heading: str) -> dict[str, str]:
    """The ``name hex`` lines of the code block after a heading of WIRE.md."""
    block = WIRE_MD.split(heading, 1)[1].split("```", 2)[1]
    return dict(line.split() for line in block.strip().splitlines()[1:])


MESSAGES: dict[str, bytes] = {
    "JoinRequest": wire.pack_join(JOIN).SerializeToString(),
    "JoinReply": wire.pack_joined(JOINED).SerializeToString(),
    "HeartbeatRequest": wire.pack_heartbeat(HEARTBEAT).SerializeToString(),
    "HeartbeatReply": wire.pack_heard(HEARD).SerializeToString(),
    "LeaveRequest": wire.pack_leave("edge-1", 9).SerializeToString(),
    "PullRequest": wire.pack_pull("edge-1", -1, ((0, 512), (1024, 1536))).SerializeToString(),
    "PullReply(version)": pb.PullReply(version=wire.pack_version(VERSION)).SerializeToString(),
    "PullReply(chunk)": chunks.pack(512, b"fleet"),
    "PushRequest(header:delta)": pb.PushRequest(header=offers.pack(DELTA)).SerializeToString(),
    "PushRequest(header:partial)": pb.PushRequest(header=offers.pack(PARTIAL)).SerializeToString(),
    "PushRequest(header:logits)": pb.PushRequest(header=offers.pack(LABELS)).SerializeToString(),
    "ProxyRequest": wire.pack_proxy_ask("edge-1", ((65536, 70000),)).SerializeToString(),
    "ProxyReply(proxy)": pb.ProxyReply(proxy=wire.pack_proxy(PROXY)).SerializeToString(),
    "ItemsRequest": items.pack_items_ask("edge-1", 77, 5, ((256, 512),)).SerializeToString(),
    "ItemsReply(items)": pb.ItemsReply(items=items.pack_catalogue(CATALOGUE)).SerializeToString(),
    "ShareRequest(header)": pb.ShareRequest(header=items.pack_share(SHARE)).SerializeToString(),
    "ShareReply(wanted)": items.pack_wanted((FINGERPRINT,)).SerializeToString(),
    "ShareReply(shared)": items.pack_shared(Shared((FINGERPRINT,), 3)).SerializeToString(),
    "WithdrawRequest": items.pack_withdraw(WITHDRAW).SerializeToString(),
    "WithdrawReply": pb.WithdrawReply(erased=2).SerializeToString(),
    "PushRequest(chunk)": chunks.pack(512, b"fleet"),
    "PushReply(held)": pb.PushReply(held=pb.Held(bytes=1536)).SerializeToString(),
    "PushReply(receipt)": pb.PushReply(receipt=wire.pack_receipt(RECEIPT)).SerializeToString(),
    "WatchRequest": wire.pack_watch("edge-1", 9, 4).SerializeToString(),
    "News": wire.pack_news(NEWS).SerializeToString(),
}


def test_golden_messages() -> None:
    assert golden("### Messages") == {name: data.hex() for name, data in MESSAGES.items()}


def test_golden_codecs() -> None:
    vectors = golden("### Codecs")
    assert set(vectors) == {"float32", "bfloat16", "int8", "int4", "float64", "topk:0.3"}
    for spec, encoded in vectors.items():
        codec = codecs.get(spec)
        payload = codec.encode(VECTOR)
        assert bytes(payload.numpy()).hex() == encoded, spec
        assert codec.encoded_bytes(len(VECTOR)) == len(encoded) // 2
        assert (codec.decode(payload, len(VECTOR)) - VECTOR).abs().max() <= 0.5


def test_golden_soft_labels() -> None:
    rows = torch.tensor([0.5, 0.25, 0.25, 1.0, 0.5, 0.5, 1.0, 2.0])
    vectors = golden("### Soft labels")
    assert set(vectors) == {"prob16:3", "probtop:2:3", "prob64:3"}
    for spec, encoded in vectors.items():
        codec = codecs.get(spec)
        given = rows.double() if spec == "prob64:3" else rows
        assert bytes(codec.encode(given).numpy()).hex() == encoded, spec
        assert torch.equal(codec.decode(torch.tensor(list(bytes.fromhex(encoded)), dtype=torch.uint8), 8), given)


def test_an_empty_track_leaves_no_trace_and_a_name_is_one_field_more() -> None:
    message = wire.pack_join(JOIN)
    message.track = ""
    assert message.SerializeToString() == MESSAGES["JoinRequest"]
    message.track = "small"
    assert message.SerializeToString() == MESSAGES["JoinRequest"] + bytes([8 << 3 | 2, 5]) + b"small"


def test_the_limits_are_those_of_the_document() -> None:
    table = WIRE_MD.split("## 2. Limits", 1)[1].split("\n## ", 1)[0]
    named = {name: int(value.replace(" ", "")) for value, name in re.findall(r"\| ([0-9 ]+) \|[^|]*\| `([A-Z_]+)` \|", table)}
    constants = {name: value for name, value in vars(limits).items() if name.isupper() and isinstance(value, int)}
    assert named == constants


def test_every_reason_is_in_the_document_with_its_status() -> None:
    table = WIRE_MD.split("## 7. Refusals", 1)[1].split("\n## ", 1)[0]
    rows = {reason: (status, retry) for reason, status, retry in re.findall(r"\| `(\w+)` \| `(\w+)` \| (yes|no) \|", table)}
    assert rows == {reason.value: (rule.status, "yes" if rule.retry else "no") for reason, rule in REASONS.items()}
