from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from fleetddp.common.config import ElementWise, OuterConfig, parse
from fleetddp.common.errors import ConfigError
from fleetddp.common.outer import PRESETS, STRIPE, OuterOptimizer

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in get_args(ElementWise)),
    ("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.7, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "betas": [0.8, 0.95]}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
]


def run_blockwise(config: OuterConfig, start: torch.Tensor, gradients: list[torch.Tensor], block: int) -> torch.Tensor:
    """All gradients, one after another, each applied block by block as the publisher does."""
    outer = OuterOptimizer(config)
    master = start.clone()
    state = {slot: torch.full_like(master, torch.nan) for slot in outer.slots}  # to be written at the first step, never read
    scalars: dict[str, float] | None = None
    for gradient in gradients:
        after: dict[str, float] = {}
        for at in range(0, len(master), block):
            part = slice(at, at + block)
            after = outer.step(master[part], gradient[part].clone(), {s: v[part] for s, v in state.items()}, scalars)
        scalars = after
    return master


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_blockwise_equals_the_whole_vector_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    n = 3 * STRIPE + 1537  # several stripes in a block, a short last one
    start, gradients = torch.randn(n), [torch.randn(n) for _ in range(4)]
    parameter = start.clone().requires_grad_()
    default = {"lr": 1.0} if name == "SGD" else {}
    reference = getattr(torch.optim, name)([parameter], foreach=False, **default | options)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the reference takes the whole vector at once: torch must not split it
    try:
        for gradient in gradients:
            parameter.grad = gradient.clone()
            reference.step()
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(parameter, start)
    config = OuterConfig(optimizer=name, options=options)  # type: ignore[arg-type]
    for block in (2 * STRIPE, n):
        assert torch.equal(run_blockwise(config, start, gradients, block), parameter)


@pytest.mark.parametrize("name", get_args(ElementWise))
def test_the_number_of_threads_changes_no_byte(name: str) -> None:
    torch.manual_seed(4)
    n = 5 * STRIPE + 333
    start, gradients = torch.randn(n), [torch.randn(n) for _ in range(2)]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(run_blockwise(OuterConfig(optimizer=name), start, gradients, n))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_plain_averaging_is_the_default_and_a_preset() -> None:
    master = torch.tensor([1.0, 2.0, 3.0])
    for config in (OuterConfig(), OuterConfig(preset="average"), OuterConfig(options={"weight_decay": 0.0})):
        stepped = run_blockwise(config, master, [torch.tensor([0.5, -1.0, 3.0])], 3)
        assert stepped.tolist() == [0.5, 3.0, 0.0]
        assert OuterOptimizer(config).slots == ()


def test_diloco_by_hand() -> None:
    # Nesterov: m1 = g, x1 = x0 - 0.7 (g + 0.9 m1); m2 = 0.9 m1 + g, x2 = x1 - 0.7 (g + 0.9 m2); g = 1, x0 = 0
    stepped = run_blockwise(OuterConfig(preset="diloco"), torch.zeros(2), [torch.ones(2)] * 2, 2)
    expected = -0.7 * 1.9 - 0.7 * (1 + 0.9 * 1.9)
    assert stepped.tolist() == pytest.approx([expected] * 2, abs=1e-6)
    assert OuterOptimizer(OuterConfig(preset="diloco")).slots == ("momentum_buffer",)


def test_fedasync_mixes_with_weight_0_6() -> None:
    base, local = torch.tensor([1.0]), torch.tensor([2.0])
    stepped = run_blockwise(OuterConfig(preset="fedasync"), base, [base - local], 1)
    assert stepped.item() == pytest.approx(0.4 * 1.0 + 0.6 * 2.0)


def test_every_preset_of_the_config_is_in_the_table() -> None:
    assert set(PRESETS) == {"average", "diloco", "fedasync"}
    for preset in PRESETS:
        OuterOptimizer(OuterConfig.model_validate({"preset": preset}))


@pytest.mark.parametrize("name", ["LBFGS", "Muon", "Adafactor", "SparseAdam", "Lion", "sgd"])
def test_an_optimizer_that_is_not_element_wise_is_refused_with_the_config(name: str) -> None:
    with pytest.raises(ConfigError, match=r"outer\.optimizer: .*'SGD', 'Adam', .*'Adagrad'"):
        parse({"outer": {"optimizer": name, "options": {"lr": 0.1}}})


@pytest.mark.parametrize(
    ("optimizer", "options", "message"),
    [
        ("SGD", {"lr": -1.0}, "Invalid learning rate"),
        ("SGD", {"lr": "fast"}, "refuses"),
        ("Adam", {"momentum": 0.9}, "momentum"),
        ("SGD", {"momentum": 0.0, "nesterov": True}, "Nesterov"),
        ("Adam", {"betas": [0.9, 1.5]}, "beta"),
        ("Adam", {"fused": True}, "fused cannot be set"),
        ("SGD", {"maximize": True}, "maximize cannot be set"),
    ],
)
def test_bad_options_are_a_config_error(optimizer: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterOptimizer(OuterConfig(optimizer=optimizer, options=options))


def test_scalars_survive_json_and_are_shared_by_all_blocks() -> None:
    outer = OuterOptimizer(OuterConfig(optimizer="NAdam"))
    assert set(outer.scalars) == {"step", "mu_product"}
    state = {slot: torch.zeros(4) for slot in outer.slots}
    first = outer.step(torch.zeros(4), torch.ones(4), state, None)
    second = outer.step(torch.zeros(4), torch.ones(4), state, first)
    assert (first["step"], second["step"]) == (1.0, 2.0)
    assert float(torch.tensor(second["mu_product"])) == second["mu_product"]  # a float32, exactly
