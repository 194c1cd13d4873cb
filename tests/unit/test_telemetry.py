"""The log of an aggregator: every refusal is counted, but a flood of them is not written down."""

from __future__ import annotations

import logging

import pytest

from fleetddp.common.clock import VirtualClock
from fleetddp.common.errors import Reason
from fleetddp.common.events import Say
from fleetddp.common.telemetry import REFUSALS_PER_MINUTE, Telemetry


def test_a_flood_of_refusals_is_counted_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    telemetry = Telemetry(clock=clock)
    caplog.set_level(logging.INFO, "fleetddp")
    for _ in range(REFUSALS_PER_MINUTE + 70):
        telemetry.say(Say(what="refused", message="element 3 is nan", node="phone", reason=Reason.NOT_FINITE))
    telemetry.say(Say(what="refused", message="another fault", node="phone", reason=Reason.WRONG_LAYOUT))
    assert [r.getMessage() for r in caplog.records] == [
        *["refused: phone: element 3 is nan"] * REFUSALS_PER_MINUTE,
        "refused: phone: another fault",  # each reason by itself
    ]
    caplog.clear()
    clock.advance(59.9)
    telemetry.say(Say(what="refused", message="element 3 is nan", node="phone", reason=Reason.NOT_FINITE))
    assert caplog.records == []
    clock.advance(0.1)
    telemetry.say(Say(what="refused", message="element 3 is nan", node="phone", reason=Reason.NOT_FINITE))
    assert [r.getMessage() for r in caplog.records] == [
        "71 more were refused for NOT_FINITE and not logged",
        "refused: phone: element 3 is nan",
    ]
    assert telemetry.totals()["refused"] == {"NOT_FINITE": REFUSALS_PER_MINUTE + 72, "WRONG_LAYOUT": 1}


def test_what_is_no_refusal_is_always_logged(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry("digits", VirtualClock())
    caplog.set_level(logging.INFO, "fleetddp")
    for _ in range(2 * REFUSALS_PER_MINUTE):
        telemetry.say(Say(what="joined", message="an edge", node="phone"))
    assert [r.getMessage() for r in caplog.records] == ["digits: joined: phone: an edge"] * 2 * REFUSALS_PER_MINUTE
