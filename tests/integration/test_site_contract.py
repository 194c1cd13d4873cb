"""The boundary contract (the table at the head of ``cloud/site.py``): three ranks of a torchrun job, real coordinators.

One job does all rows (``helpers/site_rows.py``) and writes down what each rank saw; here is one test a row.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import site_rows
from helpers.rank_rows import Seen, run_rows

WORLD = 3


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    return run_rows(site_rows.__file__, tmp_path_factory.mktemp("rows"), world=WORLD, timeout_s=280)


def test_every_row_is_tested(seen: dict[str, Seen]) -> None:
    source = Path(__file__).read_text()
    assert [name for name in seen if f'"{name}"' not in source] == []


@pytest.mark.parametrize("row", ["equals_ddp_sgd", "equals_ddp_adamw"])
def test_a_site_alone_that_exchanges_every_step_equals_ddp(seen: dict[str, Seen], row: str) -> None:
    assert seen.keys() >= {"equals_ddp_sgd", "equals_ddp_adamw"}
    for rank in seen[row]:
        assert rank["version"] == 50
        assert rank["difference"] <= 1e-6
        assert rank["apart"] == 0.0
    assert [rank["slices"] for rank in seen[row]] == [[[[0, 512]]], [[[512, 1536]]], [[[1536, 2407]]]]


def test_a_model_smaller_than_the_world(seen: dict[str, Seen]) -> None:
    rows = seen["smaller_than_the_world"]
    assert [rank["pushes"] for rank in rows] == [0, 0, 4]  # its init and three updates
    assert all(rank["difference"] <= 1e-6 and rank["version"] == 3 and rank["apart"] == 0.0 for rank in rows)


def test_what_goes_out(seen: dict[str, Seen]) -> None:
    rows = seen["what_goes_out"]
    covered = sorted(tuple(i) for rank in rows for i in rank["intervals"])
    assert covered == [(0, 1024), (1024, 2048), (2048, 2763), (3072, 3192)]
    assert (rows[0]["parameters"], rows[0]["buffer_start"], rows[0]["elements"]) == (2763, 3072, 3192)
    assert [rank["samples"] for rank in rows] == [8.0, 10.0, 12.0]  # two batches of 4 + rank
    assert all(rank["headers_alike"] for rank in rows)
    assert [(rank["kind"], rank["base"], rank["steps"]) for rank in rows] == [("delta", 0, 2)] * 3
    assert [[r is not None for r in rank["residual"]] for rank in rows] == [[True], [True], [True, False]]  # buffers have none
    assert all(rank["residual"][0] > 0 and rank["version"] == 1 and rank["apart"] == 0.0 for rank in rows)


def test_buffers_are_those_of_rank_0(seen: dict[str, Seen]) -> None:
    assert all(rank["difference"] < 1e-6 and rank["apart"] == 0.0 for rank in seen["buffers_are_rank_0s"])


def test_rank_0_carries_for_ranks_without_a_way_out(seen: dict[str, Seen]) -> None:
    rows = seen["rank0_carries_all"]
    assert [rank["uplinks"] for rank in rows] == [1, 0, 0]
    assert rows[0]["intervals"] == [[[0, 2407]]]
    assert rows[0]["samples"] == [48.0]  # three ranks, two batches of eight
    assert all(rank["version"] == 1 and rank["apart"] == 0.0 for rank in rows)


def test_one_carrier_a_machine(seen: dict[str, Seen]) -> None:
    rows = seen["one_carrier_a_machine"]
    assert [rank["uplinks"] for rank in rows] == [1, 0, 1]
    assert all(rank["version"] == 1 and rank["apart"] == 0.0 for rank in rows)


def test_options_of_ddp(seen: dict[str, Seen]) -> None:
    for rank in seen["options_of_ddp"]:
        assert rank["versions"] == [1, 2, 3, 4]
        assert rank["apart"] == 0.0
        assert rank["keys"] == ["module.0.bias", "module.0.weight", "module.2.bias", "module.2.weight"]


def test_gradient_accumulation_counts_steps_not_backwards(seen: dict[str, Seen]) -> None:
    for rank in seen["accumulation"]:
        assert rank["boundaries"] == [0] * 5 + [1] * 6 + [2]
        assert rank["samples"] == [24.0, 24.0]  # all six micro-batches of four
        assert rank["apart"] == 0.0


def test_a_step_is_over_when_all_optimizers_have_stepped(seen: dict[str, Seen]) -> None:
    for rank in seen["several_optimizers"]:
        assert rank["boundaries"] == [0, 0, 0, 1, 1, 1, 1, 2]
        assert rank["apart"] == 0.0


def test_a_step_skipped_by_a_grad_scaler_does_not_count(seen: dict[str, Seen]) -> None:
    for rank in seen["grad_scaler"]:
        assert rank["boundaries"] == [0, 0, 0, 1]
        assert (rank["scale"], rank["lr"]) == (1.0, 0.025)
        assert rank["apart"] == 0.0


def test_join_puts_boundaries_off_to_its_end(seen: dict[str, Seen]) -> None:
    rows = seen["join"]
    assert [rank["within"] for rank in rows] == [[0] * 3, [0] * 4, [0] * 5]
    assert all((rank["after"], rank["later"], rank["version"]) == (1, 2, 2) for rank in rows)
    assert all(rank["steps"] == [5, 2] for rank in rows)  # the most that a rank made
    assert [rank["samples"] for rank in rows] == [[24.0, 16.0], [32.0, 16.0], [40.0, 16.0]]
    assert all(rank["apart"] == 0.0 for rank in rows)


def test_join_with_early_termination_defers_nothing(seen: dict[str, Seen]) -> None:
    rows = seen["join_with_early_termination"]
    assert all(rank["boundaries"] == 2 and "exhausted" in rank["error"] and rank["apart"] == 0.0 for rank in rows)


def test_the_network_is_awaited_off_the_process_group(seen: dict[str, Seen]) -> None:
    for rank in seen["waits_off_the_process_group"]:
        assert rank["waited"] > 3 * site_rows.TIMEOUT_S
        assert rank["version"] == 1
        assert rank["apart"] == 0.0


def test_a_site_trains_on_without_the_network(seen: dict[str, Seen]) -> None:
    for rank in seen["trains_on_without_the_network"]:
        assert rank["versions"] == [0] * 10
        assert rank["moved"] > 1e-3
        (first, base, steps, samples), (second, next_base, next_steps, next_samples) = rank["deltas"]
        assert (second - first, base, next_base) == (1, 0, 0)  # one in flight; the next starts where it ended
        assert (steps, samples) == (2, 8.0)
        assert next_steps > 2
        assert next_samples == 4.0 * next_steps
        assert rank["version"] > 0
        assert rank["apart"] == 0.0


def test_overlap(seen: dict[str, Seen]) -> None:
    """A boundary waits for the version after the last update, not for its own; all ranks go on from w + (t - a)."""
    for rank in seen["overlap"]:
        assert rank["versions"] == [0] * 7 + [1]
        assert rank["apart"] == 0.0
        assert rank["base_to_carried"] < 1e-6
        assert rank["anchored"] == 0.0
        assert [number % 2 for number in rank["adopted_at"]] == [0]  # a candidate
        (first, base, steps, samples), (second, next_base, next_steps, next_samples) = rank["deltas"]
        assert (second - first, base, next_base) == (1, 0, 1)
        assert (steps, samples, next_steps, next_samples) == (4, 16.0, 4, 16.0)


def test_fragments_take_turns(seen: dict[str, Seen]) -> None:
    rows = seen["fragments"]
    assert all((rank["boundaries"], rank["apart"]) == (10, 0.0) and rank["difference"] < 1e-6 for rank in rows)
    pushed = [tuple(i) for rank in rows for own in rank["elements"].values() for i in own]
    assert sorted(pushed) == [(0, 512), (512, 1024), (1024, 1536), (1536, 2048), (2048, 2407)]  # five blocks: 1, 1, 1 and 2
    by_turn = {turn for rank in rows for turn in rank["turns"]}
    assert by_turn == {0, 1, 2, 3}


def test_a_run_starts_synchronously(seen: dict[str, Seen]) -> None:
    for rank in seen["synchronous_start"]:
        assert rank["versions"] == [1, 2, 2, 2, 3, 3, 3, 4]
        assert rank["apart"] == 0.0


def test_forked_data_workers_live_through_a_transfer(seen: dict[str, Seen]) -> None:
    for rank in seen["forked_workers_while_a_transfer_runs"]:
        assert rank["batches"] == 8
        assert rank["under_way"] == [1, 1]
        assert rank["version"] > 0
        assert rank["apart"] == 0.0


def test_a_refused_update_is_dropped(seen: dict[str, Seen]) -> None:
    for rank in seen["refused"]:
        assert rank["back"] == 0.0
        assert all(rank["residual"])
        assert (rank["version"], rank["later"]) == (0, 1)
        assert rank["counters"]["refused"] == {"NORM_BOUND": 1}
        assert rank["apart"] == 0.0


def test_a_diverged_site_sends_nothing(seen: dict[str, Seen]) -> None:
    assert [(rank["deltas"], rank["back"], rank["version"]) for rank in seen["not_finite"]] == [(0, 0.0, 0)] * 3


def test_ranks_of_unlike_settings_are_an_error_on_all_ranks(seen: dict[str, Seen]) -> None:
    for rank in seen["unlike_settings"]:
        assert "the ranks of a site have the same settings" in rank["error"]
        assert '"sync_every":3' in rank["error"]


def test_another_model_is_an_error_on_all_ranks(seen: dict[str, Seen]) -> None:
    for rank in seen["another_model"]:
        assert "'0.weight'" in rank["error"]
        assert "(51, 40)" in rank["error"]


def test_what_one_rank_raises_ends_the_wait_of_the_others(seen: dict[str, Seen]) -> None:
    local = "list index out of range"
    told = [f"rank {failing} failed: IndexError: {local}" for failing in (1, 0)]
    errors = [rank["errors"] for rank in seen["one_rank_fails"]]
    assert errors == [[told[0], local], [local, told[1]], told]


def test_a_rank_that_closes_alone_does_not_leave_the_others_waiting(seen: dict[str, Seen]) -> None:
    told = [f"rank {closing} has left the fleet, and the others have not: all ranks call close()" for closing in (1, 0)]
    errors = [rank["errors"] for rank in seen["one_rank_closes"]]
    assert errors == [[told[0], ""], ["", told[1]], told]


def test_the_end_of_the_run(seen: dict[str, Seen]) -> None:
    for rank in seen["end_of_the_run"]:
        assert rank["seen"] == [[1, False], [2, True], [2, True], [2, True]]
        assert rank["reason"]
        assert rank["trains_on"]
        assert rank["live"] == []
        assert rank["boundaries"] == 2


def test_a_group_of_devices_is_one_edge_member(seen: dict[str, Seen]) -> None:
    for rank in seen["edge_tier"]:
        assert rank["tiers"]["gateway"] == "edge"
        assert rank["kinds"] == ["delta"]
        assert (rank["version"], rank["apart"]) == (1, 0.0)


def test_a_checkpoint_on_disks_of_their_own_follows_the_ranks(seen: dict[str, Seen]) -> None:
    for rank in seen["checkpoint_moves"]:
        assert rank["loaded"]
        assert rank["same_draw"]
        assert rank["residual"]
        assert (rank["weights"], rank["step"]) == (0.0, 2)
        assert rank["versions"] == [1, 1]
        assert rank["boundaries"] == [1, 1]
