"""A proxy set: unlabelled items that every member of a track of soft labels has, and gives its opinion of."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

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


def assigned(version: int, items: int, count: int) -> tuple[Interval, ...]:
    """The items that members label on ``version``: ``count`` of them, a run that walks round the set, [start, stop), ascending.

    The same for every member, as in FedMD and DS-FL: a consensus is of all who took part. After ceil(items / count) versions
    every item has had its turn.
    """
    if count >= items:
        return ((0, items),)
    start = max(version, 0) * count % items
    stop = start + count
    return ((start, stop),) if stop <= items else ((0, stop - items), (start, items))
