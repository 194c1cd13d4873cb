"""Small tasks for tests of members."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fleetddp.common.task import part


class LineTask:
    """Fit y = 2 x1 - x2 from eight fixed points; with ``norm`` a BatchNorm1d stands in front.

    ``trace`` names a file that grows by one byte with each batch: for tests that watch from another process.
    """

    def __init__(self, *, points: int = 8, norm: bool = False, lr: float = 0.1, wide: int = 1, trace: str = "") -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(points, 2, generator=generator)
        self.y = (2 * self.x[:, :1] - self.x[:, 1:]).expand(-1, wide)
        self.norm, self.lr, self.wide, self.trace = norm, lr, wide, trace

    def model(self) -> nn.Module:
        line = nn.Linear(2, self.wide, bias=False)
        nn.init.constant_(line.weight, 0.5)
        return nn.Sequential(nn.BatchNorm1d(2), line) if self.norm else nn.Sequential(line)

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        return part(TensorDataset(self.x, self.y), index, count)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if self.trace:
            with open(self.trace, "ab") as file:
                file.write(b".")
        return nn.functional.mse_loss(model(x), y)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        with torch.no_grad():
            return {"loss": float(self.loss(model, (self.x, self.y)))}
