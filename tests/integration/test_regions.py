"""Regions as real processes: killed at random moments, gone for good, cut off; members that move to the next parent."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fleet import fleet_config, free_port, on_port, write
from helpers.members import Moments
from helpers.preloaded import Child, Preloaded
from helpers.processes import commands, eventually
from helpers.region_processes import MEMBERS, REGIONS, Tree, members
from helpers.settlement import check_settlement
from helpers.tasks import LineTask

from fleetddp.cloud.status import show
from fleetddp.common.config import FleetConfig, SecurityConfig
from fleetddp.common.journal import Journal
from fleetddp.common.publish import save_init

KILLS = 6


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    server = Preloaded()
    yield server
    server.close()


def test_regions_killed_at_random_moments_and_members_that_move_settle_everything_once(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    rng = random.Random(3)
    moments = Moments()
    tree = Tree(tmp_path, preloaded)
    with members(tree, moments, seed=3) as fleet:
        moments.wait("settled", MEMBERS)
        for kill in range(KILLS):
            moments.wait(rng.choice(["acknowledged", "settled"]), rng.randint(1, MEMBERS))
            name = REGIONS[kill % 2]
            gone = tree.addresses[name]
            if kill % 3 == 2:  # it holds something, and stays away until its members have found another parent
                eventually(lambda gone=gone: any(m.failover.address == gone and m.holding for m in fleet), "it holds something")
                tree.regions[name].kill()
                eventually(lambda gone=gone: all(m.failover.address != gone for m in fleet), "they moved on")
                moments.wait("settled", 2 * MEMBERS)
            else:
                tree.regions[name].kill()
            tree.start(name)
        moments.wait("settled", MEMBERS)
        for member in fleet:
            member.finish()
        for name in REGIONS:
            eventually(lambda name=name: tree.drained(name), f"{name} has delivered everything")
            assert tree.regions[name].end(signal.SIGTERM) == 0
        assert tree.root.end(signal.SIGTERM) == 0
        versions = check_settlement(tree.config, fleet, frozenset(REGIONS))
    print(f"\n{sum(len(m.pushed) for m in fleet)} updates in {versions} versions through {KILLS} kills of regions")
    assert versions > KILLS


def test_edge_nodes_below_a_region_that_dies_finish_the_run(tmp_path: Path, preloaded: Preloaded) -> None:
    """Real edge nodes, with ``edge.parents`` in their fleet file; the region that dies is never seen again."""
    save_init(LineTask().model(), tmp_path / "line.safetensors")
    config = on_port(
        fleet_config(
            tmp_path,
            start={"bootstrap": "file", "file": str(tmp_path / "line.safetensors")},
            task={"target": "helpers.tasks:LineTask", "args": {"lr": 0.01}},
            members={"heartbeat_s": 0.2, "lease_s": 1.0},
            window={"preset": "semi_sync", "quorum": 0.5, "grace_s": 0.2, "deadline_s": 2.0},
            until={"versions": 80},  # long enough for those of the dead region to find another parent before all others have left
        ),
        free_port(),
    )
    ports = {name: free_port() for name in REGIONS}

    def fleet_file(who: str, **sections: Any) -> str:
        (tmp_path / who).mkdir()
        return write(config.model_validate({**config.model_dump(exclude_unset=True), **sections}), tmp_path / who)

    root = preloaded.start("coordinator", tmp_path / "root.log", config=fleet_file("root"))
    root.wait_for("listening")
    regions = {}
    for name, port in ports.items():
        own = {"address": f"127.0.0.1:{port}", "journal": str(tmp_path / name / "journal")}
        regions[name] = preloaded.start("region", tmp_path / f"{name}.log", config=fleet_file(name, region=own), name=name)
        regions[name].wait_for("listening")
    edges = []
    for index in range(4):
        first, other = (REGIONS[index % 2], REGIONS[1 - index % 2])
        parents = [f"127.0.0.1:{ports[first]}", f"127.0.0.1:{ports[other]}", config.coordinator.address]
        edge = {"steps": 2, "batch_size": 8, "state": str(tmp_path / f"edge-{index}"), "parents": parents}
        log, path = tmp_path / f"edge-{index}.log", fleet_file(f"pi-{index}", edge=edge)
        edges.append((preloaded.start("edge", log, config=path, name=f"pi-{index}"), log))
    eventually(lambda: all(log.read_text().count("is in version") >= 2 for _, log in edges), "all take part")
    regions["west"].kill()
    assert [edge.end() for edge, _ in edges] == [0] * 4
    assert regions["east"].end() == 0
    assert root.end() == 0
    text = "".join(log.read_text() for _, log in edges)
    assert text.count("did not answer") >= 2, "those of the region that died went to another"
    heard: dict[str, set[str]] = {}
    for update_id, version in re.findall(r"update (\S+) is in version (-?\d+)", text):
        heard.setdefault(update_id, set()).add(version)
    assert all(len(versions) == 1 for versions in heard.values())
    journal = Journal(config.coordinator.journal, run=config.run)
    try:
        versions = journal.versions()
        assert versions[-1].number >= 80
    finally:
        journal.close()


def line_fleet(folder: Path, **until: int) -> FleetConfig:
    save_init(LineTask().model(), folder / "line.safetensors")
    return on_port(
        fleet_config(
            folder,
            start={"bootstrap": "file", "file": str(folder / "line.safetensors")},
            task={"target": "helpers.tasks:LineTask", "args": {"lr": 0.01}},
            members={"heartbeat_s": 0.2, "lease_s": 2.0},
            window={"preset": "fedbuff", "quorum": 1, "grace_s": None, "deadline_s": 1.0},
            until=until,
        ),
        free_port(),
    )


def test_a_node_between_two_parents_at_the_end_hears_of_it(tmp_path: Path, preloaded: Preloaded) -> None:
    """The root has no member any more when the run ends, but stays for those whose region is gone."""
    config, west = line_fleet(tmp_path, versions=20), f"127.0.0.1:{free_port()}"

    def start(role: str, who: str, **sections: Any) -> Child:
        (tmp_path / who).mkdir()
        file = write(config.model_validate({**config.model_dump(exclude_unset=True), **sections}), tmp_path / who)
        named = {} if role == "coordinator" else {"name": who}
        child = preloaded.start(role, tmp_path / f"{who}.log", config=file, **named)
        if role != "edge":
            child.wait_for("listening")
        return child

    def edge(who: str, *parents: str) -> Any:
        return {"steps": 2, "batch_size": 8, "state": str(tmp_path / who / "state"), "parents": parents}

    root = start("coordinator", "root")
    region = start("region", "west", region={"address": west, "journal": str(tmp_path / "west" / "journal")})
    log = tmp_path / "far.log"
    log.touch()
    far = start("edge", "far", edge=edge("far", west, config.coordinator.address))
    eventually(lambda: "is in version" in log.read_text(), "the one below the region takes part")
    region.kill()
    near = start("edge", "near", edge=edge("near", config.coordinator.address))
    assert near.end() == 0  # the run is over
    assert (far.end(), root.end()) == (0, 0)
    assert "the run is finished" in log.read_text()


def test_a_node_that_finds_no_parent_ends_with_a_code_of_its_own(tmp_path: Path, preloaded: Preloaded) -> None:
    config = line_fleet(tmp_path, versions=1_000_000)
    own = {"steps": 2, "batch_size": 8, "state": str(tmp_path / "state"), "give_up_s": 1.0}
    file = write(config.model_validate({**config.model_dump(exclude_unset=True), "edge": own}), tmp_path)
    root = preloaded.start("coordinator", tmp_path / "root.log", config=file)
    root.wait_for("listening")
    with commands() as start:
        node = start("edge", file, "--name", "pi")
        node.wait_for("is in version")
        root.kill()
        assert node.end() == 3
        assert any("no parent has answered for" in line and "(give_up_s: 1)" in line for line in node.lines)


def test_status_of_a_region(tmp_path: Path, preloaded: Preloaded, capsys: pytest.CaptureFixture[str]) -> None:
    tree = Tree(tmp_path, preloaded)
    eventually(lambda: tree.status(tree.addresses["west"])["version"] == 0, "it has fetched version 0")
    eventually(
        lambda: {m["node"]: m["leaves"] for m in tree.status(tree.root_address)["members"]} == {"west": 0, "east": 0},
        "nobody stands behind them",
    )
    show(tree.addresses["west"], SecurityConfig(), as_json=False, watch=False)
    assert "region west: the parent's newest version is 0; 0 partials not settled" in capsys.readouterr().out
