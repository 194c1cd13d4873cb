"""What a test may ask of a simulation: assertions on its timeline that say what was wrong, and when."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from fleetddp.common.update import Tier

if TYPE_CHECKING:
    from collections import Counter

    from fleetddp.edge.sim.timeline import Row, TierUsage, Totals


class Assertions:
    """Mixed into ``Timeline``. Each raises ``AssertionError`` if it does not hold."""

    rows: list[Row]
    usage: dict[Tier, TierUsage]
    staleness: dict[Tier, Counter[int]]
    totals: Totals
    finished_at: float | None

    def assert_versions_advance(self, *, within_s: float, after_s: float = 0.0) -> None:
        """From ``after_s`` on, never more than ``within_s`` passed without a new version, until the end."""
        end = self.totals.virtual_s if self.finished_at is None else self.finished_at
        times = [after_s, *(row.published_at for row in self.rows if after_s < row.published_at), end]
        for before, after in pairwise(times):
            assert after - before <= within_s, (
                f"no new version for {after - before:.1f} s from {before:.1f} s on; {within_s:g} s were allowed"
            )

    def assert_reaches(self, accuracy: float, *, within_s: float) -> None:
        """A version of at least this accuracy was published by then (``train`` mode)."""
        measured = [(row.accuracy, row.published_at) for row in self.rows if row.accuracy is not None]
        assert measured, "no version was evaluated: is the scenario in train mode, and does its task's evaluate give accuracy?"
        in_time = [value for value, time in measured if time <= within_s]
        best = max(in_time, default=0.0)
        assert best >= accuracy, f"the best accuracy within {within_s:g} s was {best:.3f}, not {accuracy:g}"

    def assert_staleness(self, *, at_most: int) -> None:
        """No update was merged that was based on a version more than so many before its own."""
        for tier, counts in self.staleness.items():
            worst = max(counts)
            assert worst <= at_most, f"an update of tier {tier.value} was merged with staleness {worst}; {at_most} was allowed"

    def assert_merged(self, *, share: float) -> None:
        """At least this share of the units of work that were begun and can be told about is in a version.

        Not counted: what was still on its way at the end, at most a window's worth.
        """
        merged = sum(row.arrived for row in self.rows)
        wasted = sum(row.stale + row.refused + row.dropped for row in self.rows)
        found = merged / max(1, merged + wasted)
        assert found >= share, (
            f"{found:.1%} of the work was merged, not {share:.1%}: {merged} updates in versions, {wasted} refused or lost"
        )

    def assert_utilisation(self, tier: str, *, at_least: float) -> None:
        """Devices of this tier trained in at least this share of the time that they were up."""
        found = self.usage[Tier(tier)].utilisation
        assert found >= at_least, f"devices of tier {tier} trained in {found:.1%} of their time, not {at_least:.1%}"

    def assert_bytes(self, *, up_at_most: float) -> None:
        """All updates together took at most so many bytes, as encoded."""
        found = sum(row.bytes_up for row in self.rows)
        assert found <= up_at_most, f"{found} bytes of updates arrived; {up_at_most:g} were allowed"
