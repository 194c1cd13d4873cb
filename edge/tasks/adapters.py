"""The digits with a model of which only a small part is exchanged: low-rank adapters on a frozen backbone, and a head.

The fleet file names that part: ``include: ["adapter.*", "head.*"]``. The backbone is each member's own copy of something trained
elsewhere. The normalisation is trained and stays with each member, whose images may be lighter or darker than the others' (Li et
al., FedBN, 2021).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fleetddp.edge.tasks.digits import CLASSES, Digits

WIDTH = 128


class Adapted(nn.Module):
    """Hidden layers W x, which stay as they are, each with an adapter: W x + B A x (Hu et al., LoRA, 2021, eq. 3).

    A is drawn, B is zero: before training the model is its backbone with a new head.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        sizes = ((64, WIDTH), (WIDTH, WIDTH))
        self.norm = nn.LayerNorm(64)
        self.backbone = nn.ModuleList(nn.Linear(*size) for size in sizes).requires_grad_(False)
        self.adapter = nn.ModuleList(_low_rank(*size, rank) for size in sizes)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """f32[b, 64] to f32[b, CLASSES]."""
        x = self.norm(x)
        for layer, adapter in zip(self.backbone, self.adapter, strict=True):
            x = torch.relu(layer(x) + adapter(x))
        out: Tensor = self.head(x)
        return out


def _low_rank(inputs: int, outputs: int, rank: int) -> nn.Module:
    down, up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
    nn.init.zeros_(up.weight)
    return nn.Sequential(down, up)


class AdaptedDigits(Digits):
    """``Digits`` with ``Adapted``: 4 874 parameters are exchanged, of 29 834. ``args`` are those of ``Digits``, and ``rank``."""

    def __init__(self, *args: Any, rank: int = 8, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rank = rank

    def model(self) -> nn.Module:
        """The same weights for the same seed. (A backbone trained elsewhere would be loaded here.)"""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            return Adapted(self._rank)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD with momentum over what is not frozen."""
        return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=self._lr, momentum=0.9)
