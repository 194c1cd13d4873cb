"""What a restarted aggregator learns from its journal, and the JSON that the journal keeps of the frozen value types."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fleetddp.common.events import Decision, Joined, Sealing, Term
from fleetddp.common.fragments import Changes
from fleetddp.common.layout import Layout
from fleetddp.common.update import (
    Fragment,
    Group,
    Kind,
    Receipt,
    Slice,
    State,
    Tier,
    Update,
    UpdateHeader,
    UpdateId,
    Version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The durable state of a run; ``empty`` for one that begins."""

    run: str
    layout: Layout | None = None
    version: Version | None = None  # the newest
    began_at: float | None = None  # when version 0 was published
    window_opened_at: float | None = None
    accepted: tuple[Update, ...] = ()  # acknowledged and not settled, in the order they were accepted
    decision: Decision | None = None  # journaled, its version not yet published
    high_water: Mapping[tuple[str, int], int] = field(default_factory=dict)  # (node, incarnation) -> largest sequence merged
    gaps: Mapping[tuple[str, int], Collection[int]] = field(default_factory=dict)  # below those: sequences not merged
    merged: Mapping[UpdateId, int] = field(default_factory=dict)  # of the versions kept: id -> the version it is in
    inside: Collection[UpdateId] = frozenset()  # of those: leaf updates that came in a region's partial
    partials: Collection[UpdateId] = frozenset()  # of those: the partials themselves
    finished: str = ""
    changes: Changes | None = None  # of the fragments; None where the layout is not cut

    @classmethod
    def empty(cls, run: str) -> Recovered:
        """The state of a new run."""
        return cls(run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredRegion:
    """What a region's journal holds besides: who it is, its partials, its parent's rules."""

    node: str
    incarnation: int  # of this process: higher than any before
    sequence: int = 0  # of its newest partial
    sealings: tuple[
        tuple[Sealing, Update | None], ...
    ] = ()  # decided and not concluded, in order; with the partial, if it is made
    rules: Joined | None = None
    closed: tuple[Receipt, ...] = ()  # of updates that were settled otherwise than by a version


def update_to_json(update: Update) -> str:
    """The journal row of an accepted update."""
    header = update.header
    return json.dumps(
        {
            "id": header.update_id,
            "kind": header.kind.value,
            "tier": header.tier.value,
            "base_version": header.base_version,
            "codec": header.codec,
            "layout": header.layout,
            "steps": header.steps,
            "seconds": header.seconds,
            "metrics": dict(header.metrics),
            "fragment": None if header.fragment is None else [header.fragment.index, header.fragment.count],
            "covers": header.covers,
            "groups": [[g.tier.value, g.base_version, g.samples, g.buffer_samples, g.ids] for g in header.groups],
            "layout_spec": header.layout_spec.decode(),
            "samples": update.samples,
            "squared_norm": update.squared_norm,
            "payload_bytes": update.payload_bytes,
            "slices": [[s.intervals, s.samples, s.digest] for s in update.slices],
        }
    )


def update_from_json(text: str) -> Update:
    """The inverse of ``update_to_json``."""
    row = json.loads(text)
    header = UpdateHeader(
        update_id=UpdateId(*row["id"]),
        kind=Kind(row["kind"]),
        tier=Tier(row["tier"]),
        base_version=row["base_version"],
        codec=row["codec"],
        layout=row["layout"],
        steps=row["steps"],
        seconds=row["seconds"],
        metrics=row["metrics"],
        fragment=Fragment(*row["fragment"]) if row.get("fragment") else None,
        covers=tuple((start, stop) for start, stop in row.get("covers", ())),
        groups=tuple(_group(*group) for group in row["groups"]),
        layout_spec=row["layout_spec"].encode(),
    )
    return Update(
        header=header,
        samples=row["samples"],
        squared_norm=row["squared_norm"],
        payload_bytes=row["payload_bytes"],
        slices=tuple(_slice(*part) for part in row["slices"]),
    )


def decision_to_json(decision: Decision) -> str:
    """The journal row of a decision."""
    return json.dumps(
        {
            "version": decision.version,
            "at": decision.at,
            "terms": [[t.update_id, t.row, t.coefficient, t.buffer_coefficient, t.fragment] for t in decision.terms],
            "changes": None if decision.changes is None else decision.changes.at,
            "ids": decision.ids,
            "leaf_ids": decision.leaf_ids,
            "reason": decision.reason,
            "metrics": dict(decision.metrics),
        }
    )


def decision_from_json(text: str) -> Decision:
    """The inverse of ``decision_to_json``."""
    row = json.loads(text)
    return Decision(
        version=row["version"],
        at=row["at"],
        terms=tuple(_term(*term) for term in row["terms"]),
        ids=_ids(row["ids"]),
        leaf_ids=_ids(row["leaf_ids"]),
        reason=row["reason"],
        changes=changes_from_json(row.get("changes")),
        metrics=row["metrics"],
    )


def changes_from_json(at: Sequence[Sequence[int]] | None) -> Changes | None:
    """Of the fragments, as ``Changes.at`` is written."""
    return None if at is None else Changes(tuple(tuple(versions) for versions in at))


def sealing_to_json(sealing: Sealing) -> str:
    """The journal row of a sealing."""
    bare = Update(header=sealing.header, samples=0.0, squared_norm=0.0, payload_bytes=0, slices=())
    terms = [[[t.update_id, t.row, t.coefficient, t.buffer_coefficient] for t in group] for group in sealing.terms]
    rest = {"at": sealing.at, "ids": sealing.ids, "reason": sealing.reason, "residuals_from": sealing.residuals_from}
    return json.dumps({"header": update_to_json(bare), "terms": terms, **rest})


def sealing_from_json(text: str) -> Sealing:
    """The inverse of ``sealing_to_json``."""
    row = json.loads(text)
    return Sealing(
        header=update_from_json(row["header"]).header,
        at=row["at"],
        terms=tuple(tuple(_term(*term) for term in group) for group in row["terms"]),
        ids=_ids(row["ids"]),
        reason=row["reason"],
        residuals_from=row["residuals_from"],
    )


def receipt_to_json(receipt: Receipt) -> str:
    """The journal row of a final receipt."""
    return json.dumps([receipt.update_id, receipt.state.value, receipt.version, receipt.reason, receipt.message])


def receipt_from_json(text: str) -> Receipt:
    """The inverse of ``receipt_to_json``."""
    update_id, state, version, reason, message = json.loads(text)
    return Receipt(update_id=UpdateId(*update_id), state=State(state), version=version, reason=reason, message=message)


def rules_to_json(rules: Joined) -> str:
    """The journal's note of what a parent said at a join; its receipts are left out."""
    return json.dumps({**{f.name: getattr(rules, f.name) for f in fields(rules)}, "receipts": ()})


def rules_from_json(text: str) -> Joined:
    """The inverse of ``rules_to_json``."""
    row = json.loads(text)
    return Joined(**{**row, "codecs": tuple(row["codecs"]), "receipts": ()})


def version_to_json(version: Version) -> str:
    """The journal row of a version."""
    return json.dumps(
        {
            "number": version.number,
            "layout": version.layout,
            "codec": version.codec,
            "payload_bytes": version.payload_bytes,
            "digest": version.digest,
            "published_at": version.published_at,
            "updates": version.updates,
            "changed": version.changed,
            "metrics": dict(version.metrics),
        }
    )


def version_from_json(text: str) -> Version:
    """The inverse of ``version_to_json``."""
    row = json.loads(text)
    return Version(**{**row, "changed": tuple(row.get("changed", ()))})


def _ids(rows: Sequence[Sequence[Any]]) -> tuple[UpdateId, ...]:
    return tuple(UpdateId(*row) for row in rows)


def _group(tier: str, base_version: int, samples: float, buffer_samples: float, ids: Sequence[Sequence[Any]]) -> Group:
    return Group(tier=Tier(tier), base_version=base_version, samples=samples, buffer_samples=buffer_samples, ids=_ids(ids))


def _slice(intervals: Sequence[Sequence[int]], samples: float, digest: int) -> Slice:
    return Slice(intervals=tuple((start, stop) for start, stop in intervals), samples=samples, digest=digest)


def _term(update_id: Sequence[Any], row: int, coefficient: float, buffer_coefficient: float, fragment: int = 0) -> Term:
    return Term(
        update_id=UpdateId(*update_id),
        row=row,
        fragment=fragment,
        coefficient=coefficient,
        buffer_coefficient=buffer_coefficient,
    )
