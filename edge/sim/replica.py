"""The bytes of the versions, made a second time: by a publisher that never crashes and whose updates come in another order.

Payloads are taken from their senders, before the network; the root's come through the network, the staging area, the journal and
its crashes. That both publish the same bytes is invariants 2, 3 and 7 of design §11, for a run with real weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleetddp.common.config import FleetConfig
from fleetddp.common.events import Decision
from fleetddp.common.layout import Layout
from fleetddp.common.publish import Weights
from fleetddp.common.update import Update, UpdateId
from fleetddp.edge.sim.durable import FOLDER, DurableStore


class Replica:
    """Follows a root over ``DurableStore``. ``wrong`` is told what differs."""

    def __init__(self, config: FleetConfig, root: DurableStore, wrong: Callable[[str], None]) -> None:
        self._root, self._wrong = root, wrong
        self._store = DurableStore(config)
        self._journal, _, self._publisher = self._store.open()
        self._sent: dict[UpdateId, bytes] = {}

    def found(self, layout: Layout, weights: Weights, at: float) -> None:
        """The root starts from these weights."""
        self._publisher.found_weights(layout, weights, at)
        self._compare(0)

    def sent(self, update_id: UpdateId, payload: memoryview) -> None:
        """A member sends an update, perhaps not for the first time."""
        before = self._sent.setdefault(update_id, bytes(payload))
        if before != payload:
            self._wrong(f"{update_id} was sent with other bytes than before")

    def made(self, number: int, decision: Decision | None, updates: Sequence[Update]) -> None:
        """The root has made a version of these."""
        missing = [str(update.update_id) for update in updates if update.update_id not in self._sent]
        if missing:
            self._wrong(f"version {number} holds updates that nobody sent: {', '.join(missing)}")
            return
        for update in sorted(updates, key=lambda update: update.update_id, reverse=True):
            payload = self._sent[update.update_id]
            if len(payload) != update.payload_bytes:
                self._wrong(f"{update.update_id} was sent with {len(payload)} bytes, accepted with {update.payload_bytes}")
                return
            self._journal.stage(update.update_id, len(payload)).write(0, payload)
            self._journal.accept(update, 0.0)
        if decision is not None:
            self._publisher.merge(decision)
        else:
            self._publisher.found(updates[0], 0.0)
        self._compare(number)

    def _compare(self, number: int) -> None:
        ours, theirs = self._bytes(self._store, number), self._bytes(self._root, number)
        if ours != theirs:
            at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
            self._wrong(f"version {number} has other bytes than without crashes and in another order, from byte {at} on")

    def _bytes(self, store: DurableStore, number: int) -> bytes:
        """A whole version file: what is published, the exact weights behind it, and the outer optimizer's state."""
        file = store.files.open(FOLDER / "versions" / f"{number}.safetensors")
        return file.pread(file.size(), 0)
