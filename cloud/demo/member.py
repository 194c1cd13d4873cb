"""One edge node of the demo, slowed down, perhaps with a fault: ``python -m fleetddp.cloud.demo.member FLEET.YAML NAME``."""

from __future__ import annotations

import sys
import time
from typing import Any

import google_crc32c
from torch import Tensor, nn

from fleetddp.cloud.demo.plan import DEVICES
from fleetddp.common.config import load
from fleetddp.common.telemetry import log_to_terminal
from fleetddp.common.transport.uplink import Uplink
from fleetddp.common.update import Receipt, Slice, UpdateHeader
from fleetddp.edge.node import EdgeNode, patience, serve
from fleetddp.edge.tasks.digits import Digits


class PacedDigits(Digits):
    """The digits on a slower device."""

    def __init__(self, pace_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._pace_s = pace_s

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """As ever, later."""
        time.sleep(self._pace_s)
        return super().loss(model, batch)


class FaultyUplink(Uplink):
    """Sends one update whose numbers are NaN, as a device with a broken sensor or memory would. (Our codecs refuse to.)"""

    faulty: int | None = None  # which of the updates, counted from one

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        """As ever, but for that one."""
        if header.update_id.sequence == self.faulty:
            payload = memoryview(b"\xff" * len(payload))  # NaN in float32, and as the scale of an int8 block
            slice = Slice(intervals=slice.intervals, samples=slice.samples, digest=google_crc32c.value(bytes(payload)))
        return super().push(header, slice, payload)


def main(fleet_file: str, name: str) -> None:
    """Run the node until the run is finished."""
    log_to_terminal()
    config = load(fleet_file)
    assert config.task is not None  # the plan names it
    device = next(device for device in DEVICES if device.name == name)
    parent = FaultyUplink(config.coordinator.address, config.security, node=name, run=config.run, patience=patience(config))
    parent.faulty = device.bad_update
    serve(EdgeNode(config, PacedDigits(device.pace_s, **config.task.args), parent, name=name))


if __name__ == "__main__":
    main(*sys.argv[1:])
