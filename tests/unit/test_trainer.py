"""What an edge computes, against the same arithmetic by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.tasks import LineTask
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fleetddp.common.config import EdgeConfig
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.payload import tensor_over
from fleetddp.common.update import Kind
from fleetddp.edge.trainer import DeltaTrainer, GradientTrainer, Trainer, Work


def going() -> bool:
    return True


def trained(trainer: Trainer) -> Work:
    work = trainer.train(going)
    assert work is not None
    return work


def decoded(trainer: Trainer, payload: Tensor) -> Tensor:
    values = torch.zeros(trainer.layout.elements)
    for start, stop in trainer.geometry.required():
        first, last = trainer.geometry.byte_range((start, stop))
        values[start:stop] = trainer.geometry.decode(tensor_over(payload.numpy().tobytes()[first:last]), (start, stop))
    return values


def test_a_delta_is_where_it_began_minus_where_the_steps_led() -> None:
    task = LineTask()
    trainer = DeltaTrainer(task, "pi", EdgeConfig(steps=3, batch_size=8), seed=0)  # whole batches: no order to follow
    start = torch.tensor([1.0, 1.0])
    trainer.adopt(start)
    work = trained(trainer)
    w = start.reshape(2, 1).clone()
    losses = []
    for _ in range(3):  # gradient of the mean of (x w - y)^2, by hand
        error = task.x @ w - task.y
        losses.append(float((error**2).mean()))
        w -= 0.1 * 2 * task.x.T @ error / 8
    payload, residual = trainer.encode(start, None)
    torch.testing.assert_close(decoded(trainer, payload), start - w.flatten(), atol=1e-6, rtol=0)
    torch.testing.assert_close(trainer.weights(), w.flatten(), atol=1e-6, rtol=0)
    assert residual is None
    assert (work.samples, work.steps) == (24, 3)
    assert work.metrics["train_loss"] == pytest.approx(sum(losses) / 3)


@pytest.mark.parametrize(("pinned", "made"), [(None, 5), (2, 2)])
def test_steps_that_the_parent_wants_are_made_unless_the_fleet_file_fixes_them(pinned: int | None, made: int) -> None:
    trainer = DeltaTrainer(LineTask(points=7), "pi", EdgeConfig(steps=pinned, batch_size=3), seed=0)  # three batches an epoch
    work = trainer.train(going, 5)
    assert work is not None
    assert work.steps == made


def test_without_steps_a_unit_is_whole_epochs() -> None:
    trainer = DeltaTrainer(LineTask(points=7), "pi", EdgeConfig(epochs=2, batch_size=3), seed=0)
    work = trained(trainer)
    assert (work.samples, work.steps) == (14, 6)
    assert trained(trainer).samples == 14


def test_steps_run_on_through_epochs_and_see_every_sample() -> None:
    seen: list[float] = []

    class Spy(LineTask):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            seen.extend(batch[0][:, 0].tolist())
            return super().loss(model, batch)

    task = Spy(points=8)
    trainer = DeltaTrainer(task, "pi", EdgeConfig(steps=2, batch_size=2), seed=0)
    for _ in range(4):
        trained(trainer)
    first = sorted(task.x[:, 0].tolist())
    assert sorted(seen[:8]) == first
    assert sorted(seen[8:]) == first
    assert seen[:8] != seen[8:]  # shuffled anew


def test_the_order_follows_from_seed_and_name() -> None:
    def end(name: str, seed: int) -> list[float]:
        trainer = DeltaTrainer(LineTask(), name, EdgeConfig(steps=3, batch_size=2), seed=seed)
        trained(trainer)
        return trainer.weights().tolist()

    assert end("pi", 1) == end("pi", 1)
    assert end("pi", 1) != end("pi", 2)
    assert end("pi", 1) != end("po", 1)


def test_the_optimizer_forgets_at_a_new_version() -> None:
    class Momentum(LineTask):
        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    trainer = DeltaTrainer(Momentum(), "pi", EdgeConfig(steps=2, batch_size=8), seed=0)
    ends = []
    for _ in range(2):
        trainer.adopt(torch.ones(2))
        trained(trainer)
        ends.append(trainer.weights())
    assert torch.equal(*ends)


def test_a_gradient_is_the_mean_over_samples_at_the_adopted_weights() -> None:
    task = LineTask(points=7)
    trainer = GradientTrainer(task, "pi", EdgeConfig(update="gradient", steps=3, batch_size=3), seed=0)  # 3 + 3 + 1 samples
    start = torch.tensor([1.0, -2.0])
    trainer.adopt(start)
    work = trained(trainer)
    error = task.x @ start.reshape(2, 1) - task.y
    expected = 2 * task.x.T @ error / 7
    payload, _ = trainer.encode(start, None)
    torch.testing.assert_close(decoded(trainer, payload), expected.flatten(), atol=1e-6, rtol=0)
    assert torch.equal(trainer.weights(), start)
    assert (trainer.kind, work.samples, work.steps) == (Kind.GRADIENT, 7, 1)


def test_buffers_travel_as_values_with_a_delta_and_not_with_a_gradient() -> None:
    task = LineTask(norm=True)
    trainer = DeltaTrainer(task, "pi", EdgeConfig(steps=1, batch_size=8), seed=0)
    start = trainer.weights()
    trained(trainer)
    values = decoded(trainer, trainer.encode(start, None).payload)
    assert trainer.layout.buffer_elements == 4
    torch.testing.assert_close(values[-4:-2], 0.1 * task.x.mean(0))  # running mean after one step of momentum 0.1
    assert torch.equal(values[-4:], trainer.weights()[-4:])
    gradient = GradientTrainer(task, "pi", EdgeConfig(update="gradient", batch_size=8), seed=0)
    trained(gradient)
    assert gradient.encode(start, None).payload.numel() == 4 * gradient.layout.parameters


def test_the_residual_is_carried() -> None:
    trainer = DeltaTrainer(LineTask(), "pi", EdgeConfig(steps=1, batch_size=8, codec="topk:0.5"), seed=0)
    start = trainer.weights()
    trained(trainer)
    meant = start - trainer.weights()
    said, owed = trainer.encode(start, torch.tensor([3.0, 4.0]))
    assert owed is not None
    torch.testing.assert_close(decoded(trainer, said) + owed, meant + torch.tensor([3.0, 4.0]))
    assert torch.count_nonzero(owed) == 1


def test_a_diverged_update_is_refused_by_its_own_node() -> None:
    trainer = DeltaTrainer(LineTask(lr=1e30), "pi", EdgeConfig(steps=4, batch_size=8), seed=0)
    start = trainer.weights()
    work = trained(trainer)
    with pytest.raises(Refused) as refused:
        trainer.encode(start, None)
    assert refused.value.reason is Reason.NOT_FINITE
    assert work.metrics == {}  # not a number: not told


def test_training_stops_within_a_batch() -> None:
    trainer = DeltaTrainer(LineTask(), "pi", EdgeConfig(steps=5, batch_size=2), seed=0)
    left = iter([True, False])
    assert trainer.train(lambda: next(left)) is None  # a third question would raise


def test_work_adds_up() -> None:
    both = Work(10, 2, 1.0, 4.0) + Work(30, 1, 0.5, 8.0)
    assert both == Work(40, 3, 1.5, 7.0)
    assert Work() + both == both + Work() == both
    assert math.isnan((Work(10, 1, 1.0, math.nan) + both).loss)


class NoData(LineTask):
    def __init__(self, dataset: Dataset[Any]) -> None:
        super().__init__()
        self._dataset = dataset

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        return self._dataset


class Empty(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_a_member_without_data_is_told_so() -> None:
    with pytest.raises(ConfigError, match="no data for 'pi'"):
        DeltaTrainer(NoData(TensorDataset(torch.zeros(0, 2))), "pi", EdgeConfig(), seed=0)
    trainer = DeltaTrainer(NoData(Empty()), "pi", EdgeConfig(), seed=0)
    with pytest.raises(ConfigError, match="data ended"):
        trainer.train(going)


def test_shares_of_the_data() -> None:
    trainer = DeltaTrainer(LineTask(points=7), "pi", EdgeConfig(), seed=0, index=1, count=2)
    assert trained(trainer).samples == 3
