"""What the hierarchical hook saves on the network between two nodes, against plain ``DistributedDataParallel``.

Two nodes of two ranks, Gloo. Where ``ip netns`` is allowed each node is a network namespace; the two are joined by a link that is
limited to --mbit in each direction, bytes are those the link has carried (headers included) and steps are timed. Elsewhere bytes
are counted by hand (a ring against 2 (M - 1) / M of the model) and no step is timed.

- slow_leg_bytes_ratio: bytes over the link in a step of plain DDP, over those of a hierarchical one; _bfloat16 and _int8: with
  ``cross_node`` set so.
- step_ratio_to_ddp: time of a hierarchical step over one of plain DDP; the median of blocks that alternate with DDP's.

    python tests/bench/site_hierarchy.py [--blocks 5] [--mbit 200]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NODES, LOCAL = 2, 2
WORLD = NODES * LOCAL
STEPS = 3  # a block
ARMS = ("ddp", "float32", "bfloat16", "int8")
DEVICE = "fleetddp-eth"  # 12 of the 15 characters that a name may have


# ---- one rank ----------------------------------------------------------------------------------------------------------------


def rank_main(out: Path, blocks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from fleetddp.cloud import register_hierarchy

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 640), nn.ReLU(), nn.Linear(640, 64))
    models = {}
    for arm in ARMS:
        models[arm] = DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1)
        if arm != "ddp":
            register_hierarchy(models[arm], cross_node=arm)
    optimizers = {arm: torch.optim.SGD(model.parameters(), lr=0.01) for arm, model in models.items()}
    sent: dict[str, list[int]] = {arm: [] for arm in ARMS}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for block in range(-1, blocks):  # the first one warms up
        for arm in ARMS:
            dist.barrier()
            before, begun = _carried(), time.monotonic()
            for _ in range(STEPS):
                models[arm](torch.randn(8, 256)).square().mean().backward()
                optimizers[arm].step()
                optimizers[arm].zero_grad()
            dist.barrier()
            if block >= 0:
                sent[arm].append(_carried() - before)
                seconds[arm].append(time.monotonic() - begun)
    if dist.get_rank() == 0:
        parameters = sum(p.numel() for p in net.parameters())
        out.write_text(json.dumps({"sent": sent, "seconds": seconds, "parameters": parameters}))
    dist.barrier()
    dist.destroy_process_group()


def _carried() -> int:
    """Bytes that the link has carried so far, both ways."""
    counters = Path("/sys/class/net", DEVICE, "statistics")
    return sum(int((counters / name).read_text()) for name in ("tx_bytes", "rx_bytes"))


# ---- two nodes -----------------------------------------------------------------------------------------------------------------


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def two_nodes(mbit: int) -> Iterator[list[str]]:
    """Two network namespaces joined by one limited link; raises ``CalledProcessError`` where they are not allowed."""
    names = [f"fleetddp-{os.getpid()}-{node}" for node in range(NODES)]
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        ends = [["name", DEVICE, "netns", name] for name in names]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for node, name in enumerate(names):
            _ip("-n", name, "address", "add", f"10.77.0.{node + 1}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", name, "link", "set", device, "up")
            limit = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", *limit], check=True, capture_output=True)
        yield names
    finally:
        for name in made:
            _ip("netns", "delete", name)


def measure(names: list[str], blocks: int) -> dict[str, Any]:
    """Run the four ranks in their namespaces."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "seen.json")
        ranks = []
        for rank in range(WORLD):
            node, local = divmod(rank, LOCAL)
            place = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": LOCAL}
            meet = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1"}
            environment = {**os.environ, **meet, **{name: str(value) for name, value in place.items()}}
            command = [sys.executable, __file__, "--rank-of", str(out), "--blocks", str(blocks)]
            ranks.append(subprocess.Popen(["ip", "netns", "exec", names[node], *command], env=environment))
        try:
            codes = [rank.wait(80) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        seen: dict[str, Any] = json.loads(out.read_text())
        return seen


def figures_of(seen: dict[str, Any]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for arm in ARMS[1:]:
        suffix = "" if arm == "float32" else f"_{arm}"
        figures[f"slow_leg_bytes_ratio{suffix}"] = sum(seen["sent"]["ddp"]) / sum(seen["sent"][arm])
        pairs = zip(seen["seconds"][arm], seen["seconds"]["ddp"], strict=True)
        figures[f"step_ratio_to_ddp{suffix}"] = statistics.median(ours / theirs for ours, theirs in pairs)
    figures["ddp_step_ms"] = 1000 * statistics.median(seen["seconds"]["ddp"]) / STEPS
    figures["ddp_bytes_over_model"] = sum(seen["sent"]["ddp"]) / len(seen["sent"]["ddp"]) / STEPS / (4 * seen["parameters"])
    return figures


def counted() -> dict[str, float]:
    """By hand: a ring over all ranks crosses each boundary between nodes with 2 (R - 1) / R of the model."""
    ring, ours = 2 * (WORLD - 1) / WORLD, 2 * (NODES - 1) / NODES
    bits = {"": 32, "_bfloat16": 16, "_int8": 8 + 32 / 512}
    return {f"slow_leg_bytes_ratio{suffix}": ring * 32 / (ours * size) for suffix, size in bits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        rank_main(given.rank_of, given.blocks)
        return
    try:
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise FileNotFoundError("no ip and tc (Debian: iproute2)")
        with two_nodes(given.mbit) as names:
            figures, link = figures_of(measure(names, given.blocks)), f"{given.mbit} Mbit/s between two namespaces"
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"no namespaces ({error}): bytes are counted, nothing is timed")
        figures, link = counted(), "counted"
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({"bench": "site_hierarchy", "link": link, "figures": rounded}))


if __name__ == "__main__":
    main()
