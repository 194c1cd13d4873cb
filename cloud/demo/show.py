"""The demo from beginning to end."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml

from fleetddp.cloud.demo.alone import train_alone
from fleetddp.cloud.demo.children import ChildError, Children
from fleetddp.cloud.demo.observer import Observer
from fleetddp.cloud.demo.page import page
from fleetddp.cloud.demo.plan import DEVICES, RANKS, SITE, SYNC_EVERY, fleet_file
from fleetddp.cloud.demo.screen import Screen
from fleetddp.common.config import FleetConfig, parse
from fleetddp.common.errors import ConfigError
from fleetddp.edge.tasks.digits import CLASSES, Digits

LOOK_S = 0.2
END_LIMIT_S = 30.0  # for members to hear that the run is finished, and to leave

DEAD_S = 2.0  # how long a killed edge stays away at least
MARKER = ".fleetddp-demo"  # a folder that holds it may be emptied


class Demo:
    """One run of the demo in the folder ``out``."""

    def __init__(self, out: Path, seed: int) -> None:
        self._began = time.monotonic()
        _prepare(out)
        self._fleet_file = str(out / "fleet.yaml")
        fleet = fleet_file(out, seed)
        Path(self._fleet_file).write_text(yaml.safe_dump(fleet, sort_keys=False), encoding="utf-8")
        self.config: FleetConfig = parse(fleet, source="the demo's fleet file")
        self.task = Digits(**fleet["task"]["args"])
        self._logs = out / "logs"
        self.children = Children(self._logs)
        self.observer = Observer(self.config, self.task)
        self.screen = Screen(self.children, self.task.holdings)
        self._killed_at: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def run(self) -> None:
        """Start everybody, let the story happen, wait for the end; raises ``ChildError``."""
        self.children.start("coordinator", "fleetddp.cloud.cli", "coordinator", self._fleet_file)
        launcher = ("--standalone", "--nproc-per-node", str(RANKS), "--module", "fleetddp.cloud.train", self._fleet_file)
        self.children.start(SITE, "torch.distributed.run", *launcher, FLEETDDP_NODE=SITE)
        for device in DEVICES:
            if device.joins_at is None:
                self._start(device.name)
        self.screen.say(f"{len(self.children.names)} processes are starting; their logs are in {self._logs}")
        while self.children.running("coordinator"):
            self.children.check()
            if self.observer.look():
                self._tell(self.observer.status["version"])
                self.screen.update(self.observer.status, self.observer.points, self.seconds)
            time.sleep(LOOK_S)
        self.children.wait(END_LIMIT_S)
        self.observer.look_into_journal()

    def _tell(self, version: int) -> None:
        """Let happen what is due at this version."""
        for device in DEVICES:
            name = device.name
            if device.joins_at is not None and version >= device.joins_at and name not in self.children.names:
                self._start(name)
                self.screen.say(f"{name} joins late")
            if device.killed_at is None or device.back_at is None or version < device.killed_at:
                continue
            if name not in self._killed_at:
                self.children.kill(name)
                self._killed_at[name] = self.seconds
                self.screen.say(f"kill -9 {name}")
            elif self.children.killed(name) and version >= device.back_at and self.seconds > self._killed_at[name] + DEAD_S:
                self._start(name)
                self.screen.say(f"{name} comes back")

    def _start(self, name: str) -> None:
        self.children.start(name, "fleetddp.cloud.demo.member", self._fleet_file, name)

    @property
    def site_steps(self) -> int:
        """Local steps of the site that its updates stand for."""
        site = next(member for member in self.observer.status["members"] if member["node"] == SITE)
        return SYNC_EVERY * int(site["updates"])


def run(out: Path, *, seed: int) -> int:
    """``fleetddp demo``: the exit code. Whatever ends it, no process is left; what it wrote stays in ``out``."""
    torch.set_num_threads(1)  # there are more processes than cores
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        demo = Demo(out, seed)
        try:
            with demo.screen:
                demo.run()
        except ChildError as error:
            demo.screen.say(f"the demo failed: {error}")
            return 1
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # a second one must not leave processes behind
            demo.children.stop()
            demo.observer.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, _interrupt)
        _conclude(demo, out, seed)
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)


def _prepare(out: Path) -> None:
    """An empty folder; raises ``ConfigError`` rather than remove what no demo wrote."""
    try:
        if out.exists() and any(out.iterdir()):
            if not (out / MARKER).exists():
                raise ConfigError(f"--out {out}: the folder is not empty and not of an earlier demo; name another")
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / MARKER).touch()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from error


def _conclude(demo: Demo, out: Path, seed: int) -> None:
    """Train the site alone, compare, write the summary and the page."""
    demo.screen.say(f"the site alone, {demo.site_steps} steps ...")
    alone = train_alone(demo.task, demo.site_steps, seed)
    status, best = demo.observer.status, demo.observer.best
    by_class = {
        "fleet": [best.metrics[f"accuracy_{digit}"] for digit in range(CLASSES)],
        "site alone": [alone[-1][f"accuracy_{digit}"] for digit in range(CLASSES)],
    }
    summary: dict[str, Any] = {
        "fleet_accuracy": best.accuracy,
        "site_alone_accuracy": alone[-1]["accuracy"],
        "versions": len(demo.observer.points) - 1,
        "seconds": round(demo.seconds, 1),
        "updates_accepted": status["counters"]["accepted"],
        "updates_refused": sum(member["refused"] for member in status["members"]),
        "best_version": best.version,
        "site_steps": demo.site_steps,
        "seed": seed,
        "accuracy_by_class": by_class,
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    html = page(
        fleet=[point.accuracy for point in demo.observer.points],
        alone=[metrics["accuracy"] for metrics in alone],
        by_class=by_class,
        holdings=demo.task.holdings,
        members=status["members"],
        facts=summary,
    )
    (out / "index.html").write_text(html, encoding="utf-8")
    demo.screen.compare(by_class, best.accuracy, alone[-1]["accuracy"])
    demo.screen.say(f"{demo.seconds:.0f} s; {out / 'index.html'}, {out / 'summary.json'}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
