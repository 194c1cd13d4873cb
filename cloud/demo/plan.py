"""Who takes part in the demo, how fast each is, and what befalls them at which version."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SITE = "site"
RANKS = 2
SYNC_EVERY = 10  # steps of the site between boundaries
BATCH = 32  # of each rank
VERSIONS = 60
TIME_LIMIT_S = 120.0  # the coordinator ends the run then at the latest


@dataclass(frozen=True, slots=True)
class Device:
    """An edge node. ``pace_s`` is added to each batch; the rest are versions at which something happens (None: never)."""

    name: str
    pace_s: float
    joins_at: int | None = None
    killed_at: int | None = None
    back_at: int | None = None
    bad_update: int | None = None  # which of its updates is NaN, counted from one


DEVICES = (
    Device("edge-1", 0.00),
    Device("edge-2", 0.02),
    Device("edge-3", 0.05),
    Device("edge-4", 0.02, killed_at=8, back_at=14),
    Device("edge-5", 0.10, bad_update=3),
    Device("edge-6", 0.03, joins_at=5),
)


def fleet_file(folder: Path, seed: int) -> dict[str, Any]:
    """The fleet file of the demo, on a free port of loopback, everything below ``folder``."""
    return {
        "run": "demo",
        "seed": seed,
        "coordinator": {
            "address": f"127.0.0.1:{_free_port()}",
            "journal": str(folder / "journal"),
            "keep_versions": VERSIONS + 1,
        },
        "members": {"sites": [SITE], "heartbeat_s": 0.5, "lease_s": 5.0},
        "window": {"preset": "semi_sync", "deadline_s": 10.0},
        "merge": {"share": "samples"},
        "until": {"versions": VERSIONS, "hours": TIME_LIMIT_S / 3600},
        "task": {
            "target": "fleetddp.edge.tasks.digits:Digits",
            "args": {"sites": [SITE], "edges": [device.name for device in DEVICES], "seed": seed},
        },
        "site": {"sync_every": SYNC_EVERY, "batch_size": BATCH},
        "edge": {"epochs": 1, "batch_size": 16, "codec": "int8", "state": str(folder / "edges")},
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
