"""gRPC and ``fork``: DataLoader workers are forked, often while a transfer runs in a thread.

gRPC's own fork support, on by default, pauses and rebuilds its threads around a fork; with calls in flight it can kill the
forked worker ("exited unexpectedly"). Without it a worker that leaves gRPC alone, as DataLoader's do, is safe. The
setting is read once, while grpc is imported: ``fleetddp.common`` turns it off before any of us imports grpc.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache

VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"

_log = logging.getLogger(__name__)


def _is_off() -> bool:
    return os.environ.get(VARIABLE, "").lower() in ("0", "f", "false", "n", "no")  # what gRPC takes for false


_IMPORTED_BEFORE_US = "grpc" in sys.modules and not _is_off()  # then it is on, whatever is set from now on
if not os.environ.get(VARIABLE):
    os.environ[VARIABLE] = "0"


def advice() -> str:
    """What to do about gRPC's fork support in this process; empty when it is off, as it should be."""
    if _IMPORTED_BEFORE_US:
        what = f"grpc was imported before fleetddp: import fleetddp first, or start the process with {VARIABLE}=0"
    elif not _is_off():
        what = f"{VARIABLE}={os.environ[VARIABLE]}: unset it, or set it to 0"
    else:
        return ""
    return f"gRPC's fork support is on; DataLoader workers that fork during a transfer may die. {what}"


@cache
def warn_once() -> None:
    """Log the advice, if there is any, once a process."""
    if message := advice():
        _log.warning(message)
