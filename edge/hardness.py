"""How hard a model finds a sample, and from where on it should ask: rules on logits, and thresholds calibrated on data.

A rule maps f32[n, classes] logits to f32[n] hardness; a sample is hard if its hardness is greater than the threshold. Any
callable of that kind is a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fleetddp.common.errors import ConfigError

Rule = Callable[[Tensor], Tensor]


def margin(logits: Tensor) -> Tensor:
    """1 - (p1 - p2), of the two most probable classes: 0 certain, 1 a tie (Scheffer, Decomain and Wrobel, 2001)."""
    if logits.shape[1] < 2:
        raise ConfigError("the margin needs two classes at least")
    top = logits.softmax(1).topk(2, dim=1).values
    return 1.0 - (top[:, 0] - top[:, 1])


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of the probabilities over that of the uniform distribution: 0 certain, 1 knows nothing."""
    logs = logits.log_softmax(1)
    return -(logs.exp() * logs).sum(1) / math.log(max(logits.shape[1], 2))


def energy(logits: Tensor) -> Tensor:
    """-log sum exp(logits): high for a sample unlike those trained on (Liu et al., Energy-based OOD Detection, 2020, eq. 4).

    Unlike the others it depends on the logits' common offset, which training leaves comparable between samples.
    """
    return -logits.logsumexp(1)


RULES: Mapping[str, Rule] = {"margin": margin, "entropy": entropy, "energy": energy}


@dataclass(frozen=True, slots=True)
class Calibration:
    """A threshold, and what it does on the data it was calibrated on."""

    threshold: float
    offload_rate: float  # share of samples that are hard


def for_rate(hardness: Tensor, rate: float) -> Calibration:
    """The lowest threshold at which at most ``rate`` of these samples, f32[n], are hard. Ties stay easy together.

    Raises ``ConfigError`` without samples, or with a hardness that is not a number.
    """
    values = _checked(hardness)
    n = len(values)
    most = min(n, math.floor(rate * n + 1e-9))  # 0.1 * 30 is a little more than 3, 0.29 * 100 a little less than 29
    descending = values.sort(descending=True).values
    threshold = -math.inf if most == n else float(descending[most])
    return Calibration(threshold, float((values > threshold).double().mean()))


def for_accuracy(hardness: Tensor, edge_right: Tensor, cloud_right: Tensor, target: float) -> Calibration:
    """The threshold that sends the fewest samples to the cloud such that the pair is right on ``target`` of them.

    ``edge_right`` and ``cloud_right``, bool[n], say who is right on which sample. Raises ``ConfigError`` where no threshold does
    it, and says what the best one reaches.
    """
    values, order = _checked(hardness).sort(descending=True, stable=True)
    gains = (cloud_right[order].long() - edge_right[order].long()).cumsum(0)
    right = torch.cat([torch.zeros(1, dtype=torch.long), gains]) + int(edge_right.long().sum())  # by how many are offloaded
    cuts = [k for k in range(len(values) + 1) if k in (0, len(values)) or values[k] < values[k - 1]]  # ties go together
    for k in cuts:
        if int(right[k]) >= target * len(values) - 1e-9:
            return Calibration(-math.inf if k == len(values) else float(values[k]), k / len(values))
    best = max(int(right[k]) for k in cuts) / len(values)
    raise ConfigError(
        f"cascade.accuracy: no threshold reaches {target:g} on these {len(values)} samples; the best reaches {best:g}"
    )


def _checked(hardness: Tensor) -> Tensor:
    """As float64: a float32 turned into a Python number and back must compare as it did."""
    if hardness.dim() != 1 or not len(hardness) or bool(hardness.isnan().any()):
        raise ConfigError("calibration needs samples, one hardness each, and each a number")
    return hardness.double()
