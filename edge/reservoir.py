"""Hard samples that are kept, with consent and for a time, to become new proxy data.

A bounded uniform sample without replacement of all different samples offered: each has a key, the SHA-256 of the seed and its
content, and those of the smallest keys are kept (reservoir sampling by random keys: Vitter 1985; Efraimidis and Spirakis 2006
with equal weights). The key depends on nothing but the content, so that the order of arrival, repeats and restarts change
nothing, and two nodes' reservoirs of one seed merge into the sample of both. What has expired makes room for what comes
then, whatever its key; the sample is uniform again when that has been displaced.

One SQLite database holds it all. ``add`` waits for no disk (answers wait for it): with the power the newest few may be lost. What
is removed or too old is overwritten in the file (``secure_delete``) and leaves SQLite's log. What is too old is removed whenever
the reservoir is opened, added to or read: while nobody does, it lies there. The process that answers and the one that trains may
have it open at the same time.

What was shared with a run (closed_loop.py) is noted here, so that it is not offered again, and can be taken back: by ``remove``,
and, through a mark that outlives the reservoir, when the consent is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from fleetddp.common.clock import Clock, SystemClock
from fleetddp.common.errors import ConfigError
from fleetddp.common.files import OsFiles
from fleetddp.common.inference_config import HardSamplesConfig
from fleetddp.common.open_items import bytes_of_sample as _bytes
from fleetddp.common.open_items import digest_of as digest_of
from fleetddp.common.stored import storage

LabelSource = Callable[[Tensor], "int | None"]  # a person, a slow sensor: the class of f32[...]; None: not known (yet)

_FILE = "reservoir.db"
_MARK = "shared"  # a file: of what was kept here something may have left the device
LOCKED_S = 10.0  # that another process may take to finish a write
_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    digest TEXT PRIMARY KEY, key TEXT NOT NULL UNIQUE, at REAL NOT NULL, hardness REAL NOT NULL, data BLOB NOT NULL,
    teacher BLOB, label INTEGER);
CREATE INDEX IF NOT EXISTS by_age ON samples (at);
CREATE TABLE IF NOT EXISTS shared (run TEXT, digest TEXT, state INTEGER NOT NULL, PRIMARY KEY (run, digest));
"""
_OFFERED, _KNOWN, _REMOVED, _TAKEN_BACK = range(4)  # what becomes of a sample that may have left the device

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HardSample:
    """One kept sample."""

    inputs: Tensor  # f32[...]
    digest: str  # SHA-256 of its shape and values, in hex
    at: float  # when it was first offered, seconds since the epoch
    hardness: float
    teacher: Tensor | None  # f32[classes]: what the cloud's model answered then
    label: int | None


@dataclass(frozen=True, slots=True)
class HardSamples:
    """A reservoir's content at one moment, by digest: the same samples are the same items, in the same order, everywhere."""

    items: tuple[HardSample, ...]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> HardSample:
        return self.items[index]

    @property
    def inputs(self) -> Tensor:
        """f32[n, ...]."""
        return torch.stack([item.inputs for item in self.items]) if self.items else torch.empty(0)

    @property
    def labels(self) -> Tensor:
        """int64[n]; -1 where there is none."""
        return torch.tensor([-1 if item.label is None else item.label for item in self.items], dtype=torch.int64)

    @property
    def digest(self) -> str:
        """SHA-256 over the items' digests, in hex: the name of this set. Labels do not count."""
        return hashlib.sha256("".join(item.digest for item in self.items).encode()).hexdigest()


