"""What is kept of hard samples, for how long, and with whose consent."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fleetddp.common.clock import VirtualClock
from fleetddp.common.errors import ConfigError
from fleetddp.common.inference_config import HardSamplesConfig
from fleetddp.common.predictor import Prediction
from fleetddp.edge.cascade import Cascade
from fleetddp.edge.hardness import margin
from fleetddp.edge.reservoir import Reservoir, digest_of, open_reservoir

HOUR = 3600.0


def config(folder: Path, *, keep: int = 4, **options: float) -> HardSamplesConfig:
    return HardSamplesConfig(consent=True, retention_hours=2.0, keep=keep, state=folder, **options)  # type: ignore[arg-type]


def samples(*values: float) -> Tensor:
    return torch.tensor(values).unsqueeze(1)


def add(reservoir: Reservoir, *values: float) -> int:
    return reservoir.add(samples(*values), torch.zeros(len(values)))


def kept(reservoir: Reservoir) -> set[float]:
    return {float(item.inputs) for item in reservoir.snapshot().items}


def test_nothing_is_kept_unless_somebody_consents(tmp_path: Path) -> None:
    off = HardSamplesConfig(state=tmp_path)
    assert open_reservoir(off, "pi") is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="consent is false"):
        Reservoir(tmp_path / "pi", off)


def test_taking_consent_back_erases(tmp_path: Path) -> None:
    reservoir = open_reservoir(config(tmp_path), "pi")
    assert reservoir is not None
    add(reservoir, 1.0)
    reservoir.close()
    assert open_reservoir(HardSamplesConfig(state=tmp_path), "pi") is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_removed_is_overwritten(tmp_path: Path) -> None:
    mark = torch.full((64,), 1234.5678)

    def is_there() -> bool:
        return any(mark.numpy().tobytes() in path.read_bytes() for path in tmp_path.iterdir())

    clock = VirtualClock()
    with Reservoir(tmp_path, config(tmp_path), clock=clock) as reservoir:
        reservoir.add(mark.unsqueeze(0), torch.zeros(1))
        assert is_there()
        reservoir.remove([digest_of(mark)])
        assert not is_there()
        reservoir.add(mark.unsqueeze(0), torch.zeros(1))
    assert is_there()
    clock.advance(3 * HOUR)
    with Reservoir(tmp_path, config(tmp_path), clock=clock):
        assert not is_there()


def test_items_are_found_again_with_all_that_is_known(tmp_path: Path) -> None:
    with Reservoir(tmp_path, config(tmp_path), clock=VirtualClock(5.0)) as reservoir:
        reservoir.add(torch.tensor([[[1.0, 2.0]]]), torch.tensor([0.75]), torch.tensor([[0.5, -0.5, 0.0]]))
        assert reservoir.label(digest_of(torch.tensor([[1.0, 2.0]])), 2)
    with Reservoir(tmp_path, config(tmp_path), clock=VirtualClock(6.0)) as reservoir:
        (item,) = reservoir.snapshot().items
    assert torch.equal(item.inputs, torch.tensor([[1.0, 2.0]]))
    assert item.teacher is not None
    assert item.teacher.tolist() == [0.5, -0.5, 0.0]
    assert (item.at, item.hardness, item.label) == (5.0, 0.75, 2)


def test_a_set_is_named_by_its_content_not_by_its_labels(tmp_path: Path) -> None:
    with Reservoir(tmp_path / "a", config(tmp_path)) as a, Reservoir(tmp_path / "b", config(tmp_path)) as b:
        add(a, 1.0, 2.0, 3.0)
        add(b, 3.0, 1.0)
        assert a.snapshot().digest != b.snapshot().digest
        add(b, 2.0)
        a.label(digest_of(torch.tensor([2.0])), 1)
        one, other = a.snapshot(), b.snapshot()
    assert one.digest == other.digest
    assert torch.equal(one.inputs, other.inputs)
    assert sorted(one.labels.tolist()) == [-1, -1, 1]
    assert (len(one), one[1].digest) == (3, sorted(item.digest for item in one.items)[1])


def test_no_more_than_are_to_be_kept_and_a_repeat_is_none(tmp_path: Path) -> None:
    with Reservoir(tmp_path, config(tmp_path, keep=3)) as reservoir:
        assert add(reservoir, 1.0, 1.0, 2.0) == 2
        assert add(reservoir, 1.0, 3.0) == 1
        add(reservoir, *range(10, 40))
        assert len(reservoir) == 3
    with Reservoir(tmp_path, config(tmp_path, keep=2)) as reservoir:  # the fleet file allows fewer now
        assert len(reservoir) == 2


def test_a_teacher_that_comes_later_is_noted(tmp_path: Path) -> None:
    with Reservoir(tmp_path, config(tmp_path)) as reservoir:
        add(reservoir, 1.0)
        reservoir.add(samples(1.0), torch.zeros(1), torch.tensor([[1.0, 2.0]]))
        reservoir.add(samples(1.0), torch.zeros(1), torch.tensor([[3.0, 4.0]]))
        teacher = reservoir.snapshot()[0].teacher
        assert teacher is not None
        assert teacher.tolist() == [1.0, 2.0]


def test_nothing_is_kept_longer_than_agreed(tmp_path: Path) -> None:
    clock = VirtualClock()
    with Reservoir(tmp_path, config(tmp_path), clock=clock) as reservoir:
        add(reservoir, 1.0)
        clock.advance(1.5 * HOUR)
        add(reservoir, 2.0)
        clock.advance(0.5 * HOUR)
        assert kept(reservoir) == {1.0, 2.0}
        clock.advance(1.0)
        assert kept(reservoir) == {2.0}
        clock.advance(2 * HOUR)
        assert len(reservoir) == 0
        add(reservoir, 1.0)
        assert kept(reservoir) == {1.0}


def test_the_share_that_is_labelled_late(tmp_path: Path) -> None:
    clock = VirtualClock()
    asked: list[float] = []

    def source(inputs: Tensor) -> int | None:
        asked.append(float(inputs))
        return None if float(inputs) == asked[0] else int(inputs) % 10

    options = config(tmp_path, keep=1000, label_share=0.2, label_after_s=60.0)
    with Reservoir(tmp_path, options, clock=clock) as reservoir:
        add(reservoir, *range(500))
        clock.advance(59.0)
        assert reservoir.ask(source) == 0
        clock.advance(1.0)
        assert 60 < reservoir.ask(source) < 140  # a hundred expected, with a deviation of nine
        first = list(asked)
        assert len(set(first)) == len(first)
        assert reservoir.ask(source) == 0
        assert asked == [*first, first[0]]  # the one that was not known
        labels = {float(item.inputs): item.label for item in reservoir.snapshot().items if item.label is not None}
    assert labels == {value: int(value) % 10 for value in first[1:]}


def test_hard_samples_of_a_cascade_are_kept_with_the_clouds_answers(tmp_path: Path) -> None:
    class Cloud:
        def predict(self, inputs: Tensor, timeout_s: float) -> Prediction:
            return Prediction(torch.cat([inputs, -inputs], 1), (1,) * len(inputs))

    with Reservoir(tmp_path, config(tmp_path)) as reservoir:
        cascade = Cascade(
            lambda inputs: torch.cat([inputs, -inputs], 1), Cloud(), hard=margin, threshold=0.5, on_hard=reservoir.add
        )
        cascade(samples(9.0, 0.25, -0.125))
        items = {float(item.inputs): item for item in reservoir.snapshot().items}
    assert set(items) == {0.25, -0.125}
    assert [item.teacher.tolist() for item in items.values() if item.teacher is not None] == [[x, -x] for x in items]
    assert items[0.25].hardness == pytest.approx(1 - math.tanh(0.25))


def test_what_does_not_fit(tmp_path: Path) -> None:
    with Reservoir(tmp_path, config(tmp_path)) as reservoir:
        assert add(reservoir, 1.0, math.nan, math.inf) == 1
        with pytest.raises(ConfigError, match=r"is of shape \[1\], not \[2\]"):
            reservoir.add(torch.zeros(1, 2), torch.zeros(1))
        with pytest.raises(ConfigError, match="classes are counted from 0"):
            reservoir.label("x", -1)
        assert not reservoir.label("x", 1)
        assert kept(reservoir) == {1.0}
        with Reservoir(tmp_path, config(tmp_path)) as other:  # one process answers, another trains
            assert add(other, 2.0) == 1
            assert kept(reservoir) == {1.0, 2.0}
    with pytest.raises(ConfigError, match="is of seed 0, not 1"):
        Reservoir(tmp_path, config(tmp_path), seed=1)
