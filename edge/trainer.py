"""What an edge node computes: a delta after local steps, or the gradient of a local batch, ready to be encoded.

A trainer knows nothing of networks and files. The node puts weights in with ``adopt``, has it ``train`` a unit of work, and takes
the result out with ``encode``, against the weights at which the update began.
"""

from __future__ import annotations

import math
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fleetddp.common import codecs
from fleetddp.common.config import EdgeConfig
from fleetddp.common.errors import ConfigError
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.task import Task, samples_in, to_device
from fleetddp.common.update import Kind


class Encoded(NamedTuple):
    """The bytes of an update and what the codec could not say in them."""

    payload: Tensor  # uint8, on the CPU
    residual: Tensor | None  # float32[layout.parameters], on the CPU; None: nothing is owed


@dataclass(frozen=True, slots=True)
class Work:
    """What training since the last update came to."""

    samples: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    loss: float = math.nan  # mean over the samples

    def __add__(self, other: Work) -> Work:
        if not self.steps or not other.steps:
            return self if self.steps else other
        samples = self.samples + other.samples
        loss = (self.loss * self.samples + other.loss * other.samples) / samples
        return Work(samples, self.steps + other.steps, self.seconds + other.seconds, loss)

    @property
    def metrics(self) -> dict[str, float]:
        """What is told of it with the update."""
        return {"train_loss": self.loss} if math.isfinite(self.loss) else {}


class Trainer(ABC):
    """Local training of one task on one device. The optimizer is made anew for each adopted version: an update depends on
    the weights it began at and the data, not on what the node did before.

    Raises ``ConfigError`` for a task without data for this member, ``Refused(UNKNOWN_CODEC)`` for an unknown codec.
    """

    kind: ClassVar[Kind]

    def __init__(
        self,
        task: Task,
        member: str,
        config: EdgeConfig,
        *,
        seed: int,
        index: int = 0,
        count: int = 1,
        device: torch.device | str = "cpu",
        include: Sequence[str] = (),
    ) -> None:
        self._task = task
        self._config = config
        self._device = torch.device(device)
        self.model = task.model().to(self._device)
        self.layout = Layout.from_module(self.model, buffers=config.buffers, include=include)
        self._optimizer = self._new_optimizer()
        self._loader = _loader(task.data(member, index, count), member, config.batch_size, seed)
        self._batches = self._endless()

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """Where the elements of an update lie in its bytes."""

    @abstractmethod
    def train(self, going: Callable[[], bool], steps: int | None = None) -> Work | None:
        """One unit of work on the model as it is; None if ``going()`` was false after one of its batches. ``steps``: so many of
        them, unless the fleet file fixes their number."""

    @abstractmethod
    def _meant(self, start: Tensor) -> Tensor:
        """float32: what this update wants to say, given the weights at which it began."""

    def adopt(self, weights: Tensor) -> None:
        """Go on from these weights (float32[layout.elements]) with a new optimizer."""
        self.layout.write_(self.model, weights)
        self._optimizer = self._new_optimizer()

    def weights(self) -> Tensor:
        """float32[layout.elements], on the CPU: the weights and averaged buffers as they are."""
        return self.layout.read(self.model, device=torch.device("cpu"))

    def encode(self, start: Tensor, residual: Tensor | None) -> Encoded:
        """The update since ``start``, with what earlier ones left unsaid. ``Refused(NOT_FINITE)`` if training diverged."""
        meant = self._meant(start).cpu()
        parameters = self.layout.parameters
        codec = self.geometry.codec
        payload, left = codec.encode_with_feedback(meant[:parameters], residual)
        buffers = [self.geometry.encode(meant[a:b], (a, b)) for a, b in self.geometry.required() if a >= parameters]
        return Encoded(torch.cat([payload, *buffers]) if buffers else payload, left)

    def _step(self, batch: Any) -> tuple[Tensor, int]:
        """Forward and backward of one batch: its loss (detached) and its samples."""
        batch = to_device(batch, self._device)
        loss = self._task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), samples_in(batch)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return self._task.optimizer(p for p in self.model.parameters() if p.requires_grad)

    def _endless(self) -> Iterator[tuple[Any, bool]]:
        """Batches for ever, each with whether it is the last of an epoch."""
        while True:
            batches = iter(self._loader)
            batch = next(batches, None)
            if batch is None:
                raise ConfigError("the task's data ended: an IterableDataset must yield samples each time it is iterated")
            while batch is not None:
                following = next(batches, None)
                yield batch, following is None
                batch = following

    def _unit(self, wanted: int | None) -> Iterator[Any]:
        """The batches of one unit of work: ``steps`` of them, or as many as are wanted, or ``epochs`` whole epochs."""
        steps = self._config.steps or wanted
        if steps is not None:
            for _ in range(steps):
                yield next(self._batches)[0]
            return
        epochs = 0
        while epochs < self._config.epochs:
            batch, last = next(self._batches)
            yield batch
            epochs += last


