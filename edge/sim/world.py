"""What the members of a simulated fleet share, and how each kind of them works."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fleetddp.common.config import FleetConfig
from fleetddp.common.update import Interval, Kind, Tier
from fleetddp.edge.sim.calls import Network
from fleetddp.edge.sim.learning import Learning
from fleetddp.edge.sim.loop import EventLoop
from fleetddp.edge.sim.observer import Observer
from fleetddp.edge.sim.root import SimRoot


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Around every member."""

    config: FleetConfig
    loop: EventLoop
    network: Network
    root: SimRoot
    learning: Learning
    observer: Observer
    required: Mapping[Kind, tuple[Interval, ...]]  # the elements that an update of a kind covers


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """How a kind of member works."""

    tier: Tier
    kind: Kind  # of its updates
    codec: str
    steps: int  # in a unit of work
    pinned: bool  # it makes so many, whatever the root wants
    batch: float  # samples of a step
    epoch: float | None  # samples of its data, the last batch of which may be short; None: without end
    work: float  # cost of one sample, see profiles.py
    max_owed: float = math.inf  # updates not settled; with so many it waits
    wait_s: float = math.inf  # for a newer version before it trains on
    dropout: float = 0.0  # probability that it stops in the middle of a unit
    restart_s: float = 60.0  # how long it is gone then
    partial: float = 0.0  # probability that it does a part of a unit only
    clock_skew_s: float = 0.0  # standard deviation of its clock's error

    def samples(self, steps: int) -> float:
        """In so many steps."""
        if self.epoch is None:
            return steps * self.batch
        epochs, rest = divmod(steps, math.ceil(self.epoch / self.batch))
        return epochs * self.epoch + rest * self.batch
