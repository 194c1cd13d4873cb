"""Soft labels (design §9): whatever members cover, consensus is theirs by item, in any order and through any region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from helpers.merging import encoded, make_update
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetddp.common import codecs, labels
from fleetddp.common.config import Constant, Hinge, MergeConfig, Polynomial, StalenessConfig
from fleetddp.common.events import Term
from fleetddp.common.layout import Layout
from fleetddp.common.merge import Operand, discount, plan, weighted_sum
from fleetddp.common.payload import Geometry
from fleetddp.common.sealing import sealing_of
from fleetddp.common.update import Kind, Tier, Update, UpdateId

ITEMS, CLASSES, VERSION = 200, 3, 5
WIDTH = CLASSES + 1
LAYOUTS = {by_tier: labels.layout_of("set", "0" * 64, ITEMS, CLASSES, by_tier=by_tier) for by_tier in (False, True)}


@dataclass(frozen=True)
class Leaf:
    """An update, its rows as they are after its codec (zeros where it covers nothing), and the region it would go through."""

    update: Update
    rows: Tensor  # f32[elements]
    operand: Operand
    region: int


def leaf_of(update: Update, layout: Layout, values: Tensor, region: int) -> Leaf:
    data = encoded(update.header, layout, [values])
    operand = Operand(Geometry.of_update(update.header, layout), lambda start, stop: data[start:stop])
    return Leaf(update, operand.values(0, (0, layout.elements)).clone(), operand, region)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[Layout, list[Leaf]]:
    """One to eight updates of up to four members."""
    layout = LAYOUTS[draw(st.booleans())]
    found = []
    for sequence in range(draw(st.integers(1, 8))):
        member = draw(st.integers(0, 3))
        tier = Tier.SITE if member == 0 else Tier.EDGE
        edges = sorted(draw(st.sets(st.integers(0, ITEMS), min_size=2, max_size=8)))
        items = list(zip(edges[::2], edges[1::2], strict=False))
        codec = draw(st.sampled_from([f"prob16:{CLASSES}", f"probtop:2:{CLASSES}"]))
        bare = make_update(f"m{member}", sequence=sequence, tier=tier, base=draw(st.integers(0, VERSION - 1)), codec=codec)
        header = replace(bare.header, kind=Kind.LOGITS, layout=layout.fingerprint, covers=labels.elements(layout, tier, items))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        w = 10.0 ** (4 * torch.rand(layout.elements // WIDTH, 1, generator=generator) - 2)
        p = torch.softmax(3 * torch.randn(len(w), CLASSES, generator=generator), dim=1)
        values = torch.cat([w * p, w], dim=1).flatten()
        found.append(leaf_of(replace(bare, header=header), layout, values, region=member % 2))
    return layout, found


configs = st.builds(
    MergeConfig,
    staleness=st.builds(StalenessConfig, discount=st.sampled_from([Constant(), Polynomial(a=0.5), Hinge(a=2.0, b=1.0)])),
    tiers=st.sampled_from([{}, {Tier.EDGE: StalenessConfig(discount=Polynomial(a=1.5))}]),
)


def total(terms: Sequence[Term], operands: dict[UpdateId, Operand], layout: Layout, block: int = 2**20) -> Tensor:
    """f64[elements], added up block by block."""
    pieces = []
    for start in range(0, layout.elements, block):
        stop = min(start + block, layout.elements)
        out, product = (torch.empty(stop - start, dtype=torch.float64) for _ in range(2))
        weighted_sum(lambda term: operands[term.update_id], terms, layout, (start, stop), out=out, product=product)
        pieces.append(out)
    return torch.cat(pieces)


@settings(max_examples=40, deadline=None)
@given(fleets(), configs, st.randoms(use_true_random=False), st.sampled_from([512, 150 * WIDTH, 333]))
def test_each_item_is_the_sum_of_what_was_said_of_it_in_any_order_and_any_blocks(
    fleet: tuple[Layout, list[Leaf]], config: MergeConfig, random: object, block: int
) -> None:
    layout, found = fleet
    updates = [leaf.update for leaf in found]
    terms = plan(updates, VERSION, config, sums=True)
    random.shuffle(updates)  # type: ignore[attr-defined]
    assert plan(updates, VERSION, config, sums=True) == terms
    operands = {leaf.update.update_id: leaf.operand for leaf in found}
    merged = total(terms, operands, layout)
    assert torch.equal(total(terms, operands, layout, block), merged)
    by_hand = torch.zeros_like(merged)
    for leaf in sorted(found, key=lambda leaf: leaf.update.update_id):
        header = leaf.update.header
        late = discount(config.for_tier(header.tier).discount, VERSION - 1 - header.base_version)
        for start, stop in header.covers:
            by_hand[start:stop] += late * leaf.rows[start:stop].double()
    assert torch.equal(merged, by_hand)
    covered = torch.zeros(layout.elements, dtype=torch.bool)
    for leaf in found:
        for start, stop in leaf.update.header.covers:
            covered[start:stop] = True
    weights = merged.view(-1, WIDTH)[:, -1]
    assert torch.equal(weights > 0, covered.view(-1, WIDTH)[:, -1])
    consensus = merged.view(-1, WIDTH)[weights > 0]
    assert ((consensus[:, :-1].sum(1) / consensus[:, -1] - 1).abs() < 1e-5).all()


@settings(max_examples=40, deadline=None)
@given(fleets(), configs)
def test_local_then_global_equals_flat(fleet: tuple[Layout, list[Leaf]], config: MergeConfig) -> None:
    layout, found = fleet
    operands = {leaf.update.update_id: leaf.operand for leaf in found}
    terms = plan([leaf.update for leaf in found], VERSION, config, sums=True)
    flat = total(terms, operands, layout)
    sealed: list[Update] = []
    above: dict[UpdateId, Operand] = {}
    codec = codecs.get(f"prob64:{CLASSES}")
    for region in {leaf.region for leaf in found}:
        mine = [leaf.update for leaf in found if leaf.region == region]
        sealing = sealing_of(
            mine,
            UpdateId(f"region{region}", 1, 1),
            codec=codec.spec,
            layout=layout.fingerprint,
            gradient_lr=0.1,
            at=0.0,
            reason="",
            residuals_from=0,
        )
        data = b"".join(codec.encode(total(group, operands, layout)).numpy().tobytes() for group in sealing.terms)
        geometry = Geometry.of_update(sealing.header, layout)
        above[sealing.update_id] = Operand(geometry, lambda start, stop, data=data: data[start:stop])
        sealed.append(Update(header=sealing.header, samples=1.0, squared_norm=0.0, payload_bytes=len(data), slices=()))
    tree = total(plan(sealed, VERSION, config, sums=True), above, layout)
    assert torch.equal(tree > 0, flat > 0)
    # n additions and one product more or less, each rounded once; all terms are of one sign
    assert ((tree - flat).abs() <= (len(found) + 2) * 2.0**-52 * flat).all()
