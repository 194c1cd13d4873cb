"""A rank's slice of an update between the boundary at which it was made and the courier that carries it away.

What training waits for is a copy. Encoding, which takes several times as long, is done by whoever asks first for its result:
the courier's thread, or a checkpoint that needs the residual before that thread has come to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fleetddp.common.config import MAX_NORM
from fleetddp.common.payload import bytes_of

Pieces = list[Tensor]  # one for each interval of a rank's slice
Residual = list[Tensor | None]
Encode = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]  # (piece, values, residual) -> (u8, residual after)


class Outgoing:
    """``pieces``: f32 values as an update carries them; nobody writes to them before the update is answered.

    ``before``: the residual that each piece adds. ``payload`` and ``residual`` may be called from any thread.
    """

    def __init__(self, pieces: Pieces, before: Residual, encode: Encode, device: torch.device) -> None:
        self._pieces, self._before, self._encode, self._device = pieces, before, encode, device
        self._ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._encoded: tuple[memoryview, Residual] | None = None

    def finite(self) -> bool:
        """Whether all values are finite, and none is so large that any coordinator would refuse it (``MAX_NORM``)."""
        return all(float(v.abs()) <= MAX_NORM for p in self._pieces if p.numel() for v in torch.aminmax(p))  # false for nan

    def payload(self) -> memoryview:
        """The encoded bytes of the pieces, one after another, in host memory."""
        return self._encode_once()[0]

    def residual(self) -> Residual:
        """What the codec left out."""
        return self._encode_once()[1]

    def _encode_once(self) -> tuple[memoryview, Residual]:
        with self._lock, torch.no_grad():
            if self._encoded is None:
                with self._aside():
                    both = [self._encode(i, p, b) for i, (p, b) in enumerate(zip(self._pieces, self._before, strict=True))]
                    self._encoded = on_host([data for data, _ in both], self._device), [after for _, after in both]
                self._pieces, self._before = [], []
            return self._encoded

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU, work in a stream of our own, which does not wait for training, once the pieces are there."""
        if self._ready is None:
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            torch.cuda.current_stream().wait_event(self._ready)
            yield
            torch.cuda.current_stream().synchronize()


def on_host(pieces: Sequence[Tensor], device: torch.device) -> memoryview:
    """u8 pieces, one after another, in host memory; from a GPU by way of pinned memory."""
    if device.type != "cuda" and len(pieces) == 1:
        return bytes_of(pieces[0])
    on_gpu = device.type == "cuda"
    host = torch.empty(sum(p.numel() for p in pieces), dtype=torch.uint8, pin_memory=on_gpu)
    at = 0
    for piece in pieces:
        host[at : at + piece.numel()].copy_(piece, non_blocking=on_gpu)
        at += piece.numel()
    if on_gpu:
        torch.cuda.current_stream(device).synchronize()
    return bytes_of(host)
