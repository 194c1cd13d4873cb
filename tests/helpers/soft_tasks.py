"""A small task of classes, for tests of distillation: corners of a square, of which each member has seen some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fleetddp.common.config import FleetConfig
from fleetddp.common.proxy import ProxySet
from fleetddp.common.task import part
from helpers.fleet import fleet_config

CORNERS = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])


def cloud(count: int, seed: int, classes: Sequence[int] = (0, 1, 2, 3)) -> tuple[Tensor, Tensor]:
    """Points f32[count, 2] about the corners of some classes, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.tensor(classes)[torch.randint(len(classes), (count,), generator=generator)]
    return CORNERS[labels] + 0.2 * torch.randn(count, 2, generator=generator), labels


class Corners:
    """``sees``: the classes of each member. A model of any ``width`` can learn this."""

    def __init__(self, sees: Mapping[str, Sequence[int]], *, width: int = 16, lr: float = 0.2) -> None:
        self._sees, self._width, self._lr = sees, width, lr

    def proxy(self) -> Tensor:
        return cloud(40, 1)[0]

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(2, self._width), nn.Tanh(), nn.Linear(self._width, 4))

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        return part(TensorDataset(*cloud(64, 2, self._sees[member])), index, count)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self._lr)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        points, labels = cloud(200, 3)
        return {"accuracy": float((model(points).argmax(1) == labels).float().mean())}


def proxy_set(task: Corners) -> ProxySet:
    return ProxySet("corners", 4, task.proxy())


def soft_config(folder: Path, proxy: ProxySet, **sections: Any) -> FleetConfig:
    """One track, of soft labels on this set; ``source``: what else the section ``proxy`` says."""
    named = {"name": proxy.name, "classes": proxy.classes, "items": len(proxy), "digest": proxy.digest, "by_tier": True}
    named |= sections.pop("source", {})
    distill = {"label_items": 10, **sections.pop("distill", {})}
    return fleet_config(folder, **{"kind": "logits", "publish": "prob16", "proxy": named, "distill": distill, **sections})


class FarCorners(Corners):
    """Brings no proxy set: it comes from the coordinator."""

    proxy = None  # type: ignore[assignment]


class Knowing(Corners):
    """Somebody knows what a hard sample is: the class of the corner that it is nearest to."""

    def label_source(self, sample: Tensor) -> int | None:
        return int((CORNERS - sample).square().sum(1).argmin())
