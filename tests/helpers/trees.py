"""Trees of aggregators in this thread: a root and regions over disks in memory, moved by a virtual clock and by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common import config as settings
from fleetddp.common.clock import Clock, VirtualClock
from fleetddp.common.config import FleetConfig
from fleetddp.common.driver import Driver
from fleetddp.common.errors import FleetError, Reason, Refused, Unreachable
from fleetddp.common.events import Answered, Enrolled, Event, Heartbeat, Join, Told
from fleetddp.common.files import Files
from fleetddp.common.journal import Journal
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.publish import Publisher
from fleetddp.common.region_assembly import assemble_region, fetch, open_region_items
from fleetddp.common.region_items import RegionItems
from fleetddp.common.region_journal import RegionJournal
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport import Parent
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.update import Interval, Kind, Receipt, Slice, State, Tier, Update, UpdateHeader, UpdateId, Version
from fleetddp.edge.sim.memory_files import MemoryFiles

FOLDER = Path("/journal")


class InlineAbove:
    """A region's way to its parent, every call made at once. ``beat`` is what its session would do by itself."""

    def __init__(self, parent: Parent, journal: RegionJournal, node: str, clock: Clock) -> None:
        self.parent, self.journal, self.node, self.clock = parent, journal, node, clock
        self.ids: tuple[UpdateId, ...] = ()
        self.leaves = 0
        self.base = -1
        self.incarnation = 0
        self.member = False
        self.down = False
        self.pushed: list[Update] = []
        self.on_push: Callable[[UpdateId, bytes], None] = lambda update_id, payload: None
        self.feed: Callable[[Event], object] = lambda event: None
        self.items: RegionItems | None = None

    def push(self, update: Update, payload: Callable[[], bytes], done: Callable[[Any], None]) -> None:
        begun = self.clock.now()
        try:
            self._reach()
            self.pushed.append(update)
            data = payload()
            self.on_push(update.update_id, data)
            receipt = self.parent.push(update.header, update.slices[0], memoryview(data))
        except FleetError as error:
            done(error)
        else:
            done((receipt, self.clock.now() - begun))

    def fetch(self, version: int, done: Callable[[Any], None]) -> None:
        try:
            self._reach()
            found = fetch(self.parent, version, self.journal, self.items)
        except FleetError as error:
            done(error)
        else:
            done(found)

    def ask(self, ids: tuple[UpdateId, ...]) -> None:
        self.ids = ids

    def stand(self, version: int, leaves: int) -> None:
        self.base, self.leaves = version, leaves

    def report(self, metrics: Mapping[str, float], version: int) -> None:
        self.parent.heartbeat(
            Heartbeat(node=self.node, incarnation=self.incarnation, metrics=metrics, metrics_version=version, leaves=self.leaves)
        )

    def beat(self) -> None:
        """Join, or send a heartbeat; feed what the parent says. Nothing happens while the parent is away."""
        try:
            self._reach()
            self._beat()
        except Unreachable:
            pass
        except Refused as refusal:
            if refusal.reason is not Reason.UNKNOWN_NODE:
                raise
            self.member = False
            self._beat()

    def _beat(self) -> None:
        if not self.member:
            join = Join(node=self.node, tier=Tier.REGION, incarnation=self.incarnation, leaves=self.leaves, open=self.ids)
            joined = self.parent.join(join)
            self.member = True
            self._answers(joined.receipts)
            self.feed(Enrolled(joined=joined))
        beat = Heartbeat(node=self.node, incarnation=self.incarnation, base_version=self.base, open=self.ids, leaves=self.leaves)
        heard = self.parent.heartbeat(beat)
        self._answers(heard.receipts)
        self.feed(Told(version=heard.version, closes_at=heard.closes_at, finished=heard.finished))

    def _answers(self, receipts: tuple[Receipt, ...]) -> None:
        for receipt in receipts:
            self.feed(Answered(receipt=receipt))

    def _reach(self) -> None:
        if self.down:
            raise Unreachable("the parent is away")


class MemoryRegion(MemoryFleet):
    """A region in memory, below ``above``."""

    def __init__(self, config: FleetConfig, clock: Clock, above: MemoryFleet, node: str, journal: RegionJournal) -> None:
        self.node = node
        self.above = InlineAbove(above.parent(), journal, node, clock)
        super().__init__(config, clock, journal=journal)

    def _assemble(self, config: FleetConfig, clock: Clock) -> Driver:
        journal = self.above.journal
        entered = journal.enter(self.node)
        items = self.above.items = open_region_items(config, journal, entered, self.above.parent, clock)
        driver = assemble_region(
            config, journal, entered, self.above, clock=clock, host=self._host, telemetry=Telemetry(), items=items
        )
        self.above.incarnation = entered.incarnation
        self.above.feed = driver.handle
        return driver

    def beat(self) -> None:
        """What its session would do now and then."""
        with self.turn():
            self.above.beat()

    def watch_pushes(self, call: Callable[[UpdateId, bytes], None]) -> None:
        """Call with every partial that is pushed."""
        self.above.on_push = call

    @property
    def pushed(self) -> list[Update]:
        """What it has sent to its parent."""
        return self.above.pushed


