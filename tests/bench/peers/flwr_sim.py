"""Flower's simulation (PyPI: flwr[simulation]) on Ray, with one processor for each client at a time: two run at once on two."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path


def main() -> None:
    here = str(Path(__file__).resolve().parent)
    settings = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "BENCH_KIND": sys.argv[1]}
    os.environ.update(settings, PYTHONPATH=os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")])))
    import flwr_app
    import workload
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.WARNING)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"log_to_driver": False}}
    run_simulation(flwr_app.server_app, flwr_app.client_app, workload.CLIENTS, backend_config=resources)


if __name__ == "__main__":
    main()
