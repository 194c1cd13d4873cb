from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from helpers.merging import encoded, make_update

from fleetddp.common.config import Constant, Discount, Hinge, MergeConfig, Polynomial, StalenessConfig, parse
from fleetddp.common.errors import ConfigError
from fleetddp.common.events import Term
from fleetddp.common.layout import Layout
from fleetddp.common.merge import Operand, decision_on, discount, plan, weighted_sum
from fleetddp.common.payload import Geometry
from fleetddp.common.update import Group, Interval, Kind, Tier, Update, UpdateId

AS_ONE = MergeConfig(staleness=StalenessConfig(discount=Constant()))
SHARES = MergeConfig(share={Tier.SITE: 0.7, Tier.EDGE: 0.3}, staleness=StalenessConfig(discount=Constant()))


def coefficients(updates: Sequence[Update], version: int = 1, config: MergeConfig = AS_ONE) -> list[float]:
    return [term.coefficient for term in plan(updates, version, config)]


def buffer_coefficients(updates: Sequence[Update], version: int = 1, config: MergeConfig = AS_ONE) -> list[float]:
    return [term.buffer_coefficient for term in plan(updates, version, config)]


def merged(terms: Sequence[Term], operands: dict[UpdateId, Operand], layout: Layout, interval: Interval) -> torch.Tensor:
    out, product = (torch.full((interval[1] - interval[0],), torch.nan, dtype=torch.float64) for _ in range(2))
    weighted_sum(lambda term: operands[term.update_id], terms, layout, interval, out=out, product=product)
    return out


# ---- discounts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "staleness", "expected"),
    [
        (Constant(), 0, 1.0),
        (Constant(), 9, 1.0),
        (Polynomial(a=0.5), 0, 1.0),
        (Polynomial(a=0.5), 3, 0.5),
        (Polynomial(a=2.0), 1, 0.25),
        (Polynomial(a=0.0), 7, 1.0),
        (Hinge(a=10.0, b=4.0), 4, 1.0),
        (Hinge(a=10.0, b=4.0), 5, 1 / 11),
        (Hinge(a=0.5, b=0.0), 2, 0.5),
    ],
)
def test_discounts_by_hand(rule: Discount, staleness: int, expected: float) -> None:
    assert discount(rule, staleness) == expected


# ---- plan ----------------------------------------------------------------------------------------------------------------


def test_weights_are_samples_over_all_samples() -> None:
    assert coefficients([make_update("a", samples=1), make_update("b", samples=3)]) == [0.25, 0.75]


def test_one_update_alone_counts_exactly_one() -> None:
    for samples in (1.0, 3.0, 49.0, 1e9, 0.1):
        assert coefficients([make_update("a", samples=samples)]) == [1.0]
        assert coefficients([make_update("a", samples=samples)], config=SHARES) == [1.0]


def test_terms_are_in_canonical_order_whatever_the_order_of_arrival() -> None:
    updates = [make_update("b"), make_update("a", sequence=2), make_update("a", sequence=1), make_update("B")]
    terms = plan(updates, 1, AS_ONE)
    assert [t.update_id for t in terms] == [UpdateId("B", 1, 0), UpdateId("a", 1, 1), UpdateId("a", 1, 2), UpdateId("b", 1, 0)]
    assert plan(updates[::-1], 1, AS_ONE) == terms


def test_a_stale_window_takes_a_smaller_step() -> None:
    config = MergeConfig(staleness=StalenessConfig(discount=Polynomial(a=0.5)))
    # Alone and 3 versions late: divided by sum(w), not by sum(w d), else it would count 1.
    assert coefficients([make_update("a", samples=5, base=2)], version=6, config=config) == [0.5]
    fresh, late = make_update("a", samples=1, base=5), make_update("b", samples=3, base=2)
    assert coefficients([fresh, late], version=6, config=config) == [0.25, 0.375]


def test_staleness_is_counted_from_the_version_merged_into() -> None:
    config = MergeConfig(staleness=StalenessConfig(discount=Hinge(a=1.0, b=0.0)))
    assert coefficients([make_update("a", base=4)], version=5, config=config) == [1.0]
    assert coefficients([make_update("a", base=3)], version=5, config=config) == [0.5]


def test_a_tier_may_have_its_own_discount() -> None:
    config = AS_ONE.model_copy(update={"tiers": {Tier.EDGE: StalenessConfig(discount=Polynomial(a=1.0))}})
    updates = [make_update("e", base=0), make_update("s", base=0, tier=Tier.SITE)]
    assert coefficients(updates, version=2, config=config) == [0.25, 0.5]


