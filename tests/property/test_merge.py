"""Invariants of a merge (design §11): arrival order, the blocks it is done in and the tree it comes through change nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from helpers.merging import encoded, make_update
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetddp.common.config import Constant, Hinge, MergeConfig, Polynomial, StalenessConfig
from fleetddp.common.events import Term
from fleetddp.common.layout import Layout
from fleetddp.common.merge import Operand, plan, weighted_sum
from fleetddp.common.payload import Geometry
from fleetddp.common.update import Group, Interval, Kind, Tier, Update, UpdateId

LAYOUT = Layout.of([("w", (40, 30)), ("tail", (5,))], [("mean", (700,))])
PARAMETERS, BUFFERS = (0, LAYOUT.parameters), (LAYOUT.buffer_start, LAYOUT.elements)
VERSION = 6


@dataclass(frozen=True)
class Leaf:
    """A leaf update, its values, and the region it would go through."""

    update: Update
    values: torch.Tensor
    region: int


@st.composite
def leaves(draw: st.DrawFn) -> list[Leaf]:
    """One to twelve updates of up to six members; a member has one tier and one region, and may send several updates."""
    found = []
    for sequence in range(draw(st.integers(1, 12))):
        member = draw(st.integers(0, 5))
        update = make_update(
            f"m{member}",
            sequence=sequence,
            tier=Tier.SITE if member % 3 == 0 else Tier.EDGE,
            kind=draw(st.sampled_from([Kind.DELTA, Kind.DELTA, Kind.GRADIENT])),
            base=draw(st.integers(0, VERSION - 1)),
            samples=draw(st.floats(0.5, 1e6)),
            codec=draw(st.sampled_from(["float32", "bfloat16", "int8"])),
        )
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        values = torch.randn(LAYOUT.elements, generator=generator) * 10.0 ** draw(st.integers(-6, 6))
        found.append(Leaf(update, values, region=member % 2))
    return found


configs = st.builds(
    MergeConfig,
    share=st.sampled_from(["samples", {Tier.SITE: 0.7, Tier.EDGE: 0.3}]),
    staleness=st.builds(StalenessConfig, discount=st.sampled_from([Constant(), Polynomial(a=0.5), Hinge(a=2.0, b=1.0)])),
    tiers=st.sampled_from([{}, {Tier.EDGE: StalenessConfig(discount=Polynomial(a=1.5))}]),
    gradient_lr=st.floats(1e-3, 1.0),
)


class Exact(Operand):
    """Rows that no codec has touched, in whatever precision they are given."""

    def __init__(self, *rows: torch.Tensor) -> None:
        self._rows = rows

    def values(self, row: int, interval: Interval) -> torch.Tensor:
        return self._rows[row][slice(*interval)]


def total(terms: Sequence[Term], operands: dict[UpdateId, Operand], interval: Interval, block: int = 2**20) -> torch.Tensor:
    pieces = []
    for start in range(interval[0], interval[1], block):
        stop = min(start + block, interval[1])
        out, product = (torch.empty(stop - start, dtype=torch.float64) for _ in range(2))
        weighted_sum(lambda term: operands[term.update_id], terms, LAYOUT, (start, stop), out=out, product=product)
        pieces.append(out)
    return torch.cat(pieces)


@settings(max_examples=60, deadline=None)
@given(leaves(), configs, st.randoms(use_true_random=False), st.sampled_from([512, 1024]))
def test_neither_arrival_order_nor_block_size_changes_a_byte(
    found: list[Leaf], config: MergeConfig, random: object, block: int
) -> None:
    operands: dict[UpdateId, Operand] = {}
    for leaf in found:
        data = encoded(leaf.update.header, LAYOUT, [leaf.values])
        operands[leaf.update.update_id] = Operand(
            Geometry.of_update(leaf.update.header, LAYOUT), lambda a, b, data=data: data[a:b]
        )
    updates = [leaf.update for leaf in found]
    terms = plan(updates, VERSION, config)
    random.shuffle(updates)  # type: ignore[attr-defined]
    assert plan(updates, VERSION, config) == terms
    for interval in (PARAMETERS, BUFFERS):
        assert torch.equal(total(terms, operands, interval), total(terms, operands, interval, block))


def seal(found: Sequence[Leaf], region: int, gradient_lr: float) -> tuple[Update, torch.Tensor]:
    """What a region sends: for each (tier, base), sum(w u) and sum(w b) over its leaf updates, in float64."""
    groups: dict[tuple[Tier, int], list[Leaf]] = defaultdict(list)
    for leaf in found:
        groups[leaf.update.header.tier, leaf.update.header.base_version].append(leaf)
    described, rows = [], []
    for (tier, base), members in sorted(groups.items()):
        row = torch.zeros(LAYOUT.elements, dtype=torch.float64)
        buffered = 0.0
        for leaf in members:
            # Several updates of one member on one base are parts of one: each counts with the samples of all.
            weight = sum(other.update.samples for other in members if other.update.update_id.node == leaf.update.update_id.node)
            scale = gradient_lr if leaf.update.header.kind is Kind.GRADIENT else 1.0
            row[slice(*PARAMETERS)] += weight * scale * leaf.values[slice(*PARAMETERS)].double()
            if leaf.update.header.kind is Kind.DELTA:
                row[slice(*BUFFERS)] += leaf.update.samples * leaf.values[slice(*BUFFERS)].double()
                buffered += leaf.update.samples
        ids = tuple(leaf.update.update_id for leaf in members)
        samples = sum(leaf.update.samples for leaf in members)
        described.append(Group(tier=tier, base_version=base, samples=samples, buffer_samples=buffered, ids=ids))
        rows.append(row)
    partial = make_update(f"region{region}", kind=Kind.PARTIAL, tier=Tier.REGION, groups=tuple(described))
    return partial, torch.stack(rows)


@settings(max_examples=80, deadline=None)
@given(leaves(), configs)
def test_local_then_global_equals_flat(found: list[Leaf], config: MergeConfig) -> None:
    flat_terms = plan([leaf.update for leaf in found], VERSION, config)
    flat_operands: dict[UpdateId, Operand] = {leaf.update.update_id: Exact(leaf.values) for leaf in found}
    sealed: list[Update] = []
    operands: dict[UpdateId, Operand] = {}
    for region in {leaf.region for leaf in found}:
        partial, rows = seal([leaf for leaf in found if leaf.region == region], region, config.gradient_lr)
        sealed.append(partial)
        operands[partial.update_id] = Exact(*rows)
    terms = plan(sealed, VERSION, config)
    for interval in (PARAMETERS, BUFFERS):
        flat, tree = total(flat_terms, flat_operands, interval), total(terms, operands, interval)
        # Design §4: n 2^-52 sum|w u| / sum(w), and one float32 rounding of the result.
        buffers = interval == BUFFERS
        magnitude = torch.zeros_like(flat)
        for term in flat_terms:
            coefficient = term.buffer_coefficient if buffers else term.coefficient
            magnitude += coefficient * flat_operands[term.update_id].values(0, interval).double().abs()
        bound = (len(found) + 4) * 2.0**-52 * magnitude  # 4: each side also rounds its coefficients twice
        assert ((flat - tree).abs() <= bound).all()
        assert ((flat.float() - tree.float()).abs() <= bound + 2.0**-23 * flat.abs()).all()


@settings(max_examples=60, deadline=None)
@given(leaves(), configs)
def test_coefficients_never_overshoot(found: list[Leaf], config: MergeConfig) -> None:
    """Buffers are a true mean. Parameters step at most as far as a mean would, where each member sent one delta a base."""
    terms = plan([leaf.update for leaf in found], VERSION, config)
    kinds = {leaf.update.update_id: leaf.update.header.kind for leaf in found}
    if any(kind is Kind.DELTA for kind in kinds.values()):
        assert abs(sum(t.buffer_coefficient for t in terms) - 1.0) < 1e-12
    one_each = {(leaf.update.update_id.node, leaf.update.header.base_version): leaf.update for leaf in found}
    single = plan(list(one_each.values()), VERSION, config)
    assert sum(t.coefficient for t in single) <= 1.0 + 1e-12
    assert all(t.coefficient > 0 for t in terms)
    assert all((t.buffer_coefficient > 0) == (kinds[t.update_id] is Kind.DELTA) for t in terms)
