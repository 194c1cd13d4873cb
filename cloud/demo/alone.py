"""The site without a fleet: the same model from the same weights, the same data in the same order, the same number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, cast

from torch.utils.data import DataLoader

from fleetddp.cloud.demo.plan import BATCH, RANKS, SITE, SYNC_EVERY
from fleetddp.cloud.sampler import EpochSampler, portion
from fleetddp.edge.tasks.digits import Digits


def train_alone(task: Digits, steps: int, seed: int) -> list[Mapping[str, float]]:
    """Train as the site's ranks do, with nobody else; the metrics at every boundary and at the end.

    One process takes the ranks' batches in turn and averages their gradients, which is what DDP computes.
    """
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    ranks = [_batches(task, rank, seed) for rank in range(RANKS)]
    metrics: list[Mapping[str, float]] = []
    for step in range(1, steps + 1):
        model.train()
        optimizer.zero_grad()
        for batches in ranks:
            (task.loss(model, next(batches)) / RANKS).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % SYNC_EVERY == 0 or step == steps:
            metrics.append(task.evaluate(model))
    return metrics


def _batches(task: Digits, rank: int, seed: int) -> Iterator[Any]:
    """One rank's batches, epoch after epoch."""
    data = task.data(SITE, rank, RANKS)
    sizes = [len(cast(Sized, task.data(SITE, r, RANKS))) for r in range(RANKS)]
    steps = -(-min(sizes) // BATCH)  # every rank makes the same number
    sampler = EpochSampler(sizes[rank], portion(BATCH, None, rank, RANKS), seed, steps=steps)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from DataLoader(data, batch_sampler=sampler)
        epoch += 1
