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
import torch.distributed as dist
import yaml
from helpers.fleet import fleet_config, running
from helpers.one_rank import process_group, vector

from fleetddp.cloud.train import Trainer, _meeting
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


def torchrun(settings: dict[str, Any], folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Two ranks on one machine."""
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    return subprocess.run(
        [*command, "-m", "fleetddp.cloud.train", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "FLEETDDP_NODE": "lab"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_two_ranks_train_a_task_until_the_run_ends(tmp_path: Path) -> None:
    with running(fleet_config(tmp_path, until={"versions": 3})) as coordinator:
        done = torchrun(settings(coordinator.address, tmp_path, "helpers.site_tasks:SameForAll"), tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        status = coordinator.status()
    assert status["version"] == 3
    assert [(m["node"], m["live"]) for m in status["members"]] == [("lab", False)]
    assert list(status["scores"]["2"]) == ["loss"]  # rank 0 evaluates each version it adopts
    assert "ranks 0 and 1 see the same samples (8 of the first 8)" in done.stderr
    assert (tmp_path / "checkpoint" / "000000000003" / "manifest.json").exists()


def test_a_site_that_lost_a_rank_is_started_again(tmp_path: Path) -> None:
    """Killed two batches after the boundary of three, from which the ranks go on."""
    with running(fleet_config(tmp_path, until={"versions": 3})) as coordinator:
        target = f"helpers.site_tasks:KilledOnce?{{at: 6, flag: {tmp_path / 'killed'}}}"
        done = torchrun(settings(coordinator.address, tmp_path, target), tmp_path, "--max-restarts", "1")
        assert done.returncode == 0, done.stderr[-4000:]
        status = coordinator.status()
    assert (tmp_path / "killed").exists()
    assert f"resumed from the checkpoint {tmp_path / 'checkpoint' / '000000000001'}, version 1" in done.stderr
    assert (status["version"], status["counters"]["merged"]) == (3, 3)


def test_each_restart_meets_in_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's store holds what the ranks before the restart have left in it."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True)
    surroundings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**surroundings, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    _meeting()["store"].set("address", "127.0.0.1:1")
    assert _meeting()["store"].check(["address"])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not _meeting()["store"].check(["address"])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert _meeting() == {}


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
