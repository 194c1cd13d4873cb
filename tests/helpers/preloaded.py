"""Processes that start in milliseconds: a small server imports torch and fleetddp once, and forks a child for each request.

The child does what ``fleetddp coordinator`` and ``fleetddp edge`` do once they have read their arguments. It dies by
``Child.kill`` as any process does; its memory, sockets and locks are its own.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
PATIENCE_S = 60.0

# ---- in the test -------------------------------------------------------------------------------------------------------------


class Child:
    """One forked process: what it said so far, and how it ended."""

    def __init__(self, changed: threading.Condition) -> None:
        self.pid = 0
        self.said: list[str] = []
        self.code: int | None = None  # minus the number of the signal that ended it
        self._changed = changed

    def wait_for(self, word: str, timeout_s: float = PATIENCE_S) -> None:
        """Until it has said ``word``."""
        with self._changed:
            self._changed.wait_for(lambda: word in self.said or self.code is not None, timeout_s)
            assert word in self.said, f"process {self.pid} did not say {word!r}: {self.said}, exit code {self.code}"

    def kill(self) -> None:
        """``kill -9``; returns once the process is gone."""
        assert self.end(signal.SIGKILL) == -signal.SIGKILL

    def end(self, number: signal.Signals | None = None, timeout_s: float = PATIENCE_S) -> int:
        """Send a signal, if one is given, and wait for the end; returns the exit code."""
        with self._changed:
            if number is not None and self.code is None:
                os.kill(self.pid, number)  # not reaped before its end is told, so the pid is still its own
            self._changed.wait_for(lambda: self.code is not None, timeout_s)
            assert self.code is not None, f"process {self.pid} runs on"
            return self.code


class Preloaded:
    """The server, as the test sees it."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.preloaded"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._changed = threading.Condition()
        self._children: dict[int, Child] = {}
        self._starting: list[Child] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, role: str, log: Path, **arguments: Any) -> Child:
        """Fork a child; ``role`` is a function of ``helpers.roles``. What it logs is appended to ``log``."""
        child = Child(self._changed)
        with self._changed:
            self._starting.append(child)
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"role": role, "log": str(log), "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            self._changed.wait_for(lambda: child.pid, PATIENCE_S)
            assert child.pid, "the server of preloaded processes does not answer"
        return child

    def close(self) -> None:
        """End the server; it kills the children that still run."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                told = json.loads(line)
                with self._changed:
                    if "started" in told:
                        child = self._children[told["pid"]] = self._starting.pop(0)
                        child.pid = told["pid"]
                    else:
                        child = self._children[told["pid"]]
                        child.said.extend(told.get("said", ()))
                        child.code = told.get("code")
                    self._changed.notify_all()


# ---- in the server -----------------------------------------------------------------------------------------------------------


def _tell(**what: Any) -> None:
    os.write(1, (json.dumps({"pid": os.getpid(), **what}) + "\n").encode())  # one write: lines of several processes stay whole


def _serve() -> None:
    from fleetddp.common.config import OuterConfig
    from fleetddp.common.outer import OuterOptimizer
    from helpers import roles

    OuterOptimizer(OuterConfig())  # torch imports a second's worth of modules when its first optimizer is made
    running: dict[int, int] = {}  # pid -> pidfd
    ready = selectors.DefaultSelector()
    ready.register(0, selectors.EVENT_READ)
    requests = b""
    while True:
        for key, _ in ready.select():
            if key.fd:
                ready.unregister(key.fd)
                os.close(key.fd)
                del running[key.data]
                _, status = os.waitpid(key.data, 0)
                _tell(pid=key.data, code=os.waitstatus_to_exitcode(status))
                continue
            data = os.read(0, 65536)
            if not data:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return
            requests += data
            *lines, requests = requests.split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    _be(getattr(roles, json.loads(line)["role"]), json.loads(line))
                running[pid] = os.pidfd_open(pid)
                ready.register(running[pid], selectors.EVENT_READ, pid)
                _tell(pid=pid, started=True)


def _be(role: Callable[..., None], request: dict[str, Any]) -> None:
    """The child's whole life."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        role(lambda word: _tell(said=[word]), **request["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
