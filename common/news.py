"""News for one ``Watch`` stream, gathered until they are taken: what a slow watcher holds is bounded."""

from __future__ import annotations

from collections.abc import Callable

from fleetddp.common.events import News
from fleetddp.common.update import Receipt, UpdateId

MAX_RECEIPTS = 256  # kept for a watcher that does not take them; a heartbeat's ``open`` asks for what was dropped


class Watcher:
    """One watch stream's mailbox. ``notify`` is called when there is something to take."""

    __slots__ = ("_news", "_notify", "_receipts", "node")

    def __init__(self, node: str, notify: Callable[[], None]) -> None:
        self.node = node
        self._notify = notify
        self._news: News | None = None
        self._receipts: dict[UpdateId, Receipt] = {}

    def put(self, news: News) -> None:
        """Add news; the newest version, reason of ending and closing time count."""
        for receipt in news.receipts:
            self._receipts.pop(receipt.update_id, None)
            self._receipts[receipt.update_id] = receipt
            if len(self._receipts) > MAX_RECEIPTS:
                del self._receipts[next(iter(self._receipts))]
        self._news = news
        self._notify()

    def take(self) -> News | None:
        """Everything since the last call, as one message; None if there is nothing."""
        news, self._news = self._news, None
        if news is None:
            return None
        receipts, self._receipts = tuple(self._receipts.values()), {}
        return News(version=news.version, receipts=receipts, finished=news.finished, closes_at=news.closes_at)
