"""Gradients averaged node by node (``cloud/hierarchy.py``): one torchrun job, two simulated nodes of two ranks, does all rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import hierarchy_rows
from helpers.rank_rows import Seen, run_rows

WORLD = 4


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return run_rows(hierarchy_rows.__file__, tmp_path_factory.mktemp("rows"), world=WORLD, timeout_s=150)


def test_every_row_is_tested(seen: dict[str, Seen]) -> None:
    source = Path(__file__).read_text()
    assert [name for name in seen if f'"{name}"' not in source] == []


@pytest.mark.parametrize(
    ("row", "bound"),
    [
        ("several_odd_buckets", 1e-6),
        ("one_bucket", 1e-6),
        ("double_precision", 1e-14),
        ("unused_parameters", 1e-6),
        ("static_graph", 1e-6),
        ("gradient_as_bucket_view", 1e-6),
        ("accumulation", 1e-6),
        ("half_the_bits", 2**-6),  # of the largest gradient: two roundings, and the residual of the step before
        ("a_quarter_of_the_bits", 2**-5),
    ],
)
def test_gradients_are_those_of_ddp(seen: dict[str, Seen], row: str, bound: float) -> None:
    for rank in seen[row]:
        assert rank["registered"]
        assert rank["alone"]  # each rank had data of its own
        assert rank["error"] <= bound
        assert rank["apart"] == 0.0


def test_a_rank_without_data_takes_part(seen: dict[str, Seen]) -> None:
    for rank in seen["join"]:
        assert rank["error"] <= 1e-6
        assert rank["apart"] == 0.0


def test_an_overflow_is_seen_on_all_ranks(seen: dict[str, Seen]) -> None:
    for rank in seen["overflow"]:
        assert rank == {name: [[True, False, True, True], 512.0, 0.0, True] for name in ("float32", "bfloat16", "int8")}


def test_what_was_left_out_is_added_later(seen: dict[str, Seen]) -> None:
    for rank in seen["error_feedback"]:
        for found in rank.values():
            assert found["error"] <= 1e-5  # of sums of up to 20 numbers
            assert found["left"] > 1e-3  # without feedback this would be the error
            assert found["apart"] == 0.0
            assert found["forgets"] == 0.0


def test_what_needs_no_rounding_is_not_rounded(seen: dict[str, Seen]) -> None:
    assert seen["exact_numbers"] == [{"bfloat16": True, "int8": True}] * WORLD


def test_when_it_is_used(seen: dict[str, Seen]) -> None:
    for rank in seen["when_it_is_used"]:
        assert rank["two_nodes_of_two"] == [True, True]
        assert rank["one_node"] == [False, False]
        assert rank["one_rank_a_node"] == [False, False]
        assert rank["one_rank_a_node, int8"] is True
        assert rank["off"] is False
        assert rank["a_copy_has_none"]
        for name, says in {
            "unlike_nodes": "the nodes have unlike numbers of ranks: rank 0's has 3, rank 3's 1",
            "not_told": "LOCAL_WORLD_SIZE and LOCAL_RANK are not set",
            "ranks_dealt_out": "rank 1 of 4 is local rank 0 of 2",
            "sparse": "'0' has sparse gradients",
            "complex": "'weight' is complex",
            "a_hook_of_the_users": "a communication hook is registered already (allreduce_hook)",
            "part_of_the_job": "the model's process group has 2 of the job's 4 ranks",
        }.items():
            automatic, demanded = rank[name]
            assert automatic is False, name
            assert demanded.startswith("hierarchy: on: "), name
            assert says in demanded
        assert "unlike settings; rank 0: ('on', 'float32'), rank 2: ('on', 'int8')" in rank["unlike_settings"]


def test_fleet_ddp(seen: dict[str, Seen]) -> None:
    for rank in seen["fleet"]:
        assert rank["hooks"] == ["Hierarchy"]
        assert (rank["version"], rank["apart"]) == (2, 0.0)
        assert rank["off"] == 0
        assert rank["auto"] == ["allreduce_hook"]
        assert "a communication hook is registered already" in rank["on"]


def test_what_one_rank_raises_ends_the_wait_of_the_others(seen: dict[str, Seen]) -> None:
    rows = seen["one_rank_fails"]
    assert rows[1]["calls"] == 2
    for rank in rows:
        assert "MemoryError: no room" in rank["errors"][0]
        assert "averaging gradients node by node has failed" in rank["errors"][0]
        assert rank["seconds"] < hierarchy_rows.TIMEOUT_S / 4
