"""How many clients the simulator's engine trains in a second, against a bare loop and, where they are installed, two peers.

All arms do the work of ``peers/workload.py`` on this machine, two processes each, one after another, in turn; figures are
medians. The arms that train the fixed cohorts must arrive at the same weights, or the benchmark fails. Ours trains every client
by whatever path its calibration chooses, hands out each client's delta, and sums them in the parent.

Run: python tests/bench/sim_training.py [--passes N] [--peers DIRECTORY]; ``peers/setup.sh`` makes the peers' environments.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import workload

PEERS = Path(workload.__file__).parent
SAME = 1e-3  # of the norm of the final weights: what rounding makes of 20 rounds
ARM_S = 300.0


class Handwriting:
    """The task. A client's rows lie so that the shuffle of its first epoch brings them in the order of the other arms."""

    def __init__(self, kind: str) -> None:
        from torch.utils.data import TensorDataset

        from fleetddp.edge.sim.batches import order

        self.kind = kind
        work = workload.load()
        self._dataset = TensorDataset(work.images, work.labels)
        self._rows = work.rows.clone()
        for client, rows in enumerate(work.rows):
            (shuffle,) = order(workload.SAMPLES, job(client, 0)._replace(batch_size=workload.SAMPLES))
            self._rows[client, shuffle] = rows

    def model(self) -> Any:
        return workload.model(self.kind)

    def data(self, member: str, index: int, count: int) -> Any:
        from torch.utils.data import Subset

        return Subset(self._dataset, self._rows[int(member)])

    def loss(self, model: Any, batch: Any) -> Any:
        from torch.nn.functional import cross_entropy

        images, labels = batch
        return cross_entropy(model(images), labels)

    def optimizer(self, parameters: Any) -> Any:
        from torch.optim import SGD

        return SGD(parameters, lr=workload.RATE)

    def evaluate(self, model: Any) -> dict[str, float]:
        return {}


def job(client: int, version: int) -> Any:
    from fleetddp.edge.sim.batches import Job

    return Job(str(client), version, batch_size=workload.BATCH, samples=workload.SAMPLES, seed=workload.SEED)


def ours(kind: str) -> None:
    """The arm of this project, in a process of its own."""
    from fleetddp.edge.sim import preload

    preload.start()  # before torch: both imports at once
    import torch

    from fleetddp.edge.sim.training import Engine

    torch.set_num_threads(1)
    laps, work, task = workload.Laps(), workload.load(), Handwriting(kind)
    model = task.model()
    with Engine(task, workers=2) as engine:
        weights = engine.layout.read(model)

        def train(number: int, cohort: list[int]) -> torch.Tensor:
            engine.put(number, weights)
            total = torch.zeros_like(weights)
            for trained in engine.train([job(client, number) for client in cohort]):
                total += trained.delta
            engine.drop(number)
            return total / len(cohort)

        train(0, work.cohorts[-1])
        train(0, work.cohorts[-1])  # the first was taken up by calibration
        laps.start()
        for number, cohort in enumerate(work.cohorts[: workload.ROUNDS]):
            weights -= train(number, cohort)
            laps.lap()
        print(f"path: {engine.path}; {engine.found}")
        engine.layout.write_(model, weights)
        laps.report(model, work)


def arms(peers: Path) -> dict[str, list[str]]:
    """The command of each arm, to which the kind of model is added; says what is missing."""
    commands = {"ours": [sys.executable, __file__, "--arm"], "bare": [sys.executable, str(PEERS / "bare.py")]}
    two = ["--standalone", "--nproc-per-node", "2"]
    for name, command in (("pfl", ["bin/torchrun", *two, "pfl_sim.py"]), ("flwr", ["bin/python", "flwr_sim.py"])):
        program = peers / f".venv-{name}" / command[0]
        if program.exists():
            commands[name] = [str(program), *command[1:-1], str(PEERS / command[-1])]
        else:
            print(f"skipped {name}: there is no {program} (peers/setup.sh makes it)")
    return commands


def measure(command: list[str], kind: str, environment: dict[str, str]) -> dict[str, float]:
    """One run of one arm."""
    environment = {**environment, "BENCH_BORN": str(time.time())}
    done = subprocess.run(
        [*command, kind], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=ARM_S
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        sys.exit(f"{command} {kind} failed ({done.returncode}):\n{done.stdout[-4000:]}")
    for line in done.stdout.splitlines():
        if line.startswith("path: "):
            print(f"  {line}")
    figures: dict[str, float] = json.loads(results[-1].removeprefix("RESULT "))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=PEERS, help="directory with the environments .venv-pfl and .venv-flwr")
    parser.add_argument("--arm", choices=workload.KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        ours(options.arm)
        return
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    startups: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.npz"
        print(f"handwriting: {workload.make(path)}")
        environment = {**os.environ, "BENCH_WORK": str(path), "OMP_NUM_THREADS": "1"}
        commands = arms(options.peers)
        for _ in range(options.passes):
            for kind in workload.KINDS:
                norms = {}
                for name, command in commands.items():
                    found = measure(command, kind, environment)
                    print(f"{name} {kind}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
                    rates[kind, name].append(found["client_rounds_per_s"])
                    if name == "ours":
                        startups.append(found["startup_s"])
                    if name != "flwr":  # which draws its own cohorts
                        norms[name] = found["norm"]
                if max(norms.values()) - min(norms.values()) > SAME * max(norms.values()):
                    sys.exit(f"the arms did not arrive at the same weights: norms {norms}")
    figures = {f"{kind}_client_rounds_per_s": round(statistics.median(rates[kind, "ours"]), 1) for kind in workload.KINDS}
    for name in commands.keys() - {"ours"}:
        for kind in workload.KINDS:
            ratios = [mine / theirs for mine, theirs in zip(rates[kind, "ours"], rates[kind, name], strict=True)]
            figures[f"{kind}_vs_{name}"] = round(statistics.median(ratios), 2)
    figures["startup_s"] = round(statistics.median(startups), 2)
    print(json.dumps({"bench": "sim_training", "figures": figures}))


if __name__ == "__main__":
    main()
