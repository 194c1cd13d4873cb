"""Fault scenarios by number: a seed says which fleet, which policy, and what goes wrong."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fleetddp.edge.sim.scenario import Scenario, parse
from fleetddp.edge.sim.simulator import Simulation
from fleetddp.edge.sim.violations import InvariantViolation
from helpers.synthetic import SyntheticSimulation

QUIET_S = 1500.0  # without faults, at the end: longer than a lease, two deadlines and two units of work
CODECS = ("float32", "bfloat16", "int8", "int4", "topk:0.1")


class Outcome(NamedTuple):
    """What came of one scenario."""

    seed: int
    fingerprint: str
    versions: int
    handled: int  # events of the loop
    starts: int  # of the root
    refused: dict[str, int]
    wrong: str  # what invariants do not hold


def scenario(seed: int) -> Scenario:
    """The fault scenario of this number."""
    rng = random.Random(f"sweep {seed}")
    timing = rng.random() < 0.3
    heartbeat = rng.choice([5, 10, 20])
    site = rng.random() < 0.25
    lie = rng.choice([None, None, "sign_flip", "scale", "nan"])
    window = _window(rng)
    quick = window["preset"] in ("async", "fedbuff")  # a version each few seconds
    return parse(
        {
            "seed": seed,
            "horizon_s": rng.choice([500.0, 1000.0, 2000.0]) + QUIET_S,
            "fleet": {
                "window": window,
                "members": {
                    "heartbeat_s": heartbeat,
                    "lease_s": heartbeat * rng.choice([1.5, 2.5, 4]),
                    "stall_s": rng.choice([15, 30, 60]),
                },
                "merge": _merge(rng),
                "outer": {"preset": rng.choice(["average", "diloco", "fedasync"])},
                "publish": rng.choice(["float32", "bfloat16", "int8"]),
                "limits": {"max_norm": 1e4} if lie == "scale" else {},
                "until": {"versions": rng.randint(3, 30 if quick else 8) if quick or rng.random() < 0.5 else 60},
                "edge": {"codec": rng.choice(CODECS), "update": rng.choice(["delta", "delta", "gradient"])},
                "site": {"codec": rng.choice(CODECS), "wait_s": rng.choice([None, 60.0]), "sync_every": 20},
                "coordinator": {"keep_versions": rng.randint(1, 3)},
            },
            "model": {"parameters": 611},
            "root": {"disk_s": rng.choice([0.002, 0.5]), "merge_s": rng.choice([0.05, 5.0])},
            "populations": (populations := _populations(rng, site, timing)),
            "faults": _faults(rng, timing, {"members": [f"{next(iter(populations))}-0"], "kind": lie} if lie else {}),
        }
    )


def _window(rng: random.Random) -> dict[str, Any]:
    preset = rng.choice(["sync", "semi_sync", "async", "fedbuff", "periodic"])
    window: dict[str, Any] = {"preset": preset, "deadline_s": rng.choice([60, 150, 300])}
    if preset == "fedbuff":
        window["quorum"] = rng.randint(1, 3)
    if preset == "semi_sync":
        window["quorum"] = rng.choice([0.3, 0.5, 2])
    return window


def _merge(rng: random.Random) -> dict[str, Any]:
    discount = rng.choice([{"kind": "constant"}, {"kind": "polynomial"}, {"kind": "hinge", "b": 1}])
    merge: dict[str, Any] = {"staleness": {"max_staleness": rng.choice([0, 1, 3, 10]), "discount": discount}}
    if rng.random() < 0.3:
        merge["share"] = {"site": 0.7, "edge": 0.3}
    return merge


def _populations(rng: random.Random, site: bool, timing: bool) -> dict[str, Any]:
    many = 12 if timing else 5
    device = {"work": rng.choice([1.0, 5.0]), "partial": rng.choice([0, 0.2]), "clock_skew_s": rng.choice([0, 100])}
    populations: dict[str, Any] = {
        kind: {"count": rng.randint(2, many), "profile": kind, "dropout": rng.choice([0, 0.1]), **device}
        for kind in rng.sample(["phones", "jetsons", "gateways"], rng.choice([1, 1, 2]))
    }
    if site:
        populations["site"] = {"count": rng.randint(1, 2), "profile": "datacenter", "tier": "site", "work": 500.0}
    return populations


def _faults(rng: random.Random, timing: bool, byzantine: dict[str, Any]) -> dict[str, Any]:
    def some(value: float) -> float:
        return rng.choice([0.0, value / 3, value])

    return {
        "quiet_s": QUIET_S,
        "root": {"crashes_per_h": some(10), "down_s": rng.choice([1, 60]), "at_points": 0 if timing else some(0.01)},
        "members": {"crashes_per_h": some(10), "down_s": rng.choice([1, 100])},
        "messages": {kind: some(0.1) for kind in ("drop", "duplicate", "reorder", "delay", "corrupt")}
        | {"delay_s": rng.choice([1, 30]), "timeout_s": rng.choice([5, 20])},
        "partitions": {"per_h": some(10), "mean_s": rng.choice([10, 120]), "share": rng.choice([0.3, 0.6, 1])},
        "byzantine": byzantine,
    }


def simulation(seed: int, **options: Any) -> Simulation:
    """That scenario, ready to run: with real payloads in seven cases of ten."""
    chosen = scenario(seed)
    return Simulation(chosen, **options) if is_timing(seed) else SyntheticSimulation(chosen, **options)


def run(seed: int, **options: Any) -> Outcome:
    """Run one scenario; what it finds wrong is in the outcome."""
    made, wrong = simulation(seed, **options), ""
    try:
        with _quiet():
            made.run()
    except InvariantViolation as violation:
        wrong = str(violation)
    except Exception as error:  # whatever it is, it belongs to this seed
        wrong = f"the simulation failed: {error!r}"
    refused = dict(made.timeline.totals.refused)
    return Outcome(
        seed, made.invariants.fingerprint, made.invariants.version, made.loop.handled, made.root.starts, refused, wrong
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log: a storm of refusals is what is wanted."""
    log = logging.getLogger("fleetddp")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def is_timing(seed: int) -> bool:
    """Whether the scenario of this number is without payloads."""
    return random.Random(f"sweep {seed}").random() < 0.3
