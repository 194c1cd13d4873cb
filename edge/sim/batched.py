"""Several clients at once: their weights stacked, one batched matrix product where each client alone would need its own.

It serves models whose trainable parameters are those of ``nn.Linear`` layers, with plain SGD: the step is added to the weights in
the very product that computes the gradient (``baddbmm``), so that there is no gradient in memory and no pass of an optimizer. The
layers between must treat every sample by itself. Whether that holds, and whether it is faster, is found out by trying: see
``calibration.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fleetddp.common.layout import TensorSpec
from fleetddp.common.task import Task
from fleetddp.edge.sim.batches import Job, Plain, order, plain
from fleetddp.edge.sim.single import Base, Outcome, PlainSGD, Single, finite, outcome


class Unsuitable(Exception):
    """These clients, or this model, cannot be trained stacked."""


class Stacked:
    """Trains at once the jobs that begin at the same weights and whose batches have the same sizes; the others singly."""

    def __init__(self, task: Task, single: Single) -> None:
        if single.sgd is None:
            raise Unsuitable("the optimizer is not plain SGD")
        if single.has_buffers:
            raise Unsuitable("the model has buffers")
        self._task, self._single = task, single
        self.layout = single.layout
        self._layers: list[_StackedLinear] = []
        specs = {spec.name: spec for spec in self.layout.tensors}
        self._model = self._swap(task.model(), "", specs, single.sgd)
        if specs:
            raise Unsuitable(f"{next(iter(specs))} is not a parameter of an nn.Linear, or is shared")
        self._model.train()

    def _swap(self, module: nn.Module, name: str, specs: dict[str, TensorSpec], sgd: PlainSGD) -> nn.Module:
        """Every linear layer that trains replaced by one over stacked weights; takes its tensors out of ``specs``."""
        if type(module) is nn.Linear:
            weight = specs.pop(f"{name}weight", None)
            bias = specs.pop(f"{name}bias", None)
            if weight is None and bias is None:
                return module  # frozen
            if weight is None or (bias is None) != (module.bias is None):
                raise Unsuitable(f"{name[:-1]}: shared, or frozen in part")
            self._layers.append(_StackedLinear(weight, bias, sgd))
            return self._layers[-1]
        for child_name, child in module.named_children():
            setattr(module, child_name, self._swap(child, f"{name}{child_name}.", specs, sgd))
        return module

    def train(self, jobs: Sequence[Job], base: Base, out: Tensor) -> list[Outcome]:
        """The same as ``Single.train``, to within rounding; after any error, ``out`` holds nothing of use."""
        groups = self._groups(jobs)
        outcomes: dict[int, Outcome] = {}
        for positions, data in groups:
            members = [jobs[position] for position in positions]
            rows = out if len(groups) == 1 else torch.empty(len(members), self.layout.elements)
            if len(data) > 1:
                found = self._train(members, data, base(members[0].version), rows)
            else:
                found = self._single.train(members, base, rows)
            outcomes.update(zip(positions, found, strict=True))
            if rows is not out:
                out[positions] = rows
        return [outcomes[position] for position in range(len(jobs))]

    def _groups(self, jobs: Sequence[Job]) -> list[tuple[list[int], list[Plain]]]:
        """Jobs (by position) that can be trained at once, with the data of each; none for one that is like no other."""
        found: dict[Any, tuple[list[int], list[Plain]]] = {}
        for position, job in enumerate(jobs):
            data = plain(self._task.data(job.member, job.part, job.parts))
            if data is None or data.samples == 0:
                found[position] = ([position], [])
                continue
            in_epoch = -(-data.samples // job.batch_size)
            alike = (job.version, data.samples, job.batch_size, job.steps, job.epochs, job.before % in_epoch)
            positions, held = found.setdefault(alike, ([], []))
            positions.append(position)
            held.append(data)
        return list(found.values())

    def _train(self, jobs: Sequence[Job], data: Sequence[Plain], base: Tensor, out: Tensor) -> list[Outcome]:
        clients = len(jobs)
        orders = [order(data[0].samples, job) for job in jobs]
        sizes = [len(batch) for batch in orders[0]]
        columns = _gather(data, orders, sizes)
        with torch.no_grad():
            for layer in self._layers:
                layer.begin(base, clients)
        outputs = [self._step(batch, clients) for batch in _split(columns, [clients * n for n in sizes])]
        with torch.no_grad():
            for layer in self._layers:
                layer.delta(base, out)
            total = self._losses(columns, outputs, sizes, clients).tolist()
        samples, steps = sum(sizes), len(sizes)
        sums = out.sum(1).tolist()
        return [outcome(loss, samples, steps, finite(row, s)) for loss, row, s in zip(total, out, sums, strict=True)]

    def _step(self, batch: list[Tensor], clients: int) -> Tensor:
        """One step of all clients; returns the model's output. The loss is a mean over all their samples: times their number, its
        gradient by the weights of one client is that of the mean over the samples of that client."""
        recorder = _Recorder(self._model)
        (self._task.loss(recorder, batch) * clients).backward()  # type: ignore[no-untyped-call]
        return recorder.output

    def _losses(self, columns: list[Tensor], outputs: list[Tensor], sizes: list[int], clients: int) -> Tensor:
        """float32[clients]: each client's losses, times the samples of the batch, summed."""
        total = torch.zeros(clients)
        for size, run in groupby(zip(sizes, outputs, strict=True), key=itemgetter(0)):
            found = torch.cat([output for _, output in run])
            rows = len(found)
            alike = [part.view(-1, size, *part.shape[1:]) for part in (found, *(column[:rows] for column in columns))]
            columns = [column[rows:] for column in columns]
            losses = torch.vmap(lambda output, *batch: self._task.loss(_Replay(output), list(batch)))(*alike)
            total += losses.view(-1, clients).sum(0) * size
        return total


