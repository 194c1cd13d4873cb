"""What lies under deploy/ is exercised as far as a machine without GPUs and without a booted systemd allows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleetddp.common.config import load
from fleetddp.common.outer import OuterOptimizer

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(p for p in ROOT.glob("deploy/**/*.sh"))
UNITS = sorted(ROOT.glob("deploy/systemd/*.service"))
EXAMPLES = sorted(ROOT.glob("deploy/examples/*.yaml"))


def test_there_is_something_to_test() -> None:
    assert len(SCRIPTS) >= 4
    assert len(UNITS) == 2
    assert len(EXAMPLES) == 2


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
    OuterOptimizer(config.outer)
    assert config.members.sites
    assert config.security.ca is not None, "an example for real machines is secure"


@pytest.mark.parametrize(("script", "arguments"), [("one-node.sh", 2), ("two-node.sh", 4)])
def test_launch_scripts_explain_themselves(script: str, arguments: int) -> None:
    result = subprocess.run([ROOT / "deploy/torchrun" / script], capture_output=True, text=True)
    assert result.returncode == 2
    assert f"usage: {script} FLEET.YAML SITE" in result.stderr
    assert arguments == len([w for w in result.stderr.splitlines()[1].split(script)[1].split() if w])
