"""A parent that may be one of several: when the current one cannot be reached for some time, the next one is."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import Refused, Unreachable
from fleetddp.common.events import ByteRange, Heard, Heartbeat, Join, Joined, News, Share
from fleetddp.common.layout import Layout
from fleetddp.common.open_items import Catalogue, Shared
from fleetddp.common.transport import Parent, Roaming, Sink
from fleetddp.common.transport.uplink import Patience, Uplink
from fleetddp.common.update import ProxyInfo, Receipt, Slice, UpdateHeader, Version

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Failover(Roaming):
    """A ``Parent`` that goes through ``parents`` in turn. ``make`` connects to one by its address; nothing is sent before a call.

    A call to a parent that does not answer raises ``Unreachable`` as ever; after ``patience_s`` of nothing else (drawn anew for
    each parent, up to half as long again, so that the members of a dead region do not all come at once) the connection is closed
    and calls go to the next address. That one does not know the member, which therefore joins: what was accepted where it
    came from and is not settled, it asks about, and pushes again what nobody knows.
    """

    def __init__(
        self, parents: Sequence[str], make: Callable[[str], Parent], *, patience_s: float, rng: random.Random | None = None
    ) -> None:
        self._addresses, self._make = tuple(parents), make
        self._patience_s, self._rng = patience_s, rng or random.Random()
        self._lock = threading.Lock()
        self._index = 0
        self._told = False  # goes to another parent only when it is told
        self._closed = False
        self._parent = make(self._addresses[0])
        self._heard_at = time.monotonic()
        self._limit_s = self._draw()

    @property
    def address(self) -> str:
        """See ``Roaming``."""
        return self._addresses[self._index]

    def stay(self) -> None:
        """See ``Roaming``."""
        self._told = True

    def go_to(self, address: str) -> None:
        """See ``Roaming``."""
        with self._lock:
            if self._closed or address == self.address:
                return
            before = self._parent
            self._turn_to(self._addresses.index(address))
        with contextlib.suppress(Exception):
            before.close()

    # ---- Parent ---------------------------------------------------------------------------------------------------------------

    def join(self, request: Join) -> Joined:
        """See ``Parent``."""
        return self._call(lambda parent: parent.join(request))

    def heartbeat(self, request: Heartbeat) -> Heard:
        """See ``Parent``."""
        return self._call(lambda parent: parent.heartbeat(request))

    def leave(self, node: str, incarnation: int) -> None:
        """See ``Parent``."""
        self._call(lambda parent: parent.leave(node, incarnation))

    def layout(self) -> Layout:
        """See ``Parent``."""
        return self._call(lambda parent: parent.layout())

    def pull(self, version: int, ranges: Sequence[ByteRange], sink: Sink) -> Version:
        """See ``Parent``."""
        return self._call(lambda parent: parent.pull(version, ranges, sink))

    def pull_proxy(self, ranges: Sequence[ByteRange], sink: Sink) -> ProxyInfo:
        """See ``Parent``."""
        return self._call(lambda parent: parent.pull_proxy(ranges, sink))

    def pull_items(self, pool: int, known: int, ranges: Sequence[ByteRange], sink: Sink) -> Catalogue:
        """See ``Parent``."""
        return self._call(lambda parent: parent.pull_items(pool, known, ranges, sink))

    def share(self, offer: Share, data: Callable[[str], bytes]) -> Shared:
        """See ``Parent``."""
        return self._call(lambda parent: parent.share(offer, data))

    def withdraw(self, share: Share) -> int:
        """See ``Parent``."""
        return self._call(lambda parent: parent.withdraw(share))

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        """See ``Parent``."""
        return self._call(lambda parent: parent.push(header, slice, payload))

    def watch(self, node: str, incarnation: int, after_version: int) -> Iterator[News]:
        """See ``Parent``."""
        parent = self._parent
        for news in parent.watch(node, incarnation, after_version):
            self._heard(parent)
            yield news

    def status(self) -> dict[str, Any]:
        """See ``Parent``."""
        return self._call(lambda parent: parent.status())

    def close(self) -> None:
        """See ``Parent``."""
        with self._lock:
            self._closed = True
            self._parent.close()

    # ---- whom to call ---------------------------------------------------------------------------------------------------------

    def _call(self, call: Callable[[Parent], T]) -> T:
        parent = self._parent
        try:
            answer = call(parent)
        except Unreachable as error:
            self._silent(parent, error)
            raise
        except Refused:
            self._heard(parent)
            raise
        self._heard(parent)
        return answer

    def _heard(self, parent: Parent) -> None:
        with self._lock:
            if parent is self._parent:
                self._heard_at = time.monotonic()

    def _silent(self, parent: Parent, error: Unreachable) -> None:
        with self._lock:
            silent_s = time.monotonic() - self._heard_at
            if parent is not self._parent or self._closed or self._told or silent_s < self._limit_s or len(self._addresses) == 1:
                return
            gone = self.address
            self._turn_to((self._index + 1) % len(self._addresses))
        _log.warning("%s did not answer for %.1f s (%s); going to %s", gone, silent_s, error, self.address)
        with contextlib.suppress(Exception):  # nobody can reach it anyway
            parent.close()

    def _turn_to(self, index: int) -> None:
        """Holds ``_lock``."""
        self._index = index
        self._parent = self._make(self.address)
        self._heard_at = time.monotonic()
        self._limit_s = self._draw()

    def _draw(self) -> float:
        return self._patience_s * self._rng.uniform(1.0, 1.5)


def connect(
    parents: Sequence[str],
    security: SecurityConfig,
    *,
    node: str,
    run: str,
    patience: Patience,
    after_s: float,
    track: str = "",
) -> Parent:
    """The uplink of ``node`` to its parent; to one of several, if there are, where each is given up after ``after_s``."""

    def dial(address: str) -> Parent:
        return Uplink(address, security, node=node, run=run, track=track, patience=patience)

    return dial(parents[0]) if len(parents) == 1 else Failover(parents, dial, patience_s=after_s)
