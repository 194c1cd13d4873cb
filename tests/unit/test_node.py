"""An edge node against a parent that does what the test says: outages, refusals, divergence, restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scripted_parent import PATIENCE_S, ScriptedParent
from helpers.tasks import LineTask
from torch import Tensor, nn

from fleetddp.common.config import FleetConfig, parse
from fleetddp.common.errors import LayoutMismatch, Reason, Refused
from fleetddp.common.events import ByteRange
from fleetddp.common.layout import Layout
from fleetddp.common.transport import Sink
from fleetddp.common.update import Kind, State, UpdateHeader, Version
from fleetddp.edge import EdgeNode
from fleetddp.edge.node import serve

START = torch.tensor([1.0, 1.0])
LAYOUT = Layout.from_module(LineTask().model())


def config(folder: Path, **edge: Any) -> FleetConfig:
    return parse(
        {
            "run": "run",
            "members": {"heartbeat_s": 0.25, "lease_s": 1.0},
            "edge": {"state": str(folder), "steps": 3, "batch_size": 8, **edge},
        }
    )


def after_steps(start: Tensor, steps: int, lr: float = 0.1) -> Tensor:
    """Where so many full-batch SGD steps lead, by hand."""
    task, w = LineTask(), start.reshape(2, 1).clone()
    for _ in range(steps):
        w -= lr * 2 * task.x.T @ (task.x @ w - task.y) / 8
    return w.flatten()


class Running:
    """A node in a thread of its own."""

    def __init__(self, node: EdgeNode) -> None:
        self.node, self.outcome, self.error = node, "", None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self.node.run()
        except Exception as error:
            self.error = error

    def end(self) -> str:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.outcome


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Running] = []

    def begin(parent: ScriptedParent, *, task: Any = None, ready: Callable[[], bool] | None = None, **edge: Any) -> Running:
        hook = {} if ready is None else {"ready": ready}
        started.append(Running(EdgeNode(config(tmp_path, **edge), task or LineTask(), parent, name="pi", **hook)))
        return started[-1]

    yield begin
    for running in started:
        running.node.stop()
        running._thread.join(PATIENCE_S)


@pytest.fixture
def parent() -> ScriptedParent:
    parent = ScriptedParent(LAYOUT)
    parent.publish(START)
    return parent


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_one_update_per_version_until_the_run_is_finished(parent: ScriptedParent, start: Start) -> None:
    node = start(parent)
    parent.wait_for(lambda: len(parent.pushed) == 1)
    header, part, values = parent.pushed[0]
    assert (header.kind, header.base_version, header.steps, part.samples) == (Kind.DELTA, 0, 3, 24)
    close(values, START - after_steps(START, 3))
    beats = len(parent.heartbeats)
    parent.wait_for(lambda: len(parent.heartbeats) > beats + 3)  # it waits, and is alive
    assert len(parent.pushed) == 1
    assert parent.heartbeats[-1].base_version == 0
    parent.publish(torch.tensor([3.0, 0.0]))
    parent.wait_for(lambda: len(parent.pushed) == 2)
    assert parent.pushed[1][0].base_version == 1
    close(parent.pushed[1][2], torch.tensor([3.0, 0.0]) - after_steps(torch.tensor([3.0, 0.0]), 3))
    parent.set(finished="enough")
    assert node.end() == "enough"
    assert parent.left == ["pi"]


def test_it_waits_for_the_first_weights(start: Start) -> None:
    parent = ScriptedParent(LAYOUT)
    node = start(parent)
    parent.wait_for(lambda: len(parent.heartbeats) > 2)
    assert node.node.counts["units"] == 0
    parent.publish(START)
    parent.wait_for(lambda: len(parent.pushed) == 1)


def test_cut_off_it_trains_on_and_delivers_afterwards(parent: ScriptedParent, start: Start) -> None:
    trained = threading.Event()

    class Counting(LineTask):
        batches = 0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            Counting.batches += 1
            if parent.down and Counting.batches >= 9:
                trained.set()
            return super().loss(model, batch)

    node = start(parent, task=Counting())
    parent.wait_for(lambda: len(parent.pushed) == 1)
    parent.set(down=True)
    assert trained.wait(PATIENCE_S)
    parent.set(down=False)
    parent.wait_for(lambda: len(parent.pushed) == 2)
    (first, _, one), (second, part, two) = parent.pushed
    assert first.base_version == second.base_version == 0
    assert second.steps >= 6
    assert part.samples == 8 * second.steps
    close(one + two, START - after_steps(START, 3 + second.steps))  # each starts where the one before ended
    parent.publish(torch.zeros(2))
    parent.wait_for(lambda: len(parent.pushed) == 3)
    assert parent.pushed[2][0].base_version == 1
    parent.wait_for(lambda: node.node.outbox.counts["merged"] == 2)


def test_a_gradient_node_that_is_cut_off_waits(parent: ScriptedParent, start: Start) -> None:
    node = start(parent, update="gradient", steps=1)
    parent.wait_for(lambda: len(parent.pushed) == 1)
    parent.set(down=True)
    parent.wait_for(lambda: not node.node._cut_off)  # notified by the failing calls of the session
    parent.wait_for(lambda: node.node._cut_off)
    parent.set(down=False)
    joins = len(parent.heartbeats)
    parent.wait_for(lambda: len(parent.heartbeats) > joins + 2)
    assert node.node.counts["units"] == 1
    assert parent.pushed[0][0].kind is Kind.GRADIENT


def test_a_restart_without_a_parent_goes_on_from_what_it_holds(parent: ScriptedParent, start: Start) -> None:
    first = start(parent)
    parent.wait_for(lambda: len(parent.pushed) == 1)
    first.node.stop()
    first.end()
    again = ScriptedParent(LAYOUT)
    again.down, again.newest, again.versions = True, 0, parent.versions
    second = start(again)
    again.wait_for(lambda: second.node.counts["units"] >= 1)
    again.set(down=False)
    again.wait_for(lambda: len(again.pushed) == 2)
    # The parent has forgotten the first: it is pushed again, and the second goes on where it ended.
    assert again.pushed[0][0] == parent.pushed[0][0]
    close(again.pushed[0][2] + again.pushed[1][2], START - after_steps(START, 3 + again.pushed[1][0].steps))
    assert again.joins[0].incarnation > parent.joins[0].incarnation
    assert again.joins[0].open == (parent.pushed[0][0].update_id,)


def test_a_stale_update_is_dropped_for_the_newest_version(parent: ScriptedParent, start: Start) -> None:
    parent.verdict = lambda header, values: Reason.STALE if header.base_version < 5 else State.ACCEPTED
    node = start(parent)
    parent.wait_for(lambda: len(parent.pushed) >= 1)
    parent.publish(torch.zeros(2), number=5)
    parent.wait_for(lambda: parent.pushed[-1][0].base_version == 5)
    close(parent.pushed[-1][2], -after_steps(torch.zeros(2), 3))
    assert node.node.outbox.counts["refused"] >= 1


def test_after_a_refusal_it_starts_at_the_version_again(parent: ScriptedParent, start: Start) -> None:
    verdicts = iter([Reason.NORM_BOUND, State.ACCEPTED])
    parent.verdict = lambda header, values: next(verdicts)
    start(parent)
    parent.wait_for(lambda: len(parent.pushed) == 2)
    close(parent.pushed[1][2], parent.pushed[0][2])
    assert parent.pushed[0][0].update_id != parent.pushed[1][0].update_id


def test_a_training_that_diverges_is_dropped_counted_and_reported(parent: ScriptedParent, start: Start) -> None:
    class Diverging(LineTask):
        batches = 0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            Diverging.batches += 1
            return super().loss(model, batch) * (torch.nan if Diverging.batches == 2 else 1.0)

    node = start(parent, task=Diverging())
    parent.wait_for(lambda: len(parent.pushed) == 1)
    close(parent.pushed[0][2], START - after_steps(START, 3))
    assert node.node.counts["diverged"] == 1
    assert {"diverged": 1.0} in [heartbeat.metrics for heartbeat in parent.heartbeats]


def test_a_parent_that_went_back_is_followed(parent: ScriptedParent, start: Start) -> None:
    node = start(parent)
    parent.publish(START, number=7)
    parent.wait_for(lambda: bool(parent.pushed) and parent.pushed[-1][0].base_version == 7)
    parent.verdict = lambda header, values: Reason.FUTURE_BASE if header.base_version > 2 else State.ACCEPTED
    parent.set(down=True, standing={})
    node.node.stop()
    node.end()
    again = ScriptedParent(LAYOUT)
    again.verdict = parent.verdict
    again.publish(torch.zeros(2), number=2)
    start(again)
    again.wait_for(lambda: bool(again.pushed) and again.pushed[-1][0].base_version == 2)
    close(again.pushed[-1][2], -after_steps(torch.zeros(2), 3))


def test_what_a_person_must_mend_ends_it(parent: ScriptedParent, start: Start) -> None:
    parent.refuse_join = Refused(Reason.WRONG_RUN, "this is run 'other'")
    with pytest.raises(Refused, match="this is run 'other'"):
        start(parent).end()


def test_another_model_is_named_by_its_first_differing_tensor(parent: ScriptedParent, start: Start) -> None:
    parent.refuse_join = Refused(Reason.WRONG_LAYOUT, "another layout")
    with pytest.raises(LayoutMismatch, match=r"0\.weight.*\(1, 2\).*\(3, 2\)"):
        start(parent, task=LineTask(wide=3)).end()


def test_it_trains_only_when_the_device_is_ready(parent: ScriptedParent, start: Start) -> None:
    asked, ready = threading.Event(), threading.Event()

    def is_ready() -> bool:
        asked.set()
        return ready.is_set()

    node = start(parent, ready=is_ready)
    assert asked.wait(PATIENCE_S)
    assert node.node.counts["units"] == 0
    ready.set()
    parent.wait_for(lambda: len(parent.pushed) == 1)


def test_a_full_outbox_stops_training(parent: ScriptedParent, start: Start) -> None:
    node = start(parent, max_outbox=1)
    parent.wait_for(lambda: len(parent.pushed) == 1)
    parent.set(newest=3, versions={3: torch.zeros(2)})  # published without the update: it stays open
    parent.wait_for(lambda: bool(parent.heartbeats) and parent.heartbeats[-1].base_version == 3)
    beats = len(parent.heartbeats)
    parent.wait_for(lambda: len(parent.heartbeats) > beats + 3)
    assert node.node.counts["units"] == 1
    parent.publish(torch.zeros(2))
    parent.wait_for(lambda: len(parent.pushed) == 2)


def test_stop_does_not_wait_for_a_push(parent: ScriptedParent, start: Start) -> None:
    held = threading.Event()

    def hang(header: UpdateHeader, values: Tensor) -> State:
        held.set()
        parent.changed.wait_for(lambda: parent.closed, PATIENCE_S)
        return State.ACCEPTED

    parent.verdict = hang
    node = start(parent)
    assert held.wait(PATIENCE_S)
    node.node.stop()
    node.end()
    assert parent.closed


def test_the_end_of_the_run_does_not_wait_for_the_work_in_hand(parent: ScriptedParent, start: Start) -> None:
    begun = threading.Event()

    class Telling(LineTask):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            begun.set()
            return super().loss(model, batch)

    node = start(parent, task=Telling(), steps=2**31 - 1)
    assert begun.wait(PATIENCE_S)
    parent.set(finished="enough")
    assert node.end() == "enough"
    assert node.node.counts["units"] == 0


class Times:
    """When something was tried; ``third`` is set at the third time."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self.third = threading.Event()

    def note(self) -> None:
        self._at.append(time.monotonic())
        if len(self._at) == 3:
            self.third.set()

    @property
    def first_three_s(self) -> float:
        assert self.third.wait(PATIENCE_S)
        return self._at[2] - self._at[0]