class _Call(nn.Module):
    """What the task's loss gets for a model: something to call. A loss that wants more of it, such as a penalty on the weights,
    fails, and is trained singly."""

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Refused."""
        raise Unsuitable("the loss uses the model's parameters")


class _Recorder(_Call):
    """Runs the stack, and keeps what comes out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._run = model.forward
        self.output = torch.empty(0)

    def forward(self, inputs: Tensor) -> Tensor:
        """The stack's output for the samples of all clients, client after client."""
        output: Tensor = self._run(inputs)
        self.output = output.detach()
        return output


class _Replay(_Call):
    """A model that gives an output found before."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs`` is what led to the output then."""
        return self._output


class _StackedLinear(nn.Module):
    """A linear layer with weights for each client, which a backward pass moves by one step."""

    weight: Tensor  # [clients, out, in]
    bias: Tensor | None  # [clients, 1, out]

    def __init__(self, weight: TensorSpec, bias: TensorSpec | None, sgd: PlainSGD) -> None:
        super().__init__()
        self._weight_spec, self._bias_spec, self.sgd = weight, bias, sgd
        self.waiting = False  # for the backward pass of the last forward pass
        self._weights = self._biases = torch.empty(0)  # room for as many clients as there ever were

    def begin(self, base: Tensor, clients: int) -> None:
        """Every client at the same weights."""
        outputs, inputs = self._weight_spec.shape
        if len(self._weights) < clients:
            self._weights, self._biases = torch.empty(clients, outputs, inputs), torch.empty(clients, 1, outputs)
        spec = self._weight_spec
        self.weight = self._weights[:clients].copy_(base[spec.start : spec.stop].view(spec.shape)).detach()
        self.weight.requires_grad_(True)  # so that autograd runs the backward pass; it never gets a gradient
        self.bias = None
        if self._bias_spec is not None:
            self.bias = self._biases[:clients].copy_(base[self._bias_spec.start : self._bias_spec.stop])
        self.waiting = False

    def delta(self, base: Tensor, out: Tensor) -> None:
        """Write base - weights to the layer's columns of ``out``."""
        for spec, local in ((self._weight_spec, self.weight.detach()), (self._bias_spec, self.bias)):
            if spec is not None and local is not None:
                torch.sub(base[spec.start : spec.stop], local.flatten(1), out=out[:, spec.start : spec.stop])

    def forward(self, inputs: Tensor) -> Tensor:
        """``inputs``: [clients * samples, ..., in]."""
        if self.waiting:
            raise Unsuitable("a layer is used twice before a step")
        self.waiting = True
        clients, outputs, width = self.weight.shape
        result: Tensor = _Step.apply(inputs.reshape(clients, -1, width), self.weight, self)  # type: ignore[no-untyped-call]
        return result.view(*inputs.shape[:-1], outputs)


class _Step(torch.autograd.Function):
    """A stacked linear layer whose backward pass takes the step instead of returning the weights' gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, layer: _StackedLinear) -> Tensor:
        ctx.inputs, ctx.layer = inputs, layer  # not save_for_backward: the weight is meant to change underneath
        if layer.bias is None:
            return inputs.bmm(weight.transpose(1, 2))
        return torch.baddbmm(layer.bias, inputs, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        layer: _StackedLinear = ctx.layer
        gradient, rate, decay = gradients[0], layer.sgd.lr, layer.sgd.weight_decay
        passed_on = gradient.bmm(layer.weight) if ctx.needs_input_grad[0] else None  # before the weight changes
        if decay:
            layer.weight.mul_(1.0 - rate * decay)
        layer.weight.baddbmm_(gradient.transpose(1, 2), ctx.inputs, alpha=-rate)
        if layer.bias is not None:
            if decay:
                layer.bias.mul_(1.0 - rate * decay)
            layer.bias.sub_(gradient.sum(1, keepdim=True), alpha=rate)
        layer.waiting = False
        return passed_on, None, None


def _gather(data: Sequence[Plain], orders: list[list[Tensor]], sizes: list[int]) -> list[Tensor]:
    """The columns of the data, rows in the order in which they are trained: batch after batch, in each client after client."""
    indices = torch.stack([torch.cat(batches) for batches in orders])  # [clients, all samples]
    if all(len(d.tensors) == len(data[0].tensors) and all(map(is_, d.tensors, data[0].tensors)) for d in data):
        rows = torch.stack([i if d.rows is None else d.rows[i] for d, i in zip(data, indices, strict=True)])
        return Plain(data[0].tensors, None).take(torch.cat([batch.reshape(-1) for batch in torch.split(rows, sizes, dim=1)]))
    taken = zip(*(d.take(i) for d, i in zip(data, indices, strict=True)), strict=True)
    stacked = (torch.split(torch.stack(column), sizes, dim=1) for column in taken)
    return [torch.cat([batch.flatten(0, 1) for batch in column]) for column in stacked]


def _split(columns: list[Tensor], sizes: list[int]) -> list[list[Tensor]]:
    return [list(batch) for batch in zip(*(torch.split(column, sizes) for column in columns), strict=True)]
