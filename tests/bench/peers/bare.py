"""No framework: a module, torch.optim.SGD, one client after another, the cohort split over two processes."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import workload


def flatten(tensors: Any) -> Any:
    import torch

    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def adopt(model: Any, flat: Any) -> None:
    import torch

    with torch.no_grad():
        start = 0
        for parameter in model.parameters():
            parameter.copy_(flat[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()


def helper(pipe: Any, kind: str, weights: Any, total: Any) -> None:
    """Trains the clients it is sent from ``weights``; the sum of what they arrive at goes to ``total``."""
    import torch

    torch.set_num_threads(1)
    work, model, criterion = workload.load(), workload.model(kind), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.RATE)
    while (clients := pipe.recv()) is not None:
        total.zero_()
        for client in clients:
            adopt(model, weights)
            for rows in work.rows[client].split(workload.BATCH):
                optimizer.zero_grad()
                criterion(model(work.images[rows]), work.labels[rows]).backward()
                optimizer.step()
            total += flatten(model.parameters())
        pipe.send(None)


def main() -> None:
    import torch

    torch.set_num_threads(1)
    kind, laps = sys.argv[1], workload.Laps()
    work, model = workload.load(), workload.model(kind)
    weights = flatten(model.parameters()).share_memory_()
    context = torch.multiprocessing.get_context("forkserver")
    helpers = []
    for _ in range(2):
        ours, theirs = multiprocessing.Pipe()
        total = torch.zeros_like(weights).share_memory_()
        process = context.Process(target=helper, args=(theirs, kind, weights, total), daemon=True)
        process.start()
        helpers.append((process, ours, total))

    def train(cohort: list[int]) -> Any:
        for number, (_, pipe, _) in enumerate(helpers):
            pipe.send(cohort[number :: len(helpers)])
        for _, pipe, _ in helpers:
            pipe.recv()
        return sum(total for *_, total in helpers) / len(cohort)

    train(work.cohorts[-1])
    laps.start()
    for cohort in work.cohorts[: workload.ROUNDS]:
        weights.copy_(train(cohort))
        laps.lap()
    adopt(model, weights)
    laps.report(model, work)
    for process, pipe, _ in helpers:
        pipe.send(None)
        process.join()


if __name__ == "__main__":
    main()
