"""The plug is pulled at every named moment, and before every operation on a file; whatever survives, the run ends the same.

The aggregator, the staging area, the journal and the publisher are the real ones; members push again until they hear that an
update is settled, as real ones do.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from helpers.losing_files import LosingFiles

from fleetddp.common.aggregator import Aggregator
from fleetddp.common.clock import VirtualClock
from fleetddp.common.codecs import get
from fleetddp.common.config import FleetConfig, parse
from fleetddp.common.driver import Driver
from fleetddp.common.errors import Refused, StorageError
from fleetddp.common.events import Heard, Heartbeat, Join, Offer, Proceed, SliceRejected, Tick
from fleetddp.common.host import Lane
from fleetddp.common.journal import CRASH_POINTS, Journal
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.publish import Publisher
from fleetddp.common.staging import Staging
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.update import Kind, Receipt, Slice, State, Tier, Update, UpdateHeader, UpdateId

VERSIONS = 4
LAYOUT = Layout.of([("w", (3, 500)), ("b", (7,))], [("mean", (9,))])
CONFIG = parse(
    {
        "window": {"preset": "fedbuff", "quorum": 2},
        "outer": {"preset": "diloco"},
        "merge": {"staleness": {"max_staleness": 0}},
        "publish": "bfloat16",
        "until": {"versions": VERSIONS},
        "coordinator": {"keep_versions": 2},
    }
)
SENT = (UpdateId("site", 1, 0), *(UpdateId(node, 1, sequence) for node in "ab" for sequence in range(1, VERSIONS + 1)))


class PlugPulled(BaseException):
    """The machine lost power. Not an Exception: nothing may catch it."""


class LostError(Exception):
    """The coordinator has forgotten what it acknowledged."""


class Inline:
    """A host that does disk work at once. What is due later, the test's ticks bring about."""

    def submit(self, lane: Lane, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            result = work()
        except Exception as error:
            result = error
        done(result)

    def later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


@dataclass
class World:
    """What lives on through crashes: the members, and what they were told."""

    where: Path
    ignored: frozenset[str] = frozenset()
    clock: VirtualClock = field(default_factory=lambda: VirtualClock(1000.0))
    acknowledged: set[UpdateId] = field(default_factory=set)
    digests: dict[int, int] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)  # crash points and file operations, in order
    lives: int = 0

    @property
    def folder(self) -> Path:
        return self.where / f"life{self.lives}" / "journal"

    def live(self, stop: Callable[[str], bool] = lambda point: False, luck: random.Random | None = None) -> bool:
        """Run the coordinator until the run is over (True), or until ``stop`` says of a moment that the plug is pulled."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        after = self.where / f"life{self.lives + 1}" / "journal"

        def at(point: str) -> None:
            self.passed.append(point)
            if stop(point):
                files.crash(after, luck)
                raise PlugPulled(point)

        files = LosingFiles(self.folder, ignored=self.ignored, before=lambda operation: at(f"before:{operation}"))
        journal = None
        try:
            journal = Journal(self.folder, run="r", files=files, keep_versions=CONFIG.coordinator.keep_versions, at=at)
            Fleet(self, journal).run()
        except PlugPulled:
            self.lives += 1
            return False
        finally:
            if journal is not None:
                journal.at = lambda point: None
                journal.close()
        return True

    def outcome(self) -> dict[str, Any]:
        """Everything that must not depend on crashes."""
        files = {path.name: path.read_bytes() for path in (self.folder / "versions").iterdir()}
        return {"digests": self.digests, "files": files}


class Fleet:
    """One life of the coordinator, and the members that talk to it: a site that brings the first weights, and three edges."""

    def __init__(self, world: World, journal: Journal) -> None:
        self.world, self.journal = world, journal
        config: FleetConfig = CONFIG
        self.staging = Staging(journal, config.limits)
        aggregator = Aggregator(config, journal.recover())
        self.driver = Driver(
            aggregator,
            self.staging,
            journal,
            Publisher(journal, config),
            clock=world.clock,
            host=Inline(),
            telemetry=Telemetry(),
        )
        self.aggregator = aggregator

    def run(self) -> None:
        self.driver.start()
        for node, tier in (("site", Tier.SITE), ("a", Tier.EDGE), ("b", Tier.EDGE), ("c", Tier.EDGE)):
            self.driver.handle(Join(node=node, tier=tier, incarnation=1))
        self._check_nothing_is_lost()
        for _ in range(100):
            self._see_versions()
            if self.aggregator.finished:
                return self._check_receipts()
            if self.driver.version < 0:
                self._push("site", 0, Kind.INIT)
            else:
                sequence = self.driver.version + 1
                if sequence == 2:
                    self._push("c", sequence, Kind.DELTA, spoiled=True)
                    self._withdraw(UpdateId("c", 1, 3))
                for node in ("a", "b"):
                    self._push(node, sequence, Kind.DELTA)
            self.world.clock.advance(1.0)
            self.driver.handle(Tick())
        raise AssertionError(f"the run stands still at version {self.driver.version}")

    def _see_versions(self) -> None:
        for version in self.journal.versions():
            assert self.world.digests.setdefault(version.number, version.digest) == version.digest
            with self.journal.read_version(version.number) as reader:
                assert google_crc32c.value(reader.read(0, reader.size)) == version.digest

    def _push(self, node: str, sequence: int, kind: Kind, spoiled: bool = False) -> None:
        """Offer an update in two streams, as a member does that has not heard of it being settled."""
        base = self.driver.version
        header = UpdateHeader(
            update_id=UpdateId(node, 1, sequence),
            kind=kind,
            tier=Tier.SITE if kind is Kind.INIT else Tier.EDGE,
            base_version=base,
            codec="float32" if kind is Kind.INIT else "int8",
            layout=LAYOUT.fingerprint,
            layout_spec=LAYOUT.to_json() if kind is Kind.INIT else b"",
        )
        geometry = Geometry(LAYOUT, get(header.codec))
        values = torch.randn(LAYOUT.elements, generator=torch.Generator().manual_seed(hash_of(node, sequence)))
        self.driver.wait(header.update_id, self._told)
        for intervals in geometry.split(2):
            data = [bytes(bytes_of(geometry.encode(values[start:stop], (start, stop)))) for start, stop in intervals]
            if spoiled:
                data = [b"\xff" * len(part) for part in data]  # a scale of 0xffffffff is a nan
            part = Slice(intervals=intervals, samples=1.0 + sequence, digest=google_crc32c.value(b"".join(data)))
            answer = self.driver.handle(Offer(header=header, slice=part))
            if isinstance(answer, Receipt):
                assert answer.state is (State.REFUSED if spoiled else answer.state)
                self._told(answer)
                continue
            assert isinstance(answer, Proceed), answer
            stream = self.staging.open(Offer(header=header, slice=part), self.driver.layout)
            try:
                for interval, piece in zip(intervals, data, strict=True):
                    stream.write(geometry.byte_range(interval)[0], google_crc32c.value(piece), piece)
            except Refused as refusal:
                if not spoiled:
                    raise
                self.driver.handle(SliceRejected(update_id=header.update_id, slice=part, refusal=refusal))
            else:
                assert not spoiled
                self.driver.handle(stream.finish())

    def _withdraw(self, update_id: UpdateId) -> None:
        """An update that a merge made stale while it was made durable: its row goes again, in this life or the next."""
        header = UpdateHeader(
            update_id=update_id, kind=Kind.DELTA, tier=Tier.EDGE, base_version=0, codec="int8", layout=LAYOUT.fingerprint
        )
        self.journal.stage(update_id, 4).write(0, b"late")
        update = Update(header=header, samples=1.0, squared_norm=1.0, payload_bytes=4, slices=())
        self.journal.accept(update, self.world.clock.now())
        self.staging.discard(update_id)

    def _told(self, receipt: Receipt) -> None:
        if receipt.state in (State.ACCEPTED, State.MERGED):
            self.world.acknowledged.add(receipt.update_id)

    def _state(self, update_id: UpdateId) -> Receipt:
        heard = self.driver.handle(Heartbeat(node=update_id.node, incarnation=1, open=(update_id,)))
        assert isinstance(heard, Heard)
        return heard.receipts[0]

    def _check_nothing_is_lost(self) -> None:
        for update_id in self.world.acknowledged:
            if self._state(update_id).state not in (State.ACCEPTED, State.MERGED):
                raise LostError(str(update_id))

    def _check_receipts(self) -> None:
        """Every update sent is merged, in the version it was meant for, and nothing of it is left over."""
        assert self.world.acknowledged <= set(SENT)
        for update_id in SENT:
            receipt = self._state(update_id)
            assert receipt.state is State.MERGED
            # Of a version that is no longer kept, all that is remembered is that the update was merged.
            assert receipt.version in (update_id.sequence, -1)
        recovered = self.journal.recover()
        assert recovered.accepted == ()
        assert recovered.decision is None
        assert list((self.journal.directory / "payloads").iterdir()) == []


def hash_of(node: str, sequence: int) -> int:
    return google_crc32c.value(f"{node}/{sequence}".encode())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The run that is not interrupted."""
    world = World(tmp_path_factory.mktemp("reference"))
    assert world.live()
    assert set(world.digests) == set(range(VERSIONS + 1))
    assert world.acknowledged == set(SENT)
    return world


