"""The order of samples and the position in it (``cloud/sampler.py``)."""

from __future__ import annotations

import pytest

from fleetddp.cloud.sampler import EpochSampler


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_each_epoch_visits_every_sample_once(epoch: int) -> None:
    sampler = EpochSampler(23, 4, seed=1)
    sampler.set_epoch(epoch)
    assert sorted(sampler) == list(range(23))
    assert len(sampler) == 23


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = EpochSampler(50, 4, seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1, 2)}) == 6


def test_a_resumed_epoch_goes_on_after_the_batches_trained_on() -> None:
    sampler = EpochSampler(10, 4, seed=3)
    sampler.set_epoch(2)
    whole = list(sampler)
    sampler.advance()
    sampler.advance()
    resumed = EpochSampler(10, 4, seed=3)
    resumed.load_state_dict(sampler.state_dict())
    assert (resumed.epoch, resumed.batches, len(resumed)) == (2, 2, 2)
    assert list(resumed) == whole[8:]
    resumed.advance()
    assert list(resumed) == []
    resumed.set_epoch(3)
    assert len(resumed) == 10
