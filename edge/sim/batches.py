"""A member's batches, in the very order in which its trainer's ``DataLoader`` brings them, without the loader's cost.

A loader is made for each node and lives as long as it does; a simulated member has none. Its order is a function of the seed, the
member's name and how many batches it has trained before, so that any worker can train any unit of any member's work.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from fleetddp.common.errors import ConfigError


class Job(NamedTuple):
    """One unit of a member's work: what its trainer would do with these weights and settings."""

    member: str
    version: int  # the weights to begin at: those that ``Engine.put`` was given under this number
    part: int = 0  # of its data, and of how many parts: see ``Task.data``
    parts: int = 1
    epochs: int = 1
    steps: int | None = None  # if given, this many batches instead of epochs
    batch_size: int = 32
    seed: int = 0
    samples: int = 0  # that it trains on in an epoch, if known: the longest jobs are begun first
    before: int = 0  # batches that the member, in its present life, has trained before this


class Plain(NamedTuple):
    """A dataset that is nothing but rows of tensors."""

    tensors: tuple[Tensor, ...]
    rows: Tensor | None  # int64: which rows of the tensors it consists of; None: all

    @property
    def samples(self) -> int:
        """How many rows it has."""
        return len(self.tensors[0] if self.rows is None else self.rows)

    def take(self, order: Tensor) -> list[Tensor]:
        """Samples ``order`` (int64[n]) of it, column by column."""
        rows = order if self.rows is None else self.rows[order]
        return [tensor[rows] for tensor in self.tensors]


def plain(dataset: Dataset[Any]) -> Plain | None:
    """The tensors behind a ``TensorDataset`` or a ``Subset`` of one; None for any other dataset."""
    if type(dataset) is TensorDataset:
        return Plain(dataset.tensors, None)
    if type(dataset) is Subset:
        whole = plain(dataset.dataset)
        if whole is not None:
            rows = torch.as_tensor(dataset.indices, dtype=torch.int64)
            return Plain(whole.tensors, rows if whole.rows is None else whole.rows[rows])
    return None


def order(samples: int, job: Job) -> list[Tensor]:
    """Which samples each batch of the job holds, of a map-style dataset of so many. int64[at most batch_size] each."""
    in_epoch = -(-samples // job.batch_size)
    epochs_before, skipped = divmod(job.before, in_epoch)
    steps = job.epochs * in_epoch - skipped if job.steps is None else job.steps
    generator = torch.Generator().manual_seed(zlib.crc32(f"{job.seed}/{job.member}".encode()))
    batches: list[Tensor] = []
    for epoch in range(epochs_before + -(-(skipped + steps) // in_epoch)):
        torch.empty((), dtype=torch.int64).random_(generator=generator)  # DataLoader: a seed for its workers
        permutation = torch.randperm(samples, generator=generator)
        torch.randperm(samples, generator=generator)  # RandomSampler: once more at the end, of which it uses nothing
        if epoch >= epochs_before:
            batches.extend(torch.split(permutation, job.batch_size))
    return batches[skipped : skipped + steps]


def batches(dataset: Dataset[Any], job: Job) -> Iterator[Any]:
    """The job's batches. Raises ``ConfigError`` for a member without data."""
    if isinstance(dataset, IterableDataset):
        return _streamed(dataset, job)
    return _indexed(dataset, order(size(dataset, job), job))


def size(dataset: Dataset[Any], job: Job) -> int:
    """Samples of a map-style dataset; ``ConfigError`` if there are none."""
    samples = len(dataset)  # type: ignore[arg-type]
    if samples == 0:
        raise ConfigError(f"the task has no data for {job.member!r}: its dataset is empty")
    return samples


def _indexed(dataset: Dataset[Any], orders: list[Tensor]) -> Iterator[Any]:
    rows = plain(dataset)
    if rows is not None:  # one gather for all: the batches are slices of it
        columns = (torch.split(column, [len(o) for o in orders]) for column in rows.take(torch.cat(orders)))
        for batch in zip(*columns, strict=True):
            yield list(batch)
        return
    fetch = getattr(dataset, "__getitems__", None)
    for rows_of_batch in orders:
        indices = rows_of_batch.tolist()
        yield default_collate(fetch(indices) if fetch else [dataset[i] for i in indices])


def _streamed(dataset: IterableDataset[Any], job: Job) -> Iterator[Any]:
    loader = DataLoader(dataset, job.batch_size)
    position, batches = 0, iter(loader)
    following = next(batches, None)
    due = job.steps if job.steps is not None else -1
    epochs = job.epochs
    while due != 0 and epochs != 0:
        if following is None:
            raise ConfigError(f"the task's data for {job.member!r} ended: an IterableDataset must yield samples each time")
        batch, following = following, next(batches, None)
        last = following is None
        if last:
            batches = iter(loader)
            following = next(batches, None)
        position += 1
        if position > job.before:
            yield batch
            due -= 1
            epochs -= last and job.steps is None
