"""``float32``: the values themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common.codecs.base import Codec, as_bytes, as_numbers, require_vector


class Float32(Codec):
    """Lossless. Element: its IEEE 754 binary32, little-endian. A block of m elements: 4 m bytes; 2048 a full block.

    The result of ``encode`` and ``decode`` shares the argument's memory where that is contiguous and aligned.
    """

    lossless = True

    def __init__(self) -> None:
        super().__init__("float32")

    def encode(self, x: Tensor) -> Tensor:
        """As ``Codec.encode``, without copying."""
        require_vector(x, "a vector to encode")
        self.require_finite(x)
        return as_bytes(x.detach())

    def decode(self, data: Tensor, n: int, *, checked: bool = False) -> Tensor:
        """As ``Codec.decode``, without copying."""
        self.require_bytes(data, n)
        aligned = data.stride(0) == 1 and data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0
        values = data.view(torch.float32) if aligned else as_numbers(data, torch.float32)
        if not checked:
            self.require_finite(values)
        return values

    def _size(self, m: int) -> int:
        return 4 * m

    def _encode(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.encode(x.reshape(-1)).view(out.shape))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(self.decode(data.reshape(-1), out.numel()).view(out.shape))
