"""Loading a Task: what is found, and what is said when it is not."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from fleetddp.common.config import TaskConfig
from fleetddp.common.errors import ConfigError
from fleetddp.common.task import load, part, samples_in, to_device

WHOLE = """
import torch
class Mine:
    def __init__(self, width=3):
        if width < 1: raise ValueError(f"width must be positive, got {width}")
        self.width = width
    def model(self): return torch.nn.Linear(self.width, 1)
    def data(self, member, index, count): return None
    def loss(self, model, batch): return model(batch).mean()
    def optimizer(self, parameters): return torch.optim.SGD(parameters, lr=0.1)
    def evaluate(self, model): return {}
class Half:
    def model(self): return None
    data = 3
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "task_of_a_test.py").write_text(WHOLE)
    (tmp_path / "task_that_breaks.py").write_text("import a_module_that_is_not_there")
    yield tmp_path
    sys.modules.pop("task_of_a_test", None)


def test_a_task_in_the_working_directory_is_found_and_gets_its_arguments(beside: Path) -> None:
    task = load(TaskConfig(target="task_of_a_test:Mine", args={"width": 5}))
    assert task.model().weight.shape == (1, 5)
    assert sys.path[-1] == str(beside)  # last: it shadows nothing


@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        ("no_such_module:Mine", {}, "cannot import 'no_such_module'"),
        ("task_that_breaks:Mine", {}, "No module named 'a_module_that_is_not_there'"),
        ("task_of_a_test:Yours", {}, "has no class 'Yours'"),
        ("task_of_a_test:Mine", {"depth": 2}, r"Mine\(depth=2\) failed.*depth"),
        ("task_of_a_test:Mine", {"width": 0}, "width must be positive, got 0"),
        ("task_of_a_test:Half", {}, "lacks data, loss, optimizer, evaluate"),
    ],
)
def test_what_is_wrong_is_said(beside: Path, target: str, args: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(TaskConfig(target=target, args=args))


def test_parts_are_disjoint_and_whole() -> None:
    whole = TensorDataset(torch.arange(10))
    parts = [[int(sample[0]) for sample in part(whole, index, 3)] for index in range(3)]
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert part(whole, 0, 1) is whole
    with pytest.raises(ValueError, match="no part 3 of 3"):
        part(whole, 3, 3)


def test_samples_are_counted_in_any_nesting() -> None:
    assert samples_in((torch.zeros(7, 2), torch.zeros(9))) == 7
    assert samples_in({"name": "x", "pair": ["y", torch.zeros(4)]}) == 4
    assert samples_in(torch.tensor(1.0)) == 1
    with pytest.raises(ConfigError, match="type list"):
        samples_in(["a", 3])


def test_a_batch_keeps_its_form_on_another_device() -> None:
    Pair = namedtuple("Pair", "x y")
    moved = to_device({"a": [torch.zeros(2), "text"], "b": Pair(torch.zeros(1), 3)}, torch.device("meta"))
    assert moved["a"][0].device.type == "meta"
    assert moved["a"][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert moved["b"].x.device.type == "meta"
    assert moved["b"].y == 3
