"""Who answers, why, and when the cloud is asked: with a cloud that does as it is told and a clock that is moved by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fleetddp.common.clock import VirtualClock
from fleetddp.common.config import parse
from fleetddp.common.errors import ConfigError, FleetError, Late, Reason, Refused, StorageError, Unreachable
from fleetddp.common.inference_config import CascadeConfig
from fleetddp.common.predictor import Prediction, Served
from fleetddp.common.transport.backoff import Backoff
from fleetddp.edge.cascade import Answer, By, Cascade, Why, calibrate

LATE, AWAY = Late("too late"), Unreachable("away")
OVERLOADED = Refused(Reason.OVERLOADED, "later")
WRONG = Refused(Reason.WRONG_IDENTITY, "never")


class Steered:
    """A cloud that answers class 2 with version 7, or raises ``error``; ``asked`` has the samples of each request."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.outputs: Callable[[int], Tensor] = lambda n: torch.tensor([[0.0, 0.0, 9.0]]).expand(n, 3)
        self.asked: list[Tensor] = []
        self.timeouts: list[float] = []

    def predict(self, inputs: Tensor, timeout_s: float) -> Prediction:
        self.asked.append(inputs)
        self.timeouts.append(timeout_s)
        if self.error is not None:
            raise self.error
        return Prediction(self.outputs(len(inputs)), (7,) * len(inputs))


