"""Open items: hard samples that devices have shared, in slots beyond a proxy set, and who has which of them.

A slot is filled once. Its item is labelled from a version ``since`` on, up to the version ``until``: both are fixed, durably,
before the version is published, so that all who label on a version label the same items, whenever they ask (FedMD). An item that
is too old, or was taken back, is erased at once, here and by everybody who has it; its row of labels stays, and says nothing.

``ItemStore`` holds what a member, or a region, has of them, ``ItemPool`` (item_pool.py) what the coordinator has. One SQLite
database; what is erased is overwritten in it (``secure_delete``) and leaves its log. A member erases all at the end of the run;
while no process has a store open, what gets too old lies there.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fleetddp.common.clock import Clock
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.proxy import runs
from fleetddp.common.stored import storage
from fleetddp.common.update import NO_VERSION, Interval

NEVER = 2**53  # a version that never comes
BATCH_BYTES = 4 * 2**20  # of items that are brought at once, or one item
MOST_RANGES = 1024  # of one request (WIRE.md)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS items (
    slot INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, since INTEGER, until INTEGER, expires_at REAL NOT NULL, data BLOB);
CREATE TABLE IF NOT EXISTS owners (slot INTEGER, node TEXT, PRIMARY KEY (slot, node)) WITHOUT ROWID;
"""


class OpenItem(NamedTuple):
    """What everybody knows of an item."""

    slot: int
    digest: str  # ``digest_of``
    since: int  # the first version on which members label it
    until: int  # the first on which they do not any more; NEVER: it is not known yet
    expires_at: float  # by the clock of whoever says it: whoever has it erases it then

    def is_labelled(self, version: int) -> bool:
        """Whether members label it on this version."""
        return self.since <= version < self.until


class Catalogue(NamedTuple):
    """Which items there are up to a version, or what changed since a version that was known."""

    pool: int  # whose slots these are: another pool numbers them otherwise
    version: int
    shape: tuple[int, ...]  # of an item
    whole: bool  # all there are
    items: tuple[OpenItem, ...]
    gone: tuple[int, ...]  # slots whose items were taken back, though they are labelled yet
    at: float  # the time by the clock of whoever says it


class Shared(NamedTuple):
    """What became of samples that were offered."""

    known: tuple[str, ...]  # the digests of those that the pool has, or had: they are not to be offered again
    room: int  # for how many more of this node; 0: for none


class ItemSource(Protocol):
    """Whoever hands items out: a ``Parent``."""

    def pull_items(self, pool: int, known: int, ranges: Sequence[Interval], sink: Callable[[int, memoryview], None]) -> Catalogue:
        """What changed since version ``known`` of ``pool``; byte ranges go to ``sink``, where item s lies at s times its size."""
        ...


