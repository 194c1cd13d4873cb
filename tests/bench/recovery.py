"""How long a fleet takes to recover, in seconds, by what was killed with -9 and started again at once.

Real processes on loopback, 3 MB of weights. Medians over the rounds, unless it says otherwise:

- coordinator_s: from the kill to the next version, which all four members are in; of that, coordinator_listening_s until the new
  process listens, coordinator_members_back_s from then until the last member has joined again by itself (the longest: _max_s).
- edge_node_s: from the kill to the next update of the node that is merged; of that, edge_node_pushing_s until it pushes.
- rank_s, site_s: from the kill of one rank of a torchrun site of two (torchrun starts the site again), or of all its processes,
  to the next update of that site that is accepted. rank_rest_gap_s, site_rest_gap_s (the longest of all rounds): the longest time
  without a version meanwhile, in which another site goes on alone; at most the window's deadline, site_deadline_s, and a moment.
- region_s: from the kill of one of two regions to the next partial of it that the root accepts; region_rest_gap_s as above
  (region_deadline_s), its members going on through the other region or the root meanwhile. (The process starts preloaded.)

Run: python tests/bench/recovery.py [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.fleet import fleet_config, free_port, on_port, running, write
from helpers.marks import Flat
from helpers.members import Member, Moments
from helpers.preloaded import Preloaded
from helpers.processes import TESTS, commands, eventually
from helpers.region_processes import REGIONS, Tree, members
from helpers.tasks import LineTask

from fleetddp.common.config import FleetConfig
from fleetddp.common.publish import save_init

MEMBERS = 4
SITE_ROUNDS = 3  # at most: a site needs seconds to start
DEADLINE_S = 4.0  # of the sites' windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    figures: dict[str, float] = {}
    for measure in (coordinator_killed, edge_killed, site_killed, region_killed):
        with tempfile.TemporaryDirectory() as folder:
            figures |= measure(Path(folder), rounds)
    print(json.dumps({"bench": "recovery", "figures": {name: round(seconds, 2) for name, seconds in figures.items()}}))


def coordinator_killed(folder: Path, rounds: int) -> dict[str, float]:
    """Members in threads of this process, with the default patience."""
    save_init(Flat(), folder / "init.safetensors")
    start = {"bootstrap": "file", "file": str(folder / "init.safetensors")}
    config = on_port(fleet_config(folder, start=start, window={"quorum": MEMBERS}, members={"heartbeat_s": 5.0}), free_port())
    moments = Moments()
    total, listening, back = [], [], []
    with contextlib.ExitStack() as stack:
        command = stack.enter_context(commands())
        coordinator = command("coordinator", write(config, folder))
        coordinator.wait_for("listens on port")
        fleet = [Member(i, config.coordinator.address, moments, seed=0, patient=True) for i in range(MEMBERS)]
        for member in fleet:
            stack.callback(member.close)
            member.start()
        for number in range(rounds):
            moments.wait("settled", MEMBERS)
            assert coordinator.end(signal.SIGKILL) == -signal.SIGKILL
            killed = time.monotonic()
            coordinator = command("coordinator", write(config, folder))
            coordinator.wait_for("listens on port")
            listens = time.monotonic()
            moments.wait("settled", MEMBERS)
            total.append(time.monotonic() - killed)
            eventually(lambda killed=killed: all(m.uplink.joined_at[0] > killed for m in fleet), "all members are back")
            listening.append(listens - killed)
            back.append(max(0.0, *(m.uplink.joined_at[1] - listens for m in fleet)))
            print(f"coordinator, round {number}: listens {listening[-1]:.2f}, members back {back[-1]:.2f}, all {total[-1]:.2f} s")
    return {
        "coordinator_s": statistics.median(total),
        "coordinator_listening_s": statistics.median(listening),
        "coordinator_members_back_s": statistics.median(back),
        "coordinator_members_back_max_s": max(back),
    }


def edge_killed(folder: Path, rounds: int) -> dict[str, float]:
    """One edge node that merges alone, killed at a random moment of its loop."""
    rng = random.Random(0)
    task = {"wide": 384 * 1024, "lr": 0.01}
    save_init(LineTask(wide=384 * 1024).model(), folder / "init.safetensors")
    config = fleet_config(
        folder,
        start={"bootstrap": "file", "file": str(folder / "init.safetensors")},
        task={"target": "helpers.tasks:LineTask", "args": task},
        edge={"steps": 2, "batch_size": 8, "state": str(folder / "edges")},
    )
    total, pushing = [], []
    with running(config) as coordinator, commands() as command:
        path = write(on_port(config, coordinator.coordinator.port), folder)
        edge = command("edge", path, "--name", "pi")
        for number in range(rounds):
            edge.wait_for("is in version", count=rng.randint(1, 4))
            assert edge.end(signal.SIGKILL) == -signal.SIGKILL
            killed = time.monotonic()
            edge = command("edge", path, "--name", "pi")
            edge.wait_for("pushing")
            pushing.append(time.monotonic() - killed)
            edge.wait_for("is in version")
            total.append(time.monotonic() - killed)
            print(f"edge node, round {number}: pushes {pushing[-1]:.2f}, merged {total[-1]:.2f} s")
    return {"edge_node_s": statistics.median(total), "edge_node_pushing_s": statistics.median(pushing)}


def site_killed(folder: Path, rounds: int) -> dict[str, float]:
    """Two sites that merge together, or one of them at the deadline: one of a single rank, one of two ranks that is struck."""
    config = fleet_config(
        folder,
        window={"quorum": 1.0, "deadline_s": DEADLINE_S},
        members={"heartbeat_s": 1.0, "lease_s": 60.0},
        task={"target": "helpers.tasks:LineTask", "args": {"wide": 384 * 1024, "lr": 0.01}},
        site={"sync_every": 2, "batch_size": 2},
    )
    figures: dict[str, float] = {"site_deadline_s": DEADLINE_S}
    with running(config) as coordinator, contextlib.ExitStack() as stack:
        config = on_port(config, coordinator.coordinator.port)
        stack.callback(TorchrunSite(config, folder, "steady", 1).kill)
        struck = TorchrunSite(config, folder, "struck", 2)
        stack.callback(lambda: struck.kill())
        for what in ("rank", "site"):
            back, gaps = [], []
            for number in range(min(rounds, SITE_ROUNDS)):
                before = member(coordinator.status(), "struck")
                eventually(
                    lambda b=before: member(coordinator.status(), "struck")[1] >= b[1] + 3, "it takes part", timeout_s=120.0
                )
                incarnation = member(coordinator.status(), "struck")[0]
                killed = time.monotonic()
                if what == "rank":
                    os.kill(struck.workers()[-1], signal.SIGKILL)
                else:
                    struck.kill()
                    struck = TorchrunSite(config, folder, "struck", 2)
                gaps.append(longest_gap(coordinator.status, "struck", incarnation, killed))
                back.append(time.monotonic() - killed)
                print(f"{what}, round {number}: back {back[-1]:.2f} s, longest without a version {gaps[-1]:.2f} s")
            figures |= {f"{what}_s": statistics.median(back), f"{what}_rest_gap_s": max(gaps)}
    return figures


def region_killed(folder: Path, rounds: int) -> dict[str, float]:
    """A root, two regions and six members; one region is struck and started again on its journal."""
    deadline_s = 1.0
    preloaded = Preloaded()
    back, gaps = [], []
    with contextlib.closing(preloaded):
        tree = Tree(folder, preloaded, window={"preset": "fedbuff", "quorum": 6, "grace_s": None, "deadline_s": deadline_s})

        def status() -> dict[str, Any]:
            return tree.status(tree.root_address)

        with members(tree, Moments(), seed=1):
            for number in range(rounds):
                before = member(status(), REGIONS[0])
                eventually(lambda b=before: member(status(), REGIONS[0])[1] > b[1], "it takes part", timeout_s=60.0)
                incarnation = member(status(), REGIONS[0])[0]
                killed = time.monotonic()
                tree.regions[REGIONS[0]].kill()
                tree.start(REGIONS[0])
                gaps.append(longest_gap(status, REGIONS[0], incarnation, killed))
                back.append(time.monotonic() - killed)
                print(f"region, round {number}: back {back[-1]:.2f} s, longest without a version {gaps[-1]:.2f} s")
        for child in (*tree.regions.values(), tree.root):
            child.kill()
    return {"region_s": statistics.median(back), "region_rest_gap_s": max(gaps), "region_deadline_s": deadline_s}


def member(status: dict[str, Any], node: str) -> tuple[int, int]:
    """Its incarnation, and how many updates of it were accepted."""
    return next(((m["incarnation"], m["updates"]) for m in status["members"] if m["node"] == node), (0, 0))


def longest_gap(status: Callable[[], dict[str, Any]], node: str, incarnation: int, since: float) -> float:
    """Watch until an update of a newer process of the struck member is in: the longest time without a version since ``since``."""
    poll, longest, version = threading.Event(), 0.0, status()["version"]
    joined: int | None = None  # updates when the newer process was seen first
    while True:
        now = status()
        number, updates = member(now, node)
        if now["version"] > version:
            version, since = now["version"], time.monotonic()
        longest = max(longest, time.monotonic() - since)
        if number > incarnation:
            joined = updates if joined is None else joined
            if updates > joined:
                return longest
        poll.wait(0.02)


class TorchrunSite:
    """A site as a torchrun job, in a process group of its own."""

    def __init__(self, config: FleetConfig, folder: Path, node: str, ranks: int) -> None:
        home = folder / node
        home.mkdir(exist_ok=True)
        site = config.site.model_copy(update={"checkpoint": home / "checkpoint"})
        fleet = write(config.model_copy(update={"site": site}), home)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        self._process = subprocess.Popen(
            [*command, "--max-restarts", "100", "-m", "fleetddp.cloud.train", fleet],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "FLEETDDP_NODE": node},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def workers(self) -> list[int]:
        """The ranks' processes, by rank."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    ranks = [v for v in environment if v.startswith(b"RANK=")]
                    if parent == self._process.pid and ranks:
                        found.append((int(ranks[0][5:]), int(entry.name)))
        return [pid for _, pid in sorted(found)]

    def kill(self) -> None:
        """All of it, at once. Workers of torchrun lead sessions of their own."""
        for pid in [*self.workers(), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


if __name__ == "__main__":
    main()
