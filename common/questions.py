"""Leaf updates whose fate is decided elsewhere, and about which a region therefore asks its parent. One half of ``regional``.

There are three kinds: those of the region's own that the parent has by another way (OVERLAP), and that come back into the window
if they get lost there; those that lie in a partial from below, or were sent to another parent first, and are the parent's now
(they count as accepted); and those that a member asks about and nobody here knows.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from fleetddp.common.events import Conclude, Conclusion, Effect, Settle
from fleetddp.common.receipts import Receipts
from fleetddp.common.update import Receipt, State, Update, UpdateId

MAX_INQUIRIES = 4096  # asked on behalf of members at one time; and answers UNKNOWN that are remembered


class Questions:
    """What the parent is asked about single updates; shares the receipts with the aggregator."""

    def __init__(self, receipts: Receipts) -> None:
        self._receipts = receipts
        self._elsewhere: dict[UpdateId, Update | None] = {}  # None: no payload of it is here
        self._inquiries: dict[UpdateId, None] = {}
        self._denied: OrderedDict[UpdateId, None] = OrderedDict()  # the parent does not know these

    def __contains__(self, update_id: UpdateId) -> bool:
        return update_id in self._elsewhere or update_id in self._inquiries

    @property
    def ids(self) -> list[UpdateId]:
        """What is asked about."""
        return [*self._elsewhere, *self._inquiries]

    @property
    def own(self) -> list[Update]:
        """The region's own updates that are elsewhere."""
        return [update for update in self._elsewhere.values() if update is not None]

    def elsewhere(self, update: Update) -> None:
        """An accepted update has come to the parent by another way."""
        self._elsewhere[update.update_id] = update

    def hold(self, update_id: UpdateId) -> None:
        """The parent has accepted what is not here; keep asking until it is settled."""
        self._receipts.hold(update_id)
        self._elsewhere[update_id] = None

    def inquire(self, receipt: Receipt) -> Receipt:
        """What to tell a member of an update that nobody here knows: STAGED, until the parent has answered."""
        update_id = receipt.update_id
        room = update_id in self._inquiries or len(self._inquiries) < MAX_INQUIRIES
        if receipt.state is not State.UNKNOWN or update_id in self._denied or not room:
            return receipt
        self._inquiries[update_id] = None
        return replace(receipt, state=State.STAGED)

    def answered(self, receipt: Receipt, out: list[Effect]) -> Update | None:
        """The parent says how one of ``ids`` stands. Returns an update that is to go into the open window after all."""
        update_id, receipt = receipt.update_id, replace(receipt, duplicate=False)
        if receipt.state is State.STAGED:
            return None
        asked_for_a_member = update_id in self._inquiries
        self._inquiries.pop(update_id, None)
        if receipt.state is State.ACCEPTED:
            if asked_for_a_member and self._receipts.find(update_id) is None:  # it may have come here meanwhile
                self.hold(update_id)
                out.append(Settle(receipts=(receipt,)))
            return None
        here = update_id in self._elsewhere
        update = self._elsewhere.pop(update_id, None)
        if receipt.state is State.UNKNOWN:
            if update is None:
                self._receipts.unhold(update_id)
                self._deny(update_id, out)
            return update
        if here:
            out.append(Conclude(conclusion=Conclusion(partial=None, receipts=(receipt,))))
        elif self._receipts.find(update_id) is None:
            self._receipts.note(receipt)
            out.append(Settle(receipts=(receipt,)))
        return None

    def _deny(self, update_id: UpdateId, out: list[Effect]) -> None:
        """Nobody knows it: its sender is to push it."""
        if self._receipts.find(update_id) is not None:  # which it has done meanwhile
            return
        self._denied[update_id] = None
        if len(self._denied) > MAX_INQUIRIES:
            self._denied.popitem(last=False)
        out.append(Settle(receipts=(Receipt(update_id=update_id, state=State.UNKNOWN),)))
