"""What a node owes and where it stands, durably: unsent updates, codec residual, newest version, newest local weights.

One folder: ``outbox.sqlite`` and files of bytes that its rows name. Files are written and fsynced first, under new names; then
one transaction makes them count; then files that no row names are removed. Whatever is killed in between, the folder holds the
state before a step or the state after it.

An update is ``PENDING`` until its first byte may have left, ``OFFERED`` until the parent has it for certain, ``ACCEPTED`` until
it is settled. While pending it is replaced by a longer one; once offered it stays as it is, and the next one starts where it
ended (design §4, one member, one update per base version). The residual and the update that made it commit together; a refusal
restores the residual before it (design §6).
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from torch import Tensor

from fleetddp.common.errors import StorageError
from fleetddp.common.files import Files, OsFiles
from fleetddp.common.payload import bytes_of
from fleetddp.common.update import NO_VERSION, Interval, Kind, Receipt, Slice, Tier, UpdateHeader, UpdateId
from fleetddp.common.update import State as Standing
from fleetddp.edge.trainer import Encoded, Work

CRASH_POINTS = ("files written", "files durable", "committed", "swept")  # passed to ``at`` by every step, in this order

SCHEMA = """
CREATE TABLE IF NOT EXISTS node (
    id INTEGER PRIMARY KEY CHECK (id = 0), identity TEXT NOT NULL, incarnation INTEGER NOT NULL, sequence INTEGER NOT NULL,
    base_version INTEGER NOT NULL, base TEXT, start TEXT, trained INTEGER NOT NULL, rewind INTEGER NOT NULL,
    residual TEXT, residual_version INTEGER NOT NULL, chain INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS entry (
    sequence INTEGER PRIMARY KEY, incarnation INTEGER NOT NULL, state TEXT NOT NULL, base_version INTEGER NOT NULL,
    samples REAL NOT NULL, steps INTEGER NOT NULL, seconds REAL NOT NULL, loss REAL, codec TEXT NOT NULL,
    payload TEXT NOT NULL, digest INTEGER NOT NULL, start TEXT NOT NULL, end TEXT NOT NULL,
    before TEXT, after TEXT, chain INTEGER NOT NULL);
"""
FILES_OF = {"node": ("base", "start", "residual"), "entry": ("payload", "start", "end", "before", "after")}


class State(str, Enum):
    """Where an update in the outbox stands."""

    PENDING = "pending"
    OFFERED = "offered"
    ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True)
class Nature:
    """What all updates of one outbox have in common. An outbox of another run, layout or kind is emptied when it is opened."""

    node: str
    run: str
    layout: str  # fingerprint
    kind: Kind
    codec: str
    required: tuple[Interval, ...]  # the elements an update covers


@dataclass(frozen=True, slots=True)
class Entry:
    """An update as it is sent."""

    header: UpdateHeader
    slice: Slice
    payload: memoryview


Encode = Callable[[Tensor, "Tensor | None"], Encoded]  # (the weights the update starts at, the residual) -> what to send


class Outbox:
    """One node's durable state; safe to use from several threads. Raises ``StorageError`` when the disk refuses."""

    def __init__(
        self,
        directory: Path,
        nature: Nature,
        *,
        files: Files | None = None,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        self.counts: Counter[str] = Counter()  # merged, expired, refused, dropped, residuals_dropped
        self._directory, self._nature, self._at = directory, nature, at
        self._files = OsFiles() if files is None else files
        self._lock = threading.RLock()
        with self._storage():
            self._files.make_dir(directory)
            self._files.fsync_dir(directory.parent)
            self._db = sqlite3.connect(directory / "outbox.sqlite", timeout=1.0, check_same_thread=False, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # a second process of this node must not train beside this one
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(SCHEMA)
            self._names = max([0, *(int(n.split(".")[0]) for n in self._files.list_dir(directory) if n.endswith(".raw"))])
            self.incarnation = self._enter()

    def close(self) -> None:
        """Release the files; the state stays."""
        with self._lock:
            self._db.close()

    # ---- where the node stands ----------------------------------------------------------------------------------------------

    @property
    def base_version(self) -> int:
        """The version being trained from, or NO_VERSION."""
        with self._storage():
            return int(self._node()["base_version"])

    @property
    def trained(self) -> bool:
        """Whether an update was made on the base version (it may be settled by now)."""
        with self._storage():
            return bool(self._node()["trained"])

    def local(self) -> Tensor:
        """float32[layout.elements]: the newest local weights on the base version that are in an update; at first, the base."""
        with self._storage():
            node = self._node()
            pending = self._pending(node["base_version"])
            return self._load(pending["end"] if pending else node["start"])

    def adopt(self, version: int, weights: Tensor, max_staleness: int) -> None:
        """Train from this version on. Pending updates keep their own base; a residual older than ``max_staleness`` is dropped."""
        with self._storage():
            node = self._node()
            old = node["residual"] is not None and version - node["residual_version"] > max_staleness
            base = self._save(weights)
            with self._step():
                self._db.execute("UPDATE node SET base_version=?, base=?, start=?, trained=0, rewind=0", (version, base, base))
                if old:
                    self._db.execute("UPDATE node SET residual=NULL, chain=chain+1")
            self.counts["residuals_dropped"] += old

    def rewind(self) -> Tensor | None:
        """If an update on the base version was refused since: give up where it led, start at the base again, and return it."""
        with self._storage():
            node = self._node()
            if not node["rewind"]:
                return None
            with self._step():
                pending = self._pending(node["base_version"])
                if pending is not None:  # it starts where the refused one ended: what it says is not about the base
                    self._undo(pending)
                    self._db.execute("DELETE FROM entry WHERE sequence=?", (pending["sequence"],))
                self._db.execute("UPDATE node SET start=base, trained=0, rewind=0")
            self.counts["dropped"] += pending is not None
            return self._load(node["base"])

    # ---- updates ----------------------------------------------------------------------------------------------------------

    def put(self, work: Work, encode: Encode, end: Tensor) -> UpdateId:
        """Store the update that ``work`` led to, ``end`` being the local weights now; it replaces a pending one on this base.

        ``encode`` is called with the weights at which the update starts and the residual to carry. What it raises (a
        diverged training: ``Refused(NOT_FINITE)``) leaves the outbox as it was.
        """
        with self._storage():
            node = self._node()
            base_version = node["base_version"]
            pending = self._pending(base_version)
            if pending is not None:
                start, before, chain, sequence = (pending[key] for key in ("start", "before", "chain", "sequence"))
                work = _work(pending) + work
                if chain != node["chain"]:  # the residual it carried has been dropped since
                    before, chain = None, node["chain"]
            else:
                start, before, chain, sequence = node["start"], node["residual"], node["chain"], node["sequence"] + 1
            encoded = encode(self._load(start), None if before is None else self._load(before))
            after = None if encoded.residual is None else self._save(encoded.residual)
            payload = bytes_of(encoded.payload)
            values = {
                "sequence": sequence,
                "incarnation": self.incarnation,
                "state": State.PENDING.value,
                "base_version": base_version,
                "samples": work.samples,
                "steps": work.steps,
                "seconds": work.seconds,
                "loss": work.loss,
                "codec": self._nature.codec,
                "payload": self._save_bytes(payload),
                "digest": google_crc32c.value(bytes(payload)),
                "start": start,
                "end": self._save(end),
                "before": before,
                "after": after,
                "chain": chain,
            }
            with self._step():
                self._replace("entry", values)
                node_values = (sequence, after, base_version)
                self._db.execute("UPDATE node SET trained=1, sequence=?, residual=?, residual_version=?", node_values)
            return UpdateId(self._nature.node, self.incarnation, sequence)

    def offer(self) -> Entry | None:
        """The oldest update that the parent may not have, marked as offered before it is returned; None if there is none."""
        with self._storage():
            row = self._db.execute("SELECT * FROM entry WHERE state != ? ORDER BY sequence", (State.ACCEPTED.value,)).fetchone()
            if row is None:
                return None
            if row["state"] == State.PENDING.value:
                with self._step():
                    self._db.execute("UPDATE entry SET state=? WHERE sequence=?", (State.OFFERED.value, row["sequence"]))
                    self._db.execute("UPDATE node SET start=? WHERE base_version=?", (row["end"], row["base_version"]))
            return self._entry(row)

    def record(self, receipt: Receipt) -> bool:
        """Take note of what the parent says of an update; whether it is settled now (False too if it was before)."""
        with self._storage():
            key = (receipt.update_id.incarnation, receipt.update_id.sequence)
            row = self._db.execute("SELECT * FROM entry WHERE incarnation=? AND sequence=?", key).fetchone()
            if row is None or row["state"] == State.PENDING.value:
                return False
            if receipt.state.final:
                with self._step():
                    if receipt.state is Standing.REFUSED:
                        self._undo(row)
                    self._db.execute("DELETE FROM entry WHERE sequence=?", (row["sequence"],))
                self.counts[receipt.state.value] += 1
                return True
            # UNKNOWN of an accepted update: the parent lost its journal. It is sent again.
            state = {Standing.ACCEPTED: State.ACCEPTED, Standing.UNKNOWN: State.OFFERED}.get(receipt.state)
            if state is not None and state.value != row["state"]:
                with self._step():
                    self._db.execute("UPDATE entry SET state=? WHERE sequence=?", (state.value, row["sequence"]))
            return False

    def open(self) -> tuple[UpdateId, ...]:
        """Updates that the parent may know and that are not settled, in order."""
        with self._storage():
            rows = self._db.execute("SELECT * FROM entry WHERE state != ? ORDER BY sequence", (State.PENDING.value,)).fetchall()
            return tuple(UpdateId(self._nature.node, row["incarnation"], row["sequence"]) for row in rows)

    def __len__(self) -> int:
        """How many updates are not settled."""
        with self._storage():
            return int(self._db.execute("SELECT count(*) FROM entry").fetchone()[0])

    # ---- steps --------------------------------------------------------------------------------------------------------------

    def _enter(self) -> int:
        """Begin a new incarnation, later than all before it even if this machine's clock was set back."""
        identity = json.dumps([self._nature.run, self._nature.layout, self._nature.kind.value])
        node = self._db.execute("SELECT * FROM node").fetchone()
        incarnation = max(time.time_ns() // 1000, (node["incarnation"] if node else 0) + 1)
        with self._step():
            if node is not None and node["identity"] == identity:
                self._db.execute("UPDATE node SET incarnation=?", (incarnation,))
            else:
                self.counts["dropped"] = self._db.execute("DELETE FROM entry").rowcount
                fresh = {"id": 0, "identity": identity, "incarnation": incarnation, "sequence": 0, "base_version": NO_VERSION}
                fresh |= {"trained": 0, "rewind": 0, "residual_version": NO_VERSION, "chain": 0}
                self._replace("node", fresh)
        return incarnation

    def _undo(self, row: sqlite3.Row) -> None:
        """Inside a step: the residual forgets what a refused update did to it, and the base is started from again."""
        node = self._node()
        self._db.execute("UPDATE node SET rewind=1 WHERE base_version=?", (row["base_version"],))
        if row["chain"] != node["chain"] or row["after"] is None:
            return
        if node["residual"] == row["after"]:
            self._db.execute("UPDATE node SET residual=?", (row["before"],))
            return
        # Later updates were encoded on top of it: take its change out of their residuals and of the newest one.
        after = self._load(row["after"])
        change = (-after) if row["before"] is None else self._load(row["before"]) - after
        moved = {row["after"]: row["before"], None: None}
        later = "SELECT * FROM entry WHERE sequence > ? AND chain = ? ORDER BY sequence"
        for entry in self._db.execute(later, (row["sequence"], row["chain"])).fetchall():
            for name in (entry["before"], entry["after"]):
                if name not in moved:
                    moved[name] = self._save(self._load(name) + change)
            values = (moved[entry["before"]], moved[entry["after"]], entry["sequence"])
            self._db.execute("UPDATE entry SET before=?, after=? WHERE sequence=?", values)
        if node["residual"] not in moved:
            moved[node["residual"]] = self._save(self._load(node["residual"]) + change)
        self._db.execute("UPDATE node SET residual=?", (moved[node["residual"]],))

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """What is executed inside counts as a whole or not at all; files saved before or inside are durable by then."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._at("files written")
            self._files.fsync_dir(self._directory)
            self._at("files durable")
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._at("committed")
        self._sweep()
        self._at("swept")

    def _sweep(self) -> None:
        """Remove files that no row names."""
        wanted = set()
        for table, columns in FILES_OF.items():
            for row in self._db.execute(f"SELECT {','.join(columns)} FROM {table}"):
                wanted.update(row)
        for name in self._files.list_dir(self._directory):
            if name.endswith(".raw") and name not in wanted:
                with contextlib.suppress(OSError):  # it is in nobody's way; the next step tries again
                    self._files.unlink(self._directory / name)

    @contextlib.contextmanager
    def _storage(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (OSError, sqlite3.Error) as error:
                raise StorageError(f"the outbox in {self._directory} {_trouble(error)}: {error}") from error

    # ---- rows and files -------------------------------------------------------------------------------------------------------

    def _replace(self, table: str, values: dict[str, Any]) -> None:
        columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        self._db.execute(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({marks})", values)

    def _node(self) -> sqlite3.Row:
        row: sqlite3.Row = self._db.execute("SELECT * FROM node").fetchone()
        return row

    def _pending(self, base_version: int) -> sqlite3.Row | None:
        """The pending update on this base: there is one at most, the newest."""
        values = (base_version, State.PENDING.value)
        row: sqlite3.Row | None = self._db.execute("SELECT * FROM entry WHERE base_version=? AND state=?", values).fetchone()
        return row

    def _entry(self, row: sqlite3.Row) -> Entry:
        work, nature = _work(row), self._nature
        header = UpdateHeader(
            update_id=UpdateId(nature.node, row["incarnation"], row["sequence"]),
            kind=nature.kind,
            tier=Tier.EDGE,
            base_version=row["base_version"],
            codec=row["codec"],
            layout=nature.layout,
            steps=work.steps,
            seconds=work.seconds,
            metrics=work.metrics,
        )
        carried = Slice(intervals=nature.required, samples=work.samples, digest=row["digest"])
        return Entry(header, carried, memoryview(self._read(row["payload"])))

    def _save(self, vector: Tensor) -> str:
        return self._save_bytes(bytes_of(vector.detach().to(torch.float32).contiguous().view(torch.uint8)))

    def _save_bytes(self, data: memoryview) -> str:
        """Write and fsync a new file; its name counts once a row holds it."""
        self._names += 1
        name = f"{self._names}.raw"
        file = self._files.create(self._directory / name)
        try:
            file.pwrite(data, 0)
            file.fsync()
        finally:
            file.close()
        return name

    def _load(self, name: str) -> Tensor:
        return torch.frombuffer(bytearray(self._read(name)), dtype=torch.float32)

    def _read(self, name: str) -> bytes:
        file = self._files.open(self._directory / name)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()


def _trouble(error: Exception) -> str:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return "is in use by another process of this node"
    if type(error) is sqlite3.DatabaseError:
        return "is damaged (if it is removed, the node starts anew; what it had not delivered is lost)"
    return "cannot be read or written"


def _work(row: sqlite3.Row) -> Work:
    loss = math.nan if row["loss"] is None else row["loss"]  # SQLite keeps a NaN as NULL
    return Work(row["samples"], row["steps"], row["seconds"], loss)
