"""Where elements lie in the bytes, worked out by hand for small layouts; and which positions nobody may use."""

from __future__ import annotations

import gc
import struct

import pytest
import torch

from fleetddp.common.codecs import get
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Coverage, Geometry, bytes_of, tensor_over

# 1300 parameters (blocks of 512, 512, 276), a gap to 1536, 600 buffer elements (512, 88): 2136 elements.
LAYOUT = Layout.of([("w", (1300,))], [("b", (600,))])
INT8_ROW = 516 + 516 + 280  # then 600 * 4 = 2400 bytes of buffers


def refused(call: object, *args: object) -> Refused:
    assert callable(call)
    with pytest.raises(Refused) as caught:
        call(*args)
    assert caught.value.reason is Reason.WRONG_INTERVALS
    return caught.value


# ---- sizes and positions --------------------------------------------------------------------------------------------------


def test_one_row() -> None:
    geometry = Geometry(LAYOUT, get("int8"))
    assert geometry.payload_bytes == INT8_ROW + 2400
    assert geometry.required() == ((0, 1300), (1536, 2136))
    assert geometry.byte_range((0, 1300)) == (0, 1312)
    assert geometry.byte_range((512, 1024)) == (516, 1032)
    assert geometry.byte_range((1024, 1300)) == (1032, 1312)
    assert geometry.byte_range((1536, 2136)) == (1312, 3712)
    assert geometry.byte_range((2048, 2136)) == (3360, 3712)


def test_rows_follow_one_another() -> None:
    geometry = Geometry(LAYOUT, get("int8"), rows=3)
    assert geometry.payload_bytes == 3 * 3712
    assert geometry.required() == ((0, 1300), (1536, 2136), (2136, 3436), (3672, 4272), (4272, 5572), (5808, 6408))
    assert geometry.byte_range((2136 + 512, 2136 + 1300)) == (3712 + 516, 3712 + 1312)
    assert geometry.byte_range((5808, 6408)) == (2 * 3712 + 1312, 3 * 3712)


def test_a_gradient_carries_no_buffers() -> None:
    geometry = Geometry(LAYOUT, get("float32"), rows=2, buffers=False)
    assert geometry.payload_bytes == 2 * 5200
    assert geometry.required() == ((0, 1300), (2136, 3436))
    assert geometry.byte_range((2136, 3436)) == (5200, 10400)
    refused(geometry.byte_range, (1536, 2136))


def test_sections_without_a_gap_are_still_two() -> None:
    geometry = Geometry(Layout.of([("w", (512,))], [("b", (512,))]), get("int8"))
    assert geometry.required() == ((0, 512), (512, 1024))
    assert geometry.byte_range((512, 1024)) == (516, 516 + 2048)
    refused(geometry.byte_range, (0, 1024))


@pytest.mark.parametrize(
    "interval",
    [
        (0, 0),
        (512, 0),
        (-512, 512),
        (1, 512),  # starts inside a block
        (0, 511),  # stops inside a block
        (1024, 1299),
        (0, 1536),  # into the gap
        (1300, 1536),  # the gap
        (1024, 2048),  # across the sections
        (1536, 2100),
        (2136, 2648),  # a row that is not there
        (0, 10**15),
    ],
)
def test_a_position_that_nobody_may_use(interval: tuple[int, int]) -> None:
    geometry = Geometry(LAYOUT, get("int8"))
    for call in (geometry.byte_range, lambda i: geometry.decode(torch.zeros(4, dtype=torch.uint8), i)):
        message = refused(call, interval).message
        assert f"elements [{interval[0]}, {interval[1]})" in message
        assert "parameters [0, 1300), buffers [1536, 2136)" in message


def test_bytes_to_elements() -> None:
    geometry = Geometry(LAYOUT, get("int8"), rows=2)
    assert geometry.elements_of(516, 1312) == (512, 1300)
    assert geometry.elements_of(1312, 1312 + 2048) == (1536, 2048)
    assert geometry.elements_of(3712, 3712 + 516) == (2136, 2648)
    assert [geometry.section_at(a, b).parameters for a, b in ((0, 516), (1312, 3360), (3712, 4228))] == [True, False, True]
    for start, stop in ((0, 515), (1, 516), (516, 516), (1032, 3360), (3360, 4228), (-516, 516), (0, 10**12), (7424, 7940)):
        assert f"bytes [{start}, {stop})" in refused(geometry.elements_of, start, stop).message


def test_alignment_is_that_of_blocks() -> None:
    geometry = Geometry(LAYOUT, get("int8"), rows=2)
    starts = [0, 516, 1032, 1312, 3360]
    expected = [*starts, *(3712 + s for s in starts), 7424]
    assert [offset for offset in range(-600, 9000) if geometry.aligned(offset)] == expected


# ---- cutting ----------------------------------------------------------------------------------------------------------------


def test_split_gives_each_part_whole_blocks() -> None:
    geometry = Geometry(LAYOUT, get("int8"))  # five blocks
    assert geometry.split(1) == [((0, 1300), (1536, 2136))]
    assert geometry.split(2) == [((0, 1024),), ((1024, 1300), (1536, 2136))]
    assert geometry.split(3) == [((0, 512),), ((512, 1300),), ((1536, 2136),)]


