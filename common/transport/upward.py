"""A region's way to its parent: a session that keeps it a member, and two threads that push partials and fetch versions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, Union

from fleetddp.common.errors import FleetError
from fleetddp.common.events import Answered, Enrolled, Event, Heard, Heartbeat, Join, Joined, News, Told
from fleetddp.common.layout import Layout
from fleetddp.common.recovered import RecoveredRegion
from fleetddp.common.region_assembly import fetch
from fleetddp.common.region_driver import Above
from fleetddp.common.region_items import RegionItems
from fleetddp.common.region_journal import RegionJournal
from fleetddp.common.transport import Parent
from fleetddp.common.transport.limits import MAX_IDS
from fleetddp.common.transport.session import Session
from fleetddp.common.update import Receipt, Tier, Update, UpdateId, Version

T = TypeVar("T")
Done = Callable[[Union[T, Exception]], None]


class Upward(Above):
    """An ``Above`` over a ``Parent``, from ``start`` to ``stop``.

    ``tell`` gets events, and ``call`` what is to be called with a result, from any thread: both must take them to the driver's,
    in order. The parent stays the caller's: close it after ``stop``.
    """

    def __init__(
        self,
        parent: Parent,
        journal: RegionJournal,
        entered: RecoveredRegion,
        *,
        run: str,
        tell: Callable[[Event], None],
        call: Callable[[Callable[[], None]], None],
        give_up_s: float | None = None,
        items: RegionItems | None = None,
    ) -> None:
        self._items = items
        self._parent, self._journal, self._tell, self._call = parent, journal, tell, call
        self._node, self._incarnation = entered.node, entered.incarnation
        self._asked: tuple[UpdateId, ...] = ()
        self._turn = 0  # of what is asked, where the next heartbeat begins
        self._finished = False
        self._threads = ThreadPoolExecutor(2, "fleet-upward")
        join = Join(node=entered.node, tier=Tier.REGION, incarnation=entered.incarnation, run=run, leaves=0)
        self.session = Session(
            parent,
            join,
            open_updates=self._questions,
            on_receipt=self._answer,
            on_word=self._hear,
            give_up_s=give_up_s,
        )

    def start(self) -> None:
        """Begin to join, in the background."""
        self.session.start()

    def stop(self, *, leave: bool) -> None:
        """End the session; ``leave`` tells the parent that the region will not come back."""
        self.session.stop(leave=leave)

    def close(self) -> None:
        """Wait for what is in hand; to be called after the parent was closed."""
        self._threads.shutdown(cancel_futures=True)

    # ---- what the driver asks -------------------------------------------------------------------------------------------------

    def push(self, update: Update, payload: Callable[[], bytes], done: Done[tuple[Receipt, float]]) -> None:
        """See ``Above``."""

        def work() -> tuple[Receipt, float]:
            begun = time.monotonic()
            receipt = self._parent.push(update.header, update.slices[0], memoryview(payload()))
            return receipt, time.monotonic() - begun

        self._submit(work, done)

    def fetch(self, version: int, done: Done[tuple[Version, Layout]]) -> None:
        """See ``Above``."""
        self._submit(lambda: fetch(self._parent, version, self._journal, self._items), done)

    def ask(self, ids: tuple[UpdateId, ...]) -> None:
        """See ``Above``: with the next heartbeats."""
        self._asked = ids

    def stand(self, version: int, leaves: int) -> None:
        """See ``Above``. The parent waits for as many members as it is told of: it hears at once."""
        self.session.base_version = version
        if leaves != self.session.leaves:
            self.session.leaves = leaves
            self.session.hurry()

    def report(self, metrics: Mapping[str, float], version: int) -> None:
        """See ``Above``."""
        self.session.report(metrics, version)

    def _submit(self, work: Callable[[], T], done: Done[T]) -> None:
        def run() -> None:
            result: T | Exception
            try:
                result = work()
            except Exception as error:
                result = error
            self._call(lambda: done(result))

        self._threads.submit(run)

    # ---- what the session brings ----------------------------------------------------------------------------------------------

    def _questions(self) -> tuple[UpdateId, ...]:
        """As many as one message may hold; the next heartbeat asks about others."""
        asked = self._asked
        if len(asked) <= MAX_IDS:
            return asked
        self._turn %= len(asked)
        chosen = (asked + asked)[self._turn : self._turn + MAX_IDS]
        self._turn += MAX_IDS
        return chosen

    def _answer(self, receipt: Receipt) -> None:
        self._tell(Answered(receipt=receipt))

    def _hear(self, word: Joined | Heard | News) -> None:
        if isinstance(word, Joined):
            self._tell(Enrolled(joined=word))
        if word.finished:
            self._ask_for_the_last_time()
        closes_at = 0.0 if isinstance(word, Joined) else word.closes_at
        self._tell(Told(version=word.version, closes_at=closes_at, finished=word.finished))

    def _ask_for_the_last_time(self) -> None:
        """What became of all that is open? The run has ended: what the parent does not say now will have expired."""
        if self._finished:
            return
        self._finished = True
        asked = self._asked
        for first in range(0, len(asked), MAX_IDS):
            ask = Heartbeat(node=self._node, incarnation=self._incarnation, open=asked[first : first + MAX_IDS])
            try:
                receipts = self._parent.heartbeat(ask).receipts
            except FleetError:
                return  # it is gone already
            for receipt in receipts:
                self._answer(receipt)
