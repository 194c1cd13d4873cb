"""The gate before a model in service, and what a swap does to those who ask."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from helpers.tasks import LineTask
from torch import Tensor, nn

from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.inference_config import GateConfig
from fleetddp.common.predictor import Gate, ModulePredictor, Predictor, Served, accuracy


def constant(value: float) -> Predictor:
    return lambda inputs: torch.full((len(inputs), 2), value)


def scores(*values: float, **options: float) -> Gate:
    """A gate that measures these, one after another."""
    coming = iter(values)
    return Gate(lambda predictor: next(coming), **options)  # type: ignore[arg-type]


def verdicts(gate: Gate, count: int) -> list[bool]:
    return [gate.judge(constant(0.0)).passed for _ in range(count)]


def test_a_worse_one_does_not_pass() -> None:
    assert verdicts(scores(0.9, 0.895, 0.88, 0.95, 0.9), 5) == [True, True, False, True, False]


def test_small_steps_down_do_not_add_up() -> None:
    assert verdicts(scores(0.9, 0.895, 0.8925, 0.885, tolerance=0.01), 4) == [True, True, True, False]


def test_of_a_loss_lower_is_better() -> None:
    gate = scores(0.5, 0.505, 0.52, 0.3, 0.32, higher_is_better=False)
    assert verdicts(gate, 5) == [True, True, False, True, False]


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_what_is_not_finite_never_passes(score: float) -> None:
    assert verdicts(scores(score, 0.1, score), 3) == [False, True, False]


def test_accuracy_on_held_back_samples() -> None:
    measure = accuracy(torch.eye(4, 2), torch.tensor([0, 1, 1, 1]))
    assert measure(lambda inputs: inputs) == 0.5  # rows 2 and 3 are zeros, whose first maximum is class 0


def test_a_task_measures_what_the_fleet_file_names() -> None:
    task = LineTask()
    assert Gate.of_task(GateConfig(), task) is None
    gate = Gate.of_task(GateConfig(metric="loss", better="lower"), task)
    assert gate is not None
    assert gate.judge(ModulePredictor(task.model())).score == task.evaluate(task.model())["loss"]
    gate = Gate.of_task(GateConfig(metric="accuracy"), task)
    assert gate is not None
    with pytest.raises(ConfigError, match="evaluate gives no 'accuracy'; it gives: loss"):
        gate.judge(ModulePredictor(task.model()))


def test_before_the_first_version_nothing_is_answered() -> None:
    with pytest.raises(Refused) as refused:
        Served()(torch.zeros(1, 2))
    assert refused.value.reason is Reason.NO_VERSION


def test_the_one_in_service_stays_where_the_next_is_worse() -> None:
    served = Served(scores(0.9, 0.5, 0.91))
    assert [served.offer(constant(v), v) for v in (1, 2, 3)] == [True, False, True]
    assert (served.version, served.refused_version) == (3, 2)
    outputs, versions = served.predict(torch.zeros(2, 1))
    assert (outputs.tolist(), versions) == ([[3.0, 3.0]] * 2, (3, 3))


def test_an_answer_ends_with_the_model_it_began_with() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow(inputs: Tensor) -> Tensor:
        begun.set()
        assert go.wait(30)
        return torch.zeros(len(inputs), 2)

    served, answers = Served(), []
    served.offer(slow, 1)
    asking = threading.Thread(target=lambda: answers.append(served.predict(torch.zeros(1, 1))))
    asking.start()
    assert begun.wait(30)
    served.offer(constant(7.0), 2)
    assert served.predict(torch.zeros(1, 1)).versions == (2,)
    go.set()
    asking.join()
    assert (answers[0].versions, answers[0].outputs.tolist()) == ((1,), [[0.0, 0.0]])


def test_a_module_answers_in_evaluation_mode_without_gradients() -> None:
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(2, 2)).train()
    outputs = ModulePredictor(model)(torch.ones(1, 2))
    assert not outputs.requires_grad
    torch.testing.assert_close(outputs, model[1](torch.ones(1, 2)).detach())


@pytest.mark.parametrize(("layer", "shape"), [(nn.Flatten(0), r"\(6,\)"), (nn.LSTM(3, 3), "tuple")])
def test_a_row_for_each_sample_is_due(layer: nn.Module, shape: str) -> None:
    with pytest.raises(ConfigError, match=rf"answers 2 samples with {shape}: one row for each"):
        ModulePredictor(layer)(torch.zeros(2, 3))
