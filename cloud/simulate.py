"""``fleetddp simulate``: runs a scenario under one policy or several, and shows what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fleetddp.common.errors import ConfigError, FleetError
from fleetddp.edge.sim.report import MIB, page, summary, target
from fleetddp.edge.sim.scenario import Scenario, with_policy
from fleetddp.edge.sim.simulator import Simulation
from fleetddp.edge.sim.timeline import Row, Timeline
from fleetddp.edge.sim.violations import InvariantViolation

FILE_WIDTH = 160  # of tables that go to no terminal
LINES = 30  # of the table of windows: with more windows than that, a line stands for several
COUNTS = ("arrived", "late", "stale", "refused", "dropped")


def simulate(
    scenario: Scenario, path: Path, *, compare: Sequence[str], seed: int | None, out: Path | None, as_json: bool
) -> None:
    """Run the scenario, read from ``path``; ``compare`` names policies, ``out`` is a folder for events, page and summary."""
    if seed is not None:
        scenario = scenario.model_copy(update={"seed": seed})
    scenarios = {name: with_policy(scenario, name) for name in compare} or {scenario.fleet.window.preset: scenario}
    runs = {}
    with _progress(scenario, list(scenarios), quiet=as_json) as advance:
        for name, one in scenarios.items():
            runs[name] = _run(name, one, out, advance, again=_again(path, one, name if compare else ""))
    figures = {name: summary(timeline, target(scenario)) for name, timeline in runs.items()}
    result = {"scenario": str(path), "seed": scenario.seed, "policies": figures}
    if out is not None:
        (out / "index.html").write_text(page(scenario, runs), encoding="utf-8")
        (out / "summary.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    if as_json:
        print(json.dumps(result))
        return
    console = Console() if sys.stdout.isatty() else Console(width=FILE_WIDTH)
    if len(runs) == 1:
        console.print(windows(next(iter(runs.values()))))
    console.print(comparison(figures))
    if out is not None:
        console.print(f"written to {out}: index.html, summary.json and the events of each policy", highlight=False)


def _again(path: Path, scenario: Scenario, policy: str) -> str:
    """The command that runs just this."""
    return f"fleetddp simulate {path} --seed {scenario.seed}" + (f" --compare {policy}" if policy else "")


def _run(name: str, scenario: Scenario, out: Path | None, advance: Advance, *, again: str) -> Timeline:
    with ExitStack() as stack:
        log = None
        if out is not None:
            try:
                out.mkdir(parents=True, exist_ok=True)
                log = stack.enter_context((out / f"{name}.jsonl").open("w", encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"--out: cannot write to {out}: {error.strerror}") from error
        simulation = Simulation(scenario, log=log)
        try:
            return simulation.run(progress=lambda virtual_s: advance(name, virtual_s, simulation.timeline))
        except InvariantViolation as violation:
            raise FleetError(f"an invariant does not hold under {name}:\n{violation}\nThis runs it again: {again}") from violation


class Advance:
    """Moves the bars."""

    def __init__(self, progress: Progress, scenario: Scenario, names: Sequence[str]) -> None:
        self._progress = progress
        self._tasks = {name: progress.add_task(name, total=scenario.horizon_s, start=False, said="") for name in names}

    def __call__(self, name: str, virtual_s: float, timeline: Timeline) -> None:
        """A run has come so far."""
        task = self._tasks[name]
        self._progress.start_task(task)
        accuracy = timeline.rows[-1].accuracy if timeline.rows else None
        said = f"{clock(virtual_s)}  version {timeline.version}" + ("" if accuracy is None else f"  accuracy {accuracy:.3f}")
        self._progress.update(task, completed=virtual_s, said=said)
        if timeline.finished:
            self._progress.update(task, total=virtual_s, said=f"{said}  {timeline.finished}")


@contextmanager
def _progress(scenario: Scenario, names: Sequence[str], *, quiet: bool) -> Iterator[Advance]:
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        yield Advance(progress, scenario, names)


def windows(timeline: Timeline) -> Table:
    """One line for each window, or for several."""
    rows = timeline.rows
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("version", "time", *COUNTS, "MiB up", "MiB down", "loss", "accuracy"):
        table.add_column(column, justify="right")
    each = max(1, -(-len(rows) // LINES))
    for first in range(0, len(rows), each):
        table.add_row(*_line(rows[first : first + each]))
    return table


def _line(rows: Sequence[Row]) -> list[str]:
    first, last = rows[0], rows[-1]
    return [
        str(last.version) if first is last else f"{first.version}-{last.version}",
        clock(last.published_at),
        *(str(sum(getattr(row, name) for row in rows)) for name in COUNTS),
        *(_mib(sum(getattr(row, name) for row in rows)) for name in ("bytes_up", "bytes_down")),
        _number(last.loss),
        _number(last.accuracy),
    ]


def comparison(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line for each policy."""
    tiers = sorted({tier for one in figures.values() for tier in one["utilisation"]})
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("policy")
    for column in (
        "versions",
        "time",
        *COUNTS,
        "MiB up",
        "MiB down",
        "accuracy",
        "to target",
        *(f"{tier} busy" for tier in tiers),
    ):
        table.add_column(column, justify="right")
    for name, one in figures.items():
        reached = one["seconds_to_target"]
        table.add_row(
            name,
            str(one["versions"]),
            clock(one["virtual_s"]),
            *(str(one[count]) for count in COUNTS),
            *(_mib(one[count]) for count in ("bytes_up", "bytes_down")),
            _number(one["accuracy"]),
            "" if reached is None else clock(reached),
            *(f"{one['utilisation'].get(tier, 0.0):.0%}" for tier in tiers),
        )
    return table


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _mib(size: int) -> str:
    return f"{size / MIB:.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