class Reservoir:
    """At most ``keep`` samples of one shape in ``folder``, none older than the retention. Safe to use from several threads.

    Raises ``ConfigError`` without consent, or where the folder holds samples of another seed; ``StorageError`` when the disk
    refuses.
    """

    def __init__(self, folder: Path, config: HardSamplesConfig, *, seed: int = 0, clock: Clock | None = None) -> None:
        if not config.consent or config.retention_hours is None:
            raise ConfigError("cascade.hard_samples.consent is false: nothing may be kept")
        self.folder = folder
        self._config, self._seed, self._clock = config, seed, clock or SystemClock()
        self._retention_s = 3600.0 * config.retention_hours
        self._log_is_full = False  # of what was removed
        self._lock = threading.Lock()
        with storage(f"cannot open the reservoir in {folder}"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = sqlite3.connect(folder / _FILE, timeout=LOCKED_S, check_same_thread=False, isolation_level=None)
            try:
                for pragma in ("secure_delete=ON", "journal_mode=WAL", "synchronous=NORMAL"):
                    self._db.execute(f"PRAGMA {pragma}")
                self._db.executescript(_SCHEMA)
                self._agree("seed", str(seed))
                self._retain(self._clock.now())
            except BaseException:
                self._db.close()
                raise

    def close(self) -> None:
        """Release the file; the samples stay."""
        with self._lock:
            self._db.close()

    # ---- what comes in ------------------------------------------------------------------------------------------------------

    def add(self, samples: Tensor, hardness: Tensor, teacher: Tensor | None = None) -> int:
        """Offer f32[k, ...], their hardness f32[k], and f32[k, classes] of a teacher; how many are kept that were not before.

        It is an ``on_hard`` of ``Cascade``. A sample offered again gets the teacher's answer if it has none. Not finite ones are
        passed over. ``ConfigError`` for another shape than the first.
        """
        kept = 0
        with self._lock, storage("cannot keep hard samples"), self._db:
            now = self._clock.now()
            self._retain(now)
            self._db.execute("BEGIN IMMEDIATE")
            self._agree("shape", json.dumps(list(samples.shape[1:])))
            for i, sample in enumerate(samples):
                if bool(sample.isfinite().all()):
                    kept += self._offer(sample, float(hardness[i]), None if teacher is None else teacher[i], now)
        return kept

    def _offer(self, sample: Tensor, hardness: float, teacher: Tensor | None, now: float) -> int:
        data, digest = _bytes(sample), digest_of(sample)
        answer = None if teacher is None else _bytes(teacher)
        key = self._key("keep", digest)
        found = self._db.execute("UPDATE samples SET teacher = coalesce(teacher, ?) WHERE digest = ?", (answer, digest))
        if found.rowcount:
            return 0
        if self._count() >= self._config.keep:
            largest = self._db.execute("SELECT max(key) FROM samples").fetchone()[0]
            if key > largest:
                return 0
            self._db.execute("DELETE FROM samples WHERE key = ?", (largest,))
        row = (digest, key, now, hardness, data, answer)
        self._db.execute("INSERT INTO samples (digest, key, at, hardness, data, teacher) VALUES (?, ?, ?, ?, ?, ?)", row)
        return 1

    # ---- labels -------------------------------------------------------------------------------------------------------------

    def label(self, digest: str, label: int) -> bool:
        """Someone found out a sample's class; whether it is still kept."""
        if label < 0:
            raise ConfigError(f"a label is {label}; classes are counted from 0")
        with self._lock, storage("cannot store a label"):
            return bool(self._db.execute("UPDATE samples SET label = ? WHERE digest = ?", (label, digest)).rowcount)

    def ask(self, source: LabelSource) -> int:
        """Ask ``source`` about the share of samples that is to be labelled, oldest first, each once it is old enough.

        Which samples that are follows from the seed and their content. Returns how many labels came; about a sample that
        ``source`` does not know it is asked again next time.
        """
        due = self._clock.now() - self._config.label_after_s
        share = int(self._config.label_share * 2**32)
        came = 0
        for item in self._select("WHERE label ISNULL AND at <= ? ORDER BY at, digest", due):
            if int(self._key("label", item.digest)[:8], 16) < share:
                label = source(item.inputs)
                came += label is not None and self.label(item.digest, label)
        return came

    # ---- what is there --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> HardSamples:
        """What is kept now, in memory; what is too old is removed first."""
        return HardSamples(tuple(self._select("ORDER BY digest")))

    def labelled(self) -> HardSamples:
        """Those of the samples that have a label."""
        return HardSamples(tuple(self._select("WHERE label NOTNULL ORDER BY digest")))

    def _select(self, which: str, *values: object) -> list[HardSample]:
        with self._lock, storage("cannot read the reservoir"):
            self._retain(self._clock.now())
            shape = json.loads(self._fact("shape") or "[]")
            rows = self._db.execute(f"SELECT digest, at, hardness, data, teacher, label FROM samples {which}", values).fetchall()
        return [
            HardSample(_tensor(data).reshape(shape), digest, at, hardness, None if answer is None else _tensor(answer), label)
            for digest, at, hardness, data, answer, label in rows
        ]

    def __len__(self) -> int:
        with self._lock, storage("cannot read the reservoir"):
            self._retain(self._clock.now())
            return self._count()

    def remove(self, digests: Sequence[str]) -> None:
        """Keep these no longer: somebody took his consent back. What was shared of them is taken back, too (closed_loop.py)."""
        rows = [(digest,) for digest in digests]
        with self._lock, storage("cannot remove hard samples"):
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("DELETE FROM samples WHERE digest = ?", rows)
                self._db.executemany(f"UPDATE shared SET state = {_REMOVED} WHERE digest = ? AND state < {_REMOVED}", rows)
            self._empty_log()

    # ---- what is shared with a run --------------------------------------------------------------------------------------------

    def unshared(self, run: str, most: int) -> list[HardSample]:
        """At most so many samples that are kept and ``run`` does not know, labelled ones first. ``ConfigError`` without the
        permission to share."""
        if not self._config.share:
            raise ConfigError("cascade.hard_samples.share is false: nothing may leave the device")
        known = f"SELECT digest FROM shared WHERE run = ? AND state >= {_KNOWN}"
        return self._select(f"WHERE digest NOT IN ({known}) ORDER BY label ISNULL, digest LIMIT ?", run, most)

    def note_sharing(self, run: str, digests: Sequence[str]) -> None:
        """Before these leave the device for the first time, durably: they may have to be taken back."""
        with storage(f"cannot mark {self.folder} as shared"):
            files = OsFiles()
            file = files.create(self.folder / _MARK)
            file.fsync()
            file.close()
            files.fsync_dir(self.folder)
        with self._lock, storage("cannot note what is shared"), self._durably():
            rows = [(run, digest, _OFFERED) for digest in digests]
            self._db.executemany("INSERT OR IGNORE INTO shared (run, digest, state) VALUES (?, ?, ?)", rows)

    def known_there(self, run: str, digests: Sequence[str]) -> None:
        """The run has these, or had them: they are not offered to it again."""
        with self._lock, storage("cannot note what is shared"), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            change = f"UPDATE shared SET state = {_KNOWN} WHERE run = ? AND digest = ? AND state = {_OFFERED}"
            self._db.executemany(change, [(run, digest) for digest in digests])

    def to_take_back(self, run: str, most: int) -> list[str]:
        """The digests of at most so many samples that were shared with ``run`` and removed since."""
        with self._lock, storage("cannot read what was shared"):
            which = (run, _REMOVED, most)
            rows = self._db.execute("SELECT digest FROM shared WHERE run = ? AND state = ? LIMIT ?", which).fetchall()
        return [digest for (digest,) in rows]

    def taken_back(self, run: str, digests: Sequence[str]) -> None:
        """The run has them no longer, and is not offered them again."""
        with self._lock, storage("cannot note what was taken back"), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            change = f"UPDATE shared SET state = {_TAKEN_BACK} WHERE run = ? AND digest = ?"
            self._db.executemany(change, [(run, digest) for digest in digests])

    # ---- within ---------------------------------------------------------------------------------------------------------------

    def _retain(self, now: float) -> None:
        gone = self._db.execute("DELETE FROM samples WHERE at < ?", (now - self._retention_s,)).rowcount
        over = self._count() - self._config.keep  # the fleet file may allow fewer than it did
        if over > 0:
            self._db.execute("DELETE FROM samples WHERE key IN (SELECT key FROM samples ORDER BY key DESC LIMIT ?)", (over,))
        if gone or over > 0 or self._log_is_full:
            self._empty_log()

    def _empty_log(self) -> None:
        """What was removed is not to lie in SQLite's log any longer; while another process reads, later."""
        busy = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        self._log_is_full = bool(busy)

    @contextmanager
    def _durably(self) -> Iterator[None]:
        """A transaction that is on the disk when it ends."""
        self._db.execute("PRAGMA synchronous=FULL")
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                yield
        finally:
            self._db.execute("PRAGMA synchronous=NORMAL")

    def _key(self, purpose: str, digest: str) -> str:
        return hashlib.sha256(f"{self._seed}/{purpose}/{digest}".encode()).hexdigest()

    def _count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM samples").fetchone()[0])

    def _fact(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _agree(self, name: str, value: str) -> None:
        """Note a fact, or raise ``ConfigError`` where it is noted otherwise."""
        noted = self._fact(name)
        if noted is None:
            self._db.execute("INSERT INTO facts (name, value) VALUES (?, ?)", (name, value))
        elif noted != value:
            raise ConfigError(f"hard samples: the reservoir is of {name} {noted}, not {value}; remove it, or use another folder")

    def __enter__(self) -> Reservoir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_reservoir(config: HardSamplesConfig, node: str, *, seed: int = 0, clock: Clock | None = None) -> Reservoir | None:
    """A node's reservoir where the fleet file has consent; without, None, and what was kept before is erased."""
    if config.consent:
        return Reservoir(folder_of(config, node), config, seed=seed, clock=clock)
    erase(folder_of(config, node))
    return None


def folder_of(config: HardSamplesConfig, node: str) -> Path:
    """Where a node's reservoir is."""
    return config.state / node


def was_shared(folder: Path) -> bool:
    """Whether something that was kept in this folder may have left the device, and was not taken back yet."""
    return (folder / _MARK).exists()


def all_taken_back(folder: Path) -> None:
    """The run has nothing any more of what was shared from here."""
    with storage(f"cannot remove the mark in {folder}"):
        (folder / _MARK).unlink(missing_ok=True)
        with suppress(OSError):  # the reservoir is still there
            folder.rmdir()


def erase(folder: Path) -> None:
    """Remove a reservoir and all that it kept."""
    if not (folder / _FILE).exists():
        return
    with storage(f"cannot erase the hard samples in {folder}"):
        with sqlite3.connect(folder / _FILE, isolation_level=None) as db:
            db.execute("PRAGMA secure_delete=ON")
            db.execute("DELETE FROM samples")
        db.close()
        for name in (_FILE, f"{_FILE}-wal", f"{_FILE}-shm"):
            (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # something else of the user's lies there
            folder.rmdir()
    _log.info("there is no consent (any more) to keep hard samples: those in %s are erased", folder)


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
