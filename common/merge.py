"""How a window's updates become one outer gradient: what each counts for, and their weighted sum.

``plan`` fixes a coefficient for each update (design §4); ``weighted_sum`` then adds up any block of the vector in float64, in the
order of the plan. A product and a sum are each rounded once, as IEEE 754 has it, so the result depends neither on the order of
arrival, nor on the size of the blocks, nor on the number of threads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fleetddp.common.config import Constant, Discount, MergeConfig, Polynomial
from fleetddp.common.events import Decision, Term
from fleetddp.common.fragments import Changes
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, tensor_over
from fleetddp.common.scores import weighted_means
from fleetddp.common.update import Interval, Kind, Tier, Update

Read = Callable[[int, int], bytes]  # bytes [start, stop) of an update's payload
Staleness = Callable[[int], int]  # of an update, by its base version


def discount(rule: Discount, staleness: int) -> float:
    """d(s): how much an update of this staleness (>= 0) counts."""
    if isinstance(rule, Constant):
        return 1.0
    if isinstance(rule, Polynomial):
        return float((1 + staleness) ** -rule.a)
    return 1.0 if staleness <= rule.b else 1 / (rule.a * (staleness - rule.b) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One vector of an update, in terms of the formulas of ``plan``."""

    update: Update
    index: int
    tier: Tier
    discount: float
    samples: float  # w in sum(w)
    scale: float  # what the vector is to be multiplied by to be w u
    buffer_samples: float  # w in sum(w d) of the buffers
    buffer_scale: float


def decision_on(
    updates: Iterable[Update],
    version: int,
    at: float,
    reason: str,
    config: MergeConfig,
    changes: Changes | None = None,
    *,
    sums: bool = False,
) -> Decision:
    """What version ``version`` is made of: these updates, in the canonical order. ``changes``: of the fragments, before it;
    ``sums``: see ``plan``."""
    ordered = sorted(updates, key=lambda update: update.update_id)
    terms = plan(ordered, version, config, changes, sums=sums)
    if changes is not None:
        kept = max(config.bound(tier) for tier in (Tier.SITE, Tier.EDGE)) + 2
        changes = changes.after(version, {term.fragment for term in terms}, kept=kept)
    return Decision(
        version=version,
        at=at,
        terms=terms,
        changes=changes,
        ids=tuple(update.update_id for update in ordered),
        leaf_ids=tuple(sorted(i for update in ordered for i in update.header.leaf_ids)),
        reason=reason,
        metrics=weighted_means(ordered),
    )


def plan(
    updates: Sequence[Update], version: int, config: MergeConfig, changes: Changes | None = None, *, sums: bool = False
) -> tuple[Term, ...]:
    """The terms that make version ``version`` out of deltas, gradients and partials, in any order.

    Within a tier the outer gradient is sum(w d u) / sum(w): w samples, d the discount, u the update; a stale window thus takes a
    smaller step (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022). With shares, the means of the
    tiers present are mixed in proportion to their shares; ``share: samples`` knows no tiers. Updates of one member on one base
    are parts of one longer update: added, with the weight of their summed samples. A gradient is the delta of one step of
    ``gradient_lr``. A partial's row already is a sum of w u. Buffers are averaged: sum(w d b) / sum(w d).

    Where the layout is cut, all that is done for each fragment by itself, over the updates that cover it.

    ``sums``: the rows are soft labels, which hold their weights (``labels.py``): they are added up, sum(d r), and nothing is
    divided, so that each item's consensus is over those who labelled it.
    """
    if sums:
        rows = _all_rows(updates, lambda base: version - 1 - base, config)
        return tuple(
            Term(update_id=row.update.update_id, row=row.index, coefficient=row.discount, buffer_coefficient=0.0) for row in rows
        )
    if changes is None:
        return _terms(updates, 0, lambda base: version - 1 - base, config)
    fragments = range(len(changes.at))
    covering = {i: [u for u in updates if u.header.fragment is None or u.header.fragment.index == i] for i in fragments}
    return tuple(t for i, some in covering.items() for t in _terms(some, i, partial(changes.staleness, fragment=i), config))


def _terms(updates: Sequence[Update], fragment: int, staleness: Staleness, config: MergeConfig) -> tuple[Term, ...]:
    rows = _all_rows(updates, staleness, config)
    means = _tier_means(rows, config)
    buffered = math.fsum(row.buffer_samples * row.discount for row in rows)
    return tuple(
        Term(
            update_id=row.update.update_id,
            row=row.index,
            fragment=fragment,
            coefficient=row.scale * row.discount / means[row.tier].samples * means[row.tier].share,
            buffer_coefficient=row.buffer_scale * row.discount / buffered if row.buffer_samples and buffered else 0.0,
        )
        for row in rows
    )


