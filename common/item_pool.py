"""The coordinator's open items: who may fill a slot, when its item is labelled, and what erases it."""

from __future__ import annotations

import json
import math
import secrets
import sqlite3
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fleetddp.common.clock import Clock
from fleetddp.common.config import OpenItemsConfig
from fleetddp.common.errors import ConfigError, Reason, Refused, StorageError
from fleetddp.common.events import Share
from fleetddp.common.open_items import ItemStore, Shared, digest_of_bytes
from fleetddp.common.update import NO_VERSION

ITEM_CRASH_POINTS = tuple(
    f"{write}:{moment}"
    for write in ("found", "share", "own", "fix", "withdraw", "expire")
    for moment in ("rows-written", "committed")
)


class ItemPool(ItemStore):
    """Slots are filled in order, each once in a run: one that was erased stays empty, and its content is not taken again.

    ``began``: the run has versions, so that there must be one. Raises ``StorageError`` if there is none, ``ConfigError`` where
    the samples here are of another shape than the fleet file's.
    """

    def __init__(
        self,
        db: sqlite3.Connection,
        config: OpenItemsConfig,
        shape: Sequence[int],
        clock: Clock,
        *,
        began: bool = False,
        at: Callable[[str], None] = lambda point: None,
    ) -> None:
        super().__init__(db, clock, at=at)
        self._config = config
        if self._fact("pool") is None:
            if began:
                raise StorageError(
                    "the run's open items are gone, of which its versions hold labels: restore the journal's folder"
                )
            with self._writing("found"):
                self._set("pool", str(secrets.randbits(62) + 1))
                self._set("shape", json.dumps(list(shape)))
        if self.shape != tuple(shape):
            raise ConfigError(f"proxy.open: this run's items have the shape {self.shape}, not {tuple(shape)}")

    # ---- what devices share ---------------------------------------------------------------------------------------------------

    def wanted(self, offer: Share, most_bytes: int) -> tuple[str, ...]:
        """Of what is offered, what is to be sent now: what is not known and has room, about ``most_bytes`` at once.

        What others have shared already is this node's too from now on. Raises ``Refused``: WRONG_SHAPE; ITEMS_FULL where
        nothing of it is known, and there is no room.
        """
        self.check_shape(offer.shape)
        known = self._own(offer)
        new = [digest for digest in dict.fromkeys(offer.digests) if digest not in known]
        room = self.room(offer.of)
        if new and not known and not room:
            raise Refused(Reason.ITEMS_FULL, f"there is no room for more samples of {offer.of}: {self._usage(offer.of)}")
        return tuple(new[: min(room, self.at_once(most_bytes))])

    def take(self, offer: Share, found: Mapping[str, bytes]) -> Shared:
        """Keep these samples, by digest; durable when it returns. ``Refused``: WRONG_SIZE, NOT_FINITE, WRONG_DIGEST."""
        shape = self._shape()
        for digest, data in found.items():
            check_sample(digest, data, shape)
        expires_at = self._clock.now() + 3600.0 * self._config.retention_hours
        with self._writing("share") as db:
            for digest, data in found.items():
                known = db.execute("SELECT slot FROM items WHERE digest = ?", (digest,)).fetchone()
                if known is None and self.room(offer.of):
                    slot = db.execute("SELECT count(*) FROM items").fetchone()[0]
                    row = (slot, digest, expires_at, data)
                    db.execute("INSERT INTO items (slot, digest, expires_at, data) VALUES (?, ?, ?, ?)", row)
                    db.execute("INSERT INTO owners (slot, node) VALUES (?, ?)", (slot, offer.of))
        return Shared(tuple(self._own(offer)), self.room(offer.of))

    def room(self, node: str) -> int:
        """For how many more of this node's samples there is room."""
        filled, own = self._filled(node)
        quota = math.inf if self._config.per_node is None else self._config.per_node - own
        return int(max(0, min(self._config.items - filled, quota)))

    def withdraw(self, node: str, digests: Sequence[str]) -> int:
        """A node takes back what it shared (no digests: all of it); what nobody else shares is erased. Returns how many were."""
        which, given = ("", []) if not digests else (f"AND digest IN ({','.join('?' * len(digests))})", list(digests))
        mine = f"SELECT slot FROM items NATURAL JOIN owners WHERE node = ? {which}"
        with self._writing("withdraw") as db:
            slots = [slot for (slot,) in db.execute(mine, [node, *given]).fetchall()]
            db.executemany("DELETE FROM owners WHERE slot = ? AND node = ?", [(slot, node) for slot in slots])
            left = "NOT EXISTS (SELECT 1 FROM owners WHERE owners.slot = items.slot)"
            erased = sum(
                db.execute(f"UPDATE items SET data = NULL WHERE slot = ? AND data NOTNULL AND {left}", (slot,)).rowcount
                for slot in slots
            )
        if erased:
            self._empty_log()
        return erased

    # ---- versions -------------------------------------------------------------------------------------------------------------

    def fix(self, version: int) -> None:
        """Before ``version`` is published: what is new is labelled from it on, and what was erased no longer."""
        with self._reading():
            changes = "SELECT 1 FROM items WHERE since ISNULL OR (until ISNULL AND data ISNULL) LIMIT 1"
            if self._db.execute(changes).fetchone() is None:
                return
        with self._writing("fix") as db:
            db.execute("UPDATE items SET since = ? WHERE since ISNULL", (version,))
            db.execute("UPDATE items SET until = ? WHERE until ISNULL AND data ISNULL", (version,))

    # ---- within ---------------------------------------------------------------------------------------------------------------

    @property
    def known(self) -> int:
        """Nobody tells the pool."""
        return NO_VERSION

    def _own(self, offer: Share) -> list[str]:
        """Which of what is offered is known; what of that is here is this node's, too."""
        marks = ",".join("?" * len(offer.digests))
        with self._reading():
            found = self._db.execute(
                f"SELECT slot, digest, data NOTNULL, EXISTS (SELECT 1 FROM owners WHERE owners.slot = items.slot AND node = ?) "
                f"FROM items WHERE digest IN ({marks})",
                [offer.of, *offer.digests],
            ).fetchall()
        new = [(slot, offer.of) for slot, _, here, own in found if here and not own]
        if new:
            with self._writing("own") as db:
                db.executemany("INSERT OR IGNORE INTO owners (slot, node) VALUES (?, ?)", new)
        return [digest for _, digest, _, _ in found]

    def _filled(self, node: str) -> tuple[int, int]:
        """How many slots are filled, and how many of these with what this node shares."""
        with self._reading():
            filled = self._db.execute("SELECT count(*) FROM items").fetchone()[0]
            own = self._db.execute("SELECT count(*) FROM owners WHERE node = ?", (node,)).fetchone()[0]
        return int(filled), int(own)

    def _usage(self, node: str) -> str:
        (filled, own), most = self._filled(node), self._config
        return f"{filled} of {most.items} slots are filled (proxy.open.items), {own} by it (per_node: {most.per_node})"


def check_sample(digest: str, data: bytes, shape: Sequence[int]) -> None:
    """Whether this is the sample that was announced, and one. ``Refused``: WRONG_SIZE, NOT_FINITE, WRONG_DIGEST."""
    due = 4 * math.prod(shape)
    if len(data) != due:
        raise Refused(Reason.WRONG_SIZE, f"sample {digest[:12]} has {len(data)} bytes; due are {due}")
    if not bool(np.isfinite(np.frombuffer(data, dtype="<f4")).all()):
        raise Refused(Reason.NOT_FINITE, f"sample {digest[:12]} holds inf or nan")
    found = digest_of_bytes(data, shape)
    if found != digest:
        raise Refused(Reason.WRONG_DIGEST, f"sample {digest[:12]} arrived as {found[:12]}")
