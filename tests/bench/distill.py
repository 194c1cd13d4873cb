"""Unlike models teach each other by soft labels: a convolutional network in the cloud, perceptrons at the edge.

Run: python tests/bench/distill.py [--versions 44] [--seed 0]; about a minute on two cores. No member has seen all classes. A
real coordinator over gRPC with two tracks (the cloud's weights; soft labels), a site of two ranks under torchrun, three edge
nodes in threads. Alone: the same models, data and numbers of steps without the others. Bytes: payloads that a member sends and
brings for a version, on average, over its own weights in float32 in both directions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.fleet import RunningCoordinator

from fleetddp.common.config import FleetConfig, SecurityConfig, parse
from fleetddp.common.layout import Layout
from fleetddp.common.proxy import ProxySet
from fleetddp.common.transport.uplink import Uplink
from fleetddp.edge.distilled import DistilledNode
from fleetddp.edge.node import fetch
from fleetddp.edge.tasks.unlike_digits import UnlikeDigits

EDGES = ("edge-1", "edge-2", "edge-3")
STEPS = 20  # of a member, for a version
TASK = "fleetddp.edge.tasks.unlike_digits:UnlikeDigits"


def fleet_file(folder: Path, versions: int, seed: int) -> dict[str, Any]:
    """Two tracks; the site is in both."""
    window = {"preset": "semi_sync", "quorum": 1 + len(EDGES), "require": ["site"], "grace_s": 0.0, "deadline_s": 20.0}
    knowledge = {
        "kind": "logits",
        "publish": "prob16",
        "proxy": {"name": "digits", "classes": 10, "file": str(folder / "proxy.safetensors"), "by_tier": True},
        "distill": {"temperature": 2.0, "learn_from": "others", "batch_items": 128, "label_items": 100, "pull_items": 200},
        "window": window,
        "task": {"target": TASK, "args": {"role": "edge", "seed": seed}},
        "until": {"versions": versions},
    }
    cloud = {"task": {"target": TASK, "args": {"role": "cloud", "seed": seed}}, "window": {"preset": "sync"}}
    return {
        "run": "distill",
        "coordinator": {"address": "127.0.0.1:0", "journal": str(folder / "journal")},
        "members": {"heartbeat_s": 0.5, "lease_s": 30.0},
        "tracks": {"cloud": cloud, "knowledge": knowledge},
        "site": {"track": "cloud", "knowledge": "knowledge", "sync_every": STEPS, "batch_size": 16},
        "edge": {"track": "knowledge", "steps": STEPS, "batch_size": 16, "state": str(folder / "edges")},
        "seed": seed,
    }


def alone(task: UnlikeDigits, member: str, steps: int, seed: int) -> float:
    """The accuracy of a member's model that has only what the member has."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    loader = DataLoader(task.data(member, 0, 1), 32, shuffle=True)
    made = 0
    while made < steps:
        for batch in loader:
            optimizer.zero_grad()
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            made += 1
    return task.evaluate(model)["accuracy"]


class Edges:
    """The edge nodes, each in a thread with an uplink of its own."""

    def __init__(self, config: FleetConfig, task: UnlikeDigits, address: str) -> None:
        own = config.for_track("knowledge")
        self.nodes: dict[str, DistilledNode] = {}
        for name in EDGES:
            uplink = Uplink(address, SecurityConfig(), node=name, run=config.run, track="knowledge")
            self.nodes[name] = DistilledNode(own, task, uplink, name=name)
        self.outcomes: dict[str, str | BaseException] = {}
        self._threads = [threading.Thread(target=self._live, args=(name,), daemon=True) for name in EDGES]
        for thread in self._threads:
            thread.start()

    def _live(self, name: str) -> None:
        try:
            self.outcomes[name] = self.nodes[name].run()
        except BaseException as error:
            self.outcomes[name] = error

    def join(self, timeout_s: float) -> None:
        """Wait until the track is finished."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        wrong = {name: self.outcomes.get(name, "still running") for name in EDGES if not isinstance(self.outcomes.get(name), str)}
        if wrong:
            raise SystemExit(f"edge nodes did not finish: {wrong}")


def cloud_model(uplink: Uplink, task: UnlikeDigits) -> nn.Module:
    """The cloud's newest version, after the site has taken up the last labels: two versions from now."""
    due = int(uplink.status()["version"]) + 2
    deadline = time.monotonic() + 30
    while int(uplink.status()["version"]) < due and time.monotonic() < deadline:
        time.sleep(0.2)
    model = task.model()
    layout = Layout.from_module(model)
    layout.write_(model, fetch(uplink, int(uplink.status()["version"]), layout))
    return model


