"""How fast a coordinator takes updates in, against bare gRPC client streams of the same bytes, and what memory it needs.

One round: N members push 40 MB float32 each to a coordinator, and the clock stops when the version that holds all of them is
published (made durable, merged in float64, written, fsynced); then N clients send the same bytes in messages of the same size
to a server that throws them away. All members and servers are processes of their own, started before the clock. The figures are
medians over the rounds of (bare seconds / our seconds). A third arm tells what there is to be had on this machine: plain gRPC
whose two ends do no more than must be done (CRC32C, finite check, pwrite, fsync, one float64 pass). Memory: the coordinator's
largest resident size, above that of its idle after the start, over all windows of N updates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

CHUNK = 512 * 1024
BLOCK = 2**20  # bytes that the plain arm sums up at a time
SAMPLES = 10.0
CONTEXT = multiprocessing.get_context("spawn")


def layout(elements: int) -> Any:
    from fleetddp.common.layout import Layout

    return Layout.of([(f"layer{i}", (elements // 10,)) for i in range(10)])


def coordinator(pipe: Any, folder: str, members: int) -> None:
    """Runs a coordinator that merges every ``members`` updates; answers "memory" with its resident size now and at most."""
    from fleetddp.cloud.coordinator import Coordinator
    from fleetddp.common.config import parse

    config = parse(
        {
            "run": "bench",
            "coordinator": {"address": "127.0.0.1:0", "journal": folder},
            "members": {"lease_s": 600.0},
            "window": {"quorum": members, "min_updates": members, "require": [], "grace_s": 0.0, "deadline_s": 600.0},
        }
    )

    async def serve() -> None:
        running = Coordinator(config)
        await running.start()
        pipe.send(running.port)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv) != "stop":
            pipe.send(_memory_mib())
        await running.stop()

    asyncio.run(serve())


def _memory_mib() -> tuple[float, float]:
    """(now, most so far) of this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in status if line.startswith(("VmRSS", "VmHWM"))}
    return kib["VmRSS"] / 1024, kib["VmHWM"] / 1024


def bare_server(pipe: Any, members: int, folder: str) -> None:
    """A gRPC server that counts what it gets ("Take"), or stores and sums it up as plainly as can be ("Keep")."""
    import grpc

    def take(stream: Any, _context: Any) -> bytes:
        return str(sum(len(message) for message in stream)).encode()

    server = grpc.server(futures.ThreadPoolExecutor(members + 2))
    methods = {name: grpc.stream_unary_rpc_method_handler(work) for name, work in (("Take", take), ("Keep", _keep(folder)))}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", methods),))
    pipe.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    pipe.recv()
    server.stop(0)


