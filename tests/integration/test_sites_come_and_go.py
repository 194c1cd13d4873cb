"""A site that disappears holds no window past its deadline; a site that joins counts for nothing until it has trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import models
from helpers.one_rank import OneRank, process_group, step, vector
from helpers.processes import eventually

from fleetddp.cloud import FleetDDP
from fleetddp.common.clock import VirtualClock

DEADLINE_S = 60.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_000_000.0)


@pytest.fixture
def one(tmp_path: Path, clock: VirtualClock) -> Iterator[OneRank]:
    """The window closes when all live members are in it, or at its deadline."""
    window = {"quorum": 1.0, "require": ["site"], "deadline_s": DEADLINE_S}
    with process_group():
        made = OneRank(tmp_path, clock, window=window, members={"lease_s": 6000.0})
        yield made
        made.close()


def updates(one: OneRank) -> dict[str, int]:
    return {member["node"]: member["updates"] for member in one.status()["members"]}


def step_to_the_deadline(one: OneRank, clock: VirtualClock, model: FleetDDP, optimizer: torch.optim.Optimizer, node: str) -> None:
    """A boundary step of ``node``, which waits for a version: it comes at the deadline and not before."""
    before, version = updates(one)[node], one.fleet.driver.version

    def watch() -> None:
        eventually(lambda: updates(one)[node] == before + 1, f"the update of {node} is in")
        clock.advance(DEADLINE_S - 0.1)
        one.fleet.tick()
        assert one.fleet.driver.version == version
        clock.advance(0.2)
        one.fleet.tick()

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        step(model, optimizer)
        watching.result(60.0)


def test_sites_come_and_go(one: OneRank, clock: VirtualClock) -> None:
    lab, gone = (one.site(models.wide(), site=node) for node in ("lab", "gone"))
    optimizers = {site: torch.optim.SGD(site.parameters(), lr=0.1) for site in (lab, gone)}
    lab.start()
    gone.start()
    assert (lab.version, gone.version) == (0, 0)

    assert gone.site._session is not None
    gone.site._session.stop(leave=False)  # without a word
    twin = copy.deepcopy(lab.module)
    alone = torch.optim.SGD(twin.parameters(), lr=0.1)

    def both_step() -> None:
        torch.manual_seed(3)
        step(twin, alone)
        torch.manual_seed(3)
        step_to_the_deadline(one, clock, lab, optimizers[lab], "lab")

    both_step()
    assert lab.version == 1
    torch.testing.assert_close(vector(lab.module), vector(twin), rtol=0, atol=1e-6)

    new = one.site(models.wide(seed=5), site="new", sync_every=2)
    new.start()
    assert new.version == 1  # the newest, whatever weights it was made with
    assert torch.equal(vector(new.module), vector(lab.module))
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1)
    step(new, optimizer)  # no boundary yet

    both_step()
    assert lab.version == 2
    torch.testing.assert_close(vector(lab.module), vector(twin), rtol=0, atol=1e-6)  # as if there were no other site
    assert updates(one)["new"] == 0

    step_to_the_deadline(one, clock, new, optimizer, "new")  # it has version 2 meanwhile, and its update is in the next one
    assert (new.version, one.fleet.driver.version, updates(one)["new"]) == (2, 3, 1)
    assert [version["updates"] for version in one.status()["versions"][-3:]] == [1, 1, 1]
