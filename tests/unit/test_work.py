"""Work: a trace worked out by hand, the pace against a search, and the bounds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetddp.common.config import WorkConfig, parse
from fleetddp.common.errors import ConfigError
from fleetddp.common.update import Kind, Tier, UpdateHeader, UpdateId
from fleetddp.common.work import Speed, Work, pace

ADAPTIVE = WorkConfig(steps="adaptive", min_steps=2, max_steps=20)
sequences = itertools.count()


def header(node: str, base: int, steps: int, seconds: float, tier: Tier = Tier.EDGE, kind: Kind = Kind.DELTA) -> UpdateHeader:
    update_id = UpdateId(node, 1, next(sequences))
    return UpdateHeader(
        update_id=update_id, kind=kind, tier=tier, base_version=base, codec="float32", layout="", steps=steps, seconds=seconds
    )


def speed(step_s: float, besides_s: float = 0.0) -> Speed:
    made = Speed(step_s)
    made.learn(1, step_s, step_s + besides_s)
    return made


def test_a_trace_by_hand() -> None:
    work = Work(ADAPTIVE)
    assert work.steps(Tier.EDGE, None, 0, 100.0) == 2  # nothing shown yet: the least
    assert work.published(0, [], 2, now=100.0) == ""

    # Version 0 came at 100. The fast one makes 2 steps in 1 s, and its update is in at 103: 2 s besides. The slow one makes
    # them in 10 s, joined at 101, and is in at 115: 4 s besides.
    fast = work.learn(None, header("fast", 0, 2, 1.0), joined_at=0.0, now=103.0)
    slow = work.learn(None, header("slow", 0, 2, 10.0), joined_at=101.0, now=115.0)
    assert fast is not None
    assert slow is not None
    assert (fast.step_s, fast.besides_s, slow.step_s, slow.besides_s) == (0.5, 2.0, 5.0, 4.0)

    # Spans: fast 2 + [2, 20] * 0.5 = [3, 12]; slow 4 + [2, 20] * 5 = [14, 104]. They do not meet, so the latest time of one: 104.
    assert work.published(1, [fast, slow], 2, now=120.0) == "a unit of work takes 104 s: 20 to 20 steps for 2 members"
    assert work.pace_s == 104.0
    assert work.steps(Tier.EDGE, fast, 1, 121.0) == 20
    assert work.steps(Tier.EDGE, slow, 1, 121.0) == 20

    # The slow one now makes 20 steps in 20 s: 1 s each, so by half 5 + (1 - 5) / 2 = 3 s; its least time besides stays 4 s.
    # It is in at 120 + 25. Its span is 4 + [6, 60] = [10, 64], which meets that of the fast one, [3, 12]: until 12.
    assert work.learn(slow, header("slow", 1, 20, 20.0), joined_at=101.0, now=145.0) is slow
    assert (slow.step_s, slow.besides_s) == (3.0, 4.0)
    assert work.published(2, [fast, slow], 2, now=150.0) == "a unit of work takes 12 s: 2 to 20 steps for 2 members"
    assert work.steps(Tier.EDGE, fast, 2, 155.0) == 20
    assert work.steps(Tier.EDGE, slow, 2, 155.0) == 2  # (12 - 4) / 3, rounded down

    # Who is behind begins when it is ready. The others are due at 150 + 12: at 155 there are 7 s left, which give the fast one
    # (7 - 2) / 0.5 steps. The slow one cannot make two of 3 s in 7 - 4: it makes two, and will be in step by the next version.
    assert work.steps(Tier.EDGE, fast, 1, 155.0) == 10
    assert work.steps(Tier.EDGE, slow, 1, 155.0) == 2
    assert work.steps(Tier.EDGE, fast, 1, 1000.0) == 2  # they are overdue

    # Nothing has changed: the pace stands, and nothing is said. Then the fast one slows down by less than a tenth.
    assert work.published(3, [fast, slow], 2, now=160.0) == ""
    work.learn(fast, header("fast", 3, 20, 10.4), joined_at=0.0, now=172.4)
    assert fast.step_s == pytest.approx(0.51)
    assert fast.besides_s == 2.0
    assert work.published(4, [fast, slow], 2, now=175.0) == ""
    assert work.pace_s == pytest.approx(2.0 + 20 * 0.51)


def test_what_was_not_its_own_time_does_not_count_besides() -> None:
    work = Work(ADAPTIVE)
    work.published(0, [], 1, now=0.0)
    phone = work.learn(None, header("phone", 0, 2, 1.0), joined_at=500.0, now=504.0)  # it came when version 0 was old
    assert phone is not None
    assert phone.besides_s == 3.0
    work.learn(phone, header("phone", 0, 2, 1.0), joined_at=500.0, now=507.0)  # on the same version, when it was done
    assert phone.besides_s == 2.0
    work.learn(phone, header("phone", 7, 2, 1.0), joined_at=500.0, now=508.1)  # on a version of which nothing is known
    assert phone.besides_s == 2.0
    for now in (600.0, 700.0, 800.0):
        work.learn(phone, header("phone", 0, 2, 1.0), joined_at=500.0, now=now)
        assert phone.besides_s == 2.0  # the least of the last four


def test_the_steps_of_proportional_speeds_are_proportional() -> None:
    fleet = [speed(0.1 * factor) for factor in range(1, 11)]  # ten times as slow as the fastest, at most
    work = Work(WorkConfig(steps="adaptive", min_steps=1, max_steps=100))
    known = [work.learn(one, header(f"n{k}", 0, 1, one.step_s), joined_at=0.0, now=0.0) for k, one in enumerate(fleet)]
    work.published(1, fleet, len(fleet), now=0.0)
    assert work.pace_s == pytest.approx(10.0)
    assert [work.steps(Tier.EDGE, one, 1, 0.0) for one in known] == [100, 50, 33, 25, 20, 16, 14, 12, 11, 10]


def test_one_that_is_far_too_fast_or_slow_does_not_set_the_pace() -> None:
    fleet = [speed(1.0), speed(1.2), speed(1.5)]
    assert pace([*fleet, speed(0.001), speed(1000.0)], 2, 20) == pace(fleet, 2, 20) == 20.0


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 6))
def test_the_pace_suits_the_most_and_is_the_latest_that_does(fleet: list[tuple[int, int]], low: int, more: int) -> None:
    high = low + more
    speeds = [speed(float(step_s), float(besides_s)) for step_s, besides_s in fleet]
    spans = [(one.unit_s(low), one.unit_s(high)) for one in speeds]

    def suits(at: float) -> int:
        return sum(start <= at <= stop for start, stop in spans)

    found = pace(speeds, low, high)
    assert found is not None
    times = [n / 2 for n in range(2 * (30 + 30 * 10) + 2)]  # every time at which anything begins or ends, and those between
    most = max(map(suits, times))
    assert suits(found) == most
    assert found == max(at for at in times if suits(at) == most)


def test_the_pace_is_looked_for_when_enough_has_changed() -> None:
    work = Work(ADAPTIVE)
    known = work.learn(None, header("one", 0, 2, 2.0), joined_at=0.0, now=0.0)
    assert known is not None
    assert work.published(1, [known], 9, now=1.0) == ""  # one of nine
    assert work.pace_s is None
    assert work.steps(Tier.EDGE, known, 1, 1.0) == 2
    work.learn(known, header("one", 0, 2, 2.0), joined_at=0.0, now=0.0)
    assert work.published(2, [known], 9, now=2.0) != ""  # two of nine are more than one in eight
    assert work.pace_s == 20.0


@pytest.mark.parametrize(
    "update",
    [
        header("site", 0, 2, 1.0, tier=Tier.SITE),  # it keeps its ``sync_every``
        header("edge", 0, 1, 1.0, kind=Kind.GRADIENT),
        header("edge", 0, 2, 0.0),
        header("edge", 0, 2, float("nan")),
    ],
)
def test_what_shows_no_speed(update: UpdateHeader) -> None:
    assert Work(ADAPTIVE).learn(None, update, joined_at=0.0, now=1.0) is None


def test_fixed_work_tells_nobody_anything() -> None:
    work = Work(WorkConfig())
    assert work.learn(None, header("edge", 0, 2, 1.0), joined_at=0.0, now=1.0) is None
    assert work.published(1, [], 1, now=2.0) == ""
    assert work.steps(Tier.EDGE, None, 1, 2.0) == 0
    assert Work(ADAPTIVE).steps(Tier.SITE, None, 0, 0.0) == 0


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"work": {"min_steps": 5, "max_steps": 4}}, "min_steps"),
        ({"work": {"steps": "adaptive"}, "edge": {"update": "gradient"}}, "gradient makes none"),
    ],
)
def test_settings_that_contradict_themselves(section: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(section)
