"""A version of soft labels: what a window's members say of the items of a proxy set, instead of an outer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fleetddp.common.decision import Decision, Term
from fleetddp.common.labels import space_of
from fleetddp.common.merge import Operand, weighted_sum
from fleetddp.common.update import Interval
from fleetddp.common.version_file import BLOCK_ELEMENTS, VersionFile, blocks


class Consensus:
    """The sums of one window, block by block; an item that nobody labelled in it keeps the row it had."""

    def __init__(self, previous: VersionFile, decision: Decision, operand: Callable[[Term], Operand]) -> None:
        self._previous, self._decision, self._operand = previous, decision, operand
        self._layout = previous.head.layout
        self._width = space_of(self._layout).width
        size = min(BLOCK_ELEMENTS, self._layout.parameters)
        self._sum, self._product = (torch.empty(size, dtype=torch.float64) for _ in range(2))
        self._kept = torch.empty(size, dtype=torch.float32)

    def blocks(self) -> Iterator[Interval]:
        """All rows in order, whole."""
        return blocks(0, self._layout.parameters, self._width)

    def rows(self, interval: Interval) -> Tensor:
        """float32 of a block's rows; to be used before the next one is asked for."""
        n = interval[1] - interval[0]
        total = self._sum[:n]
        weighted_sum(self._operand, self._decision.terms, self._layout, interval, out=total, product=self._product[:n])
        kept = self._previous.weights(interval, self._kept[:n]).view(-1, self._width)
        said = total.view(-1, self._width)
        return kept.copy_(torch.where(said[:, -1:] > 0, said, kept)).view(-1)
