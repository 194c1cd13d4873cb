"""What a ``FleetDDP`` step costs between boundaries, against a ``DistributedDataParallel`` step of the same model and data.

Both train in this process (one rank, Gloo), in short alternating blocks, so that both meet the same neighbours on the machine;
what counts is the process's CPU time. A pair sums up the blocks of each over some alternations; the figure is the median of the
pairs' ratios.

    python tests/bench/step_overhead.py [--pairs 40]
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers.fleet import fleet_config, running
from helpers.one_rank import process_group
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fleetddp.cloud import FleetDDP

STEPS = 2  # a block
ALTERNATIONS = 40  # a pair
FIGURE = "ratio_to_ddp"


def block(model: nn.Module) -> Callable[[], float]:
    """A function that trains one block and returns its CPU seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))

    def train() -> float:
        begun = time.process_time()
        for _ in range(STEPS):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - begun

    return train


def pair(index: int, address: str) -> tuple[float, float]:
    """CPU seconds of DDP and of FleetDDP. The models are made anew each time: where they lie in memory matters by percents."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    member = FleetDDP(copy.deepcopy(net), coordinator=address, site="bench", sync_every=10**9)
    models = [DistributedDataParallel(net), member]
    arms = [block(model) for model in (models if index % 2 else reversed(models))]
    plain, fleet = arms if index % 2 else reversed(arms)
    plain_s = fleet_s = 0.0
    for turn in range(-5, ALTERNATIONS):  # the first ones warm up, and join
        if turn == 0:
            plain_s = fleet_s = 0.0
        if turn % 2:
            fleet_s += fleet()
            plain_s += plain()
        else:
            plain_s += plain()
            fleet_s += fleet()
    member.close()
    return plain_s, fleet_s


def measure(pairs: int, address: str) -> dict[str, float]:
    """The figures of ``pairs`` pairs."""
    times = [pair(index, address) for index in range(pairs)]
    ratios = [fleet_s / plain_s for plain_s, fleet_s in times]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        FIGURE: statistics.median(ratios),
        "lower_quartile": low,
        "upper_quartile": high,
        "ddp_step_ms": 1000 * statistics.median(plain_s for plain_s, _ in times) / (STEPS * ALTERNATIONS),
    }


def serve(pipe: Any, folder: str) -> None:
    """A coordinator in a process of its own, so that its work is not counted."""
    with running(fleet_config(Path(folder), members={"heartbeat_s": 5.0})) as coordinator:
        pipe.send(coordinator.address)
        pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder, process_group():
        coordinator = context.Process(target=serve, args=(theirs, folder))
        coordinator.start()
        figures = measure(pairs, pipe.recv())
        pipe.send("stop")
        coordinator.join()
    print(json.dumps({"bench": "step_overhead", "figures": {name: round(value, 4) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