class ItemStore:
    """Items in one SQLite database. Safe to use from several threads. Raises ``StorageError``.

    ``at`` is called with the name of each write, before and after it is committed: for tests that stop there.
    """

    def __init__(self, db: sqlite3.Connection, clock: Clock, *, at: Callable[[str], None] = lambda point: None) -> None:
        self._db, self._clock, self._at = db, clock, at
        self._lock = threading.RLock()
        with storage("cannot open the store of open items"):
            for pragma in ("secure_delete=ON", "locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
                db.execute(f"PRAGMA {pragma}")
            db.executescript(_SCHEMA)

    @classmethod
    def open(cls, path: Path | None, clock: Clock) -> ItemStore:
        """In this file; None: in memory."""
        with storage(f"cannot open {path}"):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            db = sqlite3.connect(path or ":memory:", timeout=1.0, check_same_thread=False, isolation_level=None)
        try:
            return cls(db, clock)
        except BaseException:
            db.close()
            raise

    def close(self) -> None:
        """Release the file; what is in it stays."""
        with self._lock:
            self._db.close()

    # ---- what there is --------------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> int:
        """Whose slots these are; 0: not known yet."""
        return int(self._fact("pool") or 0)

    @property
    def known(self) -> int:
        """The version up to which all is known."""
        return int(self._fact("known") or NO_VERSION)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of an item; None: not known yet."""
        told = self._fact("shape")
        return None if told is None else tuple(json.loads(told))

    @property
    def item_bytes(self) -> int:
        """Of one. Raises ``Refused(NO_VERSION)`` while that is not known."""
        return 4 * math.prod(self._shape())

    def items(self) -> tuple[OpenItem, ...]:
        """All that have a version, those that are erased among them, by slot."""
        with self._reading():
            rows = self._db.execute("SELECT slot, digest, since, until, expires_at FROM items WHERE since NOTNULL ORDER BY slot")
            return tuple(_item(row, NEVER) for row in rows)

    def held(self) -> frozenset[int]:
        """The slots whose items are here."""
        with self._reading():
            return frozenset(slot for (slot,) in self._db.execute("SELECT slot FROM items WHERE data NOTNULL"))

    def tensor(self, slot: int) -> Tensor | None:
        """An item, f32[shape]; None if it is not here."""
        with self._reading():
            row = self._db.execute("SELECT data FROM items WHERE slot = ?", (slot,)).fetchone()
            if row is None or row[0] is None:
                return None
            return torch.from_numpy(np.frombuffer(row[0], dtype="<f4").astype(np.float32)).reshape(self._shape())

    def counts(self) -> dict[str, int]:
        """What people see: slots that were filled, and items that are here."""
        with self._reading():
            filled, held = self._db.execute("SELECT count(*), count(data) FROM items").fetchone()
        return {"filled": int(filled), "held": int(held)}

    def catalogue(self, pool: int, known: int, version: int) -> Catalogue:
        """What one is to hear who knows ``pool`` up to ``known``; ``version`` is the newest that is published here."""
        with self._reading():
            whole = pool != self.pool or not NO_VERSION < known <= version
            after = NO_VERSION if whole else known
            found = self._db.execute(
                "SELECT slot, digest, since, until, expires_at FROM items WHERE since <= :now AND "
                "(since > :after OR (until > :after AND until <= :now)) ORDER BY slot",
                {"now": version, "after": after},
            ).fetchall()
            gone = self._db.execute(
                "SELECT slot FROM items WHERE data ISNULL AND since <= ? AND (until ISNULL OR until > ?) ORDER BY slot",
                (version, version),
            ).fetchall()
            items = tuple(_item(row, version) for row in found)
            at = self._clock.now()
            return Catalogue(self.pool, version, self._shape(), whole, items, tuple(slot for (slot,) in gone), at)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), where item s lies at s times its size; ``Refused(ITEM_GONE)`` where one is not here."""
        size, pieces = self.item_bytes, []
        with self._reading():
            while start < stop:
                slot, first = divmod(start, size)
                count = min(size - first, stop - start)
                row = self._db.execute("SELECT substr(data, ?, ?) FROM items WHERE slot = ?", (first + 1, count, slot)).fetchone()
                if row is None or row[0] is None:
                    raise Refused(Reason.ITEM_GONE, f"open item {slot} is not here (any more)")
                pieces.append(row[0])
                start += count
        return b"".join(pieces)

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Whether samples that are offered are of the shape of those here; ``Refused(WRONG_SHAPE)``."""
        if shape != self.shape:
            raise Refused(Reason.WRONG_SHAPE, f"samples of shape {list(shape)}; the proxy set's have {list(self._shape())}")

    def at_once(self, most_bytes: int) -> int:
        """How many items fit so many bytes; one in any case."""
        return max(1, most_bytes // self.item_bytes)

    # ---- what changes ---------------------------------------------------------------------------------------------------------

    def erase_expired(self) -> float:
        """Erase what is too old; returns when something will be next (infinity: nothing is here)."""
        now = self._clock.now()
        with self._reading():
            due = self._db.execute("SELECT 1 FROM items WHERE data NOTNULL AND expires_at <= ? LIMIT 1", (now,)).fetchone()
        if due is not None:
            with self._writing("expire") as db:
                db.execute("DELETE FROM owners WHERE slot IN (SELECT slot FROM items WHERE expires_at <= ?)", (now,))
                db.execute("UPDATE items SET data = NULL WHERE expires_at <= ?", (now,))
            self._empty_log()
        with self._reading():
            following = self._db.execute("SELECT min(expires_at) FROM items WHERE data NOTNULL").fetchone()[0]
        return math.inf if following is None else float(following)

    def erase_all(self) -> None:
        """Nothing of it is needed any more."""
        with self._writing("erase") as db:
            db.execute("UPDATE items SET data = NULL")
        self._empty_log()

    def apply(self, catalogue: Catalogue) -> None:
        """Take up what a source says there is. Of another pool nothing is kept; what is gone is erased.

        Times are taken as from now on: a device's clock may be years away from the coordinator's.
        """
        ahead = self._clock.now() - catalogue.at
        with self._writing("apply") as db:
            erased = 0
            if catalogue.whole:
                there = {item.slot: item.digest for item in catalogue.items}
                for slot, digest in db.execute("SELECT slot, digest FROM items").fetchall():
                    if there.get(slot) != digest:
                        erased += db.execute("DELETE FROM items WHERE slot = ?", (slot,)).rowcount
            for item in catalogue.items:
                until = None if item.until == NEVER else item.until
                db.execute(
                    "INSERT INTO items (slot, digest, since, until, expires_at) VALUES (?, ?, ?, ?, ?) "
                    "ON CONFLICT (slot) DO UPDATE "
                    "SET since = excluded.since, until = excluded.until, expires_at = excluded.expires_at",
                    (item.slot, item.digest, item.since, until, item.expires_at + ahead),
                )
            over = "UPDATE items SET data = NULL WHERE data NOTNULL AND"
            erased += db.execute(f"{over} until <= ?", (catalogue.version,)).rowcount
            for slot in catalogue.gone:
                erased += db.execute(f"{over} slot = ?", (slot,)).rowcount
            for name, value in (
                ("pool", str(catalogue.pool)),
                ("known", str(catalogue.version)),
                ("shape", json.dumps(catalogue.shape)),
            ):
                self._set(name, value)
        if erased:
            self._empty_log()

    def put(self, found: Mapping[int, bytes]) -> None:
        """Keep these items, by slot; ``Refused(WRONG_DIGEST)`` where one is not what the catalogue says it is."""
        shape = self._shape()
        with self._writing("put") as db:
            for slot, data in found.items():
                due = db.execute("SELECT digest FROM items WHERE slot = ?", (slot,)).fetchone()
                if due is None or digest_of_bytes(data, shape) != due[0]:
                    raise Refused(Reason.WRONG_DIGEST, f"open item {slot} arrived as {digest_of_bytes(data, shape)[:12]}")
                db.execute("UPDATE items SET data = ? WHERE slot = ?", (data, slot))

    # ---- within ---------------------------------------------------------------------------------------------------------------

    def _shape(self) -> tuple[int, ...]:
        shape = self.shape
        if shape is None:
            raise Refused(Reason.NO_VERSION, "nothing is known here of open items yet")
        return shape

    def _fact(self, name: str) -> str | None:
        with self._reading():
            row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _set(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (name, value))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, storage("cannot read the open items"):
            yield

    @contextmanager
    def _writing(self, what: str) -> Iterator[sqlite3.Connection]:
        """All of it or nothing; durable when it ends."""
        with self._lock, storage(f"cannot write the open items ({what})"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._at(f"{what}:rows-written")
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        self._at(f"{what}:committed")

    def _empty_log(self) -> None:
        """What was erased is not to lie in SQLite's log any longer."""
        with self._reading():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def bring(source: ItemSource, store: ItemStore, version: int) -> None:
    """Know what there is up to ``version``, and have the items that are labelled on it. What is here is not asked for again.

    Raises what the source does; ``Refused(NO_VERSION)`` where it knows less itself, ``ITEM_GONE`` where one went meanwhile.
    """
    known = store.known if store.known <= version else NO_VERSION  # a source restored from a backup, or another one
    catalogue = source.pull_items(store.pool, known, (), lambda offset, data: None)
    if catalogue.version < version:
        raise Refused(Reason.NO_VERSION, f"open items are known up to version {catalogue.version} there; due is {version}")
    store.apply(catalogue)
    store.erase_expired()
    held, gone, now = store.held(), set(catalogue.gone), store._clock.now()
    lacking = [
        item.slot
        for item in store.items()
        if item.is_labelled(version) and item.slot not in held and item.slot not in gone and item.expires_at > now
    ]
    size, step = store.item_bytes, min(store.at_once(BATCH_BYTES), MOST_RANGES)
    for first in range(0, len(lacking), step):
        slots = lacking[first : first + step]
        pieces = {slot: bytearray() for slot in slots}

        def take(offset: int, data: memoryview, pieces: dict[int, bytearray] = pieces) -> None:
            while len(data):
                slot, at = divmod(offset, size)
                count = min(size - at, len(data))
                pieces[slot] += data[:count]
                offset, data = offset + count, data[count:]

        source.pull_items(store.pool, store.known, [(a * size, b * size) for a, b in runs(slots)], take)
        store.put({slot: bytes(piece) for slot, piece in pieces.items()})


def digest_of(sample: Tensor) -> str:
    """SHA-256 of a sample's shape and float32 values, in hex."""
    return digest_of_bytes(bytes_of_sample(sample), tuple(sample.shape))


def digest_of_bytes(data: bytes, shape: Sequence[int]) -> str:
    """The same of its little-endian float32 values."""
    return hashlib.sha256(json.dumps(list(shape)).encode() + data).hexdigest()


def bytes_of_sample(sample: Tensor) -> bytes:
    """Its values in little-endian float32."""
    return sample.detach().cpu().float().numpy().astype("<f4", copy=False).tobytes()


def _item(row: tuple[int, str, int, int | None, float], version: int) -> OpenItem:
    """As it is up to ``version``."""
    slot, digest, since, until, expires_at = row
    return OpenItem(slot, digest, since, NEVER if until is None or until > version else until, expires_at)