def test_split_into_more_parts_than_blocks_leaves_some_empty() -> None:
    shares = Geometry(Layout.of([("w", (600,))]), get("float32")).split(5)
    assert [s for s in shares if s] == [((0, 512),), ((512, 600),)]
    assert len(shares) == 5


def test_chunks_end_on_blocks_and_cross_no_section() -> None:
    geometry = Geometry(LAYOUT, get("int8"))
    assert list(geometry.chunks([(0, 3712)], 2048)) == [(0, 1312), (1312, 3360), (3360, 3712)]
    assert list(geometry.chunks([(516, 1312), (3360, 3712)], 2048)) == [(516, 1312), (3360, 3712)]
    assert list(Geometry(LAYOUT, get("int8"), buffers=False).chunks([(0, 1312)], 1000)) == [(0, 516), (516, 1032), (1032, 1312)]
    # A pull may resume anywhere: the first chunk only reaches the next block that fits.
    assert list(geometry.chunks([(100, 1312)], 2048)) == [(100, 1312)]
    assert list(geometry.chunks([(1412, 3712)], 2048)) == [(1412, 3360), (3360, 3712)]


def test_chunks_refuse_what_is_no_range_and_chunks_too_small() -> None:
    geometry = Geometry(LAYOUT, get("int8"))
    for bad in ((0, 0), (-1, 5), (0, 3713)):
        refused(lambda bad=bad: list(geometry.chunks([bad], 2048)))
    with pytest.raises(ConfigError, match=r"chunks of 2047 bytes hold no block of float32 \(2048 bytes\)"):
        list(geometry.chunks([(0, 3712)], 2047))


# ---- content ----------------------------------------------------------------------------------------------------------------


def test_parameters_use_the_codec_and_buffers_float32() -> None:
    geometry = Geometry(LAYOUT, get("int4"))
    parameters, buffers = torch.full((276,), 7.0), torch.arange(88.0)
    data = geometry.encode(parameters, (1024, 1300))
    assert bytes_of(data) == struct.pack("<f", 1.0) + b"\xff" * 138
    assert torch.equal(geometry.decode(data, (1024, 1300)), parameters)
    data = geometry.encode(buffers, (2048, 2136))
    assert bytes_of(data) == struct.pack("<88f", *range(88))
    assert torch.equal(geometry.decode_bytes(geometry.payload_bytes - 352, geometry.payload_bytes, data), buffers)


def test_values_of_another_length_than_the_interval() -> None:
    geometry = Geometry(LAYOUT, get("float32"))
    with pytest.raises(ConfigError, match=r"1 values for the interval \(0, 512\)"):
        geometry.encode(torch.ones(1), (0, 512))
    with pytest.raises(Refused) as caught:
        geometry.decode_bytes(0, 2048, torch.zeros(4, dtype=torch.uint8))
    assert caught.value.reason is Reason.WRONG_SIZE


# ---- coverage ---------------------------------------------------------------------------------------------------------------


def test_coverage_is_complete_when_every_required_interval_is() -> None:
    coverage = Coverage()
    required = ((0, 1024), (1536, 2048))
    for interval in ((512, 1024), (1536, 2048), (0, 512)):
        assert not coverage.complete(required)
        coverage.add([interval])
    assert coverage.complete(required)
    assert coverage.intervals == [(0, 1024), (1536, 2048)]
    assert coverage.complete(())


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        ([(0, 100), (50, 60)], r"\[50, 60\) are covered twice"),
        ([(150, 250)], r"\[150, 200\) are covered twice"),
        ([(0, 101)], r"\[100, 101\) are covered twice"),
        ([(300, 300)], r"\[300, 300\) is an empty interval"),
        ([(-5, 3)], r"\[-5, 3\) is"),
        ([(0, 100), (100, 200)], r"\[100, 200\) are covered twice"),
    ],
)
def test_overlap_is_refused_and_changes_nothing(intervals: list[tuple[int, int]], message: str) -> None:
    coverage = Coverage()
    coverage.add([(100, 200)])
    with pytest.raises(Refused, match=message) as caught:
        coverage.add(intervals)
    assert caught.value.reason is Reason.WRONG_INTERVALS
    assert coverage.intervals == [(100, 200)]


# ---- memory -------------------------------------------------------------------------------------------------------------------


def test_tensor_over_shares_the_memory_and_keeps_it_alive() -> None:
    for kind in (bytes, bytearray, memoryview):
        data = kind(bytes(range(200)))
        tensor = tensor_over(data)
        address = tensor.data_ptr()
        assert address == tensor_over(data).data_ptr()
        del data
        gc.collect()
        assert tensor.tolist() == list(range(200))
    assert tensor_over(b"").shape == (0,)
    assert tensor_over(memoryview(b"abc")[1:]).tolist() == [98, 99]


def test_bytes_of_shares_the_memory() -> None:
    tensor = torch.arange(6, dtype=torch.uint8)
    view = bytes_of(tensor)
    tensor[0] = 9
    assert bytes(view) == bytes([9, 1, 2, 3, 4, 5])
    assert bytes(bytes_of(tensor[::2])) == bytes([9, 2, 4])
    assert bytes(bytes_of(tensor[:0])) == b""
