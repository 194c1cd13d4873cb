"""Which optimizer steps count (``cloud/steps.py``). Optimizers are stepped by hand; no process group is needed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fleetddp.cloud.steps import StepCounter


class Watched:
    """A module, and the count after each step of any optimizer."""

    def __init__(self, module: nn.Module, optimizers: list[Optimizer] | None = None) -> None:
        self.module = module
        self.counter = StepCounter(module, optimizers)
        self.ended: list[bool] = []
        self.handle = register_optimizer_step_post_hook(lambda o, args, kwargs: self.ended.append(self.counter.stepped(o)))

    def step(self, *optimizers: Optimizer) -> list[int]:
        """Step each; the count after each of them."""
        counts = []
        for optimizer in optimizers:
            optimizer.step()
            counts.append(self.counter.count)
        return counts


@pytest.fixture
def watched() -> Iterator[Watched]:
    net = Watched(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    for parameter in net.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    yield net
    net.handle.remove()


def halves(watched: Watched) -> tuple[SGD, AdamW]:
    first, second = watched.module.children()
    return SGD(first.parameters(), lr=0.1), AdamW(second.parameters(), lr=0.1)


def test_one_optimizer(watched: Watched) -> None:
    optimizer = SGD(watched.module.parameters(), lr=0.1)
    assert watched.step(optimizer, optimizer, optimizer) == [1, 2, 3]


def test_a_step_of_two_optimizers_ends_with_the_second(watched: Watched) -> None:
    first, second = halves(watched)
    assert watched.step(first, second, first, second) == [0, 1, 1, 2]
    assert watched.ended == [False, True, False, True]


def test_given_optimizers_are_not_waited_to_be_found(watched: Watched) -> None:
    first, second = halves(watched)
    watched.counter = StepCounter(watched.module, [first, second])
    assert watched.step(second, first, second) == [0, 0, 1]  # the last one given ends a step


def test_several_steps_of_one_optimizer_for_one_of_the_other(watched: Watched) -> None:
    critic, generator = halves(watched)
    watched.counter = StepCounter(watched.module, [critic, generator])
    assert watched.step(critic, critic, critic, generator, critic, generator, generator) == [0, 0, 0, 1, 1, 2, 2]


def test_an_optimizer_of_another_model_is_not_ours(watched: Watched) -> None:
    stranger = nn.Linear(2, 2)
    stranger.weight.grad = torch.ones_like(stranger.weight)
    ours = SGD(watched.module.parameters(), lr=0.1)
    assert watched.step(SGD(stranger.parameters(), lr=0.1), ours, SGD(stranger.parameters(), lr=0.1), ours) == [0, 1, 1, 2]


def calls_of_a_step(watched: Watched, optimizer: Optimizer) -> int:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        watched.counter.stepped(optimizer)
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_costs_the_same_however_many_other_optimizers_there_are(watched: Watched) -> None:
    ours = SGD(watched.module.parameters(), lr=0.1)
    watched.step(ours)
    alone = calls_of_a_step(watched, ours)
    strangers = [SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(50)]
    watched.step(*strangers)
    assert calls_of_a_step(watched, ours) == alone
    of_a_stranger = calls_of_a_step(watched, strangers[0])
    former = [SGD(watched.module.parameters(), lr=0.1) for _ in range(50)]
    watched.step(*former)
    del former
    gc.collect()
    watched.step(ours := SGD(watched.module.parameters(), lr=0.1))
    assert calls_of_a_step(watched, ours) == alone
    assert calls_of_a_step(watched, strangers[0]) == of_a_stranger <= alone


def test_a_parameter_that_no_optimizer_holds_delays_the_first_step_only(watched: Watched) -> None:
    first, _ = halves(watched)
    assert watched.step(first, first, first) == [0, 2, 3]


def test_a_frozen_parameter_is_not_missed(watched: Watched) -> None:
    for parameter in watched.module[1].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    first, _ = halves(watched)
    assert watched.step(first, first) == [1, 2]


def test_an_optimizer_made_anew_takes_the_place_of_the_old_one(watched: Watched) -> None:
    old = SGD(watched.module.parameters(), lr=0.1)
    new = AdamW(watched.module.parameters(), lr=0.1)  # the old one still exists
    assert watched.step(old, new, new) == [1, 2, 3]


def test_a_smaller_optimizer_made_anew_takes_over_at_its_second_step(watched: Watched) -> None:
    everything = SGD(watched.module.parameters(), lr=0.1)
    head = SGD(list(watched.module.parameters())[2:], lr=0.1)
    assert watched.step(everything, head, head, head) == [1, 1, 2, 3]


def test_an_optimizer_that_is_gone_is_not_waited_for(watched: Watched) -> None:
    first, second = halves(watched)
    assert watched.step(first, second) == [0, 1]
    del second
    gc.collect()
    assert watched.step(first, first) == [2, 3]


def test_the_last_one_may_be_gone_when_an_inner_one_is_found(watched: Watched) -> None:
    first, second = halves(watched)
    assert watched.step(first, second) == [0, 1]
    del second
    gc.collect()
    inner = SGD(first.param_groups[0]["params"][:1], lr=0.1)
    assert watched.step(inner, first) == [1, 2]


def test_an_optimizer_inside_another_does_not_count_by_itself(watched: Watched) -> None:
    """As ZeroRedundancyOptimizer does: it holds all parameters, and has an optimizer of its own step a share of them."""

    class Sharded(SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.share = SGD(self.param_groups[0]["params"][:1], lr=0.1)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.share.step(closure)

    optimizer = Sharded(list(watched.module.parameters()))
    assert watched.step(optimizer, optimizer, optimizer) == [1, 2, 3]


def test_parameters_added_later_are_seen(watched: Watched) -> None:
    stranger, parameters = nn.Linear(2, 2), list(watched.module.parameters())
    optimizer = SGD(stranger.parameters(), lr=0.1)
    assert watched.step(optimizer) == [0]
    optimizer.add_param_group({"params": parameters})
    assert watched.step(optimizer) == [1]


def scaled_steps(watched: Watched, *optimizers: Optimizer, overflows: list[set[int]]) -> None:
    """Real fused optimizers under a real GradScaler; in step i the gradients of the optimizers in ``overflows[i]`` are inf."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    for overflow in overflows:
        for index, optimizer in enumerate(optimizers):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad.fill_(float("inf") if index in overflow else 1.0)
            scaler.step(optimizer)
        scaler.update()


