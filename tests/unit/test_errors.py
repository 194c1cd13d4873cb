"""Every refusal has a row: a status that exists, who must act, whether to retry."""

from __future__ import annotations

import grpc
import pytest

from fleetddp.common.errors import REASONS, Reason, Refused


def test_every_reason_has_a_rule_and_no_rule_lacks_a_reason() -> None:
    assert set(REASONS) == set(Reason)


@pytest.mark.parametrize("reason", list(Reason))
def test_each_rule_is_complete(reason: Reason) -> None:
    rule = REASONS[reason]
    assert hasattr(grpc.StatusCode, rule.status)
    assert rule.status not in ("OK", "UNKNOWN", "INTERNAL")
    assert rule.action
    assert reason.value == reason.name, "the value travels on the wire"


def test_a_refusal_says_what_and_who() -> None:
    error = Refused(Reason.NOT_FINITE, "element 3 is nan")
    assert str(error) == "NOT_FINITE: element 3 is nan (the member drops it: its training diverged, or a sample is none)"
    assert not error.retry
    assert error.status == "INVALID_ARGUMENT"
