"""``bfloat16``: the upper half of each float32."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common.codecs.base import Codec, as_bytes, as_numbers


class Bfloat16(Codec):
    """Element: its bfloat16, little-endian, rounded to nearest even. A block of m elements: 2 m bytes; 1024 a full block.

    Error at most 2^-8 |x| for a normal float32, 2^-134 below. Finite values that round beyond the largest bfloat16 are refused.
    """

    def __init__(self) -> None:
        super().__init__("bfloat16")

    def _size(self, m: int) -> int:
        return 2 * m

    def _encode(self, x: Tensor, out: Tensor) -> None:
        rounded = x.to(torch.bfloat16)
        self.require_finite(rounded)
        out.copy_(as_bytes(rounded))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(as_numbers(data, torch.bfloat16))
        self.require_finite(out)
