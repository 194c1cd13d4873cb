"""Where a driver runs: who does its disk work, and who wakes it. ``LoopHost`` is that of a server's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Lane(Enum):
    """Disk work of one lane is done one after another, in the order submitted; the lanes run side by side."""

    JOURNAL = "journal"  # acceptances and facts: short
    MERGE = "merge"  # making versions: long
    SWEEP = "sweep"  # removing files: nobody waits for it


class Host(Protocol):
    """Where a driver runs: who does its disk work and who wakes it."""

    def submit(self, lane: Lane, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Do ``work`` off the driver's thread; call ``done`` on the driver's thread with its result or its exception."""
        ...

    def later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """Call ``call`` on the driver's thread in so many seconds; returns what cancels it."""
        ...


class LoopHost:
    """Runs a driver on the event loop it is made in: one thread a lane, timers of the loop.

    A lane computes in its own thread only: merging waits for memory, and torch's threads, spinning, would take the cores from
    those who receive.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lanes = {
            lane: ThreadPoolExecutor(1, f"fleet-{lane.value}", initializer=torch.set_num_threads, initargs=(1,)) for lane in Lane
        }

    def submit(self, lane: Lane, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """See ``Host``."""
        future: asyncio.Future[T] = self._loop.run_in_executor(self._lanes[lane], work)
        future.add_done_callback(lambda f: _report(f, done))

    def later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """See ``Host``."""
        return self._loop.call_later(seconds, call).cancel

    async def close(self) -> None:
        """Finish the work in hand."""
        for executor in self._lanes.values():
            await self._loop.run_in_executor(None, executor.shutdown)


def _report(future: asyncio.Future[T], done: Callable[[T | Exception], None]) -> None:
    error = future.exception()
    if error is None:
        done(future.result())
    else:
        done(error if isinstance(error, Exception) else RuntimeError(repr(error)))
