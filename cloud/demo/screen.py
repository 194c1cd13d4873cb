"""What people see while the demo runs: a live table on a terminal, a line for each version elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleetddp.cloud.demo.children import Children
from fleetddp.cloud.demo.observer import Point
from fleetddp.cloud.demo.plan import DEVICES, RANKS, SITE, VERSIONS
from fleetddp.edge.tasks.digits import CLASSES

BLOCKS = " ▁▂▃▄▅▆▇█"


class Screen:
    """Shows the run; a context manager. On a terminal in place, otherwise line by line."""

    def __init__(self, children: Children, holdings: Mapping[str, Sequence[int]]) -> None:
        self._children = children
        self._holdings = holdings
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._shown = 0  # versions, where there is no terminal

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, what: str) -> None:
        """One line that stays."""
        self._console.print(what, highlight=False, markup=False, soft_wrap=True)

    def update(self, status: Mapping[str, Any], points: Sequence[Point], seconds: float) -> None:
        """Show how things stand."""
        if self._live is not None:
            self._live.update(self._render(status, points, seconds), refresh=True)
            return
        reasons = {version["number"]: version["reason"] for version in status["versions"]}
        for point in points[self._shown :]:
            reason = reasons.get(point.version, "")
            self.say(f"{seconds:5.0f} s  version {point.version:3}  accuracy {point.accuracy:.3f}  {reason}")
        self._shown = len(points)

    def compare(self, by_class: Mapping[str, Sequence[float]], fleet: float, alone: float) -> None:
        """The end: the fleet and the site alone, by class."""
        self.say("accuracy on held-out handwriting, by class:")
        table = Table(box=SIMPLE_HEAD)
        for column in ("class", *by_class):
            table.add_column(column, justify="right")
        for digit in range(CLASSES):
            table.add_row(str(digit), *(f"{values[digit]:.3f}" for values in by_class.values()), end_section=digit == CLASSES - 1)
        table.add_row("all", f"{fleet:.3f}", f"{alone:.3f}", style="bold")
        self._console.print(table)

    def _render(self, status: Mapping[str, Any], points: Sequence[Point], seconds: float) -> RenderableType:
        headline = f"FleetDDP demo   version {max(status['version'], 0)} of {VERSIONS}   {seconds:.0f} s"
        reason = status["finished"] or status["window"]["reason"] or "not open"
        counters = status["counters"]
        refused = ", ".join(f"{why} {count}" for why, count in counters["refused"].items()) or "none"
        lines = (f"window: {reason}", f"updates: {counters['accepted']} accepted; refused: {refused}")
        texts = [Text(line, no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(Text(headline, style="bold"), *texts, self._members(status), *_accuracy(points))

    def _members(self, status: Mapping[str, Any]) -> Table:
        known = {member["node"]: member for member in status["members"]}
        table = Table(box=SIMPLE_HEAD)
        for column in ("member", "pace", "holds", "state"):
            table.add_column(column, no_wrap=True)
        for column in ("stale", "updates", "refused", "KiB"):
            table.add_column(column, justify="right", no_wrap=True)
        paces = {device.name: f"+{1000 * device.pace_s:.0f} ms" for device in DEVICES}
        for name in (SITE, *paces):
            member = known.get(name)
            cells = ["", "", "", ""]
            if member is not None:
                cells = [str(member[key]) for key in ("staleness", "updates", "refused")] + [f"{member['bytes'] / 1024:.0f}"]
            held = "".join(str(digit) if count else "·" for digit, count in enumerate(self._holdings[name]))
            state = self._state(name, member, ended=bool(status["finished"]))
            table.add_row(name, paces.get(name, f"{RANKS} ranks"), held, state, *cells)
        return table

    def _state(self, name: str, member: Mapping[str, Any] | None, *, ended: bool) -> str:
        if self._children.killed(name):
            return "[red]killed[/]"
        if name not in self._children.names:
            return "[dim]not there yet[/]"
        if member is None:
            return "starting"
        if not member["live"]:
            return "[dim]left[/]" if ended else "[red]lost[/]"
        return "[green]update is in[/]" if member["arrived"] else "training"


def _accuracy(points: Sequence[Point]) -> list[Text]:
    """Over the versions, and by class."""
    if not points:
        return [Text("accuracy: no version yet")]
    best = max(points, key=lambda point: point.accuracy)
    so_far = f"accuracy {points[-1].accuracy:.3f}, best {best.accuracy:.3f} of version {best.version}"
    history = Text(f"{so_far}  {bars([point.accuracy for point in points])}")
    by_class = "  ".join(f"{digit} {bars([points[-1].metrics[f'accuracy_{digit}']])}" for digit in range(CLASSES))
    return [history, Text(f"by class  {by_class}")]


def bars(values: Sequence[float]) -> str:
    """Values of 0 to 1 as a row of blocks."""
    return "".join(BLOCKS[round(value * (len(BLOCKS) - 1))] for value in values)
