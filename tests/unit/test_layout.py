"""Which tensors are exchanged, where each lies, and what moves between a module and its flat vector."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import models
from torch import nn

from fleetddp.common.errors import ConfigError, LayoutMismatch, Reason, Refused
from fleetddp.common.layout import MAX_JSON_BYTES, Layout, TensorSpec


def names(layout: Layout) -> list[str]:
    return [t.name for t in layout.tensors]


# ---- what is exchanged, and where -----------------------------------------------------------------------------------------


def test_parameters_come_first_and_averaged_buffers_start_a_block() -> None:
    layout = Layout.from_module(models.batch_norm())
    assert layout.tensors == (
        TensorSpec("0.weight", (10, 6), "parameter", 0, 60),
        TensorSpec("0.bias", (10,), "parameter", 60, 10),
        TensorSpec("1.weight", (10,), "parameter", 70, 10),
        TensorSpec("1.bias", (10,), "parameter", 80, 10),
        TensorSpec("3.weight", (4, 10), "parameter", 90, 40),
        TensorSpec("3.bias", (4,), "parameter", 130, 4),
        TensorSpec("1.running_mean", (10,), "buffer", 512, 10),
        TensorSpec("1.running_var", (10,), "buffer", 522, 10),
    )
    assert (layout.parameters, layout.buffer_start, layout.buffer_elements, layout.elements) == (134, 512, 20, 532)


def test_local_buffers_are_not_exchanged() -> None:
    layout = Layout.from_module(models.batch_norm(), buffers="local")
    assert {t.role for t in layout.tensors} == {"parameter"}
    assert (layout.parameters, layout.buffer_start, layout.buffer_elements, layout.elements) == (134, 512, 0, 134)


def test_parameters_that_fill_their_blocks_leave_no_gap() -> None:
    layout = Layout.of([("w", (2, 512))], [("b", (3,))])
    assert (layout.parameters, layout.buffer_start, layout.elements) == (1024, 1024, 1027)


def test_a_tied_tensor_counts_once_under_its_first_name() -> None:
    layout = Layout.from_module(models.Tied())
    assert names(layout) == ["embedding.weight", "output.bias"]
    assert layout.elements == 54


def test_writing_a_tied_tensor_keeps_it_tied() -> None:
    module = models.Tied()
    layout = Layout.from_module(module)
    layout.write_(module, torch.arange(54.0))
    assert module.output.weight is module.embedding.weight
    assert torch.equal(module.output.weight.detach().reshape(-1), torch.arange(45.0))


def test_frozen_parameters_stay_local() -> None:
    module = models.odd()
    module[0].requires_grad_(False)
    layout = Layout.from_module(module)
    assert names(layout) == ["2.weight", "2.bias"]
    before = module[0].weight.clone()
    layout.write_(module, torch.zeros(36))
    assert torch.equal(module[0].weight, before)


def test_integer_and_non_persistent_buffers_stay_local() -> None:
    module = models.batch_norm()
    module[1].register_buffer("scratch", torch.ones(3), persistent=False)
    module.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    module[1].num_batches_tracked.fill_(7)
    layout = Layout.from_module(module)
    assert [t.name for t in layout.tensors if t.role == "buffer"] == ["1.running_mean", "1.running_var"]
    layout.write_(module, torch.zeros(layout.elements))
    assert int(module[1].num_batches_tracked) == 7
    assert torch.equal(module[1].scratch, torch.ones(3))


def test_a_layout_knows_no_dtypes() -> None:
    assert Layout.from_module(models.bfloat16()) == Layout.from_module(models.odd())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch.compile's own imports
def test_wrappers_leave_no_trace(tmp_path: Path) -> None:
    module = models.batch_norm()
    plain = Layout.from_module(module)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(torch.compile(module))
        assert Layout.from_module(wrapped) == plain
        assert torch.equal(plain.read(wrapped), plain.read(module))
        plain.check(wrapped)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.ReLU(), "no trainable parameters"),
        (nn.Linear(3, 2).requires_grad_(False), "no trainable parameters"),
        (nn.LazyLinear(3), "'weight' has no shape yet: run one forward pass"),
        (nn.Linear(3, 2, dtype=torch.complex64), "'weight' is torch.complex64: only real"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning", "ignore:Complex modules:UserWarning")
def test_a_module_that_cannot_be_exchanged(module: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout.from_module(module)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ([("w", (2,)), ("w", (3,))], "two tensors are called 'w'"),
        ([("__metadata__", (2,))], "not starting with '__'"),
        ([("", (2,))], "tensor name ''"),
        ([("a\nb", (2,))], "printable"),
        ([("w" * 513, (2,))], "1 to 512"),
        ([("w", (2, -1))], "none negative"),
        ([("w", (1,) * 17)], "at most 16 dimensions"),
        ([("w", (2**20, 2**20)), ("v", (1,))], "elements in all"),
        ([("w", (0, 3))], "no trainable parameters"),
    ],
)
def test_a_layout_of_bad_tensors(parameters: list[tuple[str, tuple[int, ...]]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout.of(parameters)


def test_scalars_and_empty_tensors_are_tensors() -> None:
    module = models.Assorted([(), (0, 4), (2,)])
    layout = Layout.from_module(module)
    assert [(t.start, t.size) for t in layout.tensors] == [(0, 1), (1, 0), (1, 2)]
    layout.write_(module, torch.tensor([1.0, 2.0, 3.0]))
    assert module.p0.item() == 1.0
    assert module.p2.tolist() == [2.0, 3.0]


# ---- module <-> vector ----------------------------------------------------------------------------------------------------


def test_read_concatenates_the_tensors_with_zeros_in_the_gap() -> None:
    module = models.batch_norm()
    module[1].running_mean.uniform_()
    layout = Layout.from_module(module)
    parameters = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    buffers = torch.cat([module[1].running_mean, module[1].running_var])
    expected = torch.cat([parameters, torch.zeros(512 - 134), buffers])
    assert torch.equal(layout.read(module), expected)
    out = torch.full((532,), 9.0)
    assert layout.read(module, out) is out
    assert torch.equal(out, expected)


def test_write_is_in_place_and_the_inverse_of_read() -> None:
    source, target = models.batch_norm(1), models.batch_norm(2)
    layout = Layout.from_module(source)
    kept = {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in target.named_parameters()}
    layout.write_(target, layout.read(source))
    assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True))
    assert kept == {name: (tensor.data_ptr(), tensor.requires_grad) for name, tensor in target.named_parameters()}


def test_a_partial_write_touches_nothing_else() -> None:
    module = models.batch_norm()
    layout = Layout.from_module(module)
    expected = layout.read(module)
    expected[65:75] = torch.arange(10.0)
    layout.write_(module, torch.arange(10.0), (65, 75))
    assert torch.equal(layout.read(module), expected)


@pytest.mark.parametrize("interval", [(0, 65), (7, 29), (58, 63)])
def test_elements_follow_the_shape_whatever_the_memory_format(interval: tuple[int, int]) -> None:
    module = models.convolution(3)
    weight = module[0].weight
    assert not weight.is_contiguous()
    layout = Layout.from_module(module)
    flat = torch.cat([weight.detach().contiguous().reshape(-1), module[0].bias.detach()])
    assert torch.equal(layout.read(module, interval=interval), flat[interval[0] : interval[1]])
    flat[interval[0] : interval[1]] = torch.arange(float(interval[1] - interval[0]))
    layout.write_(module, flat[interval[0] : interval[1]], interval)
    assert torch.equal(weight.detach().contiguous().reshape(-1), flat[:60])
    assert not weight.is_contiguous()


def test_write_casts_to_each_tensors_dtype() -> None:
    module = models.bfloat16()
    layout = Layout.from_module(module)
    flat = torch.linspace(-1, 1, 124)
    layout.write_(module, flat)
    assert module[0].weight.dtype == torch.bfloat16
    assert torch.equal(layout.read(module)[:88], flat[:88].to(torch.bfloat16).float())
    assert torch.equal(layout.read(module)[88:], flat[88:])


def test_a_vector_is_never_broadcast() -> None:
    module = models.odd()
    layout = Layout.from_module(module)
    for wrong in (torch.ones(1), torch.ones(()), torch.ones(125), torch.ones(124, 1), torch.ones(124, dtype=torch.float64)):
        with pytest.raises(LayoutMismatch, match=r"elements \[0, 124\) are torch.float32 of shape \(124,\), not"):
            layout.write_(module, wrong)
        with pytest.raises(LayoutMismatch):
            layout.read(module, wrong)
        with pytest.raises(LayoutMismatch):
            layout.outgoing(module, wrong)


@pytest.mark.parametrize("interval", [(5, 5), (-1, 3), (3, 2), (0, 125)])
def test_an_interval_outside_the_layout(interval: tuple[int, int]) -> None:
    module = models.odd()
    with pytest.raises(LayoutMismatch, match="is no interval of a layout of 124 elements"):
        Layout.from_module(module).read(module, interval=interval)


# ---- what an update carries -----------------------------------------------------------------------------------------------


def test_outgoing_is_base_minus_local_and_the_buffers_values() -> None:
    module = models.batch_norm()
    layout = Layout.from_module(module)
    local = layout.read(module)
    base = torch.randn(layout.elements)
    outgoing = layout.outgoing(module, base)
    assert torch.equal(outgoing[:134], base[:134] - local[:134])
    assert torch.equal(outgoing[134:512], torch.zeros(378))
    assert torch.equal(outgoing[512:], local[512:])
    for interval in ((0, 70), (70, 134), (100, 520), (512, 532)):
        part = slice(*interval)
        assert torch.equal(layout.outgoing(module, base[part], interval), outgoing[part])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_of_the_master_is_not_progress(dtype: torch.dtype) -> None:
    module = models.odd().to(dtype)
    layout = Layout.from_module(module)
    master = torch.linspace(-1, 1, 124)
    layout.write_(module, master)
    assert not torch.equal(layout.read(module), master)
    assert torch.equal(layout.outgoing(module, master), torch.zeros(124))
    weight = module[0].weight
    held = weight.detach()[0, 0].item()
    weight.data[0, 0] = held + 0.25
    expected = torch.zeros(124)
    expected[0] = held - weight.detach()[0, 0].item()
    assert torch.equal(layout.outgoing(module, master), expected)


def test_a_difference_of_low_precision_is_taken_in_float32() -> None:
    module = models.Assorted([(1,)]).to(torch.bfloat16)
    layout = Layout.from_module(module)
    layout.write_(module, torch.tensor([1.0]))
    outgoing = layout.outgoing(module, torch.tensor([2.0**-7 * 129]))  # 1 + 2^-7, a bfloat16: less 1 is exact
    assert outgoing.tolist() == [2.0**-7]
    outgoing = layout.outgoing(module, torch.tensor([256.0]))  # 255 needs eight bits: exact in float32, and in bfloat16
    assert outgoing.tolist() == [255.0]
    outgoing = layout.outgoing(module, torch.tensor([1024.0]))  # 1023 needs ten: exact in float32 only
    assert outgoing.tolist() == [1023.0]


def test_a_difference_of_float64_is_taken_in_float64() -> None:
    module = models.Assorted([(1,)]).double()
    layout = Layout.from_module(module)
    module.p0.data.fill_(1.0 - 2.0**-40)
    assert layout.read(module).tolist() == [1.0]
    assert layout.outgoing(module, torch.ones(1)).tolist() == [2.0**-40]


# ---- identity -------------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_the_same_in_every_release() -> None:
    layout = Layout.of([("w", (2, 3)), ("b", (3,))], [("m", (4,))])
    text = b'{"format":1,"tensors":[["w",[2,3],"parameter",0],["b",[3],"parameter",6],["m",[4],"buffer",512]]}'
    assert layout.to_json() == text
    assert layout.fingerprint == hashlib.sha256(text).hexdigest()
    assert Layout.from_json(text) == layout


BASE = [("w", (2, 3)), ("b", (3,))]
FROZEN = "are the same parameters frozen on both ends?"


@pytest.mark.parametrize(
    ("parameters", "buffers", "difference"),
    [
        ([("w", (2, 3)), ("b", (1,))], [], "expected parameter 'b' of shape (3,), found parameter 'b' of shape (1,)"),
        ([("w", (3, 2)), ("b", (3,))], [], "expected parameter 'w' of shape (2, 3), found parameter 'w' of shape (3, 2)"),
        (
            [("b", (3,)), ("w", (2, 3))],
            [],
            "expected parameter 'w' of shape (2, 3), found parameter 'b' of shape (3,); " + FROZEN,
        ),
        (
            [("w", (2, 3))],
            [],
            "expected parameter 'b' of shape (3,), found no further tensor; " + FROZEN,
        ),
        (
            BASE,
            [("m", (4,))],
            "expected no further tensor, found buffer 'm' of shape (4,); is 'buffers' set alike on both ends?",
        ),
        (BASE, [], None),
    ],
)
def test_the_first_difference_names_the_tensor_and_both_shapes(
    parameters: list[tuple[str, tuple[int, ...]]], buffers: list[tuple[str, tuple[int, ...]]], difference: str | None
) -> None:
    mine, other = Layout.of(BASE), Layout.of(parameters, buffers)
    assert mine.first_difference(other) == difference
    assert (mine.fingerprint == other.fingerprint) is (difference is None)


def test_check_raises_for_another_model_and_follows_the_layouts_buffer_policy() -> None:
    module = models.batch_norm()
    Layout.from_module(module).check(module)
    Layout.from_module(module, buffers="local").check(module)
    message = "not the fleet's model: expected parameter '0.weight' of shape (10, 6), found parameter '0.weight' of shape (11, 7)"
    with pytest.raises(LayoutMismatch, match=re.escape(message)):
        Layout.from_module(module).check(models.odd())


def test_a_module_that_changed_since_is_refused_not_broadcast() -> None:
    module = models.odd()
    layout = Layout.from_module(module)
    module[2].bias = nn.Parameter(torch.zeros(1))
    with pytest.raises(LayoutMismatch, match=r"expected parameter '2.bias' of shape \(3,\), the module has one of shape \(1,\)"):
        layout.write_(module, torch.zeros(124))
    del module[2]
    with pytest.raises(LayoutMismatch, match=r"'2.weight' of shape .* the module has none of that name"):
        layout.read(module)


GOOD = {"format": 1, "tensors": [["w", [2], "parameter", 0], ["m", [4], "buffer", 512]]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b"1" * 5000,
        b'{"format":1}',
        {**GOOD, "more": 1},
        {**GOOD, "format": 2},
        {**GOOD, "tensors": {}},
        {**GOOD, "tensors": []},
        {**GOOD, "tensors": [["m", [4], "buffer", 0]]},
        {**GOOD, "tensors": [["w", [2], "parameter"]]},
        {**GOOD, "tensors": [[1, [2], "parameter", 0]]},
        {**GOOD, "tensors": [["w", 2, "parameter", 0]]},
        {**GOOD, "tensors": [["w", [2.0], "parameter", 0]]},
        {**GOOD, "tensors": [["w", [True], "parameter", 0]]},
        {**GOOD, "tensors": [["w", [2], "gradient", 0]]},
        {**GOOD, "tensors": [["w", [2], "parameter", 1]]},
        {**GOOD, "tensors": [["w", [2], "parameter", 0], ["w", [4], "buffer", 512]]},
        {**GOOD, "tensors": [["w", [2], "parameter", 0], ["m", [4], "buffer", 2]]},
        {**GOOD, "tensors": [["w", [2], "parameter", 0], ["m", [4], "buffer", 512], ["v", [2], "parameter", 2]]},
        {**GOOD, "tensors": [["w", [-2], "parameter", 0]]},
        {**GOOD, "tensors": [["w", [2**50], "parameter", 0]]},
        {**GOOD, "tensors": [["w", [1] * 10_000, "parameter", 0]]},
        {**GOOD, "tensors": [["\ud800", [2], "parameter", 0]]},
        {**GOOD, "tensors": [["__gap__", [2], "parameter", 0]]},
    ],
)
def test_a_malformed_layout_is_refused(data: object) -> None:
    assert Layout.from_json(json.dumps(GOOD).encode()).elements == 516
    with pytest.raises(Refused) as caught:
        Layout.from_json(data if isinstance(data, bytes) else json.dumps(data).encode())
    assert caught.value.reason is Reason.MALFORMED
    assert len(caught.value.message) < 1000


def test_a_layout_too_large_for_a_message() -> None:
    with pytest.raises(Refused) as caught:
        Layout.from_json(b" " * (MAX_JSON_BYTES + 1))
    assert caught.value.reason is Reason.TOO_LARGE
    module = nn.ParameterDict({f"{i:0500}": nn.Parameter(torch.zeros(1)) for i in range(2000)})
    with pytest.raises(ConfigError, match="2000 tensors: their names and shapes take more than"):
        Layout.from_module(module)
