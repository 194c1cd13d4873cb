"""The learning rate of a site's steps (``cloud/rate.py``), by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleetddp.cloud.rate import LearningRate, scale
from fleetddp.common.config import parse
from fleetddp.common.errors import ConfigError


@pytest.mark.parametrize(
    ("rule", "batch", "factor"),
    [("none", 512, 1.0), ("linear", 512, 4.0), ("linear", 64, 0.5), ("sqrt", 512, 2.0), ("sqrt", 32, 0.5)],
)
def test_scaling_rules(rule: Any, batch: float, factor: float) -> None:
    assert scale(rule, batch, 128) == factor


def moves(rate: LearningRate, parameter: nn.Parameter, steps: int) -> list[float]:
    """How far a gradient of one moves the parameter in each step: the learning rate of plain SGD."""
    moved = []
    for _ in range(steps):
        before = parameter.item()
        parameter.grad = torch.ones(())
        rate.step()
        moved.append(round(before - parameter.item(), 6))
    return moved


def test_warm_up() -> None:
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    rate = LearningRate(optimizer, factor=4.0, warmup_steps=4)
    assert moves(rate, parameter, 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4], abs=1e-6)
    assert optimizer.param_groups[0]["lr"] == 0.1  # what checkpoints and schedulers see


def test_a_scheduler_goes_its_own_way() -> None:
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rate = LearningRate(optimizer, factor=2.0)
    found = []
    for _ in range(3):
        found += moves(rate, parameter, 1)
        scheduler.step()
    assert found == pytest.approx([0.2, 0.1, 0.05])
    assert scheduler.get_last_lr() == [0.0125]


def test_each_group_has_a_rate_of_its_own() -> None:
    parameters = [nn.Parameter(torch.zeros(())) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": 0.1}, {"params": [parameters[1]], "lr": 0.01}]
    for parameter in parameters:
        parameter.grad = torch.ones(())
    LearningRate(torch.optim.SGD(groups), factor=3.0).step()
    assert [p.item() for p in parameters] == pytest.approx([-0.3, -0.03])


def test_a_site_that_goes_on_with_more_ranks_takes_the_factor_of_its_new_batch() -> None:
    parameter = nn.Parameter(torch.zeros(()))
    before = LearningRate(torch.optim.SGD([parameter], lr=0.1), factor=2.0, warmup_steps=4)
    moves(before, parameter, 2)
    after = LearningRate(torch.optim.SGD([parameter], lr=0.1), factor=4.0, warmup_steps=4)
    after.load_state_dict(before.state_dict())
    assert moves(after, parameter, 3) == pytest.approx([0.3, 0.4, 0.4])


def test_a_failing_step_leaves_the_rate_as_it_was() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LearningRate(optimizer, factor=2.0).step()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_scaling_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="lr_scaling: sqrt needs lr_reference_batch"):
        parse({"site": {"lr_scaling": "sqrt"}})
