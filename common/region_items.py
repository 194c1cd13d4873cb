"""A region's open items: brought with each version, handed out here; what devices share goes on to the parent."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleetddp.common.clock import Clock
from fleetddp.common.errors import Reason, Refused, Unreachable
from fleetddp.common.events import Share
from fleetddp.common.item_pool import check_sample
from fleetddp.common.open_items import ItemStore, Shared, bring
from fleetddp.common.transport import Parent
from fleetddp.common.update import NO_VERSION


class RegionItems(ItemStore):
    """Of region ``node``. What has to be asked of the parent is refused with ``NO_PARENT`` while that cannot be reached."""

    def __init__(self, db: sqlite3.Connection, clock: Clock, parent: Parent, *, node: str, incarnation: int, run: str) -> None:
        super().__init__(db, clock)
        self._parent = parent
        self._member = Share(node=node, incarnation=incarnation, of=node, run=run)

    def wanted(self, offer: Share, most_bytes: int) -> tuple[str, ...]:
        """See ``ItemPool``. What is here already need not be sent."""
        self.check_shape(offer.shape)
        here = self._here(offer.digests)
        new = [digest for digest in offer.digests if digest not in here]
        return tuple(new[: self.at_once(most_bytes)])

    def take(self, offer: Share, found: Mapping[str, bytes]) -> Shared:
        """Offer these, and what is here of the rest, to the parent in the device's name."""
        for digest, data in found.items():
            check_sample(digest, data, self._shape())
        here = self._here(offer.digests)
        own = replace(self._member, of=offer.of, shape=offer.shape, digests=(*found, *here))

        def data_of(digest: str) -> bytes:
            return found[digest] if digest in found else self.read(*here[digest])

        try:
            return self._parent.share(own, data_of)
        except Unreachable as error:
            raise Refused(Reason.NO_PARENT, str(error)) from error

    def withdraw(self, node: str, digests: Sequence[str]) -> int:
        """Take it back at the parent; what is gone there is erased here, too."""
        try:
            erased = self._parent.withdraw(replace(self._member, of=node, digests=tuple(digests), takes_back=True))
            if erased and self.known > NO_VERSION:
                bring(self._parent, self, self.known)
            return erased
        except Unreachable as error:
            raise Refused(Reason.NO_PARENT, str(error)) from error

    def _here(self, digests: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Which of these are here, and where their bytes lie."""
        size, held = self.item_bytes, self.held()
        slots = {item.digest: item.slot for item in self.items() if item.slot in held}
        return {digest: (slots[digest] * size, (slots[digest] + 1) * size) for digest in digests if digest in slots}
