"""A checkpoint's slices for another number of ranks (``cloud/recut.py``)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetddp.cloud.recut import joined, recut

ANCHOR, RESIDUAL = torch.arange(3000.0), torch.arange(3000.0) / 7


def own(*intervals: tuple[int, int], samples: float = 0.0, lossless: bool = False) -> dict[str, Any]:
    """What a rank with these intervals of the vectors above has saved."""
    return {
        "intervals": [list(i) for i in intervals],
        "anchor": [ANCHOR[a:b].clone() for a, b in intervals],
        "residual": [None if lossless else RESIDUAL[a:b].clone() for a, b in intervals],
        "samples": samples,
        "owed": [[samples, 2.0], [2 * samples, 3.0]],
    }


@given(st.lists(st.integers(1, 2999), max_size=5), st.lists(st.integers(1, 2999), max_size=5))
def test_any_cut_to_any_other(before: list[int], after: list[int]) -> None:
    """Buffers lie behind a gap, at [2048, 3000)."""

    def slices(cuts: list[int]) -> list[tuple[int, int]]:
        ends = sorted({0, 2000, 2048, 3000, *(c for c in cuts if not 2000 <= c <= 2048)})
        return [i for i in itertools.pairwise(ends) if i != (2000, 2048)]

    ranks = [own(i, samples=3.0) for i in slices(before)]
    whole = joined(ranks[::-1], counts=True)
    assert whole is not None
    assert whole["samples"] == 3.0 * len(ranks)
    for start, stop in slices(after):
        again = recut(whole, [(start, stop)])
        assert again is not None
        assert again["intervals"] == [[start, stop]]
        assert torch.equal(again["anchor"][0], ANCHOR[start:stop])
        assert torch.equal(again["residual"][0], RESIDUAL[start:stop])


def test_only_one_rank_takes_the_samples_over() -> None:
    ranks = [own((0, 512), samples=3.0), own((512, 1024), samples=4.0)]
    assert [joined(ranks, counts=counts)["samples"] for counts in (True, False)] == [7.0, 0.0]
    assert joined(ranks, counts=True)["owed"] == [[7.0, 2.0], [14.0, 3.0]]
    assert joined(ranks, counts=False)["owed"] == [[0.0, 2.0], [0.0, 3.0]]


def test_what_a_machine_took_with_it() -> None:
    whole = joined([own((0, 512)), None, own((1024, 1536))], counts=True)
    assert recut(whole, [(0, 512)]) is not None
    assert recut(whole, [(0, 768)]) is None
    assert recut(whole, [(512, 1024)]) is None
    assert joined([None, None], counts=True) is None


def test_a_lossless_codec_leaves_no_residual() -> None:
    whole = joined([own((0, 512), lossless=True), own((512, 1024), lossless=True)], counts=True)
    assert recut(whole, [(256, 768)])["residual"] == [None]
    mixed = joined([own((0, 512), lossless=True), own((512, 1024))], counts=True)
    expected = torch.cat([torch.zeros(256), RESIDUAL[512:768]])
    assert torch.equal(recut(mixed, [(256, 768)])["residual"][0], expected)


def test_the_same_cut_is_left_as_it_is() -> None:
    mine = own((0, 512), (1024, 1100))
    assert recut(mine, [(0, 512), (1024, 1100)]) is mine
