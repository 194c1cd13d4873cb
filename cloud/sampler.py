"""In which order a rank sees its samples, and where it stands in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """All indices below ``size``, in an order of its own for each epoch; after a resume those that were not trained on yet.

    The order depends on ``seed`` and the epoch only. The position counts batches that were trained on, told by ``advance``: a
    DataLoader's workers read ahead of training.
    """

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        self.epoch = 0
        self.batches = 0  # trained on in this epoch
        self._size, self._batch_size, self._seed = size, batch_size, seed

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.batches = epoch, 0

    def advance(self) -> None:
        """One more batch was trained on."""
        self.batches += 1

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        order = torch.randperm(self._size, generator=generator)
        return iter(order[self.batches * self._batch_size :].tolist())

    def __len__(self) -> int:
        return max(0, self._size - self.batches * self._batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position: the same on all ranks."""
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.epoch, self.batches = int(state["epoch"]), int(state["batches"])
