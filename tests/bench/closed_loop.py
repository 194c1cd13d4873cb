"""A class that appears only after deployment is learnt by both models: hard samples, few of them labelled late, and distillation.

Run: python tests/bench/closed_loop.py [--versions 24] [--seed 0]; under a minute. A convolutional network (the cloud's) and two
perceptrons (the edges') were trained on the digits 0 to 8, and teach each other in a track of soft labels on a hundred of these.
Then a stream of all ten comes to the edges, each behind a ``Cascade`` calibrated to send 20 % of what it knows to the cloud. What
an edge finds hard is kept in its reservoir, and, as the fleet file permits it, shared: the next versions of the same track are
labelled on it. A label source knows a fifth of it an hour later (on a virtual clock). Nobody else does anything.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.fleet import fleet_config
from helpers.one_rank import process_group

from fleetddp.cloud import Distillation
from fleetddp.common.clock import SystemClock, VirtualClock
from fleetddp.common.config import FleetConfig
from fleetddp.common.predictor import ModulePredictor, Prediction, Served
from fleetddp.common.proxy import ProxySet
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.update import NO_VERSION
from fleetddp.edge.cascade import Cascade, calibrate
from fleetddp.edge.distilled import DistilledNode
from fleetddp.edge.hardness import RULES
from fleetddp.edge.reservoir import Reservoir, digest_of
from fleetddp.edge.tasks.digits import read_images
from fleetddp.edge.tasks.unlike_digits import UnlikeDigits

NEW = 9
KNOWN = tuple(digit for digit in range(10) if digit != NEW)
EDGES = ("edge-1", "edge-2")
SEES = {"site": KNOWN, **dict.fromkeys(EDGES, KNOWN)}
CASCADE = {"rule": "margin", "offload_rate": 0.2}
SHIPPED = 100  # items of the proxy set, of known classes
ROOM = 400  # for hard samples
BEFORE = 2  # versions, before the stream comes
STEPS = 20  # of a member, for a version
HOUR_S = 3600.0

Models = dict[str, nn.Module]  # by member


class Deployed(UnlikeDigits):
    """The task of those who go on from a model that was trained before."""

    def __init__(self, role: Any, seed: int, model: nn.Module) -> None:
        super().__init__(role, SEES, seed=seed)
        self._model = model

    def model(self) -> nn.Module:
        """A copy of it."""
        return copy.deepcopy(self._model)


class InProcess:
    """The cloud's model, asked without a network."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model.eval()

    @torch.no_grad()
    def predict(self, inputs: Tensor, timeout_s: float) -> Prediction:
        """See ``Cloud``."""
        return Prediction(self._model(inputs), (NO_VERSION,) * len(inputs))


def trained(role: Any, member: str, seed: int, epochs: int) -> nn.Module:
    """A member's model before deployment."""
    task = UnlikeDigits(role, SEES, seed=seed)
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    for _ in range(epochs):
        for batch in DataLoader(task.data(member, 0, 1), 32, shuffle=True):
            optimizer.zero_grad()
            task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval()


class Device:
    """One edge: it answers, keeps what it finds hard, and trains on it."""

    def __init__(
        self, name: str, config: FleetConfig, fleet: MemoryFleet, proxy: ProxySet, model: nn.Module, known: Tensor
    ) -> None:
        truth = {digest_of(image): int(label) for image, label in zip(*read_images(), strict=True)}
        self.clock = VirtualClock()
        self.reservoir = Reservoir(config.cascade.hard_samples.state / name, config.cascade.hard_samples, clock=self.clock)
        self.served = Served()
        self.served.offer(ModulePredictor(copy.deepcopy(model)), 0)
        self.threshold = calibrate(config.cascade, self.served, known).threshold
        self.node = DistilledNode(
            config,
            Deployed("edge", config.seed, model),
            fleet.parent(),
            name=name,
            proxy=proxy,
            reservoir=self.reservoir,
            label_source=lambda sample: truth[digest_of(sample)],
            served=self.served,
        )
        self.thread = threading.Thread(target=self.node.run, daemon=True)
        self.thread.start()

    def meet(self, stream: Tensor, cloud: nn.Module) -> None:
        """A stream of samples comes; an hour later somebody knows what they are."""
        hard = RULES[CASCADE["rule"]]
        cascade = Cascade(
            self.served, InProcess(cloud), hard=hard, threshold=self.threshold, on_hard=self.reservoir.add, deadline_s=10.0
        )
        for batch in stream.split(16):
            cascade(batch)
        self.clock.advance(HOUR_S + 1)


def fleet_of(folder: Path, versions: int, seed: int, proxy: ProxySet) -> FleetConfig:
    """The fleet file of the one track."""
    room = {"items": ROOM, "retention_hours": 24.0, "shape": [64]}
    named = {"name": proxy.name, "classes": 10, "items": len(proxy), "digest": proxy.digest, "by_tier": True, "open": room}
    kept = {"consent": True, "retention_hours": 24.0, "share": True, "label_share": 0.2, "label_after_s": HOUR_S}
    return fleet_config(
        folder,
        kind="logits",
        publish="prob16",
        proxy=named,
        distill={"label_items": 200, "pull_items": 400, "learn_from": "all", "batch_items": 64},
        window={"preset": "semi_sync", "quorum": 1 + len(EDGES), "require": ["site"], "deadline_s": 20.0},
        site={"sync_every": STEPS},
        edge={"steps": STEPS, "state": str(folder / "edges")},
        cascade={**CASCADE, "hard_samples": {**kept, "state": str(folder / "hard")}},
        until={"versions": BEFORE + versions},
        seed=seed,
    )