class Tree:
    """A root, and regions by name; each has its own disk. ``settle`` lets everything happen that can happen now."""

    def __init__(self, layout: Layout, weights: Tensor | None = None, **sections: Any) -> None:
        self.clock = VirtualClock(1000.0)
        self.layout = layout
        self.first = torch.zeros(layout.elements) if weights is None else weights
        self.sections = {"run": "tree", "coordinator": {"keep_versions": 1000}, **sections}
        self.config = settings.parse(self.sections)
        self.disks: dict[str, Files] = {"": MemoryFiles()}
        journal = self.journal("", Journal)
        Publisher(journal, self.config).found_weights(
            layout, lambda interval, out: out.copy_(self.first[slice(*interval)]), self.clock.now()
        )
        journal.close()
        self.root = MemoryFleet(self.config, self.clock, journal=self.journal("", Journal))
        self.regions: dict[str, MemoryRegion] = {}
        self.leaves: dict[str, Leaf] = {}

    def journal(self, name: str, kind: type[Any]) -> Any:
        """Open the journal on this disk."""
        return kind(FOLDER, run="tree", files=self.disks.setdefault(name, MemoryFiles()), keep_versions=1000)

    def region(self, name: str, above: str = "", **region: Any) -> MemoryRegion:
        """Start a region, or start it again on its disk."""
        config = settings.parse({**self.sections, "region": region})
        parent = self.regions[above] if above else self.root
        self.regions[name] = MemoryRegion(config, self.clock, parent, name, self.journal(name, RegionJournal))
        self.settle()
        return self.regions[name]

    def restart_root(self) -> None:
        """As after a kill of its process; everybody finds it again."""
        self.root.stop()
        self.root = MemoryFleet(self.config, self.clock, journal=self.journal("", Journal))
        for region in self.regions.values():
            region.above.parent = self.root.parent()

    def leaf(self, name: str, above: str = "", tier: Tier = Tier.EDGE) -> Leaf:
        """A member, joined."""
        leaf = self.leaves[name] = Leaf(name, self.at(above), self.layout, tier)
        leaf.join()
        return leaf

    def at(self, above: str) -> MemoryFleet:
        """The aggregator of this name; the root's is empty."""
        return self.regions[above] if above else self.root

    def settle(self, rounds: int = 6) -> None:
        """Beat every region, again and again: what goes up and comes down has gone and come."""
        for _ in range(rounds):
            self.root.tick()
            for region in self.regions.values():
                region.beat()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.advance(seconds)
        self.settle()

    def weights(self, number: int, above: str = "") -> tuple[Version, bytes]:
        """A version as an aggregator serves it."""
        payload = bytearray()

        def sink(offset: int, data: memoryview) -> None:
            payload[offset : offset + len(data)] = data

        version = self.at(above).parent().pull(number, (), sink)
        return version, bytes(payload)


class Leaf:
    """A member of one aggregator at a time."""

    def __init__(self, node: str, parent: MemoryFleet, layout: Layout, tier: Tier) -> None:
        self.node, self.layout, self.tier = node, layout, tier
        self.parent = parent.parent()
        self.sequence = 0
        self.sent: dict[UpdateId, tuple[UpdateHeader, Slice, bytes]] = {}

    def join(self, *open_updates: UpdateId) -> tuple[Receipt, ...]:
        """Enter; returns the receipts of what is open."""
        return self.parent.join(Join(node=self.node, tier=self.tier, incarnation=1, open=open_updates)).receipts

    def move(self, parent: MemoryFleet) -> tuple[Receipt, ...]:
        """Fail over, with everything sent so far open."""
        self.parent = parent.parent()
        return self.join(*self.sent)

    def state(self, update_id: UpdateId) -> Receipt:
        """What the parent says of an update."""
        return self.parent.heartbeat(Heartbeat(node=self.node, incarnation=1, open=(update_id,))).receipts[0]

    def send(
        self,
        values: Tensor,
        *,
        base: int = 0,
        samples: float = 1.0,
        codec: str = "float32",
        kind: Kind = Kind.DELTA,
        covers: tuple[Interval, ...] = (),
    ) -> UpdateId:
        """Push a new update; it must be accepted. ``covers``: of ``values``, where it is of soft labels."""
        self.sequence += 1
        update_id = UpdateId(self.node, 1, self.sequence)
        header = UpdateHeader(
            update_id=update_id,
            kind=kind,
            tier=self.tier,
            base_version=base,
            codec=codec,
            layout=self.layout.fingerprint,
            covers=covers,
        )
        geometry = Geometry.of_update(header, self.layout)
        payload = b"".join(bytes(bytes_of(geometry.encode(values[a:b], (a, b)))) for a, b in geometry.required())
        part = Slice(intervals=geometry.required(), samples=samples, digest=google_crc32c.value(payload))
        self.sent[update_id] = (header, part, payload)
        receipt = self.again(update_id)
        assert receipt.state in (State.ACCEPTED, State.MERGED), receipt
        return update_id

    def again(self, update_id: UpdateId) -> Receipt:
        """Push an update (again)."""
        header, part, payload = self.sent[update_id]
        return self.parent.push(header, part, memoryview(payload))


def decoded(payload: bytes, layout: Layout, codec: str) -> Tensor:
    """f32[elements] of a version's payload."""
    geometry = Geometry(layout, codecs.get(codec))
    values = torch.zeros(layout.elements)
    for start, stop in geometry.required():
        first, last = geometry.byte_range((start, stop))
        values[start:stop] = geometry.decode(torch.frombuffer(bytearray(payload[first:last]), dtype=torch.uint8), (start, stop))
    return values
