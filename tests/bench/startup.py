"""How long people wait: `fleetddp --help` over Python's own start, `import fleetddp.edge` and its node over `import torch`.

Run: python tests/bench/startup.py. Wall time of fresh processes, the arms in turn, medians of the differences of pairs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

ROUNDS = 15
HELP = "import sys; sys.argv = ['fleetddp', '--help']; from fleetddp.cloud.cli import main; main()"


def seconds(code: str) -> float:
    """Of one fresh process that runs ``code``."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def extra(arm: str, reference: str, rounds: int) -> float:
    """Median over pairs of how much longer ``arm`` takes than ``reference``; the first pair warms the caches up."""
    pairs = [(seconds(arm), seconds(reference)) for _ in range(rounds + 1)][1:]
    return statistics.median(a - r for a, r in pairs)


def main() -> None:
    figures = {
        "cli_help_s_over_python": round(extra(HELP, "pass", ROUNDS), 3),
        "edge_import_s_over_torch": round(extra("import torch, fleetddp.edge", "import torch", ROUNDS), 3),
        "edge_node_import_s_over_torch": round(extra("import fleetddp.edge; fleetddp.edge.EdgeNode", "import torch", ROUNDS), 3),
    }
    print(json.dumps({"bench": "startup", "figures": figures}))


if __name__ == "__main__":
    main()