class NoJitter(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return b


def edge(inputs: Tensor) -> Tensor:
    """Class 0 or 1, by a sample's sign; hardness is its distance from 10."""
    return torch.stack([-inputs[:, 0], inputs[:, 0], torch.full((len(inputs),), -99.0)], 1)


def rule(outputs: Tensor) -> Tensor:
    return 10.0 - outputs[:, :2].abs().amax(1)


def samples(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


class Bench:
    def __init__(self, **options: object) -> None:
        self.cloud, self.clock, self.kept = Steered(), VirtualClock(), []  # type: ignore[var-annotated]
        given = {"edge": edge, "cloud": self.cloud, "hard": rule, "threshold": 5.0, "clock": self.clock.now} | options
        pause = Backoff(NoJitter(), first_s=1.0, cap_s=4.0)
        self.cascade = Cascade(pause=pause, deadline_s=0.25, on_hard=lambda *hard: self.kept.append(hard), **given)  # type: ignore[arg-type]

    def ask(self, *values: float) -> list[Answer]:
        return self.cascade(samples(*values))

    def why(self, *values: float) -> list[tuple[int, str, str]]:
        return [(a.label, a.by.value, a.why.value) for a in self.ask(*values)]


def test_easy_ones_stay_and_hard_ones_go_in_one_request() -> None:
    bench = Bench()
    assert bench.why(9.0, 1.0, -8.0, -2.0) == [
        (1, "edge", "easy"),
        (2, "cloud", "hard"),
        (0, "edge", "easy"),
        (2, "cloud", "hard"),
    ]
    (asked,) = bench.cloud.asked
    assert asked.flatten().tolist() == [1.0, -2.0]
    assert bench.cloud.timeouts == [0.25]
    assert [a.hardness for a in bench.ask(9.0, 1.0)] == [1.0, 9.0]
    assert [a.version for a in bench.ask(9.0, 1.0)] == [-1, 7]
    assert bench.cascade.counts == {(By.EDGE, Why.EASY): 4, (By.CLOUD, Why.HARD): 4}


def test_as_hard_as_the_threshold_is_easy() -> None:
    assert Bench().why(5.0, 4.99) == [(1, "edge", "easy"), (2, "cloud", "hard")]


def test_nothing_asked_nothing_answered() -> None:
    bench = Bench()
    assert bench.cascade(torch.zeros(0, 1)) == []
    assert bench.cloud.asked == []


@pytest.mark.parametrize(
    ("error", "why"), [(LATE, "late"), (AWAY, "away"), (OVERLOADED, "refused"), (Refused(Reason.NO_VERSION, ""), "refused")]
)
def test_the_edges_answer_stands_and_says_why(error: FleetError, why: str) -> None:
    bench = Bench()
    bench.cloud.error = error
    assert bench.why(1.0, 9.0, -1.0) == [(1, "edge", why), (1, "edge", "easy"), (0, "edge", why)]


def test_a_cloud_that_failed_is_left_alone_for_a_while() -> None:
    bench = Bench()
    bench.cloud.error = AWAY
    bench.ask(1.0)
    for _ in range(3):
        assert bench.why(1.0) == [(1, "edge", "away")]
    assert len(bench.cloud.asked) == 1
    bench.clock.advance(1.0)  # the first pause is over; the next is twice as long
    bench.ask(1.0)
    bench.clock.advance(1.9)
    bench.ask(1.0)
    assert len(bench.cloud.asked) == 2
    bench.clock.advance(0.1)
    bench.cloud.error = None
    assert bench.why(1.0) == [(2, "cloud", "hard")]
    assert bench.why(1.0) == [(2, "cloud", "hard")]
    bench.cloud.error = LATE
    bench.ask(1.0)
    bench.clock.advance(1.0)  # the pauses begin anew
    bench.ask(1.0)
    assert len(bench.cloud.asked) == 6


def test_after_a_pause_one_request_finds_out_for_all() -> None:
    bench = Bench()
    bench.cloud.error = AWAY
    bench.ask(1.0)
    bench.clock.advance(1.0)
    during: list[list[tuple[int, str, str]]] = []
    bench.cloud.outputs = lambda n: (during.append(bench.why(2.0)), torch.zeros(n, 3))[1]  # another thread's, meanwhile
    bench.cloud.error = None
    assert bench.why(1.0)[0][1:] == ("cloud", "hard")
    assert during == [[(1, "edge", "away")]]


def test_those_that_fail_together_are_one_failure() -> None:
    bench = Bench()
    bench.cloud.error = AWAY
    nested = Bench()
    nested.cloud.outputs = lambda n: (_ for _ in ()).throw(AWAY)  # fails at the same time as ...

    def outputs(n: int) -> Tensor:
        nested.cloud.outputs = lambda n: (_ for _ in ()).throw(AWAY)
        nested.ask(1.0)  # ... this one, which began before
        raise AWAY

    nested.cloud.outputs = outputs
    nested.ask(1.0)
    assert len(nested.cloud.asked) == 2
    nested.clock.advance(1.0)  # one pause, not two
    nested.ask(1.0)
    assert len(nested.cloud.asked) == 3


def test_a_request_that_is_refused_for_good_is_no_reason_to_leave_the_cloud_alone() -> None:
    bench = Bench()
    bench.cloud.error = WRONG
    assert bench.why(1.0) == [(1, "edge", "unusable")]
    bench.cloud.error = None
    assert bench.why(1.0) == [(2, "cloud", "hard")]


@pytest.mark.parametrize(
    "outputs", [torch.zeros(2, 4), torch.zeros(1, 3), torch.zeros(2), torch.tensor([[0.0, 0.0, math.nan]]).expand(2, 3)]
)
def test_what_the_cloud_answers_is_looked_at(outputs: Tensor) -> None:
    bench = Bench()
    bench.cloud.outputs = lambda n: outputs
    assert bench.why(1.0, -1.0) == [(1, "edge", "unusable"), (0, "edge", "unusable")]


def test_an_answer_of_the_edge_that_is_not_finite_is_hard() -> None:
    bench = Bench(edge=lambda inputs: edge(inputs) / (inputs != 9.0))
    (answer,) = bench.ask(9.0)
    assert (answer.by, answer.hardness) == (By.CLOUD, math.inf)


def test_a_sample_that_is_not_finite_does_not_spoil_the_others_request() -> None:
    bench = Bench()
    answers = bench.ask(math.nan, 1.0)
    assert [(a.by, a.why) for a in answers] == [(By.EDGE, Why.UNUSABLE), (By.CLOUD, Why.HARD)]
    assert bench.cloud.asked[0].tolist() == [[1.0]]


def test_without_a_cloud_the_edge_is_alone() -> None:
    assert Bench(cloud=None).why(9.0, 1.0) == [(1, "edge", "easy"), (1, "edge", "alone")]


def away(inputs: Tensor) -> Tensor:
    raise Unreachable("both replicas")


def test_where_the_edges_nodes_are_away_the_cloud_answers_all() -> None:
    bench = Bench(edge=away)
    assert bench.why(9.0, 1.0) == [(2, "cloud", "no_edge")] * 2
    bench.cloud.error = AWAY
    with pytest.raises(Unreachable, match="both replicas"):
        bench.ask(9.0)
    bench.cloud.error = None
    assert bench.why(9.0) == [(2, "cloud", "no_edge")]  # there is nobody else: the pause is not kept


def test_a_mistake_of_ours_is_not_taken_for_a_cloud_that_is_away() -> None:
    bench = Bench()
    bench.cloud.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        bench.ask(1.0)


def test_hard_samples_are_handed_on_with_what_the_cloud_answered() -> None:
    bench = Bench()
    bench.ask(9.0, 1.0)
    bench.cloud.error = AWAY
    bench.ask(2.0)
    (first, second) = bench.kept
    assert (first[0].tolist(), first[1].tolist(), first[2].tolist()) == ([[1.0]], [9.0], [[0.0, 0.0, 9.0]])
    assert (second[0].tolist(), second[1].tolist(), second[2]) == ([[2.0]], [8.0], None)


def test_a_full_disk_is_no_reason_not_to_answer() -> None:
    def full(*hard: object) -> None:
        raise StorageError("full")

    cascade = Cascade(edge, Steered(), hard=rule, threshold=5.0, on_hard=full)
    assert [answer.by for answer in cascade(samples(1.0))] == [By.CLOUD]


def test_the_edges_answers_name_the_version_in_service() -> None:
    served = Served()
    served.offer(edge, 3)
    assert [answer.version for answer in Bench(edge=served).ask(9.0)] == [3]


def test_calibration_as_the_fleet_file_says() -> None:
    inputs, labels = samples(9.0, 6.0, 1.0, -1.0, -9.0), torch.tensor([1, 1, 1, 2, 0])
    # margins of logits (-x, x, -99): the smaller |x|, the harder. The edge is wrong on -1 alone, which ties with 1.
    right = lambda inputs: torch.eye(3)[labels]  # noqa: E731
    assert calibrate(CascadeConfig(), edge, inputs).offload_rate == 0.0  # one of five may go, but two are equally hard
    assert calibrate(CascadeConfig(offload_rate=0.5), edge, inputs).offload_rate == 0.4
    assert calibrate(CascadeConfig(accuracy=0.8), edge, inputs, labels, right).offload_rate == 0.0
    assert calibrate(CascadeConfig(accuracy=0.9), edge, inputs, labels, right).offload_rate == 0.4
    with pytest.raises(ConfigError, match="give both"):
        calibrate(CascadeConfig(accuracy=0.9), edge, inputs)


def test_the_fleet_file_says_where_and_how() -> None:
    config = parse({"serve": {"address": "127.0.0.1:1"}, "cascade": {"rule": "energy", "deadline_s": 0.05}})
    cascade = Cascade.of_fleet(config, "pi", edge, threshold=-math.inf)
    answers = cascade(samples(1.0))  # nobody listens there
    cascade.close()
    assert [(a.by, a.why in (Why.AWAY, Why.LATE)) for a in answers] == [(By.EDGE, True)]
    assert answers[0].hardness == pytest.approx(-math.log(math.e + 1 / math.e))
