"""Two sites and a coordinator against DDP over two ranks, and against torchft where it is installed: loss, bytes, stalls, speed.

The work is ``peers/gpt.py``'s; one rank each on one thread, Gloo, a real coordinator on loopback with its journal on disk. Each
run is a line of JSON in ``--out``; what is there already is not run again, so that a long measurement goes on where it was. All
figures are ratios to the DDP runs of the same seed, steps and batch, medians over the seeds (of losses: means).

    loss_ratio_to_ddp       held-out loss of the newest version (not of a site's own weights)
    bytes_ratio_to_ddp      sent by a member and to it, in a network namespace of its own, headers and heartbeats included;
                            up_bytes_ratio_to_ddp: payload bytes of a site's updates alone
    stall_over_step         time of a step at a boundary over the median step, minus one; _max: the longest; _of_last: that of the
                            site that came last, so without the wait for one that was slower on its way to the boundary
    cycle_extra_over_step   all time of a cycle beyond the median step times its steps, over the median step
    tokens_per_s_ratio_to_ddp

    python tests/bench/diloco.py                                  # three minutes: speed, stalls and bytes
    python tests/bench/diloco.py --steps 600 --seeds 1,2,3 --arms all --out runs/diloco.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpt

PEERS = Path(gpt.__file__).parent
ARM_S = 900.0
RANKS = 2

# What an arm is: settings of a site (``every``, ``codec``, ...), of the fleet (``publish``, ``outer``), or of torchft.
TORCHFT = {"lr": "0.7", "momentum": "0.9"}
ARMS: dict[str, dict[str, str]] = {
    "ddp": {},
    "H20": {"every": "20"},
    "H100": {"every": "100"},
    "H20_int8": {"every": "20", "codec": "int8"},
    "H100_int8": {"every": "100", "codec": "int8"},
    "H20_int4": {"every": "20", "codec": "int4"},
    "H100_int4": {"every": "100", "codec": "int4"},
    "H20_topk": {"every": "20", "codec": "topk:0.03"},
    "H100_topk": {"every": "100", "codec": "topk:0.03"},
    "H20_int8_bf16": {"every": "20", "codec": "int8", "publish": "bfloat16"},
    "H100_int8_bf16": {"every": "100", "codec": "int8", "publish": "bfloat16"},
    "H20_overlap": {"every": "20", "overlap": "steps"},
    "H100_overlap": {"every": "100", "overlap": "steps"},
    "H20_int8_bf16_overlap": {"every": "20", "codec": "int8", "publish": "bfloat16", "overlap": "steps"},
    "H20_fragments": {"every": "20", "fragments": "4"},
    "H20_int8_bf16_fragments_overlap": {
        "every": "20",
        "codec": "int8",
        "publish": "bfloat16",
        "fragments": "4",
        "overlap": "steps",
    },
    "H100_fragments_overlap": {"every": "100", "fragments": "4", "overlap": "steps"},
    "H20_momentum": {"every": "20", "outer": "diloco"},
    "H100_momentum": {"every": "100", "outer": "diloco"},
    "H20_momentum_warm": {"every": "20", "outer": "diloco", "warmup": "100"},
    "H100_momentum_warm": {"every": "100", "outer": "diloco", "warmup": "100"},
    "H20_warm": {"every": "20", "warmup": "100"},
    "H100_warm": {"every": "100", "warmup": "100"},
    "torchft_H20": {"every": "20", **TORCHFT},
    "torchft_H100": {"every": "100", **TORCHFT},
    "torchft_H20_fragments": {"every": "20", "fragments": "2", "delay": "3", **TORCHFT},
}
SHORT = "ddp,H20,H20_int8_bf16,H20_int8_bf16_overlap,H100_int8_bf16,torchft_H20,torchft_H20_fragments"


# ---- one process of an arm ---------------------------------------------------------------------------------------------------


def ddp_rank(job: gpt.Job) -> None:
    """One rank of plain DDP."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    text = gpt.corpus()
    dist.init_process_group("gloo", init_method=f"file://{job.folder}/ranks", rank=job.rank, world_size=RANKS)
    model, optimizer = gpt.made(job.seed)
    job.warm_up(model, text.training)
    watch = job.train(DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer, text.training)
    job.meet("done")
    job.report(watch, sent=watch.sent(), corpus=text.digest, loss=gpt.evaluate(model, text.held_out))
    dist.destroy_process_group()


