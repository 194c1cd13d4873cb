"""``int8``: one byte an element, one scale a block."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common.codecs.scaled import Scaled


class Int8(Scaled):
    """A block of m elements: the scale (float32, little-endian), then m signed bytes in [-127, 127]; 516 bytes a full block.

    scale = max|x| / 127; code = x * (127 / max|x|), rounded half to even; decoded = code * scale, all in float32. Error at most
    max|x| / 254 and a float32 rounding. A block whose max|x| is below 2^-119 is sent as zeros.
    """

    def __init__(self) -> None:
        super().__init__("int8", levels=127)

    def _size(self, m: int) -> int:
        return 4 + m

    def _encode(self, x: Tensor, out: Tensor) -> None:
        out[:, 4:].copy_(self.quantise(x, out[:, :4]).view(torch.uint8))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        self.restore(data[:, 4:].view(torch.int8), data[:, :4], out)
