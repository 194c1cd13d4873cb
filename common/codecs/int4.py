"""``int4``: two elements a byte, one scale a block."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common.codecs.scaled import Scaled
from fleetddp.common.errors import Reason, Refused


class Int4(Scaled):
    """A block of m elements: the scale (float32, little-endian), then ceil(m / 2) bytes: 260 a full block.

    scale = max|x| / 7; code = x * (7 / max|x|), rounded half to even, in [-7, 7]; decoded = code * scale, all in float32. Byte i
    holds code + 8 of element 2 i in its low half, of element 2 i + 1 in its high half; the half after an odd last element is 8.
    Error at most max|x| / 14 and a float32 rounding. A block whose max|x| is below 2^-119 is sent as zeros.
    """

    def __init__(self) -> None:
        super().__init__("int4", levels=7)

    def _size(self, m: int) -> int:
        return 4 + (m + 1) // 2

    def _encode(self, x: Tensor, out: Tensor) -> None:
        halves = self.quantise(x, out[:, :4]).add_(8).view(torch.uint8)
        if x.shape[1] % 2:
            halves = torch.nn.functional.pad(halves, (0, 1), value=8)
        torch.bitwise_or(halves[:, 0::2], halves[:, 1::2] << 4, out=out[:, 4:])

    def _decode(self, data: Tensor, out: Tensor) -> None:
        packed = data[:, 4:]
        codes = torch.stack((packed & 15, packed >> 4), dim=2).view(torch.int8).sub_(8).view(len(data), -1)
        m = out.shape[1]
        if m % 2 and bool((codes[:, m:] != 0).any()):
            raise Refused(Reason.MALFORMED, f"{self.spec}: the half byte after the last element is not 8")
        self.restore(codes[:, :m], data[:, :4], out)