def site_rank(job: gpt.Job) -> None:
    """A whole site of one rank."""
    import torch.distributed as dist

    from fleetddp.cloud import FleetDDP
    from fleetddp.common.config import SecurityConfig
    from fleetddp.common.transport.uplink import Uplink

    text, settings = gpt.corpus(), job.settings
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    inner, optimizer = gpt.made(job.seed)
    job.warm_up(inner, text.training)
    given = {name: settings[name] for name in ("codec", "overlap") if name in settings}
    counts = {"warmup": "warmup_sync_steps", "fragments": "fragments"}
    numbers = {ours: int(settings[name]) for name, ours in counts.items() if name in settings}
    every, address = int(settings["every"]), settings["address"]
    model = FleetDDP(
        inner, coordinator=address, site=f"site-{job.rank}", sync_every=every, gradient_as_bucket_view=True, **given, **numbers
    )
    model.start()
    with contextlib.closing(Uplink(address, SecurityConfig(), node="reader")) as reader:
        up_before = reader.status()["counters"]["bytes_in"]
        watch = job.train(model, optimizer, text.training)
        job.meet("done")
        status = _drained(reader, exchanges(settings, job.steps))
        sent, up = watch.sent(), status["counters"]["bytes_in"] - up_before
        _load(reader, status["version"], inner)
    job.report(watch, sent=sent, up=up, corpus=text.digest, loss=gpt.evaluate(inner, text.held_out))
    job.meet("read")  # a site that leaves might end a window
    model.close()
    dist.destroy_process_group()


def exchanges(settings: dict[str, str], steps: int) -> int:
    """How many versions after the first one ``steps`` steps make."""
    warm = min(int(settings.get("warmup", "0")), steps)
    return warm + (steps - warm) // (int(settings["every"]) // int(settings.get("fragments", "1")))


def _drained(reader: Any, version: int) -> dict[str, Any]:
    """The coordinator's status once all versions are there."""
    over = time.monotonic() + gpt.PATIENCE_S
    status: dict[str, Any] = reader.status()
    while status["version"] < version:
        if time.monotonic() > over:
            raise SystemExit(f"version {version} is due, {status['version']} is the newest: {status['window']}")
        time.sleep(0.02)
        status = reader.status()
    return status


def _load(reader: Any, version: int, model: Any) -> None:
    """Set the model to a version as it was published."""
    import torch

    from fleetddp.common.codecs import get
    from fleetddp.common.payload import Geometry, tensor_over

    layout, data = reader.layout(), bytearray()
    found = reader.pull(version, (), lambda offset, chunk: data.__setitem__(slice(offset, offset + len(chunk)), chunk))
    geometry = Geometry(layout, get(found.codec))
    parameters = (0, layout.parameters)
    layout.write_(model, geometry.decode(tensor_over(bytes(data)), parameters).to(torch.float32), parameters)


# ---- one arm -----------------------------------------------------------------------------------------------------------------


