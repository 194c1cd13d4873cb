"""Rows that one torchrun job works off: a script given a folder, where each rank leaves ``RANK.json``, its findings by row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

Seen = list[dict[str, Any]]  # of one row, by rank


def run_rows(script: str, out: Path, *, world: int, timeout_s: float) -> dict[str, Seen]:
    """Run ``script`` on ``world`` ranks; returns what they found, by row."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), script, str(out)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    ranks = [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(world)]
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}
