"""Two edge nodes and an aggregator in one process, without a network: together they are FedAvg."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from helpers.fleet import fleet_config
from helpers.tasks import LineTask
from torch import Tensor

from fleetddp.common.clock import SystemClock
from fleetddp.common.layout import Layout
from fleetddp.common.publish import save_init
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.transport.weights import fetch
from fleetddp.edge import EdgeNode

STEPS = 2


def locally(task: LineTask, start: Tensor, index: int) -> Tensor:
    """Where one node's full-batch steps lead, by hand."""
    x, y, w = task.x[index::2], task.y[index::2], start.reshape(2, 1).clone()
    for _ in range(STEPS):
        w -= 0.1 * 2 * x.T @ (x @ w - y) / len(x)
    return w.flatten()


def test_full_participation_is_fedavg(tmp_path: Path) -> None:
    task = LineTask(points=7)  # 4 samples and 3
    save_init(task.model(), tmp_path / "init.safetensors")
    config = fleet_config(
        tmp_path,
        start={"bootstrap": "file", "file": str(tmp_path / "init.safetensors")},
        window={"preset": "sync", "quorum": 2},
        edge={"steps": STEPS, "batch_size": 8, "state": str(tmp_path / "edges")},
        until={"versions": 4},
        coordinator={"keep_versions": 5},
    )
    fleet = MemoryFleet(config, SystemClock())
    outcomes: list[str] = []
    nodes = [EdgeNode(config, task, fleet.parent(), name=f"edge-{i}", index=i, count=2) for i in (0, 1)]
    threads = [threading.Thread(target=lambda node=node: outcomes.append(node.run())) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == ["version 4 is published"] * 2
    layout = Layout.from_module(task.model())
    observer, expected = fleet.parent(), torch.tensor([0.5, 0.5])
    for version in range(1, 5):
        expected = (4 * locally(task, expected, 0) + 3 * locally(task, expected, 1)) / 7
        torch.testing.assert_close(fetch(observer, version, layout), expected, atol=1e-6, rtol=0)
    status = observer.status()
    assert status["counters"]["merged"] == 8
    assert [member["live"] for member in status["members"]] == [False, False]
    fleet.stop()
