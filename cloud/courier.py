"""A rank's courier: the thread that carries its slices to and from the parent, one after another, while training goes on.

It tries again while a retry can help, for as long as it takes: how long a site waits is decided at the boundary, not here. What
it has done it leaves as an answer and reports to rank 0 by a tally; what can never succeed ends training on all ranks.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import google_crc32c
import numpy as np
from torch import Tensor

from fleetddp.cloud.rendezvous import Rendezvous
from fleetddp.common.errors import FleetError, Reason, Refused, Unreachable
from fleetddp.common.events import ByteRange
from fleetddp.common.payload import bytes_of
from fleetddp.common.transport import Parent, Sink
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.update import NO_VERSION, Interval, Receipt, Slice, State, UpdateHeader

# An update refused for one of these is dropped, and training goes on from the newest version. Any other refusal would befall
# every update of this site.
DROPPED = frozenset(
    {Reason.STALE, Reason.NOT_FINITE, Reason.NORM_BOUND, Reason.INIT_TAKEN, Reason.FINISHED}
    | {Reason.STALLED, Reason.TRUNCATED, Reason.OUT_OF_ORDER, Reason.BAD_CHECKSUM, Reason.STORAGE}
)

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """One rank's stream of an update. ``payload`` gives its bytes; it is the courier's thread that calls it, once."""

    header: UpdateHeader
    intervals: tuple[Interval, ...]
    samples: float
    payload: Callable[[], memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """This rank's slice of a version is wanted; where the layout is cut, of the fragments that changed after version ``since``.

    ``landing`` says, for the codec it is published in and these fragments, which bytes and where to.
    """

    number: int
    version: int
    landing: Callable[[str, Sequence[int]], tuple[tuple[ByteRange, ...], Tensor]]
    fragments: int = 1
    since: int = NO_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """A slice that was fetched: u8 in host memory, its ranges one after another."""

    version: int
    codec: str
    data: Tensor
    fragments: tuple[int, ...] = (0,)  # of which it is the slice


class Courier:
    """Carries parcels and runs errands in the order given; ``bell`` rings after each.

    ``keeps``: parcels are kept after they were answered, until ``forget``, so that they can be carried to another parent.
    The ``take_...`` methods are for the training thread.
    """

    def __init__(
        self, parent: Parent, rendezvous: Rendezvous, bell: threading.Event | None = None, *, keeps: bool = False
    ) -> None:
        self._parent = parent
        self._rendezvous, self._bell = rendezvous, bell or threading.Event()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._keeps = keeps
        self._kept: dict[int, Callable[[], Receipt]] = {}  # by sequence: what pushes it
        self._receipt: Receipt | None = None
        self._landed: Landed | None = None
        self._published = ""  # the codec of the run's versions, once known
        self._brought: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._work, name="fleetddp-courier", daemon=True)
        self._thread.start()

    def push(self, parcel: Parcel) -> None:
        """Send this parcel. Once it is answered, its receipt can be taken and the tally ``answered/<sequence>`` counts it."""
        self._jobs.put(lambda: self._push(parcel))

    def push_again(self, sequence: int) -> None:
        """Send a parcel that was kept once more; the tally ``answered/<sequence>`` counts it again."""
        self._jobs.put(lambda: self._push_again(sequence))

    def forget(self, but: Collection[int]) -> None:
        """Keep no parcels but these."""
        for sequence in set(self._kept) - set(but):
            del self._kept[sequence]

    def pull(self, errand: Errand) -> None:
        """Run this errand. At its end the tally ``pulled/<number>`` counts it; so does ``gone/<number>`` if it was in vain."""
        self._jobs.put(lambda: self._pull(errand))

    def take_receipt(self) -> Receipt | None:
        """The receipt of the last parcel, once."""
        receipt, self._receipt = self._receipt, None
        return receipt

    def take_landed(self) -> Landed | None:
        """What the last errand brought, once."""
        landed, self._landed = self._landed, None
        return landed

    @property
    def published(self) -> str:
        """The codec that the run's versions are published in; empty before the first errand."""
        return self._published

    @property
    def brought(self) -> tuple[int, ...]:
        """The fragments that the last errand brought, which are the same on all ranks."""
        return self._brought

    def close(self) -> None:
        """Stop at once; what is under way is given up."""
        self._closed.set()
        self._jobs.put(None)
        self._parent.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed.is_set():
            try:
                job()
            except Exception as error:
                if self._closed.is_set():
                    return
                if isinstance(error, Refused):
                    self._rendezvous.fail(error.reason.value, error.message)
                else:
                    _log.exception("a transfer failed")
                    self._rendezvous.fail("", f"{type(error).__name__}: {error}")
            self._bell.set()

    def _push(self, parcel: Parcel) -> None:
        payload = parcel.payload()
        digest = google_crc32c.value(np.frombuffer(payload, np.uint8))  # it takes no memoryview
        cut = Slice(intervals=parcel.intervals, samples=parcel.samples, digest=digest)
        sequence = parcel.header.update_id.sequence
        if self._keeps:
            payload = memoryview(bytes(payload))  # its memory is the next update's once this one is answered

        def push() -> Receipt:
            return self._parent.push(parcel.header, cut, payload)

        if self._keeps:
            self._kept[sequence] = push
        self._receipt = self._answer_to(sequence, push)
        self._rendezvous.report(f"answered/{sequence}")

    def _push_again(self, sequence: int) -> None:
        push = self._kept.get(sequence)
        if push is not None:  # else it was settled meanwhile
            receipt = self._answer_to(sequence, push)
            if receipt.state is State.REFUSED:
                _log.warning("update %s was lost with its parent: %s %s", receipt.update_id, receipt.reason, receipt.message)
        self._rendezvous.report(f"answered/{sequence}")

    def _answer_to(self, sequence: int, push: Callable[[], Receipt]) -> Receipt:
        """The tally ``refused/<sequence>`` counts a refusal; one that would befall every update is raised."""
        receipt = self._persist(push)
        if receipt.state is State.REFUSED:
            reason = Reason(receipt.reason)
            if reason not in DROPPED:
                raise Refused(reason, receipt.message)
            self._rendezvous.report(f"refused/{sequence}")
        return receipt

    def _pull(self, errand: Errand) -> None:
        try:
            self._landed = self._persist(lambda: self._fetch(errand))
            self._brought = self._landed.fragments
        except Refused as error:
            if error.reason is not Reason.UNKNOWN_VERSION:
                raise
            self._rendezvous.report(f"gone/{errand.number}")  # overtaken: newer ones were published meanwhile
        self._rendezvous.report(f"pulled/{errand.number}")

    def _fetch(self, errand: Errand) -> Landed:
        fragments: tuple[int, ...] = (0,)
        if not self._published or errand.fragments > 1:  # which bytes are ours depends on it; a run never changes its codec
            about = self._parent.pull(errand.version, [(0, 1)], lambda offset, data: None)
            self._published = about.codec
            if errand.fragments > 1:
                fragments = tuple(i for i, at in enumerate(about.changed) if at > errand.since)
        ranges, into = errand.landing(self._published, fragments)
        if ranges:
            found = self._parent.pull(errand.version, ranges, _laid_out(ranges, bytes_of(into)))
            if found.codec != self._published:
                raise FleetError(f"version {found.number} is published in {found.codec}, those before it in {self._published}")
        return Landed(version=errand.version, codec=self._published, data=into, fragments=fragments)

    def _persist(self, call: Callable[[], Answer]) -> Answer:
        """Call until it succeeds or a retry cannot help."""
        backoff = Backoff(random.Random())
        while True:
            try:
                return call()
            except Unreachable as error:
                reason = str(error)
            except Refused as error:
                if not error.retry:
                    raise
                reason = str(error)
            _log.info("trying again: %s", reason)
            if self._closed.wait(backoff.delay()):
                raise FleetError("closed")


def _laid_out(ranges: Sequence[ByteRange], into: memoryview) -> Sink:
    """A sink that lays the bytes of ascending ``ranges`` one after another into ``into``."""
    before = [0, *accumulate(stop - start for start, stop in ranges)]
    starts = [start for start, _ in ranges]

    def sink(offset: int, data: memoryview) -> None:
        index = bisect_right(starts, offset) - 1
        at = before[index] + offset - starts[index]
        into[at : at + len(data)] = data

    return sink
