"""The plug of a region, or of the root above it, is pulled at every named moment; whatever survives, everything is settled once.

Root and region are the real ones, over files that lose what was not fsynced; members push again until they hear that an update is
settled, as real ones do. Where one loses power the other is killed at the same moment, and both start again. Two scripts:

- plain: two members below the region and one below the root, a version after another. The bytes must be those of a run that is
  not disturbed.
- entangled: an update that reaches the root by two ways, and one that is too stale when it gets there. What is merged when may
  depend on the crash; that each acknowledged update is merged in one version, or told to have expired, may not.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import pytest
import torch
from helpers.losing_files import LosingFiles
from helpers.trees import MemoryRegion

from fleetddp.common.clock import VirtualClock
from fleetddp.common.codecs import get
from fleetddp.common.config import parse
from fleetddp.common.errors import Refused, StorageError
from fleetddp.common.events import Heartbeat, Join
from fleetddp.common.journal import CRASH_POINTS, Journal
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.publish import Publisher
from fleetddp.common.region_journal import REGION_CRASH_POINTS, RegionJournal
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.update import Kind, Receipt, Slice, State, Tier, UpdateHeader, UpdateId

LAYOUT = Layout.of([("w", (3, 500)), ("b", (7,))], [("mean", (9,))])
GEOMETRY = Geometry(LAYOUT, get("int8"))
KEPT = {"root": 100, "region": 2}
CONFIG = parse(
    {
        "run": "r",
        "window": {"preset": "fedbuff", "quorum": 3},
        "outer": {"preset": "diloco"},
        "merge": {"staleness": {"max_staleness": 1}},
        "publish": "bfloat16",
        "coordinator": {"keep_versions": KEPT["root"]},
        "members": {"lease_s": 1e6, "heartbeat_s": 1.0},
        "region": {"codec": "int8", "window": {"preset": "fedbuff", "quorum": 2}, "keep_versions": KEPT["region"]},
    }
)


class Send(NamedTuple):
    """A member pushes its update number ``sequence``, on ``base``, to the root or the region."""

    node: str
    to: str
    sequence: int
    base: int

    @property
    def update_id(self) -> UpdateId:
        return UpdateId(self.node, 1, self.sequence)


PLAIN = [Send(node, to, n + 1, n) for n in range(3) for node, to in (("a", "region"), ("b", "region"), ("c", "root"))]
ENTANGLED = [
    *PLAIN[:3],
    Send("d", "root", 2, 1),
    Send("a", "region", 2, 1),
    Send("d", "region", 2, 1),  # the same update again: with a's in one partial
    Send("e", "region", 1, 0),  # waits in the region's window until it is two versions behind
    Send("c", "root", 2, 1),
    Send("a", "region", 3, 2),
    Send("b", "root", 3, 2),
    Send("c", "root", 3, 2),
]


class PlugPulled(BaseException):
    """A machine lost power. Not an Exception: nothing may catch it."""


class World:
    """What lives on through crashes: the disks, the clock, the members and what they were told."""

    def __init__(
        self,
        where: Path,
        stop: Callable[[str, str], bool] = lambda who, point: False,
        *,
        luck: random.Random | None = None,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self.where, self.stop, self.luck, self.ignored = where, stop, luck, ignored
        self.clock = VirtualClock(1000.0)
        self.lives = Counter[str]()
        self.passed: dict[str, list[str]] = {"root": [], "region": []}
        self.acknowledged: set[UpdateId] = set()
        self.told: dict[UpdateId, set[tuple[State, int]]] = defaultdict(set)
        self.payloads: dict[UpdateId, int] = {}
        self.fleets: dict[str, MemoryFleet] = {}
        self.journals: dict[str, Journal] = {}

    def run(self, script: list[Send]) -> None:
        """Until everything is settled; from the beginning after each crash, since members push again what is not settled."""
        for _ in range(60):
            try:
                self.boot()
                for send in script:
                    self.push(send)
                    self.settle()
                self.finish(script)
                return
            except PlugPulled:
                self.die()
        raise AssertionError("too many crashes")

    # ---- lives ----------------------------------------------------------------------------------------------------------------

    def folder(self, who: str) -> Path:
        return self.where / who / f"life{self.lives[who]}" / "journal"

    def open(self, who: str, kind: type[Any]) -> Any:
        folder, after = self.folder(who), self.where / who / f"life{self.lives[who] + 1}" / "journal"
        folder.parent.mkdir(parents=True, exist_ok=True)

        def at(point: str) -> None:
            self.passed[who].append(point)
            if self.stop(who, point):
                files.crash(after, self.luck)
                self.lives[who] += 1
                raise PlugPulled(f"{who} {point}")

        files = LosingFiles(
            folder, ignored=self.ignored if who == "region" else frozenset(), before=lambda operation: at(f"before:{operation}")
        )
        self.journals[who] = kind(folder, run="r", files=files, keep_versions=KEPT[who], at=at)
        return self.journals[who]

    def boot(self) -> None:
        root = self.open("root", Journal)
        if not root.versions():
            Publisher(root, CONFIG).found_weights(
                LAYOUT, lambda interval, out: out.copy_(torch.linspace(-1, 1, interval[1] - interval[0])), 999.0
            )
        self.fleets["root"] = MemoryFleet(CONFIG, self.clock, journal=root)
        region = self.fleets["region"] = MemoryRegion(
            CONFIG, self.clock, self.fleets["root"], "west", self.open("region", RegionJournal)
        )
        region.watch_pushes(self.note_payload)
        for node, to in {(send.node, send.to) for send in ENTANGLED} | {("b", "region")}:
            self.fleets[to].parent().join(Join(node=node, tier=Tier.EDGE, incarnation=1))
        self.settle()

    def die(self) -> None:
        """Both processes are gone."""
        for journal in self.journals.values():
            journal.at = lambda point: None
            journal.close()
        self.fleets.clear()
        self.journals.clear()

    def note_payload(self, update_id: UpdateId, payload: bytes) -> None:
        """A partial that was offered stays as it is."""
        digest = google_crc32c.value(payload)
        assert self.payloads.setdefault(update_id, digest) == digest

    # ---- members --------------------------------------------------------------------------------------------------------------

    def push(self, send: Send) -> None:
        update_id = send.update_id
        if self.told[update_id]:
            return
        header = UpdateHeader(
            update_id=update_id, kind=Kind.DELTA, tier=Tier.EDGE, base_version=send.base, codec="int8", layout=LAYOUT.fingerprint
        )
        seed = google_crc32c.value(str(update_id).encode())
        values = torch.randn(LAYOUT.elements, generator=torch.Generator().manual_seed(seed))
        payload = b"".join(bytes(bytes_of(GEOMETRY.encode(values[a:b], (a, b)))) for a, b in GEOMETRY.required())
        part = Slice(intervals=GEOMETRY.required(), samples=1.0 + send.sequence, digest=google_crc32c.value(payload))
        try:
            receipt = self.fleets[send.to].parent().push(header, part, memoryview(payload))
        except Refused as refusal:
            if not refusal.retry:
                raise
            return
        if receipt.state is State.REFUSED:
            assert update_id not in self.acknowledged, receipt
        self.hear(receipt)

    def hear(self, receipt: Receipt) -> None:
        if receipt.state is State.ACCEPTED:
            self.acknowledged.add(receipt.update_id)
        if receipt.state.final:
            self.told[receipt.update_id].add((receipt.state, receipt.version))

    def settle(self) -> None:
        """Everything that can happen now happens."""
        region = self.fleets["region"]
        assert isinstance(region, MemoryRegion)
        for _ in range(5):
            self.fleets["root"].tick()
            region.beat()

    def ask(self, who: str, update_id: UpdateId) -> Receipt:
        receipts = self.fleets[who].parent().heartbeat(Heartbeat(node=update_id.node, incarnation=1, open=(update_id,))).receipts
        return receipts[0]

    # ---- the end --------------------------------------------------------------------------------------------------------------

    def finish(self, script: list[Send]) -> None:
        """Ask until all is settled; c goes on sending, since a window may want more."""
        went = {send.update_id: send.to for send in script}
        extra = 10
        while open_ids := [i for i in went if not self.told[i] - {(State.REFUSED, -1)} and i in self.acknowledged]:
            for update_id in open_ids:
                self.hear(self.ask(went[update_id], update_id))
            if all(self.told[i] for i in open_ids):
                break
            assert extra < 30, f"not settled: {open_ids}"
            extra += 1
            self.push(Send("c", "root", extra, self.fleets["root"].driver.version))
            went[UpdateId("c", 1, extra)] = "root"
            self.clock.advance(1.0)
            self.settle()
        self.check(set(went))
        self.die()

    def check(self, sent: set[UpdateId]) -> None:
        """Each is in one version or told to have expired; everybody says the same; nothing is left over."""
        root, region = self.journals["root"], self.journals["region"]
        recovered = root.recover()
        merged = {i: version for i, version in recovered.merged.items() if i.node != "west"}
        versions = root.versions()
        assert [version.number for version in versions] == list(range(len(versions)))
        assert sum(version.updates for version in versions) == len(merged), "an update is in two versions"
        for update_id in sent:
            told = self.told[update_id]
            if update_id in merged:
                # of a version that the region no longer keeps, it may know only that the update was merged
                assert told <= {(State.MERGED, merged[update_id]), (State.MERGED, -1)}, (update_id, told, merged[update_id])
            elif update_id in self.acknowledged:
                assert told == {(State.EXPIRED, -1)}, (update_id, told)
        self.settle()
        assert region.recover().accepted == ()
        assert list((region.directory / "payloads").iterdir()) == []
        left = {file.suffix for file in (region.directory / "sealed").iterdir()}
        assert left <= {".residual", ".undone"}, left
        for version in region.versions():
            with region.read_version(version.number) as mine, root.read_version(version.number) as theirs:
                assert mine.info == theirs.info
                assert mine.read(0, mine.size) == theirs.read(0, theirs.size)
        self.digests = {version.number: version.digest for version in versions}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The run that is not disturbed."""
    world = World(tmp_path_factory.mktemp("plain"))
    world.run(PLAIN)
    assert set(world.digests) == {0, 1, 2, 3}
    assert world.acknowledged == {send.update_id for send in PLAIN}
    return world