class DeltaTrainer(Trainer):
    """Outer gradient: where the update began minus where ``steps`` optimizer steps (or ``epochs`` epochs) led to."""

    kind = Kind.DELTA

    @property
    def geometry(self) -> Geometry:
        """Parameters in the codec, buffers in float32."""
        return Geometry(self.layout, codecs.get(self._config.codec))

    def train(self, going: Callable[[], bool], steps: int | None = None) -> Work | None:
        """Local optimizer steps."""
        self.model.train()
        began, total, samples, made = time.monotonic(), torch.zeros((), device=self._device), 0, 0
        for batch in self._unit(steps):
            self._optimizer.zero_grad(set_to_none=True)
            loss, count = self._step(batch)
            self._optimizer.step()
            total, samples, made = total + loss * count, samples + count, made + 1
            if not going():
                return None
        return Work(samples, made, time.monotonic() - began, float(total) / samples)

    def _meant(self, start: Tensor) -> Tensor:
        return self.layout.outgoing(self.model, start)


class GradientTrainer(Trainer):
    """The mean gradient, over samples, of ``steps`` batches (one if not given) at the adopted weights; no step is taken."""

    kind = Kind.GRADIENT

    @property
    def geometry(self) -> Geometry:
        """A gradient carries no buffers."""
        return Geometry(self.layout, codecs.get(self._config.codec), buffers=False)

    def train(self, going: Callable[[], bool], steps: int | None = None) -> Work | None:
        """Forward and backward passes, their gradients weighted by their samples; ``steps`` is for trainers that make steps."""
        self.model.train()
        began, total, samples = time.monotonic(), torch.zeros((), device=self._device), 0
        mean = torch.zeros(self.layout.parameters)
        for _ in range(self._config.steps or 1):
            self.model.zero_grad(set_to_none=True)
            loss, count = self._step(next(self._batches)[0])
            samples += count
            total = total + loss * count
            mean += (_gradient(self.model, self.layout) - mean) * (count / samples)
            if not going():
                return None
        self._mean = mean
        # One step whatever the batches: it joins as the delta of one step of `gradient_lr`.
        return Work(samples, 1, time.monotonic() - began, float(total) / samples)

    def _meant(self, start: Tensor) -> Tensor:
        return self._mean


TRAINERS: dict[str, type[Trainer]] = {"delta": DeltaTrainer, "gradient": GradientTrainer}  # by the fleet file's ``edge.update``


def _gradient(model: nn.Module, layout: Layout) -> Tensor:
    """float32[layout.parameters]: the parameters' gradients in the layout's order; a parameter without one counts as zero."""
    flat = torch.zeros(layout.parameters)
    parameters = dict(model.named_parameters())
    for spec in layout.tensors:
        gradient = parameters[spec.name].grad if spec.role == "parameter" else None
        if gradient is not None:
            flat[spec.start : spec.start + spec.size] = gradient.detach().reshape(-1).to("cpu", torch.float32)
    return flat


def _loader(dataset: Dataset[Any], member: str, batch_size: int, seed: int) -> DataLoader[Any]:
    """Shuffled batches of the member's data; the order follows from the seed and the member's name."""
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size)
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise ConfigError(f"the task has no data for {member!r}: its dataset is empty")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{member}".encode()))
    return DataLoader(dataset, batch_size, shuffle=True, generator=generator)
