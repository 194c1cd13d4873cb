"""What every codec does: cut a vector into blocks, refuse what is not finite, carry the error of one encoding into the next.

A vector of n elements is encoded as its blocks of ``block`` elements (``BLOCK`` for all but soft labels), one after another; a
full block takes ``block_bytes``, a last short block fewer. Each block decodes by itself, so any run of whole blocks can be sent,
checked and decoded alone. Numbers are little-endian. Encoding and decoding run on the device of what is passed in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fleetddp.common.errors import ConfigError, Reason, Refused

BLOCK = 512  # elements


class Codec(ABC):
    """Float32 vectors to bytes and back. ``spec`` is its name on the wire and in the fleet file."""

    lossless: ClassVar[bool] = False

    def __init__(self, spec: str, block: int = BLOCK) -> None:
        self.spec = spec
        self.block = block  # elements
        self.block_bytes = self._size(block)

    def __repr__(self) -> str:
        return f"<codec {self.spec}>"

    def encoded_bytes(self, n: int) -> int:
        """Bytes that n elements take."""
        blocks, rest = divmod(n, self.block)
        return blocks * self.block_bytes + (self._size(rest) if rest else 0)

    @torch.no_grad()
    def encode(self, x: Tensor) -> Tensor:
        """f32[n], contiguous or not, to u8[encoded_bytes(n)].

        Raises ``Refused(NOT_FINITE)`` if an element is inf, nan or too large for the format, ``ConfigError`` for another dtype
        or shape than f32[n].
        """
        require_vector(x, "a vector to encode")
        out = torch.empty(self.encoded_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        for elements, octets, m in self._runs(x.numel(), x.device):
            self._encode(x[elements].reshape(-1, m), out[octets].view(-1, self._size(m)))
        return out

    def decode(self, data: Tensor, n: int, *, checked: bool = False) -> Tensor:
        """u8[encoded_bytes(n)] to f32[n], all finite. The bytes may come from anywhere.

        ``checked``: these bytes were decoded before, when they came; a check that costs a pass of its own is left out.
        Raises ``Refused``: ``WRONG_SIZE``; ``NOT_FINITE``; or ``MALFORMED`` where ``encode`` could not have written them.
        """
        self.require_bytes(data, n)
        out = torch.empty(n, dtype=torch.float32, device=data.device)
        for elements, octets, m in self._runs(n, data.device):
            self._decode(data[octets].reshape(-1, self._size(m)), out[elements].view(-1, m))
        return out

    @torch.no_grad()
    def encode_with_feedback(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Encode x plus what earlier encodings left out; return the bytes and what this one leaves out.

        Over any run of calls, the sum of what was decoded plus the last residual equals the sum of the xs, within float32
        rounding (error feedback: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., 2019). ``residual``
        is f32[n] or None for zeros; it is left as it is. The new residual of a lossless codec is None.
        """
        require_vector(x, "a vector to encode")
        if residual is not None:
            require_vector(residual, "a residual")
            if residual.shape != x.shape:
                raise ConfigError(f"a residual of {residual.numel()} elements for a vector of {x.numel()}")
        if self.lossless:
            return self.encode(x if residual is None else x + residual), None
        n = x.numel()
        out = torch.empty(self.encoded_bytes(n), dtype=torch.uint8, device=x.device)
        left = torch.empty(n, dtype=torch.float32, device=x.device)
        for elements, octets, m in self._runs(n, x.device):
            due = (x[elements] if residual is None else x[elements] + residual[elements]).reshape(-1, m)
            data, rest = out[octets].view(-1, self._size(m)), left[elements].view(-1, m)
            self._encode(due, data)
            self._decode(data, rest)
            torch.sub(due, rest, out=rest)
        return out, left

    @abstractmethod
    def _size(self, m: int) -> int:
        """Bytes of a block of m elements, 0 < m <= block."""

    @abstractmethod
    def _encode(self, x: Tensor, out: Tensor) -> None:
        """Blocks f32[b, m] to u8[b, _size(m)]; refuses what is not finite."""

    @abstractmethod
    def _decode(self, data: Tensor, out: Tensor) -> None:
        """Blocks u8[b, _size(m)] to f32[b, m], all finite; refuses what ``_encode`` could not have written."""

    def _runs(self, n: int, device: torch.device) -> Iterator[tuple[slice, slice, int]]:
        """Runs of equal blocks: their elements, their bytes, elements a block."""
        # On a CPU short runs keep temporaries in the cache; elsewhere long ones keep the number of kernels down.
        longest = 512 if device.type == "cpu" else 65536
        block, size = self.block, self.block_bytes
        blocks, rest = divmod(n, block)
        for first in range(0, blocks, longest):
            last = min(first + longest, blocks)
            yield slice(first * block, last * block), slice(first * size, last * size), block
        if rest:
            yield slice(blocks * block, n), slice(blocks * size, self.encoded_bytes(n)), rest

    def require_bytes(self, data: Tensor, n: int) -> None:
        """Refuse data that is not u8[encoded_bytes(n)]."""
        due = self.encoded_bytes(n)
        if data.dtype != torch.uint8 or tuple(data.shape) != (due,):
            got = f"{data.dtype} of shape {tuple(data.shape)}"
            raise Refused(Reason.WRONG_SIZE, f"{n} elements in {self.spec} are {due} bytes, not {got}")

    def require_finite(self, values: Tensor) -> None:
        """Refuse inf and nan; one pass, no temporaries."""
        if values.numel() and not all(bool(torch.isfinite(v)) for v in torch.aminmax(values)):
            raise Refused(Reason.NOT_FINITE, f"an element is inf or nan, or too large for {self.spec}")


def require_vector(x: Tensor, what: str) -> None:
    """Raise ``ConfigError`` unless x is f32[n]: a (1,) or (n, 1) where (n,) is due would broadcast unseen."""
    if x.dtype != torch.float32 or x.dim() != 1:
        raise ConfigError(f"{what} is float32 of shape (n,), not {x.dtype} of shape {tuple(x.shape)}")


def as_numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks of bytes u8[b, k] as numbers; a copy, since bytes in the middle of a block need not be aligned."""
    return data.clone(memory_format=torch.contiguous_format).view(dtype)


def as_bytes(numbers: Tensor) -> Tensor:
    """Numbers [..., k] as bytes u8[..., k * itemsize], by a view where their memory allows one."""
    # A dimension of size 0 or 1 counts as contiguous whatever its stride, but view(dtype) wants a stride of 1 all the same.
    viewable = numbers.is_contiguous() and numbers.stride(-1) == 1
    return (numbers if viewable else numbers.clone(memory_format=torch.contiguous_format)).view(torch.uint8)
