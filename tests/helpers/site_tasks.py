"""Tasks that misbehave, for tests of sites."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fleetddp.cloud import FleetDDP
from helpers.tasks import LineTask


class SameForAll(LineTask):
    """Its ranks get all of the data each."""

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        return TensorDataset(self.x, self.y)


class Killed(LineTask):
    """Is interrupted after ``after`` training batches."""

    def __init__(self, *, after: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.left = after

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(model, FleetDDP):  # not while evaluating
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
        return super().loss(model, batch)
