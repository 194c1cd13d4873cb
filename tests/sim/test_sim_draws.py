"""Streams by name: equal names equal streams, and no stream moves another."""

from __future__ import annotations

import hashlib
import random

from hypothesis import given
from hypothesis import strategies as st

from fleetddp.edge.sim.draws import Draws

Names = tuple[str | int, ...]
names = st.lists(st.one_of(st.text(max_size=4), st.integers(-3, 3)), max_size=3).map(tuple)


def test_a_stream_is_seeded_by_the_hash_of_seed_and_names() -> None:
    """Against the documented construction, so that a change of it (which changes every published run) is noticed."""
    digest = hashlib.sha256(b"fleetddp.sim:7" + b"s7:phone-1" + b"i2:12").digest()
    assert Draws(7).stream("phone-1", 12).random() == random.Random(int.from_bytes(digest, "big")).random()


@given(st.integers(), names, names, st.integers(0, 50))
def test_drawing_more_in_one_stream_shifts_no_other(seed: int, a: Names, b: Names, n: int) -> None:
    alone = Draws(seed).stream(*b).random()
    draws = Draws(seed)
    other, stream = draws.stream(*a), draws.stream(*b)
    for _ in range(n):
        other.gauss(0, 1)
        draws.uniform(*a)
        draws.stream("new", n)
    assert stream.random() == alone


@given(st.lists(st.tuples(st.integers(0, 3), names), min_size=2, max_size=8, unique_by=repr))
def test_different_names_or_seeds_give_different_streams(keys: list[tuple[int, Names]]) -> None:
    """Also ("a", "b") and ("ab",), 1 and "1", and the empty name."""
    assert len({Draws(seed).stream(*name).random() for seed, name in keys}) == len(keys)
    assert len({Draws(seed).uniform(*name) for seed, name in keys}) == len(keys)


def test_uniform_draws_are_uniform_and_pure() -> None:
    draws = Draws(3)
    values = [draws.uniform("device", k) for k in range(4000)]
    assert all(0 <= value < 1 for value in values)
    assert abs(sum(values) / 4000 - 0.5) < 4 * (1 / 12 / 4000) ** 0.5
    counts = [sum(k / 10 <= value < (k + 1) / 10 for value in values) for k in range(10)]
    assert sum((count - 400) ** 2 / 400 for count in counts) < 27.9  # chi squared, 9 degrees, p = 0.001
    assert [draws.uniform("device", k) for k in reversed(range(4000))] == values[::-1]


def test_array_generators_repeat_and_differ() -> None:
    draws = Draws(3)
    first = draws.generator("partition").random(5).tolist()
    assert draws.generator("partition").random(5).tolist() == first
    assert draws.generator("other").random(5).tolist() != first
