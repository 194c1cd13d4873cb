"""Tasks that misbehave, for tests of sites."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import get_rank
from torch.utils.data import Dataset, TensorDataset

from fleetddp.cloud import FleetDDP
from helpers.tasks import LineTask


class SameForAll(LineTask):
    """Its ranks get all of the data each."""

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        return TensorDataset(self.x, self.y)


class Killed(LineTask):
    """Is interrupted after ``after`` training batches."""

    def __init__(self, *, after: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.left = after

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(model, FleetDDP):  # not while evaluating
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
        return super().loss(model, batch)


class KilledOnce(LineTask):
    """Its rank 1 is killed before its batch number ``at``, once: the file ``flag`` says that it was."""

    def __init__(self, *, at: int, flag: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.left, self.flag = at, Path(flag)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(model, FleetDDP):
            self.left -= 1
            if self.left == 0 and get_rank() == 1 and not self.flag.exists():
                self.flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
