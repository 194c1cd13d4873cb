"""What answers: a predictor, the model in service, and the gate that a new model has to pass.

A predictor is any callable from f32[n, ...] to f32[n, classes] logits; a row of the answer depends on its row of the input alone.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from fleetddp.common.errors import ConfigError, Reason, Refused, StorageError
from fleetddp.common.files import OsFile, OsFiles
from fleetddp.common.inference_config import GateConfig
from fleetddp.common.stored import storage
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
        self.best = math.nan  # of those that passed

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
        score, best = self._measure(candidate), self.best
        passed = math.isfinite(score) and not self._sign * score < self._sign * best - self._tolerance  # with best NaN: passes
        if passed:
            self.best = score if math.isnan(best) else self._sign * max(self._sign * score, self._sign * best)
        return Verdict(passed, score, best)


class Served:
    """The model in service, which is a predictor itself. A swap drops nothing: an answer that was begun ends with its model.

    ``kept``: a file that outlives the process, of the model in service and of the best that the gate has seen; to be removed
    when the gate's held-back data change. Raises ``Refused(NO_VERSION)`` as long as there is no model.
    """

    def __init__(self, gate: Gate | None = None, *, kept: Path | None = None) -> None:
        self._gate, self._kept = gate, kept
        self._current: tuple[Predictor, int] | None = None
        self._swapping = threading.Lock()
        self.refused_version = NO_VERSION  # the newest that the gate kept out

    @property
    def version(self) -> int:
        """Of the model in service."""
        return self._current[1] if self._current is not None else NO_VERSION

    def offer(self, candidate: Predictor, version: int) -> bool:
        """Take a model into service unless the gate keeps it out; whether it was taken. Others go on answering meanwhile.

        Raises ``ConfigError`` for another than a ``ModulePredictor`` where it is to be kept.
        """
        if self._kept is not None and not isinstance(candidate, ModulePredictor):
            raise ConfigError("only the model of a ModulePredictor can be kept; give Served no file, or one of these")
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
            self._keep(candidate, version)
            return True

    def resume(self, module: nn.Module, device: torch.device | str = "cpu") -> bool:
        """Take up the model that was in service when the process before ended, in ``module`` (a new one of its architecture), and
        what the gate had seen; whether there was one that fits. Nothing happens where there is a model already."""
        if self._kept is None or not self._kept.exists():
            return False
        with self._swapping:
            if self._current is not None:
                return False
            try:
                with safe_open(self._kept, framework="pt") as file:
                    about = file.metadata() or {}
                load_model(module, self._kept)
                version, best = int(about["version"]), float(about["best"])
            except (OSError, SafetensorError, RuntimeError, KeyError, ValueError) as error:  # RuntimeError: another architecture
                _log.warning("the model in %s cannot be taken up again: %s", self._kept, error)
                return False
            self._current = ModulePredictor(module, device), version
            if self._gate is not None:
                self._gate.best = best
            _log.info("version %d is in service again", version)
            return True

    def _keep(self, candidate: Predictor, version: int) -> None:
        """Durably; a disk that refuses is no reason not to answer."""
        if self._kept is None or not isinstance(candidate, ModulePredictor):
            return
        about = {"version": str(version), "best": repr(math.nan if self._gate is None else self._gate.best)}
        files, draft = OsFiles(), self._kept.with_suffix(".partial")
        try:
            with storage(f"cannot keep the model in service in {self._kept}"):
                files.make_dir(self._kept.parent)
                save_model(candidate.module, str(draft), about)
                file = OsFile(draft, os.O_RDWR)
                file.fsync()
                file.close()
                files.rename(draft, self._kept)
                files.fsync_dir(self._kept.parent)
        except StorageError as error:
            _log.warning("%s", error)

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
