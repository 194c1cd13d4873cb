"""The coordinator as a whole: what it takes up after a restart, where version 0 comes from, how it ends, what it shows."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from helpers.fleet import RunningCoordinator, fleet_config, on_port, running
from helpers.models import wide
from helpers.processes import eventually

from fleetddp.common import config as settings
from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import ConfigError, Reason, Refused, StorageError, Unreachable
from fleetddp.common.events import Heartbeat, Join
from fleetddp.common.layout import Layout
from fleetddp.common.publish import save_init
from fleetddp.common.transport.uplink import Uplink
from fleetddp.common.update import Kind, Receipt, Slice, State, Tier, UpdateHeader, UpdateId

MODULE = wide()
LAYOUT = Layout.from_module(MODULE)
WEIGHTS = LAYOUT.read(MODULE)


class Member:
    """One site over an uplink."""

    def __init__(self, coordinator: RunningCoordinator, node: str) -> None:
        self.node, self.sequence = node, 0
        self.uplink = Uplink(coordinator.address, SecurityConfig(), node=node)

    def join(self) -> Any:
        return self.uplink.join(Join(node=self.node, tier=Tier.SITE, incarnation=1))

    def push(self, vector: torch.Tensor, *, base: int = 0, samples: float = 1.0, sequence: int | None = None) -> Receipt:
        """A delta, or with ``base`` -1 the first weights."""
        self.sequence = self.sequence + 1 if sequence is None else sequence
        payload = vector.numpy().tobytes()
        header = UpdateHeader(
            update_id=UpdateId(self.node, 1, self.sequence),
            kind=Kind.INIT if base < 0 else Kind.DELTA,
            tier=Tier.SITE,
            base_version=base,
            codec="float32",
            layout=LAYOUT.fingerprint,
            layout_spec=LAYOUT.to_json() if base < 0 else b"",
        )
        part = Slice(intervals=((0, LAYOUT.elements),), samples=samples, digest=google_crc32c.value(payload))
        return self.uplink.push(header, part, memoryview(payload))

    def reached(self, version: int) -> None:
        """Wait for a version."""
        for news in self.uplink.watch(self.node, 1, -1):
            if news.version >= version:
                return

    def pulled(self, version: int) -> torch.Tensor:
        data = bytearray(4 * LAYOUT.elements)

        def sink(offset: int, chunk: memoryview) -> None:
            data[offset : offset + len(chunk)] = chunk

        self.uplink.pull(version, (), sink)
        return torch.frombuffer(data, dtype=torch.float32)


@pytest.fixture
def enter() -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def start(coordinator: RunningCoordinator, node: str) -> Member:
        members.append(Member(coordinator, node))
        members[-1].join()
        return members[-1]

    yield start
    for member in members:
        member.uplink.close()


def test_a_restart_keeps_what_was_accepted_and_forgets_nothing_it_promised(tmp_path: Path, enter: Callable[..., Member]) -> None:
    config = fleet_config(tmp_path, window={"quorum": 2, "min_updates": 2})
    first, second = torch.full((LAYOUT.elements,), 0.5), torch.full((LAYOUT.elements,), -0.25)
    with running(config) as coordinator:
        a = enter(coordinator, "a")
        a.push(WEIGHTS, base=-1)
        a.reached(0)
        assert a.push(first, samples=3.0).state is State.ACCEPTED
        opened_at = coordinator.status()["window"]["opened_at"]
    with running(config) as coordinator:
        assert coordinator.status()["window"]["opened_at"] == opened_at
        stranger = Uplink(coordinator.address, SecurityConfig(), node="a")
        with pytest.raises(Refused) as refused:
            stranger.heartbeat(Heartbeat(node="a", incarnation=1))
        assert refused.value.reason is Reason.UNKNOWN_NODE
        stranger.close()
        a, b = enter(coordinator, "a"), enter(coordinator, "b")
        again = a.push(first, samples=3.0, sequence=2)
        assert (again.state, again.duplicate) == (State.ACCEPTED, True)
        b.push(second, samples=1.0)
        b.reached(1)
        expected = WEIGHTS - (3 * first + second) / 4
        torch.testing.assert_close(b.pulled(1), expected, rtol=0, atol=1e-7)
        assert a.push(first, samples=3.0, sequence=2).state is State.MERGED
        made = b.pulled(1)
    with running(config) as coordinator:
        a = enter(coordinator, "a")
        assert torch.equal(a.pulled(1), made)
        assert torch.equal(a.pulled(0), WEIGHTS)
        receipt = a.push(first, samples=3.0, sequence=2)
        assert (receipt.state, receipt.version, receipt.duplicate) == (State.MERGED, 1, True)
        assert [v["number"] for v in coordinator.status()["versions"]] == [0, 1]


def test_version_0_from_a_file(tmp_path: Path, enter: Callable[..., Member]) -> None:
    save_init(MODULE, tmp_path / "init.safetensors")
    config = fleet_config(tmp_path, start={"bootstrap": "file", "file": str(tmp_path / "init.safetensors")})
    with running(config) as coordinator:
        member = enter(coordinator, "a")
        joined = member.join()
        assert (joined.version, joined.wants_init, joined.layout) == (0, False, LAYOUT.fingerprint)
        assert torch.equal(member.pulled(0), WEIGHTS)
        member.push(torch.ones(LAYOUT.elements))
        member.reached(1)
    with running(config) as coordinator:  # the file is read once in a run
        assert coordinator.status()["version"] == 1


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    def start(config: settings.FleetConfig) -> None:
        with running(config):
            pass

    config = fleet_config(tmp_path)
    with pytest.raises(ConfigError, match="absent"):
        start(fleet_config(tmp_path / "other", start={"bootstrap": "file", "file": str(tmp_path / "absent")}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            start(on_port(config, port))
    with running(config), pytest.raises(StorageError, match="journal"):
        start(config)
    with pytest.raises(ConfigError, match="is the journal of run 'test', not of 'another'"):
        start(config.model_copy(update={"run": "another"}))
    start(config)  # none of them left anything behind


def test_a_finished_run_waits_for_its_members_to_leave(tmp_path: Path, enter: Callable[..., Member]) -> None:
    config = fleet_config(tmp_path, until={"versions": 1}, members={"heartbeat_s": 0.05, "lease_s": 0.5})
    with running(config) as coordinator:
        member = enter(coordinator, "a")
        ended = coordinator.begin(coordinator.coordinator.until_finished())
        member.push(WEIGHTS, base=-1)
        member.reached(0)
        member.push(torch.ones(LAYOUT.elements))
        member.reached(1)
        heard = member.uplink.heartbeat(Heartbeat(node="a", incarnation=1, base_version=1))
        assert heard.finished == "version 1 is published"
        assert not ended.done()
        member.uplink.leave("a", 1)
        ended.result(5.0)
    with running(config) as coordinator:  # started again, it stays a while for those who have not heard
        assert enter(coordinator, "a").join().finished == "version 1 is published"
        coordinator.begin(coordinator.coordinator.until_finished()).result(10.0)
        assert coordinator.status()["version"] == 1


def test_members_and_counters_are_shown(tmp_path: Path, enter: Callable[..., Member]) -> None:
    with running(fleet_config(tmp_path)) as coordinator:
        a, b = enter(coordinator, "a"), enter(coordinator, "b")
        a.push(WEIGHTS, base=-1)
        a.reached(0)
        a.push(torch.ones(LAYOUT.elements))
        a.reached(1)
        bad = b.push(torch.full((LAYOUT.elements,), float("nan")))
        assert (bad.state, bad.reason) == (State.REFUSED, "NOT_FINITE")
        a.pulled(1)
        status = a.uplink.status()
        size = 4 * LAYOUT.elements
        assert (status["run"], status["version"], status["finished"]) == ("test", 1, "")
        shown = [(m["node"], m["tier"], m["live"], m["incarnation"], m["updates"], m["refused"]) for m in status["members"]]
        assert shown == [("a", "site", True, 1, 1, 0), ("b", "site", True, 1, 0, 1)]
        counters = {key: status["counters"][key] for key in ("accepted", "merged", "refused", "failed")}
        assert counters == {"accepted": 1, "merged": 1, "refused": {"NOT_FINITE": 1}, "failed": 0}
        assert status["counters"]["bytes_in"] == 2 * size  # the chunk with NaN was not taken
        assert status["counters"]["bytes_out"] >= size
        assert [(v["number"], v["updates"], bool(v["reason"])) for v in status["versions"]] == [(0, 0, True), (1, 1, True)]
        assert status["window"]["expected"] == 1  # nobody waits for b: its update was bad


def test_prometheus_reads_the_counters(tmp_path: Path, enter: Callable[..., Member]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def scraped() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = [line.split(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    with running(fleet_config(tmp_path, coordinator={"metrics_port": port})) as coordinator:
        assert scraped()["fleetddp_version"] == -1
        member = enter(coordinator, "a")
        member.push(WEIGHTS, base=-1)
        member.reached(0)
        member.push(torch.full((LAYOUT.elements,), float("inf")))
        metrics = scraped()
        assert metrics["fleetddp_version"] == 0
        assert metrics['fleetddp_refused_total{reason="NOT_FINITE"}'] == 1
        assert metrics['fleetddp_events_total{what="joined"}'] == 1
        assert metrics["fleetddp_received_bytes_total"] == 4 * LAYOUT.elements
        with (
            pytest.raises(ConfigError, match=f"cannot listen on {port}"),
            running(fleet_config(tmp_path / "other", coordinator={"metrics_port": port})),
        ):
            pass


def test_a_stop_ends_open_calls_at_once(tmp_path: Path, enter: Callable[..., Member]) -> None:
    with running(fleet_config(tmp_path)) as coordinator:
        member = enter(coordinator, "a")
        member.push(WEIGHTS, base=-1)
        news = member.uplink.watch("a", 1, -1)
        next(news)
        eventually(lambda: coordinator.status()["version"] == 0, "version 0")
    with pytest.raises(Unreachable):
        list(news)
