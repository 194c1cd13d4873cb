"""``torchrun -m fleetddp.cloud.train fleet.yaml``: two ranks against a real coordinator; resumption in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.fleet import fleet_config, running
from helpers.one_rank import process_group, vector

from fleetddp.cloud.train import Trainer
from fleetddp.common.config import parse
from fleetddp.common.errors import ConfigError

TESTS = Path(__file__).parents[1]


def settings(address: str, folder: Path, target: str, **site: Any) -> dict[str, Any]:
    module, _, args = target.partition("?")
    return {
        "run": "test",
        "coordinator": {"address": address},
        "task": {"target": module, "args": yaml.safe_load(args) if args else {}},
        "site": {"batch_size": 2, "sync_every": 3, "checkpoint": str(folder / "checkpoint"), **site},
    }


def test_two_ranks_train_a_task_until_the_run_ends(tmp_path: Path) -> None:
    with running(fleet_config(tmp_path, until={"versions": 3})) as coordinator:
        file = tmp_path / "fleet.yaml"
        file.write_text(yaml.safe_dump(settings(coordinator.address, tmp_path, "helpers.site_tasks:SameForAll")))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, "-m", "fleetddp.cloud.train", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "FLEETDDP_NODE": "lab"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        status = coordinator.status()
    assert status["version"] == 3
    assert [(m["node"], m["live"]) for m in status["members"]] == [("lab", False)]
    assert list(status["scores"]["2"]) == ["loss"]  # rank 0 evaluates each version it adopts
    assert "ranks 0 and 1 see the same samples (8 of the first 8)" in done.stderr
    assert (tmp_path / "checkpoint" / "000000000003" / "manifest.json").exists()


@pytest.fixture(scope="module")
def _group() -> Iterator[None]:
    with process_group():
        yield


def trained(folder: Path, target: str, epochs: int) -> Trainer:
    """A site of one rank that trained on a coordinator of its own, as far as it came."""
    folder.mkdir(exist_ok=True)
    with running(fleet_config(folder)) as coordinator:
        trainer = Trainer(parse(settings(coordinator.address, folder, target, epochs=epochs)), torch.device("cpu"))
        try:
            trainer.run()
        except KeyboardInterrupt:
            trainer.model.close()
        return trainer


@pytest.mark.usefixtures("_group")
def test_a_site_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Four batches an epoch, a boundary every three: killed before the second epoch's last, it resumes at its third."""
    whole = trained(tmp_path / "whole", "helpers.tasks:LineTask", 3)
    killed = trained(tmp_path / "broken", "helpers.site_tasks:Killed?{after: 7}", 3)
    assert (whole.model.boundaries, killed.model.boundaries) == (4, 2)
    resumed = trained(tmp_path / "broken", "helpers.tasks:LineTask", 3)
    assert resumed.model.boundaries == 4
    assert torch.equal(vector(resumed.model.module), vector(whole.model.module))


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": None}, "the fleet file names no task"),
        ({"task": {"target": "helpers.tasks:LineTask", "args": {"points": 0}}}, "rank 0 of 1 has no training data"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Trainer(parse(changes), torch.device("cpu"))
