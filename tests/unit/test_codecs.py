"""The bytes of each codec against hand calculations, and bytes that no encoder wrote."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from fleetddp.common import codecs
from fleetddp.common.errors import ConfigError, Reason, Refused

ALL = ["float32", "bfloat16", "int8", "int4", "topk:0.03"]
FLOAT_MAX = torch.finfo(torch.float32).max


def encoded(spec: str, values: list[float]) -> bytes:
    return codecs.get(spec).encode(torch.tensor(values)).numpy().tobytes()


def decoded(spec: str, data: bytes, n: int) -> list[float]:
    return codecs.get(spec).decode(torch.tensor(list(data), dtype=torch.uint8), n).tolist()


# ---- exact bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "values", "data"),
    [
        ("float32", [1.0, -2.5], struct.pack("<2f", 1.0, -2.5)),
        ("bfloat16", [1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8], bytes.fromhex("803f 20c0 803f 823f")),  # the last two: ties to even
        ("int8", [1.0, -0.5, 0.0, 0.01], struct.pack("<f4b", np.float32(1 / 127), 127, -64, 0, 1)),  # -63.5 to even
        ("int8", [0.0, -0.0], struct.pack("<f2b", 0.0, 0, 0)),
        ("int4", [7.0, -3.5, 1.0], struct.pack("<f2B", 1.0, 0x4F, 0x89)),  # codes 7, -4, 1, then the pad
        ("int4", [-2.0, 2.0], struct.pack("<fB", np.float32(2 / 7), 0xF1)),
        ("topk:0.5", [1.0, -3.0, 2.0, 0.0], struct.pack("<2H2f", 1, 2, -3.0, 2.0)),
        ("topk:1", [4.0, 0.0], struct.pack("<2H2f", 0, 1, 4.0, 0.0)),
    ],
)
def test_exact_bytes(spec: str, values: list[float], data: bytes) -> None:
    assert encoded(spec, values) == data


@pytest.mark.parametrize(
    ("spec", "data", "values"),
    [
        ("float32", struct.pack("<2f", 1.0, -2.5), [1.0, -2.5]),
        ("bfloat16", bytes.fromhex("803f 20c0"), [1.0, -2.5]),
        ("int8", struct.pack("<f3b", 0.5, 127, -64, 0), [63.5, -32.0, 0.0]),
        ("int4", struct.pack("<f2B", 0.5, 0x4F, 0x89), [3.5, -2.0, 0.5]),
        ("topk:0.5", struct.pack("<2H2f", 1, 2, -3.0, 2.0), [0.0, -3.0, 2.0, 0.0]),
    ],
)
def test_exact_values(spec: str, data: bytes, values: list[float]) -> None:
    assert decoded(spec, data, len(values)) == values


@pytest.mark.parametrize(("spec", "levels"), [("int8", 127), ("int4", 7)])
def test_scaled_bytes_equal_a_plain_implementation(spec: str, levels: int) -> None:
    x = torch.randn(1201, generator=torch.Generator().manual_seed(5))
    expected = b""
    for block in (x[:512], x[512:1024], x[1024:]):
        values = block.numpy()
        peak = np.abs(values).max()
        expected += struct.pack("<f", peak / np.float32(levels))
        codes = [int(np.round(v * (np.float32(levels) / peak))) for v in values]
        if spec == "int8":
            expected += struct.pack(f"{len(codes)}b", *codes)
        else:
            codes += [0] * (len(codes) % 2)
            expected += bytes((low + 8) | (high + 8) << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    assert encoded(spec, x.tolist()) == expected


def test_topk_bytes_equal_a_plain_implementation() -> None:
    x = torch.randn(700, generator=torch.Generator().manual_seed(6))
    expected = b""
    for block, k in ((x[:512].tolist(), 16), (x[512:].tolist(), 6)):  # ceil(0.03 * 512), ceil(0.03 * 188)
        chosen = sorted(sorted(range(len(block)), key=lambda i: -abs(block[i]))[:k])
        expected += struct.pack(f"<{k}H{k}f", *chosen, *(block[i] for i in chosen))
    assert encoded("topk:0.03", x.tolist()) == expected


@pytest.mark.parametrize(
    ("spec", "full", "of_100", "of_1124"),
    [
        ("float32", 2048, 400, 4496),
        ("bfloat16", 1024, 200, 2248),
        ("int8", 516, 104, 1136),
        ("int4", 260, 54, 574),
        ("topk:0.03", 96, 18, 210),
        ("topk:0.07", 216, 42, 474),  # 0.07 * 100 is 7: as a binary fraction it would be a little more, and 8 kept
    ],
)
def test_sizes(spec: str, full: int, of_100: int, of_1124: int) -> None:
    codec = codecs.get(spec)
    assert codec.spec == spec
    assert codec.block_bytes == full
    assert [codec.encoded_bytes(n) for n in (0, 100, 512, 1124)] == [0, of_100, full, of_1124]


# ---- the ends of the range --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["int8", "int4"])
def test_the_largest_and_the_smallest_floats(spec: str) -> None:
    codec = codecs.get(spec)
    levels = {"int8": 127, "int4": 7}[spec]
    for peak in (FLOAT_MAX, FLOAT_MAX / 2, 2.0**-119):
        x = torch.tensor([peak, -peak, peak / 2, 0.0])
        error = codec.decode(codec.encode(x), 4) - x
        assert float(error.abs().max() / peak) <= 0.5 / levels * 1.0001
    for peak in (2.0**-120, 1e-45):  # less than any weight means; what is left out stays in the residual
        x = torch.tensor([peak, -peak])
        payload, residual = codec.encode_with_feedback(x, None)
        assert codec.decode(payload, 2).tolist() == [0.0, 0.0]
        assert residual is not None
        assert torch.equal(residual, x)


def test_what_rounds_beyond_bfloat16_is_refused() -> None:
    largest = torch.finfo(torch.bfloat16).max
    assert decoded("bfloat16", encoded("bfloat16", [largest, -largest]), 2) == [largest, -largest]
    with pytest.raises(Refused, match="too large for bfloat16") as caught:
        encoded("bfloat16", [FLOAT_MAX])
    assert caught.value.reason is Reason.NOT_FINITE


# ---- arguments --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ALL)
def test_only_vectors_of_float32(spec: str) -> None:
    codec = codecs.get(spec)
    for x in (torch.ones(3, 1), torch.ones(()), torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int64)):
        with pytest.raises(ConfigError, match=r"is float32 of shape \(n,\), not"):
            codec.encode(x)
        with pytest.raises(ConfigError, match=r"is float32 of shape \(n,\), not"):
            codec.encode_with_feedback(x, None)
        with pytest.raises(ConfigError, match=r"a residual is float32 of shape \(n,\), not"):
            codec.encode_with_feedback(torch.ones(3), x)


@pytest.mark.parametrize("spec", ALL)
def test_a_residual_is_never_broadcast(spec: str) -> None:
    with pytest.raises(ConfigError, match="a residual of 1 elements for a vector of 3"):
        codecs.get(spec).encode_with_feedback(torch.ones(3), torch.ones(1))


@pytest.mark.parametrize("spec", ALL)
def test_gradients_do_not_follow(spec: str) -> None:
    codec = codecs.get(spec)
    payload, residual = codec.encode_with_feedback(torch.ones(600, requires_grad=True), None)
    assert not payload.requires_grad
    assert residual is None or not residual.requires_grad


def test_a_lossless_codec_sends_the_residual_of_the_one_before_it() -> None:
    payload, residual = codecs.get("float32").encode_with_feedback(torch.ones(2), torch.tensor([0.5, 0.25]))
    assert payload.view(torch.float32).tolist() == [1.5, 1.25]
    assert residual is None


RATIOS = ["", "0", "0.0", "1.1", "-0.1", "nan", "1e-2", "1/2", "0.1:2", "0.0000000001", "0.1\n", "٠.1"]


@pytest.mark.parametrize("spec", ["", "float16", "INT8", "int8:1", " int8", "topk", "x" * 10_000, *("topk:" + r for r in RATIOS)])
def test_an_unknown_codec_is_refused(spec: str) -> None:
    with pytest.raises(Refused, match=r"there is no codec .* known: float32, bfloat16, int8, int4, topk:R") as caught:
        codecs.get(spec)
    assert caught.value.reason is Reason.UNKNOWN_CODEC
    assert len(caught.value.message) < 200


def test_names_are_those_of_the_codecs() -> None:
    assert [codecs.get(spec).spec.partition(":")[0] for spec in [*ALL, "float64", "prob16:3", "probtop:2:3", "prob64:3"]] == list(
        codecs.NAMES
    )


# ---- bytes from anywhere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ALL)
def test_data_of_another_size_is_refused(spec: str) -> None:
    codec = codecs.get(spec)
    data = codec.encode(torch.ones(700))
    wrong = [data[:-1], torch.cat([data, data[:1]]), data[:1], data[:0], data.view(1, -1), data.to(torch.int32)]
    for other in wrong:
        with pytest.raises(Refused, match=f"700 elements in {spec} are {len(data)} bytes, not") as caught:
            codec.decode(other, 700)
        assert caught.value.reason is Reason.WRONG_SIZE


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("spec", "data", "n", "reason"),
    [
        *(("float32", struct.pack("<2f", 1.0, bad), 2, Reason.NOT_FINITE) for bad in (INF, -INF, NAN)),
        *(("bfloat16", bytes.fromhex("803f" + bad), 2, Reason.NOT_FINITE) for bad in ("807f", "80ff", "c07f")),
        *(("int8", struct.pack("<f2b", bad, 1, 0), 2, Reason.NOT_FINITE) for bad in (INF, -INF, NAN, -1.0, FLOAT_MAX)),
        *(("int4", struct.pack("<fB", bad, 0x89), 2, Reason.NOT_FINITE) for bad in (INF, -INF, NAN, -1.0, FLOAT_MAX)),
        ("int8", struct.pack("<f2b", 1.0, 0, -128), 2, Reason.MALFORMED),
        ("int4", struct.pack("<fB", 1.0, 0x80), 2, Reason.MALFORMED),
        ("int4", struct.pack("<fB", 1.0, 0x08), 2, Reason.MALFORMED),
        ("int4", struct.pack("<fB", 1.0, 0x98), 1, Reason.MALFORMED),  # not the pad
        *(("topk:0.5", struct.pack("<2H2f", 0, 1, 1.0, bad), 4, Reason.NOT_FINITE) for bad in (INF, -INF, NAN)),
        ("topk:0.5", struct.pack("<2H2f", 0, 4, 1.0, 1.0), 4, Reason.MALFORMED),
        ("topk:0.5", struct.pack("<2H2f", 0, 65535, 1.0, 1.0), 4, Reason.MALFORMED),
        ("topk:0.5", struct.pack("<2H2f", 1, 1, 1.0, 1.0), 4, Reason.MALFORMED),
        ("topk:0.5", struct.pack("<2H2f", 2, 1, 1.0, 1.0), 4, Reason.MALFORMED),
    ],
)
def test_garbage_is_refused(spec: str, data: bytes, n: int, reason: Reason) -> None:
    with pytest.raises(Refused) as caught:
        decoded(spec, data, n)
    assert caught.value.reason is reason


@pytest.mark.parametrize("spec", ALL)
def test_bytes_need_not_be_aligned(spec: str) -> None:
    codec = codecs.get(spec)
    x = torch.randn(700, generator=torch.Generator().manual_seed(1))
    data = codec.encode(x)
    for shift in (1, 2, 3):
        store = torch.zeros(len(data) + shift, dtype=torch.uint8)
        store[shift:] = data
        assert torch.equal(codec.decode(store[shift:], 700), codec.decode(data, 700))
        elsewhere = codec.decode(torch.from_numpy(store.numpy()[shift:]), 700)
        assert torch.equal(elsewhere, codec.decode(data, 700))
        assert elsewhere.data_ptr() % 4 == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spec", ALL)
def test_a_gpu_writes_and_reads_the_same_bytes(spec: str) -> None:
    codec = codecs.get(spec)
    x = torch.randn(512 * 600 + 77, generator=torch.Generator().manual_seed(2))
    data = codec.encode(x)
    assert torch.equal(codec.encode(x.cuda()).cpu(), data)
    assert torch.equal(codec.decode(data.cuda(), len(x)).cpu(), codec.decode(data, len(x)))
