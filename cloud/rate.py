"""The learning rate of a site's steps: the task's own, scaled to the site's batch and warmed up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch.optim import Optimizer

Scaling = Literal["none", "linear", "sqrt"]


def scale(rule: Scaling, batch: float, reference: float) -> float:
    """What a learning rate that suits batches of ``reference`` samples is multiplied by for batches of ``batch``.

    "linear": batch / reference (Goyal et al., Accurate, Large Minibatch SGD, 2017, §2.1; for SGD). "sqrt": its square root
    (Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, 2022; for Adam and its kin). "none": 1.
    """
    return {"none": 1.0, "linear": batch / reference, "sqrt": math.sqrt(batch / reference)}[rule]


class LearningRate:
    """Multiplies the rates of ``optimizer`` by ``factor``; the k-th of the first n = ``warmup_steps`` steps by k / n of it.

    The optimizer holds the task's rates but for the time of a step: schedulers and checkpoints never see the factor, so that a
    site which goes on with another number of ranks takes the factor of its new batch.
    """

    def __init__(self, optimizer: Optimizer, factor: float = 1.0, warmup_steps: int = 0) -> None:
        self.steps = 0  # taken so far
        self._optimizer, self._factor, self._warmup_steps = optimizer, factor, warmup_steps

    @property
    def factor(self) -> float:
        """Of the next step."""
        return self._factor * min(1.0, (self.steps + 1) / max(1, self._warmup_steps))

    def step(self) -> None:
        """The optimizer's step, at the rates that are due."""
        with self._applied(self.factor):
            self._optimizer.step()
            self.steps += 1

    @contextmanager
    def _applied(self, factor: float) -> Iterator[None]:
        if factor == 1.0:
            yield
            return
        before = [group["lr"] for group in self._optimizer.param_groups]
        for group, rate in zip(self._optimizer.param_groups, before, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(self._optimizer.param_groups, before, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """How many steps were taken."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.steps = int(state["steps"])
