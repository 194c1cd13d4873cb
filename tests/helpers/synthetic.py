"""Small fleets with real weights and nothing to train: each unit of work moves the weights by a seeded draw."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common.checksum import checksum
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of, tensor_over
from fleetddp.common.update import Kind, Tier, Version
from fleetddp.edge.sim.durable import DurableStore
from fleetddp.edge.sim.learning import Parcel, Unit, Weights
from fleetddp.edge.sim.modes import Mode
from fleetddp.edge.sim.replica import Replica
from fleetddp.edge.sim.scenario import Scenario
from fleetddp.edge.sim.simulator import Simulation
from fleetddp.edge.sim.tampering import FaultyNetwork

LAYOUT = Layout.of([("weights", (600,)), ("bias", (11,))], [("statistics", (9,))])  # two blocks, the second one short


class SyntheticLearning:
    """A ``Learning``. What a unit of work leads to depends on the member, the unit's number and the seed."""

    def __init__(self, seed: int) -> None:
        self.layout = LAYOUT
        self._seed = seed
        self.first = self._draw("first", 0)

    def adopt(self, version: Version, payload: bytes) -> Weights:
        geometry = Geometry(LAYOUT, codecs.get(version.codec))
        assert checksum(payload) == version.digest
        weights = torch.zeros(LAYOUT.elements)
        for start, stop in geometry.required():
            first, last = geometry.byte_range((start, stop))
            weights[start:stop] = geometry.decode(tensor_over(payload[first:last]), (start, stop))
        return weights

    def train(self, member: str, start: Weights, unit: Unit) -> Weights:
        return start * 0.99 + 0.01 * self._draw(member, unit.number)

    def encode(self, member: str, kind: Kind, codec: str, start: Weights, end: Weights, residual: Weights) -> Parcel:
        meant = self.first if kind is Kind.INIT else torch.cat([(start - end)[: LAYOUT.buffer_start], end[LAYOUT.buffer_start :]])
        coder = codecs.get(codec)
        payload, left = coder.encode_with_feedback(meant[: LAYOUT.parameters], residual)
        geometry = Geometry(LAYOUT, coder, buffers=kind is not Kind.GRADIENT)
        buffers = [geometry.encode(meant[a:b], (a, b)) for a, b in geometry.required()[1:]]
        encoded = bytes_of(torch.cat([payload, *buffers]))
        return Parcel(len(encoded), encoded, checksum(encoded), {"train_loss": float(meant[0])}, left)

    def evaluate(self, version: Version, payload: bytes) -> Mapping[str, float]:
        return {}

    def _draw(self, member: str, number: int) -> Tensor:
        seed = checksum(f"{self._seed}/{member}/{number}".encode())
        return torch.randn(LAYOUT.elements, generator=torch.Generator().manual_seed(seed))


def synthetic(scenario: Scenario) -> tuple[Mode, DurableStore]:
    """The mode of a fleet that starts from seeded weights, unless it has a site, which brings them."""
    learning, store = SyntheticLearning(scenario.seed), DurableStore(scenario.fleet)
    if not sites(scenario):
        store.found(LAYOUT, first_weights(learning), 0.0)
    return Mode(learning, store, lambda device: None, lambda: None), store


def sites(scenario: Scenario) -> bool:
    return any(section.tier is Tier.SITE for section in scenario.populations.values())


def first_weights(learning: SyntheticLearning) -> Any:
    """For ``found``."""
    return lambda interval, out: out.copy_(learning.first[slice(*interval)])


class SyntheticSimulation(Simulation):
    """A simulation with real payloads, a real journal that can lose power, and a replica that checks the bytes."""

    def __init__(self, scenario: Scenario, **options: Any) -> None:
        mode, self.store = synthetic(scenario)
        super().__init__(scenario, mode=mode, **options)
        self.replica = Replica(scenario.fleet, self.store, lambda what: self.invariants.wrong("bytes", self.loop.now(), what))
        assert isinstance(mode.learning, SyntheticLearning)
        if not sites(scenario):
            self.replica.found(LAYOUT, first_weights(mode.learning), 0.0)
        assert isinstance(self.network, FaultyNetwork)
        self.network.sent = self.replica.sent
        self.invariants.made = self.replica.made