def run(folder: Path, versions: int, seed: int, models: Models) -> tuple[Models, dict[str, Device], dict[str, Any]]:
    """The run: the fleet as it is, for ``BEFORE`` versions; the stream; ``versions`` more. What they have learnt."""
    task = UnlikeDigits("edge", SEES, seed=seed)
    images, labels = task.test.tensors
    truth = {digest_of(image): int(label) for image, label in zip(*read_images(), strict=True)}
    unlabelled = task.proxy()
    is_known = torch.tensor([truth[digest_of(image)] != NEW for image in unlabelled])
    shipped = is_known.nonzero().flatten()[:SHIPPED]
    proxy = ProxySet("known", 10, unlabelled[shipped])
    stream = unlabelled[torch.tensor([i for i in range(len(unlabelled)) if i not in set(shipped.tolist())])]
    config = fleet_of(folder, versions, seed, proxy)
    fleet = MemoryFleet(config, SystemClock())
    devices = {name: Device(name, config, fleet, proxy, models[name], images[labels != NEW]) for name in EDGES}
    with process_group():
        cloud = Deployed("cloud", seed, models["site"])
        model = DistributedDataParallel(cloud.model())
        # the edges learn from all, the cloud from the edges: of the new class it is sure of what is wrong
        own = config.model_copy(update={"distill": config.distill.model_copy(update={"learn_from": "others"})})
        teacher = Distillation(
            model, own, proxy=proxy, coordinator=lambda node: fleet.parent(), site="site", folder=folder / "site"
        )
        optimizer = cloud.optimizer(model.parameters())
        loader = DataLoader(cloud.data("site", 0, 1), 32, shuffle=True)
        met, deadline = False, time.monotonic() + 120
        while any(device.thread.is_alive() for device in devices.values()) and time.monotonic() < deadline:
            for batch in loader:
                teacher.step()
                optimizer.zero_grad()
                with model.no_sync():
                    cloud.loss(model, batch).backward()  # type: ignore[no-untyped-call]
                indices = teacher.draw(64)
                teacher.loss(teacher.outputs(indices), indices).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            if not met and teacher.version >= BEFORE:
                met = True
                for place, device in enumerate(devices.values()):
                    device.meet(stream[place :: len(EDGES)], copy.deepcopy(model.module))
        teacher.close()
    status = fleet.parent().status()
    fleet.stop()
    return {"site": model.module, **{name: device.node.model for name, device in devices.items()}}, devices, status


def figures_of(cloud: list[float], edges: list[list[float]]) -> dict[str, float]:
    """Of [all before, new before, all after, new after]: the cloud's, and of the edges the best before and the worst after."""
    names = ("all_classes_before", "new_class_before", "all_classes_after", "new_class_after")
    worst = [max(edge[0] for edge in edges), max(edge[1] for edge in edges), *(min(edge[i] for edge in edges) for i in (2, 3))]
    return {
        **{f"cloud_{name}": value for name, value in zip(names, cloud, strict=True)},
        **{f"edge_{name}": value for name, value in zip(names, worst, strict=True)},
    }


def main() -> None:
    """Print the table, then the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began, seed = time.perf_counter(), arguments.seed
    task = UnlikeDigits("edge", SEES, seed=seed)
    models = {"site": trained("cloud", "site", seed, 12), **{name: trained("edge", name, seed, 25) for name in EDGES}}
    with tempfile.TemporaryDirectory() as folder:
        after, devices, status = run(Path(folder), arguments.versions, seed, models)
        kept = {name: device.reservoir.snapshot() for name, device in devices.items()}
        for device in devices.values():
            device.reservoir.close()
    print(f"version {status['version']}; {status['open_items']['held']} hard samples are items of the proxy set")
    print(f"{'member':8}{'kept':>6}{'labelled':>10}{'of ' + str(NEW):>6}{'before':>16}{'after':>16}   (all classes, class {NEW})")
    rows: dict[str, list[float]] = {}
    for name, model in after.items():
        old, new = task.evaluate(models[name]), task.evaluate(model)
        counts = " " * 22
        if name in kept:
            told = kept[name].labels
            counts = f"{len(told):6d}{int((told >= 0).sum()):10d}{int((told == NEW).sum()):6d}"
        rows[name] = [row[key] for row in (old, new) for key in ("accuracy", f"accuracy_{NEW}")]
        before, new_before, now, new_now = rows[name]
        print(f"{name:8}{counts}{before:9.3f}{new_before:7.3f}{now:9.3f}{new_now:7.3f}")
    figures = figures_of(rows["site"], [rows[name] for name in EDGES])
    print(f"{time.perf_counter() - began:.0f} s; of the edges the worst after, the best before")
    print(json.dumps({"bench": "closed_loop", "figures": {name: round(value, 4) for name, value in figures.items()}}))


if __name__ == "__main__":
    main()
