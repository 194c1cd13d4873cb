"""Adaptive work in virtual time: a fleet, the slowest of which is ten times as slow as the fastest, arrives together."""

from __future__ import annotations

from typing import Any

import pytest

from fleetddp.edge.sim.timeline import Timeline
from tests.helpers.simulated import Record, add, simulation

GRACE_S = 10.0
HORIZON_S = 4 * 3600.0
DEVICES = 16
FASTEST_S = 0.2  # a step; the slowest needs 2 s
ADAPTIVE = {"steps": "adaptive", "min_steps": 50, "max_steps": 1000}
FIXED = 250  # steps, which take the fastest 50 s and the slowest 500 s
WARM = 6  # versions until all have shown their speed, and have heard of the pace


def run(work: dict[str, Any], quorum: float = 0.75, **conduct: Any) -> tuple[Any, Timeline]:
    """A fleet whose speeds lie evenly on a logarithmic scale. Its windows wait for 10 s after a quorum."""
    window = {"preset": "semi_sync", "quorum": quorum, "grace_s": GRACE_S, "deadline_s": 3600}
    members = {"heartbeat_s": 5, "lease_s": 30}
    made = simulation(HORIZON_S, window=window, record=Record(), work=work, members=members)
    for k in range(DEVICES):
        add(made, f"device-{k}", train_s=5 * step_s(k), **conduct)
    return made, made.run()


def step_s(k: int) -> float:
    return FASTEST_S * 10 ** (k / (DEVICES - 1))


def idle(made: Any) -> float:
    """The share of the time in which the devices were up and waited."""
    waited = sum(member.usage.seconds["wait"] for member in made.members.values())
    return waited / sum(sum(member.usage.seconds.values()) - member.usage.seconds["down"] for member in made.members.values())


def test_fast_and_slow_arrive_within_one_grace_and_idle_less() -> None:
    adaptive, together = run(ADAPTIVE)
    fixed, apart = run({"steps": "fixed"}, steps=FIXED)
    waiting, for_all = run({"steps": "fixed"}, quorum=1.0, steps=FIXED)

    settled = together.rows[WARM:]
    assert len(settled) > 50
    assert all(row.arrived == DEVICES and not row.late for row in settled)
    # No window lasts longer than its grace beyond the quorum: the others came within it.
    assert all("nobody else is on the way" in row.reason for row in settled)
    late = sum(row.late for row in apart.rows) / sum(row.arrived for row in apart.rows)
    print(
        f"\nidle: {idle(adaptive):.1%} with adaptive steps; with {FIXED} steps for everyone {idle(fixed):.1%}, and {late:.0%} of "
        f"the updates a window late, or {idle(waiting):.1%} where each window waits for all"
    )
    assert late > 0.3
    assert idle(adaptive) < idle(fixed) / 2 < idle(waiting) / 4
    assert not any(row.late for row in for_all.rows)

    fastest, slowest = (adaptive.members[f"device-{k}"].usage.seconds["train"] for k in (0, DEVICES - 1))
    assert fastest == pytest.approx(slowest, rel=0.1)


def test_a_member_that_pins_its_steps_keeps_them() -> None:
    made, timeline = run(ADAPTIVE, pinned=True, steps=70)
    driver = made.root.driver
    assert driver is not None
    shown = {member["node"]: member["step_s"] for member in driver.status()["members"]}
    assert shown == {f"device-{k}": pytest.approx(step_s(k)) for k in range(DEVICES)}
    assert all(row.samples == row.arrived * 70 * 2.0 for row in timeline.rows)


def test_a_fleet_begins_with_the_least() -> None:
    _, timeline = run(ADAPTIVE)
    first, last = timeline.rows[0], timeline.rows[-1]
    assert first.samples == first.arrived * 50 * 2.0  # two samples a step
    assert last.samples > 5 * first.samples
