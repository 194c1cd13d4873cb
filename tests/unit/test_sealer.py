"""Partials as bytes: exact sums, and what a lossy codec leaves out is carried into the next partial, or taken back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import pytest
import torch
from helpers.merging import accept, make_update
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetddp.common import codecs
from fleetddp.common.events import Conclusion, Sealing
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.region_journal import RegionJournal
from fleetddp.common.sealer import Sealer
from fleetddp.common.sealing import sealing_of
from fleetddp.common.update import Receipt, State, Tier, Update, UpdateId, Version
from fleetddp.edge.sim.memory_files import MemoryFiles

LAYOUT = Layout.of([("w", (3, 400)), ("b", (7,))], [("mean", (9,))])
P = LAYOUT.parameters
BUFFERS = slice(LAYOUT.buffer_start, LAYOUT.elements)


def open_journal(files: MemoryFiles) -> RegionJournal:
    return RegionJournal(Path("/journal"), run="r", files=files)


@pytest.fixture
def journal() -> Iterator[RegionJournal]:
    journal = open_journal(MemoryFiles())
    adopt(journal)
    yield journal
    journal.close()


def adopt(journal: RegionJournal, number: int = 0) -> None:
    draft = journal.begin_version(number)
    draft.pwrite(b"weights!", 0)
    version = Version(
        number=number, layout=LAYOUT.fingerprint, codec="float32", payload_bytes=8, digest=0, published_at=float(number)
    )
    journal.adopt(version, draft, LAYOUT)


def draw(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.elements, generator=torch.Generator().manual_seed(seed))


def leaf(journal: RegionJournal, node: str, values: torch.Tensor, **fields: object) -> Update:
    return accept(journal, make_update(node, layout=LAYOUT, **fields), LAYOUT, values)  # type: ignore[arg-type]


def sealed(journal: RegionJournal, updates: list[Update], sequence: int, codec: str, residuals_from: int = 0) -> Update:
    return Sealer(journal).seal(sealing(updates, sequence, codec, residuals_from))


def sealing(updates: list[Update], sequence: int, codec: str, residuals_from: int = 0) -> Sealing:
    return sealing_of(
        updates,
        UpdateId("west", 1, sequence),
        codec=codec,
        layout=LAYOUT.fingerprint,
        gradient_lr=1.0,
        at=1.0,
        reason="",
        residuals_from=residuals_from,
    )


def rows(journal: RegionJournal, update: Update) -> list[torch.Tensor]:
    """Each group's vector, decoded."""
    payload = journal.partial_payload(update.update_id)
    geometry = Geometry.of_update(update.header, LAYOUT)
    assert len(payload) == geometry.payload_bytes == update.payload_bytes
    assert google_crc32c.value(payload) == update.slices[0].digest
    found = []
    for row in range(geometry.rows):
        vector = torch.zeros(LAYOUT.elements, dtype=torch.float64)
        for start, stop in geometry.required():
            if row * LAYOUT.elements <= start < (row + 1) * LAYOUT.elements:
                first, last = geometry.byte_range((start, stop))
                data = torch.frombuffer(bytearray(payload[first:last]), dtype=torch.uint8)
                offset = row * LAYOUT.elements
                vector[start - offset : stop - offset] = geometry.decode(data, (start, stop)).double()
        found.append(vector)
    return found


def residual(journal: RegionJournal, row: int = 0) -> torch.Tensor:
    found = journal.residual()
    assert found is not None
    file = journal.sealed_file(found.name)
    try:
        return torch.frombuffer(bytearray(file.pread(4 * P, 4 * P * row)), dtype=torch.float32).double()
    finally:
        file.close()


def test_float64_sums_are_exact_and_leave_nothing(journal: RegionJournal) -> None:
    updates = [
        leaf(journal, "a", draw(1), samples=3.0),
        leaf(journal, "b", draw(2), samples=0.5, tier=Tier.SITE),
        leaf(journal, "c", draw(3), samples=7.0),
    ]
    update = sealed(journal, updates, 1, "float64")
    edge, site = rows(journal, update)
    assert torch.equal(edge[:P], 3.0 * draw(1)[:P].double() + 7.0 * draw(3)[:P].double())
    assert torch.equal(edge[BUFFERS], 3.0 * draw(1)[BUFFERS].double() + 7.0 * draw(3)[BUFFERS].double())
    assert torch.equal(site[:P], 0.5 * draw(2)[:P].double())
    assert journal.residual() is None
    assert update.samples == 10.5
    norm = math.sqrt(float(edge[:P].square().sum() + site[:P].square().sum()))
    assert math.isclose(math.sqrt(update.squared_norm), norm, rel_tol=1e-12)


@pytest.mark.parametrize("codec", ["int8", "int4", "topk:0.1", "float32"])
def test_what_a_codec_leaves_out_goes_with_the_next_partial(journal: RegionJournal, codec: str) -> None:
    """In means: what was sent so far, plus the residual, is what was to be sent."""
    meant, sent = (torch.zeros(P, dtype=torch.float64) for _ in range(2))
    for sequence in range(1, 5):
        samples = [1.0 * sequence, 2.0]
        updates = [
            leaf(journal, node, draw(10 * sequence + k), samples=samples[k], sequence=sequence) for k, node in enumerate("ab")
        ]
        total = sum(samples)
        meant += sum(samples[k] * draw(10 * sequence + k)[:P].double() for k in range(2)) / total
        sent += rows(journal, sealed(journal, updates, sequence, codec))[0][:P] / total
        left = residual(journal)
        assert torch.allclose(sent + left, meant, rtol=0, atol=1e-5)
    assert (codec == "float32") == (float(left.abs().max()) < 1e-6)


