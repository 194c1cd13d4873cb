"""One version in one safetensors file: what is published, what the next outer step needs, and what to know of both.

    header      JSON: where each tensor lies; metadata: number, layout, codec, checksum, state of the outer optimizer
    __gap__     U8, only where the published parameters would leave what follows them unaligned
    parameters  each under its own name (published as float32 or bfloat16), else one U8 tensor ``__published__``
    buffers     F32, each under its own name
    __master__  F32[P], only if the codec of the published parameters loses something: the weights before rounding
    __outer__.* F32[P], one for each state vector of the outer optimizer

Parameters and buffers together are the published payload, one contiguous run of bytes, served as they lie. A published float32 or
bfloat16 model can be opened by any safetensors reader. Files are written and read block by block; every byte is determined by
what was written. Safetensors: https://github.com/huggingface/safetensors#format (little-endian, no holes).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common.codecs.base import BLOCK, Codec
from fleetddp.common.errors import Refused, StorageError
from fleetddp.common.files import File
from fleetddp.common.layout import Layout
from fleetddp.common.payload import bytes_of
from fleetddp.common.update import Interval

MASTER = "__master__"
OUTER = "__outer__."
_PUBLISHED = "__published__"
_NAMED = {"float32": "F32", "bfloat16": "BF16"}  # codecs whose bytes are a plain tensor: parameters keep their names
_SCALAR_CHARACTERS = 32  # room in the header for one scalar, which is known only after the step
_MAX_HEADER = 100_000_000  # as safetensors has it

BLOCK_ELEMENTS = 2**19  # worked on at a time, whatever the size of the model: it stays in the cache; a multiple of ``BLOCK``


def blocks(start: int, stop: int, block: int = BLOCK) -> Iterator[Interval]:
    """Cut the elements [start, stop) into intervals of at most ``BLOCK_ELEMENTS``, of whole blocks of a codec."""
    step = BLOCK_ELEMENTS // block * block
    for first in range(start, stop, step):
        yield first, min(first + step, stop)


class Readable(Protocol):
    """What a version file is read through: a ``File``, or a ``VersionReader`` of the journal."""

    def pread(self, size: int, offset: int) -> bytes:
        """Exactly ``size`` bytes from ``offset``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What a version file says of itself."""

    number: int
    layout: Layout
    codec: str  # spec, of the published parameters
    digest: int  # CRC32C of the published payload
    updates: int  # leaf updates merged into it
    optimizer: str  # the outer optimizer that made it; empty: none did (version 0)
    slots: tuple[str, ...]
    scalars: Mapping[str, float]
    changed: tuple[int, ...] = ()  # for each fragment the last version that changed it; empty where the layout is not cut
    optimizer_since: int = 0  # the first version that this optimizer made; only kept where the layout is cut


class _Map:
    """Where the sections of a version file lie, in bytes from the end of its header."""

    def __init__(self, layout: Layout, codec: Codec, slots: Sequence[str]) -> None:
        self.layout, self.codec = layout, codec
        encoded, single = codec.encoded_bytes(layout.parameters), 4 * layout.parameters
        gap = -encoded % 4
        self.payload: Interval = (gap, gap + encoded + 4 * layout.buffer_elements)
        self.buffers = gap + encoded
        self.vectors: dict[str, int] = {}
        end = self.payload[1]
        for name in [*([] if codec.lossless else [MASTER]), *(OUTER + slot for slot in slots)]:
            self.vectors[name] = end
            end += single
        self.size = end

    def tensors(self) -> dict[str, dict[str, Any]]:
        """The header's entries, in the order of their bytes."""
        entries: dict[str, dict[str, Any]] = {}
        if self.payload[0]:
            entries["__gap__"] = _entry("U8", (self.payload[0],), 0, self.payload[0])
        dtype = _NAMED.get(self.codec.spec)
        if dtype is None:
            entries[_PUBLISHED] = _entry("U8", (self.buffers - self.payload[0],), self.payload[0], self.buffers)
        for t in self.layout.tensors:
            if t.role == "buffer":
                at = self.buffers + 4 * (t.start - self.layout.buffer_start)
                entries[t.name] = _entry("F32", t.shape, at, at + 4 * t.size)
            elif dtype is not None:
                width = self.codec.block_bytes // BLOCK
                at = self.payload[0] + width * t.start
                entries[t.name] = _entry(dtype, t.shape, at, at + width * t.size)
        for name, at in self.vectors.items():
            entries[name] = _entry("F32", (self.layout.parameters,), at, at + 4 * self.layout.parameters)
        return entries


