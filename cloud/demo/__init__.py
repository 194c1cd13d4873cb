"""``fleetddp demo``: a whole fleet of real processes on this machine, on real handwriting, in about a minute.

``plan`` says who takes part and what befalls them, ``children`` starts and ends the processes, ``member`` is an edge among them,
``observer`` measures each published version, ``alone`` trains the site without a fleet, ``screen`` and ``page`` show it all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def run_demo(out: Path, *, seed: int = 0) -> int:
    """Run it, write ``out``; returns the exit code. Ctrl-C raises, when no process is left."""
    from fleetddp.cloud.demo.show import run

    return run(out, seed=seed)
