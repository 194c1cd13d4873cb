"""Thresholds calibrated on any data do what was asked of them, and no threshold does better."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetddp.common.errors import ConfigError
from fleetddp.edge.hardness import for_accuracy, for_rate

# Few different values, so that ties are common, and float32 numbers that are not exact in decimal.
hardnesses = st.lists(st.sampled_from([0.0, 0.1, 0.2, 1 / 3, 0.7, 1.0]) | st.floats(0, 1, width=32), min_size=1, max_size=30)


def thresholds(hardness: Tensor) -> list[float]:
    return [-math.inf, *sorted(set(hardness.double().tolist()))]


def offloaded(hardness: Tensor, threshold: float) -> Tensor:
    return hardness.double() > threshold


@settings(deadline=None)
@given(hardnesses, st.floats(0, 1))
def test_a_rate_is_never_exceeded_and_no_lower_threshold_keeps_to_it(values: list[float], rate: float) -> None:
    hardness = torch.tensor(values)
    found = for_rate(hardness, rate)
    n, most = len(values), rate * len(values) + 1e-6
    assert found.offload_rate == offloaded(hardness, found.threshold).sum() / n
    assert found.offload_rate * n <= most
    lower = [t for t in thresholds(hardness) if t < found.threshold]
    assert all(offloaded(hardness, t).sum() > most for t in lower)


@settings(deadline=None)
@given(hardnesses, st.randoms(use_true_random=False), st.floats(0, 1))
def test_an_accuracy_is_reached_with_the_fewest_or_not_at_all(values: list[float], random: object, target: float) -> None:
    hardness = torch.tensor(values)
    edge, cloud = (torch.tensor([random.random() < 0.6 for _ in values]) for _ in range(2))  # type: ignore[attr-defined]

    def accuracy(threshold: float) -> float:
        return float(torch.where(offloaded(hardness, threshold), cloud, edge).double().mean())

    reaching = [t for t in thresholds(hardness) if accuracy(t) >= target - 1e-9]
    if not reaching:
        with pytest.raises(ConfigError, match="no threshold"):
            for_accuracy(hardness, edge, cloud, target)
        return
    found = for_accuracy(hardness, edge, cloud, target)
    assert accuracy(found.threshold) >= target - 1e-9
    assert found.offload_rate == min(float(offloaded(hardness, t).double().mean()) for t in reaching)
    assert found.offload_rate == float(offloaded(hardness, found.threshold).double().mean())
