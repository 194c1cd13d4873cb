"""Distillation: what a model says softly of unlabelled items, and how another learns from that. Pure functions of tensors.

Members send their soft labels of a shared, unlabelled proxy set in place of their weights, so that unlike models can learn from
each other: Li and Wang, FedMD, 2019 (everyone labels the same public items, the mean is the consensus); Lin et al., Ensemble
Distillation for Robust Model Fusion in Federated Learning (FedDF), 2020 (the ensemble teaches a model on unlabelled data);
Itahara et al., Distillation-Based Semi-Supervised Federated Learning (DS-FL), 2020 (unlike data; entropy tells how much a label
says). A *row* is (w p_1, ..., w p_C, w) of one item; rows add up (``labels.py``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def soften(logits: Tensor, temperature: float) -> Tensor:
    """Logits f[b, C] to probabilities f32[b, C]: softmax(z / T) (Hinton, Vinyals and Dean, 2015, equation 1)."""
    return torch.softmax(logits.float() / temperature, dim=1)


def soft_loss(logits: Tensor, probabilities: Tensor, temperature: float, weights: Tensor | None = None) -> Tensor:
    """T^2 times the mean over items of KL(p || softmax(z / T)), a scalar with gradient with respect to the logits f[b, C].

    The factor T^2 keeps the gradient's size about the same whatever T is, and ``mix`` its meaning (Hinton et al., 2015, §2).
    ``weights`` f[b] >= 0 make it a weighted mean; where all are 0 (and for no items at all) it is 0, still with a gradient.
    """
    each = functional.kl_div(torch.log_softmax(logits.float() / temperature, dim=1), probabilities, reduction="none").sum(1)
    if weights is None:
        weights = torch.ones_like(each)
    total = weights.sum()
    return (each * weights).sum().div(torch.where(total > 0, total, 1.0)).mul(temperature * temperature)


def certainty(probabilities: Tensor, *, power: float, floor: float) -> Tensor:
    """How much each item's label weighs, f32[b] in [floor^power, 1]: max(floor, 1 - H(p) / log C)^power, with H the entropy.

    Members that have not seen a class are less sure of it; DS-FL lowers the entropy of a mean, here the unsure weigh less in it.
    """
    entropy: Tensor = -torch.special.xlogy(probabilities, probabilities).sum(1)
    sure: Tensor = 1.0 - entropy / math.log(probabilities.shape[1])
    return sure.clamp(min=floor, max=1.0).pow(power)


def mixing(mix: float, ramp_versions: int, version: int) -> float:
    """What the loss on soft labels weighs at a version: rises evenly to ``mix`` over the first ``ramp_versions``.

    The first consensus is of models that have learnt little (a ramp as in Laine and Aila, Temporal Ensembling, 2017, but linear).
    """
    return mix * min(1.0, version / ramp_versions) if ramp_versions else mix


def to_rows(probabilities: Tensor, weights: Tensor) -> Tensor:
    """Probabilities f32[b, C] and weights f32[b] to rows f32[b, C + 1]."""
    return torch.cat([probabilities * weights.unsqueeze(1), weights.unsqueeze(1)], dim=1)


def consensus(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of rows f32[b, C + 1] to the weighted mean of the probabilities f32[b, C] and the weights f32[b] behind it.

    sum(w p) / sum(w): FedMD's mean, weighted. Where nobody has an opinion the weight is 0 and the probabilities are even.
    """
    weights = rows[:, -1]
    known = (weights > 0).unsqueeze(1)
    even = 1.0 / (rows.shape[1] - 1)
    return torch.where(known, rows[:, :-1] / torch.where(known, weights.unsqueeze(1), 1.0), even), weights
