"""What a region's partials are made of: its window's updates as sums by (leaf tier, base version), with their ids (design §4).

A region applies no discount, no share and no outer step: those are the root's, which so counts every leaf update as if it had
received it itself. Row g of a partial is sum(w u) over the updates of group g; the rows of partials from below are added as they
are. w is what ``merge.plan`` multiplies a leaf update with: the samples of all the member's updates on that base that are sealed
with it, and the gradient's step. Buffers are summed with their samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from fleetddp.common.events import Sealing, Term
from fleetddp.common.merge import joint_samples
from fleetddp.common.scores import weighted_means
from fleetddp.common.transport.limits import MAX_GROUP_IDS, MAX_GROUPS, MAX_METRICS, MAX_RANGES
from fleetddp.common.update import Group, Kind, Tier, Update, UpdateHeader, UpdateId

Key = tuple[Tier, int]  # leaf tier, base version
MAX_ROWS = min(MAX_GROUPS, MAX_RANGES // 2)  # of one partial, which is sent as one stream: each row has two intervals


@dataclass(slots=True)
class _Row:
    """One group, as it is filled."""

    samples: list[float] = field(default_factory=list)
    buffer_samples: list[float] = field(default_factory=list)
    ids: list[UpdateId] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)


def keys(update: Update) -> list[Key]:
    """The groups that an update adds to."""
    header = update.header
    return [(g.tier, g.base_version) for g in header.groups] or [(header.tier, header.base_version)]


def loads(updates: Iterable[Update]) -> Iterator[list[Update]]:
    """Cut a window's updates, in the canonical order, so that each part fits one partial (``MAX_ROWS``, ``MAX_GROUP_IDS``)."""
    load: list[Update] = []
    groups: set[Key] = set()
    ids = 0
    for update in sorted(updates, key=lambda u: u.update_id):
        wider, more = groups | set(keys(update)), len(update.header.leaf_ids)
        if load and (len(wider) > MAX_ROWS or ids + more > MAX_GROUP_IDS):
            yield load
            load, wider, ids = [], set(keys(update)), 0
        load.append(update)
        groups, ids = wider, ids + more
    if load:
        yield load


def sealing_of(
    updates: Sequence[Update],
    update_id: UpdateId,
    *,
    codec: str,
    layout: str,
    gradient_lr: float,
    at: float,
    reason: str,
    residuals_from: int,
) -> Sealing:
    """The partial ``update_id`` of these updates (a load of ``loads``)."""
    ordered = sorted(updates, key=lambda u: u.update_id)
    rows: dict[Key, _Row] = {}
    joint = joint_samples(ordered)
    for update in ordered:
        _add(update, rows, joint, gradient_lr)
    found = sorted(rows.items())
    groups = tuple(
        Group(
            tier=tier,
            base_version=base,
            samples=math.fsum(row.samples),
            buffer_samples=math.fsum(row.buffer_samples),
            ids=tuple(sorted(row.ids)),
        )
        for (tier, base), row in found
    )
    header = UpdateHeader(
        update_id=update_id,
        kind=Kind.PARTIAL,
        tier=Tier.REGION,
        base_version=max(group.base_version for group in groups),
        codec=codec,
        layout=layout,
        steps=max(update.header.steps for update in ordered),
        seconds=max(update.header.seconds for update in ordered),
        metrics=dict(islice(weighted_means(ordered).items(), MAX_METRICS)),
        groups=groups,
    )
    return Sealing(
        header=header,
        at=at,
        terms=tuple(tuple(row.terms) for _, row in found),
        ids=tuple(update.update_id for update in ordered),
        reason=reason,
        residuals_from=residuals_from,
    )


def _add(update: Update, rows: dict[Key, _Row], joint: dict[tuple[str, int], float], gradient_lr: float) -> None:
    header = update.header
    for index, key in enumerate(keys(update)):
        row = rows.setdefault(key, _Row())
        if header.groups:
            group = header.groups[index]
            samples, buffer_samples, ids = group.samples, group.buffer_samples, group.ids
            coefficient, buffer_coefficient = 1.0, 1.0 if buffer_samples else 0.0
        else:
            buffer_samples = update.samples if header.kind is Kind.DELTA else 0.0
            samples, ids = update.samples, (update.update_id,)
            coefficient = 1.0  # of soft labels: they hold their weights
            if header.kind is not Kind.LOGITS:
                is_gradient = header.kind is Kind.GRADIENT
                coefficient = joint[update.update_id.node, header.base_version] * (gradient_lr if is_gradient else 1.0)
            buffer_coefficient = buffer_samples
        row.samples.append(samples)
        row.buffer_samples.append(buffer_samples)
        row.ids.extend(ids)
        row.terms.append(
            Term(update_id=update.update_id, row=index, coefficient=coefficient, buffer_coefficient=buffer_coefficient)
        )
