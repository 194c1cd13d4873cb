"""A class that appears only after deployment is learnt by both models: hard samples, few of them labelled late, and distillation.

Run: python tests/bench/closed_loop.py [--versions 16] [--seed 0]; under a minute. A convolutional network (the cloud's) and two
perceptrons (the edges') are trained on the digits 0 to 8. Then a stream of all ten comes to the edges, each behind a ``Cascade``
calibrated to send 20 % of what it knows to the cloud; what it finds hard is kept in its reservoir, and a label source knows a
fifth of that an hour later (on a virtual clock). The hard samples are the proxy set of a new track, over which cloud and edges go
on learning: the edges from their data and the labels that came, the cloud from its data and what the edges say.
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
from fleetddp.common.inference_config import CascadeConfig, HardSamplesConfig
from fleetddp.common.predictor import Prediction
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.update import NO_VERSION
from fleetddp.edge.cascade import Cascade, calibrate
from fleetddp.edge.closed_loop import proxy_from, with_labelled
from fleetddp.edge.distilled import DistilledNode
from fleetddp.edge.hardness import RULES
from fleetddp.edge.reservoir import HardSamples, Reservoir, digest_of
from fleetddp.edge.tasks.digits import read_images
from fleetddp.edge.tasks.unlike_digits import UnlikeDigits

NEW = 9
KNOWN = tuple(digit for digit in range(10) if digit != NEW)
EDGES = ("edge-1", "edge-2")
SEES = {"site": KNOWN, **dict.fromkeys(EDGES, KNOWN)}
CASCADE = CascadeConfig(offload_rate=0.2)
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


def deployed(folder: Path, edge: nn.Module, cloud: nn.Module, known: Tensor, stream: Tensor, seed: int) -> HardSamples:
    """What one edge has kept of its stream, labels included."""
    with torch.no_grad():
        threshold = calibrate(CASCADE, edge, known).threshold
    kept = HardSamplesConfig(consent=True, retention_hours=24.0, label_share=0.2, label_after_s=HOUR_S)
    truth = {digest_of(image): int(label) for image, label in zip(*read_images(), strict=True)}
    clock = VirtualClock()
    with Reservoir(folder, kept, seed=seed, clock=clock) as reservoir:
        cascade = Cascade(edge, InProcess(cloud), hard=RULES[CASCADE.rule], threshold=threshold, on_hard=reservoir.add)
        for batch in stream.split(16):
            cascade(batch)
        clock.advance(HOUR_S + 1)
        reservoir.ask(lambda sample: truth[digest_of(sample)])
        return reservoir.snapshot()


def learn(
    folder: Path, versions: int, seed: int, models: dict[str, nn.Module], kept: dict[str, HardSamples]
) -> dict[str, nn.Module]:
    """Cloud and edges go on, over a track of soft labels of the hard samples; returns their models."""
    proxy = proxy_from(kept.values(), name="hard-1", classes=10)
    config = fleet_config(
        folder,
        kind="logits",
        publish="prob16",
        proxy={"name": proxy.name, "classes": 10, "items": len(proxy), "digest": proxy.digest, "by_tier": True},
        distill={"label_items": 100, "pull_items": 200, "learn_from": "all"},
        window={"preset": "semi_sync", "quorum": 1 + len(EDGES), "require": ["site"], "deadline_s": 20.0},
        site={"sync_every": STEPS},
        edge={"steps": STEPS, "state": str(folder / "edges")},
        until={"versions": versions},
        seed=seed,
    )
    fleet = MemoryFleet(config, SystemClock())
    nodes, threads = {}, []
    for name in EDGES:
        task = with_labelled(Deployed("edge", seed, models[name]), kept[name])
        nodes[name] = DistilledNode(config, task, fleet.parent(), name=name, proxy=proxy)
        threads.append(threading.Thread(target=nodes[name].run, daemon=True))
        threads[-1].start()
    with process_group():
        task = Deployed("cloud", seed, models["site"])
        model = DistributedDataParallel(task.model())
        teacher = Distillation(model, config, proxy=proxy, coordinator=lambda node: fleet.parent(), site="site")
        optimizer = task.optimizer(model.parameters())
        loader = DataLoader(task.data("site", 0, 1), 32, shuffle=True)
        deadline = time.monotonic() + 120
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            for batch in loader:
                teacher.step()
                optimizer.zero_grad()
                with model.no_sync():
                    task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
                indices = teacher.draw(32)
                teacher.loss(teacher.outputs(indices), indices).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        teacher.close()
    fleet.stop()
    return {"site": model.module, **{name: node.model for name, node in nodes.items()}}


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
    parser.add_argument("--versions", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began, seed = time.perf_counter(), arguments.seed
    task = UnlikeDigits("edge", SEES, seed=seed)
    models = {"site": trained("cloud", "site", seed, 12), **{name: trained("edge", name, seed, 25) for name in EDGES}}
    images, labels = task.test.tensors
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        kept = {
            name: deployed(
                root / name, models[name], models["site"], images[labels != NEW], task.proxy()[place :: len(EDGES)], seed
            )
            for place, name in enumerate(EDGES)
        }
        after = learn(root, arguments.versions, seed, models, kept)
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
