"""The demo's parts: processes that end with it, a page that loads nothing, a folder that it may empty."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from helpers.processes import TESTS, eventually
from torch.utils.data import DataLoader

from fleetddp.cloud.demo.alone import train_alone
from fleetddp.cloud.demo.children import ChildError, Children
from fleetddp.cloud.demo.page import curves, page
from fleetddp.cloud.demo.plan import DEVICES, fleet_file
from fleetddp.cloud.demo.show import Demo
from fleetddp.common.config import parse
from fleetddp.common.errors import ConfigError
from fleetddp.edge.tasks.digits import Digits

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def pids(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


@linux
def test_nothing_survives_a_stop_not_even_what_hides_in_another_session(tmp_path: Path) -> None:
    children = Children(tmp_path)
    children.start("one", "helpers.lingering", PYTHONPATH=str(TESTS))
    eventually(lambda: len(pids(tmp_path / "one.log")) == 2, "both have started")
    assert children.running("one")
    assert all(map(alive, pids(tmp_path / "one.log")))
    children.stop()
    eventually(lambda: not any(map(alive, pids(tmp_path / "one.log"))), "both have ended", timeout_s=5)


@linux
def test_a_child_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from pathlib import Path; from fleetddp.cloud.demo.children import Children\n"
        "Children(Path(sys.argv[1])).start('one', 'helpers.lingering', 'alone'); signal.pause()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(TESTS)})
    eventually(lambda: len(pids(tmp_path / "one.log")) == 1, "it has started")
    parent.kill()
    parent.wait()
    eventually(lambda: not alive(pids(tmp_path / "one.log")[0]), "it has ended", timeout_s=5)


def test_a_child_that_fails_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    children = Children(tmp_path)
    children.start("one", "no_such_module")
    with pytest.raises(ChildError, match=r"one ended with exit code 1(.|\n)*No module named no_such_module"):
        children.wait(60)
    children.stop()


@linux
def test_a_child_that_was_killed_is_no_failure_and_can_come_back(tmp_path: Path) -> None:
    children = Children(tmp_path)
    children.start("one", "helpers.lingering", "alone", PYTHONPATH=str(TESTS))
    eventually(lambda: len(pids(tmp_path / "one.log")) == 1, "it has started")
    children.kill("one")
    children.check()
    assert children.killed("one")
    children.start("one", "helpers.lingering", "alone", PYTHONPATH=str(TESTS))
    eventually(lambda: len(pids(tmp_path / "one.log")) == 2, "it is back")
    assert not children.killed("one")
    children.stop()


def test_the_page_is_whole_and_loads_nothing() -> None:
    html = page(
        fleet=[0.1, 0.9, 0.85],
        alone=[0.1, 0.6],
        by_class={"fleet": [0.9] * 10, "site alone": [0.6] * 10},
        holdings={"site": [5] * 7 + [0] * 3, "edge-<1>": [1] * 10},
        members=[
            {"node": "site", "tier": "site", "updates": 3, "refused": 0, "staleness": 1, "bytes": 3 * 2**19, "live": True},
        ],
        facts={"fleet_accuracy": 0.9694444, "seconds": 61.04, "versions": 2, "seed": 0, "by_class": {}},
    )
    opened: list[str] = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            assert not {"src", "href"} & {name for name, _ in attributes}
            if tag not in ("meta",):
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Balance().feed(html)
    assert opened == []
    assert "90.0%" in html  # the best version, not the last
    assert "60.0%" in html
    assert "edge-&lt;1&gt;" in html
    for cells in (("best accuracy of the fleet", "0.969"), ("seconds", "61.040"), ("versions published", "2")):
        assert "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" in html
    head = ("member", "tier", "updates accepted", "updates refused", "versions behind", "MiB sent")
    assert "".join(f"<th>{name}</th>" for name in head) in html
    assert "".join(f"<td>{cell}</td>" for cell in ("site", "site", "3", "0", "1", "1.500")) in html


def test_a_curve_is_drawn_where_its_values_are() -> None:
    svg = ET.fromstring(curves({"fleet": ("blue", [0.0, 0.5, 1.0])}))
    line = svg.find("polyline")
    assert line is not None
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(y1 - y2)
    assert y0 > y2  # upwards


def test_the_site_alone_does_what_two_ranks_of_ddp_compute() -> None:
    task = Digits(edges=tuple(device.name for device in DEVICES))
    metrics = train_alone(task, 3, seed=5)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    ranks = [task.data("site", rank, 2) for rank in (0, 1)]
    orders = [torch.randperm(len(data), generator=torch.Generator().manual_seed(5 * 1_000_003)) for data in ranks]
    for step in range(3):  # the loss over both ranks' batches together: its mean is the mean of theirs
        now = slice(32 * step, 32 * step + 32)
        rows = [data[int(i)] for data, order in zip(ranks, orders, strict=True) for i in order[now]]
        optimizer.zero_grad()
        task.loss(model, next(iter(DataLoader(rows, 64)))).backward()
        optimizer.step()
    assert metrics == [task.evaluate(model)]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ConfigError, match="not of an earlier demo"):
        Demo(tmp_path, seed=0)
    out = tmp_path / "demo"
    for _ in range(2):  # its own it empties
        demo = Demo(out, seed=0)
        demo.observer.close()
        (out / "summary.json").touch()
    assert (tmp_path / "thesis.txt").exists()


def test_the_plan_is_a_valid_fleet_and_names_everybody() -> None:
    config = parse(fleet_file(Path("out"), seed=3))
    assert config.task is not None
    assert Digits(**config.task.args).holdings.keys() == {"site", *(device.name for device in DEVICES)}
    assert len(DEVICES) == 6