def test_a_step_that_a_grad_scaler_skips_inside_is_taken_out(watched: Watched) -> None:
    optimizer = SGD(watched.module.parameters(), lr=0.1, fused=True)
    scaled_steps(watched, optimizer, overflows=[set(), {0}, set(), {0}, {0}])
    assert len(watched.ended) == 5  # a fused optimizer is called all the same
    assert watched.counter.at_most == 5
    assert watched.counter.count == 2
    assert watched.counter.at_most == 2


def test_a_step_that_a_grad_scaler_skips_outside_is_not_seen(watched: Watched) -> None:
    optimizer = SGD(watched.module.parameters(), lr=0.1, fused=False)
    scaled_steps(watched, optimizer, overflows=[set(), {0}, set(), {0}, {0}])
    assert len(watched.ended) == 2
    assert watched.counter.at_most == watched.counter.count == 2


def test_a_skip_of_any_optimizer_takes_the_step_out(watched: Watched) -> None:
    first, second = (SGD(part.parameters(), lr=0.1, fused=True) for part in watched.module.children())
    scaled_steps(watched, first, second, overflows=[set(), {0}, {1}, {0, 1}, set()])
    assert watched.counter.count == 2


def test_an_optimizer_that_was_not_called_leaves_the_step_uncounted(watched: Watched) -> None:
    """What GradScaler does with other optimizers: ``step`` is not called. The rounds stay in phase."""
    first, second = halves(watched)
    assert watched.step(first, second) == [0, 1]
    assert watched.step(second) == [1]  # the first was skipped
    assert watched.step(first) == [1]  # the second was skipped
    assert watched.step(first, second) == [1, 2]


def test_restart(watched: Watched) -> None:
    optimizer = SGD(watched.module.parameters(), lr=0.1)
    watched.step(optimizer)
    watched.counter.restart(5)
    assert watched.step(optimizer) == [6]
