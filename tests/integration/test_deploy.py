"""What lies under deploy/ is exercised as far as a machine without GPUs and without a booted systemd allows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.fleet import fleet_config, free_port, on_port, running, write

from fleetddp.common.config import load
from fleetddp.common.outer import OuterOptimizer
from fleetddp.edge.sim.scenario import load as load_scenario
from fleetddp.edge.sim.scenario import with_policy

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(p for p in ROOT.glob("deploy/**/*.sh"))
UNITS = sorted(ROOT.glob("deploy/systemd/*.service"))
SCENARIO = ROOT / "deploy/examples/scenario.yaml"
EXAMPLES = sorted(set(ROOT.glob("deploy/examples/*.yaml")) - {SCENARIO})


def test_there_is_something_to_test() -> None:
    assert len(SCRIPTS) >= 4
    assert len(UNITS) == 4
    assert len(EXAMPLES) == 6


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (apt-get install shellcheck)")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_pass_shellcheck(script: Path) -> None:
    result = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.name)
def test_units_verify(unit: Path, tmp_path: Path) -> None:
    # The unit names the command where an installation puts it; here it stands in this environment.
    here = Path(sys.executable).with_name("fleetddp")
    if not here.exists():
        here = Path(sys.executable)
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/fleetddp/bin/fleetddp", str(here)))
    result = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Unknown" not in result.stderr, result.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_fleet_files_are_valid(example: Path) -> None:
    config = load(example)
    for track in config.tracks or [""]:
        OuterOptimizer(config.for_track(track).outer)
    assert config.members.sites
    assert config.security.ca is not None, "an example for real machines is secure"


def test_the_scenario_is_valid_under_each_policy_that_it_is_meant_for() -> None:
    scenario = load_scenario(SCENARIO)
    assert {(section.count, section.tier.value) for section in scenario.populations.values()} == {(500, "edge"), (1, "site")}
    for policy in ("sync", "semi_sync", "fedbuff", "async"):
        config = with_policy(scenario, policy).fleet
        assert config.window.preset == policy
        assert config.until.metric == "accuracy"
        assert config.task is not None


@pytest.mark.parametrize(("script", "arguments"), [("one-node.sh", 2), ("two-node.sh", 4), ("elastic.sh", 3)])
def test_launch_scripts_explain_themselves(script: str, arguments: int) -> None:
    result = subprocess.run([ROOT / "deploy/torchrun" / script], capture_output=True, text=True)
    assert result.returncode == 2
    assert f"usage: {script} FLEET.YAML SITE" in result.stderr
    assert arguments == len([w for w in result.stderr.splitlines()[1].split(script)[1].split() if w])


def launch(script: str, fleet: str, *arguments: str, nproc: int, port: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
        "NPROC": str(nproc),
        "HEAD_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [str(ROOT / "deploy/torchrun" / script), fleet, "lab", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(("script", "nodes"), [("one-node.sh", [()]), ("two-node.sh", [("0", "127.0.0.1"), ("1", "127.0.0.1")])])
def test_the_launch_scripts_run_a_site_of_two_ranks(script: str, nodes: list[tuple[str, ...]], tmp_path: Path) -> None:
    config = fleet_config(
        tmp_path,
        members={"sites": ["lab"]},
        task={"target": "fleetddp.edge.tasks.digits:Digits", "args": {"sites": ["lab"]}},
        site={"sync_every": 2},
        until={"versions": 2},
    )
    with running(config) as coordinator:
        fleet = write(on_port(config, coordinator.coordinator.port), tmp_path)
        port = free_port()
        ranks = 2 // len(nodes)
        processes = [launch(script, fleet, *arguments, nproc=ranks, port=port) for arguments in nodes]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(nodes), "\n".join(outputs)
        status = coordinator.status()
    assert status["version"] == 2
    assert [(m["node"], m["tier"], m["updates"]) for m in status["members"]] == [("lab", "site", 2)], "one site, not one a node"
    assert "version 1, epoch" in outputs[0], "rank 0 evaluates each version"
