"""A model whose answers name its version, and how one is published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fleetddp.common import codecs
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.publish import save_init
from fleetddp.common.transport import Parent
from fleetddp.common.update import Kind, Receipt, Slice, Tier, UpdateHeader, UpdateId


class Constant(nn.Module):
    """Answers every sample f32[3] with its weights, f32[2]."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w + 0.0 * inputs[:, :2]


class ConstantTask:
    """Its accuracy is the first weight over 100."""

    def model(self) -> nn.Module:
        return Constant()

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        return TensorDataset(torch.zeros(2, 3))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).sum()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"accuracy": float(next(model.parameters()).detach()[0]) / 100}

    def example(self) -> Tensor:
        return torch.zeros(2, 3)


LAYOUT = Layout.from_module(Constant())
GEOMETRY = Geometry(LAYOUT, codecs.get("float32"))


def publish(parent: Parent, base: int, step: tuple[float, float], node: str = "pi") -> Receipt:
    """Push an update that moves the weights of version ``base`` by ``step``; alone in its window it is the next version."""
    header = UpdateHeader(
        update_id=UpdateId(node, 1, base + 1),
        kind=Kind.DELTA,
        tier=Tier.EDGE,
        base_version=base,
        codec="float32",
        layout=LAYOUT.fingerprint,
    )
    payload = (-torch.tensor(step)).numpy().tobytes()
    part = Slice(intervals=GEOMETRY.required(), samples=1.0, digest=google_crc32c.value(payload))
    return parent.push(header, part, memoryview(payload))


def fleet_sections(folder: Path, **serve: Any) -> dict[str, Any]:
    """The sections of a fleet file whose model is ``Constant``, for ``fleet_config``."""
    save_init(Constant(), folder / "init.safetensors")
    return {
        "start": {"bootstrap": "file", "file": str(folder / "init.safetensors")},
        "task": {"target": "helpers.serving:ConstantTask"},
        "serve": {"address": "127.0.0.1:0", "max_wait_s": 0.001, **serve},
    }
