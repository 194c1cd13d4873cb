"""A whole coordinator in this process: a real server on a loopback port, a journal in a folder, an event loop in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import yaml

from fleetddp.cloud.coordinator import Coordinator
from fleetddp.common.config import FleetConfig, parse
from fleetddp.common.service import Service

T = TypeVar("T")


def fleet_config(folder: Path, **sections: Any) -> FleetConfig:
    """A small fleet file: port 0 on loopback, the journal in ``folder``, quick windows. Sections given add to these defaults."""
    data: dict[str, Any] = {
        "run": "test",
        "coordinator": {"address": "127.0.0.1:0", "journal": str(folder / "journal")},
        "members": {"heartbeat_s": 0.5, "lease_s": 30.0},
        "window": {"preset": "semi_sync", "quorum": 1, "require": [], "grace_s": 0.0, "min_updates": 1, "deadline_s": 60.0},
    }
    for name, value in sections.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) and isinstance(data.get(name), dict) else value
    return parse(data)


class RunningService:
    """A started aggregator, a coordinator or a region, in a thread of its own. ``address`` is what members dial."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-coordinator", daemon=True)
        self._thread.start()
        try:
            self.run(service.start())
        except BaseException:
            self._end_loop()
            raise

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.service.port}"

    def run(self, coroutine: Any, timeout_s: float = 30.0) -> Any:
        """Run a coroutine on the coordinator's loop and return its result."""
        return self.begin(coroutine).result(timeout_s)

    def begin(self, coroutine: Any) -> Future[Any]:
        """Start a coroutine on the coordinator's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the coordinator's loop, where its driver lives."""

        async def work() -> T:
            return function()

        result: T = self.run(work())
        return result

    def status(self) -> dict[str, Any]:
        """As ``fleetddp status`` would see it."""
        return self.call(self.service.driver.status)

    def stop(self) -> None:
        """A clean stop; the journal stays."""
        self.run(self.service.stop())
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class RunningCoordinator(RunningService):
    """A started coordinator."""

    def __init__(self, config: FleetConfig) -> None:
        self.config = config
        self.coordinator = Coordinator(config)
        super().__init__(self.coordinator)


@contextlib.contextmanager
def running(config: FleetConfig) -> Iterator[RunningCoordinator]:
    """A coordinator for the time of a ``with`` block."""
    coordinator = RunningCoordinator(config)
    try:
        yield coordinator
    finally:
        coordinator.stop()


def on_port(config: FleetConfig, port: int) -> FleetConfig:
    """The same fleet on a fixed port: to restart a coordinator where its members look for it."""
    address = f"127.0.0.1:{port}"
    return config.model_copy(update={"coordinator": config.coordinator.model_copy(update={"address": address})})


def free_port() -> int:
    """Below those that the system gives to clients: while nobody listens there, none of our own dials can end up on it."""
    while True:
        port = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def write(config: FleetConfig, folder: Path) -> str:
    """The fleet file of a config; returns its path."""
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    return str(path)
