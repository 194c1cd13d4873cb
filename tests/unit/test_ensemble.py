"""Replicas averaged and stages chained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fleetddp.common.errors import ConfigError, Unreachable
from fleetddp.edge.ensemble import Replicated, Staged
from fleetddp.edge.hardness import energy


def away(inputs: Tensor) -> Tensor:
    raise Unreachable("unplugged")


def test_the_probabilities_are_averaged() -> None:
    logits = [torch.tensor([[3.0, 1.0]]).log(), torch.tensor([[1.0, 1.0]]).log()]  # 3/4 and 1/2
    both = Replicated([lambda x: logits[0], lambda x: logits[1]])
    torch.testing.assert_close(both(torch.zeros(1, 1)).softmax(1), torch.tensor([[0.625, 0.375]]))
    both.close()


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_softmax_and_energy_are_the_means(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = [5 * torch.randn(3, 4, generator=generator) for _ in range(count)]
    replicated = Replicated([lambda x, own=own: own for own in logits])
    found = replicated(torch.zeros(3, 1))
    replicated.close()
    torch.testing.assert_close(found.softmax(1), torch.stack([own.softmax(1) for own in logits]).mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(energy(found), torch.stack([energy(own) for own in logits]).mean(0), atol=1e-5, rtol=1e-5)


def test_one_that_is_away_is_left_out() -> None:
    replicated = Replicated([away, lambda x: x, away])
    assert replicated(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    replicated.close()


def test_fewer_than_are_due_do_not_answer() -> None:
    replicated = Replicated([away, lambda x: x], at_least=2)
    with pytest.raises(Unreachable, match="1 of 2 replicas answered, 2 are due: unplugged"):
        replicated(torch.ones(1, 2))
    replicated.close()
    with pytest.raises(ConfigError, match="at_least is 3 of 2"):
        Replicated([away, away], at_least=3)


def test_two_stages_are_the_whole() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    inputs = torch.randn(5, 3)
    assert torch.equal(Staged(model[:2], model[2:])(inputs), model(inputs))
