"""``fleetddp status``: what a coordinator says of its run, as tables for people or JSON for scripts."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import ConfigError
from fleetddp.common.transport.uplink import Uplink

REFRESH_S = 1.0
MAX_METRICS = 3  # of a version, so that a line holds them


def show(address: str, security: SecurityConfig, *, as_json: bool, watch: bool) -> None:
    """Ask once and print, or again every second (``watch``). Raises ``Unreachable`` when nobody answers."""
    if as_json and watch:
        raise ConfigError("--json prints once and --watch shows tables: give one of them")
    with contextlib.ExitStack() as uplinks:

        def ask(track: str = "") -> dict[str, Any]:
            if track not in asked:
                asked[track] = Uplink(address, security, node="", track=track)
                uplinks.callback(asked[track].close)
            return asked[track].status()

        def look() -> dict[str, dict[str, Any]]:
            first = ask()
            others = [name for name in first.get("tracks", ()) if name != first["track"]]
            return {first.get("track", ""): first, **{name: ask(name) for name in others}}

        asked: dict[str, Uplink] = {}
        if as_json:
            found = look()
            print(json.dumps(found.get("", {"tracks": found}), indent=2))
        elif not watch:
            Console().print(render_all(look()))
        else:
            with Live(render_all(look()), auto_refresh=False) as live:
                while True:
                    time.sleep(REFRESH_S)
                    live.update(render_all(look()), refresh=True)


def render_all(statuses: Mapping[str, Mapping[str, Any]]) -> Group:
    """Each track's, one below the other; of a run that has only one, that."""
    return Group(*map(render, statuses.values()))


def render(status: Mapping[str, Any]) -> Group:
    """A run's status as a headline, the window's reason, and tables of members and versions; ages by the coordinator's clock."""
    window, now = status["window"], status["at"]
    newest = status["version"]
    track = f"   track {status['track']} ({status['tracks'][status['track']]['kind']})" if "track" in status else ""
    headline = f"run {status['run']}{track}   version {newest if newest >= 0 else 'none yet'}"
    if status["finished"]:
        headline += f"   finished: {status['finished']}"
    counters = status["counters"]
    refused = ", ".join(f"{reason} {count}" for reason, count in sorted(counters["refused"].items())) or "none"
    return Group(
        Text(headline, style="bold"),
        Text(f"window: {window['reason'] or 'not open'}"),
        *above(status.get("parent")),
        members_table(status["members"], newest=newest, now=now),
        versions_table(status["versions"], status["scores"], now=now),
        Text(f"updates: {counters['accepted']} accepted, {counters['merged']} merged; refused: {refused}"),
    )


def above(parent: Mapping[str, Any] | None) -> list[Text]:
    """Of a region: how it stands with its parent."""
    if parent is None:
        return []
    newest = parent["version"] if parent["version"] >= 0 else "none"
    waiting = f"{parent['partials']} partials not settled, {parent['accepted']} of them accepted"
    return [Text(f"region {parent['node']}: the parent's newest version is {newest}; {waiting}")]


def members_table(members: list[Mapping[str, Any]], *, newest: int, now: float) -> Table:
    """One row a member; staleness is how many versions behind the newest it trains."""
    table = Table(title="members", title_justify="left", expand=False)
    for name, justify in (("node", "left"), ("tier", "left"), ("seen", "right"), ("stale", "right"), ("updates", "right"),
                          ("refused", "right"), ("MiB in", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for m in members:
        base = m["base_version"]
        table.add_row(
            m["node"],
            m["tier"],
            f"{max(0.0, now - m['last_seen_s']):.0f} s ago" if m["live"] else "gone",
            str(newest - base) if base >= 0 else "-",
            str(m["updates"]),
            str(m["refused"]),
            f"{m['bytes'] / 2**20:.2f}",
            style=None if m["live"] else "dim",
        )
    return table


def versions_table(versions: list[Mapping[str, Any]], scores: Mapping[str, Mapping[str, float]], *, now: float) -> Table:
    """The last versions: how old, of how many updates, why the window closed, what members measured."""
    table = Table(title="versions", title_justify="left", expand=False)
    for name in ("version", "age", "updates", "reason", "metrics"):
        table.add_column(name, justify="right" if name in ("version", "age", "updates") else "left")
    for v in versions[-5:]:
        measured = {**v["metrics"], **scores.get(str(v["number"]), {})}
        metrics = "  ".join(f"{name} {value:.3f}" for name, value in sorted(measured.items())[:MAX_METRICS])
        age = f"{max(0.0, now - v['published_at']):.0f} s"
        table.add_row(str(v["number"]), age, str(v["updates"]), v["reason"], metrics)
    return table
