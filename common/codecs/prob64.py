"""``prob64:C``: sums of soft labels as they were added up, for partials."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common.codecs.base import Codec, as_bytes, as_numbers
from fleetddp.common.codecs.prob import TOLERANCE
from fleetddp.common.errors import ConfigError, Reason, Refused


class Prob64(Codec):
    """An item of C classes: its row (w p_1, ..., w p_C, w) in float64, little-endian: 8 C + 8 bytes; lossless.

    All elements are >= 0, and the first C add up to the last within ``prob.TOLERANCE`` of it. Other than of any codec but
    ``float64``, ``encode`` takes f64[n] and ``decode`` gives f64[n].
    """

    lossless = True

    def __init__(self, classes: int) -> None:
        self.classes = classes
        super().__init__(f"prob64:{classes}", classes + 1)

    def encode(self, x: Tensor) -> Tensor:
        """f64[n] to u8[8 n]; raises as ``Codec.encode`` does, and ``Refused(BAD_PROBABILITIES)``."""
        if x.dtype != torch.float64 or x.dim() != 1:
            raise ConfigError(f"a vector to encode is float64 of shape (n,), not {x.dtype} of shape {tuple(x.shape)}")
        self._require(x)
        return as_bytes(x.detach())

    def decode(self, data: Tensor, n: int, *, checked: bool = False) -> Tensor:
        """u8[8 n] to f64[n]; raises ``Refused``: ``WRONG_SIZE``, ``NOT_FINITE``, ``BAD_PROBABILITIES``."""
        self.require_bytes(data, n)
        values = as_numbers(data, torch.float64)
        if not checked:
            self._require(values)
        return values

    def _require(self, values: Tensor) -> None:
        self.require_finite(values)
        if values.numel() % self.block:
            raise Refused(Reason.WRONG_SIZE, f"{self.spec}: {values.numel()} elements are no items: one has {self.block}")
        rows = values.view(-1, self.block)
        parts, weights = rows[:, :-1], rows[:, -1]
        if not bool((rows >= 0).all()) or not bool(((parts.sum(1) - weights).abs() <= TOLERANCE * weights).all()):
            raise Refused(Reason.BAD_PROBABILITIES, f"{self.spec}: the sums of an item are not all >= 0, adding up to its weight")

    def _size(self, m: int) -> int:
        return 8 * m

    def _encode(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.encode(x.reshape(-1)).view(out.shape))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(self.decode(data.reshape(-1), out.numel()).view(out.shape))
