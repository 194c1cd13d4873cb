"""What ``int8`` and ``int4`` share: a block is a float32 scale and small signed integers that it multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common.codecs.base import Codec, as_numbers
from fleetddp.common.errors import Reason, Refused

SMALLEST = 2.0**-119  # a block of smaller magnitude is sent as zeros: its scale would lose bits below the normal numbers


class Scaled(Codec):
    """A block's scale is max|x| / levels, its integers lie in [-levels, levels]; the error of an element is at most scale / 2."""

    def __init__(self, spec: str, levels: int) -> None:
        self.levels = levels
        # The largest scale that keeps scale * levels finite in float32.
        largest = torch.tensor(torch.finfo(torch.float32).max)
        self.largest_scale = float(torch.nextafter(largest / levels, torch.zeros(())))
        super().__init__(spec)

    def quantise(self, x: Tensor, scales: Tensor) -> Tensor:
        """Blocks f32[b, m] to integers i8[b, m]; writes each block's scale to u8[b, 4]."""
        peaks = x.abs().amax(dim=1)
        self.require_finite(peaks)
        zero = peaks < SMALLEST
        scale = (peaks / self.levels).clamp_(max=self.largest_scale).masked_fill_(zero, 0.0)
        scales.copy_(scale.view(torch.uint8).view(-1, 4))
        factor = (self.levels / peaks).masked_fill_(zero, 0.0)
        return x.mul(factor.unsqueeze(1)).round_().to(torch.int8)

    def restore(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Integers i8[b, m] and scales u8[b, 4] to f32[b, m]."""
        scale = as_numbers(scales, torch.float32)
        low, high = (float(v) for v in torch.aminmax(scale))
        if not 0.0 <= low <= high <= self.largest_scale:  # false for nan, too
            allowed = f"0 to {self.largest_scale}"
            raise Refused(Reason.NOT_FINITE, f"{self.spec}: block scales are {low} to {high}; allowed are {allowed}")
        if int(codes.amin()) < -self.levels:
            raise Refused(Reason.MALFORMED, f"{self.spec}: a code is below -{self.levels}")
        torch.mul(codes, scale, out=out)
