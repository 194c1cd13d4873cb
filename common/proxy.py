"""A proxy set: unlabelled items that every member of a track of soft labels has, and gives its opinion of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fleetddp.common.distill_config import OpenItemsConfig, check_item
from fleetddp.common.errors import ConfigError
from fleetddp.common.payload import bytes_of
from fleetddp.common.update import Interval


@dataclass(frozen=True)
class ProxySet:
    """Items by their number, in no order that means anything; ``digest`` says what they are."""

    name: str
    classes: int
    items: Tensor  # [n, ...]: n inputs of a model

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int | slice | Tensor) -> Tensor:
        return self.items[index]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of dtype, shape and little-endian bytes of the items, in hex: the same wherever they come from."""
        found = hashlib.sha256(f"{self.items.dtype} {tuple(self.items.shape)}\n".encode())
        found.update(bytes_of(self.items.contiguous().reshape(-1).view(torch.uint8)))
        return found.hexdigest()

    @classmethod
    def open(cls, path: Path, *, name: str, classes: int) -> ProxySet:
        """From a safetensors file with one tensor, ``items``; ``ConfigError`` if it is none, or has no item."""
        try:
            with safe_open(path, framework="pt") as file:
                items = file.get_tensor("items")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"proxy.file: {path} holds no tensor 'items': {error}") from error
        if items.dim() == 0 or len(items) == 0:
            raise ConfigError(f"proxy.file: {path}: 'items' has shape {tuple(items.shape)}: there is no item in it")
        return cls(name, classes, items)

    def save(self, path: Path) -> None:
        """As a file for ``proxy.file``, which ``open`` reads."""
        save_file({"items": self.items.contiguous()}, path)


def shape_of(proxy: ProxySet, config: OpenItemsConfig) -> tuple[int, ...]:
    """Of an open item: as those of the set are. Raises ``ConfigError``."""
    shape = tuple(proxy.items.shape[1:])
    if proxy.items.dtype is not torch.float32:
        raise ConfigError(f"proxy.open: hard samples are float32, the items of set {proxy.name!r} {proxy.items.dtype}")
    if config.shape not in (None, shape):
        raise ConfigError(f"proxy.open.shape: {config.shape}; the items of set {proxy.name!r} have {shape}")
    try:
        check_item(shape)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return shape


def assigned(version: int, items: int, count: int, opened: Sequence[int] = ()) -> tuple[Interval, ...]:
    """The items that members label on ``version``: ``count`` of them, a run that walks round the set, [start, stop), ascending.

    The same for every member, as in FedMD and DS-FL: a consensus is of all who took part. After ceil(items / count) versions
    every item has had its turn. ``opened``: the numbers (from ``items`` on, ascending) of the open items that are labelled on
    this version. Half of the count, or more where the set is small, is for these: a run of its own walks round them.
    """
    for_open = min(len(opened), max(count // 2, count - items))
    chosen = _walk(version, items, count - for_open)
    places = _walk(version, len(opened), for_open)
    return (*chosen, *(run for start, stop in places for run in runs(opened[start:stop])))


def runs(numbers: Sequence[int]) -> list[Interval]:
    """Ascending numbers as intervals, [start, stop) each."""
    found: list[Interval] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def _walk(version: int, items: int, count: int) -> tuple[Interval, ...]:
    if count >= items:
        return ((0, items),) if items else ()
    if count == 0:
        return ()
    start = max(version, 0) * count % items
    stop = start + count
    return ((start, stop),) if stop <= items else ((0, stop - items), (start, items))