def run(name: str, settings: dict[str, str], options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One arm with one seed; what its ranks report, summed up."""
    with tempfile.TemporaryDirectory(dir=options.work) as path, contextlib.ExitStack() as stack:
        folder = Path(path)
        if name.startswith("torchft"):
            program = str(options.peers / ".venv-torchft/bin/python")
            command = [program, str(PEERS / "torchft_diloco.py")]
            environment = {"TORCHFT_LIGHTHOUSE": stack.enter_context(_lighthouse(options.peers, folder))}
        else:
            command, environment = [sys.executable, __file__, "--rank"], {}
            if name != "ddp":
                settings = {**settings, "address": stack.enter_context(_coordinator(settings, folder))}
        jobs = [gpt.Job(folder, rank, seed, options.steps, options.batch, settings) for rank in range(RANKS)]
        log = stack.enter_context((folder / "log").open("w+"))
        ranks = [stack.enter_context(_process([*command, job.write()], log, environment)) for job in jobs]
        over = time.monotonic() + ARM_S
        codes = [process.wait(max(0.0, over - time.monotonic())) for process in ranks]
        if any(codes):
            log.seek(0)
            sys.exit(f"{name} failed: {codes}\n{log.read()[-4000:]}")
        found = [json.loads((folder / f"result.{rank}.json").read_text()) for rank in range(RANKS)]
    return summary(settings, found, options.batch)


@contextlib.contextmanager
def _process(command: list[str], log: Any, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=whole, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _coordinator(settings: dict[str, str], folder: Path) -> Iterator[str]:
    """A coordinator that merges when both sites have delivered; its address."""
    from helpers.fleet import fleet_config, free_port, on_port, write
    from helpers.processes import commands

    config = fleet_config(
        folder,
        members={"sites": [f"site-{rank}" for rank in range(RANKS)], "heartbeat_s": 5.0},
        window={"preset": "sync", "quorum": None, "require": None, "grace_s": None, "min_updates": RANKS, "deadline_s": 120.0},
        publish=settings.get("publish", "float32"),
        outer={"preset": settings.get("outer", "average")},
        site={"fragments": int(settings.get("fragments", "1")), "sync_every": int(settings["every"])},
    )
    config = on_port(config, free_port())
    with commands() as start:
        start("coordinator", write(config, folder)).wait_for("listens on port")
        yield config.coordinator.address


@contextlib.contextmanager
def _lighthouse(peers: Path, folder: Path) -> Iterator[str]:
    """What torchft's replica groups find each other by; its address."""
    from helpers.fleet import free_port

    port = free_port()
    program = str(peers / ".venv-torchft/bin/torchft_lighthouse")
    limits = ["--min_replicas", str(RANKS), "--join_timeout_ms", "60000"]
    with (folder / "lighthouse").open("w") as log, _process([program, "--bind", f"127.0.0.1:{port}", *limits], log, {}):
        time.sleep(1.0)
        yield f"http://127.0.0.1:{port}"


def summary(settings: dict[str, str], found: list[dict[str, Any]], batch: int) -> dict[str, Any]:
    """One row, out of what the ranks of an arm report."""
    steps = len(found[0]["step_s"])
    wall_s = max(rank["ended"] for rank in found) - min(rank["began"] for rank in found)
    row = {
        "corpus": found[0]["corpus"],
        "loss": found[0]["loss"],
        "tokens_per_s": RANKS * steps * batch * gpt.CONTEXT / wall_s,
        "step_ms": 1e3 * statistics.median(s for rank in found for s in rank["step_s"]),
        "cpu_ms": 1e3 * statistics.fmean(rank["cpu_s"] for rank in found) / steps,
        "bytes": found[0]["sent"] / RANKS / steps if gpt.in_own_namespace() else None,
        "up_bytes": found[0].get("up", 0) / RANKS / steps,
    }
    if "every" in settings:
        row |= stalls(settings, [rank["step_s"] for rank in found])
    return row


def stalls(settings: dict[str, str], ranks: list[list[float]]) -> dict[str, float]:
    """Of the cycles after the synchronous steps that a run may start with."""
    every, parts = int(settings["every"]), int(settings.get("fragments", "1"))
    warm = int(settings.get("warmup", "0"))
    by_site: list[list[float]] = []
    extra = []
    for steps in ranks:
        median = statistics.median(steps[warm:])
        mine: list[float] = []
        for end in range(warm + every, len(steps) + 1, every):
            cycle = steps[end - every : end]
            mine += [s / median - 1 for s in cycle[every // parts - 1 :: every // parts]]
            if end + every <= len(steps) or "overlap" not in settings:  # the last cycle's transfers lie beyond the last step
                extra.append(sum(cycle) / median - every)
        by_site.append(mine)
    if not extra:
        return {}
    at_boundary = [stall for mine in by_site for stall in mine]
    return {
        "stall_over_step": statistics.median(at_boundary),
        "stall_over_step_of_last": statistics.median(min(both) for both in zip(*by_site, strict=True)),
        "stall_over_step_max": max(at_boundary),
        "cycle_extra_over_step": statistics.median(extra),
    }


# ---- all arms ----------------------------------------------------------------------------------------------------------------


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios to the DDP runs of the same seed."""
    plain = {row["seed"]: row for row in rows if row["arm"] == "ddp"}
    found: dict[str, Any] = defaultdict(dict)
    for name in dict.fromkeys(row["arm"] for row in rows if row["arm"] != "ddp"):
        mine = [(row, plain[row["seed"]]) for row in rows if row["arm"] == name and row["seed"] in plain]
        if not mine:
            continue
        losses = [statistics.fmean(losses) for losses in zip(*((row["loss"], base["loss"]) for row, base in mine), strict=True)]
        found["loss_ratio_to_ddp"][name] = losses[0] / losses[1]
        for ratio, key in (("tokens_per_s_ratio_to_ddp", "tokens_per_s"), ("bytes_ratio_to_ddp", "bytes")):
            if all(row[key] and base[key] for row, base in mine):
                found[ratio][name] = statistics.median(row[key] / base[key] for row, base in mine)
        if all(row["up_bytes"] and base["bytes"] for row, base in mine):
            found["up_bytes_ratio_to_ddp"][name] = statistics.median(row["up_bytes"] / base["bytes"] for row, base in mine)
        for key in ("stall_over_step", "stall_over_step_of_last", "stall_over_step_max", "cycle_extra_over_step"):
            if all(key in row for row, _ in mine):
                found[key][name] = statistics.median(row[key] for row, _ in mine)
    return {ratio: {name: float(f"{value:.4g}") for name, value in by.items()} for ratio, by in found.items()}


def wanted(options: argparse.Namespace) -> list[str]:
    """The arms asked for; says what is missing."""
    names = list(ARMS) if options.arms == "all" else options.arms.split(",")
    if unknown := sorted(set(names) - set(ARMS)):
        sys.exit(f"no such arms: {', '.join(unknown)}; there are {', '.join(ARMS)}")
    program = options.peers / ".venv-torchft/bin/python"
    if not program.exists() and any(name.startswith("torchft") for name in names):
        print(f"skipped torchft: there is no {program} (peers/setup.sh makes it)")
        names = [name for name in names if not name.startswith("torchft")]
    return names


def enter_namespace() -> None:
    """Start again in a network namespace of our own, where that is allowed: its loopback device counts our bytes alone."""
    possible = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    if gpt.in_own_namespace() or not possible or subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        return
    os.environ["BENCH_NAMESPACE"] = "own"
    script = 'ip link set lo up && exec "$0" "$@"'
    os.execvp("unshare", ["unshare", "-n", "--", "sh", "-c", script, sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=SHORT, help=f"'all', or some of: {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank's step")
    parser.add_argument("--out", type=Path, help="file of rows to go on with")
    parser.add_argument("--work", type=Path, help="folder on a real disk for the journals (default: the system's)")
    parser.add_argument("--peers", type=Path, default=PEERS, help="directory with the environment .venv-torchft")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        job = gpt.Job.read(options.rank)
        (site_rank if job.settings else ddp_rank)(job)
        return
    enter_namespace()
    kept: list[dict[str, Any]] = []
    if options.out and options.out.exists():
        kept = [json.loads(line) for line in options.out.read_text().splitlines()]
    digest, rows = gpt.corpus().digest, []
    names = wanted(options)
    for seed in map(int, options.seeds.split(",")):
        for name in names:
            key = {"arm": name, "settings": ARMS[name], "seed": seed, "steps": options.steps, "batch": options.batch}
            key["corpus"] = digest
            row = next((row for row in kept if key.items() <= row.items()), None)
            if row is None:
                row = {**key, **run(name, ARMS[name], options, seed), "at": time.strftime("%Y-%m-%dT%H:%M:%S")}
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
            print(
                f"{name}, seed {seed}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float)), flush=True
            )
            rows.append(row)
    print(json.dumps({"bench": "diloco", "figures": figures(rows)}))


if __name__ == "__main__":
    main()
