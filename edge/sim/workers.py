"""Worker processes of the training engine: each holds the task and one resident model, and trains what it is told to.

They are forked from a server process that has imported torch (``forkserver``), never from the caller, who may have threads.
Weights and deltas lie in shared memory; through the pipes go only the names and numbers of jobs and of their outcomes. A worker
ends with its parent, however that ends, and leaves Ctrl-C to it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fleetddp.common.errors import ConfigError, FleetError
from fleetddp.common.task import Task
from fleetddp.edge.sim import preload
from fleetddp.edge.sim.batches import Job
from fleetddp.edge.sim.calibration import Found, Path, Way, calibrate, way
from fleetddp.edge.sim.shared import SharedObject, SharedRows
from fleetddp.edge.sim.single import Buffers, Outcome, Single, TaskFailed

STOP_S = 5.0  # for a worker to end when it is told to, before it is killed


class WorkerLost(FleetError):
    """A worker process ended by itself. The message says how, and what it was doing."""


class Worker:
    """The worker's side. Its public methods are what the parent may call, one at a time."""

    def __init__(self, task: Task, buffers: Buffers, versions: SharedRows, deltas: SharedRows, number: int) -> None:
        self._task, self._buffers, self._versions, self._deltas, self._number = task, buffers, versions, deltas, number
        self._single = Single(task, buffers)
        self._way: Way = self._single

    def layout(self) -> str:
        """The fingerprint of its model's layout."""
        return self._single.layout.fingerprint

    def calibrate(self, jobs: Sequence[Job]) -> Found:
        """Here and below, a job's ``version`` is the number of the block of shared memory that holds it."""
        return calibrate(self._task, self._single, self._buffers, jobs, self._base)

    def use(self, path: Path) -> None:
        """Train by this path from now on."""
        self._way = way(path, self._task, self._single, self._buffers)

    def train(self, jobs: Sequence[Job], row: int) -> list[Outcome]:
        """The deltas go to rows ``row`` and following of the worker's block of shared memory."""
        out = self._deltas.block(self._number)[row : row + len(jobs)]
        if self._way is not self._single:
            try:
                return self._way.train(jobs, self._base, out)
            except Exception:  # what the task does not bear of this path, or an error of its own: the plain path tells which
                pass
        return self._single.train(jobs, self._base, out)

    def _base(self, block: int) -> torch.Tensor:
        return self._versions.block(block)[0]


def _serve(pipe: Connection, task: SharedObject, buffers: Buffers, versions: SharedRows, deltas: SharedRows, number: int) -> None:
    """A worker process, from beginning to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    worker: Worker | None = None
    while True:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            worker = worker or Worker(task.load(), buffers, versions, deltas, number)
            answer: tuple[Any, ...] = ("done", getattr(worker, method)(*arguments))
        except TaskFailed as failure:
            answer = ("failed", failure.member, failure.what, traceback.format_exc())
        except Exception as error:
            answer = ("failed", "", f"{type(error).__name__}: {error}", traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:  # the parent has gone
            return


def _end_with_parent() -> None:
    """A long job must not outlive whoever wanted it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class Workers:
    """The parent's side: starts the processes, sends calls and collects answers. Each worker answers its calls in order."""

    def __init__(self, count: int, task: Task, buffers: Buffers, versions: SharedRows, deltas: SharedRows) -> None:
        context = multiprocessing.get_context("forkserver")
        preload.start()
        try:
            shared = SharedObject(task)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(f"the task {type(task).__name__} cannot be given to worker processes: {error}") from error
        self._pipes: list[Connection] = []
        self._processes = []
        self._waiting: list[list[str]] = []  # by worker: what it was asked and has not answered
        for number in range(count):
            ours, theirs = context.Pipe()
            arguments = (theirs, shared, buffers, versions, deltas, number)
            process = context.Process(target=_serve, args=arguments, name=f"fleetddp-trainer-{number}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
            self._waiting.append([])
            self.call(number, "layout")  # so that it loads the task at once; whoever needs the answer asks again
        shared.close()

    @property
    def pids(self) -> list[int]:
        """Of the worker processes."""
        return [process.pid or 0 for process in self._processes]

    def call(self, number: int, method: str, *arguments: Any, what: str = "") -> None:
        """Ask worker ``number`` to run a method of ``Worker``; ``what`` describes it, should the worker die of it."""
        self._waiting[number].append(what or method)
        try:
            self._pipes[number].send((method, arguments))
        except OSError:
            raise self._lost(number) from None

    def answers(self) -> Iterator[tuple[int, Any]]:
        """Wait for answers: of those that are there, (worker, what the method returned). Raises ``TaskFailed`` and
        ``WorkerLost``."""
        busy = {pipe: number for number, pipe in enumerate(self._pipes) if self._waiting[number]}
        for pipe in wait(list(busy)):
            number = busy[pipe]  # type: ignore[index]
            yield number, self._answer(number)

    def everywhere(self, method: str, *arguments: Any) -> list[Any]:
        """Have all workers run it and wait for all; what they were asked before is waited for and forgotten."""
        self.settle()
        for number in range(len(self._pipes)):
            self.call(number, method, *arguments)
        return [self._answer(number) for number in range(len(self._pipes))]

    def settle(self) -> None:
        """Wait for what is still under way, and forget it."""
        for number, waiting in enumerate(self._waiting):
            while waiting:
                try:
                    self._answer(number)
                except TaskFailed:
                    continue

    def _answer(self, number: int) -> Any:
        try:
            kind, *content = self._pipes[number].recv()
        except (EOFError, OSError):
            raise self._lost(number) from None
        self._waiting[number].pop(0)
        if kind == "done":
            return content[0]
        member, what, where = content
        raise TaskFailed(member, what) from _RemoteError(where)

    def _lost(self, number: int) -> WorkerLost:
        process = self._processes[number]
        process.join(STOP_S)
        doing = "; ".join(self._waiting[number]) or "nothing"
        code = process.exitcode
        return WorkerLost(f"worker process {number} (pid {process.pid}) ended with exit code {code} while it was to do: {doing}")

    def close(self) -> None:
        """End the processes at once, whatever they are doing: they hold nothing that could be lost."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._pipes, self._processes, self._waiting = [], [], []


class _RemoteError(Exception):
    """Shows a worker's traceback as the cause of the error it led to."""

    def __init__(self, text: str) -> None:
        super().__init__("\n" + text)
