"""The pytest plugin: the README's example, word for word; assertions that fail when they should; a quick start of pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.tasks import LineTask

from fleetddp.edge.sim.pytest_plugin import SimulatedFleet, simulated_fleet
from fleetddp.edge.sim.timeline import Timeline

ROOT = Path(__file__).parents[2]
PLUGIN = "fleetddp.edge.sim.pytest_plugin"
MEMBERS = {"heartbeat_s": 60, "lease_s": 180, "stall_s": 60}

__all__ = ["simulated_fleet"]  # the fixture itself, whether or not this environment has the entry point


def pytest_of(folder: Path) -> subprocess.CompletedProcess[str]:
    """pytest as a user runs it in a folder of theirs, with this plugin and no other."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:cacheprovider", "-W", "error"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def readme_example() -> str:
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Simulate a fleet\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def test_the_readme_example_passes_as_it_stands(tmp_path: Path) -> None:
    example = readme_example()
    assert len(example.splitlines()) <= 10
    (tmp_path / "test_example.py").write_text(example)
    result = pytest_of(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout


def test_an_assertion_that_does_not_hold_fails_the_test_and_says_why(tmp_path: Path) -> None:
    tight = re.sub(r"within_s=\d+", "within_s=1", readme_example()).replace("devices=200", "devices=20")
    assert tight != readme_example()
    (tmp_path / "test_example.py").write_text(tight)
    result = pytest_of(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(r"AssertionError: no new version for [\d.]+ s from [\d.]+ s on; 1 s were allowed", result.stdout)


def test_pytest_finds_the_plugin_once_fleetddp_is_installed() -> None:
    assert f'[project.entry-points.pytest11]\nfleetddp = "{PLUGIN}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_loading_the_plugin_imports_nothing_heavy() -> None:
    code = f"import sys, pytest; before = set(sys.modules); import {PLUGIN}; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert PLUGIN in loaded
    assert not {name.partition(".")[0] for name in loaded} & {"torch", "numpy", "pydantic", "grpc", "yaml", "rich", "typer"}
    assert not [name for name in loaded if name.startswith("fleetddp.edge.sim.") and name != PLUGIN]


# ---- assertions ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(simulated_fleet: Callable[..., SimulatedFleet]) -> Timeline:
    fleet = simulated_fleet(devices=20, profile="phones", seed=1, fleet={"members": MEMBERS}, dropout=0.05)
    fleet.crash_device("phones-3", at_s=100, down_s=1000)
    return fleet.run(minutes=30)


def fails(assertion: Callable[..., None], *arguments: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assertion(*arguments, **options)
    return str(caught.value)


def test_each_assertion_can_hold_and_can_fail(small: Timeline) -> None:
    small.assert_versions_advance(within_s=180)
    gap = max(b.published_at - a.published_at for a, b in zip(small.rows, small.rows[1:], strict=False))
    assert f"no new version for {gap:.1f} s from" in fails(small.assert_versions_advance, within_s=gap - 0.001, after_s=60)
    last = small.virtual_s - small.rows[-1].published_at
    small.assert_versions_advance(within_s=last, after_s=small.rows[-1].published_at)
    assert "from 1" in fails(small.assert_versions_advance, within_s=last - 0.001, after_s=small.rows[-1].published_at)
    small.assert_staleness(at_most=10)
    assert "an update of tier edge was merged with staleness" in fails(small.assert_staleness, at_most=0)
    small.assert_merged(share=0.5)
    assert "updates in versions" in fails(small.assert_merged, share=1.0)
    small.assert_utilisation("edge", at_least=0.2)
    assert "devices of tier edge trained in" in fails(small.assert_utilisation, "edge", at_least=0.999)
    sent = sum(row.bytes_up for row in small.rows)
    small.assert_bytes(up_at_most=sent)
    assert str(sent) in fails(small.assert_bytes, up_at_most=sent - 1)
    assert "no version was evaluated" in fails(small.assert_reaches, 0.5, within_s=1e9)


def test_a_device_that_crashed_is_away_for_as_long_as_was_said(small: Timeline) -> None:
    assert small.totals.counts["stopped"] == small.totals.counts["lost work"] > 1
    assert small.usage[next(iter(small.usage))].down_s > 1000


def test_a_task_of_ones_own_is_trained_for_real(simulated_fleet: Callable[..., SimulatedFleet]) -> None:
    fleet = simulated_fleet(devices=3, profile="jetsons", seed=2, task=LineTask(), fleet={"members": MEMBERS}, work=100.0)
    timeline = fleet.run(minutes=5)
    losses = [row.loss for row in timeline.rows if row.loss is not None]
    assert losses[-1] < 0.1 * losses[0]
