"""Which tensors of a module are exchanged, and where each lies in one flat float32 vector.

The trainable parameters come first, in the module's order, at elements [0, P). Buffers that are averaged follow at
``buffer_start``, P rounded up to a whole codec block, so that they start a block of their own. The gap between holds zeros and is
never sent. Two layouts with the same fingerprint lay out the same names and shapes alike; dtypes may differ (a device may hold in
bfloat16 what a site trains in float32): the flat vector is float32, the master of a parameter of lower precision.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fleetddp.common.codecs.base import BLOCK
from fleetddp.common.errors import ConfigError, LayoutMismatch, Reason, Refused
from fleetddp.common.update import Interval

Role = Literal["parameter", "buffer"]
Buffers = Literal["average", "local"]
NamedShape = tuple[str, Sequence[int]]

FORMAT = 1  # of the JSON
MAX_JSON_BYTES = 960 * 1024  # it travels in one message of at most 1 MiB (WIRE.md)
MAX_NAME = 512
MAX_DIMENSIONS = 16
MAX_ELEMENTS = 2**40
MAX_SHOWN = 40  # names in a message


class TensorSpec(NamedTuple):
    """One tensor of a layout: elements [start, start + size) of the flat vector, in row-major order of ``shape``."""

    name: str
    shape: tuple[int, ...]
    role: Role
    start: int
    size: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.size


@dataclass(frozen=True)
class Layout:
    """The tensors exchanged, parameters before buffers. Made by ``of``, ``from_module`` or ``from_json``, which validate."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, parameters: Iterable[NamedShape], buffers: Iterable[NamedShape] = ()) -> Layout:
        """Lay out tensors of these names and shapes; raises ``ConfigError`` for a bad name or shape, or no parameter element."""
        tensors: list[TensorSpec] = []
        _place(tensors, "parameter", 0, parameters)
        end = tensors[-1].stop if tensors else 0
        if end == 0:
            raise ConfigError("the model has no trainable parameters: there is nothing to exchange")
        _place(tensors, "buffer", _round_up(end), buffers)
        names: set[str] = set()
        for spec in tensors:
            if spec.name in names:
                raise ConfigError(f"two tensors are called {spec.name!r}")
            names.add(spec.name)
        return cls(tuple(tensors))

    @classmethod
    def from_module(cls, module: nn.Module, *, buffers: Buffers = "average", include: Sequence[str] = ()) -> Layout:
        """The layout of a module.

        Exchanged are its trainable parameters and, with ``buffers="average"``, its floating-point buffers. A tied tensor counts
        once, under its first name; frozen parameters, integer buffers and non-persistent buffers stay local. Wrappers
        (``DistributedDataParallel``, ``torch.compile``) leave no trace in the names. With ``include``, shell patterns of names
        (``head.*``), only what one of them matches is exchanged: an adapter on a frozen backbone, say. Raises ``ConfigError``
        where a parameter is complex or not initialised yet, and for a pattern that matches nothing.
        """
        module = unwrap(module)
        parameters = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        for name, parameter in parameters:
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ConfigError(f"parameter {name!r} has no shape yet: run one forward pass before joining the fleet")
            if parameter.is_complex():
                raise ConfigError(f"parameter {name!r} is {parameter.dtype}: only real parameters are exchanged")
        shared = _float_buffers(module) if buffers == "average" else []
        _require_matches(include, [name for name, _ in (*parameters, *shared)])
        if include:
            parameters = [(n, p) for n, p in parameters if matches(n, include)]
            shared = [(n, b) for n, b in shared if matches(n, include)]
        layout = cls.of([(n, p.shape) for n, p in parameters], [(n, b.shape) for n, b in shared])
        if len(layout.to_json()) > MAX_JSON_BYTES:
            raise ConfigError(f"{len(layout.tensors)} tensors: their names and shapes take more than {MAX_JSON_BYTES} bytes")
        return layout

    # ---- sizes ------------------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> int:
        """P, the number of parameter elements."""
        return max(t.stop for t in self.tensors if t.role == "parameter")

    @cached_property
    def buffer_start(self) -> int:
        """First element of the buffers: ``parameters`` rounded up to a whole block."""
        return _round_up(self.parameters)

    @cached_property
    def buffer_elements(self) -> int:
        """How many elements of buffers are exchanged."""
        return sum(t.size for t in self.tensors if t.role == "buffer")

    @cached_property
    def elements(self) -> int:
        """Length of the flat vector, gap included (there is none without buffers)."""
        return self.buffer_start + self.buffer_elements if self.buffer_elements else self.parameters

    # ---- identity ---------------------------------------------------------------------------------------------------------

    def to_json(self) -> bytes:
        """Canonical JSON: the same layout always gives the same bytes."""
        tensors = [[t.name, t.shape, t.role, t.start] for t in self.tensors]
        return json.dumps({"format": FORMAT, "tensors": tensors}, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, data: bytes) -> Layout:
        """The inverse of ``to_json``, for bytes from anywhere: raises ``Refused`` (``MALFORMED`` or ``TOO_LARGE``)."""
        if len(data) > MAX_JSON_BYTES:
            raise Refused(Reason.TOO_LARGE, f"a layout of {len(data)} bytes; the limit is {MAX_JSON_BYTES}")
        try:
            entries = _entries(json.loads(data))
            split = next((i for i, e in enumerate(entries) if e[2] == "buffer"), len(entries))
            layout = cls.of(((e[0], e[1]) for e in entries[:split]), ((e[0], e[1]) for e in entries[split:]))
        except (ValueError, RecursionError) as error:  # JSON, UTF-8 and ConfigError are all ValueErrors
            raise Refused(Reason.MALFORMED, f"not a layout: {error}") from None
        for spec, (name, _, role, start) in zip(layout.tensors, entries, strict=True):
            if (spec.role, spec.start) != (role, start):
                due = f"a {spec.role} at {spec.start}"
                raise Refused(Reason.MALFORMED, f"not a layout: {name!r} is a {role} at {start!s:.40}; {due} is due")
        return layout

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of ``to_json()`` (names, shapes, roles, offsets), in hex."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def first_difference(self, other: Layout) -> str | None:
        """What ``other`` has in place of this layout's first tensor that it lacks, as a phrase; None if they are equal."""
        for mine, theirs in zip_longest(self.tensors, other.tensors):
            if mine != theirs:
                return f"expected {_describe(mine)}, found {_describe(theirs)}{_hint(mine, theirs)}"
        return None

    def check(self, module: nn.Module, include: Sequence[str] = ()) -> None:
        """Raise ``LayoutMismatch``, naming the first differing tensor and both shapes, unless this is the module's layout."""
        with_buffers = any(t.role == "buffer" for t in self.tensors)
        theirs = Layout.from_module(module, buffers="average" if with_buffers else "local", include=include)
        difference = self.first_difference(theirs)
        if difference is not None:
            raise LayoutMismatch(f"this model is not the fleet's model: {difference}")

    # ---- module <-> vector --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(
        self,
        module: nn.Module,
        out: Tensor | None = None,
        interval: Interval | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The module's tensors as float32 elements of ``interval`` (default: all), in ``out`` or a new vector.

        A new vector lies on ``device``, by default where the first exchanged tensor lies.
        """
        start, stop = self._bounds(interval)
        tensors = self._tensors(module)
        if out is None:
            out = torch.empty(stop - start, device=tensors[0].device if device is None else device)
        _expect(out, start, stop)
        self._zero_gap(out, start, stop)
        for index, lo, hi, at in self._pieces(start, stop):
            out[at : at + hi - lo].copy_(tensors[index].detach().reshape(-1)[lo:hi])
        return out

    @torch.no_grad()
    def write_(self, module: nn.Module, flat: Tensor, interval: Interval | None = None) -> None:
        """Set the module's tensors, in place, to ``flat``: the float32 elements of ``interval`` (default: all).

        Each tensor keeps its dtype and device. ``flat`` is never broadcast: its shape must be (stop - start,).
        """
        start, stop = self._bounds(interval)
        _expect(flat, start, stop)
        tensors = self._tensors(module)
        for index, lo, hi, at in self._pieces(start, stop):
            tensor = tensors[index].detach()
            values = tensor.reshape(-1)  # a view of a contiguous tensor, a copy of any other
            values[lo:hi].copy_(flat[at : at + hi - lo])
            if not tensor.is_contiguous():
                tensor.copy_(values.view(tensor.shape))

    @torch.no_grad()
    def outgoing(self, module: nn.Module, base: Tensor, interval: Interval | None = None, out: Tensor | None = None) -> Tensor:
        """What an update carries of ``interval``: base - local for parameters, the local values for buffers. On base's device.

        ``base`` holds the float32 elements of ``interval`` that the module was last set to. A parameter of lower precision held
        them rounded to its dtype, so base is rounded likewise first: else the rounding would be sent as progress. Written to
        ``out``, if given, or to a new vector.
        """
        start, stop = self._bounds(interval)
        _expect(base, start, stop)
        tensors = self._tensors(module)
        out = torch.empty_like(base) if out is None else out
        _expect(out, start, stop)
        self._zero_gap(out, start, stop)
        for index, lo, hi, at in self._pieces(start, stop):
            local = tensors[index].detach().reshape(-1)[lo:hi].to(base.device)
            target = out[at : at + hi - lo]
            if self.tensors[index].role == "buffer":
                target.copy_(local)
                continue
            held = base[at : at + hi - lo]
            if local.dtype.itemsize < held.dtype.itemsize:
                held = held.to(local.dtype).to(base.dtype)
            torch.sub(held, local, out=target)  # computed in the wider of the two dtypes
        return out

    def _bounds(self, interval: Interval | None) -> Interval:
        start, stop = interval or (0, self.elements)
        if not 0 <= start < stop <= self.elements:
            raise LayoutMismatch(f"[{start}, {stop}) is no interval of a layout of {self.elements} elements")
        return start, stop

    def _tensors(self, module: nn.Module) -> list[Tensor]:
        """The module's tensors in layout order."""
        module = unwrap(module)
        named: dict[str, Tensor] = dict(module.named_parameters())
        named.update(module.named_buffers())
        found = []
        for spec in self.tensors:
            tensor = named.get(spec.name)
            if tensor is None or tuple(tensor.shape) != spec.shape:
                shape = "none of that name" if tensor is None else f"one of shape {tuple(tensor.shape)}"
                raise LayoutMismatch(f"expected {_describe(spec)}, the module has {shape}")
            found.append(tensor)
        return found

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """For each tensor in [start, stop): its index, its elements [lo, hi) that lie inside, and their offset from start."""
        for index, spec in enumerate(self.tensors):
            lo, hi = max(start, spec.start), min(stop, spec.stop)
            if lo < hi:
                yield index, lo - spec.start, hi - spec.start, lo - start

    def _zero_gap(self, out: Tensor, start: int, stop: int) -> None:
        out[max(self.parameters - start, 0) : max(min(self.buffer_start, stop) - start, 0)] = 0.0