def _keep(folder: str) -> Any:
    import google_crc32c
    import numpy as np

    def keep(stream: Any, _context: Any) -> bytes:
        size = 0
        with tempfile.TemporaryFile(dir=folder) as file:
            for message in stream:
                google_crc32c.value(message)
                values = np.frombuffer(message, "<f4")
                assert np.isfinite(np.dot(values, values))
                os.pwrite(file.fileno(), message, size)
                size += len(message)
            os.fsync(file.fileno())
            total = np.zeros(BLOCK // 4)
            for start in range(0, size, BLOCK):
                block = np.frombuffer(os.pread(file.fileno(), BLOCK, start), "<f4")
                total[: len(block)] += block.astype(np.float64)
        return str(size).encode()

    return keep


def member(pipe: Any, name: str, port: int, bare_port: int, elements: int) -> None:
    """Pushes an update, or streams the same bytes bare, whenever told to."""
    import google_crc32c
    import grpc
    import numpy as np

    from fleetddp.common.config import SecurityConfig
    from fleetddp.common.events import Join
    from fleetddp.common.transport.uplink import Uplink
    from fleetddp.common.update import Kind, Slice, Tier, UpdateHeader, UpdateId

    spec = layout(elements)
    payload = np.random.default_rng(len(name)).normal(0, 1e-3, elements).astype("<f4").tobytes()
    part = Slice(intervals=((0, elements),), samples=SAMPLES, digest=google_crc32c.value(payload))
    uplink = Uplink(f"127.0.0.1:{port}", SecurityConfig(), node=name)
    uplink.join(Join(node=name, tier=Tier.SITE, incarnation=1))
    channel = grpc.insecure_channel(f"127.0.0.1:{bare_port}")
    take, keep = channel.stream_unary("/bare/Take"), channel.stream_unary("/bare/Keep")
    sequence = 0
    pipe.send("ready")
    while (order := pipe.recv()) != "stop":
        if order == "bare":
            assert int(take(payload[i : i + CHUNK] for i in range(0, len(payload), CHUNK))) == len(payload)
        elif order == "plain":
            assert int(keep(_summed(payload[i : i + CHUNK]) for i in range(0, len(payload), CHUNK))) == len(payload)
        else:
            kind, base = (Kind.INIT, -1) if order == "init" else (Kind.DELTA, order)
            header = UpdateHeader(
                update_id=UpdateId(name, 1, sequence),
                kind=kind,
                tier=Tier.SITE,
                base_version=base,
                codec="float32",
                layout=spec.fingerprint,
                layout_spec=spec.to_json() if kind is Kind.INIT else b"",
            )
            sequence += 1
            receipt = uplink.push(header, part, memoryview(payload))
            assert receipt.state.value in ("accepted", "merged"), receipt
        pipe.send("done")
    uplink.close()
    channel.close()


def _summed(chunk: bytes) -> bytes:
    import google_crc32c

    google_crc32c.value(chunk)
    return chunk


class Bench:
    """A coordinator, a bare server and N members."""

    def __init__(self, members: int, elements: int, folder: str) -> None:
        from fleetddp.common.config import SecurityConfig
        from fleetddp.common.transport.uplink import Uplink

        self.processes: list[Any] = []
        self.coordinator = self._start(coordinator, folder, members)
        port = self.coordinator.recv()
        self.idle, _ = self.memory()
        self.bare = self._start(bare_server, members, os.path.dirname(folder))
        bare_port = self.bare.recv()
        self.members = [self._start(member, f"member-{i:02}", port, bare_port, elements) for i in range(members)]
        for pipe in self.members:
            pipe.recv()
        self.watcher = Uplink(f"127.0.0.1:{port}", SecurityConfig(), node="watcher")
        self.news = self.watcher.watch("watcher", 1, -1)
        self.version = -1
        self._payloads = Path(folder) / "payloads"
        self._each(self.members[:1], "init")
        self._published()

    def _start(self, target: Any, *args: Any) -> Any:
        mine, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=target, args=(theirs, *args))
        process.start()
        self.processes.append(process)
        return mine

    def memory(self) -> tuple[float, float]:
        self.coordinator.send("memory")
        now, most = self.coordinator.recv()
        return now, most

    def round(self, parallel: bool) -> tuple[float, float, float]:
        """(our, bare, plain seconds), one right after the other."""
        return self.ours(parallel), self.theirs(parallel, "bare"), self.theirs(parallel, "plain")

    def ours(self, parallel: bool) -> float:
        """Seconds until the version that holds everybody's update is published."""
        begun = time.perf_counter()
        (self._at_once if parallel else self._each)(self.members, self.version)
        self._published()
        seconds = time.perf_counter() - begun
        while any(self._payloads.iterdir()):  # removed after the publication; not at the other arms' cost
            time.sleep(0.01)
        return seconds

    def theirs(self, parallel: bool, arm: str) -> float:
        """Seconds for the same bytes by another arm."""
        begun = time.perf_counter()
        (self._at_once if parallel else self._each)(self.members, arm)
        return time.perf_counter() - begun

    def _each(self, pipes: list[Any], order: Any) -> None:
        for pipe in pipes:
            pipe.send(order)
            pipe.recv()

    def _at_once(self, pipes: list[Any], order: Any) -> None:
        for pipe in pipes:
            pipe.send(order)
        for pipe in pipes:
            pipe.recv()

    def _published(self) -> None:
        self.version += 1
        while next(self.news).version < self.version:
            pass

    def close(self) -> None:
        self.news.close()
        self.watcher.close()
        for pipe in [*self.members, self.bare, self.coordinator]:
            pipe.send("stop")
        for process in self.processes:
            process.join()


class Ratios(NamedTuple):
    """Bare seconds over those of an arm: medians over the rounds."""

    ours: float
    plain: float


def measure(members: int, elements: int, rounds: int, modes: tuple[bool, ...]) -> tuple[dict[bool, Ratios], float]:
    """(ratios to bare gRPC by mode (parallel or not), peak MiB over idle)."""
    ratios: dict[bool, Ratios] = {}
    with tempfile.TemporaryDirectory(prefix="fleetddp-ingest-") as folder:
        bench = Bench(members, elements, os.path.join(folder, "journal"))
        for parallel in modes:
            bench.round(parallel)  # all arms warm
            seconds = [bench.round(parallel) for _ in range(rounds)]
            ratios[parallel] = Ratios(
                ours=statistics.median(bare / ours for ours, bare, _ in seconds),
                plain=statistics.median(bare / plain for _, bare, plain in seconds),
            )
            how = "at once" if parallel else "one after another"
            each = ", ".join(f"{o:.3f} s (bare {b:.3f} s, plain {p:.3f} s)" for o, b, p in seconds)
            print(f"{members} members, {how}: {each}", flush=True)
        _, most = bench.memory()
        print(f"{members} members: idle {bench.idle:.0f} MiB, at most {most:.0f} MiB", flush=True)
        bench.close()
        return ratios, most - bench.idle


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--elements", type=int, default=10_000_000)
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    ratios, peak8 = measure(8, given.elements, given.rounds, (False, True))
    _, peak32 = measure(32, given.elements, 1, (True,))
    figures = {
        "ratio_to_grpc": round(ratios[False].ours, 3),
        "ratio_to_grpc_parallel": round(ratios[True].ours, 3),
        "plain_ratio_to_grpc": round(ratios[False].plain, 3),
        "plain_ratio_to_grpc_parallel": round(ratios[True].plain, 3),
        "peak_over_idle_mib_n8": round(peak8, 1),
        "peak_over_idle_mib_n32": round(peak32, 1),
        "model_mib": round(given.elements * 4 / 2**20, 1),
    }
    print(json.dumps({"bench": "ingest", "figures": figures}))


if __name__ == "__main__":
    main()
