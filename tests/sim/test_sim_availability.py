"""Availability is a pure function of time: the same answers however often, and in which order, it is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetddp.common.errors import ConfigError
from fleetddp.edge.sim.availability import (
    DAY,
    HOUR,
    Always,
    Availability,
    Every,
    Nightly,
    Nights,
    Outages,
    Trace,
    read_traces,
)
from fleetddp.edge.sim.draws import Draws

NIGHTS = Nights()


def combined(seed: int) -> Availability:
    draws = Draws(seed)
    night = Nightly(draws, "phone-1", NIGHTS, utc_offset_h=-5.0)
    return Every(night, Outages(draws, "europe", daily=0.7, mean_s=3 * HOUR), Outages(draws, "phone-1", daily=0.9, mean_s=HOUR))


MAKERS: dict[str, Callable[[int], Availability]] = {
    "always": lambda seed: Always(),
    "nights": lambda seed: Nightly(Draws(seed), "phone-1", NIGHTS, utc_offset_h=9.5),
    "every second night": lambda seed: Nightly(Draws(seed), "phone-1", Nights(share=0.5), utc_offset_h=seed / 77),
    "outages": lambda seed: Outages(Draws(seed), "europe", daily=0.5, mean_s=6 * HOUR),
    "combined": combined,
    "trace": lambda seed: Trace(True, [10.0, 5000.0, 90000.5]),
    "repeating, even": lambda seed: Trace(False, [0.1 * HOUR, 7.3 * HOUR], 10.1 * HOUR),
    "repeating, odd": lambda seed: Trace(True, [HOUR, 2 * HOUR, 3 * HOUR], DAY),
}
asked = st.lists(st.floats(-3 * DAY, 40 * DAY), min_size=1, max_size=20)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=30)
@given(seed=st.integers(0, 1000), times=asked, more=asked, ahead=st.floats(0, 3 * DAY))
def test_answers_do_not_depend_on_what_was_asked_before(
    kind: str, seed: int, times: list[float], more: list[float], ahead: float
) -> None:
    make = MAKERS[kind]
    fresh = [(make(seed).state_at(t), make(seed).next_change(t), make(seed).next_change(t, t + ahead)) for t in times]
    device = make(seed)
    for t in more:  # often, in any order
        device.next_change(t, t + ahead)
        device.state_at(t)
        device.next_change(t)
    for k in reversed(range(len(times))):
        t = times[k]
        assert (device.state_at(t), device.next_change(t), device.next_change(t, t + ahead)) == fresh[k]
        assert (device.next_change(t, t + ahead), device.next_change(t), device.state_at(t)) == fresh[k][::-1]
        assert fresh[k][2] == (fresh[k][1] if fresh[k][1] < t + ahead else math.inf)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=30)
@given(seed=st.integers(0, 1000), t=st.floats(-3 * DAY, 40 * DAY), shares=st.lists(st.floats(0, 0.999), max_size=20))
def test_the_next_change_is_the_next_change(kind: str, seed: int, t: float, shares: list[float]) -> None:
    """The state holds from t up to it, and is the other one at it."""
    device = MAKERS[kind](seed)
    state, change = device.state_at(t), device.next_change(t)
    assert change > t
    end = min(change, t + 5 * DAY)
    for share in shares:
        between = t + share * (end - t)
        if between < end:
            assert device.state_at(between) == state
            assert device.next_change(between) == change
    if change < math.inf:
        assert device.state_at(change) != state


def test_a_member_that_polls_and_one_that_waits_for_changes_live_the_same_life() -> None:
    """The fault of other simulators, as it was seen: the share of time available depends on the polling interval."""
    horizon = 20 * DAY
    device = combined(4)
    t, up, changes = 0.0, 0.0, 0
    while t < horizon:
        after = min(device.next_change(t), horizon)
        up += (after - t) * device.state_at(t)
        t, changes = after, changes + 1
    polls = {step: sum(combined(4).state_at(k * step) for k in range(int(horizon / step))) * step for step in (300.0, 1800.0)}
    assert changes > 20
    for step, polled in polls.items():
        assert abs(polled - up) <= step * changes


def test_nights_follow_the_clock_of_the_time_zone() -> None:
    """No spread: from 22:00 to 06:00 local time, exactly, whatever the time zone."""
    nights = Nights(start_h=22.0, start_sd_h=0.0, length_h=8.0, length_sd_h=0.0, share=1.0)
    for offset in (-8.0, 0.0, 5.5):
        device = Nightly(Draws(1), "phone", nights, utc_offset_h=offset)
        for day in range(3):
            dusk = (day * 24 + 22 - offset) * HOUR
            assert device.next_change(dusk - HOUR) == pytest.approx(dusk, abs=1e-3)
            assert not device.state_at(dusk - 1)
            assert device.state_at(dusk + 1)
            assert device.next_change(dusk + 1) == pytest.approx(dusk + 8 * HOUR, abs=1e-3)


def test_a_fleet_of_nightly_devices_swings_with_the_day_and_keeps_to_its_share() -> None:
    draws = Draws(2)
    fleet = [Nightly(draws, k, NIGHTS) for k in range(400)]
    by_hour = [sum(device.state_at(5 * DAY + h * HOUR) for device in fleet) / 400 for h in range(24)]
    assert max(by_hour[1:4]) > 0.75  # at 1 to 3 in the morning nearly everybody who charges tonight: 85 %
    assert max(by_hour[11:18]) < 0.05
    nights = sum(any(device.state_at(day * DAY + m * HOUR / 2) for m in range(48)) for device in fleet[:100] for day in range(10))
    assert 0.85 * 1000 < nights < 1000  # calendar days touch two nights


def test_devices_of_a_region_fail_together_and_others_do_not() -> None:
    draws, span = Draws(5), 200 * DAY

    def starts(outages: Outages) -> list[float]:
        t, found = 0.0, []
        while (t := outages.next_change(t)) < span:
            if not outages.state_at(t):
                found.append(t)
        return found

    europe = starts(Outages(draws, "europe", daily=0.2, mean_s=HOUR))
    assert starts(Outages(draws, "europe", daily=0.2, mean_s=HOUR)) == europe
    assert not set(starts(Outages(draws, "asia", daily=0.2, mean_s=HOUR))) & set(europe)
    assert 20 <= len(europe) <= 60  # 40 expected; deviation 5.7
    assert starts(Outages(draws, "europe", daily=0.0, mean_s=HOUR)) == []


def test_every_waits_for_the_last_part_that_is_missing() -> None:
    both = Every(Trace(False, [10, 20, 30]), Trace(False, [15, 25, 28, 40]))
    changes, t = [], 0.0
    while (t := both.next_change(t)) < math.inf:
        changes.append((t, both.state_at(t)))
    assert changes == [(15, True), (20, False), (30, True), (40, False)]
    assert Every(Trace(False, []), Trace(True, [1, 2, 3])).next_change(0) == math.inf
    assert Every().state_at(0)
    assert Every().next_change(0) == math.inf


def test_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(
        '{"id": "a", "start": true, "changes": [10, 20.5]}\n\n{"id": "b", "start": false, "changes": [5], "period_s": 60}\n'
    )
    traces = read_traces(path)
    assert [traces["a"].state_at(t) for t in (-1, 9.9, 10, 20.4, 20.5, 1e9)] == [True, True, False, False, True, True]
    assert [traces["b"].state_at(t) for t in (0, 4, 5, 59, 60, 64.9, 65)] == [False, False, True, True, False, False, True]
    assert [traces["b"].next_change(t) for t in (0, 5, 59, 60)] == [5, 60, 60, 65]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: an object with id, start, changes"),
        ('{"id": "b", "start": true, "changes": [], "extra": 1}', "an object with"),
        ('{"id": "b", "start": 1, "changes": []}', "start true or false"),
        ('{"id": "b", "start": true, "changes": [true]}', "are numbers"),
        ('{"id": "b", "start": true, "changes": "10"}', "are numbers"),
        ('{"id": "a", "start": true, "changes": []}', "'a' has a trace already"),
        ('{"id": "b", "start": true, "changes": [2, 2]}', "line 2: the times of changes must be finite and rising"),
        ('{"id": "b", "start": true, "changes": [NaN]}', "must be finite"),
        ('{"id": "b", "start": true, "changes": [0, 5], "period_s": 9}', "0 < every change < period_s"),
        ('{"id": "b", "start": true, "changes": [9], "period_s": 9}', "0 < every change < period_s"),
        ('{"id": "b", "start": true, "changes": [], "period_s": 0}', "period_s"),
    ],
)
def test_a_wrong_trace_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text('{"id": "a", "start": true, "changes": []}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_traces(path)
    assert says in str(caught.value)


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.1}, {"start_h": 24.0}, {"length_h": 0.0}, {"start_sd_h": -1.0}])
def test_wrong_nights_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="got"):
        Nights(**wrong)


@pytest.mark.parametrize(("daily", "mean_s"), [(-0.1, 1.0), (1.1, 1.0), (0.5, 0.0), (0.5, math.inf)])
def test_wrong_outages_are_refused(daily: float, mean_s: float) -> None:
    with pytest.raises(ConfigError, match="outages need"):
        Outages(Draws(1), "x", daily=daily, mean_s=mean_s)
