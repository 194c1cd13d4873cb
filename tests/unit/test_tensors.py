"""Tensors on the wire of inference: round trips, and every rule of W41."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fleetddp.protos
from fleetddp.common.errors import Refused
from fleetddp.common.transport import limits, tensors
from fleetddp.protos import inference_pb2 as pb


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 99))
def test_round_trip(shape: list[int], seed: int) -> None:
    sent = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    message = pb.FloatTensor.FromString(tensors.pack(sent).SerializeToString())
    found = tensors.unpack(message)
    assert found.dtype == torch.float32
    assert torch.equal(found, sent)


def test_the_bytes_are_little_endian_row_by_row() -> None:
    packed = tensors.pack(torch.tensor([[1.0, 0.25], [-2.0, 0.0]]).T)
    assert (list(packed.shape), packed.data.hex()) == ([2, 2], "0000803f000000c00000803e00000000")


def test_golden_messages() -> None:
    rows = torch.tensor([[1.0, 0.25], [-2.0, 0.0]])
    made = {
        "InferRequest": pb.InferRequest(node="pi", inputs=tensors.pack(rows)),
        "InferReply": pb.InferReply(outputs=tensors.pack(rows[:, :1]), version=7),
    }
    text = (Path(str(fleetddp.protos.__file__)).parent / "WIRE.md").read_text(encoding="utf-8")
    lines = text.split("### Inference\n", 1)[1].split("```", 2)[1].strip().splitlines()[1:]
    assert dict(line.split() for line in lines) == {name: message.SerializeToString().hex() for name, message in made.items()}


def test_what_is_not_float32_becomes_it() -> None:
    assert tensors.unpack(tensors.pack(torch.tensor([1, 2]))).tolist() == [1.0, 2.0]
    assert tensors.unpack(tensors.pack(torch.tensor([1.5], dtype=torch.bfloat16, requires_grad=True))).tolist() == [1.5]


@pytest.mark.parametrize(
    ("shape", "data", "refusal"),
    [
        ([], bytes(4), "MALFORMED: shape"),
        ([2, 0], bytes(4), "MALFORMED: shape"),
        ([1] * 17, bytes(4), "MALFORMED: shape is 'a list of 17'"),
        ([1, 1], b"", "MALFORMED: data"),
        ([2, 2], bytes(12), r"WRONG_SIZE: 12 bytes for a tensor of shape \[2, 2\], which has 16"),
        ([2**63, 2**63], bytes(4), "TOO_LARGE"),
        ([4097], bytes(4 * 4097), "TOO_LARGE: 4097 samples in one request; at most 4096"),
        ([1, 245_761], bytes(4 * 245_761), "TOO_LARGE: data"),
        ([1], torch.tensor([math.nan]).numpy().tobytes(), "NOT_FINITE"),
        ([1], torch.tensor([math.inf]).numpy().tobytes(), "NOT_FINITE"),
    ],
)
def test_what_is_refused(shape: list[int], data: bytes, refusal: str) -> None:
    with pytest.raises(Refused, match=refusal):
        tensors.unpack(pb.FloatTensor(shape=shape, data=data))


def test_how_many_go_at_once() -> None:
    assert tensors.rows_at_once(torch.zeros(1, 64)) == limits.TENSOR_BYTES // 256
    assert tensors.rows_at_once(torch.zeros(9)) == limits.MAX_ROWS
    assert tensors.rows_at_once(torch.zeros(1, 245_760)) == 1
    with pytest.raises(Refused, match="TOO_LARGE: a sample"):
        tensors.rows_at_once(torch.zeros(1, 245_761))
