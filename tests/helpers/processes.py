"""Real processes of ``fleetddp``, followed by what they log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
PATIENCE_S = 60.0
LOOK_AGAIN_S = 0.05


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Look until ``condition`` holds; for what cannot tell by itself that it changed. Fails the test after ``timeout_s``."""
    over, looks = threading.Event(), int(timeout_s / LOOK_AGAIN_S)
    for _ in range(looks):
        if condition():
            return
        over.wait(LOOK_AGAIN_S)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


class Command:
    """``fleetddp ARGUMENTS`` as a process; ``lines`` is what it wrote so far."""

    def __init__(self, *arguments: str) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
        # As in a terminal: a shell's background job, which the tests may be, ignores SIGINT, and so would what it starts.
        ready = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
        code = f"{ready}; from fleetddp.cloud.cli import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, text: str, count: int = 1, after: int = 0) -> int:
        """Wait until ``count`` lines from line ``after`` on hold ``text``; returns how many lines there are then."""
        with self._changed:
            seen = self._changed.wait_for(
                lambda: sum(text in line for line in self.lines[after:]) >= count or not self._reader.is_alive(), PATIENCE_S
            )
            assert seen, f"no {text!r} in time in:\n{''.join(self.lines)}"
            assert sum(text in line for line in self.lines[after:]) >= count, f"it ended before {text!r}:\n{''.join(self.lines)}"
            return len(self.lines)

    def end(self, number: signal.Signals | None = None, timeout_s: float = PATIENCE_S) -> int:
        """Send a signal, if one is given, and wait for the end; returns the exit code."""
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code


@contextmanager
def commands() -> Iterator[Callable[..., Command]]:
    """Starts commands, and kills those that still run at the end."""
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(*arguments))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            command.process.kill()
            command.end()
