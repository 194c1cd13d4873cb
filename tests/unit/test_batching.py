"""Batches and refusals by the clock: each test moves the time by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fleetddp.common.batching import Batcher, Waiting
from fleetddp.common.errors import Reason, Refused


def batcher(*, max_batch: int = 4, max_wait_s: float = 0.5, max_queue: int = 8) -> Batcher:
    return Batcher(max_batch=max_batch, max_wait_s=max_wait_s, max_queue=max_queue)


def request(rows: int = 1, width: int = 3, deadline: float = math.inf) -> Waiting:
    return Waiting(torch.zeros(rows, width), deadline)


def test_a_full_batch_is_due_at_once() -> None:
    queue, requests = batcher(), [request() for _ in range(5)]
    for waiting in requests:
        queue.add(waiting, 0.0)
    assert queue.take(0.0) == requests[:4]
    assert queue.queued == 1


def test_a_lone_request_waits_for_company_and_no_longer() -> None:
    queue, waiting = batcher(), request()
    queue.add(waiting, 1.0)
    assert queue.due_at() == 1.5
    assert queue.take(1.4) == []
    assert queue.take(1.5) == [waiting]
    assert queue.due_at() == math.inf


def test_one_batch_at_a_time() -> None:
    queue, requests = batcher(max_wait_s=0.0), [request() for _ in range(2)]
    queue.add(requests[0], 0.0)
    assert queue.take(0.0) == requests[:1]
    queue.add(requests[1], 0.1)
    assert queue.take(9.0) == []
    assert queue.due_at() == math.inf
    queue.computed(0.2)
    assert queue.take(9.0) == requests[1:]


def test_requests_are_whole_and_in_order() -> None:
    queue, requests = batcher(), [request(2), request(3), request(1)]
    for waiting in requests:
        queue.add(waiting, 0.0)
    assert queue.take(0.0) == requests[:1]  # the second would make it five, and the third does not overtake it
    queue.computed(0.1)
    assert queue.take(0.0) == requests[1:]


def test_a_request_larger_than_a_batch_goes_alone() -> None:
    queue, requests = batcher(), [request(6), request(1)]
    for waiting in requests:
        queue.add(waiting, 0.0)
    assert queue.take(0.0) == requests[:1]


def test_samples_of_other_shapes_are_no_company() -> None:
    queue, narrow, broad = batcher(max_batch=2), request(width=3), request(width=4)
    queue.add(narrow, 0.0)
    queue.add(broad, 0.1)
    assert queue.take(0.4) == []
    assert queue.take(0.6) == [narrow]
    queue.computed(0.1)
    assert queue.take(0.6) == [broad]


def test_what_is_of_no_use_any_more_is_dropped() -> None:
    queue, late, kept = batcher(), request(deadline=0.3), request(deadline=9.0)
    gone = Waiting(torch.zeros(1, 3), gone=lambda: True)
    for waiting in (late, gone, kept):
        queue.add(waiting, 0.0)
    assert queue.take(0.5) == [kept]
    assert queue.queued == 0


def test_a_full_queue_sends_away() -> None:
    queue = batcher(max_queue=3)
    queue.add(request(2), 0.0)
    with pytest.raises(Refused, match=r"OVERLOADED: 2 samples wait already; at most 3 may") as refused:
        queue.add(request(2), 0.0)
    assert refused.value.reason is Reason.OVERLOADED
    assert refused.value.retry
    queue.add(request(1), 0.0)
    assert queue.queued == 3


def test_an_empty_queue_takes_what_is_larger_than_itself() -> None:
    queue = batcher(max_queue=3)
    queue.add(request(5), 0.0)
    assert queue.queued == 5


def test_what_cannot_be_done_in_time_is_refused_at_once() -> None:
    queue = batcher(max_wait_s=0.0, max_queue=100)
    queue.add(request(), 0.0)
    queue.take(0.0)
    queue.computed(1.0)  # a batch takes one second, as far as is known
    queue.add(request(), 0.0)
    queue.take(0.0)  # computing: a request that comes now is in the second batch from now
    with pytest.raises(Refused, match=r"it would take 2\.000 s, the caller waits 1\.900 s"):
        queue.add(request(deadline=1.9), 0.0)
    queue.add(request(4, deadline=2.1), 0.0)
    with pytest.raises(Refused, match=r"it would take 3\.000 s"):  # behind a full batch
        queue.add(request(deadline=2.9), 0.0)


def test_one_slow_batch_does_not_keep_everybody_out() -> None:
    queue = batcher(max_wait_s=0.0)
    queue.add(request(), 0.0)
    queue.take(0.0)
    queue.computed(100.0)
    for _ in range(30):  # one that finds nobody before it is taken, and teaches that it was an exception
        queue.add(request(deadline=1.0), 0.0)
        assert queue.take(0.0)
        queue.computed(0.1)
    assert queue.batch_s == pytest.approx(0.1 + 99.9 * 0.8**30)
