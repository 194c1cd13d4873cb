"""The durable memory of an aggregator: accepted updates, decisions, versions (design §6).

One folder holds an SQLite database (WAL, ``synchronous=FULL``) and the big files it speaks of:

    journal.db                         rows; a row exists only if the file it names is durable
    payloads/NODE.INCARNATION.SEQUENCE one file an update, from its first staged byte until it is settled
    versions/NUMBER.safetensors        one file a version; NUMBER.partial while it is being written

A file without a row is rubbish of a crash, and ``recover`` removes it. What is promised to others (an acceptance, a version) is
promised after the commit. ``CRASH_POINTS`` names the moments between; tests stop the process at each.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fleetddp.common.errors import ConfigError, Reason, Refused, StorageError
from fleetddp.common.events import Decision
from fleetddp.common.files import File, Files, OsFiles
from fleetddp.common.fragments import Changes
from fleetddp.common.high_water import INCARNATIONS, Mark, after
from fleetddp.common.layout import Layout
from fleetddp.common.recovered import (
    Recovered,
    changes_from_json,
    decision_from_json,
    decision_to_json,
    update_from_json,
    update_to_json,
    version_from_json,
    version_to_json,
)
from fleetddp.common.stored import Reader, StagedFile, VersionReader, storage
from fleetddp.common.update import Kind, Update, UpdateId, Version

__all__ = ["CRASH_POINTS", "Journal", "Reader", "Recovered", "StagedFile", "VersionReader"]

CRASH_POINTS = (
    "create:database-made",
    "create:committed",
    "stage:created",
    "accept:begun",
    "accept:payload-synced",
    "accept:directory-synced",
    "accept:rows-written",
    "accept:committed",
    "discard:rows-written",
    "discard:committed",
    "opened:rows-written",
    "opened:committed",
    "decide:rows-written",
    "decide:committed",
    "version:begun",
    "publish:begun",
    "publish:synced",
    "publish:renamed",
    "publish:directory-synced",
    "publish:rows-written",
    "publish:committed",
    "sweep:file-removed",
    "ended:rows-written",
    "ended:committed",
    "recover:file-removed",
)

DIRECT, INSIDE, PARTIAL = range(3)  # how a merged update came
_SCHEMA_VERSION = 2
_SCHEMA = (
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",  # run, layout, began, window, decision, finished
    "CREATE TABLE updates (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, at REAL NOT NULL, kind TEXT NOT NULL, body TEXT)",
    "CREATE TABLE versions (number INTEGER PRIMARY KEY, payload_start INTEGER NOT NULL, body TEXT NOT NULL)",
    "CREATE TABLE merged (id TEXT PRIMARY KEY, version INTEGER NOT NULL)",
    "CREATE TABLE high_water (node TEXT, incarnation INTEGER, sequence INTEGER NOT NULL, PRIMARY KEY (node, incarnation))",
    "ALTER TABLE high_water ADD COLUMN settled TEXT",  # hexadecimal, see ``Mark``; NULL (by schema 1): all of it
    "ALTER TABLE merged ADD COLUMN how INTEGER NOT NULL DEFAULT 0",  # DIRECT, a PARTIAL, or INSIDE one
)
_NEW = {1: 5}  # statements of ``_SCHEMA`` that an older schema has already


class Journal:
    """The journal of one run in one folder, used by one process at a time.

    Raises ``StorageError`` when the disk refuses, or another process has the journal open; ``ConfigError`` when the folder is
    another run's. All methods may be called from several threads. ``at`` is called with each of ``CRASH_POINTS`` as it is passed.
    """

    _suffix = "safetensors"  # of a version's file

    def __init__(
        self,
        directory: Path,
        *,
        run: str,
        files: Files | None = None,
        keep_versions: int = 3,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        if keep_versions < 1:
            raise ConfigError(f"keep_versions is {keep_versions}; at least 1 version must be kept")
        self.directory = directory
        self.run = run
        self.at = at
        self._files: Files = OsFiles() if files is None else files
        self._keep = keep_versions
        self._payloads = directory / "payloads"
        self._versions = directory / "versions"
        self._lock = threading.Lock()  # over the connection and _staged
        self._staged: dict[UpdateId, StagedFile] = {}
        self._retired: list[Path] = []  # what ``sweep`` is to remove
        self._beside: list[sqlite3.Connection] = []
        with storage(f"cannot open the journal in {directory}"):
            for folder in (self._payloads, self._versions):
                self._files.make_dir(folder)
            self._db = self._files.connect(directory / "journal.db")
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> None:
        # Exclusive: a second coordinator on the same folder must fail here, not corrupt the run.
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=FULL"):
            self._db.execute(f"PRAGMA {pragma}")
        schema = self._db.execute("PRAGMA user_version").fetchone()[0]
        if schema > _SCHEMA_VERSION:
            raise StorageError(
                f"{self.directory}: written by a newer fleetddp (schema {schema}; this one knows {_SCHEMA_VERSION})"
            )
        self.at("create:database-made")
        self._files.fsync_dir(self.directory)
        with suppress(PermissionError):  # where we may not read the parent, we did not make this folder either
            self._files.fsync_dir(self.directory.parent)
        if schema < _SCHEMA_VERSION:
            with self._transaction("create") as db:
                for statement in _SCHEMA[_NEW.get(schema, 0) :]:
                    db.execute(statement)
                db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
                if schema == 0:
                    self._set("run", self.run)
        run = self._fact("run")
        if run != self.run:
            raise ConfigError(f"{self.directory} is the journal of run {run!r}, not of {self.run!r}: give that its own folder")

    def connect(self, name: str) -> sqlite3.Connection:
        """Another database in the journal's folder; it is closed with the journal."""
        with storage(f"cannot open {self.directory / name}"):
            database = self._files.connect(self.directory / name)
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL"):  # this makes the file
                database.execute(f"PRAGMA {pragma}")
            self._files.fsync_dir(self.directory)
        self._beside.append(database)
        return database

    def close(self) -> None:
        """Release the database and every staged file (what is staged is lost, as it would be in a crash)."""
        with self._lock:
            for staged in self._staged.values():
                staged.close()
            self._staged.clear()
            for database in (*self._beside, self._db):
                database.close()

    # ---- resume ---------------------------------------------------------------------------------------------------------------

    def recover(self) -> Recovered:
        """What is durable. Removes every file that no row names: staged updates, half-written versions, settled payloads."""
        with self._lock, storage(f"cannot read the journal in {self.directory}"):
            accepted = tuple(update_from_json(row[0]) for row in self._db.execute("SELECT body FROM updates ORDER BY place"))
            versions = [version_from_json(row[0]) for row in self._db.execute("SELECT body FROM versions ORDER BY number")]
            rows = [(UpdateId.parse(i), v, how) for i, v, how in self._db.execute("SELECT id, version, how FROM merged")]
            marks = {(n, i): Mark.of_row(s, bits) for n, i, s, bits in self._db.execute("SELECT * FROM high_water")}
            facts: dict[str, str] = dict(self._db.execute("SELECT name, value FROM facts"))
            self._clean(self._payloads, {_payload_name(u.update_id): u.payload_bytes for u in accepted})
            self._clean(self._versions, {self._version_name(v.number): v.payload_bytes for v in versions})
        return Recovered(
            run=self.run,
            layout=Layout.from_json(facts["layout"].encode()) if "layout" in facts else None,
            version=versions[-1] if versions else None,
            began_at=json.loads(facts["began"]) if "began" in facts else None,
            window_opened_at=json.loads(facts["window"]) if "window" in facts else None,
            accepted=accepted,
            decision=decision_from_json(facts["decision"]) if "decision" in facts else None,
            high_water={process: mark.sequence for process, mark in marks.items()},
            gaps={process: gaps for process, mark in marks.items() if (gaps := mark.gaps)},
            merged={update_id: version for update_id, version, _ in rows},
            inside=frozenset(update_id for update_id, _, how in rows if how == INSIDE),
            partials=frozenset(update_id for update_id, _, how in rows if how == PARTIAL),
            finished=facts.get("finished", ""),
            changes=changes_from_json(json.loads(facts["changes"])) if "changes" in facts else None,
        )

    def _clean(self, folder: Path, promised: dict[str, int]) -> None:
        """Leave exactly the promised files, each of which must be there with at least so many bytes."""
        found = set(self._files.list_dir(folder))
        for name, size in promised.items():
            if name not in found:
                raise StorageError(f"{folder / name} is gone, but the journal promises it: restore the folder from a backup")
            file = self._files.open(folder / name)
            try:
                if file.size() < size:
                    raise StorageError(f"{folder / name} has {file.size()} bytes, but the journal promises {size}: restore it")
            finally:
                file.close()
        for name in found - set(promised):
            self._files.unlink(folder / name)
            self.at("recover:file-removed")

    # ---- updates --------------------------------------------------------------------------------------------------------------

    def stage(self, update_id: UpdateId, payload_bytes: int) -> StagedFile:
        """The file that collects an update's bytes: one for all its streams."""
        with self._lock, storage(f"cannot stage {update_id}"):
            staged = self._staged.get(update_id)
            if staged is None:
                file = self._files.create(self._payload_path(update_id))
                self.at("stage:created")
                staged = self._staged[update_id] = StagedFile(file, payload_bytes)
            if staged.payload_bytes != payload_bytes:
                raise Refused(Reason.ID_REUSED, f"{update_id} has {staged.payload_bytes} bytes, now {payload_bytes} are declared")
            return staged

    def accept(self, update: Update, at: float) -> None:
        """Make a staged update durable; when this returns it may be acknowledged. (An ``init`` holds its layout.)"""
        update_id = update.update_id
        with self._lock:
            # Taken out even if what follows fails: after a failed fsync the bytes cannot be trusted, they must be staged anew.
            staged = self._staged.pop(update_id, None)
        if staged is None:
            raise StorageError(f"cannot accept {update_id}: nothing of it is staged")
        with storage(f"cannot make {update_id} durable"):
            try:
                self.at("accept:begun")
                staged.fsync()
                self.at("accept:payload-synced")
            finally:
                staged.close()
            self._files.fsync_dir(self._payloads)
            self.at("accept:directory-synced")
        with self._transaction("accept") as db:
            row = (str(update_id), at, update.header.kind.value, update_to_json(update))
            db.execute("INSERT INTO updates (id, at, kind, body) VALUES (?, ?, ?, ?)", row)

    def discard(self, update_id: UpdateId) -> None:
        """Forget an update that was staged, or accepted but never acknowledged."""
        with self._lock, storage(f"cannot look for {update_id}"):
            staged = self._staged.pop(update_id, None)
            row = self._db.execute("SELECT 1 FROM updates WHERE id = ?", (str(update_id),)).fetchone()
        if staged is not None:
            staged.close()
        if row is not None:  # else nothing is to be written: a full disk must not keep us from making room
            with self._transaction("discard") as db:
                db.execute("DELETE FROM updates WHERE id = ?", (str(update_id),))
        with storage(f"cannot remove the payload of {update_id}"):
            self._files.unlink(self._payload_path(update_id))

    def payload(self, update_id: UpdateId) -> Reader:
        """The payload of an accepted update that is not settled yet."""
        with self._lock, storage(f"cannot read the payload of {update_id}"):
            file = self._files.open(self._payload_path(update_id))
            return Reader(file, 0, file.size())

    def update(self, update_id: UpdateId) -> Update:
        """An accepted update that is not settled yet; ``StorageError`` if there is none of that id."""
        with self._lock, storage(f"cannot read {update_id}"):
            row = self._db.execute("SELECT body FROM updates WHERE id = ?", (str(update_id),)).fetchone()
        if row is None:
            raise StorageError(f"{self.directory} holds no accepted update {update_id}")
        return update_from_json(row[0])

    # ---- windows --------------------------------------------------------------------------------------------------------------

    def opened(self, at: float) -> None:
        """A window opened."""
        with self._transaction("opened"):
            self._set("window", json.dumps(at))

    def decide(self, decision: Decision) -> None:
        """From now on the bytes of the next version are fixed. The next window opens at the same time."""
        with self._transaction("decide"):
            self._set("decision", decision_to_json(decision))
            self._set("window", json.dumps(decision.at))

    def ended(self, reason: str) -> None:
        """The run is over."""
        with self._transaction("ended"):
            self._set("finished", reason)

    # ---- versions -------------------------------------------------------------------------------------------------------------

    def begin_version(self, number: int) -> File:
        """A file to write version ``number`` to, block by block; ``publish`` or another ``begin_version`` ends it."""
        with storage(f"cannot begin version {number}"):
            file = self._files.create(self._draft_path(number))
            self.at("version:begun")
            return file

    def publish(self, version: Version, draft: File, *, payload_start: int, layout: Layout, decision: Decision | None) -> None:
        """Make a version durable and settle what is merged into it, in one transaction; ``sweep`` removes the files of it.

        ``payload_start`` is the byte of the file at which the published payload begins. Without a decision (version 0) an
        accepted ``init`` is what is settled. Closes ``draft``.
        """
        target = self._versions / self._version_name(version.number)
        with storage(f"cannot publish version {version.number}"):
            try:
                self.at("publish:begun")
                draft.fsync()
                self.at("publish:synced")
            finally:
                draft.close()
            self._files.rename(self._draft_path(version.number), target)
            self.at("publish:renamed")
            self._files.fsync_dir(self._versions)
            self.at("publish:directory-synced")
        with self._transaction("publish") as db:
            settled, leaves = self._settled_by(decision)
            newest = db.execute("SELECT max(number) FROM versions").fetchone()[0]
            if version.number != (0 if newest is None else newest + 1):
                raise StorageError(f"version {version.number} does not follow version {newest}: versions are gapless")
            row = (version.number, payload_start, version_to_json(version))
            db.execute("INSERT INTO versions (number, payload_start, body) VALUES (?, ?, ?)", row)
            for update_id in settled:
                db.execute("DELETE FROM updates WHERE id = ?", (str(update_id),))
            ids = sorted({*settled, *leaves})
            sent, inside = set(settled), set(leaves)
            how = {i: INSIDE if i not in sent else DIRECT if i in inside else PARTIAL for i in ids}
            merged = [(str(update_id), version.number, how[update_id]) for update_id in ids]
            db.executemany("INSERT OR REPLACE INTO merged (id, version, how) VALUES (?, ?, ?)", merged)
            self._raise_high_water(ids)
            db.execute("DELETE FROM facts WHERE name = 'decision'")
            if version.changed:
                changes = Changes.at_the_start(len(version.changed)) if decision is None else decision.changes
                assert changes is not None  # ``version.changed`` is of them
                self._set("changes", json.dumps(changes.at))
            if newest is None:
                self._set("layout", layout.to_json().decode())
                self._set("began", json.dumps(version.published_at))
            oldest = version.number - self._keep + 1
            retired = [n for (n,) in db.execute("SELECT number FROM versions WHERE number < ?", (oldest,))]
            db.execute("DELETE FROM versions WHERE number < ?", (oldest,))
            db.execute("DELETE FROM merged WHERE version < ?", (oldest,))
        with self._lock:
            self._retired += [self._payload_path(i) for i in settled]
            self._retired += [self._versions / self._version_name(n) for n in retired]

    def sweep(self) -> None:
        """Remove the files of what is settled, and of versions no longer kept: nobody waits for that."""
        with self._lock:
            files, self._retired = self._retired, []
        for path in files:
            with suppress(OSError):  # one that cannot be removed now is removed by ``recover``
                self._files.unlink(path)
            self.at("sweep:file-removed")

    def _settled_by(self, decision: Decision | None) -> tuple[tuple[UpdateId, ...], tuple[UpdateId, ...]]:
        """(updates whose payloads a version settles, leaf updates they stand for)."""
        if decision is not None:
            return decision.ids, decision.leaf_ids
        inits = self._db.execute("SELECT id FROM updates WHERE kind = ?", (Kind.INIT.value,))
        ids = tuple(UpdateId.parse(row[0]) for row in inits)
        return ids, ids

    def versions(self) -> tuple[Version, ...]:
        """The versions kept, oldest first."""
        with self._lock, storage("cannot list the versions"):
            return tuple(version_from_json(row[0]) for row in self._db.execute("SELECT body FROM versions ORDER BY number"))

    def read_version(self, number: int) -> VersionReader:
        """Open a version that is kept; ``Refused(UNKNOWN_VERSION)`` otherwise."""
        with self._lock, storage(f"cannot read version {number}"):
            row = self._db.execute("SELECT payload_start, body FROM versions WHERE number = ?", (number,)).fetchone()
            if row is None:
                kept = [n for (n,) in self._db.execute("SELECT number FROM versions ORDER BY number")]
                raise Refused(Reason.UNKNOWN_VERSION, f"version {number} is not kept here; kept: {kept or 'none yet'}")
            return VersionReader(self._files.open(self._versions / self._version_name(number)), row[0], version_from_json(row[1]))

    # ---- rows -----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self, name: str) -> Iterator[sqlite3.Connection]:
        """All rows or none; durable when it ends."""
        with self._lock, storage(f"cannot write the journal in {self.directory} ({name})"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self.at(f"{name}:rows-written")
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite ends some failed transactions by itself
                    self._db.execute("ROLLBACK")
                raise
        self.at(f"{name}:committed")

    def _set(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", (name, value))

    def _fact(self, name: str) -> str | None:
        row: Any = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _raise_high_water(self, ids: list[UpdateId]) -> None:
        """What is settled now stays known when ``merged`` has forgotten it; ``INCARNATIONS`` marks are kept for a node."""
        marks: dict[tuple[str, int], Mark] = {}
        for node, incarnation, sequence in ids:
            process = (node, incarnation)
            if process not in marks:
                row = self._db.execute(
                    "SELECT sequence, settled FROM high_water WHERE node=? AND incarnation=?", process
                ).fetchone()
                marks[process] = after(Mark.of_row(*row) if row else None, sequence)
            marks[process] = after(marks[process], sequence)
        self._db.executemany(
            "INSERT OR REPLACE INTO high_water (node, incarnation, sequence, settled) VALUES (?, ?, ?, ?)",
            [(*process, mark.sequence, f"{mark.settled:x}") for process, mark in marks.items()],
        )
        kept = "SELECT incarnation FROM high_water WHERE node = :node ORDER BY incarnation DESC LIMIT :kept"
        self._db.executemany(
            f"DELETE FROM high_water WHERE node = :node AND incarnation NOT IN ({kept})",
            [{"node": node, "kept": INCARNATIONS} for node in sorted({update_id.node for update_id in ids})],
        )

    # ---- names ----------------------------------------------------------------------------------------------------------------

    def _payload_path(self, update_id: UpdateId) -> Path:
        return self._payloads / _payload_name(update_id)

    def _version_name(self, number: int) -> str:
        return f"{number}.{self._suffix}"

    def _draft_path(self, number: int) -> Path:
        return self._versions / f"{number}.partial"


def _payload_name(update_id: UpdateId) -> str:
    return f"{quote(update_id.node, safe='')}.{update_id.incarnation}.{update_id.sequence}"
