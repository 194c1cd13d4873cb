"""One client after another on one resident model: the path that trains any task, and the reference of all others."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fleetddp.common.errors import FleetError
from fleetddp.common.layout import Layout
from fleetddp.common.task import Task, samples_in
from fleetddp.edge.sim.batches import Job, batches

Buffers = Literal["average", "local"]
Base = Callable[[int], Tensor]  # the weights of a version, float32[elements]


class TaskFailed(FleetError):
    """The task raised an error while a member trained; the message names both. ``member`` is whose job it was."""

    def __init__(self, member: str, what: str) -> None:
        super().__init__(f"training {member!r}: {what}")
        self.member, self.what = member, what


class Outcome(NamedTuple):
    """What a job came to, besides the delta."""

    samples: float
    steps: int
    loss: float  # mean over the samples
    finite: bool  # False: the delta holds infinities or no numbers


class PlainSGD(NamedTuple):
    """Stochastic gradient descent without memory: w <- w - lr (g + weight_decay w). Two updates of fused kernels do it."""

    lr: float
    weight_decay: float


def plain_sgd(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> PlainSGD | None:
    """The settings of an optimizer that is no more than ``PlainSGD`` over these parameters; None for any other."""
    if type(optimizer) is not torch.optim.SGD or len(optimizer.param_groups) != 1 or "step" in vars(optimizer):
        return None  # of another class, several learning rates, or a scheduler around it
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    group = optimizer.param_groups[0]
    if group["momentum"] or group["maximize"] or group["differentiable"] or not isinstance(group["lr"], float | int):
        return None
    if [id(p) for p in group["params"]] != [id(p) for p in parameters]:
        return None
    return PlainSGD(float(group["lr"]), float(group["weight_decay"]))


class Single:
    """Trains jobs one by one. ``channels_last`` keeps convolutions in that memory format: the same numbers, another order of
    summing, and on many CPUs faster kernels."""

    def __init__(self, task: Task, buffers: Buffers, *, channels_last: bool = False) -> None:
        _spare_compiler()
        self._task = task
        self.model = task.model()
        self.layout = Layout.from_module(self.model, buffers=buffers)
        if channels_last:
            _keep_channels_last(self.model)
        named: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self._parameters: list[Tensor] = list(self._trained)
        exchanged = [(spec, named[spec.name]) for spec in self.layout.tensors]
        self._averaged = [(spec, tensor) for spec, tensor in exchanged if spec.role == "buffer"]
        kept = {id(tensor) for _, tensor in exchanged}
        self._local = [(b, b.clone()) for b in self.model.buffers() if id(b) not in kept]  # each job begins with the first values
        self._all_float32 = all(tensor.dtype == torch.float32 for _, tensor in exchanged)
        self.sgd = plain_sgd(self._new_optimizer(), self._parameters)
        self.has_buffers = bool(self._averaged or self._local)

    def train(self, jobs: Sequence[Job], base: Base, out: Tensor) -> list[Outcome]:
        """Train each job from the weights of its version and write to its row of ``out`` (float32[jobs, elements]) what its
        update carries: base - local, averaged buffers as values. Raises ``TaskFailed``."""
        outcomes = []
        for job, delta in zip(jobs, out, strict=True):
            try:
                outcomes.append(self._train(job, base(job.version), delta))
            except Exception as error:
                raise TaskFailed(job.member, f"{type(error).__name__}: {error}") from error
        return outcomes

    def _train(self, job: Job, base: Tensor, out: Tensor) -> Outcome:
        with torch.no_grad():
            for buffer, first in self._local:
                buffer.copy_(first)
            self._adopt(base)
        self.model.train()
        torch.default_generator.manual_seed(zlib.crc32(f"{job.seed}/{job.member}/{job.before}".encode()))  # dropout and the like
        units = batches(self._task.data(job.member, job.part, job.parts), job)
        total, samples, steps = self._plain(units, self.sgd) if self.sgd else self._any_optimizer(units)
        with torch.no_grad():
            self._delta(base, out)
        return outcome(float(total), samples, steps, finite(out, float(out.sum())))

    def _plain(self, units: Iterator[Any], sgd: PlainSGD) -> tuple[Tensor, int, int]:
        # torch._foreach_* is what torch.optim itself calls: one kernel launch for all parameters. autograd.grad spares the
        # accumulation into .grad and its clearing.
        task, model, parameters = self._task, self.model, self._parameters
        total, samples, steps = torch.zeros(()), 0, 0
        for batch in units:
            loss = task.loss(model, batch)
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            moved, gradients = parameters, list(found)
            if any(g is None for g in found):  # a parameter that the loss does not reach stays, as it does in torch.optim
                pairs = [(p, g) for p, g in zip(parameters, found, strict=True) if g is not None]
                moved, gradients = [p for p, _ in pairs], [g for _, g in pairs]
            with torch.no_grad():
                if sgd.weight_decay:
                    gradients = list(torch._foreach_add(gradients, moved, alpha=sgd.weight_decay))
                torch._foreach_add_(moved, gradients, alpha=-sgd.lr)
                count = samples_in(batch)
                total, samples, steps = total + loss.detach() * count, samples + count, steps + 1
        return total, samples, steps

    def _any_optimizer(self, units: Iterator[Any]) -> tuple[Tensor, int, int]:
        optimizer = self._new_optimizer()
        total, samples, steps = torch.zeros(()), 0, 0
        for batch in units:
            optimizer.zero_grad(set_to_none=True)
            loss = self._task.loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            count = samples_in(batch)
            total, samples, steps = total + loss.detach() * count, samples + count, steps + 1
        optimizer.zero_grad(set_to_none=True)
        return total, samples, steps

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return self._task.optimizer(iter(self._trained))

    def _adopt(self, base: Tensor) -> None:
        if not self._all_float32:
            self.layout.write_(self.model, base)
            return
        torch._foreach_copy_(self._parameters, self._views(base))
        for spec, buffer in self._averaged:
            buffer.copy_(base[spec.start : spec.stop].view(spec.shape))

    def _delta(self, base: Tensor, out: Tensor) -> None:
        if not self._all_float32:
            out.copy_(self.layout.outgoing(self.model, base))
            return
        views = self._views(out)
        torch._foreach_copy_(views, self._views(base))
        torch._foreach_sub_(views, self._parameters)
        if self._averaged:
            out[self.layout.parameters : self.layout.buffer_start] = 0.0
        for spec, buffer in self._averaged:
            out[spec.start : spec.stop] = buffer.reshape(-1)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[s.start : s.stop].view(s.shape) for s in self.layout.tensors if s.role == "parameter"]


def _spare_compiler() -> None:
    """The first call of some of an optimizer's methods imports torch's compiler, which takes about a second, only to be exempt
    from it. Where it is not there yet, they are called as they are; a version of torch that does this otherwise takes its time.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dynamo_disable = plain


def outcome(total: float, samples: int, steps: int, finite: bool) -> Outcome:
    """``total``: the losses of the batches, each times its samples."""
    return Outcome(float(samples), steps, total / samples if samples else math.nan, finite)


def finite(delta: Tensor, its_sum: float) -> bool:
    """Whether all of it is. A sum is finite only if all summands are, which is cheap to know; but it may overflow."""
    return math.isfinite(its_sum) or bool(delta.isfinite().all())


def _keep_channels_last(model: nn.Module) -> None:
    """Weights, inputs and outputs of every two-dimensional convolution in channels-last format."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.forward = partial(_convolve, module.forward)  # type: ignore[method-assign]  # hooks would cost each call more


def _convolve(convolution: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    if inputs.dim() != 4:
        return convolution(inputs)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    if inputs.shape[1] == 1 and not inputs.requires_grad:
        # With one channel both formats look alike, and the kernel would pick the other one for its output.
        height, width = inputs.shape[2:]
        return convolution(inputs.as_strided(inputs.shape, (height * width, 1, width, 1)))
    return convolution(inputs).contiguous(memory_format=torch.channels_last)
