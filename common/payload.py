"""Where elements lie in the encoded bytes of an update or a version, and which of them have arrived.

The *canonical payload* of a vector is the codec's bytes of its parameters, then its buffers in float32; the rows of a partial
follow one another. (Where the parameters of a partial are in float64, so are its buffers.) Parameters and buffers of each row are
the payload's *sections*: a section starts a block, and nothing that is sent, checked or decoded at once crosses from one into
the next. Row r starts at element r * layout.elements.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetddp.common.codecs import Codec, get
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.fragments import deal, elements_of
from fleetddp.common.layout import Layout
from fleetddp.common.update import Interval, Kind, UpdateHeader


class Section(NamedTuple):
    """The parameters or the buffers of one row: elements [start, start + size), bytes [byte_start, byte_stop)."""

    start: int
    size: int
    byte_start: int
    byte_stop: int
    codec: Codec
    parameters: bool  # else buffers

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.size


class _Span(NamedTuple):
    """A section of any row: elements [start, stop) of the layout."""

    start: int
    stop: int
    codec: Codec
    parameters: bool

    def inside(self, interval: Interval) -> _Span:
        """The part of it that lies in an interval; perhaps an empty one."""
        return self._replace(start=max(self.start, interval[0]), stop=min(self.stop, interval[1]))


class Geometry:
    """The canonical payload of ``rows`` vectors of a layout whose parameters are encoded by ``codec``.

    ``buffers=False``: the payload carries none (a ``gradient``). ``within``: of each row it holds these elements alone, runs of
    whole blocks (a fragment). Positions that no sender may use (unaligned, crossing a
    section, out of bounds, empty) raise ``Refused(WRONG_INTERVALS)``.
    """

    def __init__(
        self, layout: Layout, codec: Codec, *, rows: int = 1, buffers: bool = True, within: Sequence[Interval] | None = None
    ) -> None:
        self.layout = layout
        self.codec = codec
        self.sparse = False  # soft labels: of the layout some rows are there, and the others stand for zeros
        self.rows = rows
        buffer_codec = get("float64" if codec.spec == "float64" else "float32")
        whole = [_Span(0, layout.parameters, codec, True)]
        if buffers and layout.buffer_elements:
            whole.append(_Span(layout.buffer_start, layout.elements, buffer_codec, False))
        parts = whole if within is None else [span.inside(interval) for span in whole for interval in within]
        self._spans = [span for span in parts if span.start < span.stop]
        self._first_row = self._sections_at(0, 0)
        self.row_bytes = self._first_row[-1].byte_stop if self._first_row else 0
        self.payload_bytes = rows * self.row_bytes

    @classmethod
    def of_update(cls, header: UpdateHeader, layout: Layout | None) -> Geometry:
        """The payload of an update in the run's ``layout``; an ``init`` brings its own.

        Raises ``Refused``: ``NO_VERSION`` (the run has no layout yet), ``UNKNOWN_CODEC``.
        """
        if header.kind is Kind.INIT:
            layout = Layout.from_json(header.layout_spec)
        if layout is None:
            raise Refused(Reason.NO_VERSION, f"{header.update_id} cannot be placed: this run has no layout yet")
        within = header.covers if header.kind is Kind.LOGITS else elements_of(layout, header.fragment)
        geometry = cls(layout, get(header.codec), rows=header.rows, buffers=header.kind is not Kind.GRADIENT, within=within)
        geometry.sparse = header.kind is Kind.LOGITS
        return geometry

    # ---- elements -> bytes --------------------------------------------------------------------------------------------------

    def byte_range(self, interval: Interval) -> Interval:
        """The bytes of an element interval: whole blocks of one section."""
        section = self._section_of(interval)
        start, stop = (n - section.start for n in interval)
        encoded = section.codec.encoded_bytes
        return section.byte_start + encoded(start), section.byte_start + encoded(stop)

    def required(self) -> tuple[Interval, ...]:
        """Full coverage: the element interval of every section."""
        return tuple((s.start, s.stop) for row in range(self.rows) for s in self._sections(row))

    def covered(self, interval: Interval) -> Iterator[Interval]:
        """Of the first row: runs of whole blocks that hold, together, all that the payload has of an interval."""
        for s in self._first_row:
            block = s.codec.block
            start, stop = max(s.start, interval[0]) - s.start, min(s.stop, interval[1]) - s.start
            if start < stop:
                yield s.start + start // block * block, min(s.start + -(-stop // block) * block, s.stop)

    def split(self, parts: int) -> list[tuple[Interval, ...]]:
        """Cut the payload into ``parts`` runs of blocks, equal but for one block; some are empty when there are fewer blocks."""
        return deal(self.required(), parts)

    def encode(self, values: Tensor, interval: Interval) -> Tensor:
        """f32 elements of an interval (within one section) to its bytes."""
        section = self._section_of(interval)
        if values.numel() != interval[1] - interval[0]:
            raise ConfigError(f"{values.numel()} values for the interval {interval}")
        return section.codec.encode(values)

    def decode(self, data: Tensor, interval: Interval, *, checked: bool = False) -> Tensor:
        """The inverse of ``encode``; ``checked`` and what it raises are ``Codec.decode``'s."""
        return self._section_of(interval).codec.decode(data, interval[1] - interval[0], checked=checked)

    def _sections(self, row: int) -> list[Section]:
        """Of one row: its parameters, then its buffers if there are any."""
        return self._sections_at(row * self.layout.elements, row * self.row_bytes) if row else self._first_row

    def _sections_at(self, start: int, byte: int) -> list[Section]:
        sections = []
        for span in self._spans:
            size = span.stop - span.start
            end = byte + span.codec.encoded_bytes(size)
            sections.append(Section(start + span.start, size, byte, end, span.codec, span.parameters))
            byte = end
        return sections

    def _section_of(self, interval: Interval) -> Section:
        start, stop = interval
        row = start // self.layout.elements
        if 0 <= row < self.rows and start < stop:
            for s in self._sections(row):
                block = s.codec.block
                aligned = (start - s.start) % block == 0 and ((stop - s.start) % block == 0 or stop == s.stop)
                if s.start <= start and stop <= s.stop and aligned:
                    return s
        held = ", ".join(f"{'parameters' if s.parameters else 'buffers'} [{s.start}, {s.stop})" for s in self._first_row)
        raise Refused(
            Reason.WRONG_INTERVALS,
            f"elements [{start}, {stop}) are not whole blocks of {self.codec.block} within one section: each of {self.rows} rows "
            f"of {self.layout.elements} has {held or 'none'}",
        )

    # ---- bytes -> elements --------------------------------------------------------------------------------------------------

    def aligned(self, offset: int) -> bool:
        """Whether a byte offset lies between two blocks, or at either end of the payload."""
        if offset == self.payload_bytes:
            return True
        section = self._section_at(offset)
        return section is not None and (offset - section.byte_start) % section.codec.block_bytes == 0

    def section_at(self, start: int, stop: int) -> Section:
        """The section that the bytes [start, stop) are whole blocks of."""
        section = self._section_at(start)
        if section is None or not start < stop <= section.byte_stop or not (self.aligned(start) and self.aligned(stop)):
            raise Refused(
                Reason.WRONG_INTERVALS,
                f"bytes [{start}, {stop}) are not whole blocks of one section of a payload of {self.payload_bytes} bytes",
            )
        return section

    def elements_of(self, start: int, stop: int) -> Interval:
        """The inverse of ``byte_range``."""
        section = self.section_at(start, stop)
        codec = section.codec
        first, last = (section.start + -(-(n - section.byte_start) // codec.block_bytes) * codec.block for n in (start, stop))
        return first, min(last, section.stop)

    def decode_bytes(self, start: int, stop: int, data: Tensor) -> Tensor:
        """u8[stop - start], the bytes [start, stop) of the payload (whole blocks of one section), to their f32 elements."""
        first, last = self.elements_of(start, stop)
        return self.section_at(start, stop).codec.decode(data, last - first)

    def chunks(self, ranges: Iterable[Interval], chunk_bytes: int) -> Iterator[Interval]:
        """Cut byte ranges, in order, into pieces of at most ``chunk_bytes`` that end on a block and cross no section."""
        for start, stop in ranges:
            if not 0 <= start < stop <= self.payload_bytes:
                raise Refused(Reason.WRONG_INTERVALS, f"bytes [{start}, {stop}) of a payload of {self.payload_bytes} bytes")
            while start < stop:
                section = self._section_at(start)
                assert section is not None  # start < payload_bytes
                block = section.codec.block_bytes
                if chunk_bytes < block:
                    raise ConfigError(f"chunks of {chunk_bytes} bytes hold no block of {section.codec.spec} ({block} bytes)")
                end = section.byte_start + (start - section.byte_start + chunk_bytes) // block * block
                end = min(end, section.byte_stop, stop)
                yield start, end
                start = end

    def _section_at(self, offset: int) -> Section | None:
        if not 0 <= offset < self.payload_bytes:
            return None
        return next(s for s in self._sections(offset // self.row_bytes) if offset < s.byte_stop)


class Coverage:
    """Which elements have been covered: disjoint intervals, merged where they touch."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def add(self, intervals: Sequence[Interval]) -> None:
        """Cover these too. An empty or overlapping one raises ``Refused(WRONG_INTERVALS)`` and leaves everything as it was."""
        merged: list[Interval] = []
        for start, stop in sorted([*self.intervals, *intervals]):
            if not 0 <= start < stop:
                raise Refused(Reason.WRONG_INTERVALS, f"[{start}, {stop}) is an empty interval")
            if merged and start < merged[-1][1]:
                raise Refused(Reason.WRONG_INTERVALS, f"elements [{start}, {min(stop, merged[-1][1])}) are covered twice")
            if merged and start == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self.intervals = merged

    def complete(self, required: Sequence[Interval]) -> bool:
        """Whether every element of these intervals is covered."""
        return all(self._covers(interval) for interval in required)

    def _covers(self, interval: Interval) -> bool:
        index = bisect_left(self.intervals, interval[0] + 1, key=lambda i: i[0]) - 1
        return index >= 0 and interval[1] <= self.intervals[index][1]


def tensor_over(data: bytes | bytearray | memoryview) -> Tensor:
    """u8 tensor over these bytes, without copying them. Must not be written to."""
    array = np.frombuffer(data, dtype=np.uint8)
    if array.flags.writeable:
        return torch.from_numpy(array)
    return torch.from_numpy(np.asarray(_Writable(array)))


class _Writable:
    """A read-only array under a false flag: torch warns of those it could write to, and has none that it could not."""

    def __init__(self, array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        self._array = array  # keeps the memory alive
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a u8 tensor, copied only from another device or if it is not contiguous."""
    return tensor.detach().cpu().contiguous().numpy().data
