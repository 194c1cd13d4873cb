"""Soft labels: what the codecs ``prob16`` and ``probtop`` share. A block is one item of a proxy set.

Its elements are (w p_1, ..., w p_C, w): the probabilities of the C classes times the weight of the item, then the weight, so that
rows of several members add up, and whoever holds a sum divides by its last element. Probabilities are >= 0 and sum to 1
within ``TOLERANCE``; what is decoded sums to 1 within float32 rounding. An item of weight 0 has been labelled by nobody: all its
elements are zeros.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from fleetddp.common.codecs.base import Codec, as_bytes, as_numbers
from fleetddp.common.errors import ConfigError, Reason, Refused

TOLERANCE = 2.0**-8  # float16 rounds C values that sum to 1 by 2^-11 together, and by up to C 2^-25 of those below 2^-14
FEWEST, MAX_CLASSES = 2, 2**16
COUNT = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


class SoftLabels(Codec):
    """Base of the two codecs. Soft labels are states, not increments: nothing that was lost is owed, and there is no residual."""

    def __init__(self, spec: str, classes: int) -> None:
        self.classes = classes
        super().__init__(spec, classes + 1)

    @staticmethod
    def accepts_classes(text: str) -> bool:
        """Whether this is a number of classes, 2 to ``MAX_CLASSES``."""
        return COUNT.fullmatch(text) is not None and FEWEST <= int(text) <= MAX_CLASSES

    def encode_with_feedback(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The encoded rows, and None: the next ones replace these, they do not make up for them."""
        if residual is not None:
            raise ConfigError(f"{self.spec}: soft labels carry no residual")
        return self.encode(x), None

    def _probabilities(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows f32[b, C + 1] to probabilities f32[b, C] (zeros where the weight is 0) and weights f32[b]."""
        self.require_finite(x)
        parts, weights = x[:, :-1], x[:, -1]
        sums = parts.sum(1)
        self._require_weights(weights)
        self._require(bool(((sums - weights).abs() <= TOLERANCE * weights).all()) and bool((parts >= 0).all()))
        return parts / torch.where(weights > 0, sums, 1.0).unsqueeze(1), weights

    def _put_weights(self, weights: Tensor, out: Tensor) -> None:
        out[:, -4:].copy_(as_bytes(weights.contiguous().unsqueeze(1)))

    def _weights(self, data: Tensor) -> Tensor:
        """f32[b], the last four bytes of each block."""
        weights = as_numbers(data[:, -4:], torch.float32).squeeze(1)
        self.require_finite(weights)
        self._require_weights(weights)
        return weights

    def _require_weights(self, weights: Tensor) -> None:
        if not bool((weights >= 0).all()):
            raise Refused(Reason.BAD_WEIGHT, f"{self.spec}: the weight of an item is negative")

    def _require(self, fine: bool) -> None:
        if not fine:
            wanted = "all >= 0 and sum to 1 (to 0 where the item has no weight)"
            raise Refused(Reason.BAD_PROBABILITIES, f"{self.spec}: the probabilities of an item are not {wanted}")

    def _whole(self, m: int) -> None:
        if m != self.classes + 1:
            raise Refused(Reason.WRONG_SIZE, f"{self.spec}: {m} elements are no item: one has {self.classes} + 1")
