"""The codecs of soft labels, byte for byte."""

from __future__ import annotations

import struct

import pytest
import torch

from fleetddp.common import codecs
from fleetddp.common.codecs.prob import TOLERANCE
from fleetddp.common.errors import ConfigError, Reason, Refused


def octets(*parts: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def rows(*items: list[float]) -> torch.Tensor:
    return torch.tensor([value for item in items for value in item])


def test_prob16_bytes() -> None:
    """Two items of three classes; 0.5, 0.25 and 1 are exact in float16, so nothing is lost."""
    codec = codecs.get("prob16:3")
    x = rows([1.0, 0.5, 0.5, 2.0], [0.0, 3.0, 0.0, 3.0])
    data = codec.encode(x)
    assert bytes(data.tolist()) == struct.pack("<3ef3ef", 0.5, 0.25, 0.25, 2.0, 0.0, 1.0, 0.0, 3.0)
    assert codec.block_bytes == 2 * 3 + 4
    assert torch.equal(codec.decode(data, 8), x)


def test_probtop_bytes() -> None:
    """Two of four classes: 0.5 and 0.25 are sent, and of what they lack to 1 each of the other two gets half."""
    codec = codecs.get("probtop:2:4")
    data = codec.encode(rows([0.25, 0.5, 0.0625, 0.1875, 1.0]))
    assert bytes(data.tolist()) == struct.pack("<2B2ef", 0, 1, 0.25, 0.5, 1.0)
    assert codec.block_bytes == 3 * 2 + 4
    assert torch.equal(codec.decode(data, 5), rows([0.25, 0.5, 0.125, 0.125, 1.0]))


def test_probtop_of_many_classes_has_wide_indices() -> None:
    codec = codecs.get("probtop:1:65536")
    x = torch.zeros(65537)
    x[65535] = x[65536] = 4.0
    data = codec.encode(x)
    assert bytes(data.tolist()) == struct.pack("<Hef", 65535, 1.0, 4.0)
    assert torch.equal(codec.decode(data, 65537), x)


@pytest.mark.parametrize("spec", ["prob16:3", "probtop:2:3"])
def test_an_item_without_weight_is_all_zeros(spec: str) -> None:
    codec = codecs.get(spec)
    data = codec.encode(torch.zeros(8))
    assert torch.equal(codec.decode(data, 8), torch.zeros(8))
    if spec == "prob16:3":
        assert not data.any()


@pytest.mark.parametrize(
    ("spec", "data", "reason"),
    [
        ("prob16:2", struct.pack("<2ef", 0.5, float("nan"), 1.0), Reason.NOT_FINITE),
        ("prob16:2", struct.pack("<2ef", 0.5, 0.5, float("inf")), Reason.NOT_FINITE),
        ("prob16:2", struct.pack("<2ef", 0.5, 0.5, -1.0), Reason.BAD_WEIGHT),
        ("prob16:2", struct.pack("<2ef", 1.5, -0.5, 1.0), Reason.BAD_PROBABILITIES),
        ("prob16:2", struct.pack("<2ef", 0.5, 0.49, 1.0), Reason.BAD_PROBABILITIES),
        ("prob16:2", struct.pack("<2ef", 0.5, 0.5, 0.0), Reason.BAD_PROBABILITIES),
        ("probtop:2:3", struct.pack("<2B2ef", 0, 1, 0.8, 0.3, 1.0), Reason.BAD_PROBABILITIES),
        ("probtop:2:3", struct.pack("<2B2ef", 0, 1, 0.8, -0.3, 1.0), Reason.BAD_PROBABILITIES),
        ("probtop:2:3", struct.pack("<2B2ef", 0, 3, 0.5, 0.5, 1.0), Reason.MALFORMED),
        ("probtop:2:3", struct.pack("<2B2ef", 1, 1, 0.5, 0.5, 1.0), Reason.MALFORMED),
        ("probtop:2:3", struct.pack("<2B2ef", 0, 1, 0.5, 0.5, float("nan")), Reason.NOT_FINITE),
    ],
)
def test_what_is_no_soft_label_is_refused(spec: str, data: bytes, reason: Reason) -> None:
    codec = codecs.get(spec)
    with pytest.raises(Refused) as caught:
        codec.decode(octets(data), codec.block)
    assert caught.value.reason is reason


@pytest.mark.parametrize("spec", ["prob16:2", "probtop:1:2"])
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([0.5, 0.4, 1.0], Reason.BAD_PROBABILITIES),
        ([1.5, -0.5, 1.0], Reason.BAD_PROBABILITIES),
        ([0.5, 0.0, 0.0], Reason.BAD_PROBABILITIES),
        ([-0.5, -0.5, -1.0], Reason.BAD_WEIGHT),
        ([0.5, float("nan"), 1.0], Reason.NOT_FINITE),
    ],
)
def test_what_is_no_soft_label_is_not_encoded(spec: str, row: list[float], reason: Reason) -> None:
    with pytest.raises(Refused) as caught:
        codecs.get(spec).encode(rows(row))
    assert caught.value.reason is reason


def test_sums_within_the_tolerance_are_taken_as_one() -> None:
    codec = codecs.get("prob16:2")
    off = 0.5 + TOLERANCE / 2
    y = codec.decode(octets(struct.pack("<2ef", 0.5, off, 2.0)), 3)
    assert float(y[:2].sum()) == 2.0
    assert float(y[1] / y[0]) == pytest.approx(off / 0.5, rel=1e-6)


@pytest.mark.parametrize(
    "spec", ["prob16:1", "prob16:65537", "prob16:x", "prob16", "probtop:3:3", "probtop:0:3", "probtop:2", "prob16:03"]
)
def test_specs_of_no_codec(spec: str) -> None:
    with pytest.raises(Refused) as caught:
        codecs.get(spec)
    assert caught.value.reason is Reason.UNKNOWN_CODEC


def test_part_of_an_item_has_no_size_and_soft_labels_no_residual() -> None:
    codec = codecs.get("prob16:3")
    with pytest.raises(Refused) as caught:
        codec.encoded_bytes(6)
    assert caught.value.reason is Reason.WRONG_SIZE
    x = rows([1.0, 0.5, 0.5, 2.0])
    assert codec.encode_with_feedback(x, None)[1] is None
    with pytest.raises(ConfigError):
        codec.encode_with_feedback(x, x)
