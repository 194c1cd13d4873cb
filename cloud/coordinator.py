"""The root aggregator as a process: ``Coordinator(config).run()`` is ``fleetddp coordinator``."""

from __future__ import annotations

import contextlib

from fleetddp.common.assembly import assemble, open_journal
from fleetddp.common.driver import Driver
from fleetddp.common.service import Service
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport.server import LoopHost


class Coordinator(Service):
    """One run's root. ``start`` and ``stop`` do what ``run`` does inside a running event loop."""

    def _open(self, stack: contextlib.AsyncExitStack) -> None:
        self._journal = open_journal(self.config)
        stack.callback(self._journal.close)

    def _assemble(self, host: LoopHost, telemetry: Telemetry) -> Driver:
        return assemble(self.config, self._journal, clock=self._clock, host=host, telemetry=telemetry)
