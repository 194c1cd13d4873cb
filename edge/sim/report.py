"""What is told of simulations: the figures of a run, and a page that lays several policies side by side over one fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from fleetddp.common.charts import Bars, Line, bars, colours, document, lines, table
from fleetddp.common.update import Tier
from fleetddp.edge.sim.scenario import Scenario
from fleetddp.edge.sim.timeline import Row, Timeline

MIB = 2**20
STALEST = 10  # staler updates share the last bar of the histogram
UNITS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))

Runs = Mapping[str, Timeline]  # by policy


def target(scenario: Scenario) -> float | None:
    """The accuracy that the fleet file wants, if it wants one."""
    until = scenario.fleet.until
    return until.at_least if until.metric == "accuracy" else None


def summary(timeline: Timeline, wanted: float | None) -> dict[str, Any]:
    """The figures of one run, as JSON-able values; ``wanted`` is an accuracy."""
    rows = timeline.rows
    measured = [row.accuracy for row in rows if row.accuracy is not None]
    staleness = sum(timeline.staleness.values(), Counter[int]())
    return {
        "versions": timeline.version,
        "virtual_s": timeline.virtual_s,
        "finished": timeline.finished,
        "accuracy": measured[-1] if measured else None,
        "seconds_to_target": None if wanted is None else timeline.seconds_to(wanted),
        "loss": next((row.loss for row in reversed(rows) if row.loss is not None), None),
        "samples": sum(row.samples for row in rows),
        **{name: sum(getattr(row, name) for row in rows) for name in ("arrived", "late", "stale", "refused", "dropped")},
        **{name: sum(getattr(row, name) for row in rows) for name in ("bytes_up", "bytes_down")},
        "mean_staleness": sum(s * n for s, n in staleness.items()) / max(1, staleness.total()),
        "utilisation": {tier.value: usage.utilisation for tier, usage in timeline.usage.items()},
        "events": timeline.totals.handled,
        "windows": [asdict(row) for row in rows],
    }


def page(scenario: Scenario, runs: Runs) -> str:
    """The whole page, of one policy or of several."""
    name = "policies" if len(runs) > 1 else "policy"
    devices = sum(section.count for section in scenario.populations.values())
    heads = ["policy", "versions", "merged", "late", "stale", "refused", "dropped", "MiB up", "MiB down", "accuracy", "to target"]
    progress, (seconds, unit) = _progress(runs), _unit(runs)
    timed = _curves(runs, progress.of, lambda row: row.published_at / seconds)
    parts = [
        f"<h1>{len(runs)} {name} over one fleet of {devices} devices</h1>",
        table(["", ""], _facts(scenario)),
        "<h2>By policy</h2>",
        table(heads, [_row(policy, summary(timeline, target(scenario))) for policy, timeline in runs.items()]),
        f"<h2>{progress.title} against virtual time</h2>",
        lines(timed, x=f"virtual {unit}", percent=progress.percent),
        f"<h2>{progress.title} against bytes</h2>",
        lines(_curves_by_bytes(runs, progress.of), x="MiB moved, up and down", percent=progress.percent),
        *_usage(runs),
        "<h2>Staleness of what was merged</h2>",
        "<p>Versions published between an update's base and the one that it is in; shares of all merged updates.</p>",
        _staleness(runs),
    ]
    return document("FleetDDP simulation", parts)


class _Progress:
    """What the upper curves show: accuracy where it is measured, else how much work was merged."""

    def __init__(self, title: str, of: Callable[[Timeline], list[float | None]], *, percent: bool) -> None:
        self.title, self.of, self.percent = title, of, percent


def _progress(runs: Runs) -> _Progress:
    if any(row.accuracy is not None for timeline in runs.values() for row in timeline.rows):
        return _Progress("Accuracy", lambda timeline: [row.accuracy for row in timeline.rows], percent=True)
    return _Progress("Samples merged", lambda timeline: list(accumulate(row.samples for row in timeline.rows)), percent=False)


def _curves(runs: Runs, of: Callable[[Timeline], list[float | None]], x: Callable[[Row], float]) -> dict[str, Line]:
    colour = colours(runs)
    return {
        name: Line(colour[name], [(x(row), y) for row, y in zip(timeline.rows, of(timeline), strict=True) if y is not None])
        for name, timeline in runs.items()
    }


def _curves_by_bytes(runs: Runs, of: Callable[[Timeline], list[float | None]]) -> dict[str, Line]:
    moved = {
        id(row): total / MIB
        for timeline in runs.values()
        for row, total in zip(timeline.rows, accumulate(row.bytes_up + row.bytes_down for row in timeline.rows), strict=True)
    }
    return _curves(runs, of, lambda row: moved[id(row)])


def _usage(runs: Runs) -> list[str]:
    """What the devices' time went into while they were up, by tier."""
    tiers = [tier for tier in Tier if any(tier in timeline.usage for timeline in runs.values())]
    colour, names = colours(runs), [tier.value for tier in tiers]

    def shares(of: Callable[[Timeline, Tier], float]) -> dict[str, Bars]:
        return {name: Bars(colour[name], [of(t, tier) if tier in t.usage else 0.0 for tier in tiers]) for name, t in runs.items()}

    return [
        "<h2>Utilisation by tier</h2>",
        "<p>The share of the time that devices were up in which they trained.</p>",
        bars(names, shares(lambda timeline, tier: timeline.usage[tier].utilisation)),
        "<h2>Idle time by tier</h2>",
        "<p>The share in which they waited: for a version, a window, or an answer.</p>",
        bars(names, shares(lambda timeline, tier: timeline.usage[tier].idle)),
    ]


