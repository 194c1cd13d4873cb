"""Partitions: every sample once, sizes, mixtures as stated, and clear refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetddp.common.errors import ConfigError
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.partition import Indices, dirichlet, from_partitioner, iid, natural, shards

LABELS = np.random.default_rng(0).integers(0, 10, 5000)


def rng(seed: int = 1) -> np.random.Generator:
    return Draws(seed).generator("partition")


def check_every_sample_once(parts: list[Indices], samples: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples))
    assert all(part.dtype == np.int64 and np.array_equal(part, np.sort(part)) for part in parts)


def check_equal_sizes(parts: list[Indices], samples: int) -> None:
    assert sorted(map(len, parts)) == sorted(samples // len(parts) + (k < samples % len(parts)) for k in range(len(parts)))


def mixtures(parts: list[Indices], labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array([np.bincount(labels[part], minlength=10) / len(part) for part in parts])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-2, 4), min_size=1, max_size=200),
    st.integers(1, 12),
    st.sampled_from([1e-3, 0.1, 1.0, 1e3]),
    st.integers(0, 99),
)
def test_every_sample_has_one_owner(labels: list[int], members: int, alpha: float, seed: int) -> None:
    members = min(members, len(labels))
    for parts in (iid(len(labels), members, rng(seed)), dirichlet(labels, members, rng(seed), alpha=alpha)):
        assert len(parts) == members
        check_every_sample_once(parts, len(labels))
        check_equal_sizes(parts, len(labels))
    if len(labels) >= 2 * members:
        parts = shards(labels, members, rng(seed))
        assert len(parts) == members
        check_every_sample_once(parts, len(labels))
    owners = min(members, len(set(labels)))
    parts = natural(labels, owners)
    assert len(parts) == owners
    check_every_sample_once(parts, len(labels))
    assert sum(len({labels[k] for k in part}) for part in parts) == len(set(labels))  # no id is divided


@pytest.mark.parametrize(
    "make", [lambda g: iid(5000, 7, g), lambda g: dirichlet(LABELS, 7, g, alpha=0.3), lambda g: shards(LABELS, 7, g)]
)
def test_the_seed_decides(make: Any) -> None:
    first, again, other = make(rng(1)), make(rng(1)), make(rng(2))
    assert all(map(np.array_equal, first, again))
    assert not all(a.tolist() == b.tolist() for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("alpha", "least"), [(0.1, 0.75), (0.3, 0.8), (1.0, 0.85), (10.0, 0.9)])
def test_dirichlet_mixtures_vary_as_alpha_says(alpha: float, least: float) -> None:
    """Members' shares of a label have the variance p (1 - p) / (alpha + 1) of Dirichlet(alpha p), and that of drawing 50 samples
    on top; somewhat less because labels run out, as the docstring says."""
    parts = dirichlet(np.repeat(np.arange(10), 2000), 400, rng(), alpha=alpha)
    shares = mixtures(parts, np.repeat(np.arange(10), 2000))
    between = 0.09 / (alpha + 1)
    expected = between + (0.09 - between) / 50
    assert shares.mean(axis=0) == pytest.approx(0.1)  # exact: everything is dealt
    assert least < shares.var(axis=0).mean() / expected < 1.05


def test_a_tiny_alpha_gives_one_label_and_a_huge_one_iid() -> None:
    one = mixtures(dirichlet(LABELS, 1000, rng(), alpha=1e-6), LABELS)
    assert np.median(one.max(axis=1)) == 1.0
    alike = mixtures(dirichlet(LABELS, 10, rng(), alpha=1e6), LABELS)
    assert alike == pytest.approx(np.broadcast_to(np.bincount(LABELS) / 5000, alike.shape), abs=0.06)


def test_nobody_gets_only_leftovers() -> None:
    """Dealt member by member, the last ones would get what is left: their mixtures would lie nearer to one another."""
    shares = mixtures(dirichlet(LABELS, 100, rng(), alpha=0.3), LABELS)
    largest = shares.max(axis=1)
    assert largest[50:].mean() == pytest.approx(largest[:50].mean(), abs=0.12)


def test_shards_give_few_labels_each() -> None:
    labels = np.repeat(np.arange(10), 100)[np.random.default_rng(1).permutation(1000)]
    parts = shards(labels, 50, rng())  # 100 shards of 10: each of one label
    assert all(len(part) == 20 and len(set(labels[part].tolist())) <= 2 for part in parts)
    parts = shards(labels, 100, rng(), each=1)
    assert all(len(part) == 10 and len(set(labels[part].tolist())) == 1 for part in parts)


def test_natural_ids_are_dealt_in_their_order() -> None:
    parts = natural(["b", "a", "c", "a", "b", "d", "e"], 2)
    assert [part.tolist() for part in parts] == [[1, 2, 3, 6], [0, 4, 5]]  # a, c, e; b, d
    assert [part.tolist() for part in natural(np.array([7, 3, 7]), 2)] == [[1], [0, 2]]


class Partitions:
    """What is used of a flwr-datasets partitioner."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        self.num_partitions = len(parts)

    def load_partition(self, partition_id: int) -> Any:
        return self._parts[partition_id]


def test_a_partitioner_is_taken_over_by_its_row_column() -> None:
    parts = from_partitioner(Partitions([{"row": [4, 0], "image": []}, {"row": np.array([2], dtype=np.int32)}]), 6)
    assert [part.tolist() for part in parts] == [[0, 4], [2]]  # 1, 3 and 5 are nobody's: allowed
    assert all(part.dtype == np.int64 for part in parts)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([{"image": [1]}], "dataset.add_column"),
        ([[1, 2]], "partition 0 has no column 'row'"),
        ([{"row": [0]}, {"row": []}], "partition 1 must have at least one integer"),
        ([{"row": [0.5]}], "at least one integer"),
        ([{"row": [0, 1]}, {"row": [1]}], "sample 1 is in 2 partitions"),
        ([{"row": [6]}], "from 0 to 5; got 6 to 6"),
        ([{"row": [-1]}], "got -1"),
        ([], "no partitions"),
    ],
)
def test_a_partitioner_that_cannot_be_used_is_refused(parts: list[Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_partitioner(Partitions(parts), 6)
    assert says in str(caught.value)


def test_too_few_samples_are_refused_not_retried() -> None:
    with pytest.raises(ConfigError, match="99 samples are too few for 10 members with at least 10 each"):
        dirichlet(np.zeros(99), 10, rng(), alpha=1.0, minimum=10)
    assert min(map(len, dirichlet(np.zeros(100), 10, rng(), alpha=1.0, minimum=10))) == 10
    with pytest.raises(ConfigError, match="5 samples are too few for 6 members"):
        iid(5, 6, rng())
    with pytest.raises(ConfigError, match="too few for 3 members with at least 2"):
        shards([1, 2, 3, 4, 5], 3, rng())
    with pytest.raises(ConfigError, match="2 different ids cannot be dealt to 3 members"):
        natural([1, 1, 2], 3)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="alpha must be positive"):
        dirichlet([0, 1], 1, rng(), alpha=0.0)
    with pytest.raises(ConfigError, match="at least one member"):
        iid(5, 0, rng())
    with pytest.raises(ConfigError, match="at least one shard"):
        shards([0, 1], 1, rng(), each=0)
    for wrong in ([], [[1, 2]], 3):
        with pytest.raises(ConfigError, match="one label or id a sample"):
            natural(wrong, 1)
