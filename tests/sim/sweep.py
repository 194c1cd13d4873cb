"""``make sweep``: a thousand fault scenarios, all invariants checked; every eighth again in another process, to the same end.

    tests/sim/sweep.py [--count 1000] [--first 0] [--processes N]
    tests/sim/sweep.py --seed 123 [--log events.jsonl]       # one scenario again

The last line printed is one JSON object. Exit status 1 if anything is wrong; then each failing seed is printed with the command
that replays it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers import sweeping
from helpers.sweeping import Outcome

AGAIN = 8  # one seed of so many is run by two processes, which order their sets and hashes differently


def replay(seed: int) -> str:
    """The command that runs one scenario again."""
    return f'make sweep ARGS="--seed {seed}"'


def shares(first: int, count: int, processes: int) -> list[list[int]]:
    """The seeds of each process."""
    seeds = range(first, first + count)
    mine = [[seed for seed in seeds if seed % processes == process] for process in range(processes)]
    again = [[seed for seed in mine[process - 1] if seed // processes % AGAIN == 0] for process in range(processes)]
    return [a + b for a, b in zip(mine, again, strict=True)]


def outcomes(parts: list[list[int]]) -> Iterator[Outcome]:
    """Of all seeds, as they come."""
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    workers = [context.Process(target=_work, args=(part, queue), daemon=True) for part in parts]
    for worker in workers:
        worker.start()
    for _ in range(sum(len(part) for part in parts)):
        yield queue.get(timeout=300)
    for worker in workers:
        worker.join()


def _work(seeds: Iterable[int], queue: Any) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        queue.put(sweeping.run(seed))


def failures(found: Iterable[Outcome]) -> tuple[dict[int, str], dict[str, Any]]:
    """What is wrong by seed, and figures of the whole."""
    wrong: dict[int, str] = {}
    fingerprints: dict[int, str] = {}
    totals: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for outcome in found:
        if outcome.wrong:
            wrong[outcome.seed] = outcome.wrong
        if fingerprints.setdefault(outcome.seed, outcome.fingerprint) != outcome.fingerprint:
            wrong[outcome.seed] = "two runs of this seed came to different ends"
        totals.update(runs=1, versions=outcome.versions, events=outcome.handled, starts_of_the_root=outcome.starts)
        refused.update(outcome.refused)
    return wrong, {"scenarios": len(fingerprints), **totals, "refused": dict(refused.most_common())}


def sweep(first: int, count: int, processes: int) -> int:
    """Run them all; the exit status."""
    began = time.perf_counter()
    wrong, figures = failures(outcomes(shares(first, count, processes)))
    for seed, what in sorted(wrong.items()):
        print(f"seed {seed}: {what}\n    {replay(seed)}")
    figures |= {"wrong": len(wrong), "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps({"bench": "sim_sweep", "figures": figures}))
    return 1 if wrong else 0


def once(seed: int, log: str | None) -> int:
    """Run one; the exit status."""
    torch.set_num_threads(1)
    print(sweeping.scenario(seed).model_dump_json(exclude_defaults=True, indent=1))
    with open(log, "w") if log else contextlib.nullcontext() as file:
        outcome = sweeping.run(seed, log=file)
    print(outcome._replace(wrong="").__repr__(), outcome.wrong or "all invariants hold", sep="\n")
    return 1 if outcome.wrong else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fault scenarios with all invariants checked")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--log", help="with --seed: its events as JSON lines")
    options = parser.parse_args()
    if options.seed is not None:
        return once(options.seed, options.log)
    return sweep(options.first, options.count, options.processes)


if __name__ == "__main__":
    sys.exit(main())
