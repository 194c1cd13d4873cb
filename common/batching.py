"""When to compute which waiting requests together, and which to send away: a state machine that is told the time.

Requests of one sample shape are put together, whole, in the order of their arrival: a batch is due when ``max_batch`` samples
wait, or the oldest request has waited ``max_wait_s``. What cannot be answered in time is refused at once, while the caller can
still do something else (load shedding); the time a batch takes is learnt from those before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fleetddp.common.errors import Reason, Refused

_SMOOTHING = 0.2  # weight of the newest batch in the time that one is expected to take


@dataclass(eq=False, slots=True)
class Waiting:
    """One request: f32[n, ...], and until when its answer is of use (infinity: always)."""

    inputs: Tensor
    deadline: float = math.inf
    arrived: float = 0.0
    gone: Callable[[], bool] = lambda: False  # whether nobody waits for it any more

    @property
    def rows(self) -> int:
        """How many samples."""
        return len(self.inputs)


class Batcher:
    """The queue of one model that computes one batch at a time. Not thread-safe: it lives on one event loop."""

    def __init__(self, *, max_batch: int, max_wait_s: float, max_queue: int) -> None:
        self._max_batch, self._max_wait_s, self._max_queue = max_batch, max_wait_s, max_queue
        self._queues: dict[tuple[int, ...], deque[Waiting]] = {}  # by the shape of a sample
        self._computing = False
        self.batch_s = math.nan  # that one is expected to take
        self.queued = 0  # samples

    def add(self, waiting: Waiting, now: float) -> None:
        """Queue a request, or raise ``Refused(OVERLOADED)``. A request larger than ``max_batch`` becomes a batch of its own."""
        if self.queued and self.queued + waiting.rows > self._max_queue:
            raise Refused(Reason.OVERLOADED, f"{self.queued} samples wait already; at most {self._max_queue} may")
        done = self._expected(now)
        if done > waiting.deadline:
            raise Refused(Reason.OVERLOADED, f"it would take {done - now:.3f} s, the caller waits {waiting.deadline - now:.3f} s")
        waiting.arrived = now
        self._queues.setdefault(tuple(waiting.inputs.shape[1:]), deque()).append(waiting)
        self.queued += waiting.rows

    def take(self, now: float) -> list[Waiting]:
        """The batch due now, which is being computed until ``computed``; empty if none is due. Drops what is of no use now."""
        if self._computing:
            return []
        self._drop(now)
        due = [queue for queue in self._queues.values() if self._is_due(queue, now)]
        if not due:
            return []
        queue = min(due, key=lambda q: q[0].arrived)
        batch, rows = [queue.popleft()], 0
        rows = batch[0].rows
        while queue and rows + queue[0].rows <= self._max_batch:
            batch.append(queue.popleft())
            rows += batch[-1].rows
        if not queue:
            del self._queues[tuple(batch[0].inputs.shape[1:])]
        self.queued -= rows
        self._computing = True
        return batch

    def computed(self, seconds: float) -> None:
        """The batch that was taken is done; it took so long."""
        self._computing = False
        known = not math.isnan(self.batch_s)
        self.batch_s = (1 - _SMOOTHING) * self.batch_s + _SMOOTHING * seconds if known else seconds

    def due_at(self) -> float:
        """When to ask again, unless something is added before; infinity while one is computed, or nothing waits."""
        if self._computing or not self._queues:
            return math.inf
        return min(queue[0].arrived for queue in self._queues.values()) + self._max_wait_s

    def _is_due(self, queue: deque[Waiting], now: float) -> bool:
        return sum(w.rows for w in queue) >= self._max_batch or now >= queue[0].arrived + self._max_wait_s

    def _drop(self, now: float) -> None:
        for shape, queue in list(self._queues.items()):
            kept = deque(w for w in queue if w.deadline > now and not w.gone())
            self.queued -= sum(w.rows for w in queue) - sum(w.rows for w in kept)
            if kept:
                self._queues[shape] = kept
            else:
                del self._queues[shape]

    def _expected(self, now: float) -> float:
        """When a request that comes now will be done. One that finds nobody before it is always taken: else one slow batch,
        from which too much is expected, would keep out all that could teach better."""
        if math.isnan(self.batch_s) or not (self._computing or self.queued):
            return now
        return now + self.batch_s * (int(self._computing) + self.queued // self._max_batch + 1)