def test_it_goes_with_the_newest_group_of_its_tier_and_waits_for_a_tier_that_is_absent(journal: RegionJournal) -> None:
    first = [leaf(journal, "a", draw(1)), leaf(journal, "lab", draw(2), tier=Tier.SITE, samples=4.0)]
    sealed(journal, first, 1, "int4")
    edge_left, site_left = residual(journal, 0), residual(journal, 1)
    codec = codecs.get("int4")
    zero = torch.zeros(LAYOUT.elements)
    second = [
        leaf(journal, "a", zero, sequence=2, base=0, samples=2.0),
        leaf(journal, "b", zero, sequence=2, base=1, samples=6.0),
    ]
    old, new = rows(journal, sealed(journal, second, 2, "int4"))
    assert not old[:P].any()
    expected = codec.decode(codec.encode((8.0 * edge_left).float()), P).double()
    assert torch.equal(new[:P], expected), "of all the tier's samples"
    assert torch.equal(residual(journal, 1), site_left), "the site's waits"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(["edge", "site", "both"]), min_size=2, max_size=5),
    st.randoms(use_true_random=False),
    st.integers(0, 2**20),
)
def test_partials_that_are_not_merged_give_back_what_they_took(kinds: list[str], random: object, seed: int) -> None:
    """However many were sealed after them, and in any order: the residual is as if only the others had been made."""
    journal = open_journal(MemoryFiles())
    adopt(journal)
    sealer, losses = Sealer(journal), []
    for sequence, kind in enumerate(kinds, 1):
        tiers = {"edge": [Tier.EDGE], "site": [Tier.SITE], "both": [Tier.EDGE, Tier.SITE]}[kind]
        updates = [leaf(journal, tier.value, draw(seed + sequence), sequence=sequence, tier=tier) for tier in tiers]
        before = {tier: loss_of(journal, tier) for tier in Tier}
        sealed(journal, updates, sequence, "int8")
        losses.append({tier: loss_of(journal, tier) - before[tier] for tier in Tier})
    kept = {tier: torch.zeros(P, dtype=torch.float64) for tier in Tier}
    undone = random.sample(range(len(kinds)), random.randint(1, len(kinds)))  # type: ignore[attr-defined]
    for index, loss in enumerate(losses):
        for tier in Tier:
            kept[tier] += 0.0 if index in undone else loss[tier]
    for index in undone:
        sealer.conclude(Conclusion(partial=UpdateId("west", 1, index + 1), undo=True))
        sealer.conclude(Conclusion(partial=UpdateId("west", 1, index + 1), undo=True))  # a driver's repeat
    for tier in Tier:
        assert torch.allclose(loss_of(journal, tier), kept[tier], rtol=0, atol=1e-6)
    journal.close()


def loss_of(journal: RegionJournal, tier: Tier) -> torch.Tensor:
    found = journal.residual()
    if found is None or tier not in found.tiers:
        return torch.zeros(P, dtype=torch.float64)
    return residual(journal, found.tiers.index(tier))


def test_a_residual_that_is_too_old_is_dropped(journal: RegionJournal) -> None:
    sealed(journal, [leaf(journal, "a", draw(1))], 1, "int4")
    zero = torch.zeros(LAYOUT.elements)
    second = sealed(journal, [leaf(journal, "a", zero, sequence=2, base=5)], 2, "int4", residuals_from=1)
    assert not rows(journal, second)[0][:P].any()
    # nor does the end of the partial that left it bring it back
    Sealer(journal).conclude(Conclusion(partial=UpdateId("west", 1, 1), undo=True))
    assert not residual(journal).any()


def test_a_partial_is_made_once_and_files_go_with_it(journal: RegionJournal) -> None:
    updates = [leaf(journal, "a", draw(1)), leaf(journal, "b", draw(2))]
    plan = sealing(updates, 1, "int8")
    assert Sealer(journal).seal(plan) == Sealer(journal).seal(plan)
    entered = journal.enter("west")
    assert [(s.update_id, made is not None) for s, made in entered.sealings] == [(plan.update_id, True)]
    assert entered.sealings[0][0] == plan
    assert entered.sequence == 1
    receipts = tuple(Receipt(update_id=u.update_id, state=State.MERGED, version=1) for u in updates[:1]) + (
        Receipt(update_id=updates[1].update_id, state=State.EXPIRED, reason="STALE"),
    )
    Sealer(journal).conclude(Conclusion(partial=plan.update_id, receipts=receipts))
    entered, recovered = journal.enter("west"), journal.recover()
    assert (entered.sealings, recovered.accepted) == ((), ())
    assert entered.closed == receipts[1:]
    assert recovered.merged == {updates[0].update_id: 1}
    with pytest.raises(Exception, match=r"1\.1\.partial"):
        journal.partial_payload(plan.update_id)


def test_versions_are_kept_as_they_came_and_an_older_one_takes_the_newer_ones_place(journal: RegionJournal) -> None:
    for number in (2, 5, 6):
        adopt(journal, number)
    assert [version.number for version in journal.versions()] == [2, 5, 6]
    adopt(journal, 4)  # the parent was restored from a backup
    assert [version.number for version in journal.versions()] == [2, 4]
    with journal.read_version(4) as reader:
        assert reader.read(0, 8) == b"weights!"
