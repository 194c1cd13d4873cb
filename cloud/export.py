"""``fleetddp export``: a published version as a file that devices can run without this package, checked against the module.

    safetensors   the module's whole state by name (frozen and local tensors too), for any safetensors reader
    pt2           a torch.export program, for torch.export.load and for on-device runtimes of torch
    onnx          for ONNX Runtime and what reads ONNX; needs the extra ``export`` (onnx, onnxscript, onnxruntime)

Programs take f32[n, ...] of any n >= 1, as input ``inputs``, and give ``outputs``. What was written is read back, run on the
example, all of it and its first sample alone, and compared with the module; a file that answers otherwise is not left behind.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fleetddp.common.clock import SystemClock
from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.task import Task, load
from fleetddp.common.transport import Parent
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.transport.uplink import Uplink
from fleetddp.common.transport.weights import fetch
from fleetddp.common.update import NO_VERSION

Run = Callable[[Tensor], Tensor]

TOLERANCE = 1e-4  # of an output, times the largest one where that is more than 1: other kernels add up in another order


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    bytes: int
    difference: float  # the largest, of an output from the module's
    version: int = NO_VERSION  # of the fleet's model


def export_version(config: FleetConfig, format: str, out: Path, *, version: int, node: str, from_journal: bool) -> Exported:
    """Write a version (-1: the newest) of the fleet's model. Asks the coordinator as ``node``, or opens its journal here.

    Raises ``ConfigError``: no task, a task without ``example``, a model that cannot be exported.
    """
    if config.task is None:
        raise ConfigError("task: an export needs the model; give task.target in the fleet file")
    task = load(config.task)
    model = task.model()
    with _parent(config, node, from_journal=from_journal) as parent:
        layout = parent.layout()
        number = int(parent.status()["version"]) if version == NO_VERSION else version
        if number == NO_VERSION:
            raise Refused(Reason.NO_VERSION, "no version is published yet")
        layout.write_(model, fetch(parent, number, layout))
    return replace(export(model, example_of(task), format, out), version=number)


def example_of(task: Task) -> Tensor:
    """Two samples or more, f32[n, ...]: what the task's method ``example()`` gives."""
    make = getattr(task, "example", None)
    if make is None:
        raise ConfigError("task: an export needs a method example() that returns inputs of the model, f32[n, ...], at least two")
    example = make()
    if not isinstance(example, Tensor) or example.dim() < 1 or len(example) < 2:
        raise ConfigError("task.example() must return a tensor of at least two samples, f32[n, ...]")
    return example


def export(model: nn.Module, example: Tensor, format: str, out: Path) -> Exported:
    """Write ``model`` in a format and check it on ``example``, f32[n >= 2, ...].

    Raises ``ConfigError`` where torch cannot export it, something is not installed, or the file answers otherwise than the model.
    """
    if format not in _WRITERS:
        raise ConfigError(f"there is no format {format!r}; there are: {', '.join(_WRITERS)}")
    model = copy.deepcopy(model).cpu().eval()
    draft = out.with_name(f"{out.name}.partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        run = _WRITERS[format](model, example, draft)
        difference = max(_difference(model, run, inputs) for inputs in (example, example[:1]))
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    return Exported(out, out.stat().st_size, difference)


def _write_safetensors(model: nn.Module, example: Tensor, path: Path) -> Run:
    from safetensors.torch import load_model, save_model

    save_model(model, str(path), metadata={"format": "pt"})  # knows tied tensors, which save_file refuses
    found = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*found.parameters(), *found.buffers()):
            tensor.zero_()
    load_model(found, str(path))
    return found


def _write_pt2(model: nn.Module, example: Tensor, path: Path) -> Run:
    with path.open("wb") as file:
        torch.export.save(_program(model, example), file)
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _write_onnx(model: nn.Module, example: Tensor, path: Path) -> Run:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"export to onnx needs {', '.join(missing)}: pip install 'fleetddp[export]'")
    import onnxruntime

    program = _program(model, example)
    with _exporting("onnx"), _quiet("torch.onnx"):
        torch.onnx.export(
            program,
            (example,),
            str(path),
            input_names=["inputs"],
            output_names=["outputs"],
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    return lambda inputs: torch.from_numpy(session.run(["outputs"], {"inputs": inputs.numpy()})[0])


_WRITERS: Mapping[str, Callable[[nn.Module, Tensor, Path], Run]] = {
    "safetensors": _write_safetensors,
    "pt2": _write_pt2,
    "onnx": _write_onnx,
}


def _program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The model traced with any number of samples."""
    with _exporting("torch.export"):
        return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("samples")},))


@contextmanager
def _exporting(what: str) -> Iterator[None]:
    """Turn what torch's exporters raise (many things) into one kind; their warnings are about their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise ConfigError(f"{what} cannot take this model: {type(error).__name__}: {first}") from error


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """It logs what is not installed that this does not need."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def _difference(model: nn.Module, run: Run, inputs: Tensor) -> float:
    """The largest, on these inputs; ``ConfigError`` where it is too large."""
    due, found = cast(Any, model)(inputs), run(inputs)
    if found.shape != due.shape:
        raise ConfigError(
            f"the exported model answers {tuple(inputs.shape)} with {tuple(found.shape)}; {tuple(due.shape)} is due"
        )
    difference = float((found - due).abs().max())
    allowed = TOLERANCE * max(1.0, float(due.abs().max()))
    if not difference <= allowed:
        raise ConfigError(
            f"the exported model differs from the module by {difference:g}; at most {allowed:g} may be: not written"
        )
    return difference


@contextmanager
def _parent(config: FleetConfig, node: str, *, from_journal: bool) -> Iterator[Parent]:
    if not from_journal:
        uplink = Uplink(config.coordinator.address, config.security, node=node, run=config.run, track=config.serve.track)
        try:
            yield uplink
        finally:
            uplink.close()
        return
    if not config.coordinator.journal.exists():
        raise ConfigError(f"there is no journal in {config.coordinator.journal}")
    fleet = MemoryFleet(config, SystemClock())
    try:
        yield fleet.parent()
    finally:
        fleet.stop()
