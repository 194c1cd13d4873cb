"""A region's journal: besides what any aggregator keeps, its partials until they are settled; versions as the parent serves them.

    sealed/INCARNATION.SEQUENCE.partial  one file a partial, from its making until it is concluded
    sealed/INCARNATION.SEQUENCE.change   what making it did to the residual, so that it can be undone
    sealed/N.residual                    what the codec of the partials left out and no later one has carried yet
    versions/NUMBER.payload              a version's published payload, byte for byte as the parent serves it

As for the rest, a row exists only if the files it names are durable. ``REGION_CRASH_POINTS`` names the moments between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from fleetddp.common.events import Conclusion, Joined, Sealing
from fleetddp.common.files import File
from fleetddp.common.journal import DIRECT, INSIDE, PARTIAL, Journal
from fleetddp.common.layout import Layout
from fleetddp.common.recovered import (
    RecoveredRegion,
    receipt_from_json,
    receipt_to_json,
    rules_from_json,
    rules_to_json,
    sealing_from_json,
    sealing_to_json,
    update_from_json,
    update_to_json,
    version_to_json,
)
from fleetddp.common.stored import storage
from fleetddp.common.update import NO_VERSION, Kind, State, Tier, Update, UpdateId, Version

REGION_CRASH_POINTS = (
    "create-region:rows-written",
    "create-region:committed",
    "enter:rows-written",
    "enter:committed",
    "rules:rows-written",
    "rules:committed",
    "decide-seal:rows-written",
    "decide-seal:committed",
    "seal:begun",
    "seal:synced",
    "seal:directory-synced",
    "seal:rows-written",
    "seal:committed",
    "seal:file-retired",
    "conclude:synced",
    "conclude:directory-synced",
    "conclude:rows-written",
    "conclude:committed",
    "conclude:file-retired",
    "adopt:synced",
    "adopt:renamed",
    "adopt:directory-synced",
    "adopt:rows-written",
    "adopt:committed",
    "adopt:file-retired",
)

_TABLES = (
    "CREATE TABLE sealed (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, body TEXT NOT NULL, made TEXT, chain INTEGER)",
    "CREATE TABLE closed (id TEXT PRIMARY KEY, version INTEGER NOT NULL, body TEXT NOT NULL)",
)


@dataclass(frozen=True, slots=True)
class Residual:
    """A file of one float32 vector for each of ``tiers``, in their order; ``chain`` counts how often residuals were dropped."""

    name: str
    tiers: tuple[Tier, ...]
    version: int  # the newest when it was written
    chain: int

    def to_json(self) -> str:
        """The journal's note of it."""
        return json.dumps([self.name, [tier.value for tier in self.tiers], self.version, self.chain])

    @classmethod
    def from_json(cls, text: str) -> Residual:
        """The inverse of ``to_json``."""
        name, tiers, version, chain = json.loads(text)
        return cls(name, tuple(Tier(tier) for tier in tiers), version, chain)


