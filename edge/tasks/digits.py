"""Handwritten digits, unevenly spread: sites never see some classes, every edge node has its own handful of habits.

The 1797 images of 8 x 8 pixels are scikit-learn's (from the UCI repository, Alpaydin and Kaynak, 1998); nothing is downloaded.
A fifth of each class is held out from training and is what ``evaluate`` measures. Needs the extra ``demo`` (scikit-learn).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fleetddp.common.errors import ConfigError
from fleetddp.common.task import part

CLASSES = 10
HELD_OUT = 0.2  # of each class
AT_SITES = 0.6  # of the training images of each class that sites see


class Handwriting:
    """What tasks on these images share. Kinds set ``test``, what members hold (``_data``) and the learning rate."""

    title: ClassVar[str]  # in messages
    test: TensorDataset
    _data: dict[str, TensorDataset]
    _lr: float

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        """What a member holds, or one part of it."""
        if member not in self._data:
            raise ConfigError(f"{self.title}: no member is called {member!r}; there are {', '.join(self._data)}")
        return part(self._data[member], index, count)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross entropy."""
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """SGD with momentum and a little weight decay."""
        return torch.optim.SGD(parameters, lr=self._lr, momentum=0.9, weight_decay=1e-3)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """``accuracy`` on the held-out images, and ``accuracy_0`` to ``accuracy_9`` by class."""
        return accuracies(model, *self.test.tensors)


class Digits(Handwriting):
    """The task. ``sites`` and ``edges`` name all members; who holds which image follows from them and ``seed`` alone.

    Sites share ``AT_SITES`` of the classes that are not in ``unseen``, evenly. The rest is spread over the edges, each class by
    proportions drawn from a symmetric Dirichlet distribution of concentration ``alpha`` (Hsu, Qi and Brown, 2019): the smaller it
    is, the less alike they are. Raises ``ConfigError`` without scikit-learn, or for a member that is not named.
    """

    title = "digits"

    def __init__(
        self,
        sites: Sequence[str] = ("site",),
        edges: Sequence[str] = ("edge-1", "edge-2", "edge-3", "edge-4", "edge-5", "edge-6"),
        *,
        seed: int = 0,
        unseen: Sequence[int] = (7, 8, 9),
        alpha: float = 1.0,
        lr: float = 0.05,
    ) -> None:
        if not edges or set(sites) & set(edges) or not set(unseen) < set(range(CLASSES)):
            given = f"sites {list(sites)}, edges {list(edges)}, unseen {list(unseen)}"
            raise ConfigError(f"digits: at least one edge, no name twice, not all classes unseen; given: {given}")
        self._seed, self._lr = seed, lr
        images, labels = read_images()
        rng = np.random.default_rng(seed)
        held_out, parts = _partition(labels, list(sites), list(edges), set(unseen), alpha, rng)
        self.test = TensorDataset(images[held_out], torch.as_tensor(labels[held_out]))
        self._data = {name: TensorDataset(images[rows], torch.as_tensor(labels[rows])) for name, rows in parts.items()}

    @property
    def holdings(self) -> dict[str, list[int]]:
        """How many images of each class each member holds."""
        counts = {name: torch.bincount(data.tensors[1], minlength=CLASSES) for name, data in self._data.items()}
        return {name: count.tolist() for name, count in counts.items()}

    def model(self) -> nn.Module:
        """A small convolutional network (9 930 parameters); the same initial weights for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            return nn.Sequential(
                nn.Unflatten(1, (1, 8, 8)),
                nn.Conv2d(1, 16, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(16, 32, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(512, CLASSES),
            )

    def example(self) -> Tensor:
        """The first held-out images, f32[8, 64]: what ``fleetddp export`` traces the model with."""
        return self.test.tensors[0][:8]


@torch.no_grad()
def accuracies(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """``accuracy`` of a model, and ``accuracy_0`` to ``accuracy_9`` by class; leaves it in eval mode."""
    model.eval()
    device = next(model.parameters()).device
    right = (model(images.to(device)).argmax(1).cpu() == labels).double()
    by_class = {f"accuracy_{digit}": float(right[labels == digit].mean()) for digit in range(CLASSES)}
    return {"accuracy": float(right.mean()), **by_class}


def read_images() -> tuple[Tensor, np.ndarray[Any, np.dtype[np.int64]]]:
    """float32[1797, 64] in [-1, 1], and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(f"the digits task needs scikit-learn: pip install 'fleetddp[demo]' ({error})") from error
    found = load_digits()
    return torch.as_tensor(found.data / 8.0 - 1.0, dtype=torch.float32), np.asarray(found.target, dtype=np.int64)


def _partition(
    labels: np.ndarray[Any, np.dtype[np.int64]],
    sites: list[str],
    edges: list[str],
    unseen: set[int],
    alpha: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]]]:
    """Rows held out, and rows by member; every row is in one of them."""
    held_out: list[Any] = []
    rows: dict[str, list[Any]] = {name: [] for name in [*sites, *edges]}
    for digit in range(CLASSES):
        order = rng.permutation(np.flatnonzero(labels == digit))
        cut = round(HELD_OUT * len(order))
        held_out.append(order[:cut])
        order = order[cut:]
        cut = 0 if digit in unseen or not sites else round(AT_SITES * len(order))
        for name, share in zip(sites, np.array_split(order[:cut], max(len(sites), 1)), strict=False):  # no site: no share
            rows[name].append(share)
        bounds = (np.cumsum(rng.dirichlet([alpha] * len(edges)))[:-1] * (len(order) - cut)).round().astype(int)
        for name, share in zip(edges, np.split(order[cut:], bounds), strict=True):
            rows[name].append(share)
    return np.concatenate(held_out), {name: np.concatenate(shares) for name, shares in rows.items()}
