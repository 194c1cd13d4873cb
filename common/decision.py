"""What an aggregator has decided: of which updates a version, or a partial, is made, and what became of a partial.

Decisions are journaled before anything is made of them; from then on the bytes are fixed. All are frozen values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleetddp.common.fragments import Changes
from fleetddp.common.update import Receipt, UpdateHeader, UpdateId


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """How one update's row enters a merge. Coefficients are final: weight, discount, share and scale multiplied."""

    update_id: UpdateId
    row: int  # 0, or the group's index in a partial
    coefficient: float  # of the parameters; the outer gradient is sum(coefficient * u)
    fragment: int = 0  # of the layout, where it is cut: the one that these coefficients are for
    buffer_coefficient: float  # of the buffers, whose mean is sum(buffer_coefficient * b) (all 0: no term carries buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What version ``version`` is made of. Journaled before merging; from then on the bytes are fixed."""

    version: int
    at: float
    terms: tuple[Term, ...]  # sorted by (fragment, update_id, row): the canonical order
    ids: tuple[UpdateId, ...]  # of the accepted updates merged (sorted)
    leaf_ids: tuple[UpdateId, ...]  # those they stand for
    reason: str
    changes: Changes | None = None  # of the fragments, this version's among them; None where the layout is not cut
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """What a partial is made of. Journaled before it is made; from then on its bytes are fixed."""

    header: UpdateHeader
    at: float
    terms: tuple[tuple[Term, ...], ...]  # of each of the header's groups, in the canonical order
    ids: tuple[UpdateId, ...]  # of the accepted updates in it (sorted)
    reason: str
    residuals_from: int = 0  # a residual of an older version is dropped, not carried

    @property
    def update_id(self) -> UpdateId:
        """The partial's identity."""
        return self.header.update_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The end of a partial (``partial`` None: of single updates that were in none)."""

    partial: UpdateId | None
    receipts: tuple[Receipt, ...] = ()  # final ones, of accepted updates and of the leaf updates in them
    dropped: tuple[UpdateId, ...] = ()  # accepted partials of regions below that are theirs again: forget them
    undo: bool = False  # the partial will not be merged: its residual is taken back
    instead: tuple[Sealing, ...] = ()  # sealed in its place, of what is left
