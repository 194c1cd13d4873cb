"""The process that worker processes are forked from: it imports torch while the caller still does."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

WORKER = ("fleetddp.edge.sim.workers",)


def start(*modules: str) -> None:
    """Begin; ``modules`` are imported there too, such as the task's.

    An ``Engine`` calls this itself; whoever calls it before importing torch saves that much of the wait. It can be repeated.

    Python has one such process for all uses of ``multiprocessing``'s ``forkserver``; if it runs already, it is taken as it is.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", *WORKER, *modules])
    forkserver.ensure_running()
