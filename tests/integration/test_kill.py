"""kill -9: of the coordinator at random moments, of members in the middle of a push; and a coordinator whose disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fleet import RunningCoordinator, fleet_config, free_port, on_port, running, write
from helpers.marks import ELEMENTS, GEOMETRY, HALF, Flat, found, push
from helpers.members import Member, Moments
from helpers.preloaded import Preloaded
from helpers.processes import commands, eventually
from helpers.settlement import check_settlement
from helpers.tasks import LineTask

from fleetddp.cloud import coordinator as coordinator_module
from fleetddp.common.config import FleetConfig, SecurityConfig
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import Decision, Heartbeat, Join
from fleetddp.common.files import Data, OsFile, OsFiles
from fleetddp.common.journal import Journal
from fleetddp.common.publish import save_init
from fleetddp.common.transport.transfers import PushTransfer
from fleetddp.common.transport.uplink import Patience, Uplink
from fleetddp.common.update import State, Tier, Update, UpdateId

O_NEW = os.O_RDWR | os.O_CREAT | os.O_TRUNC
KILLS = 10  # of each preset, and one more before the last start
MEMBERS = 4
BACK_S = 5.0  # until every member is back by itself
NO_DISCOUNT = {"staleness": {"max_staleness": 1000, "discount": {"kind": "constant"}}}


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Preloaded]:
    server = Preloaded()
    yield server
    server.close()


@pytest.fixture
def dial() -> Iterator[Callable[..., Uplink]]:
    with contextlib.ExitStack() as stack:

        def start(address: str, node: str, **patience: float) -> Uplink:
            uplink = Uplink(address, SecurityConfig(), node=node, patience=Patience(**patience))
            stack.callback(uplink.close)
            return uplink

        yield start


# ---- the coordinator is killed ------------------------------------------------------------------------------------------------


def fleet_of_marks(folder: Path, **sections: Any) -> FleetConfig:
    """Starts from zeros, keeps every version, merges by plain averaging; on a port that outlives the process."""
    save_init(Flat(), folder / "init.safetensors")
    config = fleet_config(
        folder,
        start={"bootstrap": "file", "file": str(folder / "init.safetensors")},
        coordinator={"keep_versions": 1_000_000},
        members={"heartbeat_s": 0.3, "lease_s": 20.0},
        merge=NO_DISCOUNT,
        **sections,
    )
    return on_port(config, free_port())


def spin(seconds: float) -> None:
    over = time.perf_counter() + seconds
    while time.perf_counter() < over:
        pass


@contextlib.contextmanager
def members(config: FleetConfig, moments: Moments, seed: int, **options: bool) -> Iterator[list[Member]]:
    all_of_them = [Member(index, config.coordinator.address, moments, seed=seed, **options) for index in range(MEMBERS)]
    for member in all_of_them:
        member.start()
    try:
        yield all_of_them
    finally:
        for member in all_of_them:
            member.close()


WINDOWS = {
    "async": {"preset": "async", "quorum": None, "require": None, "grace_s": None, "min_updates": None, "deadline_s": None},
    "fedbuff": {"preset": "fedbuff", "quorum": 3, "grace_s": None, "min_updates": 1, "deadline_s": 1.0},
}


@pytest.mark.parametrize("preset", sorted(WINDOWS))
def test_a_coordinator_killed_at_random_moments_settles_everything_once(
    tmp_path: Path, preloaded: Preloaded, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = 2
    rng = random.Random(f"{seed} {preset}")
    config = fleet_of_marks(tmp_path, window=WINDOWS[preset])
    path, log = write(config, tmp_path), tmp_path / "log"
    moments = Moments()
    monkeypatch.setattr(PushTransfer, "chunks", moments.counting(PushTransfer))
    coordinator = preloaded.start("coordinator", log, config=path)
    with members(config, moments, seed) as fleet, commands() as command:
        for _ in range(KILLS):
            kind = rng.choice(["start", "chunk", "chunk", "pulled", "acknowledged", "acknowledged", "settled"])
            if kind == "start":
                spin(rng.uniform(0, 0.1))  # while it recovers
            else:
                coordinator.wait_for("listening")
                moments.wait(kind, rng.randint(1, 8))
                spin(rng.uniform(0, 0.02))
            coordinator.kill()
            coordinator = preloaded.start("coordinator", log, config=path)
        moments.wait("settled", 2 * MEMBERS)
        coordinator.kill()
        last = command("coordinator", path)
        last.wait_for("listens on port")
        moments.wait("settled", 2 * MEMBERS)
        for member in fleet:
            member.finish()
        assert last.end(signal.SIGTERM) == 0
        versions = check_settlement(config, fleet)
    print(f"\n{preset}: {sum(len(m.pushed) for m in fleet)} updates in {versions} versions through {KILLS + 1} kills")
    assert versions > KILLS


def test_members_are_back_by_themselves_within_seconds(tmp_path: Path, preloaded: Preloaded) -> None:
    config = fleet_of_marks(tmp_path, window=WINDOWS["fedbuff"])
    path, log = write(config, tmp_path), tmp_path / "log"
    moments = Moments()
    coordinator = preloaded.start("coordinator", log, config=path)
    took = []
    with members(config, moments, seed=0, patient=True) as fleet:
        for outage_s in (0.0, 0.5, 2.0):
            moments.wait("settled", MEMBERS)
            coordinator.kill()
            killed = time.monotonic()
            over = killed + outage_s
            eventually(lambda over=over: time.monotonic() >= over, "the outage is over")
            coordinator = preloaded.start("coordinator", log, config=path)
            coordinator.wait_for("listening")
            back = time.monotonic()
            eventually(
                lambda killed=killed: all(member.uplink.joined_at[0] > killed for member in fleet), "they join again", BACK_S
            )
            took.append(max(member.uplink.joined_at[1] for member in fleet) - back)
            moments.wait("settled", 1)
        for member in fleet:
            member.finish()
        assert coordinator.end(signal.SIGTERM) == 0
        check_settlement(config, fleet)
    print(f"\nall {MEMBERS} members back after {', '.join(f'{max(0.0, s):.2f}' for s in took)} s")


# ---- members are killed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        ({"quorum": 2, "grace_s": 1.0, "deadline_s": 60.0}, "the grace of 1 s is over, 1 still on their way"),
        ({"quorum": 3, "grace_s": 60.0, "deadline_s": 5.0}, "deadline with 2 updates of 3 members expected"),
    ],
    ids=["grace", "deadline"],
)
def test_a_member_killed_in_mid_push_delays_its_window_no_further(
    tmp_path: Path,
    preloaded: Preloaded,
    dial: Callable[..., Uplink],
    monkeypatch: pytest.MonkeyPatch,
    window: dict[str, Any],
    reason: str,
) -> None:
    accepted, opened, decisions = record(monkeypatch)
    with running(fleet_config(tmp_path, window=window)) as coordinator:
        uplinks = {node: dial(coordinator.address, node) for node in ("a", "b")}
        for node, uplink in uplinks.items():
            uplink.join(Join(node=node, tier=Tier.SITE, incarnation=1))
        victim = preloaded.start("half_pusher", tmp_path / "log", address=coordinator.address, node="victim")
        victim.wait_for("joined")
        found(uplinks["a"], UpdateId("a", 1, 1))  # the first window opens with it
        victim.wait_for("half")
        push(uplinks["a"], UpdateId("a", 1, 2), base_version=0, mark=1, samples=1.0, tier=Tier.SITE)
        eventually(lambda: coordinator.status()["counters"]["bytes_in"] > 2 * 4 * ELEMENTS, "half of the third update is there")
        victim.kill()
        assert (
            push(uplinks["b"], UpdateId("b", 1, 1), base_version=0, mark=2, samples=1.0, tier=Tier.SITE).state is State.ACCEPTED
        )
        assert next(news.version for news in uplinks["a"].watch("a", 1, 0) if news.version > 0) == 1
        status = coordinator.status()
        assert status["window"]["opened_at"] == decisions[0].at
    assert reason in status["versions"][-1]["reason"]
    assert (status["versions"][-1]["updates"], len(decisions)) == (2, 1)
    if window["quorum"] == 2:
        since, limit = accepted[UpdateId("b", 1, 1)], window["grace_s"]
    else:
        since, limit = opened[0], window["deadline_s"]
    assert limit <= decisions[0].at - since < limit + 2.0  # far from the 60 s of the other bound, and from its lease of 30 s


def record(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[UpdateId, float], list[float], list[Decision]]:
    """What the journal is given from now on: when each update was complete, when the first window opened, the decisions."""
    accepted: dict[UpdateId, float] = {}
    opened: list[float] = []
    decisions: list[Decision] = []
    accept, open_, decide = Journal.accept, Journal.opened, Journal.decide

    def accept_too(self: Journal, update: Update, at: float) -> None:
        accepted[update.update_id] = at
        accept(self, update, at)

    def opened_too(self: Journal, at: float) -> None:
        opened.append(at)
        open_(self, at)

    def decide_too(self: Journal, decision: Decision) -> None:
        decisions.append(decision)
        decide(self, decision)

    monkeypatch.setattr(Journal, "accept", accept_too)
    monkeypatch.setattr(Journal, "opened", opened_too)
    monkeypatch.setattr(Journal, "decide", decide_too)
    return accepted, opened, decisions


WIDE = 128 * 1024  # LineTask's weights then are two chunks
STEPS, RATE = 3, 0.1


@pytest.mark.parametrize("moment", ["half", "acknowledged"])
def test_an_edge_killed_in_its_push_comes_back_and_is_merged_once(tmp_path: Path, preloaded: Preloaded, moment: str) -> None:
    task = LineTask(wide=WIDE)
    save_init(task.model(), tmp_path / "init.safetensors")
    config = fleet_config(
        tmp_path,
        start={"bootstrap": "file", "file": str(tmp_path / "init.safetensors")},
        task={"target": "helpers.tasks:LineTask", "args": {"wide": WIDE, "lr": RATE * WIDE}},  # the loss is a mean over outputs
        edge={"steps": STEPS, "batch_size": 8, "state": str(tmp_path / "edges")},
        members={"heartbeat_s": 0.3, "lease_s": 20.0},
        window={"quorum": 1, "deadline_s": 600.0},
        until={"versions": 2},
        coordinator={"keep_versions": 10},
    )
    with running(config) as coordinator:
        path, log = write(on_port(config, coordinator.coordinator.port), tmp_path), tmp_path / "log"
        first = preloaded.start("edge", log, config=path, name="pi", stuck=moment)
        first.wait_for(moment)
        if moment == "half":
            eventually(lambda: coordinator.status()["counters"]["bytes_in"] > 0, "half of the update is there")
        first.kill()
        back = preloaded.start("edge", log, config=path, name="pi")
        assert back.end() == 0, log.read_text()
        counters = coordinator.status()["counters"]
    assert (counters["accepted"], counters["merged"], counters["expired"]) == (2, 2, 0)
    assert counters["duplicates"] <= (moment == "acknowledged")  # if it pushed again before it was told
    journal = Journal(config.coordinator.journal, run=config.run)
    try:
        merged = journal.recover().merged
        assert [(i.node, i.sequence, version) for i, version in sorted(merged.items())] == [("pi", 1, 1), ("pi", 2, 2)]
        older, newer = sorted(merged)
        assert older.incarnation < newer.incarnation
        for number in (1, 2):
            with journal.read_version(number) as reader:
                weights = torch.frombuffer(bytearray(reader.read(0, reader.info.payload_bytes)), dtype=torch.float32)
            expected = trained(task, number * STEPS).expand(WIDE, 2).flatten()
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-4)
    finally:
        journal.close()


def trained(task: LineTask, steps: int) -> torch.Tensor:
    """Where so many full-batch steps lead one output, by hand."""
    w = torch.full((2, 1), 0.5)
    for _ in range(steps):
        w -= RATE * 2 * task.x.T @ (task.x @ w - task.y[:, :1]) / len(task.x)
    return w.T


# ---- the coordinator's disk is full -------------------------------------------------------------------------------------------


class FullFiles(OsFiles):
    """Real files in a folder whose disk is full while ``refused`` names the operation and the folder."""

    refused: tuple[str, str] | None = None

    def check(self, operation: str, path: Path) -> None:
        if self.refused == (operation, path.parent.name):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def create(self, path: Path) -> OsFile:
        self.check("create", path)
        return FullFile(self, path)


class FullFile(OsFile):
    def __init__(self, files: FullFiles, path: Path) -> None:
        super().__init__(path, O_NEW)
        self._files, self._at = files, path

    def pwrite(self, data: Data, offset: int) -> None:
        self._files.check("pwrite", self._at)
        super().pwrite(data, offset)

    def fsync(self) -> None:
        self._files.check("fsync", self._at)
        super().fsync()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullFiles:
    """The disk of every coordinator of this test."""
    files = FullFiles()

    def open_journal(config: FleetConfig) -> Journal:
        return Journal(config.coordinator.journal, run=config.run, files=files, keep_versions=10)

    monkeypatch.setattr(coordinator_module, "open_journal", open_journal)
    return files


def joined(coordinator: RunningCoordinator, uplink: Uplink) -> None:
    """A member, and version 0."""
    uplink.join(Join(node="a", tier=Tier.SITE, incarnation=1))
    found(uplink, UpdateId("a", 1, 1))
    eventually(lambda: coordinator.status()["version"] == 0, "version 0")


@pytest.mark.parametrize("operation", ["create", "pwrite", "fsync", "commit"])
def test_a_full_disk_refuses_pushes_until_there_is_space(
    tmp_path: Path, dial: Callable[..., Uplink], disk: FullFiles, operation: str
) -> None:
    with running(fleet_config(tmp_path, window={"quorum": 1}, merge=NO_DISCOUNT)) as coordinator:
        uplink = dial(coordinator.address, "a", give_up_s=0.0)
        joined(coordinator, uplink)
        database = coordinator.coordinator.driver.journal._db
        if operation == "commit":  # SQLite does not write through ``Files``
            database.execute("PRAGMA query_only = 1")
        else:
            disk.refused = (operation, "payloads")
        for _ in range(3):
            with pytest.raises(Refused) as refused:
                push(uplink, UpdateId("a", 1, 2), base_version=0, mark=1, samples=1.0, tier=Tier.SITE)
            assert (refused.value.reason, refused.value.retry) == (Reason.STORAGE, True)
        status = coordinator.status()
        assert (status["version"], status["window"]["arrived"], status["counters"]["accepted"]) == (0, 0, 0)
        assert status["counters"]["refused"].keys() == {"STORAGE"}
        disk.refused = None
        database.execute("PRAGMA query_only = 0")
        receipt = push(uplink, UpdateId("a", 1, 2), base_version=0, mark=1, samples=1.0, tier=Tier.SITE)
        assert (receipt.state, receipt.duplicate) == (State.ACCEPTED, False)
        eventually(lambda: coordinator.status()["version"] == 1, "version 1")
        assert weights_of(uplink, 1) == {1: -1.0, HALF + 1: -1.0}


def weights_of(uplink: Uplink, version: int) -> dict[int, float]:
    """The elements that are not 0."""
    payload = bytearray(GEOMETRY.payload_bytes)

    def sink(offset: int, data: memoryview) -> None:
        payload[offset : offset + len(data)] = data

    uplink.pull(version, (), sink)
    weights = np.frombuffer(payload, np.float32)
    return {int(index): float(weights[index]) for index in np.flatnonzero(weights)}


@pytest.mark.parametrize("operation", ["create", "pwrite", "fsync"])
def test_a_version_that_found_no_space_is_made_once_there_is_some(
    tmp_path: Path, dial: Callable[..., Uplink], disk: FullFiles, operation: str
) -> None:
    with running(fleet_config(tmp_path, window={"quorum": 1}, merge=NO_DISCOUNT)) as coordinator:
        uplink = dial(coordinator.address, "a", give_up_s=20.0)
        joined(coordinator, uplink)
        disk.refused = (operation, "versions")
        update_ids = [UpdateId("a", 1, 2), UpdateId("a", 1, 3)]
        assert push(uplink, update_ids[0], base_version=0, mark=1, samples=1.0, tier=Tier.SITE).state is State.ACCEPTED
        eventually(lambda: coordinator.status()["counters"]["failed"] > 0, "the merge has failed once")
        assert (
            push(uplink, update_ids[1], base_version=0, mark=2, samples=1.0, tier=Tier.SITE).state is State.ACCEPTED
        )  # the run goes on
        assert coordinator.status()["version"] == 0
        assert weights_of(uplink, 0) == {}
        disk.refused = None
        eventually(lambda: coordinator.status()["version"] == 2, "both versions")
        assert weights_of(uplink, 2) == {1: -1.0, HALF + 1: -1.0, 2: -1.0, HALF + 2: -1.0}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where the test may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_coordinator_lives_through_a_disk_that_is_really_full(
    tmp_path: Path, preloaded: Preloaded, dial: Callable[..., Uplink], tiny_disk: Path
) -> None:
    config = on_port(
        fleet_config(tiny_disk, window={"quorum": 1}, merge=NO_DISCOUNT, coordinator={"keep_versions": 1}), free_port()
    )
    coordinator = preloaded.start("coordinator", tmp_path / "log", config=write(config, tmp_path))
    uplink, hasty = (dial(config.coordinator.address, "a", give_up_s=give_up_s) for give_up_s in (20.0, 0.0))
    coordinator.wait_for("listening")
    uplink.join(Join(node="a", tier=Tier.SITE, incarnation=1))
    found(uplink, UpdateId("a", 1, 1))
    eventually(lambda: uplink.status()["version"] == 0, "version 0")
    ballast = tiny_disk / "ballast"
    fill(ballast)
    for _ in range(3):
        with pytest.raises(Refused, match="No space left on device") as refused:
            push(hasty, UpdateId("a", 1, 2), base_version=0, mark=1, samples=1.0, tier=Tier.SITE)
        assert refused.value.reason is Reason.STORAGE
    assert uplink.heartbeat(Heartbeat(node="a", incarnation=1)).version == 0
    assert weights_of(uplink, 0) == {}
    os.truncate(ballast, ballast.stat().st_size - GEOMETRY.payload_bytes - 256 * 1024)  # room for the update, not for its version
    assert push(uplink, UpdateId("a", 1, 2), base_version=0, mark=1, samples=1.0, tier=Tier.SITE).state is State.ACCEPTED
    eventually(lambda: uplink.status()["counters"]["failed"] > 0, "the merge has failed once")
    assert uplink.status()["version"] == 0
    coordinator.kill()
    coordinator = preloaded.start("coordinator", tmp_path / "log", config=write(config, tmp_path))
    coordinator.wait_for("listening")
    eventually(lambda: uplink.status()["counters"]["failed"] > 0, "it has failed again")
    ballast.unlink()
    eventually(lambda: uplink.status()["version"] == 1, "version 1")
    assert weights_of(uplink, 1) == {1: -1.0, HALF + 1: -1.0}
    assert coordinator.end(signal.SIGTERM) == 0


def fill(file: Path) -> None:
    """Until nothing more can be written to its disk."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
