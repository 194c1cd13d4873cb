"""What members measured: of published versions (which may end the run), and of their training (it goes into the next version)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from fleetddp.common.config import UntilConfig
from fleetddp.common.update import Update

REMEMBERED = 100  # versions


class Scores:
    """The newest value of each metric, for each of the last versions that somebody evaluated."""

    def __init__(self) -> None:
        self.by_version: dict[int, dict[str, float]] = {}

    def add(self, version: int, metrics: Mapping[str, float]) -> None:
        """A member evaluated ``version``. Values that are not finite say nothing."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.by_version.setdefault(version, {}).update(finite)
        if len(self.by_version) > REMEMBERED:
            del self.by_version[min(self.by_version)]

    def reached(self, version: int, until: UntilConfig) -> str:
        """Why the run ends if this version has reached ``until``'s target; empty if not."""
        if until.metric is None or until.at_least is None:
            return ""
        value = self.by_version.get(version, {}).get(until.metric, -math.inf)
        return f"{until.metric} of version {version} is {value:.6g}" if value >= until.at_least else ""


def weighted_means(updates: Iterable[Update]) -> dict[str, float]:
    """Of each metric: the mean over the updates that report it, weighted by samples. Values that are not finite are left out."""
    sums: dict[str, tuple[float, float]] = {}
    for update in updates:
        for name, value in update.header.metrics.items():
            if math.isfinite(value):
                total, weight = sums.get(name, (0.0, 0.0))
                sums[name] = (total + update.samples * value, weight + update.samples)
    return {name: total / weight for name, (total, weight) in sorted(sums.items()) if math.isfinite(total)}
