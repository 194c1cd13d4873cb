"""What became of each update: enough to answer a repeat, in bounded memory.

Accepted updates are remembered until they are settled. Of the settled ones the newest are remembered by id; of those that
were merged and forgotten, here or by the journal, high-water marks are kept (``high_water``). A partial stands for its leaf
updates: a leaf id in it counts as accepted or merged with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from fleetddp.common.errors import Reason
from fleetddp.common.high_water import HighWater, Mark
from fleetddp.common.update import NO_VERSION, Receipt, State, Update, UpdateId

REMEMBERED = 65_536  # settled ids


class _Accepted(NamedTuple):
    """An update, and what each heartbeat that asks about this id of it is told."""

    update: Update
    receipt: Receipt


class Receipts:
    """The state of every update this aggregator has answered for."""

    def __init__(
        self,
        high_water: Mapping[tuple[str, int], int],
        merged: Mapping[UpdateId, int],
        remembered: int = REMEMBERED,
        *,
        gaps: Mapping[tuple[str, int], Collection[int]] | None = None,
    ) -> None:
        self._remembered = remembered
        self._accepted: dict[UpdateId, _Accepted] = {}  # by own id and by each leaf id
        self._held: set[UpdateId] = set()
        self._settled: OrderedDict[UpdateId, Receipt] = OrderedDict()  # oldest first
        self._marks = HighWater()
        for (node, incarnation), sequence in sorted(high_water.items()):
            self._marks.put(node, incarnation, Mark.at(sequence, (gaps or {}).get((node, incarnation), ())))
        for update_id, version in sorted(merged.items(), key=lambda item: (item[1], item[0])):
            self._settle(Receipt(update_id=update_id, state=State.MERGED, version=version))

    def accept(self, update: Update) -> tuple[Receipt, ...]:
        """Note a durable update; receipts of it and of each leaf update in it."""
        receipts = tuple(Receipt(update_id=update_id, state=State.ACCEPTED) for update_id in _all_ids(update))
        for receipt in receipts:
            self._accepted[receipt.update_id] = _Accepted(update, receipt)
        return receipts

    def merge(self, update_id: UpdateId, version: int) -> tuple[Receipt, ...]:
        """Settle an accepted update, and the leaf updates in it, as merged into ``version``."""
        return self._close(update_id, State.MERGED, version, "", "")

    def expire(self, update_id: UpdateId, reason: Reason, message: str) -> tuple[Receipt, ...]:
        """Settle an accepted update, and the leaf updates in it, that no version will ever hold."""
        return self._close(update_id, State.EXPIRED, NO_VERSION, reason.value, message)

    def note(self, receipt: Receipt) -> None:
        """Remember how an update was settled, so that a repeat gets the same answer."""
        self._settle(receipt)

    def accepted(self, update_id: UpdateId) -> Update | None:
        """The accepted, unsettled update that is, or holds, this id."""
        known = self._accepted.get(update_id)
        return None if known is None else known.update

    def find(self, update_id: UpdateId) -> Receipt | None:
        """The receipt of an update accepted or settled here; None if it was never heard of."""
        known = self._accepted.get(update_id)
        if known is not None:
            return known.receipt
        if update_id in self._held:
            return Receipt(update_id=update_id, state=State.ACCEPTED)
        receipt = self._settled.get(update_id)
        if receipt is None and self._marks.covers(update_id):
            return Receipt(update_id=update_id, state=State.MERGED, message="settled; the version is no longer remembered")
        return receipt

    def taken(self, ids: Iterable[UpdateId]) -> tuple[UpdateId, ...]:
        """Those of ``ids`` that were accepted or settled already: a sum that holds them must not be merged."""
        return tuple(i for i in ids if self.find(i) is not None)

    def held_by(self, update_id: UpdateId) -> tuple[UpdateId, ...]:
        """An accepted update's id and those of the leaf updates in it."""
        return _all_ids(self._accepted[update_id].update)

    def release(self, update_id: UpdateId) -> Update:
        """Forget an accepted update, and the leaf updates in it, as if it had never been offered."""
        update = self._accepted[update_id].update
        for held in _all_ids(update):
            del self._accepted[held]
        return update

    def hold(self, update_id: UpdateId) -> None:
        """A parent has accepted this update, which is not here: it counts as accepted until ``close`` or ``unhold``."""
        self._held.add(update_id)

    def unhold(self, update_id: UpdateId) -> None:
        """The parent does not have it after all."""
        self._held.discard(update_id)

    def close(self, receipt: Receipt) -> None:
        """Settle one update, accepted or held, by a final receipt of a parent."""
        self._accepted.pop(receipt.update_id, None)
        self._held.discard(receipt.update_id)
        self._settle(receipt)

    def newest(self, node: str) -> int:
        """The newest incarnation of this node that there is a mark of; -1 for none."""
        return self._marks.newest(node)

    def _close(self, update_id: UpdateId, state: State, version: int, reason: str, message: str) -> tuple[Receipt, ...]:
        receipts = []
        for held in _all_ids(self._accepted[update_id].update):
            del self._accepted[held]
            receipts.append(Receipt(update_id=held, state=state, version=version, reason=reason, message=message))
            self._settle(receipts[-1])
        return tuple(receipts)

    def _settle(self, receipt: Receipt) -> None:
        self._settled[receipt.update_id] = receipt
        self._settled.move_to_end(receipt.update_id)
        if len(self._settled) > self._remembered:
            _, oldest = self._settled.popitem(last=False)
            if oldest.state is State.MERGED:
                self._marks.settle(oldest.update_id)


def _all_ids(update: Update) -> tuple[UpdateId, ...]:
    """Its own id, then those of the leaf updates in it if it is a partial."""
    leaf_ids = update.header.leaf_ids
    return leaf_ids if leaf_ids == (update.update_id,) else (update.update_id, *leaf_ids)
