"""The command line: what it prints, where, and the exit codes that scripts rely on."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.fleet import fleet_config, free_port, running
from rich.console import Console

from fleetddp.cloud.cli import main
from fleetddp.cloud.status import render
from fleetddp.common.config import parse
from fleetddp.common.events import Join
from fleetddp.common.transport.uplink import Uplink
from fleetddp.common.update import Tier


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fleetddp", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def fleet_file(folder: Path, text: str) -> str:
    path = folder / "fleet.yaml"
    path.write_text(text)
    return str(path)


def test_check_prints_what_the_fleet_file_means(run: Any, tmp_path: Path) -> None:
    path = fleet_file(tmp_path, "run: mine\nwindow: {preset: sync}\n")
    code, out, _ = run("check", path)
    assert code == 0
    assert parse(yaml.safe_load(out)) == parse({"run": "mine", "window": {"preset": "sync"}})
    code, out, _ = run("check", path, "--json")
    assert (code, json.loads(out)["window"]["preset"]) == (0, "sync")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("windw: {}", "windw: unknown key; allowed here: "),
        ("outer: {optimizer: SGD, options: {lr: -1}}", "lr"),
    ],
)
def test_a_wrong_fleet_file_is_exit_2_and_one_line_for_each_key(run: Any, tmp_path: Path, text: str, message: str) -> None:
    code, out, err = run("check", fleet_file(tmp_path, text))
    assert (code, out) == (2, "")
    assert err.startswith("fleetddp: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("serve", "--name", "cloud"), ("export", "--out", "m.onnx")])
def test_without_a_task_there_is_no_model(run: Any, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    code, _, err = run(command, fleet_file(tmp_path, "run: mine"), *options)
    assert code == 2
    assert "task: there is no model without a Task" in err
    code, _, err = run(command, fleet_file(tmp_path, "run: mine"), *options, "--track", "small")
    assert code == 2
    assert "there is no track 'small'" in err


def test_a_wrong_argument_is_exit_2(run: Any) -> None:
    assert run("edge")[0] == 2
    assert run("nonsense")[0] == 2


def test_json_once_and_tables_again_and_again_are_two_things(run: Any) -> None:
    code, _, err = run("status", "127.0.0.1:1", "--json", "--watch")
    assert code == 2
    assert "give one of them" in err


def test_nobody_there_is_exit_3(run: Any) -> None:
    code, out, err = run("status", f"127.0.0.1:{free_port()}")
    assert (code, out) == (3, "")
    assert "UNAVAILABLE" in err


def test_status_of_a_run(run: Any, tmp_path: Path) -> None:
    with running(fleet_config(tmp_path)) as coordinator:
        uplink = Uplink(coordinator.address, coordinator.config.security, node="pi")
        uplink.join(Join(node="pi", tier=Tier.EDGE, incarnation=1))
        code, out, _ = run("status", coordinator.address, "--json")
        assert code == 0
        status = json.loads(out)
        assert [(m["node"], m["tier"], m["live"]) for m in status["members"]] == [("pi", "edge", True)]
        code, out, _ = run("status", coordinator.address)
        assert code == 0
        assert "version none yet" in out
        assert "pi" in out
        uplink.close()


def test_the_tables_show_who_is_behind_and_what_was_measured() -> None:
    member = {"base_version": 5, "last_seen_s": 97.0, "updates": 3, "refused": 1, "bytes": 2**21, "tier": "edge"}
    version = {"number": 7, "published_at": 40.0, "updates": 4, "reason": "deadline", "metrics": {"loss": 0.5}}
    status = {
        "run": "r-1",
        "at": 100.0,
        "version": 7,
        "finished": "",
        "window": {"reason": "waiting for a quorum"},
        "members": [{**member, "node": "pi", "live": True}, {**member, "node": "old", "live": False, "base_version": -1}],
        "versions": [version],
        "scores": {"7": {"accuracy": 0.875}},
        "counters": {"accepted": 9, "merged": 8, "refused": {"NOT_FINITE": 2}},
    }
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(status))
    rows = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["pi", "edge", "3", "s", "ago", "2", "3", "1", "2.00"] in rows
    assert ["old", "edge", "gone", "-", "3", "1", "2.00"] in rows
    assert ["7", "60", "s", "4", "deadline", "accuracy", "0.875", "loss", "0.500"] in rows
    assert ["window:", "waiting", "for", "a", "quorum"] in rows
    assert ["updates:", "9", "accepted,", "8", "merged;", "refused:", "NOT_FINITE", "2"] in rows
