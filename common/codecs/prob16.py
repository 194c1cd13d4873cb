"""``prob16:C``: the soft labels of an item, all C of them, in float16."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common.codecs.base import as_bytes, as_numbers
from fleetddp.common.codecs.prob import TOLERANCE, SoftLabels


class Prob16(SoftLabels):
    """An item of C classes: its C probabilities (float16, rounded to nearest even), its weight (float32): 2 C + 4 bytes.

    All numbers are little-endian. The error of a probability is at most 2^-10 of it, or 2^-24 where it is below 2^-14.
    """

    def __init__(self, classes: int) -> None:
        super().__init__(f"prob16:{classes}", classes)

    def _size(self, m: int) -> int:
        self._whole(m)
        return 2 * self.classes + 4

    def _encode(self, x: Tensor, out: Tensor) -> None:
        probabilities, weights = self._probabilities(x)
        out[:, :-4].copy_(as_bytes(probabilities.to(torch.float16)))
        self._put_weights(weights, out)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        parts = as_numbers(data[:, :-4], torch.float16).to(torch.float32)
        self.require_finite(parts)
        weights = self._weights(data)
        sums, labelled = parts.sum(1), weights > 0
        self._require(bool(((sums - labelled.float()).abs() <= torch.where(labelled, TOLERANCE, 0.0)).all()))
        self._require(bool((parts >= 0).all()))
        out[:, :-1] = parts / torch.where(labelled, sums, 1.0).unsqueeze(1) * weights.unsqueeze(1)
        out[:, -1] = weights
