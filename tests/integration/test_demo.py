"""The demo, whole, as a user runs it; and what is left of it when it is interrupted."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.processes import Command, commands, eventually


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Command]:
    with commands() as start:
        yield start("demo", "--out", str(tmp_path / "demo"))


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes that were given this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


@pytest.mark.timeout(400)
def test_the_fleet_learns_what_the_site_alone_cannot(demo: Command, tmp_path: Path) -> None:
    assert demo.end(timeout_s=300) == 0, "".join(demo.lines[-40:])
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["fleet_accuracy"] >= 0.95
    assert summary["site_alone_accuracy"] < 0.8
    assert summary["versions"] >= 20
    assert summary["updates_accepted"] >= 3 * summary["versions"]
    assert summary["updates_refused"] >= 1  # the NaN
    assert summary["accuracy_by_class"]["site alone"][7:] == [0.0, 0.0, 0.0]
    assert min(summary["accuracy_by_class"]["fleet"]) > 0.5
    told = "".join(demo.lines)
    assert all(event in told for event in ("edge-6 joins late", "kill -9 edge-4", "edge-4 comes back"))
    logs = tmp_path / "demo" / "logs"
    assert "NOT_FINITE" in (logs / "edge-5.log").read_text()
    assert "the run is finished" in (logs / "edge-4.log").read_text()
    assert (tmp_path / "demo" / "index.html").stat().st_size > 5000
    assert processes_of(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_interrupted_it_leaves_no_process_behind(demo: Command, tmp_path: Path, number: signal.Signals, code: int) -> None:
    demo.wait_for("version   1")
    assert len(processes_of(tmp_path)) >= 10  # coordinator, torchrun, two ranks, five edges, the demo
    assert demo.end(number, timeout_s=20) == code
    eventually(lambda: processes_of(tmp_path) == [], "all have ended", timeout_s=20)