def matches(name: str, include: Sequence[str]) -> bool:
    """Whether one of these shell patterns matches a tensor's name."""
    return any(fnmatchcase(name, pattern) for pattern in include)


def _require_matches(include: Sequence[str], names: Sequence[str]) -> None:
    for pattern in include:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = ", ".join(names[:MAX_SHOWN]) + (f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else "")
            raise ConfigError(f"include: {pattern!r} matches nothing that can be exchanged; there are: {there or 'none'}")


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside ``DistributedDataParallel`` and ``torch.compile`` wrappers."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _float_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Persistent floating-point buffers, each once, under its first name (torch has no public list of the persistent ones)."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name in owner._non_persistent_buffers_set
    }
    return [(n, b) for n, b in module.named_buffers() if b.is_floating_point() and n not in transient]


def _place(tensors: list[TensorSpec], role: Role, start: int, named: Iterable[NamedShape]) -> None:
    """Append tensors of one role, one after another from ``start``."""
    for name, given in named:
        shape = tuple(int(n) for n in given)
        if not 0 < len(name) <= MAX_NAME or name.startswith("__") or not name.isprintable():
            raise ConfigError(f"tensor name {name[:MAX_NAME]!r}: 1 to {MAX_NAME} printable characters, not starting with '__'")
        size = math.prod(shape)
        if len(shape) > MAX_DIMENSIONS or min(shape, default=0) < 0 or start + size > MAX_ELEMENTS:
            allowed = f"at most {MAX_DIMENSIONS} dimensions, none negative, {MAX_ELEMENTS} elements in all"
            raise ConfigError(f"tensor {name!r} has shape {shape!s:.80}; allowed are {allowed}")
        tensors.append(TensorSpec(name, shape, role, start, size))
        start += size


