"""The user's own part of a run: a ``Task`` says what to train, on which data and how; sites and edge nodes share it.

A task is an ordinary class; it inherits from nothing and registers nowhere. The fleet file names it and passes it its arguments::

    task: {target: "mine.mnist:Task", args: {lr: 0.05}}

Two methods more are used where they are there: ``scheduler(optimizer)`` (cloud/train.py), and ``example()``, at least two inputs
of the model as one tensor f32[n, ...], which ``fleetddp export`` needs.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from fleetddp.common.config import TaskConfig
from fleetddp.common.errors import ConfigError


class Task(Protocol):
    """What a member trains. It is made once in each process; its methods may be called in any order, several times.

    For tracks of soft labels it may also have: ``proxy()``, the items of the proxy set (a tensor or a ``ProxySet``), where it is
    generated; ``logits(model, items)``, f[b, C], where that is not the model's forward; ``known_classes(proxy)``, i64[n], the
    classes that an edge node knows of these items, else -1; ``label_source(sample)``, the class of a hard sample that the node
    kept, or None while nobody knows it. For sites: ``scheduler(optimizer)``.
    """

    def model(self) -> nn.Module:
        """A new model, the same architecture everywhere (its layout is the fleet's); on the CPU."""
        ...

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        """Part ``index`` of ``count`` of the training data that the member called ``member`` holds.

        A site's rank asks for part (rank, world size) of its site, an edge node for part (0, 1) of its own: all of it. The
        parts are disjoint and, together, the member's data. ``part(dataset, index, count)`` cuts a map-style dataset so.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The scalar loss of one batch, a mean over its samples; runs ``model``'s forward. ``batch`` is on the model's device."""
        ...

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """A new inner optimizer over these parameters."""
        ...

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        """Metrics on data held out from training, by name; empty when this machine has none. May leave the model in any mode."""
        ...


METHODS = ("model", "data", "loss", "optimizer", "evaluate")


def load(config: TaskConfig) -> Task:
    """Import the class that ``config.target`` names and construct it with ``config.args``.

    The working directory is searched last, so that ``mine.py`` beside the fleet file is found and shadows nothing. Raises
    ``ConfigError``: module or class missing, arguments that the class does not take, a method that a task must have missing.
    """
    module_name, _, class_name = config.target.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"task.target: cannot import {module_name!r} ({error}); searched sys.path and {os.getcwd()}") from error
    factory = getattr(module, class_name, None)
    if not callable(factory):
        raise ConfigError(f"task.target: module {module_name!r} ({module.__file__}) has no class {class_name!r}")
    try:
        task = factory(**config.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task.args: {config.target}({_arguments(config.args)}) failed: {error}") from error
    missing = [name for name in METHODS if not callable(getattr(task, name, None))]
    if missing:
        raise ConfigError(f"task.target: {config.target} lacks {', '.join(missing)}: see fleetddp.common.task.Task")
    return cast(Task, task)


def part(dataset: Dataset[Any], index: int, count: int) -> Dataset[Any]:
    """Every ``count``-th sample of a map-style dataset from ``index`` on: disjoint parts, sizes differing by one at most."""
    if not 0 <= index < count:
        raise ValueError(f"there is no part {index} of {count}")
    return dataset if count == 1 else Subset(dataset, range(index, len(dataset), count))  # type: ignore[arg-type]


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of the first tensor in it (1 for a tensor without dimensions).

    Raises ``ConfigError`` when there is no tensor in it: samples weigh an update, so they are not guessed.
    """
    tensor = _first_tensor(batch)
    if tensor is None:
        raise ConfigError(f"cannot count the samples of a batch of type {type(batch).__name__}: there is no tensor in it")
    return tensor.shape[0] if tensor.dim() else 1


def to_device(batch: Any, device: torch.device) -> Any:
    """The same batch with every tensor in its lists, tuples and mappings on ``device``."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _first_tensor(batch: Any) -> Tensor | None:
    if isinstance(batch, Tensor):
        return batch
    values: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        values = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        values = batch
    return next((found for found in map(_first_tensor, values) if found is not None), None)


def _arguments(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in args.items())
