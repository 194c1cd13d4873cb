"""How hard a sample is, by hand; thresholds on a handful of samples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fleetddp.common.errors import ConfigError
from fleetddp.edge.hardness import RULES, Calibration, energy, entropy, for_accuracy, for_rate, margin

# Probabilities 1/2, 1/4, 1/4 and 1/3, 1/3, 1/3 as logits.
LOGITS = torch.tensor([[math.log(2), 0.0, 0.0], [0.0, 0.0, 0.0]])


def test_margin_by_hand() -> None:
    torch.testing.assert_close(margin(LOGITS), torch.tensor([1 - (0.5 - 0.25), 1.0]))


def test_entropy_by_hand() -> None:
    # -(1/2 log 1/2 + 2 * 1/4 log 1/4) = 3/2 log 2, over log 3
    torch.testing.assert_close(entropy(LOGITS), torch.tensor([1.5 * math.log(2) / math.log(3), 1.0]))


def test_energy_by_hand() -> None:
    torch.testing.assert_close(energy(LOGITS), torch.tensor([-math.log(4), -math.log(3)]))


def test_only_the_energy_sees_the_offset_of_logits() -> None:
    for name, rule in RULES.items():
        moved = rule(LOGITS + 5.0) - rule(LOGITS)
        torch.testing.assert_close(moved, torch.full((2,), -5.0 if name == "energy" else 0.0), atol=1e-6, rtol=0)


def test_a_margin_needs_two_classes() -> None:
    with pytest.raises(ConfigError, match="two classes"):
        margin(torch.zeros(3, 1))


HARDNESS = torch.tensor([0.9, 0.1, 0.5, 0.5, 0.3])


@pytest.mark.parametrize(
    ("rate", "threshold", "offloaded"),
    [(0.0, 0.9, 0.0), (0.2, 0.5, 0.2), (0.4, 0.5, 0.2), (0.6, 0.3, 0.6), (0.8, 0.1, 0.8), (1.0, -math.inf, 1.0)],
)
def test_thresholds_for_a_rate(rate: float, threshold: float, offloaded: float) -> None:
    found = for_rate(HARDNESS, rate)
    assert found == Calibration(pytest.approx(threshold), pytest.approx(offloaded))


def right(*rows: int) -> Tensor:
    return torch.tensor([i in rows for i in range(5)])


def test_the_fewest_that_reach_an_accuracy() -> None:
    # By hardness: 0 (0.9), 2 and 3 (0.5), 4 (0.3), 1 (0.1). The edge is right on 1, 2 and 4; the cloud on all but 2.
    edge, cloud = right(1, 2, 4), right(0, 1, 3, 4)
    assert for_accuracy(HARDNESS, edge, cloud, 0.6) == Calibration(pytest.approx(0.9), 0.0)
    assert for_accuracy(HARDNESS, edge, cloud, 0.8) == Calibration(pytest.approx(0.5), 0.2)
    with pytest.raises(ConfigError, match=r"no threshold reaches 0\.9 on these 5 samples; the best reaches 0\.8"):
        for_accuracy(HARDNESS, edge, cloud, 0.9)


def test_all_are_offloaded_where_only_the_cloud_knows() -> None:
    assert for_accuracy(HARDNESS, right(), right(0, 1, 2, 3, 4), 1.0) == Calibration(-math.inf, 1.0)


@pytest.mark.parametrize("hardness", [torch.tensor([]), torch.tensor([0.1, math.nan]), torch.zeros(2, 2)])
def test_what_cannot_be_calibrated_on(hardness: Tensor) -> None:
    with pytest.raises(ConfigError, match="one hardness each"):
        for_rate(hardness, 0.5)
