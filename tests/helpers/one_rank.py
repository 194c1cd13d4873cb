"""A site of one rank in the test's own process: what needs no second rank needs no second process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleetddp.cloud import FleetDDP
from fleetddp.common.clock import Clock, SystemClock
from fleetddp.common.transport.memory import MemoryFleet, MemoryParent
from helpers.fleet import fleet_config


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A Gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class OneRank:
    """An aggregator in memory and the sites made on it; all are closed at the end."""

    def __init__(self, folder: Path, clock: Clock | None = None, **sections: Any) -> None:
        self.fleet = MemoryFleet(fleet_config(folder, **sections), clock or SystemClock())
        self.parents: list[MemoryParent] = []
        self.sites: list[FleetDDP] = []

    def connect(self, node: str) -> MemoryParent:
        self.parents.append(self.fleet.parent())
        return self.parents[-1]

    def site(self, module: nn.Module, **kwargs: Any) -> FleetDDP:
        given = {"coordinator": self.connect, "site": "lab", "sync_every": 1, **kwargs}
        self.sites.append(FleetDDP(module, **given))
        return self.sites[-1]

    def status(self) -> dict[str, Any]:
        return self.fleet.parent().status()

    def live(self) -> list[str]:
        """Members that have not left."""
        return [member["node"] for member in self.status()["members"] if member["live"]]

    def close(self) -> None:
        for site in self.sites:
            site.close()
        self.fleet.stop()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor | None = None) -> None:
    """One step on ``x`` (default: a random batch of eight for ``models.wide``)."""
    x = torch.randn(8, 40) if x is None else x
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def vector(module: nn.Module) -> Tensor:
    """All parameters, flat."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])