def test_shares_mix_the_means_of_the_tiers() -> None:
    updates = [make_update("e1", samples=1), make_update("e2", samples=3), make_update("s", samples=1000, tier=Tier.SITE)]
    assert coefficients(updates, config=SHARES) == pytest.approx([0.075, 0.225, 0.7], abs=1e-15)


def test_an_absent_tier_gives_its_share_to_the_rest() -> None:
    updates = [make_update("e1", samples=1), make_update("e2", samples=3)]
    assert coefficients(updates, config=SHARES) == [0.25, 0.75]


def test_shares_need_not_add_up_to_one() -> None:
    config = SHARES.model_copy(update={"share": {Tier.SITE: 7.0, Tier.EDGE: 3.0}})
    updates = [make_update("e"), make_update("s", tier=Tier.SITE)]
    assert coefficients(updates, config=config) == pytest.approx([0.3, 0.7], abs=1e-15)


@pytest.mark.parametrize("share", [{"site": 1.0}, {}, {"site": 0.5, "edge": 0.3, "region": 0.2}])
def test_shares_that_do_not_name_the_both_tiers_are_refused(share: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"merge\.share: .*both tiers"):
        parse({"merge": {"share": share}})


def test_several_updates_of_one_member_on_one_base_are_added() -> None:
    # a's two updates are halves of one: u1 + u2 with weight 2 + 4; b weighs 6.
    updates = [make_update("a", samples=2, sequence=1), make_update("a", samples=4, sequence=2), make_update("b", samples=6)]
    assert coefficients(updates) == [0.5, 0.5, 0.5]
    # On different bases they are separate updates.
    apart = [make_update("a", samples=2), make_update("a", samples=4, base=1, sequence=1), make_update("b", samples=6)]
    assert coefficients(apart, version=2) == pytest.approx([2 / 12, 4 / 12, 6 / 12])


def test_a_gradient_is_the_delta_of_one_local_step() -> None:
    config = AS_ONE.model_copy(update={"gradient_lr": 0.5})
    updates = [make_update("a", samples=1), make_update("g", samples=3, kind=Kind.GRADIENT)]
    assert coefficients(updates, config=config) == [0.25, 0.375]
    assert buffer_coefficients(updates, config=config) == [1.0, 0.0]


def test_buffers_are_a_weighted_mean_that_staleness_does_not_shrink() -> None:
    config = MergeConfig(staleness=StalenessConfig(discount=Polynomial(a=1.0)))
    assert buffer_coefficients([make_update("a", samples=5, base=0)], version=8, config=config) == [1.0]
    updates = [make_update("a", samples=1, base=1), make_update("b", samples=2, base=0), make_update("g", kind=Kind.GRADIENT)]
    assert buffer_coefficients(updates, version=2, config=config) == [0.5, 0.5, 0.0]


def test_a_discount_that_leaves_nothing_changes_nothing() -> None:
    config = MergeConfig(staleness=StalenessConfig(discount=Polynomial(a=2000.0)))
    (term,) = plan([make_update("a", samples=3.0)], 5, config)
    assert (term.coefficient, term.buffer_coefficient) == (0.0, 0.0)


def test_metrics_too_large_to_be_averaged_are_left_out() -> None:
    updates = [make_update(node, samples=10.0) for node in "ab"]
    updates = [replace(u, header=replace(u.header, metrics={"loss": 1e308, "accuracy": 0.5})) for u in updates]
    assert decision_on(updates, 1, 7.0, "why", MergeConfig()).metrics == {"accuracy": 0.5}


def test_buffers_know_no_shares() -> None:
    updates = [make_update("e", samples=1), make_update("s", samples=3, tier=Tier.SITE)]
    assert buffer_coefficients(updates, config=SHARES) == [0.25, 0.75]


def test_gradients_alone_leave_the_buffers() -> None:
    assert buffer_coefficients([make_update("g", kind=Kind.GRADIENT)]) == [0.0]


def group(tier: Tier, base: int, samples: float, *ids: str, buffer_samples: float | None = None) -> Group:
    held = samples if buffer_samples is None else buffer_samples
    return Group(tier=tier, base_version=base, samples=samples, buffer_samples=held, ids=tuple(UpdateId(i, 1, 0) for i in ids))


