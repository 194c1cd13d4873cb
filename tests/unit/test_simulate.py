"""``fleetddp simulate``: the command, its tables, its page and what it writes."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fleetddp.cloud.cli import app
from fleetddp.cloud.simulate import LINES, clock, comparison, windows
from fleetddp.common.errors import ConfigError, FleetError
from fleetddp.edge.sim.report import page, summary, target
from fleetddp.edge.sim.scenario import Scenario, parse, with_policy
from fleetddp.edge.sim.simulator import Simulation
from fleetddp.edge.sim.timeline import Timeline
from fleetddp.edge.sim.violations import InvariantViolation, Violation

SMALL: dict[str, Any] = {
    "seed": 5,
    "horizon_s": 1200,
    "fleet": {"members": {"heartbeat_s": 60, "lease_s": 180, "stall_s": 60}, "window": {"preset": "fedbuff", "quorum": 4}},
    "populations": {
        "phones": {"count": 8, "profile": "phones", "dropout": 0.05, "work": 0.4},
        "jetsons": {"count": 2, "profile": "jetsons", "work": 20},
    },
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def simulate(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return parse(SMALL)


@pytest.fixture(scope="module")
def runs(scenario: Scenario) -> dict[str, Timeline]:
    return {name: Simulation(with_policy(scenario, name)).run() for name in ("sync", "async")}


# ---- the command --------------------------------------------------------------------------------------------------------------


def test_one_policy_is_shown_window_by_window(file: Path) -> None:
    shown = simulate(file).splitlines()
    head = next(line for line in shown if "arrived" in line)
    columns = ["version", "time", "arrived", "late", "stale", "refused", "dropped", "MiB up", "MiB down", "loss", "accuracy"]
    assert head.split() == " ".join(columns).split()
    assert any(line.split()[:1] == ["fedbuff"] for line in shown)


def test_policies_are_compared_over_one_fleet_and_written_down(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    shown = simulate(file, "--compare", "sync, async", "--seed", 6, "--out", out)
    assert [line.split()[0] for line in shown.splitlines() if line.split()[:1] in (["sync"], ["async"])] == ["sync", "async"]
    assert sorted(path.name for path in out.iterdir()) == ["async.jsonl", "index.html", "summary.json", "sync.jsonl"]
    result = json.loads((out / "summary.json").read_text())
    assert result["seed"] == 6
    for name in ("sync", "async"):
        events = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        versions = [{k: v for k, v in event.items() if k not in ("t", "what")} for event in events if event["what"] == "version"]
        assert versions == result["policies"][name]["windows"]
    assert result["policies"]["async"]["versions"] > 3 * result["policies"]["sync"]["versions"] > 0


def test_json_is_all_that_is_printed_and_the_seed_decides_everything(file: Path) -> None:
    first, second, other = (simulate(file, "--json", "--seed", seed) for seed in (5, 5, 6))
    assert first == second == simulate(file, "--json")
    assert json.loads(first)["policies"].keys() == {"fedbuff"}
    assert json.loads(first)["policies"] != json.loads(other)["policies"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "sync,fast"], "there is no policy 'fast'"),
        (["--out", "FILE/x"], "--out: cannot write to"),
    ],
)
def test_what_is_wrong_is_said(file: Path, arguments: list[str], message: str) -> None:
    arguments = [argument.replace("FILE", str(file)) for argument in arguments]
    with pytest.raises(ConfigError, match=message):
        simulate(file, *arguments)


def test_a_violation_says_how_to_see_it_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Simulation, progress: object) -> Timeline:
        raise InvariantViolation([Violation("gapless", 3.5, "version 4 follows version 2")])

    monkeypatch.setattr(Simulation, "run", run)
    with pytest.raises(FleetError, match="version 4 follows version 2") as caught:
        simulate(file, "--compare", "sync,async", "--seed", 9)
    assert str(caught.value).endswith(f"fleetddp simulate {file} --seed 9 --compare sync")


# ---- figures ------------------------------------------------------------------------------------------------------------------


def test_the_table_of_windows_adds_up_however_many_there_are(runs: dict[str, Timeline]) -> None:
    timeline = runs["async"]
    assert len(timeline.rows) > 2 * LINES
    table = windows(timeline)
    assert LINES / 2 < table.row_count <= LINES
    by_name = {str(column.header): list(column.cells) for column in table.columns}
    for name in ("arrived", "late", "stale", "refused", "dropped"):
        assert sum(int(str(cell)) for cell in by_name[name]) == sum(getattr(row, name) for row in timeline.rows)
    spans = [str(cell).split("-") for cell in by_name["version"]]
    assert [int(span[0]) for span in spans[1:]] == [int(span[-1]) + 1 for span in spans[:-1]]


def test_the_summary_is_of_the_rows(scenario: Scenario, runs: dict[str, Timeline]) -> None:
    timeline = runs["sync"]
    figures = summary(timeline, target(scenario))
    assert figures["versions"] == len(timeline.rows) == timeline.version
    assert figures["arrived"] == sum(row.arrived for row in timeline.rows)
    assert figures["mean_staleness"] == 0
    assert figures["seconds_to_target"] is None
    assert json.loads(json.dumps(figures)) == figures
    assert comparison({"sync": figures}).row_count == 1


def test_the_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 3661, 360000)] == ["0:00:00", "0:01:00", "1:01:01", "100:00:00"]


# ---- the page -----------------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Checks that tags are balanced and that nothing is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attributes}
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def charts(html: str) -> dict[str, ET.Element]:
    """By heading."""
    sections = html.split("<h2>")[1:]
    found = {s.partition("</h2>")[0]: s[s.find("<svg") : s.find("</svg>") + 6] for s in sections if "<svg" in s}
    return {title: ET.fromstring(svg) for title, svg in found.items()}


def test_the_page_is_whole_and_loads_nothing(scenario: Scenario, runs: dict[str, Timeline]) -> None:
    html = page(scenario, runs)
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    assert "2 policies over one fleet of 10 devices" in html
    drawn = charts(html)
    assert list(drawn) == [
        "Samples merged against virtual time",
        "Samples merged against bytes",
        "Utilisation by tier",
        "Idle time by tier",
        "Staleness of what was merged",
    ]
    for title in list(drawn)[:2]:
        lines = [line.attrib["points"].split() for line in drawn[title].iter("polyline")]
        assert [len(points) for points in lines] == [len(timeline.rows) for timeline in runs.values()]


def test_accuracy_is_drawn_where_it_was_measured(scenario: Scenario) -> None:
    timeline = Simulation(with_policy(scenario, "async")).run()
    for row in timeline.rows[::2]:
        row.accuracy = 0.5
    drawn = charts(page(scenario, {"async": timeline}))
    line = drawn["Accuracy against virtual time"].find("polyline")
    assert line is not None
    heights = {point.partition(",")[2] for point in line.attrib["points"].split()}
    assert len(line.attrib["points"].split()) == len(timeline.rows[::2])
    assert len(heights) == 1


def test_staleness_bars_are_shares_of_all_merged_updates(scenario: Scenario, runs: dict[str, Timeline]) -> None:
    bars = [
        rect
        for rect in charts(page(scenario, runs))["Staleness of what was merged"].iter("rect")
        if rect.find("title") is not None
    ]
    told = [rect.findtext("title") or "" for rect in bars]
    shares = {name: sum(float(t.rpartition(": ")[2][:-1]) for t in told if t.startswith(f"{name},")) for name in runs}
    assert shares == {"sync": pytest.approx(100, abs=1), "async": pytest.approx(100, abs=1)}
    assert "sync, 0: 100.0%" in told
