"""Simulated fleets whose every time can be worked out by hand: devices without jitter, and a record of what happened."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from fleetddp.common.events import Effect, Event
from fleetddp.common.update import Kind, Receipt, State, Tier, UpdateId
from fleetddp.edge.sim.availability import Always, Availability
from fleetddp.edge.sim.calls import Network
from fleetddp.edge.sim.member import SimMember
from fleetddp.edge.sim.network import NEVER_CUT, Cuts, Path
from fleetddp.edge.sim.observer import Observer
from fleetddp.edge.sim.profiles import Profile
from fleetddp.edge.sim.scenario import parse
from fleetddp.edge.sim.simulator import Simulation
from fleetddp.edge.sim.world import Conduct

LATENCY_S, DOWN, UP = 1.0, 1000.0, 500.0
PARAMETERS, PAYLOAD = 100, 400  # elements, and their bytes in float32
DISK_S, MERGE_S, HEARTBEAT_S = 0.5, 2.0, 100.0


class Record(Observer):
    """Everything that happened, with its time."""

    def __init__(self) -> None:
        self.notes: list[tuple[float, str, str]] = []
        self.receipts: list[tuple[float, str, Receipt]] = []
        self.events: list[tuple[float, Event]] = []
        self.effects: list[tuple[float, Effect]] = []

    def handled(self, event: Event | None, effects: Sequence[Effect], now: float) -> None:
        """See ``Observer``."""
        if event is not None:
            self.events.append((now, event))
        self.effects += [(now, effect) for effect in effects]

    def told(self, node: str, receipt: Receipt, now: float) -> None:
        """See ``Observer``."""
        self.receipts.append((now, node, receipt))

    def noted(self, node: str, what: str, now: float) -> None:
        """See ``Observer``."""
        self.notes.append((now, node, what))

    def times(self, what: str, node: str) -> list[float]:
        """When this was noted of a node."""
        return [t for t, who, noted in self.notes if (who, noted) == (node, what)]

    def handled_at(self, kind: type) -> list[float]:
        """When the root handled events of a kind."""
        return [t for t, event in self.events if type(event) is kind]

    def wanted(self, kind: type[Any]) -> list[Any]:
        """The root's effects of a kind."""
        return [effect for _, effect in self.effects if type(effect) is kind]

    def merged(self) -> dict[UpdateId, set[int]]:
        """The versions that each update was told to be in."""
        told: dict[UpdateId, set[int]] = {}
        for _, _, receipt in self.receipts:
            if receipt.state is State.MERGED:
                told.setdefault(receipt.update_id, set()).add(receipt.version)
        return told

    def accepted(self) -> set[UpdateId]:
        """The updates of which a member was told that they are durable."""
        return {receipt.update_id for _, _, receipt in self.receipts if receipt.state is State.ACCEPTED}


def simulation(horizon_s: float, *, window: dict[str, Any], record: Record, network: Any = Network, **fleet: Any) -> Simulation:
    """A fleet without members yet; version 0 is there."""
    members = {"heartbeat_s": HEARTBEAT_S, "lease_s": 2.5 * HEARTBEAT_S, "stall_s": 40} | fleet.pop("members", {})
    scenario = parse(
        {
            "horizon_s": horizon_s,
            "fleet": {"window": window, "members": members, **fleet},
            "model": {"parameters": PARAMETERS},
            "root": {"disk_s": DISK_S, "merge_s": MERGE_S, "up_bytes_per_s": 1e12, "down_bytes_per_s": 1e12},
            "populations": {"nobody": {"count": 1, "profile": "phones"}},
        }
    )
    made = Simulation(scenario, observers=[record], network=network)
    made.members.clear()
    return made


def add(
    made: Simulation,
    name: str,
    *,
    train_s: float,
    availability: Availability | None = None,
    cuts: Cuts = NEVER_CUT,
    up: float = UP,
    **conduct: Any,
) -> SimMember:
    """An edge device that needs exactly ``train_s`` seconds for a unit of ten samples."""
    profile = Profile(
        samples_per_s=10 / train_s,
        memory_mib=1,
        down_bytes_per_s=DOWN,
        up_bytes_per_s=up,
        latency_s=LATENCY_S,
        compute_jitter=0,
        link_jitter=0,
    )
    stream = random.Random(name)
    path = Path(down_bytes_per_s=DOWN, up_bytes_per_s=up, latency_s=LATENCY_S, jitter=0, stream=stream, cuts=cuts)
    kind = Kind(made.world.config.edge.update)
    values = {
        "tier": Tier.EDGE,
        "kind": kind,
        "codec": "float32",
        "steps": 5,
        "pinned": False,
        "batch": 2.0,
        "epoch": None,
        "work": 1.0,
    } | conduct
    member = SimMember(name, made.world, Conduct(**values), profile, path, availability or Always(), stream)
    made.members[name] = member
    return member
