"""A training process forks its DataLoader's workers while an uplink's threads move bytes: no worker may die of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.raw_fleet import RawFleet, Serving

from fleetddp.common import fork
from fleetddp.common.layout import Layout

LAYOUT = Layout.of([("weight", (1024, 512))])  # 2 MiB
PROGRAM = Path(__file__).parents[1] / "helpers" / "forking_trainer.py"


@pytest.fixture
def fleet() -> Iterator[tuple[RawFleet, Serving]]:
    raw = RawFleet(LAYOUT, bytes(4 * LAYOUT.parameters))
    serving = Serving(raw)
    yield raw, serving
    serving.stop()


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k != fork.VARIABLE}
    return subprocess.run(
        [sys.executable, *command],
        env={**base, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_workers_survive_transfers(fleet: tuple[RawFleet, Serving]) -> None:
    raw, serving = fleet
    result = run(PROGRAM, serving.address)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["epochs"] == 8
    assert said["rows"] == [2016.0] * 8  # every worker brought every row
    assert said["pulled"] > 0
    assert said["pushed"] > 0
    assert said["advice"] == ""
    assert raw.requests("Watch")
    assert "fork" not in result.stderr  # gRPC has nothing to say about it


UPLINK = """
from fleetddp.common.config import SecurityConfig
from fleetddp.common.transport.uplink import Uplink
for _ in range(2):
    Uplink("127.0.0.1:1", SecurityConfig(), node="site-a").close()
"""


def test_grpc_imported_first_is_detected_and_what_to_do_is_said_once() -> None:
    result = run("-c", "import grpc" + UPLINK)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("import fleetddp first, or start the process with GRPC_ENABLE_FORK_SUPPORT=0") == 1


ADVICE = "from fleetddp.common import fork; print(fork.advice())"


@pytest.mark.parametrize(
    ("code", "environment", "advice"),
    [
        (ADVICE, {}, ""),
        (ADVICE, {fork.VARIABLE: ""}, ""),
        ("import grpc; " + ADVICE, {fork.VARIABLE: "0"}, ""),
        ("import grpc; " + ADVICE, {fork.VARIABLE: "false"}, ""),
        ("import grpc; " + ADVICE, {}, "grpc was imported before fleetddp"),
        (ADVICE, {fork.VARIABLE: "1"}, "GRPC_ENABLE_FORK_SUPPORT=1: unset it, or set it to 0"),
    ],
)
def test_advice(code: str, environment: dict[str, str], advice: str) -> None:
    result = run("-c", code, **environment)
    assert result.returncode == 0, result.stderr
    assert advice in result.stdout if advice else result.stdout == "\n"


@pytest.mark.parametrize("package", ["common", "cloud", "edge"])
def test_every_package_turns_it_off_before_it_imports_grpc(package: str) -> None:
    result = run("-c", f"import fleetddp.{package}, os; print(os.environ['{fork.VARIABLE}'])")
    assert result.stdout == "0\n", result.stderr
