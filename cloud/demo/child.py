"""Becomes another program that does not outlive its parent: ``python -m fleetddp.cloud.demo.child PARENT_PID PROGRAM ARGUMENTS``.

Where the system can (Linux), the program gets SIGTERM when the parent ends, however it ends. What the program starts must be
ended by the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))  # survives the exec
    if os.getppid() != int(arguments[0]):
        sys.exit(1)  # the parent ended before we asked to be told
    os.execvp(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
