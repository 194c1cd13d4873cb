"""The regional aggregator as a process, the same with a parent: ``Region(config, name).run()`` is ``fleetddp region``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from fleetddp.common.clock import Clock
from fleetddp.common.config import ONLY_TRACK, FleetConfig
from fleetddp.common.driver import Driver
from fleetddp.common.errors import FleetError, Reason, Refused
from fleetddp.common.events import Event
from fleetddp.common.host import LoopHost
from fleetddp.common.region_assembly import assemble_region, open_region_items, open_region_journal, region_config
from fleetddp.common.service import Service
from fleetddp.common.shelf import Shelf, bring, place
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport.failover import connect
from fleetddp.common.transport.uplink import Patience
from fleetddp.common.transport.upward import Upward

_log = logging.getLogger(__name__)


class Region(Service):
    """Region ``name`` of the fleet that ``config`` (the fleet file) describes. See ``Service``.

    Its members are served from its journal, with or without the parent. ``until_finished`` raises what a person must mend: the
    parent's ``Refused`` with WRONG_RUN, WRONG_IDENTITY, ...
    """

    def __init__(self, config: FleetConfig, name: str, *, clock: Clock | None = None) -> None:
        self._fleet = config.for_track(config.region.track)
        super().__init__(region_config(self._fleet), clock=clock)
        self.name, self._track = name, config.region.track
        self._stopping = threading.Event()

    def _open(self, stack: contextlib.AsyncExitStack) -> None:
        fleet, members = self._fleet, self._fleet.members
        self._journal = open_region_journal(fleet)
        stack.callback(self._journal.close)
        self._parent = connect(
            fleet.region.parents or (fleet.coordinator.address,),
            fleet.security,
            node=self.name,
            run=fleet.run,
            track=self._track,
            patience=Patience(give_up_s=members.lease_s),
            after_s=members.lease_s,
        )
        stack.callback(self._parent.close)

    @property
    def _tracks(self) -> Sequence[str]:
        return (self._track or ONLY_TRACK,)

    def _assemble(self, track: str, host: LoopHost, telemetry: Telemetry) -> Driver:
        loop = asyncio.get_running_loop()

        def tell(event: Event) -> None:
            call(lambda: self._feed(event))

        def call(what: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is at its end
                loop.call_soon_threadsafe(what)

        entered = self._journal.enter(self.name)
        items = open_region_items(self._fleet, self._journal, entered, self._parent, self._clock)
        run, give_up_s = self._fleet.run, self._fleet.region.give_up_s
        self._upward = Upward(
            self._parent, self._journal, entered, run=run, tell=tell, call=call, give_up_s=give_up_s, items=items
        )
        return assemble_region(
            self._fleet, self._journal, entered, self._upward, clock=self._clock, host=host, telemetry=telemetry, items=items
        )

    def _feed(self, event: Event) -> None:
        with contextlib.suppress(FleetError):  # logged where it was raised; nobody waits for an answer
            self.driver.handle(event)

    async def start(self) -> None:
        """Recover what is durable, listen, and begin to join the parent."""
        await super().start()
        self._upward.start()
        if self.config.proxy is not None and self.driver.shelf is None:
            bringing = partial(self._bring_proxy, self.config.proxy.classes, asyncio.get_running_loop())
            threading.Thread(target=bringing, name="fleet-proxy", daemon=True).start()

    def _bring_proxy(self, classes: int, loop: asyncio.AbstractEventLoop) -> None:
        """Hand out the proxy set that the parent hands out, from when it is here on."""
        folder = self.config.coordinator.journal / "proxy"
        while not self._stopping.is_set():
            try:
                proxy = bring(self._parent, folder, classes=classes)
            except Refused as refusal:
                if not refusal.retry and refusal.reason is not Reason.BAD_CHECKSUM:
                    _log.info("no proxy set is handed out: %s", refusal)
                    return
            except FleetError as error:
                _log.info("the proxy set cannot be brought now: %s", error)
            else:
                shelf = Shelf(place(folder, proxy.digest), proxy)
                with contextlib.suppress(RuntimeError):  # the loop is closed: the process is at its end
                    loop.call_soon_threadsafe(setattr, self.driver, "shelf", shelf)
                return
            self._stopping.wait(self.config.members.heartbeat_s)

    async def stop(self) -> None:
        """End the session with the parent, then everything else. The region is expected back unless the run is over."""
        self._stopping.set()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, lambda: self._upward.stop(leave=bool(self.driver.finished)))
        self._parent.close()
        await loop.run_in_executor(None, self._upward.close)
        await super().stop()

    def _check(self) -> None:
        if self._upward.session.failure is not None:
            raise self._upward.session.failure
