"""A task that brings misfortune upon its own site at set places, and does not care how many ranks it is trained by."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.utils.data import Dataset, TensorDataset

from fleetddp.cloud import FleetDDP
from fleetddp.common.task import part

POINTS = 8
WORLDS = (2, 1, 2, 2)  # ranks there are in each act; the first ends when a node dies, the second when one comes
ENDS = (5, 8, 11)  # the step at which an act ends: in the middle of a window of three
LR, MOMENTUM, HALVED_EVERY = 0.05, 0.9, 4


class Troubled:
    """Fits a line to eight points, all of them in each step: the gradient is the same for any number of ranks.

    ``folder``/act-N exists once act N has ended. Each rank notes in ``folder``/seen.jsonl what its optimizer is set to, by step.
    """

    def __init__(self, *, folder: str) -> None:
        self.folder = Path(folder)
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(POINTS, 2, generator=generator)
        self.y = 2 * self.x[:, :1] - self.x[:, 1:]
        self.world = self.act = 0
        self.steps = 0
        self.made: torch.optim.Optimizer | None = None

    def _ended(self) -> int:
        return sum((self.folder / f"act-{number}").exists() for number in range(len(ENDS)))

    def model(self) -> nn.Module:
        line = nn.Linear(2, 1, bias=False)
        nn.init.constant_(line.weight, 0.5)
        return line

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        self.world, self.act = count, self._ended()  # no process lives longer than an act; the other rank may end it first
        if count != WORLDS[self.act]:
            threading.Event().wait()  # until torchrun ends this process, since another node has come
        return part(TensorDataset(self.x, self.y), index, count)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if isinstance(model, FleetDDP):
            self._play()
        return nn.functional.mse_loss(model(x), y)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        self.made = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
        return self.made

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, HALVED_EVERY, 0.5)
        return self.schedule

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {}

    def _play(self) -> None:
        assert self.made is not None
        step, group, act = self.schedule.last_epoch, self.made.param_groups[0], self.act
        state = [s["momentum_buffer"].tolist() for s in self.made.state.values() if "momentum_buffer" in s]
        seen = {"act": act, "world": self.world, "rank": get_rank(), "step": step, "lr": group["lr"], "momentum": state}
        with (self.folder / "seen.jsonl").open("a") as file:
            file.write(json.dumps(seen) + "\n")
        if act == len(ENDS) or step < ENDS[act] or get_rank() != self.world - 1:
            return
        (self.folder / f"act-{act}").touch()
        if act == 0:  # a whole node
            os.kill(os.getppid(), signal.SIGKILL)
        if act == 1:  # until another node has come
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGKILL)
