"""The reservoir is a uniform sample that depends on what was offered alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetddp.common.inference_config import HardSamplesConfig
from fleetddp.edge.reservoir import Reservoir

CONFIG = HardSamplesConfig(consent=True, retention_hours=1.0, keep=3)


def sample(batches: list[list[int]], *, seed: int = 0) -> list[str]:
    """The digests that are kept, opened anew for every batch."""
    with tempfile.TemporaryDirectory() as folder:
        for batch in batches:
            with Reservoir(Path(folder), CONFIG, seed=seed) as reservoir:
                reservoir.add(torch.tensor(batch, dtype=torch.float32).reshape(-1, 1), torch.zeros(len(batch)))
                kept = [item.digest for item in reservoir.snapshot().items]
    return kept


offered = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@settings(max_examples=15, deadline=None)
@given(offered, st.randoms(use_true_random=False), st.integers(1, 4))
def test_order_repeats_and_restarts_change_nothing(values: list[int], random: object, size: int) -> None:
    shuffled = [*values, *values[:2]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert sample([shuffled[i : i + size] for i in range(0, len(shuffled), size)]) == sample([values])


def test_every_sample_is_kept_as_often_as_any_other() -> None:
    counts: dict[str, int] = {}
    for seed in range(100):
        for digest in sample([list(range(10))], seed=seed):
            counts[digest] = counts.get(digest, 0) + 1
    # 100 draws of 3 of 10: thirty times each, with a deviation of 4.6
    assert len(counts) == 10
    assert all(30 - 19 < count < 30 + 19 for count in counts.values())