def _staleness(runs: Runs) -> str:
    counts = {name: sum(timeline.staleness.values(), Counter[int]()) for name, timeline in runs.items()}
    most = min(STALEST, max((s for count in counts.values() for s in count), default=0))
    groups = [str(s) for s in range(most)] + [f"{most}+" if most == STALEST else str(most)]
    colour = colours(runs)
    shares = {}
    for name, count in counts.items():
        total = max(1, count.total())
        values = [count[s] / total for s in range(most)]
        shares[name] = Bars(colour[name], [*values, sum(n for s, n in count.items() if s >= most) / total])
    return bars(groups, shares, x="staleness, in versions")


def _facts(scenario: Scenario) -> list[list[str]]:
    facts = [["seed", str(scenario.seed)], ["mode", scenario.mode], ["horizon", f"{scenario.horizon_s:g} s"]]
    for name, section in scenario.populations.items():
        where = f" in region {section.region}" if section.region else ""
        facts.append([name, f"{section.count} {section.profile}, tier {section.tier.value}{where}, {section.samples:g} samples"])
    if scenario.mode == "timing":
        facts.append(["model", f"{scenario.model.parameters} parameters"])
    elif scenario.fleet.task is not None:
        facts.append(["task", scenario.fleet.task.target])
    return facts


def _row(policy: str, figures: Mapping[str, Any]) -> list[str]:
    accuracy, to_target = figures["accuracy"], figures["seconds_to_target"]
    return [
        policy,
        *(str(figures[name]) for name in ("versions", "arrived", "late", "stale", "refused", "dropped")),
        *(f"{figures[name] / MIB:.1f}" for name in ("bytes_up", "bytes_down")),
        "" if accuracy is None else f"{accuracy:.1%}",
        "" if to_target is None else f"{to_target:.0f} s",
    ]


def _unit(runs: Runs) -> tuple[float, str]:
    longest = max((timeline.rows[-1].published_at for timeline in runs.values() if timeline.rows), default=0.0)
    return next(unit for unit in UNITS if longest >= 3 * unit[0] or unit is UNITS[-1])
