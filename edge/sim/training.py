"""The training engine: trains the clients of a simulated fleet for real, on all processors.

    with Engine(task) as engine:
        engine.put(0, weights)
        for trained in engine.train([Job("phone-1", version=0), Job("phone-2", version=0)]):
            ...

A delta is what ``edge/trainer.py`` gives for the same task, member, weights, settings and seed: to the bit on the path
``single``, to within 1e-5 on the others (see ``calibration.py``), which are used where they are faster.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from fleetddp.common.errors import ConfigError, LayoutMismatch
from fleetddp.common.layout import Layout
from fleetddp.common.task import Task
from fleetddp.edge.sim.batches import Job
from fleetddp.edge.sim.calibration import Found, Path
from fleetddp.edge.sim.shared import SharedRows
from fleetddp.edge.sim.single import Buffers, TaskFailed
from fleetddp.edge.sim.workers import WorkerLost, Workers

__all__ = ["Engine", "Job", "TaskFailed", "Trained", "WorkerLost"]

CHUNK = 10  # jobs that a worker is given at a time, at most ...
ROOM = 64 * 1024 * 1024  # bytes for the deltas of one worker, if two of them need less
STACK = 16  # ... and by the path ``stacked``, for which many at once cost less each
AHEAD = 2  # chunks that a worker is given before it has done the first: it need not wait for the next


class Trained(NamedTuple):
    """What a member's training came to."""

    job: Job
    delta: Tensor  # float32[elements]: base - local for parameters, the local values of averaged buffers
    samples: float
    steps: int
    metrics: Mapping[str, float]  # ``train_loss``, if it is finite
    diverged: bool  # the delta is not finite: its member would have had nothing to send


