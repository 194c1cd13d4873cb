"""How long a fleet takes to recover, in seconds, by what was killed with -9 and started again at once.

Real processes of ``fleetddp coordinator`` and ``fleetddp edge`` on loopback, 3 MB of weights. Medians over the rounds:

- coordinator_s: from the kill to the next version, which all four members are in; of that, coordinator_listening_s until the new
  process listens, coordinator_members_back_s from then until the last member has joined again by itself (the longest: _max_s).
- edge_node_s: from the kill to the next update of the node that is merged; of that, edge_node_pushing_s until it pushes.

Run: python tests/bench/recovery.py [--rounds N]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers.fleet import fleet_config, free_port, on_port, running, write
from helpers.marks import Flat
from helpers.members import Member, Moments
from helpers.processes import commands, eventually
from helpers.tasks import LineTask

from fleetddp.common.publish import save_init

MEMBERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    figures: dict[str, float] = {}
    for measure in (coordinator_killed, edge_killed):
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


if __name__ == "__main__":
    main()
