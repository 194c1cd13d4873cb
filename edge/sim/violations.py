"""What a checker says when an invariant does not hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Violation(NamedTuple):
    """What was found to be wrong."""

    invariant: str
    at_s: float
    what: str

    def __str__(self) -> str:
        return f"{self.invariant}, at {self.at_s:.6f} s: {self.what}"


class InvariantViolation(AssertionError):
    """An invariant does not hold: a defect, of FleetDDP or of the simulator."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("\n".join(str(violation) for violation in violations))
        self.violations = tuple(violations)