def test_a_partial_is_weighed_by_group() -> None:
    config = MergeConfig(
        share={Tier.SITE: 0.5, Tier.EDGE: 0.5},
        staleness=StalenessConfig(discount=Constant()),
        tiers={Tier.EDGE: StalenessConfig(discount=Polynomial(a=1.0))},
    )
    groups = (group(Tier.EDGE, 1, 6, "x", "y", buffer_samples=4), group(Tier.EDGE, 0, 2, "z"), group(Tier.SITE, 1, 10, "s"))
    partial = make_update("r", kind=Kind.PARTIAL, tier=Tier.REGION, groups=groups, samples=18)
    terms = plan([partial, make_update("e", samples=2, base=1)], 2, config)
    assert [(t.update_id.node, t.row) for t in terms] == [("e", 0), ("r", 0), ("r", 1), ("r", 2)]
    # Edge: 2 + 6 + 2 samples; rows hold sum(w u). Buffers: 2 + 4 + 2/2 + 10.
    assert [t.coefficient for t in terms] == pytest.approx([0.5 * 2 / 10, 0.5 / 10, 0.5 * 0.5 / 10, 0.5 / 10])
    assert [t.buffer_coefficient for t in terms] == pytest.approx([2 / 17, 1 / 17, 0.5 / 17, 1 / 17])


def test_a_group_of_gradients_only_has_no_say_on_buffers() -> None:
    groups = (group(Tier.EDGE, 0, 6, "x", buffer_samples=0.0), group(Tier.SITE, 0, 2, "s"))
    partial = make_update("r", kind=Kind.PARTIAL, tier=Tier.REGION, groups=groups)
    assert buffer_coefficients([partial]) == [0.0, 0.5]


# ---- weighted sum --------------------------------------------------------------------------------------------------------

LAYOUT = Layout.of([("w", (600,))], [("b", (3,))])


def operand(update: Update, *rows: torch.Tensor) -> Operand:
    data = encoded(update.header, LAYOUT, rows)
    return Operand(Geometry.of_update(update.header, LAYOUT), lambda start, stop: data[start:stop])


def test_weighted_sum_is_float64_and_keeps_parameters_and_buffers_apart() -> None:
    torch.manual_seed(0)
    updates = [make_update("a", samples=1), make_update("b", samples=2), make_update("g", samples=4, kind=Kind.GRADIENT)]
    rows = [torch.randn(LAYOUT.elements) for _ in updates]
    operands = {u.update_id: operand(u, row) for u, row in zip(updates, rows, strict=True)}
    terms = plan(updates, 1, AS_ONE)
    parameters = merged(terms, operands, LAYOUT, (0, 600))
    for i in range(600):  # by hand, in Python's float64
        a, b, g = (float(row[i]) for row in rows)
        assert parameters[i].item() == (a * (1 / 7) + b * (2 / 7)) + g * (4 * 0.01 / 7)
    buffers = merged(terms, operands, LAYOUT, (LAYOUT.buffer_start, LAYOUT.elements))
    for i in range(3):
        a, b = (float(row[LAYOUT.buffer_start + i]) for row in rows[:2])
        assert buffers[i].item() == a * (1 / 3) + b * (2 / 3)


def test_the_sum_of_nothing_is_zero() -> None:
    update = make_update("g", kind=Kind.GRADIENT)
    terms = plan([update], 1, AS_ONE)
    assert merged(terms, {}, LAYOUT, (LAYOUT.buffer_start, LAYOUT.elements)).tolist() == [0.0] * 3


def test_small_updates_are_not_lost_beside_large_ones() -> None:
    # 1 + 2^-30 - 1 is 0 in float32.
    nodes, values = ["a", "b", "c"], [1.0, 2.0**-30, -1.0]
    updates = [make_update(node) for node in nodes]
    operands = {u.update_id: operand(u, torch.full((LAYOUT.elements,), v)) for u, v in zip(updates, values, strict=True)}
    total = merged(plan(updates, 1, AS_ONE), operands, LAYOUT, (0, 512))[0].item()
    assert total == pytest.approx(2.0**-30 / 3, rel=1e-6)


def test_rows_of_a_partial_are_read_where_they_lie() -> None:
    groups = (group(Tier.EDGE, 0, 2, "x"), group(Tier.SITE, 0, 3, "s"))
    partial = make_update("r", kind=Kind.PARTIAL, tier=Tier.REGION, groups=groups)
    rows = [torch.full((LAYOUT.elements,), 10.0), torch.full((LAYOUT.elements,), 1.0)]
    total = merged(plan([partial], 1, AS_ONE), {partial.update_id: operand(partial, *rows)}, LAYOUT, (512, 600))
    assert total.tolist() == [10.0 * (1 / 5) + 1.0 * (1 / 5)] * 88
    assert math.isclose(total[0].item(), 2.2)
