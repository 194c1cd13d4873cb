"""Soft labels as a kind of update: what they may be, what consensus they make, and that a region changes nothing."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

import google_crc32c
import pytest
import torch
from helpers.trees import Leaf, Tree, decoded
from torch import Tensor

from fleetddp.common import codecs, labels
from fleetddp.common.codecs.prob16 import Prob16
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.layout import Layout
from fleetddp.common.update import Group, Interval, Kind, Slice, State, Tier, UpdateHeader, UpdateId

ITEMS, CLASSES, DIGEST = 40, 3, "5e" * 32
WIDTH = CLASSES + 1
PROXY: dict[str, Any] = {"name": "shapes", "classes": CLASSES, "items": ITEMS, "digest": DIGEST}
ALL: tuple[Interval, ...] = ((0, ITEMS),)


def layout_of(by_tier: bool = False, items: int = ITEMS) -> Layout:
    return labels.layout_of("shapes", DIGEST, items, CLASSES, by_tier=by_tier)


LAYOUT = layout_of()


def tree_of(quorum: int, *, by_tier: bool = False, publish: str = "float32", **sections: Any) -> Tree:
    """A root, and whatever regions, of one track of soft labels."""
    proxy = {**PROXY, "by_tier": by_tier}
    window = {"preset": "fedbuff", "quorum": quorum}
    return Tree(layout_of(by_tier), kind="logits", proxy=proxy, publish=publish, window=window, **sections)


def opinion(seed: int, layout: Layout = LAYOUT) -> Tensor:
    """f32[elements]: rows for all items, as the codec brings them: probabilities that float16 holds, weights 0.5 to 1.5."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(layout.elements // WIDTH, CLASSES, generator=generator), dim=1)
    w = 0.5 + torch.rand(layout.elements // WIDTH, 1, generator=generator)
    codec = Prob16(CLASSES)
    return codec.decode(codec.encode(torch.cat([p * w, w], dim=1).flatten()), layout.elements)


def say(leaf: Leaf, seed: int, items: Sequence[Interval] = ALL, base: int = 0) -> UpdateId:
    """Push an opinion of these items."""
    covers = labels.elements(leaf.layout, leaf.tier, items)
    return leaf.send(opinion(seed, leaf.layout), base=base, codec=f"prob16:{CLASSES}", kind=Kind.LOGITS, covers=covers)


def within(values: Tensor, covers: Sequence[Interval]) -> Tensor:
    """f64: what of ``values`` lies there, and zeros."""
    out = torch.zeros(len(values), dtype=torch.float64)
    for start, stop in covers:
        out[start:stop] = values[start:stop].double()
    return out


def rows(tree: Tree, number: int, above: str = "") -> Tensor:
    """f32[items, C + 1] of a version."""
    version, payload = tree.weights(number, above)
    return decoded(payload, tree.layout, version.codec).view(-1, WIDTH)


# ---- consensus --------------------------------------------------------------------------------------------------------------


def test_consensus_of_full_participation_is_the_weighted_mean() -> None:
    tree = tree_of(quorum=3)
    leaves = [tree.leaf(name) for name in "abc"]
    slices: list[list[Interval]] = [[(0, 30)], [(5, 10), (20, 40)], [(0, 3), (39, 40)]]
    for seed, (leaf, items) in enumerate(zip(leaves, slices, strict=True)):
        say(leaf, seed, items)
    found = rows(tree, 1)
    for item in range(ITEMS):
        said = [opinion(s).view(-1, WIDTH)[item].tolist() for s, i in enumerate(slices) if any(a <= item < b for a, b in i)]
        weight = sum(row[-1] for row in said)
        assert found[item, -1].item() == pytest.approx(weight, rel=1e-7)
        if said:
            consensus = [sum(row[c] for row in said) / weight for c in range(CLASSES)]
            assert (found[item, :-1] / found[item, -1]).tolist() == pytest.approx(consensus, rel=1e-6)
            assert sum(consensus) == pytest.approx(1.0)


def test_without_a_member_only_its_weights_are_gone() -> None:
    with_all, without = tree_of(quorum=3), tree_of(quorum=2)
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        say(with_all.leaf(name), seed)
        if name != "b":
            say(without.leaf(name), seed)
    difference = rows(with_all, 1).double() - rows(without, 1).double()
    torch.testing.assert_close(difference.flatten(), opinion(1).double(), rtol=0, atol=1e-6)


def test_a_late_opinion_is_discounted_and_one_too_late_is_refused() -> None:
    staleness = {"max_staleness": 1, "discount": {"kind": "polynomial", "a": 1.0}}
    tree = tree_of(quorum=1, merge={"staleness": staleness})
    a, b = tree.leaf("a"), tree.leaf("b")
    say(a, 0)
    say(b, 1, base=0)  # one version late: counts half
    torch.testing.assert_close(rows(tree, 2).flatten(), 0.5 * opinion(1), rtol=1e-6, atol=0)
    say(a, 2, base=2)
    with pytest.raises(AssertionError, match="STALE"):
        say(b, 3, base=0)


def test_items_that_nobody_labels_keep_what_they_had() -> None:
    tree = tree_of(quorum=1)
    assert rows(tree, 0).count_nonzero() == 0
    leaf = tree.leaf("a")
    say(leaf, 0, [(0, 20)])
    say(leaf, 1, [(10, 15), (30, 31)], base=1)
    expected = torch.zeros(ITEMS, WIDTH)
    expected[:20] = opinion(0).view(-1, WIDTH)[:20]
    for item in (*range(10, 15), 30):
        expected[item] = opinion(1).view(-1, WIDTH)[item]
    assert torch.equal(rows(tree, 2), expected)


def test_tiers_are_kept_apart() -> None:
    tree = tree_of(quorum=2, by_tier=True)
    say(tree.leaf("s", tier=Tier.SITE), 0, [(0, 30)])
    say(tree.leaf("e"), 1, [(20, 40)])
    found, none = rows(tree, 1), torch.zeros(ITEMS, WIDTH)
    site, edge = none.clone(), none.clone()
    site[:30] = opinion(0, tree.layout).view(-1, WIDTH)[:30]
    edge[20:] = opinion(1, tree.layout).view(-1, WIDTH)[ITEMS + 20 :]
    assert torch.equal(found, torch.cat([site, edge]))


def test_a_version_in_prob16_is_what_its_codec_says_of_the_sums() -> None:
    exact, short = tree_of(quorum=2), tree_of(quorum=2, publish="prob16")
    for tree in (exact, short):
        say(tree.leaf("a"), 0, [(0, 30)])
        say(tree.leaf("b"), 1, [(10, 20)])
    version, payload = short.weights(1)
    assert (version.codec, len(payload)) == (f"prob16:{CLASSES}", ITEMS * (2 * CLASSES + 4))
    codec = codecs.get(version.codec)
    assert payload == codec.encode(rows(exact, 1).flatten()).numpy().tobytes()
    assert rows(short, 1)[30:].count_nonzero() == 0


# ---- regions ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_tier", [False, True])
def test_a_region_changes_nothing(by_tier: bool) -> None:
    """Two versions, the second of unlike bases and discounts: what partials hold is sums by tier and base."""
    trees = [tree_of(quorum=4, by_tier=by_tier) for _ in range(2)]
    flat, deep = trees
    deep.region("west", window={"preset": "sync"})
    for tree, above in ((flat, ""), (deep, "west")):
        members = [tree.leaf(f"e{n}", above) for n in range(2)] + [tree.leaf("s", above, Tier.SITE), tree.leaf("r")]
        tree.settle()
        for number, leaf in enumerate(members):
            say(leaf, number, [(number, 30 + number)])
        tree.settle()
        for number, leaf in enumerate(members):
            say(leaf, 10 + number, [(2 * number, 2 * number + 20)], base=number % 2)
        tree.settle()
        assert tree.weights(2)[0].updates == 4
    (first, second) = deep.regions["west"].pushed
    assert {(g.tier, g.base_version) for g in second.header.groups} == {(Tier.EDGE, 0), (Tier.EDGE, 1), (Tier.SITE, 0)}
    assert first.header.codec == second.header.codec == f"prob64:{CLASSES}"
    for number in (1, 2):
        torch.testing.assert_close(rows(deep, number), rows(flat, number), rtol=2**-23, atol=0)
        assert deep.weights(number, "west") == deep.weights(number)


def test_after_a_restart_the_same_version_is_made() -> None:
    trees = [tree_of(quorum=2) for _ in range(2)]
    for tree in trees:
        say(tree.leaf("a"), 0, [(3, 9), (11, 40)])
        if tree is trees[1]:
            tree.restart_root()
        say(tree.leaf("b"), 1)
    assert trees[0].weights(1)[1] == trees[1].weights(1)[1]


def test_what_was_decided_is_made_after_a_restart() -> None:
    trees = [tree_of(quorum=2, publish="prob16") for _ in range(2)]
    for tree in trees:
        say(tree.leaf("a"), 0, [(3, 9)])
        if tree is trees[1]:

            def fail(point: str) -> None:
                if point == "publish:begun":
                    raise OSError("no space left")

            tree.root._journal.at = fail
        say(tree.leaf("b"), 1)
    assert [tree.root.driver.version for tree in trees] == [1, 0]
    trees[1].restart_root()
    assert trees[0].weights(1) == trees[1].weights(1)


# ---- what is refused --------------------------------------------------------------------------------------------------------


def header(**fields: Any) -> UpdateHeader:
    given: dict[str, Any] = {
        "update_id": UpdateId("a", 1, 1),
        "kind": Kind.LOGITS,
        "tier": Tier.EDGE,
        "base_version": 0,
        "codec": f"prob16:{CLASSES}",
        "layout": LAYOUT.fingerprint,
        "covers": ((0, 2 * WIDTH),),
    }
    return UpdateHeader(**{**given, **fields})


def block(*p: float, weight: float = 1.0) -> bytes:
    return struct.pack(f"<{len(p)}ef", *p, weight)


FINE = block(0.5, 0.25, 0.25)
NAN = float("nan")
BAD: dict[str, tuple[dict[str, Any], bytes, Reason, str]] = {
    "nan": ({}, FINE + block(NAN, 0.5, 0.5), Reason.NOT_FINITE, "inf or nan"),
    "nan weight": ({}, FINE + block(0.5, 0.5, 0.0, weight=NAN), Reason.NOT_FINITE, "inf or nan"),
    "do not sum": ({}, FINE + block(0.5, 0.25, 0.0), Reason.BAD_PROBABILITIES, "sum to 1"),
    "negative": ({}, FINE + block(1.25, -0.25, 0.0), Reason.BAD_PROBABILITIES, ">= 0"),
    "no weight": ({}, FINE + block(0.0, 0.0, 0.0, weight=0.0), Reason.BAD_WEIGHT, "weight 0"),
    "negative weight": ({}, FINE + block(0.5, 0.25, 0.25, weight=-1.0), Reason.BAD_WEIGHT, "negative"),
    "too much weight": ({}, FINE + block(0.5, 0.25, 0.25, weight=2e9), Reason.BAD_WEIGHT, "allowed are"),
    "classes": (
        {"codec": "prob16:2", "covers": ((0, 2 * WIDTH),)},
        2 * struct.pack("<2ef", 0.5, 0.5, 1.0),
        Reason.WRONG_CLASSES,
        "soft labels of 2 classes; this track's proxy set has 3",
    ),
    "beyond the set": (
        {"covers": ((ITEMS * WIDTH - WIDTH, ITEMS * WIDTH + WIDTH),)},
        FINE + FINE,
        Reason.WRONG_ITEMS,
        r"tier edge's rows of 4 lie in \[0, 160\)",
    ),
    "half a row": ({"covers": ((2, 2 + 2 * WIDTH),)}, FINE + FINE, Reason.WRONG_ITEMS, "covers elements"),
    "twice": ({"covers": ((0, WIDTH), (0, WIDTH))}, FINE + FINE, Reason.WRONG_ITEMS, "ascending"),
    "nothing": ({"covers": ()}, FINE, Reason.WRONG_ITEMS, "covers no item"),
    "another codec": ({"codec": "float32"}, bytes(32), Reason.UNKNOWN_CODEC, "prob16 or probtop"),
    "weights": ({"kind": Kind.DELTA, "codec": "float32", "covers": ()}, bytes(640), Reason.WRONG_KIND, "takes soft labels"),
    "another set": ({"layout": "ab" * 32}, FINE + FINE, Reason.WRONG_LAYOUT, "layout abab"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_opinion_is_refused_and_counts_for_nothing(name: str) -> None:
    fields, payload, reason, message = BAD[name]
    tree = tree_of(quorum=1)
    leaf = tree.leaf("a")
    bad = header(**fields)
    part = Slice(intervals=bad.covers or ((0, WIDTH),), samples=1.0, digest=google_crc32c.value(payload))
    receipt = leaf.parent.push(bad, part, memoryview(payload))
    assert (receipt.state, receipt.reason) == (State.REFUSED, reason.value), receipt
    with pytest.raises(Refused, match=message):
        raise Refused(reason, receipt.message)
    assert tree.root.driver.version == 0
    leaf.sequence = 1
    say(leaf, 0)  # the next one is taken
    assert torch.equal(rows(tree, 1).flatten(), opinion(0))


SUMS = torch.tensor([0.5, 0.25, 0.25, 1.0], dtype=torch.float64).repeat(ITEMS)
BAD_SUMS: dict[str, tuple[str, Tensor, Reason]] = {
    "nan": ("prob64:3", torch.full((4,), NAN, dtype=torch.float64), Reason.NOT_FINITE),
    "negative": ("prob64:3", torch.tensor([1.5, -0.5, 0.0, 1.0], dtype=torch.float64), Reason.BAD_PROBABILITIES),
    "no sum": ("prob64:3", torch.tensor([0.5, 0.0, 0.0, 1.0], dtype=torch.float64), Reason.BAD_PROBABILITIES),
    "labels without weight": ("prob64:3", torch.tensor([0.5, 0.0, 0.5, 0.0], dtype=torch.float64), Reason.BAD_PROBABILITIES),
    "not for sums": ("float64", SUMS[:4], Reason.UNKNOWN_CODEC),
    "of other classes": ("prob64:4", SUMS[:4], Reason.WRONG_CLASSES),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SUMS)
def test_sums_that_are_of_no_opinions_are_refused_and_hold_nothing_up(name: str) -> None:
    codec, row, reason = BAD_SUMS[name]
    tree = tree_of(quorum=1, publish="prob16")
    gateway = tree.leaf("gw", tier=Tier.REGION)
    values = SUMS.clone()
    values[20:24] = row
    payload = values.numpy().tobytes()
    group = Group(tier=Tier.EDGE, base_version=0, samples=1.0, buffer_samples=0.0, ids=(UpdateId("a", 1, 1),))
    fields = {"kind": Kind.PARTIAL, "tier": Tier.REGION, "codec": codec, "groups": (group,), "covers": ()}
    bad = header(update_id=UpdateId("gw", 1, 1), **fields)
    part = Slice(intervals=((0, LAYOUT.elements),), samples=1.0, digest=google_crc32c.value(payload))
    assert gateway.parent.push(bad, part, memoryview(payload)).reason == reason.value
    say(tree.leaf("b"), 0)
    assert tree.root.driver.version == 1


def test_the_other_tiers_rows_are_no_ones_own() -> None:
    tree = tree_of(quorum=1, by_tier=True)
    leaf = tree.leaf("a")
    bad = header(layout=tree.layout.fingerprint)  # the sites' rows
    receipt = leaf.parent.push(bad, Slice(intervals=bad.covers, samples=1.0, digest=0), memoryview(FINE + FINE))
    assert (receipt.reason, "lie in [160, 320)" in receipt.message) == ("WRONG_ITEMS", True)


def test_soft_labels_have_no_place_where_weights_travel() -> None:
    tree = Tree(LAYOUT)
    leaf = tree.leaf("a")
    as_delta = {"kind": Kind.DELTA, "covers": (), "update_id": UpdateId("a", 1, 2)}
    for fields, reason in (({}, "WRONG_KIND"), (as_delta, "UNKNOWN_CODEC")):
        bad = header(**fields)
        receipt = leaf.parent.push(bad, Slice(intervals=((0, WIDTH),), samples=1.0, digest=0), memoryview(FINE))
        assert receipt.reason == reason
    assert "prob16" not in tree.root.driver._aggregator._standing.joined(Tier.EDGE, ()).codecs


def test_an_update_may_come_in_several_streams_of_whole_rows() -> None:
    tree = tree_of(quorum=1)
    leaf = tree.leaf("a")
    whole = header(covers=((0, 2 * WIDTH), (8 * WIDTH, 9 * WIDTH)))
    parts = [((0, WIDTH),), ((WIDTH, 2 * WIDTH), (8 * WIDTH, 9 * WIDTH))]
    second = block(0.25, 0.25, 0.5, weight=2.0)
    payloads = [FINE, second + FINE]
    slices = [Slice(intervals=i, samples=1.0, digest=google_crc32c.value(p)) for i, p in zip(parts, payloads, strict=True)]
    answers: list[Any] = []
    # its call stays open until the other stream has come
    first = threading.Thread(target=lambda: answers.append(leaf.parent.push(whole, slices[0], memoryview(payloads[0]))))
    first.start()
    answers.append(leaf.parent.push(whole, slices[1], memoryview(payloads[1])))
    first.join(30)
    assert {answer.state for answer in answers} <= {State.ACCEPTED, State.MERGED}
    found = rows(tree, 1)
    assert found[:2].tolist() == [[0.5, 0.25, 0.25, 1.0], [0.5, 0.5, 1.0, 2.0]]
    assert found[8].tolist() == [0.5, 0.25, 0.25, 1.0]
    assert found.count_nonzero() == 12