def stop_at(point: str, occurrence: int) -> Callable[[str], bool]:
    counts: Counter[str] = Counter()

    def stop(passed: str) -> bool:
        counts[passed] += 1
        return passed == point and counts[passed] == occurrence

    return stop


AFTER_A_CRASH = "recover:file-removed"  # is passed only then


@pytest.mark.parametrize("point", [point for point in CRASH_POINTS if point != AFTER_A_CRASH])
def test_a_crash_at_a_named_point_changes_nothing(point: str, reference: World, tmp_path: Path) -> None:
    times = reference.passed.count(point)
    assert times > 0, f"the run never passes {point}"
    for occurrence in range(1, times + 1):
        world = World(tmp_path / str(occurrence))
        assert not world.live(stop_at(point, occurrence)), "the plug was not pulled"
        assert world.live()
        assert world.outcome() == reference.outcome()


def test_a_crash_while_cleaning_up_after_a_crash_changes_nothing(reference: World, tmp_path: Path) -> None:
    world = World(tmp_path)
    assert not world.live(stop_at("publish:directory-synced", 2))  # version 1 has its file and no row
    assert not world.live(stop_at(AFTER_A_CRASH, 1))
    assert world.live()
    assert world.outcome() == reference.outcome()


@pytest.mark.parametrize("operation", ["create", "pwrite", "fsync", "rename", "unlink", "fsync_dir"])
def test_a_crash_before_a_file_operation_changes_nothing(operation: str, reference: World, tmp_path: Path) -> None:
    # Every write of a merge is among these. One in three is tried, another third for each operation.
    times = reference.passed.count(f"before:{operation}")
    for occurrence in range(1 + len(operation) % 3, times + 1, 3):
        world = World(tmp_path / str(occurrence))
        assert not world.live(stop_at(f"before:{operation}", occurrence))
        assert world.live()
        assert world.outcome() == reference.outcome()


@pytest.mark.parametrize("seed", range(12))
def test_crash_after_crash_with_some_of_the_unsynced_surviving(seed: int, reference: World, tmp_path: Path) -> None:
    chance = random.Random(seed)
    world = World(tmp_path)
    while not world.live(lambda point: chance.random() < 0.02 and world.lives < 20, luck=chance):
        pass
    assert world.lives > 0
    assert world.outcome() == reference.outcome()


@pytest.mark.parametrize(
    ("ignored", "point", "loss"),
    [
        ("file:payloads", "accept:committed", StorageError),
        ("dir:payloads", "accept:committed", StorageError),
        ("file:versions", "publish:committed", StorageError),
        ("dir:versions", "publish:committed", StorageError),
        ("dir:.", "publish:committed", LostError),  # the database and all folders are gone: the run begins anew
        ("dir:..", "publish:committed", LostError),
    ],
)
def test_every_fsync_is_needed(ignored: str, point: str, loss: type[Exception], tmp_path: Path) -> None:
    """Without it the same crash loses what was promised. (So the file layer does lose, and the tests above can fail.)"""
    world = World(tmp_path, ignored=frozenset({ignored}))
    assert not world.live(stop_at(point, 3))
    with pytest.raises(loss):
        world.live()
