"""Where updates gather until they are whole: every chunk is checked as it comes, before it touches the update's file.

What a chunk can be refused for, in the order of the checks: ``STALLED`` (another stream of the slice took over),
``OUT_OF_ORDER``, ``TOO_LARGE``, ``WRONG_SIZE`` (beyond the slice's end, or not whole blocks), ``BAD_CHECKSUM``, ``NOT_FINITE`` or
what else the codec refuses, ``STORAGE``. What was staged before a refused chunk stays, so that the sender can resume.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleetddp.common.checksum import checksum, joined
from fleetddp.common.codecs.prob import SoftLabels
from fleetddp.common.config import LimitsConfig
from fleetddp.common.errors import Reason, Refused, StorageError
from fleetddp.common.events import Offer, SliceStaged
from fleetddp.common.files import Data
from fleetddp.common.journal import Journal, StagedFile
from fleetddp.common.labels import check_rows
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, tensor_over
from fleetddp.common.transport.limits import CHUNK_BYTES
from fleetddp.common.update import Interval, Slice, Update, UpdateHeader, UpdateId


@dataclass(slots=True, eq=False)
class _Part:
    """What has come of one slice."""

    slice: Slice
    ranges: tuple[Interval, ...]  # bytes of the payload, in the order they are sent
    lock: threading.Lock = field(default_factory=threading.Lock)
    owner: object = None  # the stream that may write; None: none any more
    held: int = 0
    current: int = 0  # the range that is being filled
    due: int = 0  # the next byte of the payload
    stop: int = 0  # the end of that range
    crc: int = 0
    squared_norm: float = 0.0

    def __post_init__(self) -> None:
        self.restart()

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def restart(self) -> None:
        """Nothing is held."""
        self.held = self.crc = self.current = 0
        self.squared_norm = 0.0
        self.due, self.stop = self.ranges[0] if self.ranges else (0, 0)

    def advance(self, size: int) -> None:
        """A chunk is held; at a range's end the next one begins. At the last one's end nothing is due."""
        self.held += size
        self.due += size
        if self.due == self.stop and self.current + 1 < len(self.ranges):
            self.current += 1
            self.due, self.stop = self.ranges[self.current]


@dataclass(slots=True, eq=False)
class _Arriving:
    """An update of which some slice was opened."""

    shape: tuple[Any, ...]
    geometry: Geometry
    file: StagedFile
    parts: dict[tuple[Interval, ...], _Part] = field(default_factory=dict)


class Stream:
    """One stream that brings one slice of an update. Written by one thread at a time; several streams at the same time."""

    def __init__(self, arriving: _Arriving, part: _Part, update_id: UpdateId, max_weight: float) -> None:
        self._arriving, self._part, self._update_id = arriving, part, update_id
        self._max_weight = max_weight  # of a soft label
        with part.lock:  # a chunk of an older stream ends first
            part.owner = self
            self.held = part.held  # bytes, from the slice's beginning, that need not be sent again

    def write(self, offset: int, crc32c: int, data: Data) -> None:
        """Check and keep the next chunk: ``data`` at byte ``offset`` of the payload. Raises ``Refused`` (see the module)."""
        part = self._part
        with part.lock:
            self._require_owner()
            due, stop, size = part.due, part.stop, len(data)
            if offset != due or not size:
                raise Refused(Reason.OUT_OF_ORDER, f"{self._update_id}: {size} bytes came for byte {offset}; byte {due} was due")
            if size > CHUNK_BYTES:
                raise Refused(Reason.TOO_LARGE, f"{self._update_id}: a chunk of {size} bytes; at most {CHUNK_BYTES} are allowed")
            if offset + size > stop:
                raise Refused(
                    Reason.WRONG_SIZE, f"{self._update_id}: a chunk up to byte {offset + size}, beyond {stop}, where it ends"
                )
            self._require_blocks(offset + size, stop)
            if checksum(data) != crc32c:
                raise Refused(
                    Reason.BAD_CHECKSUM, f"{self._update_id}: the chunk at byte {offset} does not have CRC32C {crc32c:08x}"
                )
            squared_norm = self._squared_norm(offset, data)
            try:
                self._arriving.file.write(offset, data)
            except StorageError as error:
                raise Refused(Reason.STORAGE, str(error)) from error
            part.squared_norm += squared_norm
            part.crc = joined(part.crc, crc32c, size)
            part.advance(size)

    def finish(self) -> SliceStaged:
        """The slice is whole: ``Refused(TRUNCATED)`` if bytes are missing, ``BAD_CHECKSUM`` if they are not those declared."""
        part = self._part
        with part.lock:
            self._require_owner()
            if part.held < part.size:
                raise Refused(Reason.TRUNCATED, f"{self._update_id}: the stream ended after {part.held} of {part.size} bytes")
            if part.crc != part.slice.digest:
                found, due = part.crc, part.slice.digest
                part.restart()  # nobody knows which bytes are wrong: all come again
                raise Refused(
                    Reason.BAD_CHECKSUM, f"{self._update_id}: the slice has CRC32C {found:08x}, not {due:08x} as declared"
                )
            return SliceStaged(update_id=self._update_id, slice=part.slice, squared_norm=part.squared_norm)

    def _require_owner(self) -> None:
        if self._part.owner is not self:
            raise Refused(Reason.STALLED, f"{self._update_id}: this stream was dropped, or another one of its slice took over")

    def _require_blocks(self, end: int, stop: int) -> None:
        if end != stop and not self._arriving.geometry.aligned(end):
            codec = self._arriving.geometry.codec
            raise Refused(
                Reason.WRONG_SIZE,
                f"{self._update_id}: a chunk ends at byte {end}, within a block of {codec.spec} ({codec.block_bytes} bytes)",
            )

    def _squared_norm(self, offset: int, data: Data) -> float:
        """Of the parameters in a chunk; refuses what is not finite, buffers too."""
        geometry = self._arriving.geometry
        section = geometry.section_at(offset, offset + len(data))
        if section.codec.spec == "float32":
            values = np.frombuffer(data, dtype="<f4")
            if not values.flags.aligned:  # within a message: arithmetic on such numbers takes ten times as long as a copy
                values = np.frombuffer(data, np.uint8).copy().view("<f4")
        else:
            decoded = geometry.decode_bytes(offset, offset + len(data), tensor_over(data))
            if isinstance(section.codec, SoftLabels):
                check_rows(decoded, section.codec.block, self._max_weight)
            values = decoded.numpy()
        squared = _sum_of_squares(values)
        if not math.isfinite(squared):
            first, _ = geometry.elements_of(offset, offset + len(data))
            wrong = int(np.flatnonzero(~np.isfinite(values))[0])
            raise Refused(Reason.NOT_FINITE, f"{self._update_id}: element {first + wrong} is {values[wrong]}")
        return squared if section.parameters else 0.0


class Staging:
    """All updates that are arriving at one aggregator. Safe to use from several threads."""

    def __init__(self, journal: Journal, limits: LimitsConfig) -> None:
        self._journal = journal
        self._limits = limits
        self._lock = threading.Lock()
        self._arriving: dict[UpdateId, _Arriving] = {}

    def open(self, offer: Offer, layout: Layout | None) -> Stream:
        """A stream for the slice of an offer that the aggregator let pass; it takes over from an older stream of the same slice.

        ``layout`` is the run's; an ``init`` brings its own. Raises ``Refused``: ``WRONG_LAYOUT``, ``TOO_LARGE``,
        ``UNKNOWN_CODEC``, ``WRONG_INTERVALS``,
        ``NO_VERSION`` (no layout yet), ``ID_REUSED`` (it is arriving with other contents), ``STORAGE``.
        """
        header, intervals = offer.header, offer.slice.intervals
        with self._lock:
            arriving = self._arriving.get(header.update_id)
            if arriving is not None and arriving.shape != _shape(header):
                raise Refused(
                    Reason.ID_REUSED, f"{header.update_id} is arriving already, with another kind, base, codec or layout"
                )
            geometry = arriving.geometry if arriving else self._geometry(header, layout)
            ranges = tuple(geometry.byte_range(interval) for interval in intervals)
            if arriving is None:
                arriving = _Arriving(_shape(header), geometry, self._stage(header.update_id, geometry.payload_bytes))
                self._arriving[header.update_id] = arriving
            part = arriving.parts.setdefault(intervals, _Part(offer.slice, ranges))
            if part.slice != offer.slice:
                raise Refused(
                    Reason.ID_REUSED, f"{header.update_id}: this slice is arriving already, with other bytes or samples"
                )
            return Stream(arriving, part, header.update_id, self._limits.max_samples)

    def accept(self, update: Update, at: float) -> None:
        """Make a whole update durable (``Journal.accept``)."""
        self._forget(update.update_id)
        self._journal.accept(update, at)

    def discard(self, update_id: UpdateId) -> None:
        """Forget an update, staged or persisted (``Journal.discard``); its open streams are refused from now on."""
        self._forget(update_id)
        self._journal.discard(update_id)

    def _geometry(self, header: UpdateHeader, layout: Layout | None) -> Geometry:
        geometry = Geometry.of_update(header, layout)
        layout = geometry.layout
        if layout.fingerprint != header.layout:
            raise Refused(Reason.WRONG_LAYOUT, f"{header.update_id} has layout {header.layout}, not {layout.fingerprint}")
        if layout.elements > self._limits.max_elements:
            limit = self._limits.max_elements
            raise Refused(Reason.TOO_LARGE, f"a layout of {layout.elements} elements; limits.max_elements is {limit}")
        return geometry

    def _stage(self, update_id: UpdateId, payload_bytes: int) -> StagedFile:
        try:
            return self._journal.stage(update_id, payload_bytes)
        except StorageError as error:
            raise Refused(Reason.STORAGE, str(error)) from error

    def _forget(self, update_id: UpdateId) -> None:
        with self._lock:
            arriving = self._arriving.pop(update_id, None)
        for part in arriving.parts.values() if arriving else ():
            with part.lock:
                part.owner = None


def _shape(header: UpdateHeader) -> tuple[Any, ...]:
    """What must be the same on all streams of an update for their bytes to belong together."""
    of = header
    return of.kind, of.tier, of.base_version, of.codec, of.layout, of.groups, of.fragment, of.covers


def _sum_of_squares(values: np.ndarray[Any, np.dtype[np.float32]]) -> float:
    """Finite if and only if every value is. One float32 pass, which is exact enough for a bound; float64 if that overflows."""
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is what is looked for
        squared = float(np.dot(values, values))
        if math.isfinite(squared):
            return squared
        exact = values.astype(np.float64)
        return float(np.dot(exact, exact))
