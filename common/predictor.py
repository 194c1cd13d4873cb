"""What answers: a predictor, the model in service, and the gate that a new model has to pass.

A predictor is any callable from f32[n, ...] to f32[n, classes] logits; a row of the answer depends on its row of the input alone.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.inference_config import GateConfig
from fleetddp.common.task import Task
from fleetddp.common.update import NO_VERSION

_log = logging.getLogger(__name__)


class Predictor(Protocol):
    """Answers for samples. Called from several threads at once."""

    def __call__(self, inputs: Tensor, /) -> Tensor:
        """f32[n, ...] to f32[n, classes]."""
        ...


class Prediction(NamedTuple):
    """Answers, and of which version of a model each is."""

    outputs: Tensor  # f32[n, classes]
    versions: tuple[int, ...]


class ModulePredictor:
    """A module that answers on ``device``; it is put in evaluation mode and must not be trained any more."""

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self.module = module.eval().to(device)
        self._device = torch.device(device)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> Tensor:
        """f32[n, ...] to f32[n, classes], on the CPU."""
        outputs = self.module(inputs.to(self._device))
        if not isinstance(outputs, Tensor) or outputs.dim() == 0 or len(outputs) != len(inputs):
            got = f"{tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ConfigError(f"the model answers {len(inputs)} samples with {got}: one row for each is due")
        return outputs.float().cpu()


def accuracy(inputs: Tensor, labels: Tensor) -> Callable[[Predictor], float]:
    """A measure for a ``Gate``: the share of these held-back samples that a predictor gets right."""
    return lambda predictor: float((predictor(inputs).argmax(1) == labels).double().mean())


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a gate says of a candidate; ``best`` is of those that passed before (NaN: none did)."""

    passed: bool
    score: float
    best: float


class Gate:
    """Keeps out a model that is worse on held-back data than the best that passed, by more than ``tolerance``.

    It compares with the best, not with the last: many steps down of less than the tolerance do not add up.
    """

    def __init__(self, measure: Callable[[Predictor], float], *, tolerance: float = 0.01, higher_is_better: bool = True) -> None:
        self._measure, self._tolerance = measure, tolerance
        self._sign = 1.0 if higher_is_better else -1.0
        self._best = math.nan

    @classmethod
    def of_task(cls, config: GateConfig, task: Task) -> Gate | None:
        """The fleet file's gate, on what the task's ``evaluate`` measures; None if the fleet file names no metric."""
        metric = config.metric
        if metric is None:
            return None

        def measure(predictor: Predictor) -> float:
            assert isinstance(predictor, ModulePredictor)
            measured = task.evaluate(predictor.module)
            predictor.module.eval()
            if metric not in measured:
                given = ", ".join(measured) or "none"
                raise ConfigError(f"serve.gate.metric: the task's evaluate gives no {metric!r}; it gives: {given}")
            return float(measured[metric])

        return cls(measure, tolerance=config.tolerance, higher_is_better=config.better == "higher")

    def judge(self, candidate: Predictor) -> Verdict:
        """Measure a candidate. One whose score is not finite never passes."""
        score, best = self._measure(candidate), self._best
        passed = math.isfinite(score) and not self._sign * score < self._sign * best - self._tolerance  # with best NaN: passes
        if passed:
            self._best = score if math.isnan(best) else self._sign * max(self._sign * score, self._sign * best)
        return Verdict(passed, score, best)


class Served:
    """The model in service, which is a predictor itself. A swap drops nothing: an answer that was begun ends with its model.

    Raises ``Refused(NO_VERSION)`` as long as there is none.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self._gate = gate
        self._current: tuple[Predictor, int] | None = None
        self._swapping = threading.Lock()
        self.refused_version = NO_VERSION  # the newest that the gate kept out

    @property
    def version(self) -> int:
        """Of the model in service."""
        return self._current[1] if self._current is not None else NO_VERSION

    def offer(self, candidate: Predictor, version: int) -> bool:
        """Take a model into service unless the gate keeps it out; whether it was taken. Others go on answering meanwhile."""
        with self._swapping:
            if self._gate is not None:
                verdict = self._gate.judge(candidate)
                if not verdict.passed:
                    self.refused_version = version
                    _log.warning(
                        "version %d is not taken into service: %.4g on held-back data, the best so far is %.4g; version %d stays",
                        version, verdict.score, verdict.best, self.version,
                    )  # fmt: skip
                    return False
                _log.info("version %d: %.4g on held-back data", version, verdict.score)
            self._current = candidate, version
            return True

    def predict(self, inputs: Tensor) -> Prediction:
        """Answers, all of one version."""
        current = self._current
        if current is None:
            raise Refused(Reason.NO_VERSION, "no version is in service yet")
        predictor, version = current
        return Prediction(predictor(inputs), (version,) * len(inputs))

    def __call__(self, inputs: Tensor) -> Tensor:
        """f32[n, ...] to f32[n, classes]."""
        return self.predict(inputs).outputs