class RegionJournal(Journal):
    """The journal of one region in one folder; see ``Journal`` for what is raised, and for ``at``."""

    _suffix = "payload"

    def _open(self) -> None:
        self._sealed = self.directory / "sealed"
        self._files.make_dir(self._sealed)
        super()._open()
        if self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'closed'").fetchone()[0] == 0:
            with self._transaction("create-region") as db:
                for statement in _TABLES:
                    db.execute(statement)

    # ---- resume ---------------------------------------------------------------------------------------------------------------

    def enter(self, node: str) -> RecoveredRegion:
        """Begin a new incarnation, later than all before it. Removes files of partials that no row names."""
        with self._lock, storage(f"cannot read the journal in {self.directory}"):
            rows = self._db.execute("SELECT body, made FROM sealed ORDER BY place").fetchall()
            closed = tuple(receipt_from_json(row[0]) for row in self._db.execute("SELECT body FROM closed ORDER BY id"))
            rules, before, sequence = (self._fact(name) for name in ("rules", "incarnation", "sequence"))
        incarnation = max(time.time_ns() // 1000, int(before or 0) + 1)
        with self._transaction("enter"):
            self._set("incarnation", str(incarnation))
        sealings = tuple((sealing_from_json(body), update_from_json(made) if made else None) for body, made in rows)
        self._sweep("recover")
        return RecoveredRegion(
            node=node,
            incarnation=incarnation,
            sequence=int(sequence or 0),
            sealings=sealings,
            rules=rules_from_json(rules) if rules else None,
            closed=closed,
        )

    def rules(self, joined: Joined) -> None:
        """What the parent said at a join."""
        with self._transaction("rules"):
            self._set("rules", rules_to_json(joined))

    def layout(self) -> Layout | None:
        """The run's, once a version was adopted."""
        with self._lock, storage("cannot read the layout"):
            text = self._fact("layout")
        return None if text is None else Layout.from_json(text.encode())

    # ---- partials -------------------------------------------------------------------------------------------------------------

    def decide_seal(self, sealing: Sealing) -> None:
        """From now on the bytes of this partial are fixed. The next window opened at the same time."""
        with self._transaction("decide-seal"):
            self._put(sealing)
            opened = self._fact("window")
            if opened is None or json.loads(opened) < sealing.at:
                self._set("window", json.dumps(sealing.at))

    def _put(self, sealing: Sealing) -> None:
        row = (str(sealing.update_id), sealing_to_json(sealing))
        self._db.execute("INSERT OR IGNORE INTO sealed (id, body) VALUES (?, ?)", row)
        self._set("sequence", str(max(sealing.update_id.sequence, int(self._fact("sequence") or 0))))

    def made(self, update_id: UpdateId) -> Update | None:
        """The partial of this id, if it is durable."""
        with self._lock, storage(f"cannot read {update_id}"):
            row = self._db.execute("SELECT made FROM sealed WHERE id = ?", (str(update_id),)).fetchone()
        return update_from_json(row[0]) if row and row[0] else None

    def begin_sealed(self, name: str) -> File:
        """A new file in the folder of partials."""
        with storage(f"cannot begin {name}"):
            file = self._files.create(self._sealed / name)
            self.at("seal:begun")
            return file

    def seal(self, update: Update, files: Sequence[File], residual: Residual | None) -> None:
        """Make a partial durable, together with the residual it leaves. ``files`` hold what was written; they stay open."""
        self._sync(files, "seal")
        with self._transaction("seal") as db:
            row = (update_to_json(update), None if residual is None else residual.chain, str(update.update_id))
            db.execute("UPDATE sealed SET made = ?, chain = ? WHERE id = ?", row)
            if residual is not None:
                self._set("residual", residual.to_json())
        self._sweep("seal")

    def sealed_file(self, name: str) -> File:
        """A file of the folder of partials, to read."""
        with storage(f"cannot read {name}"):
            return self._files.open(self._sealed / name)

    def partial_payload(self, update_id: UpdateId) -> bytes:
        """The encoded bytes of a partial that is durable."""
        file = self.sealed_file(partial_name(update_id))
        with storage(f"cannot read the payload of {update_id}"):
            try:
                return file.pread(file.size(), 0)
            finally:
                file.close()

    def residual(self) -> Residual | None:
        """What the partials so far have left out."""
        with self._lock, storage("cannot read the residual"):
            text = self._fact("residual")
        return None if text is None else Residual.from_json(text)

    def chain_of(self, update_id: UpdateId) -> int | None:
        """Of the residual that a partial left; None: it left none, or is concluded."""
        with self._lock, storage(f"cannot read {update_id}"):
            row = self._db.execute("SELECT chain FROM sealed WHERE id = ?", (str(update_id),)).fetchone()
        return row[0] if row else None

    def conclude(self, conclusion: Conclusion, files: Sequence[File], residual: Residual | None) -> None:
        """Settle what a conclusion names, in one transaction. ``residual``: to go on with, if it changes; in ``files``."""
        if files:
            self._sync(files, "conclude")
        settled = [receipt.update_id for receipt in conclusion.receipts]
        with self._transaction("conclude") as db:
            newest = db.execute("SELECT max(number) FROM versions").fetchone()[0]
            for receipt in conclusion.receipts:
                if receipt.state is State.MERGED:
                    row = (str(receipt.update_id), receipt.version, self._how(receipt.update_id))
                    db.execute("INSERT OR REPLACE INTO merged (id, version, how) VALUES (?, ?, ?)", row)
                else:
                    body = (str(receipt.update_id), NO_VERSION if newest is None else newest, receipt_to_json(receipt))
                    db.execute("INSERT OR REPLACE INTO closed (id, version, body) VALUES (?, ?, ?)", body)
            gone = [*settled, *conclusion.dropped]
            db.executemany("DELETE FROM updates WHERE id = ?", [(str(update_id),) for update_id in gone])
            self._raise_high_water(sorted(settled))
            if conclusion.partial is not None:
                db.execute("DELETE FROM sealed WHERE id = ?", (str(conclusion.partial),))
            for sealing in conclusion.instead:
                self._put(sealing)
            if residual is not None:
                self._set("residual", residual.to_json())
        for update_id in gone:
            with suppress(OSError):
                self._files.unlink(self._payload_path(update_id))
            self.at("conclude:file-retired")
        self._sweep("conclude")

    def _how(self, update_id: UpdateId) -> int:
        """How a concluded update came here."""
        row = self._db.execute("SELECT kind FROM updates WHERE id = ?", (str(update_id),)).fetchone()
        return INSIDE if row is None else PARTIAL if row[0] == Kind.PARTIAL.value else DIRECT

    def _sync(self, files: Sequence[File], name: str) -> None:
        with storage(f"cannot make a partial durable ({name})"):
            for file in files:
                file.fsync()
            self.at(f"{name}:synced")
            self._files.fsync_dir(self._sealed)
            self.at(f"{name}:directory-synced")

    def _sweep(self, name: str) -> None:
        """Remove files in the folder of partials that no row names."""
        residual = self.residual()
        with self._lock, storage("cannot list the partials"):
            wanted = {residual.name} if residual is not None else set()
            for (text,) in self._db.execute("SELECT id FROM sealed WHERE made IS NOT NULL"):
                update_id = UpdateId.parse(text)
                wanted |= {partial_name(update_id), change_name(update_id)}
            for found in self._files.list_dir(self._sealed):
                if found not in wanted:
                    with suppress(OSError):  # it is in nobody's way; the next sweep tries again
                        self._files.unlink(self._sealed / found)
                    self.at(f"{name}:file-retired" if name != "recover" else "recover:file-removed")

    # ---- versions -------------------------------------------------------------------------------------------------------------

    def adopt(self, version: Version, draft: File, layout: Layout) -> None:
        """Keep a version of the parent's, whose payload ``draft`` holds, and go on from it. Closes ``draft``.

        Versions may be left out; an older number than the newest takes the newer ones' place (the parent lost them).
        """
        number, target = version.number, self._versions / self._version_name(version.number)
        with storage(f"cannot adopt version {number}"):
            try:
                draft.fsync()
                self.at("adopt:synced")
            finally:
                draft.close()
            self._files.rename(self._draft_path(number), target)
            self.at("adopt:renamed")
            self._files.fsync_dir(self._versions)
            self.at("adopt:directory-synced")
        with self._transaction("adopt") as db:
            if self._fact("layout") is None:
                self._set("layout", layout.to_json().decode())
                self._set("began", json.dumps(version.published_at))
            kept = [n for (n,) in db.execute("SELECT number FROM versions ORDER BY number DESC") if n < number][: self._keep - 1]
            retired = [n for (n,) in db.execute("SELECT number FROM versions") if n not in kept and n != number]
            db.executemany("DELETE FROM versions WHERE number = ?", [(n,) for n in retired])
            row = (number, 0, version_to_json(version))
            db.execute("INSERT OR REPLACE INTO versions (number, payload_start, body) VALUES (?, ?, ?)", row)
            oldest = min([number, *kept])
            db.execute("DELETE FROM merged WHERE version < ?", (oldest,))
            db.execute("DELETE FROM closed WHERE version < ?", (oldest,))
        for n in retired:
            with suppress(OSError):
                self._files.unlink(self._versions / self._version_name(n))
            self.at("adopt:file-retired")


def partial_name(update_id: UpdateId) -> str:
    """The file of a partial's payload."""
    return f"{update_id.incarnation}.{update_id.sequence}.partial"


def change_name(update_id: UpdateId) -> str:
    """The file of what a partial did to the residual."""
    return f"{update_id.incarnation}.{update_id.sequence}.change"


def residual_name(update_id: UpdateId, *, undone: bool = False) -> str:
    """The file of the residual after a partial was made, or undone."""
    return f"{update_id.incarnation}.{update_id.sequence}.{'undone' if undone else 'residual'}"
