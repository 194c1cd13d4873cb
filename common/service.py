"""An aggregator as a process, or one for each track: journal, driver and server. What a root and a region share."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from fleetddp.common.clock import Clock, SystemClock
from fleetddp.common.config import ONLY_TRACK, FleetConfig
from fleetddp.common.driver import Driver
from fleetddp.common.host import LoopHost
from fleetddp.common.telemetry import Telemetry, serve
from fleetddp.common.transport.server import Server

GRACE_S = 0.2  # for the calls open at a stop: most are news streams, and a push goes on after a restart
POLL_S = 0.1  # how often a finished run is looked at for members that have not left

_log = logging.getLogger(__name__)


class Service(ABC):
    """One aggregator. ``start`` raises ``ConfigError`` for a wrong fleet file, ``StorageError`` if the journal cannot be opened.

    ``config`` is as the aggregator sees it: ``config.coordinator`` says where it listens and keeps its journal.
    """

    def __init__(self, config: FleetConfig, *, clock: Clock | None = None) -> None:
        self.config = config
        self.drivers: Mapping[str, Driver] = {}  # by track, once started
        self.port = 0  # what the server listens on, once started
        self._clock = clock or SystemClock()
        self._stack = contextlib.AsyncExitStack()

    @property
    def driver(self) -> Driver:
        """Of the first track, or the only one."""
        return next(iter(self.drivers.values()))

    @property
    def _tracks(self) -> Sequence[str]:
        """What there is a driver for. A name of its own is only for those of several."""
        return (ONLY_TRACK,)

    @abstractmethod
    def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Open the journal, and whatever else outlives the disk work in hand; ``stack`` closes it."""

    @abstractmethod
    def _assemble(self, track: str, host: LoopHost, telemetry: Telemetry) -> Driver:
        """The driver of a track over what is open, not started."""

    @property
    def finished(self) -> str:
        """Why the run is over; empty while a track goes on."""
        reasons = [driver.finished for driver in self.drivers.values()]
        return "; ".join(dict.fromkeys(reasons)) if all(reasons) else ""

    async def start(self) -> None:
        """Recover the run, or begin it, and listen."""
        config = self.config
        async with contextlib.AsyncExitStack() as stack:  # undoes what was done if something fails
            self._open(stack)
            drivers = {}
            for track in self._tracks:
                host = LoopHost()
                stack.push_async_callback(host.close)
                drivers[track] = self._assemble(track, host, Telemetry(track if config.tracks else ""))
                stack.callback(drivers[track].stop)
            self.drivers = drivers
            server = Server(drivers, config)
            stack.push_async_callback(server.stop, GRACE_S)
            if config.coordinator.metrics_port:
                stack.callback(serve([d.telemetry for d in drivers.values()], config.coordinator.metrics_port))
            for driver in drivers.values():
                driver.start()
            self.port = await server.start()
            self._stack = stack.pop_all()
        _log.info("run %s listens on port %d, journal %s", config.run, self.port, config.coordinator.journal)

    async def stop(self) -> None:
        """End the calls that are open, finish the disk work in hand, close the journal."""
        await self._stack.aclose()

    async def until_finished(self) -> None:
        """Return once the run is over, on all tracks, and its live members have heard of it and left, or their leases ended.

        A run that was over when it was started stays up for a lease, so that members can find it again and hear. Above regions it
        stays up for two after the end: a member whose region is gone comes here after one and a half at most (``Failover``).
        """
        drivers, lease_s = list(self.drivers.values()), self.config.members.lease_s
        stay_until = self._clock.now() + lease_s if self.finished else 0.0
        while not self.finished:
            self._check()
            await asyncio.sleep(POLL_S)
        if any(driver.has_regions for driver in drivers):
            stay_until = self._clock.now() + 2 * lease_s
        while any(driver.live_members for driver in drivers) or self._clock.now() < stay_until:
            self._check()
            await asyncio.sleep(POLL_S)

    def _check(self) -> None:  # noqa: B027 (a root has nothing to fear)
        """Raise what a person must mend."""

    def run(self) -> None:
        """Serve until the run is over, or SIGTERM, or SIGINT (then ``KeyboardInterrupt``, after a clean stop)."""
        if asyncio.run(self._run()) is signal.SIGINT:
            raise KeyboardInterrupt

    async def _run(self) -> signal.Signals | None:
        """Returns the signal that ended it."""
        loop = asyncio.get_running_loop()
        signals: list[signal.Signals] = []
        signalled = asyncio.Event()

        def note(number: signal.Signals) -> None:
            signals.append(number)
            signalled.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, note, number)
        await self.start()
        try:
            ends = [asyncio.ensure_future(signalled.wait()), asyncio.ensure_future(self.until_finished())]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in ends:
                task.cancel()
            for task in done:
                task.result()  # raises what a person must mend
        finally:
            await self.stop()
        _log.info("%s", f"finished: {self.finished}" if self.finished else "stopped; the journal keeps the run")
        return signals[0] if signals else None
