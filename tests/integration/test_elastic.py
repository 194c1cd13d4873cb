"""An elastic site (``torchrun --nnodes=1:4``): a node dies, a node comes, a rank dies. It trains as if nothing had happened."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.elastic_task import HALVED_EVERY, LR, MOMENTUM, POINTS, WORLDS, Troubled
from helpers.fleet import fleet_config, free_port, running
from helpers.processes import eventually

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
SYNC_EVERY, VERSIONS = 3, 5
SURROUNDINGS = {
    "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
    "NPROC": "1",
    "RDZV_CONF": "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(TESTS),
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a machine of the site: an agent of torchrun with one rank."""
    port = free_port()
    with ExitStack() as stack:

        def start(name: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((tmp_path / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [ROOT / "deploy/torchrun/elastic.sh", tmp_path / "fleet.yaml", "lab", "127.0.0.1"],
                env={**os.environ, **SURROUNDINGS, "HEAD_PORT": str(port)},
                stdout=log,
                stderr=log,
            )
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            eventually(lambda: listens(port), "the first node has opened the rendezvous")
            return process

        yield start


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def untroubled() -> tuple[torch.Tensor, list[float], list[list[float]]]:
    """Plain gradient descent on all points: the weights at the end; before each step the rate and the momentum."""
    task = Troubled(folder="")
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, HALVED_EVERY, 0.5)
    rates, momenta = [], []
    for _ in range(SYNC_EVERY * VERSIONS):
        rates.append(optimizer.param_groups[0]["lr"])
        momenta.append([v for s in optimizer.state.values() for v in s["momentum_buffer"].flatten().tolist()])
        task.loss(model, (task.x, task.y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.weight.detach(), rates, momenta


def test_nodes_come_and_go(tmp_path: Path, node: Callable[[str], subprocess.Popen[bytes]]) -> None:
    with running(fleet_config(tmp_path, until={"versions": VERSIONS})) as coordinator:
        settings: dict[str, Any] = {
            "run": "test",
            "coordinator": {"address": coordinator.address},
            "task": {"target": "helpers.elastic_task:Troubled", "args": {"folder": str(tmp_path)}},
            "site": {
                "global_batch": POINTS,
                "batch_size": 3,  # a rank takes its share in pieces
                "sync_every": SYNC_EVERY,
                "checkpoint": str(tmp_path / "checkpoint"),
                "lr_scaling": "linear",
                "lr_reference_batch": POINTS,
            },
        }
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(settings))
        nodes = [node("first"), node("second")]
        acts = [tmp_path / f"act-{number}" for number in range(len(WORLDS) - 1)]

        def played(number: int) -> Callable[[], bool]:
            def look() -> bool:
                assert nodes[0].poll() is None, (tmp_path / "first.log").read_text()[-4000:]
                return acts[number].exists()

            return look

        eventually(played(1), "one rank trains on alone", timeout_s=120.0)
        assert nodes[1].wait(30) == -9
        nodes[1] = node("third")
        codes = [process.wait(120) for process in nodes]
        assert codes == [0, 0], (tmp_path / "first.log").read_text()[-4000:]
        assert coordinator.status()["version"] == VERSIONS
    expected, rates, momenta = untroubled()
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert [sorted({s["world"] for s in seen if s["act"] == act}) for act in range(len(WORLDS))] == [[w] for w in WORLDS]
    for s in seen:
        assert s["lr"] == rates[s["step"]]
        flat = [v for row in s["momentum"] for line in row for v in line]
        assert flat == pytest.approx(momenta[s["step"]], abs=1e-5)
    assert {s["step"] for s in seen} == set(range(SYNC_EVERY * VERSIONS))
    # Each act begins where its checkpoint stood: at the last boundary before the misfortune.
    assert [min(s["step"] for s in seen if s["act"] == act) for act in (1, 2, 3)] == [3, 6, 9]
    checkpoint = torch.load(next((tmp_path / "checkpoint" / f"{VERSIONS:012d}").glob("common-*.pt")), weights_only=True)
    assert torch.allclose(checkpoint["model"]["weight"], expected, atol=1e-5)
