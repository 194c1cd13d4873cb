"""``timing`` mode: nothing is trained and no byte is moved; sizes, times and decisions are those of the real thing.

The driver and its aggregator are the real ones. What they rest on is replaced: a journal that remembers facts, a staging area
that believes every slice to be whole, a publisher that makes versions without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType

from fleetddp.common import codecs
from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import Reason, Refused, StorageError
from fleetddp.common.events import Decision, Offer, SliceStaged
from fleetddp.common.files import Data
from fleetddp.common.journal import Journal, VersionReader
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.publish import Publisher
from fleetddp.common.recovered import Recovered
from fleetddp.common.staging import Staging, Stream
from fleetddp.common.update import Kind, Slice, Update, UpdateId, Version
from fleetddp.edge.sim.learning import NO_BYTES, Parcel, Unit, Weights

NORM = 1.0  # of every update


class FactsJournal(Journal):
    """The rows of a journal in memory, without payloads. All of it is durable at once."""

    def __init__(self, run: str, keep_versions: int) -> None:
        self.run = run
        self._keep = keep_versions
        self._facts = Recovered.empty(run)
        self._accepted: dict[UpdateId, Update] = {}
        self._kept: dict[int, tuple[Version, tuple[UpdateId, ...]]] = {}  # by number, with the ids merged into it
        self._high_water: dict[tuple[str, int], int] = {}

    @property
    def layout(self) -> Layout:
        """The run's; there must be a version."""
        assert self._facts.layout is not None
        return self._facts.layout

    def recover(self) -> Recovered:
        """See ``Journal``."""
        return replace(
            self._facts,
            accepted=tuple(self._accepted.values()),
            high_water=dict(self._high_water),
            merged={update_id: number for number, (_, ids) in self._kept.items() for update_id in ids},
        )

    def accept(self, update: Update, at: float) -> None:
        """See ``Journal``."""
        self._accepted[update.update_id] = update

    def discard(self, update_id: UpdateId) -> None:
        """See ``Journal``."""
        self._accepted.pop(update_id, None)

    def update(self, update_id: UpdateId) -> Update:
        """See ``Journal``."""
        if update_id not in self._accepted:
            raise StorageError(f"the journal in memory holds no accepted update {update_id}")
        return self._accepted[update_id]

    def opened(self, at: float) -> None:
        """See ``Journal``."""
        self._facts = replace(self._facts, window_opened_at=at)

    def decide(self, decision: Decision) -> None:
        """See ``Journal``."""
        self._facts = replace(self._facts, decision=decision, window_opened_at=decision.at)

    def sweep(self) -> None:
        """There are no files."""

    def ended(self, reason: str) -> None:
        """See ``Journal``."""
        self._facts = replace(self._facts, finished=reason)

    def settle(self, version: Version, layout: Layout, ids: tuple[UpdateId, ...]) -> None:
        """A version is made, of these updates: the transaction of ``Journal.publish``."""
        for update_id in ids:
            del self._accepted[update_id]
            node, incarnation, sequence = update_id
            self._high_water[node, incarnation] = max(sequence, self._high_water.get((node, incarnation), -1))
        began_at = version.published_at if version.number == 0 else self._facts.began_at
        self._facts = replace(self._facts, layout=layout, version=version, began_at=began_at, decision=None)
        self._kept[version.number] = (version, ids)
        self._kept.pop(version.number - self._keep, None)

    def versions(self) -> tuple[Version, ...]:
        """See ``Journal``."""
        return tuple(version for version, _ in self._kept.values())

    def read_version(self, number: int) -> VersionReader:
        """See ``Journal``; the reader has no bytes."""
        if number not in self._kept:
            raise Refused(Reason.UNKNOWN_VERSION, f"version {number} is not kept here; kept: {list(self._kept) or 'none yet'}")
        return _EmptyReader(self._kept[number][0])

    def close(self) -> None:
        """Nothing is open."""


