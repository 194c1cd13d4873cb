"""What holds for every codec and every vector."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common.codecs import BLOCK, Codec
from fleetddp.common.errors import Reason, Refused

SPECS = ["float32", "bfloat16", "int8", "int4", "topk:0.03", "topk:0.5", "topk:1"]
some = settings(max_examples=120, deadline=None)
specs = st.sampled_from(SPECS).map(codecs.get)
seeds = st.integers(0, 2**32 - 1)
sizes = st.one_of(st.integers(0, 1600), st.sampled_from([0, 1, 2, 3, 511, 512, 513, 1023, 1024, 1025, 512 * 513 + 7]))


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Vectors of any magnitude, some mostly zero, some not contiguous."""
    generator = torch.Generator().manual_seed(draw(seeds))
    n, exponent, stride = draw(sizes), draw(st.integers(-145, 120)), draw(st.sampled_from([1, 1, 2, 3]))
    x = torch.randn(n, stride, generator=generator)
    x *= torch.rand(n, stride, generator=generator) < draw(st.sampled_from([1.0, 0.5, 0.01]))
    return (x * 2.0**exponent)[:, draw(st.integers(0, stride - 1))]


def peaks(x: Tensor) -> Tensor:
    """For each element the largest magnitude of its block, in float64."""
    return torch.cat([block.abs().max().expand(len(block)) for block in x.double().split(BLOCK)]) if len(x) else x.double()


def bound(codec: Codec, x: Tensor) -> Tensor:
    """The error that each codec's docstring allows an element (topk: see its own test)."""
    peak, size = peaks(x), x.double().abs()
    if codec.spec == "float32":
        return torch.zeros_like(size)
    if codec.spec == "bfloat16":
        return torch.where(size >= 2.0**-126, size * 2.0**-8, 2.0**-134)
    levels = {"int8": 127, "int4": 7}[codec.spec]
    return torch.where(peak < 2.0**-119, peak, peak * (0.5 / levels + 2.0**-22))


@some
@given(codec=st.sampled_from(SPECS[:4]).map(codecs.get), x=vectors())
def test_the_error_stays_within_its_bound(codec: Codec, x: Tensor) -> None:
    y = codec.decode(codec.encode(x), len(x))
    assert y.dtype == torch.float32
    assert y.shape == x.shape
    assert bool(((y.double() - x.double()).abs() <= bound(codec, x)).all())


@some
@given(ratio=st.sampled_from(["0.03", "0.5", "1"]), x=vectors())
def test_topk_sends_the_largest_exactly(ratio: str, x: Tensor) -> None:
    codec = codecs.get(f"topk:{ratio}")
    y = codec.decode(codec.encode(x), len(x))
    for sent, block in zip(y.split(BLOCK), x.split(BLOCK), strict=True):
        kept = math.ceil(float(ratio) * len(block))
        assert torch.equal(sent[sent != 0], block[sent != 0])
        expected = block.abs().sort().values
        expected[: len(block) - kept] = 0.0
        assert torch.equal(sent.abs().sort().values, expected)


@some
@given(codec=specs, x=vectors())
def test_the_size_is_as_documented_and_blocks_decode_alone(codec: Codec, x: Tensor) -> None:
    data = codec.encode(x)
    assert data.dtype == torch.uint8
    assert data.shape == (codec.encoded_bytes(len(x)),)
    whole = codec.decode(data, len(x))
    for number, block in enumerate(x.split(BLOCK)[:4]):
        alone = codec.encode(block)
        assert torch.equal(alone, data[number * codec.block_bytes :][: len(alone)])
        assert torch.equal(codec.decode(alone, len(block)), whole[number * BLOCK :][: len(block)])


@some
@given(codec=specs, x=vectors())
def test_encoding_leaves_its_argument_alone_and_is_a_function_of_the_values(codec: Codec, x: Tensor) -> None:
    before = x.clone()
    data = codec.encode(x).clone()
    codec.encode_with_feedback(x, x)
    assert torch.equal(x, before)
    assert torch.equal(codec.encode(before.contiguous()), data)


@some
@given(codec=specs, x=vectors(), bad=st.sampled_from([math.inf, -math.inf, math.nan]), data=st.data())
def test_inf_and_nan_are_refused(codec: Codec, x: Tensor, bad: float, data: st.DataObject) -> None:
    if len(x) == 0:
        return
    x = x.clone()
    for place in data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=3)):
        x[place] = bad
    with pytest.raises(Refused) as caught:
        codec.encode(x)
    assert caught.value.reason is Reason.NOT_FINITE


@settings(max_examples=40, deadline=None)
@given(codec=specs, n=st.integers(0, 1600), steps=st.integers(1, 8), seed=seeds)
def test_what_was_sent_plus_the_residual_is_what_was_meant(codec: Codec, n: int, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    meant, sent = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    residual, largest = None, 0.0
    for _ in range(steps):
        x = torch.randn(n, generator=generator)
        payload, left = codec.encode_with_feedback(x, residual)
        decoded = codec.decode(payload, n)
        meant, sent = meant + x.double(), sent + decoded.double()
        largest = max([largest, *(float(v.abs().max()) for v in (x, residual, decoded) if v is not None and n)])
        residual = left
    rest = 0.0 if residual is None else residual.double()
    assert (residual is None) is codec.lossless
    # Each step rounds twice, to 24 bits: x + residual, and that less what was decoded; both are below 2 * largest.
    assert n == 0 or float((sent + rest - meant).abs().max()) <= steps * 2 * 2.0**-24 * 2 * largest


def assert_refused_or_finite(codec: Codec, data: Tensor, n: int) -> None:
    reason = None
    try:
        decoded = codec.decode(data, n)
    except Refused as refusal:
        reason = refusal.reason
    if reason is None:
        assert decoded.shape == (n,)
        assert bool(torch.isfinite(decoded).all())
    else:
        assert reason in (Reason.NOT_FINITE, Reason.MALFORMED)


@settings(max_examples=200, deadline=None)
@given(codec=specs, n=st.integers(0, 600), seed=seeds)
def test_any_bytes_are_refused_or_decode_to_finite_numbers(codec: Codec, n: int, seed: int) -> None:
    noise = torch.randint(0, 256, (codec.encoded_bytes(n),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    assert_refused_or_finite(codec, noise, n)


@settings(max_examples=150, deadline=None)
@given(codec=specs, x=vectors(), flip=st.integers(0, 2**30), seed=seeds)
def test_a_flipped_bit_is_refused_or_decodes_to_finite_numbers(codec: Codec, x: Tensor, flip: int, seed: int) -> None:
    data = codec.encode(x).clone()
    if len(data) == 0:
        return
    data[flip % len(data)] ^= 1 << (seed % 8)
    assert_refused_or_finite(codec, data, len(x))