def test_a_version_that_cannot_be_taken_up_is_not_pulled_over_and_over(parent: ScriptedParent, start: Start) -> None:
    tries, pull = Times(), parent.pull

    def damaged(version: int, ranges: Sequence[ByteRange], sink: Sink) -> Version:
        if version:
            return pull(version, ranges, sink)
        tries.note()
        raise Refused(Reason.BAD_CHECKSUM, "as scripted")

    parent.pull = damaged  # type: ignore[method-assign]
    start(parent)
    assert tries.first_three_s > 1.4  # pauses of at least 0.5 s and 1 s
    parent.publish(START)  # another one is pulled at once
    parent.wait_for(lambda: len(parent.pushed) == 1)
    assert parent.pushed[0][0].base_version == 1


def test_a_parent_whose_disk_is_full_is_not_sent_the_same_bytes_over_and_over(parent: ScriptedParent, start: Start) -> None:
    tries = Times()

    def full(header: UpdateHeader, values: Tensor) -> State:
        tries.note()
        raise Refused(Reason.STORAGE, "as scripted")

    parent.verdict = full
    start(parent)
    assert tries.first_three_s > 1.4


def test_importing_the_edge_costs_next_to_nothing() -> None:
    code = "import sys, fleetddp.edge; print(sorted({'torch', 'grpc', 'sklearn', 'pydantic'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


class Idle:
    """A node that does nothing but wait to be stopped."""

    def __init__(self) -> None:
        self.lives_in: list[threading.Thread] = []
        self.stopped = threading.Event()

    def run(self) -> str:
        self.lives_in.append(threading.current_thread())
        os.kill(os.getpid(), signal.SIGTERM)
        assert self.stopped.wait(30)
        return ""

    def stop(self) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.stopped.set()


def test_a_signal_never_strikes_the_thread_that_holds_the_locks() -> None:
    """Raised inside ``Condition.wait`` it left a lock taken, and the node waited for it for ever."""
    node = Idle()
    before = signal.getsignal(signal.SIGTERM)
    serve(node)  # type: ignore[arg-type]
    assert node.stopped.is_set()
    assert node.lives_in != [threading.main_thread()]
    assert signal.getsignal(signal.SIGTERM) is before