class Engine:
    """Trains jobs of one task in ``workers`` processes (default: as many as there are processors).

    ``layout``, if given, is checked against the task's model. ``path`` names the path to train by; by default the first call of
    ``train`` finds the fastest. Which one wins may depend on the machine's mood, and what the paths compute differs in the last
    bits: give ``path="single"`` to get the same bits every time; any task and optimizer can be trained by it. Averaged buffers
    come with the weights; what else a model keeps (buffers that are not exchanged) begins every job at the values that
    ``task.model()`` gives.

    Raises ``ConfigError`` for a task that cannot be pickled. Must be closed; is a context manager.
    """

    def __init__(
        self,
        task: Task,
        *,
        layout: Layout | None = None,
        workers: int | None = None,
        buffers: Buffers = "average",
        path: Path | None = None,
    ) -> None:
        count = os.cpu_count() or 1 if workers is None else workers
        if count < 1:
            raise ConfigError(f"training needs at least one worker process; got {workers}")
        self._task, self._count, self._path = task, count, path
        self.layout = Layout.from_module(task.model(), buffers=buffers) if layout is None else layout
        elements = self.layout.elements
        self._room = max(1, min(STACK, ROOM // (AHEAD * 4 * elements)))
        self._versions = SharedRows(1, elements)
        self._deltas = SharedRows(AHEAD * self._room, elements)
        self._blocks: dict[int, int] = {}  # of the versions, in shared memory
        self._free: list[int] = []
        self._ready = False
        self.found: Found | None = None  # by calibration, once it was needed
        self._workers = Workers(count, task, buffers, self._versions, self._deltas)

    # ---- weights --------------------------------------------------------------------------------------------------------------

    def put(self, version: int, weights: Tensor) -> None:
        """Hold these weights (float32[elements]) under this number until ``drop``. ValueError if others are held under it."""
        if weights.dtype != torch.float32 or tuple(weights.shape) != (self.layout.elements,):
            got = f"{weights.dtype} of shape {tuple(weights.shape)}"
            raise LayoutMismatch(f"weights are torch.float32 of shape ({self.layout.elements},), not {got}")
        if version in self._blocks:
            if torch.equal(self._versions.block(self._blocks[version])[0], weights.cpu()):
                return
            raise ValueError(f"version {version} is held already, with other weights: drop it first")
        block = self._free.pop() if self._free else len(self._blocks)
        self._versions.block(block)[0].copy_(weights)
        self._blocks[version] = block

    def drop(self, version: int) -> None:
        """Give up a version, which no job under way may need. Does nothing if it is not held."""
        block = self._blocks.pop(version, None)
        if block is not None:
            self._free.append(block)

    @property
    def held(self) -> list[int]:
        """The versions held."""
        return sorted(self._blocks)

    # ---- training -------------------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """By which jobs are trained; None if that is not found yet."""
        return self._path

    def start(self) -> None:
        """Wait until the workers are ready. Raises ``LayoutMismatch`` unless the task's model has the layout given."""
        if self._ready:
            return
        found = self._workers.everywhere("layout")
        if set(found) != {self.layout.fingerprint}:
            self.layout.check(self._task.model())
            raise LayoutMismatch(
                f"the model that the task makes in a worker is another: {found} instead of {self.layout.fingerprint}"
            )
        if self._path is not None:
            self._workers.everywhere("use", self._path)
        self._ready = True

    def train(self, jobs: Iterable[Job]) -> Iterator[Trained]:
        """Train all jobs and yield each when it is done, in no particular order. Each delta is the caller's to keep.

        Whoever stops asking before the end gives up the rest; it is waited for at the next call. Raises ``TaskFailed`` where
        the task raises an error, ``WorkerLost`` if a process dies, ValueError for a version that is not held.
        """
        wanted = sorted(jobs, key=_cost, reverse=True)
        missing = {job.version for job in wanted} - self._blocks.keys()
        if missing:
            raise ValueError(f"no weights are held for version {', '.join(map(str, sorted(missing)))}: put them first")
        return self._train(wanted)

    def _train(self, wanted: Sequence[Job]) -> Iterator[Trained]:
        if not wanted:
            return
        self.start()
        self._workers.settle()
        if self._path is None:
            self._calibrate(wanted)
        if self._path == "stacked":
            queue = deque(_equal_chunks(wanted, self._room, self._count))
        else:
            queue = deque(_chunks(wanted, min(CHUNK, self._room), self._count))
        under_way: list[deque[tuple[int, Sequence[Job]]]] = [deque() for _ in range(self._count)]
        self._hand_out(queue, under_way)
        while any(under_way):
            for number, outcomes in self._workers.answers():
                row, jobs = under_way[number].popleft()
                rows = self._deltas.block(number)[row : row + len(jobs)]
                deltas = [delta.clone() for delta in rows]  # at once, so that the worker can go on
                self._hand_out(queue, under_way)
                for job, delta, outcome in zip(jobs, deltas, outcomes, strict=True):
                    metrics = {"train_loss": outcome.loss} if math.isfinite(outcome.loss) else {}
                    yield Trained(job, delta, outcome.samples, outcome.steps, metrics, not outcome.finite)

    def _hand_out(self, queue: deque[Sequence[Job]], under_way: list[deque[tuple[int, Sequence[Job]]]]) -> None:
        """The next chunks to whoever has the least to do, until that is enough."""
        while queue:
            loads = [sum(_cost(job) for _, jobs in chunks for job in jobs) for chunks in under_way]
            number = loads.index(min(loads))
            if len(under_way[number]) == AHEAD:
                return
            jobs = queue.popleft()
            row = self._room if under_way[number] and under_way[number][0][0] == 0 else 0
            under_way[number].append((row, jobs))
            names = ", ".join(job.member for job in jobs)
            self._workers.call(number, "train", self._placed(jobs), row, what=f"train {names}")

    def _calibrate(self, wanted: Sequence[Job]) -> None:
        """By what the first worker finds. The others do the same beside it: they are warm then, and it is as busy as later."""
        self.found, *_ = self._workers.everywhere("calibrate", self._placed(wanted[: min(CHUNK, self._room)]))
        self._path = self.found.path
        self._workers.everywhere("use", self._path)

    def _placed(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs with the place of their weights in memory instead of a version."""
        return [job._replace(version=self._blocks[job.version]) for job in jobs]

    @property
    def pids(self) -> list[int]:
        """Of the worker processes."""
        return self._workers.pids

    # ---- end ------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers, whatever they are doing. Can be repeated."""
        if self._count:
            self._count = 0
            self._workers.close()
            self._versions.close()
            self._deltas.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _cost(job: Job) -> int:
    """Samples it trains on, as far as is known: the measure of how long it takes."""
    return job.steps * job.batch_size if job.steps is not None else job.epochs * max(job.samples, 1)


def _chunks(jobs: Sequence[Job], limit: int, workers: int) -> Iterator[Sequence[Job]]:
    """Cut into chunks of at most ``limit`` jobs that get smaller towards the end, so that all workers end at about the same time.
    It depends on the jobs alone, not on who is fast: what is stacked with what is the same in every run."""
    left = sum(map(_cost, jobs))
    start = 0
    while start < len(jobs):
        stop, cost = start + 1, _cost(jobs[start])
        while stop < min(len(jobs), start + limit) and cost + _cost(jobs[stop]) <= left / workers:
            cost += _cost(jobs[stop])
            stop += 1
        yield jobs[start:stop]
        left -= cost
        start = stop


def _equal_chunks(jobs: Sequence[Job], limit: int, workers: int) -> Iterator[Sequence[Job]]:
    """Cut into as few chunks of at most ``limit`` jobs as give every worker the same number of them, if there are enough jobs: a
    small stack costs nearly as much as a large one."""
    pieces = min(len(jobs), workers * -(-len(jobs) // (workers * limit)))
    for piece in range(pieces):
        yield jobs[len(jobs) * piece // pieces : len(jobs) * (piece + 1) // pieces]
