"""Local-then-global equals flat, for random trees of regions, members, kinds, weights and bases (design §11, invariant 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from helpers.trees import Leaf, Tree, decoded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetddp.common.layout import Layout
from fleetddp.common.update import Kind, State, Tier, UpdateId

LAYOUT = Layout.of([("w", (3, 400)), ("b", (7,))], [("mean", (9,))])
MERGE = {"share": {"site": 0.7, "edge": 0.3}, "gradient_lr": 0.25, "tiers": {"site": {"discount": {"kind": "constant"}}}}


@dataclass(frozen=True)
class Plan:
    """One member: its region, and what it sends towards version 2."""

    node: str
    above: str
    tier: Tier
    kind: Kind
    base: int
    samples: float
    seed: int

    def values(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(LAYOUT.elements, generator=generator) * 10.0 ** (self.seed % 7 - 3)


@st.composite
def trees(draw: st.DrawFn) -> tuple[dict[str, str], list[Plan]]:
    """Regions by name, each with the one above it (at most three levels), and members anywhere in the tree."""
    regions: dict[str, str] = {}
    depth = {"": 0}
    for index in range(draw(st.integers(0, 4))):
        above = draw(st.sampled_from([name for name, level in depth.items() if level < 3]))
        regions[f"r{index}"], depth[f"r{index}"] = above, depth[above] + 1
    plans = [
        Plan(
            node=f"m{index}",
            above=draw(st.sampled_from(["", *regions])),
            tier=draw(st.sampled_from([Tier.EDGE, Tier.EDGE, Tier.SITE])),
            kind=draw(st.sampled_from([Kind.DELTA, Kind.DELTA, Kind.GRADIENT])),
            base=draw(st.integers(0, 1)),
            samples=draw(st.floats(0.5, 1e6)),
            seed=draw(st.integers(0, 2**31)),
        )
        for index in range(draw(st.integers(2, 8)))
    ]
    return regions, plans


def version_2(regions: dict[str, str], plans: list[Plan], region: dict[str, Any]) -> tuple[torch.Tensor, Tree]:
    """Version 1 is one update of m0; version 2 holds one update of each. The weights of version 2, and the tree."""
    first = torch.randn(LAYOUT.elements, generator=torch.Generator().manual_seed(1))
    window = {"preset": "fedbuff", "quorum": len(plans)}
    tree = Tree(LAYOUT, first, window=window, merge=MERGE, members={"lease_s": 1e6})
    for name, above in regions.items():
        tree.region(name, above, window={"preset": "sync"}, **region)
    leaves: dict[str, Leaf] = {plan.node: tree.leaf(plan.node, plan.above, plan.tier) for plan in plans}
    tree.settle()
    for round_ in range(2):
        ids: list[tuple[Leaf, UpdateId]] = []
        for plan in plans:
            leaf = leaves[plan.node]
            if round_ == 0:
                ids.append((leaf, leaf.send(torch.zeros(LAYOUT.elements), base=0)))
            else:
                ids.append((leaf, leaf.send(plan.values(), base=plan.base, samples=plan.samples, kind=plan.kind)))
        tree.settle()
        for leaf, update_id in ids:
            receipt = leaf.state(update_id)
            assert (receipt.state, receipt.version) == (State.MERGED, round_ + 1), receipt
    version, payload = tree.weights(2)
    assert version.updates == len(plans)
    for name in regions:
        assert tree.weights(2, name) == (version, payload), "the same bytes everywhere"
    return decoded(payload, LAYOUT, "float32"), tree


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees())
def test_local_then_global_equals_flat(drawn: tuple[dict[str, str], list[Plan]]) -> None:
    regions, plans = drawn
    flat, _ = version_2({}, [Plan(**{**vars_of(plan), "above": ""}) for plan in plans], {})
    tree, _ = version_2(regions, plans, {"codec": "float64"})
    # Design §4: n 2^-52 sum|w u| / sum(w), and one float32 rounding. Either side rounds its mean to float32, then the step.
    parameters = slice(0, LAYOUT.parameters)
    buffers = slice(LAYOUT.buffer_start, LAYOUT.elements)
    for part in (parameters, buffers):
        magnitude = torch.zeros_like(flat[part], dtype=torch.float64)
        for plan in plans:
            magnitude += plan.values()[part].double().abs()
        bound = (len(plans) + 8) * 2.0**-52 * magnitude
        steps = 2.0**-23 * torch.maximum(magnitude, flat[part].double().abs()) + 2.0**-126
        assert bool(((flat[part].double() - tree[part].double()).abs() <= bound + steps).all())


def vars_of(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}
