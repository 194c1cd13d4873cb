"""What the staging area lets in, chunk by chunk, and what it refuses an update for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
import torch
from torch import Tensor

from fleetddp.common.codecs import get
from fleetddp.common.config import LimitsConfig
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import Offer
from fleetddp.common.files import OsFile, OsFiles
from fleetddp.common.journal import Journal
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.staging import Staging, Stream
from fleetddp.common.update import Group, Interval, Kind, Slice, Tier, Update, UpdateHeader, UpdateId

LAYOUT = Layout.of([("w", (4, 500)), ("b", (30,))], [("mean", (600,))])  # parameters [0, 2030), buffers [2048, 2648)
PARAMETERS, BUFFERS = (0, 2030), (2048, 2648)
CHUNK = 2048  # bytes: one block of float32

Chunk = tuple[int, int, bytes]  # offset, CRC32C, data


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(tmp_path / "journal", run="r")) as journal:
        yield journal


@pytest.fixture
def staging(journal: Journal) -> Staging:
    return Staging(journal, LimitsConfig())


def header_of(kind: Kind = Kind.DELTA, codec: str = "float32", **changes: object) -> UpdateHeader:
    header = UpdateHeader(
        update_id=UpdateId("a", 1, 1), kind=kind, tier=Tier.EDGE, base_version=0, codec=codec, layout=LAYOUT.fingerprint
    )
    return replace(header, **changes)  # type: ignore[arg-type]


def values_of(elements: int = LAYOUT.elements, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


class Sender:
    """A member that sends one slice."""

    def __init__(self, header: UpdateHeader, values: Tensor, intervals: tuple[Interval, ...], chunk: int = CHUNK) -> None:
        self.geometry = Geometry(LAYOUT, get(header.codec), rows=header.rows, buffers=header.kind is not Kind.GRADIENT)
        data = [bytes(bytes_of(self.geometry.encode(values[start:stop], (start, stop)))) for start, stop in intervals]
        self.payload = b"".join(data)
        self.offer = Offer(header=header, slice=Slice(intervals=intervals, samples=1.0, digest=google_crc32c.value(self.payload)))
        self.chunks: list[Chunk] = []
        for interval, part in zip(intervals, data, strict=True):
            begin, end = self.geometry.byte_range(interval)
            for start, stop in self.geometry.chunks([(begin, end)], chunk):
                piece = part[start - begin : stop - begin]
                self.chunks.append((start, google_crc32c.value(piece), piece))

    def send(self, stream: Stream, chunks: slice = slice(None)) -> None:
        for chunk in self.chunks[chunks]:
            stream.write(*chunk)


@pytest.fixture
def sender() -> Sender:
    return Sender(header_of(), values_of(), (PARAMETERS, BUFFERS))


def refusal(call: Callable[..., object], *args: object) -> tuple[Reason, str]:
    with pytest.raises(Refused) as refused:
        call(*args)
    return refused.value.reason, refused.value.message


def checked(data: bytes) -> tuple[int, bytes]:
    return google_crc32c.value(data), data


# ---- what is let in --------------------------------------------------------------------------------------------------------


def staged(journal: Journal, update_id: UpdateId) -> bytes:
    """What has arrived of an update."""
    with journal.payload(update_id) as payload:
        return payload.read(0, payload.size)


def test_a_whole_update_becomes_its_canonical_payload(staging: Staging, journal: Journal, sender: Sender) -> None:
    stream = staging.open(sender.offer, LAYOUT)
    assert stream.held == 0
    sender.send(stream)
    staged = stream.finish()
    assert (staged.update_id, staged.slice) == (UpdateId("a", 1, 1), sender.offer.slice)
    # Of the parameters alone; the chunks are added in float64.
    assert staged.squared_norm == pytest.approx(float(values_of()[:2030].double().square().sum()), rel=1e-6)
    update = Update(
        header=sender.offer.header,
        samples=1.0,
        squared_norm=staged.squared_norm,
        payload_bytes=len(sender.payload),
        slices=(sender.offer.slice,),
    )
    staging.accept(update, 5.0)
    with journal.payload(update.update_id) as payload:
        assert payload.size == len(sender.payload)
        assert payload.read(0, payload.size) == sender.payload
    assert refusal(stream.write, *sender.chunks[0])[0] is Reason.STALLED


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "topk:0.1"])
@pytest.mark.parametrize("parts", [1, 3, 7])
def test_any_codec_in_any_number_of_streams(staging: Staging, journal: Journal, codec: str, parts: int) -> None:
    header = header_of(codec=codec)
    whole = Sender(header, values_of(), (PARAMETERS, BUFFERS))
    squared_norm = 0.0
    streams = []
    for intervals in whole.geometry.split(parts):
        part = Sender(header, values_of(), intervals)
        streams.append((part, staging.open(part.offer, LAYOUT)))
    for part, stream in reversed(streams):
        part.send(stream)
        squared_norm += stream.finish().squared_norm
    decoded = whole.geometry.decode(
        torch.frombuffer(bytearray(whole.payload[: whole.geometry.byte_range(PARAMETERS)[1]]), dtype=torch.uint8), PARAMETERS
    )
    assert squared_norm == pytest.approx(float(decoded.double().square().sum()), rel=1e-6)
    assert staged(journal, header.update_id) == whole.payload


def test_streams_may_write_at_the_same_time(staging: Staging, journal: Journal) -> None:
    header = header_of()
    whole = Sender(header, values_of(), (PARAMETERS, BUFFERS))
    parts = [Sender(header, values_of(), intervals, chunk=2048) for intervals in whole.geometry.split(6) if intervals]

    def bring(part: Sender) -> None:
        stream = staging.open(part.offer, LAYOUT)
        part.send(stream)
        stream.finish()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(bring, parts))
    assert staged(journal, header.update_id) == whole.payload


def test_a_gradient_carries_no_buffers(staging: Staging) -> None:
    sender = Sender(header_of(Kind.GRADIENT), values_of(), (PARAMETERS,))
    stream = staging.open(sender.offer, LAYOUT)
    sender.send(stream)
    assert stream.finish().slice == sender.offer.slice
    other = header_of(Kind.GRADIENT, update_id=UpdateId("b", 1, 1))
    offer = Offer(header=other, slice=Slice(intervals=(PARAMETERS, BUFFERS), samples=1.0, digest=0))
    assert refusal(staging.open, offer, LAYOUT)[0] is Reason.WRONG_INTERVALS


def test_a_partial_has_a_row_for_each_group(staging: Staging) -> None:
    groups = tuple(
        Group(tier=Tier.EDGE, base_version=base, samples=2.0, buffer_samples=2.0, ids=(UpdateId("x", 1, base),))
        for base in (3, 4)
    )
    header = header_of(Kind.PARTIAL, groups=groups)
    second = LAYOUT.elements
    intervals = (PARAMETERS, BUFFERS, (second, second + 2030), (second + 2048, second + 2648))
    values = torch.ones(2 * LAYOUT.elements)
    sender = Sender(header, values, intervals)
    stream = staging.open(sender.offer, LAYOUT)
    sender.send(stream)
    assert stream.finish().squared_norm == 2 * 2030


def test_an_init_brings_its_own_layout(staging: Staging) -> None:
    sender = Sender(header_of(Kind.INIT, layout_spec=LAYOUT.to_json()), values_of(), (PARAMETERS, BUFFERS))
    stream = staging.open(sender.offer, None)
    sender.send(stream)
    stream.finish()


def test_squares_that_overflow_float32_are_added_in_float64(staging: Staging) -> None:
    sender = Sender(header_of(), torch.full((LAYOUT.elements,), 3e30), (PARAMETERS, BUFFERS))
    stream = staging.open(sender.offer, LAYOUT)
    sender.send(stream)
    assert stream.finish().squared_norm == pytest.approx(2030 * 9e60, rel=1e-6)


# ---- resuming --------------------------------------------------------------------------------------------------------------


def test_a_broken_stream_is_resumed_where_it_ended(staging: Staging, journal: Journal, sender: Sender) -> None:
    broken = staging.open(sender.offer, LAYOUT)
    sender.send(broken, slice(0, 2))
    stream = staging.open(sender.offer, LAYOUT)
    assert stream.held == 2 * CHUNK
    reason, message = refusal(broken.write, *sender.chunks[2])
    assert reason is Reason.STALLED
    assert "took over" in message
    sender.send(stream, slice(2, None))
    assert refusal(broken.finish)[0] is Reason.STALLED
    assert stream.finish().squared_norm == pytest.approx(float(values_of()[:2030].double().square().sum()), rel=1e-6)
    assert staged(journal, UpdateId("a", 1, 1)) == sender.payload


def test_a_slice_that_is_whole_is_staged_again_without_sending(staging: Staging, sender: Sender) -> None:
    first = staging.open(sender.offer, LAYOUT)
    sender.send(first)
    staged = first.finish()
    again = staging.open(sender.offer, LAYOUT)
    assert again.held == len(sender.payload)
    assert again.finish() == staged


def test_after_a_discard_an_update_begins_anew(staging: Staging, sender: Sender) -> None:
    old = staging.open(sender.offer, LAYOUT)
    sender.send(old, slice(0, 2))
    staging.discard(UpdateId("a", 1, 1))
    assert refusal(old.write, *sender.chunks[2])[0] is Reason.STALLED
    stream = staging.open(sender.offer, LAYOUT)
    assert stream.held == 0
    sender.send(stream)
    stream.finish()


# ---- what is refused: each for its own reason, and what was staged before stays ------------------------------------------


def test_truncated(staging: Staging, sender: Sender) -> None:
    stream = staging.open(sender.offer, LAYOUT)
    sender.send(stream, slice(0, -1))
    size = len(sender.payload)
    reason, message = refusal(stream.finish)
    assert reason is Reason.TRUNCATED
    assert f"after {size - len(sender.chunks[-1][2])} of {size} bytes" in message
    sender.send(stream, slice(-1, None))
    stream.finish()


@pytest.mark.parametrize("wrong", [0, 2, 4], ids=["repeated", "skipped", "of the next range"])
def test_reordered(staging: Staging, sender: Sender, wrong: int) -> None:
    stream = staging.open(sender.offer, LAYOUT)
    sender.send(stream, slice(0, 1))
    reason, message = refusal(stream.write, *sender.chunks[wrong])
    assert reason is Reason.OUT_OF_ORDER
    assert f"for byte {sender.chunks[wrong][0]}; byte 2048 was due" in message
    sender.send(stream, slice(1, None))
    stream.finish()


def test_an_empty_chunk(staging: Staging, sender: Sender) -> None:
    assert refusal(staging.open(sender.offer, LAYOUT).write, 0, 0, b"")[0] is Reason.OUT_OF_ORDER


def test_oversized_chunk(staging: Staging) -> None:
    layout = Layout.of([("w", (200_000,))])
    header = header_of(layout=layout.fingerprint)
    stream = staging.open(Offer(header=header, slice=Slice(intervals=((0, 200_000),), samples=1.0, digest=0)), layout)
    stream.write(0, *checked(bytes(512 * 1024)))
    reason, message = refusal(stream.write, 512 * 1024, *checked(bytes(512 * 1024 + 4)))
    assert reason is Reason.TOO_LARGE
    assert "a chunk of 524292 bytes; at most 524288" in message


def test_more_bytes_than_the_slice_has(staging: Staging, sender: Sender) -> None:
    stream = staging.open(sender.offer, LAYOUT)
    sender.send(stream, slice(0, 3))
    offset, _, data = sender.chunks[3]  # the last one of the parameters
    reason, message = refusal(stream.write, offset, *checked(data + bytes(4)))
    assert reason is Reason.WRONG_SIZE
    assert f"beyond {4 * 2030}" in message
    sender.send(stream, slice(3, None))
    assert refusal(stream.write, len(sender.payload), *checked(bytes(4)))[0] is Reason.WRONG_SIZE
    stream.finish()


def test_one_element_where_a_vector_is_due(staging: Staging, sender: Sender) -> None:
    # A (1,)-shaped tensor for an (n,)-shaped one: nothing is broadcast.
    stream = staging.open(sender.offer, LAYOUT)
    reason, message = refusal(stream.write, 0, *checked(bytes(4)))
    assert reason is Reason.WRONG_SIZE
    assert "within a block of float32 (2048 bytes)" in message
    assert refusal(stream.finish)[0] is Reason.TRUNCATED


def test_wrong_checksum_of_a_chunk(staging: Staging, sender: Sender) -> None:
    stream = staging.open(sender.offer, LAYOUT)
    offset, crc, data = sender.chunks[0]
    flipped = bytes([data[0] ^ 1]) + data[1:]
    assert refusal(stream.write, offset, crc, flipped)[0] is Reason.BAD_CHECKSUM
    sender.send(stream)
    stream.finish()


def test_wrong_checksum_of_the_slice(staging: Staging, sender: Sender) -> None:
    wrong = replace(sender.offer, slice=replace(sender.offer.slice, digest=sender.offer.slice.digest ^ 1))
    stream = staging.open(wrong, LAYOUT)
    sender.send(stream)
    reason, message = refusal(stream.finish)
    assert reason is Reason.BAD_CHECKSUM
    assert f"{sender.offer.slice.digest:08x}, not {wrong.slice.digest:08x}" in message
    assert staging.open(wrong, LAYOUT).held == 0  # nobody knows which bytes are wrong: all come again


@pytest.mark.parametrize("element", [0, 700, 2029, 2048, 2647])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(staging: Staging, element: int, value: float) -> None:
    good = Sender(header_of(), values_of(), (PARAMETERS, BUFFERS))
    stream = staging.open(good.offer, LAYOUT)
    for offset, crc, data in good.chunks:
        first, last = good.geometry.elements_of(offset, offset + len(data))
        if not first <= element < last:
            stream.write(offset, crc, data)
            continue
        spoiled = torch.frombuffer(bytearray(data), dtype=torch.float32)
        spoiled[element - first] = value
        reason, message = refusal(stream.write, offset, *checked(spoiled.numpy().tobytes()))
        assert reason is Reason.NOT_FINITE
        assert f"element {element} is {value}" in message
        return
    raise AssertionError("no chunk holds the element")


def test_not_finite_in_another_codec(staging: Staging) -> None:
    sender = Sender(header_of(codec="int8"), values_of(), (PARAMETERS, BUFFERS))
    stream = staging.open(sender.offer, LAYOUT)
    data = b"\xff" * len(sender.chunks[0][2])
    assert refusal(stream.write, 0, *checked(data))[0] is Reason.NOT_FINITE


def test_one_id_with_other_contents(staging: Staging, sender: Sender) -> None:
    stream = staging.open(sender.offer, LAYOUT)
    other_bytes = replace(sender.offer, slice=replace(sender.offer.slice, digest=1))
    assert refusal(staging.open, other_bytes, LAYOUT)[0] is Reason.ID_REUSED
    other_base = replace(sender.offer, header=replace(sender.offer.header, base_version=1))
    assert refusal(staging.open, other_base, LAYOUT)[0] is Reason.ID_REUSED
    sender.send(stream)  # the first one is not disturbed
    stream.finish()


def test_wrong_layout_codec_and_intervals(staging: Staging, sender: Sender, tmp_path: Path) -> None:
    def opened(header: UpdateHeader, intervals: tuple[Interval, ...] = (PARAMETERS,), layout: Layout | None = LAYOUT) -> Reason:
        return refusal(staging.open, Offer(header=header, slice=Slice(intervals=intervals, samples=1.0, digest=0)), layout)[0]

    assert opened(header_of(layout="0" * 64)) is Reason.WRONG_LAYOUT
    assert opened(header_of(Kind.INIT, layout_spec=Layout.of([("v", (5,))]).to_json())) is Reason.WRONG_LAYOUT
    assert opened(header_of(Kind.INIT, layout_spec=b"{")) is Reason.MALFORMED
    assert opened(header_of(), layout=None) is Reason.NO_VERSION
    assert opened(header_of(codec="zip")) is Reason.UNKNOWN_CODEC
    assert opened(header_of(), ((1, 2030),)) is Reason.WRONG_INTERVALS
    assert opened(header_of(), ((0, 2648),)) is Reason.WRONG_INTERVALS
    # None of them left a file behind, or keeps the id from being used well.
    assert list((tmp_path / "journal" / "payloads").iterdir()) == []
    sender.send(staging.open(sender.offer, LAYOUT))


def test_more_elements_than_allowed(journal: Journal, sender: Sender) -> None:
    staging = Staging(journal, LimitsConfig(max_elements=1000))
    reason, message = refusal(staging.open, sender.offer, LAYOUT)
    assert reason is Reason.TOO_LARGE
    assert "2648 elements; limits.max_elements is 1000" in message


def test_a_disk_that_refuses(tmp_path: Path, sender: Sender) -> None:
    class Full(OsFile):
        def pwrite(self, data: object, offset: int) -> None:
            raise OSError(28, "No space left on device")

    class Files(OsFiles):
        def create(self, path: Path) -> OsFile:
            file = super().create(path)
            if path.parent.name == "payloads":
                file.__class__ = Full
            return file

    with contextlib.closing(Journal(tmp_path / "full", run="r", files=Files())) as journal:
        stream = Staging(journal, LimitsConfig()).open(sender.offer, LAYOUT)
        reason, message = refusal(stream.write, *sender.chunks[0])
        assert reason is Reason.STORAGE
        assert "No space left" in message
        assert refusal(stream.finish)[0] is Reason.TRUNCATED
