"""The root aggregator as a process: ``Coordinator(config).run()`` is ``fleetddp coordinator``."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fleetddp.common.assembly import assemble, open_journal
from fleetddp.common.config import ONLY_TRACK
from fleetddp.common.driver import Driver
from fleetddp.common.errors import ConfigError
from fleetddp.common.host import LoopHost
from fleetddp.common.service import Service
from fleetddp.common.telemetry import Telemetry


class Coordinator(Service):
    """One run's root. ``start`` and ``stop`` do what ``run`` does inside a running event loop."""

    @property
    def _tracks(self) -> Sequence[str]:
        return tuple(self.config.tracks) or (ONLY_TRACK,)

    def _open(self, stack: contextlib.AsyncExitStack) -> None:
        self._of_tracks = {track: self.config.for_track(track) for track in self._tracks}
        self._journals = {}
        for track, config in self._of_tracks.items():
            self._journals[track] = open_journal(config)
            stack.callback(self._journals[track].close)

    def _assemble(self, track: str, host: LoopHost, telemetry: Telemetry) -> Driver:
        config, journal = self._of_tracks[track], self._journals[track]
        try:
            return assemble(config, journal, clock=self._clock, host=host, telemetry=telemetry)
        except ConfigError as error:
            if not self.config.tracks:
                raise
            raise ConfigError(f"tracks.{track}: {error}") from error
