"""The root aggregator as a process: journal, aggregator, publisher and server put together, started and stopped.

``Coordinator(config).run()`` is ``fleetddp coordinator``; ``start`` and ``stop`` do the same inside a running event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from fleetddp.common.assembly import assemble, open_journal
from fleetddp.common.clock import Clock, SystemClock
from fleetddp.common.config import FleetConfig
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport.server import LoopHost, Server

GRACE_S = 0.2  # for the calls open at a stop: most are news streams, and a push goes on after a restart
POLL_S = 0.1  # how often a finished run is looked at for members that have not left

_log = logging.getLogger(__name__)


class Coordinator:
    """One run's root. Raises ``ConfigError`` for a wrong fleet file, ``StorageError`` when the journal cannot be opened."""

    def __init__(self, config: FleetConfig, *, clock: Clock | None = None) -> None:
        self.config = config
        self.port = 0  # what the server listens on, once started
        self._clock = clock or SystemClock()
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Recover the run, or begin it, and listen."""
        config = self.config
        async with contextlib.AsyncExitStack() as stack:  # undoes what was done if something fails
            journal = open_journal(config)
            stack.callback(journal.close)
            telemetry = Telemetry()
            stack.callback(telemetry.close)
            host = LoopHost()
            stack.push_async_callback(host.close)
            self.driver = assemble(config, journal, clock=self._clock, host=host, telemetry=telemetry)
            stack.callback(self.driver.stop)
            server = Server(self.driver, config)
            stack.push_async_callback(server.stop, GRACE_S)
            if config.coordinator.metrics_port:
                telemetry.serve(config.coordinator.metrics_port)
            self.driver.start()
            self.port = await server.start()
            self._stack = stack.pop_all()
        _log.info("run %s listens on port %d, journal %s", config.run, self.port, config.coordinator.journal)

    async def stop(self) -> None:
        """End the calls that are open, finish the disk work in hand, close the journal."""
        await self._stack.aclose()

    async def until_finished(self) -> None:
        """Return once the run is over and its live members have heard of it and left, or their leases ended.

        A run that was over when it was started stays up for a lease, so that members can find it again and hear.
        """
        stay_until = self._clock.now() + self.config.members.lease_s if self.driver.finished else 0.0
        while not self.driver.finished or self.driver.live_members or self._clock.now() < stay_until:
            await asyncio.sleep(POLL_S)

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
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for task in ends:
                task.cancel()
        finally:
            await self.stop()
        _log.info("%s", f"finished: {self.driver.finished}" if self.driver.finished else "stopped; the journal keeps the run")
        return signals[0] if signals else None