def _all_rows(updates: Sequence[Update], staleness: Staleness, config: MergeConfig) -> list[_Row]:
    joint = joint_samples(updates)
    return [row for update in sorted(updates, key=lambda u: u.update_id) for row in _rows(update, staleness, config, joint)]


class _Mean(NamedTuple):
    """What the updates of a tier are divided by, and what their mean counts in the whole."""

    samples: float
    share: float


def _tier_means(rows: Sequence[_Row], config: MergeConfig) -> dict[Tier, _Mean]:
    samples: dict[Tier, list[float]] = defaultdict(list)
    for row in rows:
        samples[row.tier].append(row.samples)
    if config.share == "samples":
        return dict.fromkeys(samples, _Mean(math.fsum(row.samples for row in rows), 1.0))
    shares = config.share
    present = math.fsum(shares[tier] for tier in samples)
    return {tier: _Mean(math.fsum(samples[tier]), shares[tier] / present) for tier in samples}


def joint_samples(updates: Sequence[Update]) -> dict[tuple[str, int], float]:
    """Samples of each member on each base, all its updates together."""
    parts: dict[tuple[str, int], list[float]] = defaultdict(list)
    for update in updates:
        parts[update.update_id.node, update.header.base_version].append(update.samples)
    return {key: math.fsum(samples) for key, samples in parts.items()}


def _rows(update: Update, staleness: Staleness, config: MergeConfig, joint: dict[tuple[str, int], float]) -> Iterator[_Row]:
    header = update.header

    def discounted(tier: Tier, base_version: int) -> float:
        return discount(config.for_tier(tier).discount, staleness(base_version))

    if header.kind is Kind.PARTIAL:
        for index, group in enumerate(header.groups):
            yield _Row(
                update=update,
                index=index,
                tier=group.tier,
                discount=discounted(group.tier, group.base_version),
                samples=group.samples,
                scale=1.0,
                buffer_samples=group.buffer_samples,
                buffer_scale=1.0,
            )
        return
    is_gradient = header.kind is Kind.GRADIENT
    yield _Row(
        update=update,
        index=0,
        tier=header.tier,
        discount=discounted(header.tier, header.base_version),
        samples=update.samples,
        scale=joint[update.update_id.node, header.base_version] * (config.gradient_lr if is_gradient else 1.0),
        buffer_samples=0.0 if is_gradient else update.samples,
        buffer_scale=update.samples,
    )


class Operand:
    """The decoded rows of one update, read block by block through ``read``; zero where it covers nothing (soft labels)."""

    def __init__(self, geometry: Geometry, read: Read) -> None:
        self._geometry, self._read = geometry, read

    def values(self, row: int, interval: Interval) -> Tensor:
        """f32[n] of an element interval of the layout, within one section; not to be written to."""
        if self._geometry.sparse:
            return self._scattered(interval)
        first = row * self._geometry.layout.elements
        elements = (first + interval[0], first + interval[1])
        data = tensor_over(self._read(*self._geometry.byte_range(elements)))
        return self._geometry.decode(data, elements, checked=True)  # by staging; what comes out of a merge is checked again

    def _scattered(self, interval: Interval) -> Tensor:
        values = torch.zeros(interval[1] - interval[0])
        for piece in self._geometry.covered(interval):
            data = tensor_over(self._read(*self._geometry.byte_range(piece)))
            decoded = self._geometry.decode(data, piece, checked=True)
            start, stop = max(piece[0], interval[0]), min(piece[1], interval[1])
            values[start - interval[0] : stop - interval[0]] = decoded[start - piece[0] : stop - piece[0]]
        return values


def weighted_sum(
    operand: Callable[[Term], Operand], terms: Sequence[Term], layout: Layout, interval: Interval, *, out: Tensor, product: Tensor
) -> None:
    """Sum of coefficient x row over the terms, for a block of parameters or of buffers, into ``out``.

    ``out`` and ``product`` (scratch) are f64[n] for the n elements of the interval.
    """
    buffers = interval[0] >= layout.buffer_start and layout.buffer_elements > 0
    fresh = True
    for term in terms:
        coefficient = term.buffer_coefficient if buffers else term.coefficient
        if coefficient == 0.0:
            continue
        target = out if fresh else product
        target.copy_(operand(term).values(term.row, interval))
        target.mul_(coefficient)  # not add_(..., alpha): that may fuse the two roundings, but only on some machines
        if not fresh:
            out.add_(product)
        fresh = False
    if fresh:
        out.zero_()
