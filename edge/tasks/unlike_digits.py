"""Digits for unlike models: a convolutional network in the cloud, a perceptron of an eleventh of its size at the edge.

No member has seen all classes. Besides what members hold there is a proxy set that nobody has labels of: by giving their opinions
of it (a track of kind ``logits``) they teach each other the classes that only some have seen. Needs the extra ``demo``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fleetddp.common.errors import ConfigError
from fleetddp.edge.tasks.digits import CLASSES, HELD_OUT, Handwriting, read_images

PROXY = 0.5  # of each class, of those images that are not held out
SEES = {"site": (0, 1, 2, 3, 4, 5), "edge-1": (4, 5, 6, 7, 8, 9), "edge-2": (0, 1, 6, 7, 8, 9), "edge-3": (2, 3, 6, 7, 8, 9)}


class UnlikeDigits(Handwriting):
    """The task. ``role``: whose model it is. ``sees``: the classes of each member; the images of a class are dealt out evenly to
    those who see it. Who holds which image follows from ``sees`` and ``seed`` alone.

    Raises ``ConfigError`` without scikit-learn, or for a member that is not named.
    """

    title = "unlike digits"

    def __init__(
        self,
        role: Literal["cloud", "edge"] = "edge",
        sees: Mapping[str, Sequence[int]] = SEES,
        *,
        seed: int = 0,
        lr: float = 0.02,
    ) -> None:
        if role not in ("cloud", "edge") or not all(set(classes) <= set(range(CLASSES)) for classes in sees.values()):
            raise ConfigError(f"unlike digits: role is cloud or edge, classes are 0 to 9; given: {role!r}, {dict(sees)}")
        self._role, self._seed, self._lr = role, seed, lr
        images, labels = read_images()
        held: dict[str, list[Any]] = {name: [] for name in sees}
        test: list[Any] = []
        proxy: list[Any] = []
        rng = np.random.default_rng(seed)
        for digit in range(CLASSES):
            order = rng.permutation(np.flatnonzero(labels == digit))
            first = round(HELD_OUT * len(order))
            second = first + round(PROXY * (len(order) - first))
            test.append(order[:first])
            proxy.append(order[first:second])
            holders = [name for name, classes in sees.items() if digit in classes]
            for place, name in enumerate(holders):
                held[name].append(order[second:][place :: len(holders)])
        self.test = _dataset(images, labels, test)
        self._proxy = images[rng.permutation(np.concatenate(proxy))]  # in no order that tells anything
        self._data = {name: _dataset(images, labels, rows) for name, rows in held.items() if rows}

    def proxy(self) -> Tensor:
        """The items of the proxy set: float32[719, 64]."""
        return self._proxy

    def model(self) -> nn.Module:
        """Of the cloud: a convolutional network of 118 186 parameters; of an edge: a perceptron 64-128-10 (9 610)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            if self._role == "edge":
                return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))
            return nn.Sequential(
                nn.Unflatten(1, (1, 8, 8)),
                nn.Conv2d(1, 32, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(1024, 96),
                nn.ReLU(),
                nn.Linear(96, CLASSES),
            )


def _dataset(images: Tensor, labels: np.ndarray[Any, Any], rows: list[Any]) -> TensorDataset:
    chosen = np.concatenate(rows)
    return TensorDataset(images[chosen], torch.as_tensor(labels[chosen]))
