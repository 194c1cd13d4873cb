"""Rank 0's dealings with the parent of a track of soft labels, in the background: training never waits for them."""

from __future__ import annotations

import logging
import random
import threading
from typing import NamedTuple

from torch import Tensor

from fleetddp.common.errors import FleetError, Reason, Refused, Unreachable
from fleetddp.common.events import Join
from fleetddp.common.knowledge import Knowledge, Opened, Saying
from fleetddp.common.transport import MEMBER_REASONS, Parent
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.transport.session import Session
from fleetddp.common.update import NO_VERSION, Receipt, State

_log = logging.getLogger(__name__)

LOOK_S = 0.5  # how long at most until it looks around again while nothing comes


class Brought(NamedTuple):
    """A version, what is held of it, and of the open items."""

    version: int
    rows: Tensor  # f32[n, C + 1]
    opened: Opened
    is_new: bool  # else it is only that some open items are too old now


class Envoy:
    """Brings the newest version, and pushes the newest labels; what comes later takes the place of what was not sent or seen yet.

    ``knowledge`` is the envoy's own. It closes the parent.
    """

    def __init__(self, parent: Parent, join: Join, knowledge: Knowledge) -> None:
        self._parent, self._knowledge, self._node = parent, knowledge, join.node
        self._lock = threading.Lock()
        self._brought: Brought | None = None
        self._saying: Saying | None = None
        self._stopped = threading.Event()
        self.failure: Exception | None = None
        self.session = Session(parent, join, on_receipt=self._hear)
        self._thread = threading.Thread(target=self._live, name="fleetddp-envoy", daemon=True)

    def start(self) -> None:
        """Join, in the background."""
        self.session.start()
        self._thread.start()

    def stop(self) -> None:
        """Leave; what is not delivered is dropped."""
        self._stopped.set()
        self.session.stop(leave=True)
        self._parent.close()
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._knowledge.close(finished=bool(self.session.finished))

    def take(self) -> Brought | None:
        """A version that was brought since the last call, or whose open items are fewer now; raises what ended the envoy."""
        if self.failure is not None:
            raise self.failure
        with self._lock:
            brought, self._brought = self._brought, None
        return brought

    def send(self, saying: Saying) -> None:
        """Push this, soon."""
        with self._lock:
            self._saying = saying

    def _live(self) -> None:
        backoff = Backoff(random.Random(), first_s=0.2, cap_s=5.0)
        try:
            while not (self._stopped.is_set() or self.session.finished):
                try:
                    self._turn()
                    backoff.reset()
                except (Unreachable, Refused) as error:
                    if self._stopped.is_set():
                        return
                    if self.session.failure is not None or (isinstance(error, Refused) and error.reason is Reason.WRONG_LAYOUT):
                        raise
                    _log.warning("%s: soft labels: trying again: %s", self._node, error)
                    self._stopped.wait(backoff.delay())
        except Exception as error:
            if not self._stopped.is_set():
                _log.error(
                    "%s: soft labels are no longer exchanged: %s", self._node, error, exc_info=not isinstance(error, FleetError)
                )
                self.failure = error

    def _turn(self) -> None:
        newest = self.session.version
        if self.session.joined(timeout_s=LOOK_S) is not None and newest not in (NO_VERSION, self._knowledge.version):
            self._knowledge.take(self._parent, newest)
            self.session.base_version = newest
            self._bring(is_new=True)
        elif self._knowledge.expire() and self._knowledge.version != NO_VERSION:
            self._bring(is_new=False)
        with self._lock:
            saying, self._saying = self._saying, None
        if saying is None:
            self.session.wait_version(after=newest, timeout_s=LOOK_S if newest == NO_VERSION else LOOK_S / 10)
            return
        try:
            self._hear(self._parent.push(*saying))
        except (Unreachable, Refused) as error:
            if isinstance(error, Unreachable) or error.retry or error.reason in MEMBER_REASONS:
                with self._lock:
                    self._saying = self._saying or saying
            raise

    def _bring(self, *, is_new: bool) -> None:
        knowledge = self._knowledge
        with self._lock:
            is_new = is_new or (self._brought is not None and self._brought.is_new)
            self._brought = Brought(knowledge.version, knowledge.rows, knowledge.opened, is_new)

    def _hear(self, receipt: Receipt) -> None:
        if receipt.state in (State.REFUSED, State.EXPIRED):
            _log.warning("soft labels %s: %s %s %s", receipt.update_id, receipt.state.value, receipt.reason, receipt.message)
