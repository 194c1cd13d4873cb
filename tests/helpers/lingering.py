"""Processes that stay: ``alone``, ``deaf`` to SIGTERM, or (no argument) with a deaf child in a session of its own. They print
their pids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main(arguments: list[str]) -> None:
    if arguments == ["deaf"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif not arguments:
        subprocess.Popen([sys.executable, "-m", "helpers.lingering", "deaf"], start_new_session=True)
    print(os.getpid(), flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
