"""The gate before a model in service, and what a swap does to those who ask."""

from __future__ import annotations

import math
import threading
from pathlib import Path

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


def line(weight: float) -> nn.Linear:
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.fill_(weight)
        model.bias.zero_()
    return model


def test_after_a_restart_the_best_so_far_stands_and_what_was_in_service_answers(tmp_path: Path) -> None:
    """Version 2 was best, version 3 a little worse but good enough, version 4 was kept out: it is kept out again."""
    kept = tmp_path / "state" / "in-service.safetensors"
    served = Served(scores(0.9, 0.95, 0.945, 0.9), kept=kept)
    assert not served.resume(line(0.0))
    assert [served.offer(ModulePredictor(line(v)), v) for v in (1, 2, 3, 4)] == [True, True, True, False]
    again = Served(scores(0.9, 0.94), kept=kept)
    assert again.resume(line(0.0))
    assert again.predict(torch.ones(1, 1)).outputs.tolist() == [[3.0, 3.0]]
    assert not again.offer(ModulePredictor(line(4.0)), 4)
    assert (again.version, again.refused_version) == (3, 4)
    assert not again.resume(line(0.0))  # there is a model
    assert again.offer(ModulePredictor(line(5.0)), 5)
    third = Served(scores(0.935), kept=kept)
    assert third.resume(line(0.0))
    assert third.version == 5
    assert not third.offer(ModulePredictor(line(6.0)), 6)  # 0.95 is the best of all processes
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_a_kept_model_of_another_architecture_or_damaged_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = tmp_path / "in-service.safetensors"
    Served(kept=kept).offer(ModulePredictor(line(1.0)), 1)
    other = Served(scores(0.1), kept=kept)
    assert not other.resume(nn.Linear(3, 3))
    assert other.offer(ModulePredictor(nn.Linear(3, 3)), 1)
    kept.write_bytes(b"damaged")
    assert not Served(kept=kept).resume(line(1.0))
    assert caplog.text.count("cannot be taken up again") == 2


def test_where_nothing_can_be_written_it_answers_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    served = Served(kept=tmp_path / "file" / "in-service.safetensors")
    assert served.offer(ModulePredictor(line(2.0)), 1)
    assert served(torch.ones(1, 1)).tolist() == [[2.0, 2.0]]
    assert "cannot keep the model in service" in caplog.text
    with pytest.raises(ConfigError, match="only the model of a ModulePredictor can be kept"):
        Served(kept=tmp_path / "x").offer(constant(1.0), 1)
