"""What a rank trains on in each step, and where it stands (``cloud/sampler.py``)."""

from __future__ import annotations

import pytest

from fleetddp.cloud.sampler import EpochSampler, Portion, portion
from fleetddp.common.errors import ConfigError


def sampler(size: int, batch_size: int = 4, *, seed: int = 1) -> EpochSampler:
    return EpochSampler(size, Portion((batch_size,), batch_size), seed, steps=-(-size // batch_size))


def order(batches: EpochSampler) -> list[int]:
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_each_epoch_visits_every_sample_once(epoch: int) -> None:
    batches = sampler(23)
    batches.set_epoch(epoch)
    assert sorted(order(batches)) == list(range(23))
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 3]
    assert len(batches) == 6


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def of(seed: int, epoch: int) -> list[int]:
        batches = sampler(50, seed=seed)
        batches.set_epoch(epoch)
        return order(batches)

    assert of(1, 0) == of(1, 0)
    assert len({tuple(of(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


def test_a_resumed_epoch_goes_on_after_the_batches_trained_on() -> None:
    batches = sampler(10, seed=3)
    batches.set_epoch(2)
    whole = order(batches)
    batches.advance()
    batches.advance()
    resumed = sampler(10, seed=3)
    resumed.load_state_dict(batches.state_dict())
    assert (resumed.epoch, resumed.position, len(resumed)) == (2, 2, 1)
    assert order(resumed) == whole[8:]
    resumed.advance()
    assert order(resumed) == []
    resumed.set_epoch(3)
    assert len(resumed) == 3


@pytest.mark.parametrize(
    ("batch_size", "global_batch", "rank", "world", "pieces", "batch"),
    [
        (32, None, 1, 3, (32,), 96),
        (32, 96, 1, 3, (32,), 96),
        (32, 100, 0, 3, (32, 2), 100),  # 34, 33 and 33 samples
        (32, 100, 1, 3, (32, 1), 100),
        (32, 8, 2, 3, (2,), 8),
        (2, 8, 0, 1, (2, 2, 2, 2), 8),
    ],
)
def test_portion(batch_size: int, global_batch: int | None, rank: int, world: int, pieces: tuple[int, ...], batch: int) -> None:
    assert portion(batch_size, global_batch, rank, world) == Portion(pieces, batch)


@pytest.mark.parametrize("world", range(1, 9))
def test_portions_make_up_the_global_batch(world: int) -> None:
    assert sum(portion(3, 41, rank, world).samples for rank in range(world)) == 41


def test_a_global_batch_smaller_than_the_world() -> None:
    with pytest.raises(ConfigError, match="3 samples are too few for the 4 ranks"):
        portion(32, 3, 0, 4)


def test_a_rank_with_few_samples_begins_them_again() -> None:
    """Ten steps of three samples over a part of twelve: each is seen two or three times."""
    batches = EpochSampler(12, Portion((2, 1), 6), 0, steps=10, around=True)
    seen = list(batches)
    assert [len(batch) for batch in seen] == [2, 1] * 10
    flat = [index for batch in seen for index in batch]
    assert flat == (flat[:12] * 3)[:30]
    assert sorted(flat[:12]) == list(range(12))


@pytest.mark.parametrize(("position", "batch", "becomes"), [(4, 6, 4), (4, 3, 2), (5, 3, 2), (4, 12, 8), (9, 12, 10)])
def test_the_position_after_a_change_of_the_batch(position: int, batch: int, becomes: int) -> None:
    """24 samples of an epoch are behind the site at step 4 of 6 each."""
    batches = EpochSampler(60, Portion((3,), 6), 0, steps=10)
    batches.load_state_dict({"epoch": 1, "position": position, "batch": batch})
    assert (batches.epoch, batches.position) == (1, becomes)
