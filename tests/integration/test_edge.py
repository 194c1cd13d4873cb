"""Edge nodes as real processes against a real coordinator: killed, cut off, told to stop."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from helpers.fleet import RunningCoordinator, fleet_config, on_port, running
from helpers.processes import Command, commands, eventually
from helpers.tasks import LineTask

from fleetddp.common.config import FleetConfig
from fleetddp.common.publish import save_init

Start = Callable[..., Command]


@pytest.fixture
def start() -> Iterator[Start]:
    with commands() as start:
        yield start


def fleet(folder: Path, **sections: object) -> FleetConfig:
    save_init(LineTask().model(), folder / "init.safetensors")
    return fleet_config(
        folder,
        **{
            "start": {"bootstrap": "file", "file": str(folder / "init.safetensors")},
            "task": {"target": "helpers.tasks:LineTask", "args": {"lr": 0.01}},
            "edge": {"steps": 2, "batch_size": 8, "state": str(folder / "edges")},
            "members": {"heartbeat_s": 0.2, "lease_s": 5.0},
            **sections,
        },
    )


def fleet_file(config: FleetConfig, folder: Path, address: str) -> str:
    data = config.model_dump(mode="json", exclude_unset=True)
    data["coordinator"]["address"] = address
    (folder / "fleet.yaml").write_text(yaml.safe_dump(data))
    return str(folder / "fleet.yaml")


def merged_as_heard(edges: list[Command]) -> dict[str, set[int]]:
    """Update id to the versions that the edges were told it is in."""
    heard: dict[str, set[int]] = {}
    for edge in edges:
        for match in re.finditer(r"update (\S+) is in version (\d+)", "".join(edge.lines)):
            heard.setdefault(match[1], set()).add(int(match[2]))
    return heard


def test_a_killed_edge_comes_back_and_the_run_ends(tmp_path: Path, start: Start) -> None:
    config = fleet(tmp_path, until={"versions": 40}, window={"preset": "async"})
    edges = []
    with running(config) as coordinator:
        path = fleet_file(config, tmp_path, coordinator.address)
        for number in range(2):
            edges.append(start("edge", path, "--name", "pi"))
            edges[-1].wait_for("is in version", count=3 * number + 1)  # another moment each time
            assert edges[-1].end(signal.SIGKILL) == -signal.SIGKILL
        edges.append(start("edge", path, "--name", "pi"))
        assert edges[-1].end() == 0, edges[-1].lines
        status = coordinator.status()
    assert "the run is finished: " in "".join(edges[-1].lines)
    versions = [version["number"] for version in status["versions"]]
    assert versions == list(range(versions[0], 41))
    assert [(member["node"], member["live"]) for member in status["members"]] == [("pi", False)]
    merged = merged_as_heard(edges)
    assert all(len(in_versions) == 1 for in_versions in merged.values())
    sequences = [int(update_id.split("/")[2]) for update_id in merged]
    assert len(sequences) == len(set(sequences))  # no sequence number was used twice, by whichever incarnation
    assert status["counters"]["merged"] == 40


def test_an_outage_is_trained_through_and_everything_is_merged_once(tmp_path: Path, start: Start) -> None:
    trace = tmp_path / "batches"
    config = fleet(tmp_path, task={"target": "helpers.tasks:LineTask", "args": {"lr": 0.01, "trace": str(trace)}})
    first = RunningCoordinator(config)
    port = first.coordinator.port
    try:
        path = fleet_file(config, tmp_path, first.address)
        edge = start("edge", path, "--name", "pi")
        seen = edge.wait_for("is in version", count=3)
    finally:
        first.stop()
    edge.wait_for("going on alone", after=seen)
    batches = trace.stat().st_size
    eventually(lambda: trace.stat().st_size > batches + 8, "it trains on")
    with running(on_port(config, port)) as second:
        restarted = time.monotonic()
        at = second.status()["version"]
        edge.wait_for("is in version", count=2, after=seen)
        assert time.monotonic() - restarted < 10
        eventually(lambda: second.status()["version"] > at + 1, "versions advance again")
        refused = second.status()["counters"]["refused"]
        assert set(refused) <= {"UNKNOWN_NODE"}  # a heartbeat, before it joined again
        assert edge.end(signal.SIGTERM) == 0
        status = second.status()
        assert [(member["node"], member["live"]) for member in status["members"]] == [("pi", False)]
    assert "stopped by SIGTERM" in "".join(edge.lines)
    merged = merged_as_heard([edge])
    assert all(len(in_versions) == 1 for in_versions in merged.values())
    sequences = sorted(int(update_id.split("/")[2]) for update_id in merged)
    assert sequences == list(range(1, len(sequences) + 1))  # none is missing
    pushed = [int(n) for n in re.findall(r"pushing (\d+) samples", "".join(edge.lines[seen:]))]
    assert max(pushed) >= 64  # an update grew beyond one unit of work, 16 samples, while nobody could take it


def test_ctrl_c_ends_a_node_that_waits_for_its_coordinator(tmp_path: Path, start: Start) -> None:
    config = fleet(tmp_path)
    edge = start("edge", fleet_file(config, tmp_path, "127.0.0.1:9"), "--name", "pi")
    edge.wait_for("pi: 127.0.0.1:9")
    asked = time.monotonic()
    assert edge.end(signal.SIGINT) == 130
    assert time.monotonic() - asked < 5
    assert "Traceback" not in "".join(edge.lines)
