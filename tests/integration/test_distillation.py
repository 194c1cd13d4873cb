"""Tracks of soft labels over real gRPC: two ranks share a site's work; unlike models learn what only others have seen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import soft_ranks
from helpers.fleet import running
from helpers.processes import commands, eventually
from helpers.soft_tasks import Corners, FarCorners, proxy_set

from fleetddp.common.config import SecurityConfig, parse
from fleetddp.common.transport.uplink import Uplink
from fleetddp.edge.distilled import DistilledNode

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TESTS = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), **more}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("ranks")
    command = [*TORCHRUN, soft_ranks.__file__, str(out)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def test_all_ranks_hold_the_same_and_draw_for_themselves(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["version"] == ranks[1]["version"]
    assert ranks[0]["rows"] == ranks[1]["rows"]
    assert ranks[0]["indices"] != ranks[1]["indices"]


def test_the_gradient_of_the_loss_is_synchronised_like_any(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["gradient"] == ranks[1]["gradient"]
    assert ranks[0]["gradient"] == pytest.approx(ranks[0]["due_gradient"], rel=1e-4, abs=1e-6)


def test_the_ranks_label_together_what_one_model_says(ranks: list[dict[str, Any]]) -> None:
    """Each labels half of the seven items that are due; the coordinator has them in their places."""
    said, meant = torch.tensor(ranks[0]["said"]), torch.tensor(ranks[0]["meant"])
    assert len(said) >= 7
    assert torch.allclose(said, meant, rtol=2e-3, atol=1e-6)
    assert ranks[0]["unchanged"]  # labelling trains nothing


def test_all_ranks_have_the_samples_that_devices_share_and_label_them_together(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["opened"] for rank in ranks)
    assert sorted(first["held"].values()) == first["shared"]
    assert first["held"] == second["held"]
    assert first["rows"] == second["rows"]
    assert torch.allclose(torch.tensor(first["rows"]), torch.tensor(first["meant"]), rtol=2e-3, atol=1e-6)


def test_ensemble_distillation_keeps_the_ranks_alike(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["learnt"]
    assert ranks[1]["learnt"]
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_a_fleet_of_unlike_models_learns_what_none_has_seen(tmp_path: Path) -> None:
    """A site has seen two of four classes, one edge node has seen two others, one three. The site is done at 0.95 of all."""
    sees = {"lab": [0, 1], "e1": [2, 3], "e2": [1, 2, 3]}
    target = "helpers.soft_tasks:FarCorners"
    task = FarCorners(sees, width=6)
    proxy = proxy_set(Corners(sees))
    proxy.save(tmp_path / "corners.safetensors")
    named = {"name": "corners", "classes": 4, "by_tier": True, "file": str(tmp_path / "corners.safetensors")}
    knowledge: dict[str, Any] = {
        "kind": "logits",
        "publish": "prob16",
        "proxy": named,
        "distill": {"label_items": 20},
        "window": {"preset": "semi_sync", "quorum": 2, "require": [], "grace_s": 0.0, "deadline_s": 30.0},
        "task": {"target": target, "args": {"sees": sees, "width": 6}},
    }
    cloud = {
        "task": {"target": target, "args": {"sees": sees, "width": 32}},
        "window": {"preset": "sync"},
        "until": {"metric": "accuracy", "at_least": 0.95},
    }
    data = {
        "run": "test",
        "coordinator": {"address": "127.0.0.1:0", "journal": str(tmp_path / "journal")},
        "members": {"heartbeat_s": 0.5, "lease_s": 30.0},
        "tracks": {"cloud": cloud, "knowledge": knowledge},
        "site": {"track": "cloud", "knowledge": "knowledge", "sync_every": 5, "batch_size": 16},
        "edge": {"track": "knowledge", "steps": 5, "batch_size": 16, "state": str(tmp_path / "edges")},
    }
    with running(parse(data)) as coordinator:
        # The members have no file: they bring the set from the coordinator.
        knowledge["proxy"] = {**named, "file": None, "items": len(proxy), "digest": proxy.digest}
        data["coordinator"] = {"address": coordinator.address}
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(data))
        config = parse(data).for_track("knowledge")
        uplink = Uplink(coordinator.address, SecurityConfig(), node="e1", track="knowledge")
        node = DistilledNode(config, task, uplink, name="e1")
        thread = threading.Thread(target=node.run, daemon=True)
        thread.start()
        with commands() as start:
            other = start("edge", str(tmp_path / "fleet.yaml"), "--name", "e2")
            command = [*TORCHRUN, "-m", "fleetddp.cloud.train", str(tmp_path / "fleet.yaml")]
            site = environment(FLEETDDP_NODE="lab")
            done = subprocess.run(command, env=site, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            # What the site has said stays in the consensus: a node that the site outran learns on. Alone: 0.5 and 0.75 at most.
            eventually(lambda: node.metrics.get("accuracy", 0.0) > 0.8, "one has learnt what only others have seen")
            eventually(lambda: max(told(other.lines), default=0.0) > 0.8, "the other has, too")
            assert other.end(signal.SIGTERM) == 0
        node.stop()
        thread.join(30.0)
    assert "accuracy" in done.stderr


def told(lines: Iterable[str]) -> list[float]:
    """What node e2 has logged of its accuracy."""
    return [float(found) for found in re.findall(r"e2: version .* accuracy ([0-9.]+)", "".join(lines))]
