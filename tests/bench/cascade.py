"""A small model at the edge before a larger one in the cloud, on handwriting held out from both.

The cloud's model is a CNN (9 930 parameters), the edge's an MLP of less than a tenth of that; both are trained here on digits of
scikit-learn. The cloud's runs in `fleetddp serve`, a process of its own, which has it from a coordinator. The threshold is
calibrated on images that no model was trained on and that are not in the figures.

- cloud_accuracy, edge_accuracy, pair_accuracy: on the held-out images, each alone and the pair.
- offload_rate: the share of them that the cloud answered.
- p50_ms, p99_ms: of the answer to one image, one after another, easy and hard ones alike; asked_p50_ms: of the cloud's alone.
- max_ms_cloud_hung: the longest from the moment on that the cloud is stopped (SIGSTOP) in the middle of the stream; the deadline
  is 200 ms.
- p99_ms_cloud_down: from the moment on that it is killed with -9 in the middle of the stream, and tried again every 0.1 to 0.4 s.
- unanswered: requests of the whole stream without an answer.

Run: python tests/bench/cascade.py
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from helpers.fleet import fleet_config, free_port, on_port, running, write
from helpers.processes import commands
from torch import Tensor, nn
from torch.nn import functional as F

from fleetddp.common.config import FleetConfig
from fleetddp.common.predictor import ModulePredictor
from fleetddp.common.publish import save_init
from fleetddp.edge.cascade import Answer, By, Cascade, calibrate
from fleetddp.edge.tasks.digits import Digits

OFFLOAD = 0.2
EPOCHS = 40
DEADLINE_S = 0.2
Data = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--requests", type=int, default=2000, help="with the cloud; as many while it hangs, when it is back, when it is gone"
    )
    requests = parser.parse_args().requests
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Digits(sites=["site"], edges=["edge"], unseen=(), seed=0)
    train, calibration, test = split(task)
    cloud, edge = task.model(), nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    fit(cloud, train)
    fit(edge, train)
    ratio = sum(p.numel() for p in edge.parameters()) / sum(p.numel() for p in cloud.parameters())
    assert ratio < 0.1, ratio
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save_init(cloud, Path(folder) / "cloud.safetensors")
        config = fleet(Path(folder))
        coordinator = stack.enter_context(running(config))
        config = on_port(config, coordinator.coordinator.port)
        serve = stack.enter_context(commands())("serve", write(config, Path(folder)), "--name", "cloud")
        serve.wait_for("version 0 is in service")
        predictor = ModulePredictor(edge)
        threshold = calibrate(config.cascade, predictor, *calibration).threshold
        cascade = Cascade.of_fleet(config, "device", predictor, threshold)
        stack.callback(cascade.close)
        figures = {
            "pair_accuracy": share_right([a.label for a in cascade(test[0])], test[1]),
            "cloud_accuracy": share_right(cloud.eval()(test[0]).argmax(1).tolist(), test[1]),
            "edge_accuracy": share_right(edge.eval()(test[0]).argmax(1).tolist(), test[1]),
        }
        figures["offload_rate"] = sum(cascade.counts.get(key, 0) for key in cascade.counts if key[0] is By.CLOUD) / len(test[0])
        process = serve.process
        strikes = [
            lambda: process.send_signal(signal.SIGSTOP),
            lambda: process.send_signal(signal.SIGCONT),
            lambda: process.send_signal(signal.SIGKILL),
        ]
        legs = there, hung, back, down = stream(cascade, test[0], requests, strikes)
        assert any(a.by is By.CLOUD for a in back.answers[-requests // 10 :]), "the cloud was not back before it was killed"
        assert not any(a.by is By.CLOUD for a in down.answers[-requests // 2 :]), "the cloud was not down"
        figures |= {
            "p50_ms": statistics.median(there.ms),
            "p99_ms": there.p99(),
            "asked_p50_ms": statistics.median(ms for ms, a in zip(there.ms, there.answers, strict=True) if a.by is By.CLOUD),
            "max_ms_cloud_hung": max(hung.ms),
            "p99_ms_cloud_down": down.p99(),
            "unanswered": float(requests * len(legs) - sum(len(leg.answers) for leg in legs)),
        }
    print(json.dumps({"bench": "cascade", "figures": {name: round(value, 4) for name, value in figures.items()}}))
    assert figures["pair_accuracy"] >= 0.99 * figures["cloud_accuracy"], "the pair is more than 1 % below the cloud's model"
    assert figures["unanswered"] == 0, "a request had no answer"


@dataclass
class Leg:
    """A part of the stream of requests."""

    ms: list[float]  # of each request
    answers: list[Answer]

    def p99(self) -> float:
        return statistics.quantiles(self.ms, n=100)[98]


def fleet(folder: Path) -> FleetConfig:
    return fleet_config(
        folder,
        start={"bootstrap": "file", "file": str(folder / "cloud.safetensors")},
        task={"target": "fleetddp.edge.tasks.digits:Digits"},
        serve={"address": f"127.0.0.1:{free_port()}", "max_wait_s": 0.0},
        cascade={"offload_rate": OFFLOAD, "deadline_s": DEADLINE_S, "pause_s": 0.1, "pause_cap_s": 0.4},
    )


def split(task: Digits) -> tuple[Data, Data, Data]:
    """What models are trained on, what the threshold is calibrated on (a fifth of the members' images), what is held out."""
    parts = [task.data(name, 0, 1).tensors for name in ("site", "edge")]  # type: ignore[attr-defined]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels, cut = images[order], labels[order], len(images) // 5
    held_out = task.test.tensors
    return (images[cut:], labels[cut:]), (images[:cut], labels[:cut]), (held_out[0], held_out[1])


def fit(model: nn.Module, data: Data) -> None:
    """Adam, batches of 64, the learning rate going to zero."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data[0])).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
            optimizer.step()
        scheduler.step()


def share_right(labels: list[int], due: Tensor) -> float:
    return float((torch.tensor(labels) == due).double().mean())


def stream(cascade: Cascade, images: Tensor, requests: int, strikes: Sequence[Callable[[], object]]) -> list[Leg]:
    """One image after another without a pause, ``requests`` before the first strike and after each."""
    legs = [Leg([], []) for _ in range(len(strikes) + 1)]
    due = [threading.Event() for _ in strikes]

    def run() -> None:
        for number in range(len(legs) * requests):
            leg = legs[number // requests]
            begun = time.perf_counter()
            leg.answers.extend(cascade(images[number % len(images)].unsqueeze(0)))
            leg.ms.append(1000 * (time.perf_counter() - begun))
            if (number + 1) % requests == 0 and number + 1 < len(legs) * requests:
                due[number // requests].set()

    for image in images[:50]:  # warm
        cascade(image.unsqueeze(0))
    device = threading.Thread(target=run)
    device.start()
    for event, strike in zip(due, strikes, strict=True):
        event.wait()
        strike()
    device.join()
    return legs


if __name__ == "__main__":
    main()
