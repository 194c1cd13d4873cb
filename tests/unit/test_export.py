"""Exports: what is written is the module, read back by others; what is not is not left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import Tied, batch_norm, odd
from helpers.tasks import LineTask
from safetensors.torch import load_file
from torch import Tensor, nn

from fleetddp.cloud import export as exporting
from fleetddp.cloud.export import example_of, export
from fleetddp.common.errors import ConfigError

EXAMPLE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    """With statistics that matter, and a layer that is another one in training."""
    trained = batch_norm()
    for _ in range(3):
        trained(EXAMPLE)
    return nn.Sequential(trained, nn.Dropout(0.5)).train()


def test_safetensors_holds_the_whole_state(tmp_path: Path) -> None:
    module = model()
    done = export(module, EXAMPLE, "safetensors", tmp_path / "m.safetensors")
    assert (done.difference, done.bytes) == (0.0, (tmp_path / "m.safetensors").stat().st_size)
    found = load_file(done.path)
    assert set(found) == set(module.state_dict())
    assert all(torch.equal(found[name], tensor) for name, tensor in module.state_dict().items())
    assert module.training  # the caller's model is as it was


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    done = export(Tied(), torch.zeros(2, 3, dtype=torch.long), "safetensors", tmp_path / "m.safetensors")
    assert done.difference == 0.0
    assert sum(tensor.numel() for tensor in load_file(done.path).values()) == 54


def test_a_program_takes_any_number_of_samples(tmp_path: Path) -> None:
    module = model()
    done = export(module, EXAMPLE, "pt2", tmp_path / "m.pt2")
    found = torch.export.load(done.path).module()
    for n in (1, 7):
        inputs = torch.randn(n, 6)
        torch.testing.assert_close(found(inputs), module.eval()(inputs), atol=1e-5, rtol=0)
    assert done.difference < 1e-5


def test_onnx_runs_in_another_runtime(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    module = model()
    done = export(module, EXAMPLE, "onnx", tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(done.path), providers=["CPUExecutionProvider"])
    for n in (1, 7):
        inputs = torch.randn(n, 6)
        (outputs,) = session.run(["outputs"], {"inputs": inputs.numpy()})
        torch.testing.assert_close(torch.from_numpy(outputs), module.eval()(inputs).detach(), atol=1e-5, rtol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_a_file_that_answers_otherwise_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: nn.Module, example: Tensor, path: Path) -> Any:
        path.write_bytes(b"wrong")
        return lambda inputs: module(inputs) + 0.01

    monkeypatch.setitem(exporting._WRITERS, "wrong", wrong)  # type: ignore[arg-type]
    (tmp_path / "m").write_bytes(b"what was there")
    with pytest.raises(ConfigError, match=r"differs from the module by 0\.01"):
        export(odd(), torch.randn(2, 7), "wrong", tmp_path / "m")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("m", b"what was there")]


def test_a_model_that_cannot_be_traced_is_named(tmp_path: Path) -> None:
    class Moody(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs if inputs.sum() > 0 else -inputs

    with pytest.raises(ConfigError, match=r"torch\.export cannot take this model"):
        export(Moody(), EXAMPLE, "pt2", tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="no format 'pth'; there are: safetensors, pt2, onnx"):
        export(Moody(), EXAMPLE, "pth", tmp_path / "m.pth")


def test_a_task_brings_the_example() -> None:
    task: Any = LineTask()
    with pytest.raises(ConfigError, match=r"needs a method example\(\)"):
        example_of(task)
    task.example = lambda: task.x[:1]
    with pytest.raises(ConfigError, match="at least two samples"):
        example_of(task)
    task.example = lambda: task.x
    assert example_of(task) is task.x
