"""Tasks for tests of the simulator's training engine; importable, because worker processes load them by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fleetddp.common.errors import ConfigError

FEATURES, CLASSES = 12, 4


class Blobs:
    """Clouds of points, some of each kind for every member. ``kind`` names the model, ``optimizer`` the optimizer.

    A member's name is ``COUNT-ANYTHING``: it holds that many samples. Those called ``…-bad`` hold an infinity, those called
    ``…-broken`` make the loss raise, those called ``…-forever`` make it wait for ever, after a line ``began`` on standard output.
    """

    def __init__(self, kind: str = "mlp", optimizer: str = "sgd", *, data: str = "subset", lr: float = 0.1) -> None:
        self.kind, self.optimizer_name, self.data_kind, self.lr = kind, optimizer, data, lr
        generator = torch.Generator().manual_seed(3)
        self.labels = torch.randint(0, CLASSES, (400,), generator=generator)
        centres = torch.randn(CLASSES, FEATURES, generator=generator)
        self.points = centres[self.labels] + 0.5 * torch.randn(400, FEATURES, generator=generator)

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            return MODELS[self.kind]()

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        size, _, manner = member.partition("-")
        rows = torch.arange(int(size)) * 7 % 400 if size != "0" else torch.arange(0)
        points = self.points[rows]
        if manner in ("bad", "broken", "forever"):
            points = points.clone()
            points[0, 0] = {"bad": torch.inf, "broken": 1e6, "forever": 1e7}[manner]
            return TensorDataset(points, self.labels[rows])
        if self.data_kind == "subset":
            return Subset(TensorDataset(self.points, self.labels), rows.tolist())
        if self.data_kind == "tensors":
            return TensorDataset(points, self.labels[rows])
        if self.data_kind == "list":
            return Pairs(points, self.labels[rows])
        return Stream(points, self.labels[rows])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        points, labels = batch
        if self.kind.startswith("mlp") and points.dim() == 2 and not torch._C._functorch.is_batchedtensor(points):
            largest = float(points.max())
            if largest == 1e6:
                raise RuntimeError("the sensor is broken")
            if largest == 1e7:
                os.write(sys.stdout.fileno(), b"began\n")
                threading.Event().wait()
        found = nn.functional.cross_entropy(model(points.to(next_dtype(self.kind))).float(), labels)
        if self.kind == "mlp-penalty":
            found = found + 0.1 * sum(p.square().sum() for p in model.parameters())
        return found

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer_name](parameters, self.lr)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {}


class Pairs(Dataset[Any]):
    """A dataset that is more than tensors."""

    def __init__(self, points: Tensor, labels: Tensor) -> None:
        self.points, self.labels = points, labels

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.points[index], int(self.labels[index])


class Stream(IterableDataset[Any]):
    """The same, in order, without a length."""

    def __init__(self, points: Tensor, labels: Tensor) -> None:
        self.points, self.labels = points, labels

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.points, self.labels, strict=True))


class Centred(nn.Module):
    """Mixes the samples of a batch, which no stack of clients bears."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


class Twice(nn.Module):
    """Uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(self.layer(inputs).relu()))
        return found


class Unused(nn.Module):
    """Has a parameter that the loss does not reach, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(FEATURES), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layer(inputs * self.frozen)
        return found


def next_dtype(kind: str) -> torch.dtype:
    """What the model computes in."""
    return torch.bfloat16 if kind == "bfloat16" else torch.float32


def _mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), *between, nn.Linear(16, CLASSES))


def _cnn(*between: nn.Module) -> nn.Module:
    first = [nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 8, 3, padding=1), *between, nn.ReLU()]
    return nn.Sequential(*first, nn.Conv2d(8, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _mlp,
    "mlp-penalty": _mlp,
    "mlp-centred": lambda: _mlp(Centred()),
    "dropout": lambda: _mlp(nn.Dropout(0.3)),
    "bfloat16": lambda: _mlp().to(torch.bfloat16),
    "line": lambda: nn.Linear(FEATURES, CLASSES, bias=False),
    "twice": Twice,
    "unused": Unused,
    "cnn": _cnn,
    "norm": lambda: _cnn(nn.BatchNorm2d(8)),
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "decay": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, weight_decay=0.05),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr / 10),
}


class Local(Blobs):
    """Of no use to a worker: it holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Failing(Blobs):
    """No member has data."""

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        raise ConfigError(f"nobody is called {member!r}")


def train_for_ever() -> None:
    """A parent process whose one worker waits for ever: for tests that end it."""
    from fleetddp.edge.sim.training import Engine, Job

    with Engine(Blobs(), workers=1, path="single") as engine:
        engine.put(0, torch.zeros(engine.layout.elements))
        list(engine.train([Job("5-forever", 0)]))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's would be ignored
    train_for_ever()