def _entries(data: Any) -> list[tuple[str, list[int], str, int]]:
    """Check the types of parsed JSON; raises ``ValueError``."""
    if not isinstance(data, dict) or set(data) != {"format", "tensors"} or not isinstance(data["tensors"], list):
        raise ValueError("an object of 'format' and 'tensors' is due")
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r:.20}; this release reads format {FORMAT}")
    for index, entry in enumerate(data["tensors"]):
        match entry:
            case [str(), list(shape), "parameter" | "buffer", start] if all(type(n) is int for n in [*shape, start]):
                continue
        raise ValueError(f"tensor {index} is not [name, shape, role, start]")
    return [tuple(entry) for entry in data["tensors"]]


def _expect(flat: Tensor, start: int, stop: int) -> None:
    if flat.dtype != torch.float32 or tuple(flat.shape) != (stop - start,):
        got = f"{flat.dtype} of shape {tuple(flat.shape)}"
        raise LayoutMismatch(f"elements [{start}, {stop}) are torch.float32 of shape ({stop - start},), not {got}")


def _describe(spec: TensorSpec | None) -> str:
    return "no further tensor" if spec is None else f"{spec.role} {spec.name!r} of shape {spec.shape}"


def _hint(mine: TensorSpec | None, theirs: TensorSpec | None) -> str:
    if mine and theirs and mine.name == theirs.name:
        return ""
    if any(spec is not None and spec.role == "buffer" for spec in (mine, theirs)):
        return "; is 'buffers' set alike on both ends?"
    return "; are the same parameters frozen on both ends?"


def _round_up(elements: int) -> int:
    return -(-elements // BLOCK) * BLOCK
