"""What holds for every layout and every way to cut its vector and its payload."""

from __future__ import annotations

import torch
from helpers.models import Assorted
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetddp.common.codecs import BLOCK, Codec, get
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Coverage, Geometry

some = settings(max_examples=100, deadline=None)
shapes = st.lists(st.lists(st.integers(0, 24), max_size=3).map(tuple), max_size=6)
# At least one parameter element, or there is no layout.
modules = st.builds(lambda p, b, seed: Assorted([(3,), *p], b, seed), shapes, shapes, st.integers(0, 99))
specs = st.sampled_from(["float32", "bfloat16", "int8", "int4", "topk:0.03"]).map(get)


def cuts(data: st.DataObject, end: int) -> list[tuple[int, int]]:
    """[0, end) cut anywhere."""
    inner = sorted(data.draw(st.sets(st.integers(1, max(end - 1, 1)), max_size=5)) - {end})
    return list(zip([0, *inner], [*inner, end], strict=True))


@some
@given(module=modules, data=st.data())
def test_intervals_read_like_the_whole_and_write_like_the_whole(module: Assorted, data: st.DataObject) -> None:
    layout = Layout.from_module(module)
    flat = layout.read(module)
    assert flat.shape == (layout.elements,)
    assert not flat[layout.parameters : layout.buffer_start].any()
    pieces = cuts(data, layout.elements)
    assert torch.equal(torch.cat([layout.read(module, interval=p) for p in pieces]), flat)
    other = torch.randn(layout.elements)
    other[layout.parameters : layout.buffer_start] = 0.0
    for piece in data.draw(st.permutations(pieces)):
        layout.write_(module, other[slice(*piece)], piece)
    assert torch.equal(layout.read(module), other)
    assert torch.equal(torch.cat([layout.outgoing(module, flat[slice(*p)], p) for p in pieces]), layout.outgoing(module, flat))


@some
@given(module=modules, other=modules)
def test_a_fingerprint_is_equal_exactly_when_the_layout_is(module: Assorted, other: Assorted) -> None:
    mine, theirs = Layout.from_module(module), Layout.from_module(other)
    assert Layout.from_json(mine.to_json()) == mine
    assert (mine.fingerprint == theirs.fingerprint) is (mine == theirs)
    assert (mine.first_difference(theirs) is None) is (mine == theirs)


@some
@given(module=modules, codec=specs, rows=st.integers(1, 3), buffers=st.booleans(), parts=st.integers(1, 9))
def test_a_split_covers_every_element_and_every_byte_once(
    module: Assorted, codec: Codec, rows: int, buffers: bool, parts: int
) -> None:
    geometry = Geometry(Layout.from_module(module), codec, rows=rows, buffers=buffers)
    shares = geometry.split(parts)
    assert len(shares) == parts
    coverage, octets = Coverage(), Coverage()
    for number, share in enumerate(shares):
        assert coverage.complete(geometry.required()) is (not any(shares[number:]))
        coverage.add(share)
        octets.add([geometry.byte_range(interval) for interval in share])
        assert [geometry.elements_of(*geometry.byte_range(interval)) for interval in share] == list(share)
    assert coverage.complete(geometry.required())
    assert octets.intervals == [(0, geometry.payload_bytes)]
    blocks = [sum(-(-(b - a) // BLOCK) for a, b in share) for share in shares]
    assert max(blocks) - min(blocks) <= 1


@some
@given(module=modules, codec=specs, rows=st.integers(1, 3), buffers=st.booleans(), chunk=st.integers(2048, 9000))
def test_chunks_decode_to_what_the_sections_do(module: Assorted, codec: Codec, rows: int, buffers: bool, chunk: int) -> None:
    layout = Layout.from_module(module)
    geometry = Geometry(layout, codec, rows=rows, buffers=buffers)
    values = torch.randn(rows * layout.elements, generator=torch.Generator().manual_seed(3))
    payload = torch.cat([geometry.encode(values[slice(*section)], section) for section in geometry.required()])
    assert len(payload) == geometry.payload_bytes
    pieces = list(geometry.chunks([(0, geometry.payload_bytes)], chunk))
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert all(stop - start <= chunk and geometry.aligned(start) and geometry.aligned(stop) for start, stop in pieces)
    by_chunk = torch.cat([geometry.decode_bytes(start, stop, payload[start:stop]) for start, stop in pieces])
    by_section = [geometry.decode(payload[slice(*geometry.byte_range(s))], s) for s in geometry.required()]
    assert torch.equal(by_chunk, torch.cat(by_section))
