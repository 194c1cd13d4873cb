"""What regions take off the root: bytes and CPU for 64 edges in 8 regions, against the same edges on the root itself.

Real processes on loopback gRPC: a root, 8 regions (in the tree), and 64 edges with connections of their own, which one driver
process plays. For every version each edge pulls the newest, pushes an update in int8 and watches for the next; regions send their
sums in int8 with error feedback. Both arms make as many versions, of the same updates. Measured at the root: payload bytes in and
out (``fleetddp status``), and the CPU seconds of its process alone. The figures are medians over rounds of flat / tree; in those
of "two bases" every other edge of a region is one version behind, so that its region's sums have two rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

CONTEXT = multiprocessing.get_context("spawn")
EDGES, REGIONS = 64, 8
CODEC = "int8"


def layout(elements: int) -> Any:
    from fleetddp.common.layout import Layout

    return Layout.of([(f"layer{i}", (elements // 8,)) for i in range(8)])


def config(folder: str, root: str, own: str) -> Any:
    from fleetddp.common.config import parse

    return parse(
        {
            "run": "bench",
            "coordinator": {"address": root, "journal": f"{folder}/root"},
            "members": {"lease_s": 600.0, "heartbeat_s": 5.0},
            "window": {"preset": "fedbuff", "quorum": EDGES, "min_updates": EDGES, "deadline_s": 600.0},
            "region": {
                "address": own,
                "journal": f"{folder}/{own}",
                "codec": CODEC,
                "window": {"preset": "fedbuff", "quorum": EDGES // REGIONS, "deadline_s": 600.0},
            },
        }
    )


def root(pipe: Any, folder: str, elements: int) -> None:
    """Serves; answers "usage" with (CPU seconds of this process, payload bytes in and out)."""
    import torch

    from fleetddp.cloud.coordinator import Coordinator
    from fleetddp.common.assembly import open_journal
    from fleetddp.common.publish import Publisher

    settings = config(folder, "127.0.0.1:0", "127.0.0.1:0")
    journal = open_journal(settings)
    zeros = torch.zeros(elements)
    Publisher(journal, settings).found_weights(layout(elements), lambda i, out: out.copy_(zeros[i[0] : i[1]]), time.time())
    journal.close()

    async def serve() -> None:
        running = Coordinator(settings)
        await running.start()
        pipe.send(running.port)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv) != "stop":
            totals = running.driver.status()["counters"]
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send((used.ru_utime + used.ru_stime, totals["bytes_in"] + totals["bytes_out"]))
        await running.stop()

    asyncio.run(serve())


def regions(pipe: Any, folder: str, port: int, names: list[str]) -> None:
    """Some regions, in one process to spare memory."""
    from fleetddp.edge.region import Region

    async def serve() -> None:
        running = []
        for name in names:
            settings = config(f"{folder}/{name}", f"127.0.0.1:{port}", "127.0.0.1:0")
            os.makedirs(f"{folder}/{name}", exist_ok=True)
            running.append(Region(settings, name))
            await running[-1].start()
        pipe.send([region.port for region in running])
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        for region in running:
            await region.stop()

    asyncio.run(serve())


class Edge:
    """One edge: a connection, and the payload that it pushes each time."""

    def __init__(self, index: int, port: int, elements: int) -> None:
        import google_crc32c
        import torch

        from fleetddp.common import codecs
        from fleetddp.common.config import SecurityConfig
        from fleetddp.common.events import Join
        from fleetddp.common.payload import bytes_of
        from fleetddp.common.transport.uplink import Uplink
        from fleetddp.common.update import Slice, Tier

        self.index, self.node, self.layout = index, f"edge-{index:02}", layout(elements)
        values = torch.randn(elements, generator=torch.Generator().manual_seed(index)) * 1e-3
        self.payload = bytes(bytes_of(codecs.get(CODEC).encode(values)))
        self.part = Slice(intervals=((0, elements),), samples=10.0, digest=google_crc32c.value(self.payload))
        self.uplink = Uplink(f"127.0.0.1:{port}", SecurityConfig(), node=self.node)
        self.uplink.join(Join(node=self.node, tier=Tier.EDGE, incarnation=1))
        self.news = self.uplink.watch(self.node, 1, -1)
        self.version = -1

    def pull(self, version: int) -> None:
        self.uplink.pull(version, (), lambda offset, data: None)

    def push(self, sequence: int, base: int) -> None:
        from fleetddp.common.update import Kind, Tier, UpdateHeader, UpdateId

        header = UpdateHeader(
            update_id=UpdateId(self.node, 1, sequence),
            kind=Kind.DELTA,
            tier=Tier.EDGE,
            base_version=base,
            codec=CODEC,
            layout=self.layout.fingerprint,
        )
        receipt = self.uplink.push(header, self.part, memoryview(self.payload))
        assert receipt.state.value in ("accepted", "merged"), receipt

    def wait(self, version: int) -> None:
        """Until its parent serves this version."""
        while self.version < version:
            self.version = next(self.news).version


class Arm:
    """A fleet of one shape."""

    def __init__(self, folder: str, elements: int, tree: bool) -> None:
        self.processes: list[Any] = []
        self.root = self._start(root, folder, elements)
        port = self.root.recv()
        ports = [port]
        self.regions = None
        if tree:
            self.regions = self._start(regions, folder, port, [f"region-{i}" for i in range(REGIONS)])
            ports = self.regions.recv()
        # each parent must have version 0 before anybody may push
        self.threads = ThreadPoolExecutor(EDGES)
        self.edges = list(self.threads.map(lambda i: Edge(i, ports[i % len(ports)], elements), range(EDGES)))
        self.version = 0
        self._all(lambda edge: edge.wait(0))

    def _start(self, target: Any, *args: Any) -> Any:
        mine, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=target, args=(theirs, *args))
        process.start()
        self.processes.append(process)
        return mine

    def _all(self, work: Any) -> None:
        list(self.threads.map(work, self.edges))

    def usage(self) -> tuple[float, float]:
        self.root.send("usage")
        cpu, moved = self.root.recv()
        return cpu, moved

    def window(self, behind: bool) -> None:
        """One version: all edges pull, push, wait for the next. ``behind``: half of each region's on the version before."""
        version = self.version
        self._all(lambda edge: edge.pull(version))

        def push(edge: Edge) -> None:
            late = behind and version > 0 and edge.index // REGIONS % 2
            edge.push(version + 1, version - 1 if late else version)

        self._all(push)
        self.version += 1
        self._all(lambda edge: edge.wait(self.version))

    def measure(self, windows: int, behind: bool) -> tuple[float, float]:
        """(CPU seconds, payload bytes) at the root for so many versions."""
        cpu, moved = self.usage()
        for _ in range(windows):
            self.window(behind)
        after_cpu, after_moved = self.usage()
        return after_cpu - cpu, after_moved - moved

    def close(self) -> None:
        for edge in self.edges:
            edge.news.close()
            edge.uplink.close()
        self.threads.shutdown()
        for pipe in (self.regions, self.root):
            if pipe is not None:
                pipe.send("stop")
        for process in self.processes:
            process.join()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--elements", type=int, default=2**22)
    arguments.add_argument("--windows", type=int, default=1)
    arguments.add_argument("--rounds", type=int, default=2)
    given = arguments.parse_args()
    ratios: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="fleetddp-root-traffic-") as folder:
        arms = {}
        for tree in (False, True):
            os.makedirs(f"{folder}/{tree}")
            arms[tree] = Arm(f"{folder}/{tree}", given.elements, tree)
            arms[tree].window(False)  # warm
        for _ in range(given.rounds):
            for behind in (False, True):
                (flat_cpu, flat_bytes), (tree_cpu, tree_bytes) = (
                    arms[tree].measure(given.windows, behind) for tree in (False, True)
                )
                ratios[behind].append((flat_bytes / tree_bytes, flat_cpu / tree_cpu))
                print(
                    f"{'two bases' if behind else 'one base '}: flat {flat_bytes / 2**20:.1f} MiB {flat_cpu:.2f} s, "
                    f"tree {tree_bytes / 2**20:.1f} MiB {tree_cpu:.2f} s",
                    flush=True,
                )
        for arm in arms.values():
            arm.close()
    figures = {}
    for behind, name in ((False, ""), (True, "_two_bases")):
        figures[f"bytes_flat_over_tree{name}"] = round(statistics.median(b for b, _ in ratios[behind]), 2)
        figures[f"cpu_flat_over_tree{name}"] = round(statistics.median(c for _, c in ratios[behind]), 2)
    print(json.dumps({"bench": "root_traffic", "figures": figures}))


if __name__ == "__main__":
    main()
