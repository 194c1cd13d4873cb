"""What the ranks of a site tell each other at a start, when nothing on the network is awaited yet."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_BYTES = 64 * 2**20  # of a long message, sent at once

T = TypeVar("T")


def tell_all(value: T, group: dist.ProcessGroup, device: torch.device) -> list[T]:
    """Every rank's value, by rank."""
    values: list[T] = [value] * group.size()
    with _current(device):
        dist.all_gather_object(values, value, group=group)
    return values


def send_bytes(data: bytes | None, source: int, group: dist.ProcessGroup, device: torch.device) -> bytes:
    """The bytes that rank ``source`` of the group passes, on all ranks (``data`` is None on the others)."""
    size = tell_all(0 if data is None else len(data), group, device)[source]
    received = bytearray(size)
    sender = dist.get_global_rank(group, source)
    for start in range(0, size, PIECE_BYTES):
        stop = min(start + PIECE_BYTES, size)
        piece = torch.empty(stop - start, dtype=torch.uint8) if data is None else _tensor(data[start:stop])
        piece = piece.to(device)
        dist.broadcast(piece, sender, group=group)
        received[start:stop] = bytes(piece.cpu().numpy().data)
    return bytes(received)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Collectives of objects use the current GPU, which a script need not have set."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
