"""What holds for every codec of soft labels and all soft labels."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common.codecs import Codec
from fleetddp.common.codecs.prob import SoftLabels
from fleetddp.common.errors import Reason, Refused

some = settings(max_examples=120, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def soft_codecs(draw: st.DrawFn) -> SoftLabels:
    classes = draw(st.sampled_from([2, 3, 10, 255, 256, 257, 1000]))
    kept = draw(st.integers(0, min(classes - 1, 40)))
    codec = codecs.get(f"probtop:{kept}:{classes}" if kept else f"prob16:{classes}")
    assert isinstance(codec, SoftLabels)
    return codec


def labels(codec: SoftLabels, items: int, seed: int) -> Tensor:
    """f32[items, C + 1], of any sharpness and weight; some items are nobody's."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = 10.0 ** (3 * torch.rand(items, 1, generator=generator) - 1)
    p = torch.softmax(sharpness * torch.randn(items, codec.classes, generator=generator), 1)
    w = 10.0 ** (12 * torch.rand(items, 1, generator=generator) - 6) * (torch.rand(items, 1, generator=generator) > 0.1)
    return torch.cat([w * p, w], 1)


@some
@given(codec=soft_codecs(), items=st.integers(0, 30), seed=seeds)
def test_what_is_decoded_is_soft_labels_within_the_error(codec: SoftLabels, items: int, seed: int) -> None:
    x = labels(codec, items, seed)
    data = codec.encode(x.reshape(-1))
    assert data.shape == (items * codec.block_bytes,)
    y = codec.decode(data, x.numel()).view(-1, codec.classes + 1)
    w = x[:, -1:]
    assert torch.equal(y[:, -1:], w)  # a weight is exact
    assert bool((y[:, :-1] >= 0).all())
    assert bool(((y[:, :-1].double().sum(1, keepdim=True) - w.double()).abs() <= 1e-5 * w.double()).all())
    p, q = (rows[:, :-1].double() / torch.where(w > 0, w, 1.0) for rows in (x, y))
    if codec.spec.startswith("prob16"):
        # Rounded to float16, and divided by the sum of C rounded ones, which is off by up to 2^-11 + C 2^-25.
        assert bool(((p - q).abs() <= p * (2.0**-10 + codec.classes * 2.0**-25) + 2.0**-24).all())
        return
    kept = int(codec.spec.split(":")[1])
    for before, after in zip(p[w[:, 0] > 0], q[w[:, 0] > 0], strict=True):
        order = before.argsort(descending=True)
        spread = (1.0 - before[order[:kept]].sum()) / (codec.classes - kept)
        expected = torch.full_like(before, float(spread)).scatter(0, order[:kept], before[order[:kept]])
        assert bool(((after.sort().values - expected.sort().values).abs() <= 2.0**-10 + 2.0**-24).all())


@some
@given(codec=soft_codecs(), items=st.integers(1, 12), seed=seeds)
def test_items_decode_alone(codec: SoftLabels, items: int, seed: int) -> None:
    data = codec.encode(labels(codec, items, seed).reshape(-1))
    whole = codec.decode(data, items * codec.block).view(items, -1)
    for item, alone in enumerate(data.view(items, -1)):
        assert torch.equal(codec.decode(alone.clone(), codec.block), whole[item])


@settings(max_examples=200, deadline=None)
@given(codec=soft_codecs(), seed=seeds, flips=st.lists(st.integers(0, 2**20), min_size=1, max_size=3), noise=st.booleans())
def test_any_bytes_are_refused_or_decode_to_soft_labels(codec: Codec, seed: int, flips: list[int], noise: bool) -> None:
    assert isinstance(codec, SoftLabels)
    generator = torch.Generator().manual_seed(seed)
    if noise:
        data = torch.randint(0, 256, (3 * codec.block_bytes,), dtype=torch.uint8, generator=generator)
    else:
        data = codec.encode(labels(codec, 3, seed).reshape(-1)).clone()
        for flip in flips:
            data[flip // 8 % len(data)] ^= 1 << flip % 8
    reason, rows = None, torch.zeros(3, codec.block)
    try:
        rows = codec.decode(data, 3 * codec.block).view(3, -1)
    except Refused as refusal:
        reason = refusal.reason
    assert reason in (None, Reason.NOT_FINITE, Reason.MALFORMED, Reason.BAD_PROBABILITIES, Reason.BAD_WEIGHT)
    assert bool(torch.isfinite(rows).all())
    assert bool((rows >= 0).all())
    sums, weights = rows[:, :-1].double().sum(1), rows[:, -1].double()
    assert bool(((sums - weights).abs() <= 1e-5 * weights + 1e-35).all())
