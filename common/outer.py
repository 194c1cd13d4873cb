"""The outer step: the merged outer gradient applied to the master weights by an optimizer of torch.optim.

An element-wise optimizer treats every element alike and apart from the others, so the flat vector can be stepped block by block,
each block with its part of the state. Within a block the optimizer sees stripes of at most ``STRIPE`` elements, which stay in the
cache, and each of which torch works on in one thread. Where it splits a vector between threads, it does not promise to round the
elements at the seams as any others, and a version's bytes must not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fleetddp.common.config import OuterConfig
from fleetddp.common.errors import ConfigError

STRIPE = 32768  # at::internal::GRAIN_SIZE: up to here torch does not split an operation between threads

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "average": ("SGD", {"lr": 1.0}),
    "diloco": ("SGD", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),  # Douillard et al., DiLoCo, 2023, §3.1
    "fedasync": ("SGD", {"lr": 0.6}),  # mixing weight alpha of Xie et al., Asynchronous Federated Optimization, 2019, §6
}

# How torch computes, not what: the fleet's bytes must not depend on it. An outer gradient is descended, never climbed.
NOT_OPTIONS = ("foreach", "fused", "capturable", "differentiable", "maximize")


def resolve(config: OuterConfig) -> tuple[str, dict[str, Any]]:
    """The name and the options of the optimizer that a config means."""
    if config.preset is not None:
        return PRESETS[config.preset]
    return config.optimizer, {"lr": 1.0, **config.options} if config.optimizer == "SGD" else dict(config.options)


class OuterOptimizer:
    """Steps blocks of the master weights; holds no state itself.

    ``slots`` names the float32 state vectors (one value an element), ``scalars`` the rest of the state (a step count, for
    instance). Raises ``ConfigError`` when torch refuses the options.
    """

    def __init__(self, config: OuterConfig) -> None:
        self.name, self._options = resolve(config)
        self._class: type[torch.optim.Optimizer] = getattr(torch.optim, self.name)
        self.slots, self._scalars = self._probe()

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the state that all elements share."""
        return tuple(self._scalars)

    def step(
        self, master: Tensor, gradient: Tensor, state: Mapping[str, Tensor], scalars: Mapping[str, float] | None
    ) -> dict[str, float]:
        """Step one block in place: ``master`` and ``state[slot]``, float32[n] like ``gradient``.

        ``scalars`` are those after the previous outer step; None means that this is the first, ``state`` is then only written.
        Returns the scalars after this step, the same for every block.
        """
        parameters = []
        for weights, descent in zip(torch.split(master, STRIPE), torch.split(gradient, STRIPE), strict=True):
            parameters.append(weights.detach().requires_grad_())
            parameters[-1].grad = descent
        optimizer = self._class(parameters, foreach=False, **self._options)  # type: ignore[call-arg]
        stripes = {slot: torch.split(state[slot], STRIPE) for slot in self.slots}
        if scalars is not None:
            for index, parameter in enumerate(parameters):
                optimizer.state[parameter].update({slot: stripes[slot][index] for slot in self.slots})
                optimizer.state[parameter].update({name: self._scalar(name, scalars[name]) for name in self._scalars})
        optimizer.step()
        for index, parameter in enumerate(parameters):
            for slot in self.slots:
                after = optimizer.state[parameter][slot]
                if after is not stripes[slot][index]:  # made by the optimizer, at its first step
                    stripes[slot][index].copy_(after)
        return {name: float(optimizer.state[parameters[0]][name]) for name in self._scalars}

    def _scalar(self, name: str, value: float) -> Any:
        dtype = self._scalars[name]
        return value if dtype is None else torch.tensor(value, dtype=dtype)

    def _probe(self) -> tuple[tuple[str, ...], dict[str, torch.dtype | None]]:
        """Take one step with three elements: are the options good, and what state does the optimizer keep?"""
        if switches := sorted(set(NOT_OPTIONS) & set(self._options)):
            raise ConfigError(f"outer.options: {', '.join(switches)} cannot be set; give {self.name}'s hyperparameters only")
        parameter = torch.zeros(3, dtype=torch.float32, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        try:
            optimizer = self._class([parameter], foreach=False, **self._options)  # type: ignore[call-arg]
            optimizer.step()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"outer.options: torch.optim.{self.name} refuses {self._options}: {error}") from error
        state = {name: value for name, value in optimizer.state[parameter].items() if value is not None}
        slots = tuple(sorted(name for name, value in state.items() if isinstance(value, Tensor) and value.dim() == 1))
        shared = {name: value.dtype if isinstance(value, Tensor) else None for name, value in state.items() if name not in slots}
        return slots, shared
