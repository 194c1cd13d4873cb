"""Which optimizer steps count: the ones after which every parameter has moved as the training script meant it to.

torch calls a global hook after each ``Optimizer.step``, so optimizers need not be handed to us. One *counted step* is one round:
each optimizer that holds parameters of ours has stepped since the round before, and none was told to skip by a GradScaler. A
round ends with the optimizer that was found last, so that a boundary never falls between two optimizers of one iteration.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(slots=True)
class _Known:
    """An optimizer that was seen to step."""

    optimizer: weakref.ref[Optimizer]
    groups: int  # parameter groups it had when it was looked at
    held: frozenset[int]  # ids of our parameters among its own
    inner: bool = False  # it steps on behalf of another one, which holds all it holds (ZeroRedundancyOptimizer)
    stepped: bool = False  # in the round that is going on

    @property
    def counts(self) -> bool:
        """Whether a round waits for it."""
        return not self.inner and self.optimizer() is not None


class StepCounter:
    """Counts the steps of one model's optimizers; ``stepped`` is called after each optimizer's step, and costs next to nothing.

    ``optimizers``: all that hold parameters of the model; None: they are found as they step. Until those found hold every
    trainable parameter together, a round is over only when one of them steps a second time.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer] | None = None) -> None:
        self._module = module
        self._known: dict[int, _Known] = {}  # by id(optimizer), in the order they were found: those that hold something of ours
        self._strangers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # others: their groups when they were looked at
        self._last = 0  # id of the optimizer that ends a round
        self._complete = False  # no further optimizer is waited for
        self._rounds = 0  # since ``restart``; skipped ones are taken out when their flags are looked at
        self._flags: list[list[Tensor]] = []  # found_inf of the rounds, by round
        self._round_flags: list[Tensor] = []
        if optimizers is not None:
            for optimizer in optimizers:
                self._learn(optimizer)
            self._complete = True

    def stepped(self, optimizer: Optimizer) -> bool:
        """Note that ``optimizer`` has stepped; whether this ended a round."""
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer or known.groups != len(optimizer.param_groups):
            if self._strangers.get(optimizer) == len(optimizer.param_groups):
                return False
            known = self._learn(optimizer)
            if known is None:
                return False
        if known.inner:
            if known.stepped:  # twice, and the other not once: it was made in the other's place
                self._replace(optimizer, known)
            known.stepped = True
            if known.inner:
                return False
        found_inf = getattr(optimizer, "found_inf", None)  # GradScaler sets it on optimizers that skip by themselves
        if found_inf is not None:
            self._round_flags.append(found_inf)
        if id(optimizer) != self._ends_round():
            known.stepped = True
            return False
        if not self._complete:
            self._complete = self._all_held() or known.stepped
            if not self._complete:
                known.stepped = True  # perhaps one not seen yet still belongs to this iteration
                return False
            if known.stepped:  # it steps again: there was no other, the round before had ended
                self._end_round()
        known.stepped = True
        return self._end_round()

    @property
    def at_most(self) -> int:
        """The count if no step had been skipped: an upper bound that never waits for a device."""
        return self._rounds

    @property
    def count(self) -> int:
        """Steps counted since ``restart``. Waits for the device where a GradScaler left flags there."""
        for flags in self._flags:
            self._rounds -= any(bool(flag.item()) for flag in flags)
        self._flags.clear()
        return self._rounds

    def restart(self, count: int = 0) -> None:
        """Go on counting from ``count``."""
        self._rounds = count
        self._flags.clear()

    def _end_round(self) -> bool:
        """Close the round; whether it counts (until a flag says otherwise)."""
        whole = all(k.stepped for k in self._known.values() if k.counts)
        for known in self._known.values():
            known.stepped = False
        if whole:
            self._rounds += 1
            if self._round_flags:
                self._flags.append(self._round_flags)
        self._round_flags = []
        return whole

    def _ends_round(self) -> int:
        last = self._known.get(self._last)
        if last is None or not last.counts:
            self._last = [i for i, k in self._known.items() if k.counts][-1]
        return self._last

    def _learn(self, optimizer: Optimizer) -> _Known | None:
        """Look at an optimizer that is new, or has new parameter groups. None: it holds nothing of ours."""
        self._known = {i: known for i, known in self._known.items() if known.optimizer() is not None or not self._complete}
        ours = {id(p) for p in self._module.parameters() if p.requires_grad}
        held = frozenset(id(p) for group in optimizer.param_groups for p in group["params"]) & ours
        self._known.pop(id(optimizer), None)
        if not held:
            self._strangers[optimizer] = len(optimizer.param_groups)
            return None
        inner = any(held < k.held for k in self._known.values() if k.counts)
        known = _Known(weakref.ref(optimizer), len(optimizer.param_groups), held, inner)
        if not inner:
            self._replace(optimizer, known)
        self._known[id(optimizer)] = known
        return known

    def _replace(self, optimizer: Optimizer, known: _Known) -> None:
        """Let ``optimizer`` end the rounds; those that share a parameter with it are its inner ones, or were before it."""
        for other in self._known.values():
            other.inner = other.inner or bool(other.held & known.held)
        known.inner = False
        self._last = id(optimizer)

    def _all_held(self) -> bool:
        held = frozenset[int]().union(*(k.held for k in self._known.values()))
        return all(id(p) in held for p in self._module.parameters() if p.requires_grad)
