"""``attach``: a model under ``fully_shard``, or wrapped by other means, trains with a fleet as a ``FleetDDP`` does.

One torchrun job of two ranks does all rows (``helpers/attach_rows.py``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import attach_rows
from helpers.rank_rows import Seen, run_rows

WORLD = 2


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return run_rows(attach_rows.__file__, tmp_path_factory.mktemp("rows"), world=WORLD, timeout_s=150)


def test_every_row_is_tested(seen: dict[str, Seen]) -> None:
    source = Path(__file__).read_text()
    assert [name for name in seen if f'"{name}"' not in source] == []


@pytest.mark.parametrize(
    ("row", "slices"),
    [
        # 0.weight has 50 rows of 40: rank 0's half ends at 1000, in the block [512, 1024), which is therefore rank 0's. Rank 0's
        # halves of the other tensors begin in blocks whose first element is rank 1's.
        ("fully_sharded", [[[0, 1024]], [[1024, 2407]]]),
        ("each_layer", [[[0, 1024]], [[1024, 2407]]]),
        ("kept_gathered", [[[0, 1024]], [[1024, 2407]]]),
        ("in_eight_bits", [[[0, 1024]], [[1024, 2407]]]),
        ("one_way_out", [[[0, 2407]], None]),
        ("with_buffers", [[[0, 134], [512, 532]], None]),
        # Rank 0: 40 + 1 of the first layer, the first 350 of each tensor of the second, two of three rows of the last weight.
        ("fewer_rows_than_ranks", [[[0, 512], [1024, 3072]], [[512, 1024], [3072, 3544]]]),
        ("wrapped_by_other_means", [[[0, 1024]], [[1024, 2407]]]),
    ],
)
def test_it_comes_to_the_same_as_fleet_ddp(seen: dict[str, Seen], row: str, slices: list[list[list[int]] | None]) -> None:
    for rank, intervals in zip(seen[row], slices, strict=True):
        assert rank["alone"]  # each rank had data of its own
        assert rank["error"] <= 1e-6
        assert rank["apart"] == 0.0
        assert rank["version"] == attach_rows.STEPS // attach_rows.SYNC_EVERY
        assert rank["intervals"] == ([intervals] if intervals else [])
        assert rank["pushes"] == (["init", "delta", "delta", "delta"] if intervals else [])
    assert sum(sum(rank["samples"]) for rank in seen[row]) == WORLD * attach_rows.STEPS * 8


def test_local_progress_is_carried_on(seen: dict[str, Seen]) -> None:
    for rank in seen["overlapped"]:
        assert rank["version"] > 0
        assert rank["apart"] == 0.0


def test_half_precision_weights_send_no_rounding(seen: dict[str, Seen]) -> None:
    for rank in seen["half_precision"]:
        assert rank["norms"] == [0.0]
        assert rank["version"] == 1


def test_checkpoints(seen: dict[str, Seen]) -> None:
    for rank in seen["checkpoints"]:
        assert rank["loaded"]
        assert rank["residual"]
        assert (rank["moved"], rank["version"]) == (0.0, 3)
        assert "no rank holds the whole of a model under fully_shard" in rank["sharded"]


def test_anything_else_is_refused_by_name(seen: dict[str, Seen]) -> None:
    for rank in seen["refused"]:
        assert rank["partly"].startswith("parameter '2.weight' is not sharded, others are")
        assert "parameter '0.weight' lies on a mesh of 2 dimensions" in rank["two_dimensions"]
        assert "parameter '0.weight' is placed as (Shard(dim=1),)" in rank["columns"]
        assert "parameter '0.weight' is sharded over ranks [0, 1]" in rank["another_group"]
        assert rank["setting"].startswith("attach: epochs: no setting of attach; allowed are sync_every, ")
        assert rank["value"].startswith("attach: site.sync_every: ")
