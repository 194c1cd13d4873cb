"""A torchrun site below a region that dies holding an update of both ranks: it goes on below the root, and all counts once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fleet import fleet_config, free_port, on_port, write
from helpers.preloaded import Preloaded
from helpers.processes import TESTS, eventually
from helpers.tasks import LineTask

from fleetddp.common.config import SecurityConfig
from fleetddp.common.journal import Journal
from fleetddp.common.publish import save_init
from fleetddp.common.transport.uplink import Uplink

VERSIONS = 60


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    server = Preloaded()
    yield server
    server.close()


def status(address: str) -> dict[str, Any]:
    with contextlib.closing(Uplink(address, SecurityConfig(), node="onlooker")) as uplink:
        return uplink.status()


def taken(address: str, node: str) -> int:
    """Updates of a node that the parent at ``address`` has accepted."""
    return sum(m["updates"] for m in status(address)["members"] if m["node"] == node)


@contextlib.contextmanager
def site(file: str, log: Path, ranks: int) -> Iterator[subprocess.Popen[bytes]]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "FLEETDDP_NODE": "lab"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [*torchrun, "-m", "fleetddp.cloud.train", file], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def test_a_site_below_a_region_that_dies_goes_to_the_next_parent(tmp_path: Path, preloaded: Preloaded) -> None:
    save_init(LineTask().model(), tmp_path / "line.safetensors")
    config = on_port(
        fleet_config(
            tmp_path,
            start={"bootstrap": "file", "file": str(tmp_path / "line.safetensors")},
            task={"target": "helpers.site_tasks:SameForAll", "args": {"lr": 0.01}},
            coordinator={"keep_versions": 1_000_000},
            members={"heartbeat_s": 0.2, "lease_s": 1.0},
            window={"preset": "fedbuff", "quorum": 1, "grace_s": None, "deadline_s": 5.0},
            until={"versions": VERSIONS},
        ),
        free_port(),
    )
    west = f"127.0.0.1:{free_port()}"

    def fleet_file(who: str, **sections: Any) -> str:
        (tmp_path / who).mkdir(exist_ok=True)
        return write(config.model_validate({**config.model_dump(exclude_unset=True), **sections}), tmp_path / who)

    def region(**window: Any) -> Any:
        own = {"address": west, "journal": str(tmp_path / "west" / "journal"), "window": window}
        child = preloaded.start("region", tmp_path / "west.log", config=fleet_file("west", region=own), name="west")
        child.wait_for("listening")
        return child

    root = preloaded.start("coordinator", tmp_path / "root.log", config=fleet_file("root"))
    root.wait_for("listening")
    hoarding = region(preset="fedbuff", quorum=2, grace_s=None, deadline_s=1000.0)  # it waits for a second update
    own = {"parents": [west, config.coordinator.address], "batch_size": 2, "sync_every": 3, "codec": "int8"}
    log = tmp_path / "lab.log"
    with site(fleet_file("lab", site=own), log, ranks=2) as lab:
        eventually(lambda: taken(west, "lab") == 1, "the region has an update of the site, which waits for a version")
        hoarding.kill()
        eventually(lambda: status(config.coordinator.address)["version"] >= 1, "the root has it from the site")
        late = region(preset="fedbuff", quorum=1, grace_s=None, deadline_s=0.2)  # and now from the region, too
        assert lab.wait(120) == 0, log.read_text()[-4000:]
        assert late.end() == 0
        assert root.end() == 0
    assert "did not answer" in log.read_text()
    journal = Journal(config.coordinator.journal, run=config.run)
    try:
        merged = {i.sequence: version for i, version in journal.recover().merged.items() if i.node == "lab"}
        updates = [version.updates for version in journal.versions()]
    finally:
        journal.close()
    assert merged == {sequence: sequence for sequence in range(1, VERSIONS + 1)}  # each in one version, none left out
    assert updates == [0] + [1] * VERSIONS
    assert "OVERLAP" in (tmp_path / "west.log").read_text()
