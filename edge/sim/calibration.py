"""Which way to train is the fastest for this task on this machine: a few steps of real jobs tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn

from fleetddp.common.task import Task
from fleetddp.edge.sim.batched import Stacked, Unsuitable
from fleetddp.edge.sim.batches import Job
from fleetddp.edge.sim.single import Base, Buffers, Outcome, Single

Path = Literal["single", "channels_last", "stacked"]

STEPS = 4  # of each job
FEW = 3  # jobs that are enough where none are stacked
ROUNDS = 3  # the best counts: whatever else runs on the machine only ever makes one slower
LONG_STEP_S = 0.02  # beyond it overhead no longer matters, and calibrating takes as few steps as it can
AT_LEAST = 0.95  # of the time of the plain path: a smaller gain is no reason to leave it
AGREE, AGREE_PARTS = 1e-5, 1e-4  # largest difference of an element of the delta; and of its norm, against the delta's


class Found(NamedTuple):
    """What calibration found."""

    path: Path
    seconds: Mapping[Path, float]  # of processor time a step of one client, by path; paths that cannot train the task are missing
    why_not: Mapping[Path, str]  # by path


class Way(Protocol):
    """Trains several jobs: ``Single`` or ``Stacked``."""

    def train(self, jobs: Sequence[Job], base: Base, out: Tensor) -> list[Outcome]:
        """See ``Single.train``."""
        ...


def way(path: Path, task: Task, single: Single, buffers: Buffers) -> Way:
    """The implementation of a path. Raises ``Unsuitable``."""
    if path == "single":
        return single
    if path == "stacked":
        return Stacked(task, single)
    if not any(type(module) is nn.Conv2d for module in single.model.modules()):
        raise Unsuitable("the model has no nn.Conv2d")
    return Single(task, buffers, channels_last=True)


def calibrate(task: Task, single: Single, buffers: Buffers, jobs: Sequence[Job], base: Base) -> Found:
    """Try the paths on ``jobs``, cut to a few steps. Raises ``TaskFailed`` if the plain path cannot train them."""
    shorter = [job._replace(steps=STEPS) for job in jobs]
    took = min(_seconds(lambda: _deltas(single, shorter[:1], base)) for _ in range(2)) / STEPS
    if took > LONG_STEP_S:
        shorter = [job._replace(steps=1) for job in jobs[:1]]
    seconds: dict[Path, float] = {}
    why_not: dict[Path, str] = {}
    ways: dict[Path, Way] = {}
    for path in get_args(Path):
        try:
            ways[path] = way(path, task, single, buffers)
        except Exception as error:  # of whatever kind: the task was not written with this path in mind
            why_not[path] = f"{type(error).__name__}: {error}"
    if "stacked" not in ways:
        shorter = shorter[:FEW]
    reference = _deltas(single, shorter, base)
    for path, trained in ways.items():
        try:
            disagreement = _disagreement(reference, _deltas(trained, shorter, base))
        except Exception as error:  # as above
            disagreement = f"{type(error).__name__}: {error}"
        if disagreement and path != "single":  # a task that does not even agree with itself is trained the plain way
            why_not[path] = disagreement
            continue
        rounds = ROUNDS if took <= LONG_STEP_S else 1
        best = min(_seconds(lambda: _deltas(trained, shorter, base)) for _ in range(rounds))  # noqa: B023  called at once
        seconds[path] = best / sum(job.steps or 0 for job in shorter)
    fastest = min(seconds, key=lambda path: seconds[path])
    return Found(fastest if seconds[fastest] < AT_LEAST * seconds["single"] else "single", seconds, why_not)


def _deltas(trained: Way, jobs: Sequence[Job], base: Base) -> Tensor:
    deltas = torch.zeros(len(jobs), len(base(jobs[0].version)))
    trained.train(jobs, base, deltas)
    return deltas


def _disagreement(reference: Tensor, deltas: Tensor) -> str:
    apart = deltas - reference
    largest, parts = float(apart.abs().max()), float(apart.norm() / reference.norm().clamp_min(1e-30))
    if largest <= AGREE and parts <= AGREE_PARTS:  # false for what is not a number, too
        return ""
    return f"deltas differ from the plain path's by up to {largest:.1e} ({parts:.1e} of their norm)"


def _seconds(call: Callable[[], object]) -> float:
    """Processor time, so that a busy machine does not decide."""
    began = time.thread_time()
    call()
    return time.thread_time() - began
