"""Soft labels by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fleetddp.common.distill import certainty, consensus, mixing, soft_loss, soften, to_rows


def test_soften() -> None:
    """softmax((2 log 4, 0) / 2) = (4, 1) / 5."""
    logits = torch.tensor([[2 * math.log(4.0), 0.0]])
    assert torch.allclose(soften(logits, 2.0), torch.tensor([[0.8, 0.2]]))
    assert soften(logits.to(torch.bfloat16), 1e6)[0].tolist() == pytest.approx([0.5, 0.5], abs=1e-5)


def test_the_loss_is_the_divergence_times_the_squared_temperature() -> None:
    """Two items: KL((.5, .5) || (.8, .2)) = .5 log .625 + .5 log 2.5, and 0 where the labels are what the model says."""
    logits = torch.tensor([[2 * math.log(4.0), 0.0], [2 * math.log(4.0), 0.0]])
    labels = torch.tensor([[0.5, 0.5], [0.8, 0.2]])
    divergence = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert float(soft_loss(logits, labels, 2.0)) == pytest.approx(4.0 * divergence / 2, rel=1e-5)
    assert float(soft_loss(logits, labels, 2.0, torch.tensor([3.0, 1.0]))) == pytest.approx(4.0 * divergence * 3 / 4, rel=1e-5)


def test_the_gradient_is_t_times_the_difference() -> None:
    """d/dz T^2 KL(p || softmax(z / T)) = T (softmax(z / T) - p) (Hinton et al., 2015, equation 2, times T^2); a mean over b."""
    logits = torch.randn(3, 5, requires_grad=True)
    labels = torch.softmax(torch.randn(3, 5), 1)
    soft_loss(logits, labels, 3.0).backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad, 3.0 * (soften(logits.detach(), 3.0) - labels) / 3, atol=1e-6)


@pytest.mark.parametrize("items", [0, 2])
def test_without_labels_the_loss_is_zero_and_has_a_gradient(items: int) -> None:
    logits = torch.randn(items, 4, requires_grad=True)
    loss = soft_loss(logits, torch.full((items, 4), 0.25), 2.0, torch.zeros(items))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(logits.grad, torch.zeros(items, 4))


def test_hard_labels_are_no_trouble() -> None:
    """A label of probability 1 has entropy 0, and the loss is the cross entropy at that temperature."""
    labels = torch.tensor([[1.0, 0.0]])
    assert certainty(labels, power=2.0, floor=0.01).tolist() == [1.0]
    assert float(soft_loss(torch.tensor([[math.log(3.0), 0.0]]), labels, 1.0)) == pytest.approx(-math.log(0.75), rel=1e-5)


def test_certainty() -> None:
    """H((.5, .5, 0, 0)) = log 2, half of log 4; even labels say nothing and weigh the floor."""
    labels = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert certainty(labels, power=2.0, floor=0.1).tolist() == pytest.approx([0.25, 0.01])
    assert certainty(labels, power=0.0, floor=0.1).tolist() == [1.0, 1.0]


def test_mixing() -> None:
    assert [mixing(2.0, 4, version) for version in (0, 1, 2, 4, 9)] == [0.0, 0.5, 1.0, 2.0, 2.0]
    assert mixing(2.0, 0, 0) == 2.0


def test_consensus_is_the_weighted_mean() -> None:
    """(1 (.8, .2) + 3 (.4, .6)) / 4 = (.5, .5); of the second item only the first member has an opinion, of the third nobody."""
    first = to_rows(torch.tensor([[0.8, 0.2], [0.9, 0.1], [0.0, 0.0]]), torch.tensor([1.0, 2.0, 0.0]))
    second = to_rows(torch.tensor([[0.4, 0.6], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([3.0, 0.0, 0.0]))
    labels, weights = consensus(first + second)
    assert labels.reshape(-1).tolist() == pytest.approx([0.5, 0.5, 0.9, 0.1, 0.5, 0.5])
    assert weights.tolist() == [4.0, 2.0, 0.0]


def test_a_member_that_is_absent_changes_only_its_weights() -> None:
    """The consensus of those who are there is what it would be if there were nobody else."""
    rows = [
        to_rows(torch.softmax(torch.randn(4, 3, generator=torch.Generator().manual_seed(s)), 1), torch.full((4,), s + 1.0))
        for s in range(3)
    ]
    labels, weights = consensus(rows[0] + rows[2])
    expected = (rows[0][:, :3] + rows[2][:, :3]) / 4.0
    assert torch.allclose(labels, expected)
    assert weights.tolist() == [4.0] * 4
