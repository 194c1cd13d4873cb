"""How fast the simulator is in ``timing`` mode: a day of a fleet of 10,000 devices, with the real driver and aggregator.

Phones charge at night in six time zones, gateways are always there and one site trains all day; every half hour a version. All
events count that the loop handles: messages that arrive, timers, trainings and disk work that end. Each device's heartbeat is
three of them (its timer, the request at the root, the answer).

Run: python tests/bench/sim_timing.py [--devices N] [--hours H]. Wall time of one run in this process; it uses one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from fleetddp.edge.sim.scenario import parse
from fleetddp.edge.sim.simulator import Simulation

HOUR_S = 3600.0


def scenario(devices: int, hours: float) -> dict[str, Any]:
    gateways = devices // 10
    return {
        "seed": 1,
        "horizon_s": hours * HOUR_S,
        "fleet": {
            "members": {"sites": ["site-0"], "heartbeat_s": 180, "lease_s": 450, "stall_s": 60},
            "window": {"preset": "periodic", "deadline_s": 1800},
            "site": {"sync_every": 2000, "codec": "bfloat16"},
            "edge": {"codec": "int8"},
        },
        "model": {"parameters": 78_000, "buffers": 64},
        "regions": {"cellular": {"down_bytes_per_s": 1.25e8, "up_bytes_per_s": 1.25e8}},
        "populations": {
            "phones": {
                "count": devices - gateways - 1,
                "profile": "phones",
                "samples": 500,
                "availability": {"kind": "nights", "utc_offsets_h": [-8, -5, 0, 1, 5.5, 8]},
                "dropout": 0.02,
            },
            "gateways": {
                "count": gateways,
                "profile": "gateways",
                "samples": 500,
                "region": "cellular",
                "outages": {"daily": 0.3, "mean_s": 1200},
            },
            "site": {"count": 1, "profile": "datacenter", "tier": "site", "samples": 1024},
        },
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--devices", type=int, default=10_000)
    arguments.add_argument("--hours", type=float, default=24.0)
    given = arguments.parse_args()

    began = time.perf_counter()
    timeline = Simulation(parse(scenario(given.devices, given.hours))).run()
    seconds = time.perf_counter() - began
    events, peak_mib = timeline.totals.handled, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    merged = sum(row.arrived for row in timeline.rows)
    print(f"{given.devices} devices, {given.hours:g} h: {events} events in {seconds:.1f} s, {peak_mib:.0f} MiB at most")
    counts, refused = dict(timeline.totals.counts), dict(timeline.totals.refused)
    print(f"{len(timeline.rows)} versions of {merged} updates; {counts}; refused {refused}")
    figures = {
        "events_per_s": round(events / seconds),
        "seconds_10k_devices_24h": round(seconds, 1),
        "peak_rss_mib": round(peak_mib),
    }
    print(json.dumps({"bench": "sim_timing", "figures": figures}))


if __name__ == "__main__":
    main()
