"""``float64``: sums as they were added up, for partials."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common.codecs.base import Codec, as_bytes, as_numbers
from fleetddp.common.errors import ConfigError


class Float64(Codec):
    """Lossless for sums in float64; for partials only, whose buffers are in float64 then, too.

    Element: its IEEE 754 binary64, little-endian. A block of m elements: 8 m bytes; 4096 a full block. Other than of any other
    codec, ``encode`` takes f64[n] (or f32[n]) and ``decode`` gives f64[n].
    """

    lossless = True

    def __init__(self) -> None:
        super().__init__("float64")

    def encode(self, x: Tensor) -> Tensor:
        """f64[n] or f32[n] to u8[8 n]; raises as ``Codec.encode`` does."""
        if x.dtype not in (torch.float64, torch.float32) or x.dim() != 1:
            raise ConfigError(f"a vector to encode is float64 of shape (n,), not {x.dtype} of shape {tuple(x.shape)}")
        self.require_finite(x)
        return as_bytes(x.detach().to(torch.float64))

    def decode(self, data: Tensor, n: int, *, checked: bool = False) -> Tensor:
        """u8[8 n] to f64[n], all finite."""
        self.require_bytes(data, n)
        values = as_numbers(data, torch.float64)
        if not checked:
            self.require_finite(values)
        return values

    def _size(self, m: int) -> int:
        return 8 * m

    def _encode(self, x: Tensor, out: Tensor) -> None:
        out.copy_(self.encode(x.reshape(-1)).view(out.shape))

    def _decode(self, data: Tensor, out: Tensor) -> None:
        out.copy_(self.decode(data.reshape(-1), out.numel()).view(out.shape))
