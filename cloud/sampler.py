"""What a rank trains on in each step, and in which order: how large its batches are, and where it stands in an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from fleetddp.common.errors import ConfigError


class Portion(NamedTuple):
    """One rank's part of each step of its site."""

    pieces: tuple[int, ...]  # samples of each backward pass of the step
    batch: int  # samples of a step, of all ranks together

    @property
    def samples(self) -> int:
        """Of this rank, in a step."""
        return sum(self.pieces)


def portion(batch_size: int, global_batch: int | None, rank: int, world: int) -> Portion:
    """This rank's portion: ``batch_size`` samples, or its share of ``global_batch`` in pieces of at most ``batch_size``.

    The first ``global_batch % world`` ranks take one sample more than the others. Raises ``ConfigError`` where one takes none.
    """
    if global_batch is None:
        return Portion((batch_size,), batch_size * world)
    if global_batch < world:
        raise ConfigError(f"site.global_batch: {global_batch} samples are too few for the {world} ranks of the site")
    samples = global_batch // world + (rank < global_batch % world)
    full, rest = divmod(samples, batch_size)
    return Portion((batch_size,) * full + ((rest,) if rest else ()), global_batch)


class EpochSampler(Sampler[list[int]]):
    """Batches of indices below ``size``: the pieces of ``steps`` steps an epoch, after a resume those not trained on yet.

    Each epoch has an order of its own, which depends on ``seed`` and the epoch only. ``around``: an order that is used up begins
    again, so that all batches are whole; otherwise the last one may be short. The position counts steps that were trained on,
    told by ``advance``: a DataLoader's workers read ahead of training.
    """

    def __init__(self, size: int, portion: Portion, seed: int, *, steps: int, around: bool = False) -> None:
        self.epoch = 0
        self.position = 0  # steps trained on in this epoch
        self._size, self._portion, self._seed = size, portion, seed
        self._steps, self._around = steps, around

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.position = epoch, 0

    def advance(self) -> None:
        """One more step was trained on."""
        self.position += 1

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        order = torch.randperm(self._size, generator=generator).tolist()
        at = self.position * self._portion.samples
        for _ in range(self.position, self._steps):
            for piece in self._portion.pieces:
                places = range(at, at + piece)
                yield [order[i % self._size] for i in places] if self._around else order[at : at + piece]
                at += piece

    def __len__(self) -> int:
        """Batches still to come in this epoch."""
        return max(0, self._steps - self.position) * len(self._portion.pieces)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position: the same on all ranks."""
        return {"epoch": self.epoch, "position": self.position, "batch": self._portion.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; where a step had another number of samples, after as many samples (a step's begun counts as due)."""
        self.epoch = int(state["epoch"])
        self.position = min(self._steps, int(state["position"]) * int(state["batch"]) // self._portion.batch)