@pytest.fixture(scope="module")
def entangled(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("entangled"))
    world.run(ENTANGLED)
    states = {i: {state for state, _ in told} for i, told in world.told.items()}
    assert states[UpdateId("e", 1, 1)] == {State.EXPIRED}
    assert states[UpdateId("d", 1, 2)] == {State.MERGED}
    return world


def at(who: str, point: str, occurrence: int) -> Callable[[str, str], bool]:
    counts: Counter[tuple[str, str]] = Counter()

    def stop(machine: str, passed: str) -> bool:
        counts[machine, passed] += 1
        return (machine, passed) == (who, point) and counts[who, point] == occurrence

    return stop


OF_A_REGION = [
    point for point in REGION_CRASH_POINTS + CRASH_POINTS if point in REGION_CRASH_POINTS or point.startswith("accept")
]


@pytest.mark.parametrize("point", OF_A_REGION)
def test_a_region_that_crashes_changes_no_byte(point: str, plain: World, tmp_path: Path) -> None:
    for occurrence in spread(plain.passed["region"].count(point), 2):
        world = World(tmp_path / str(occurrence), at("region", point, occurrence))
        world.run(PLAIN)
        assert sum(world.lives.values()) == 1, "the plug was pulled"
        assert world.digests == plain.digests


@pytest.mark.parametrize("point", REGION_CRASH_POINTS)
def test_a_region_that_crashes_settles_everything_once(point: str, entangled: World, tmp_path: Path) -> None:
    times = entangled.passed["region"].count(point)
    assert times > 0, f"the run never passes {point}"
    for occurrence in spread(times, 3):
        world = World(tmp_path / str(occurrence), at("region", point, occurrence))
        world.run(ENTANGLED)
        assert sum(world.lives.values()) == 1, "the plug was pulled"


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_root_that_crashes_settles_everything_once(point: str, entangled: World, tmp_path: Path) -> None:
    for occurrence in spread(entangled.passed["root"].count(point), 1):
        world = World(tmp_path / str(occurrence), at("root", point, occurrence))
        world.run(ENTANGLED)
        assert sum(world.lives.values()) == 1, "the plug was pulled"


@pytest.mark.parametrize("seed", range(8))
def test_crash_after_crash_of_either(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    world = World(tmp_path, luck=chance)
    world.stop = lambda who, point: chance.random() < 0.01 and sum(world.lives.values()) < 12
    world.run(ENTANGLED)
    assert sum(world.lives.values()) > 0


@pytest.mark.parametrize(
    ("ignored", "point"),
    [
        ("file:sealed", "seal:committed"),
        ("dir:sealed", "seal:committed"),
        ("file:versions", "adopt:committed"),
        ("dir:versions", "adopt:committed"),
    ],
)
def test_every_fsync_of_a_region_is_needed(ignored: str, point: str, tmp_path: Path) -> None:
    """Without it the same crash loses what was promised. (So the file layer does lose, and the tests above can fail.)"""
    world = World(tmp_path, at("region", point, 2), ignored=frozenset({ignored}))
    with pytest.raises((StorageError, AssertionError, FileNotFoundError, Refused)):
        world.run(PLAIN)


def spread(times: int, most: int) -> list[int]:
    """At most so many of the occurrences 1 to ``times``, the last among them."""
    return sorted({times - round(k * (times - 1) / max(1, most - 1)) for k in range(min(times, most))})