def together(folder: Path, versions: int, seed: int) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The figures of the fleet, and a row for each edge node."""
    cloud, edge = UnlikeDigits("cloud", seed=seed), UnlikeDigits("edge", seed=seed)
    ProxySet("digits", 10, edge.proxy()).save(folder / "proxy.safetensors")
    data = fleet_file(folder, versions, seed)
    coordinator = RunningCoordinator(parse(data))
    data["coordinator"]["address"] = coordinator.address
    (folder / "fleet.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "fleetddp.cloud.train",
    ]
    with open(folder / "site.log", "wb") as log:
        environment = {"FLEETDDP_NODE": "site", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        site = subprocess.Popen([*command, str(folder / "fleet.yaml")], env=environment, cwd=folder, stdout=log, stderr=log)
    uplink = Uplink(coordinator.address, SecurityConfig(), node="observer", run="distill", track="cloud")
    try:
        nodes = Edges(parse(data), edge, coordinator.address)
        nodes.join(timeout_s=150)
        figures = {"cloud_accuracy": cloud.evaluate(cloud_model(uplink, cloud))["accuracy"]}
    except BaseException:
        print((folder / "site.log").read_text(encoding="utf-8")[-3000:], file=sys.stderr)
        raise
    finally:
        site.terminate()
        site.wait(timeout=30)
        uplink.close()
        coordinator.stop()
    own = 2 * 4 * sum(p.numel() for p in edge.model().parameters())
    rows = []
    for node in nodes.nodes.values():
        sent, brought = node.knowledge.bytes_pushed / node.counts["units"], node.knowledge.bytes_pulled / node.counts["units"]
        rows.append({"accuracy": node.metrics["accuracy"], "sent": sent, "brought": brought, "ratio": (sent + brought) / own})
    return figures, rows


def main() -> None:
    """Print the table, then the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=44)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        figures, rows = together(Path(folder), arguments.versions, arguments.seed)
    steps = arguments.versions * STEPS
    cloud_alone = alone(UnlikeDigits("cloud", seed=arguments.seed), "site", steps, arguments.seed)
    edges_alone = [alone(UnlikeDigits("edge", seed=arguments.seed), name, steps, arguments.seed) for name in EDGES]
    print(f"{'member':8}{'alone':>8}{'fleet':>8}{'sent B':>9}{'brought B':>11}{'of weights':>12}")
    print(f"{'site':8}{cloud_alone:8.3f}{figures['cloud_accuracy']:8.3f}")
    for name, before, row in zip(EDGES, edges_alone, rows, strict=True):
        print(f"{name:8}{before:8.3f}{row['accuracy']:8.3f}{row['sent']:9.0f}{row['brought']:11.0f}{row['ratio']:12.3f}")
    figures |= {
        "edge_accuracy": min(row["accuracy"] for row in rows),
        "cloud_alone": cloud_alone,
        "edge_alone": max(edges_alone),
        "bytes_ratio_to_weights": max(row["ratio"] for row in rows),
    }
    print(f"{time.perf_counter() - began:.0f} s; edge_accuracy is the worst node's, edge_alone the best one's")
    print(json.dumps({"bench": "distill", "figures": {name: round(value, 4) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
