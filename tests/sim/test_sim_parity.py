"""The heap and real gRPC come to the same versions, byte for byte: what is found in simulations holds for the real transport."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from helpers.synthetic import SyntheticSimulation
from helpers.wire_root import WireRoot, gates

from fleetddp.common.events import Offer
from fleetddp.common.transport import offers
from fleetddp.common.update import Version
from fleetddp.edge.sim.durable import FOLDER
from fleetddp.edge.sim.scenario import Scenario, parse

SEEDS = range(24)


class WireSimulation(SyntheticSimulation):
    """Members on the loop, a production server and uplinks between them and the root."""

    root_type = WireRoot


def scenario(seed: int) -> Scenario:
    """A small fleet under some policy; in half of them things go wrong (but for damaged bytes, which gRPC would not carry)."""
    rng = random.Random(f"parity {seed}")
    populations: dict[str, Any] = {"gateways": {"count": rng.randint(2, 4), "profile": "gateways", "work": 0.3}}
    if rng.random() < 0.4:
        populations["site"] = {"count": 1, "profile": "datacenter", "tier": "site", "work": 100}
    faults: dict[str, Any] = {}
    if seed % 2:
        faults = {
            "root": {"crashes_per_h": rng.choice([0, 20]), "down_s": 10},
            "members": {"crashes_per_h": rng.choice([0, 20]), "down_s": 10},
            "messages": {kind: rng.choice([0, 0.05]) for kind in ("drop", "duplicate", "reorder", "delay")} | {"delay_s": 5},
            "partitions": {"per_h": rng.choice([0, 10])},
            "byzantine": {"members": ["gateways-0"], "kind": rng.choice(["sign_flip", "scale", "nan"])},
        }
    preset = rng.choice(["sync", "semi_sync", "async", "fedbuff", "periodic"])
    return parse(
        {
            "seed": seed,
            "horizon_s": 600,
            "fleet": {
                "window": {"preset": preset, "deadline_s": 60},
                "members": {"heartbeat_s": 20, "lease_s": 80, "stall_s": 200},
                "merge": {"staleness": {"max_staleness": rng.choice([0, 2, 10])}},
                "outer": {"preset": rng.choice(["average", "diloco"])},
                "publish": rng.choice(["float32", "bfloat16", "int8"]),
                "edge": {
                    "codec": rng.choice(["float32", "bfloat16", "int8", "int4", "topk:0.1"]),
                    "update": rng.choice(["delta", "delta", "gradient"]),
                },
                "site": {"codec": rng.choice(["float32", "int8"]), "sync_every": 20},
                "limits": {"max_norm": 1e4},
                "until": {"versions": 5},
                "coordinator": {"keep_versions": 1000},
            },
            "populations": populations,
            "faults": faults,
        }
    )


def over_grpc(chosen: Scenario) -> tuple[SyntheticSimulation, int]:
    """Run it; how many calls there were."""
    with gates() as pushes:
        simulation = WireSimulation(chosen)
        root = simulation.root
        assert isinstance(root, WireRoot)
        root.pushes = pushes
        try:
            simulation.run()
        finally:
            root.close()
    return simulation, root.calls


def versions(simulation: SyntheticSimulation) -> tuple[dict[str, bytes], tuple[Version, ...]]:
    """The version files, and what the journal says of them."""
    files = simulation.store.files
    folder = FOLDER / "versions"
    journal, _, _ = simulation.store.open()
    return {name: (f := files.open(folder / name)).pread(f.size(), 0) for name in files.list_dir(folder)}, journal.versions()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_scenario_over_grpc_gives_the_same_bytes(seed: int) -> None:
    chosen = scenario(seed)
    heap = SyntheticSimulation(chosen)
    heap.run()
    real, calls = over_grpc(chosen)
    assert calls >= 15
    files, rows = versions(real)
    assert (files, rows) == versions(heap)
    assert len(files) >= 2
    assert real.invariants.fingerprint == heap.invariants.fingerprint  # members heard the same, at the same times
    assert real.timeline.rows == heap.timeline.rows


def test_what_the_wire_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the bytes do go through it, and the test above can fail."""
    chosen = next(s for s in map(scenario, SEEDS) if s.fleet.window.preset == "sync")
    heap = SyntheticSimulation(chosen)
    heap.run()
    unpack = offers.unpack

    def heavier(message: Any) -> Offer:
        offer = unpack(message)
        own = offer.header.update_id.node == "gateways-1"  # the other one lies
        return replace(offer, slice=replace(offer.slice, samples=offer.slice.samples * 2)) if own else offer

    monkeypatch.setattr(offers, "unpack", heavier)
    assert versions(over_grpc(chosen)[0]) != versions(heap)


def test_the_scenarios_are_of_every_kind() -> None:
    fleets = [scenario(seed) for seed in SEEDS]
    assert {s.fleet.window.preset for s in fleets} == {"sync", "semi_sync", "async", "fedbuff", "periodic"}
    assert {s.fleet.edge.codec for s in fleets} == {"float32", "bfloat16", "int8", "int4", "topk:0.1"}
    assert {s.fleet.edge.update for s in fleets} == {"delta", "gradient"}
    assert any("site" in s.populations for s in fleets)
    assert sum(s.faults is not None and s.faults.root.crashes_per_h > 0 for s in fleets) >= 3