class VersionWriter:
    """Writes a version file into ``file``, block by block, in order: the parameters, then the buffers; then ``finish``.

    ``optimizer``, ``slots`` and ``scalars`` (names) describe the state that is stored for the next outer step; ``changed`` and
    ``optimizer_since`` are as in ``Head``.
    """

    def __init__(
        self,
        file: File,
        layout: Layout,
        codec: Codec,
        *,
        optimizer: str = "",
        slots: Sequence[str] = (),
        scalars: Sequence[str] = (),
        changed: Sequence[int] = (),
        optimizer_since: int = 0,
    ) -> None:
        self._file, self._layout, self._codec = file, layout, codec
        self._buffer_codec = codecs.get("float32")
        self._map = _Map(layout, codec, slots)
        self._optimizer, self._slots = optimizer, tuple(slots)
        self._changed, self._optimizer_since = tuple(changed), optimizer_since
        self._digest, self._next = 0, self._map.payload[0]
        # The header comes first in the file and is known last: its room is set aside.
        blank = self._header(number=2**63, updates=2**63, scalars=dict.fromkeys(scalars, 0.0))
        self._data = 8 + len(blank) + -len(blank) % 8 + _SCALAR_CHARACTERS * len(scalars)
        self._write(bytes(self._map.payload[0]), 0)

    @property
    def block(self) -> int:
        """Elements of a block of the codec: parameters come in whole ones."""
        return self._codec.block

    @property
    def payload_start(self) -> int:
        """The byte of the file at which the published payload begins."""
        return self._data + self._map.payload[0]

    @property
    def payload_bytes(self) -> int:
        """Size of the published payload."""
        return self._map.payload[1] - self._map.payload[0]

    def parameters(self, interval: Interval, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        """Publish the next block of parameters, f32[n]; ``state`` holds f32[n] of each slot."""
        self._publish(self._codec.encode(weights))
        if not self._codec.lossless:
            self._write(weights, self._map.vectors[MASTER] + 4 * interval[0])
        for slot in self._slots:
            self._write(state[slot], self._map.vectors[OUTER + slot] + 4 * interval[0])
        self._file.start_flush()

    def buffers(self, values: Tensor) -> None:
        """Publish the next block of buffers, f32[n]."""
        self._publish(self._buffer_codec.encode(values))

    def finish(self, *, number: int, updates: int, scalars: Mapping[str, float]) -> int:
        """Write the header; returns the CRC32C of the published payload."""
        if self._next != self._map.payload[1]:
            raise ValueError(f"the payload ends at byte {self._map.payload[1]}; bytes up to {self._next} were written")
        text = self._header(number=number, updates=updates, scalars=scalars)
        head = struct.pack("<Q", self._data - 8) + text.ljust(self._data - 8)
        self._file.pwrite(memoryview(head), 0)
        return self._digest

    def _publish(self, payload: Tensor) -> None:
        self._digest = google_crc32c.extend(self._digest, payload.numpy())
        self._write(payload, self._next)
        self._next += payload.numel()

    def _write(self, data: Tensor | bytes, offset: int) -> None:
        view = memoryview(data) if isinstance(data, bytes) else bytes_of(data.view(torch.uint8))
        if view:
            self._file.pwrite(view, self._data + offset)

    def _header(self, *, number: int, updates: int, scalars: Mapping[str, float]) -> bytes:
        metadata = {
            "format": "pt",
            "number": str(number),
            "layout": self._layout.to_json().decode(),
            "codec": self._codec.spec,
            "digest": f"{self._digest:08x}",
            "updates": str(updates),
            "optimizer": self._optimizer,
            "scalars": json.dumps(dict(scalars)),
        }
        if self._changed:
            metadata |= {"changed": json.dumps(self._changed), "optimizer_since": str(self._optimizer_since)}
        return json.dumps({"__metadata__": metadata, **self._map.tensors()}, separators=(",", ":")).encode()


class VersionFile:
    """Reads a version file through ``file``, which stays the caller's to close. Raises ``StorageError`` if it is none."""

    def __init__(self, file: Readable) -> None:
        self._file = file
        try:
            size = int.from_bytes(file.pread(8, 0), "little")
            if not 2 <= size <= _MAX_HEADER:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.pread(size, 8))
            self.head = _parse_head(header, header.pop("__metadata__"))
            self._map = _Map(self.head.layout, codecs.get(self.head.codec), self.head.slots)
            if header != self._map.tensors():
                raise ValueError("its tensors do not lie where its layout puts them")
        except (ValueError, KeyError, AttributeError, TypeError, OSError, Refused) as error:
            raise StorageError(f"not a version file of FleetDDP: {error}") from error
        self._data = 8 + size

    @property
    def size(self) -> int:
        """Bytes that the file must have."""
        return self._data + self._map.size

    def weights(self, interval: Interval, out: Tensor) -> Tensor:
        """The exact parameters (before rounding), or the buffers, of an element interval, into ``out`` f32[n]; returns it."""
        layout, start = self.head.layout, interval[0]
        if start >= layout.buffer_start and layout.buffer_elements:
            return self._vector(self._map.buffers + 4 * (start - layout.buffer_start), out)
        at = self._map.vectors[MASTER] if MASTER in self._map.vectors else self._map.payload[0]
        return self._vector(at + 4 * start, out)

    def slot(self, name: str, interval: Interval, out: Tensor) -> Tensor:
        """A state vector of the outer optimizer, of an element interval, into ``out`` f32[n]; returns it."""
        return self._vector(self._map.vectors[OUTER + name] + 4 * interval[0], out)

    def _vector(self, at: int, out: Tensor) -> Tensor:
        data = self._file.pread(4 * out.numel(), self._data + at)
        np.copyto(out.numpy(), np.frombuffer(data, dtype="<f4"))
        return out


def _parse_head(tensors: dict[str, Any], metadata: dict[str, str]) -> Head:
    return Head(
        number=int(metadata["number"]),
        layout=Layout.from_json(metadata["layout"].encode()),
        codec=metadata["codec"],
        digest=int(metadata["digest"], 16),
        updates=int(metadata["updates"]),
        optimizer=metadata["optimizer"],
        slots=tuple(name.removeprefix(OUTER) for name in tensors if name.startswith(OUTER)),
        scalars=json.loads(metadata["scalars"]),
        changed=tuple(json.loads(metadata.get("changed", "[]"))),
        optimizer_since=int(metadata.get("optimizer_since", "0")),
    )


def _entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
