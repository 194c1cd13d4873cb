"""The demo's processes: started with a log each, watched, and ended with everything that they started."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "FLEETDDP_DEMO"  # an environment variable that all descendants inherit, whatever group or parent they end up in
GRACE_S = 5.0
TAIL_LINES = 15


class ChildError(RuntimeError):
    """A process of the demo ended as it should not; the message holds the end of its log."""


class Children:
    """Processes by name. Logs go to ``logs/NAME.log``; a restart appends."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._mark = secrets.token_hex(8)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._killed: set[str] = set()

    def start(self, name: str, module: str, *arguments: str, **environment: str) -> None:
        """Run ``python -m module arguments``, away from the terminal's Ctrl-C."""
        command = [sys.executable, "-m", "fleetddp.cloud.demo.child", str(os.getpid()), sys.executable, "-m", module, *arguments]
        with open(self._logs / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # One thread each: there are more processes than cores.
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark, **environment},
            )
        self._killed.discard(name)

    def kill(self, name: str) -> None:
        """As ``kill -9``."""
        self._processes[name].kill()
        self._processes[name].wait()
        self._killed.add(name)

    def running(self, name: str) -> bool:
        """Whether it was started and has not ended."""
        return name in self._processes and self._processes[name].poll() is None

    @property
    def names(self) -> tuple[str, ...]:
        """Those that were ever started."""
        return tuple(self._processes)

    def killed(self, name: str) -> bool:
        """Whether ``kill`` ended it and it has not been started again."""
        return name in self._killed

    def check(self) -> None:
        """Raise ``ChildError`` if one has ended, neither well nor by ``kill``."""
        for name, process in self._processes.items():
            if name not in self._killed and process.poll():
                raise ChildError(f"{name} ended with exit code {process.returncode}; the end of its log:\n{self._tail(name)}")

    def wait(self, timeout_s: float) -> None:
        """Wait until all have ended; raises ``ChildError`` if one has not, or not well."""
        until = time.monotonic() + timeout_s
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise ChildError(f"{name} did not end by itself; the end of its log:\n{self._tail(name)}") from None
        self.check()

    def stop(self) -> None:
        """End them all, first by SIGTERM, then by SIGKILL, and what they started with them."""
        for process in self._processes.values():
            if process.poll() is None:
                _signal_group(process.pid, signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self._processes.values():
            if process.poll() is None:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
        for pid in self._survivors():  # torchrun's workers live in sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _survivors(self) -> list[int]:
        """Processes with our mark, where /proc shows them (Linux)."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
        return found

    def _tail(self, name: str) -> str:
        lines = (self._logs / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:])


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