class _EmptyReader(VersionReader):
    def __init__(self, info: Version) -> None:
        self.info = info
        self.size = 0

    def read(self, start: int, stop: int) -> bytes:
        return b""

    def close(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class _WholeStream(Stream):
    """Brings a slice without its bytes."""

    def __init__(self, update_id: UpdateId, part: Slice) -> None:
        self.held = 0
        self._staged = SliceStaged(update_id=update_id, slice=part, squared_norm=NORM**2)

    def write(self, offset: int, crc32c: int, data: Data) -> None:
        raise AssertionError("no bytes travel in timing mode")

    def finish(self) -> SliceStaged:
        return self._staged


class FactsStaging(Staging):
    """Believes that what was offered arrives whole."""

    def __init__(self, journal: FactsJournal) -> None:
        self._facts = journal

    def open(self, offer: Offer, layout: Layout | None) -> Stream:
        """See ``Staging``."""
        return _WholeStream(offer.header.update_id, offer.slice)

    def accept(self, update: Update, at: float) -> None:
        """See ``Staging``."""
        self._facts.accept(update, at)

    def discard(self, update_id: UpdateId) -> None:
        """See ``Staging``."""
        self._facts.discard(update_id)


class FactsPublisher(Publisher):
    """Makes versions that are all facts and no weights."""

    def __init__(self, journal: FactsJournal, config: FleetConfig) -> None:
        self._facts = journal
        self._codec = codecs.get(config.publish)

    def found(self, update: Update, at: float) -> Version:
        """See ``Publisher``."""
        return self.found_layout(Layout.from_json(update.header.layout_spec), at, (update.update_id,))

    def found_layout(self, layout: Layout, at: float, ids: tuple[UpdateId, ...] = ()) -> Version:
        """Version 0 of a layout."""
        return self._make(Version(number=0, layout="", codec="", payload_bytes=0, digest=0, published_at=at), layout, ids)

    def merge(self, decision: Decision) -> Version:
        """See ``Publisher``."""
        self._facts.decide(decision)
        version = Version(
            number=decision.version,
            layout="",
            codec="",
            payload_bytes=0,
            digest=0,
            published_at=decision.at,
            updates=len(decision.leaf_ids),
            metrics=decision.metrics,
        )
        return self._make(version, self._facts.layout, decision.ids)

    def _make(self, version: Version, layout: Layout, ids: tuple[UpdateId, ...]) -> Version:
        payload_bytes = Geometry(layout, self._codec).payload_bytes
        version = replace(version, layout=layout.fingerprint, codec=self._codec.spec, payload_bytes=payload_bytes)
        self._facts.settle(version, layout, ids)
        return version


class FactsStore:
    """A root's store in timing mode. Facts are durable at once, so that a crash takes nothing away."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._journal = FactsJournal(config.run, config.coordinator.keep_versions)

    def found(self, layout: Layout, at: float) -> None:
        """Make version 0, as from a start file."""
        FactsPublisher(self._journal, self._config).found_layout(layout, at)

    def open(self) -> tuple[Journal, Staging, Publisher]:
        """See ``Store``."""
        return self._journal, FactsStaging(self._journal), FactsPublisher(self._journal, self._config)

    def crash(self) -> None:
        """See ``Store``."""


class NoLearning:
    """Learns nothing; knows how large the bytes would be."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._sizes: dict[tuple[str, bool], int] = {}

    def adopt(self, version: Version, payload: bytes) -> Weights:
        """See ``Learning``."""
        return None

    def train(self, member: str, start: Weights, unit: Unit) -> Weights:
        """See ``Learning``."""
        return None

    def encode(self, member: str, kind: Kind, codec: str, start: Weights, end: Weights, residual: Weights) -> Parcel:
        """See ``Learning``."""
        key = (codec, kind is not Kind.GRADIENT)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = Geometry(self.layout, codecs.get(codec), buffers=key[1]).payload_bytes
        return Parcel(size, NO_BYTES, 0, {}, None)

    def evaluate(self, version: Version, payload: bytes) -> Mapping[str, float]:
        """See ``Learning``."""
        return {}
