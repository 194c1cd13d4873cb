"""How long until the fleet is good: virtual seconds to a target accuracy under four policies, over one heavy-tailed fleet.

Run: python tests/bench/policies.py [--phones 500] [--target 0.9] [--seed 1] [--policies sync,semi_sync]. The fleet is that of
deploy/examples/scenario.yaml, 500 phones and one site on real handwriting, with a perceptron instead of a convolutional network,
so that it takes a minute or two. All but the devices and the clock is real: aggregator, windows, codecs, journal, training.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fleetddp.edge.sim.report import summary
from fleetddp.edge.sim.scenario import Scenario, parse, with_policy
from fleetddp.edge.sim.simulator import Simulation
from fleetddp.edge.tasks.digits import CLASSES, Digits

SCENARIO = Path(__file__).parents[2] / "deploy" / "examples" / "scenario.yaml"
POLICIES = ("sync", "semi_sync", "fedbuff", "async")


class Perceptron(Digits):
    """The digits, for a model that trains in no time: 64-32-10, plain SGD."""

    def model(self) -> nn.Module:
        """2 410 parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """One learning rate for all policies."""
        return torch.optim.SGD(parameters, lr=0.1)


def fleet(phones: int, target: float, seed: int) -> Scenario:
    """The example's, with so many phones."""
    import yaml

    data = yaml.safe_load(SCENARIO.read_text(encoding="utf-8"))
    data["seed"] = seed
    data["trainer"] = {"workers": 0}
    data["populations"]["phones"]["count"] = phones
    data["fleet"]["until"] = {"metric": "accuracy", "at_least": target}
    return parse(data, source=str(SCENARIO))


def run(scenario: Scenario, policy: str) -> dict[str, Any]:
    """The figures of one policy; ``real_s``: how long this took."""
    began = time.perf_counter()
    one = with_policy(scenario, policy)
    task = Perceptron(**one.fleet.task.args) if one.fleet.task is not None else None
    timeline = Simulation(one, task=task).run()
    figures = summary(timeline, one.fleet.until.at_least)
    return {**figures, "real_s": time.perf_counter() - began}


def row(policy: str, figures: dict[str, Any]) -> str:
    """Of the README's table."""
    reached = figures["seconds_to_target"]
    moved = (figures["bytes_up"] + figures["bytes_down"]) / 2**20
    told = "not reached" if reached is None else f"{reached:,.0f}"
    busy = figures["utilisation"]
    return (
        f"| `{policy}` | {told} | {figures['versions']} | {figures['arrived']} | {figures['mean_staleness']:.1f} | "
        f"{moved:,.0f} | {busy['edge']:.0%} | {figures['accuracy'] or 0:.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phones", type=int, default=500)
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policies", default=",".join(POLICIES), help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scenario = fleet(options.phones, options.target, options.seed)
    print(f"{options.phones} phones and one site, accuracy {options.target:g}, seed {options.seed}")
    print("| policy | virtual s to target | versions | updates merged | mean staleness | MiB moved | phones busy | accuracy |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    found: dict[str, float | None] = {}
    for policy in options.policies.split(","):
        figures = run(scenario, policy)
        found[policy] = figures["seconds_to_target"]
        print(row(policy, figures), flush=True)
        print(f"{policy}: {figures['real_s']:.0f} s of real time, {figures['finished'] or 'until the horizon'}", file=sys.stderr)
    sync, semi = found.get("sync"), found.get("semi_sync")
    speedup = None if sync is None or semi is None else round(sync / semi, 2)
    rounded = {policy: None if value is None else round(value, 1) for policy, value in found.items()}
    figures = {"virtual_s_to_target": rounded, "semi_sync_speedup_over_sync": speedup}
    print(json.dumps({"bench": "policies", "figures": figures}))


if __name__ == "__main__":
    main()
