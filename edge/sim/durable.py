"""A root's store with the real journal, over a disk in memory that loses what was not made durable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleetddp.common.config import FleetConfig
from fleetddp.common.journal import Journal
from fleetddp.common.layout import Layout
from fleetddp.common.publish import Publisher, Weights
from fleetddp.common.staging import Staging
from fleetddp.edge.sim.memory_files import MemoryFiles

FOLDER = Path("/journal")  # on the disk in memory


class DurableStore:
    """Everything is the real thing but the disk. ``at`` is called at each of the journal's crash points; see ``PlugPulled``."""

    def __init__(self, config: FleetConfig, at: Callable[[str], None] = lambda point: None) -> None:
        self.files = MemoryFiles()
        self._config, self._at = config, at
        self._journal: Journal | None = None

    def found(self, layout: Layout, weights: Weights, at: float) -> None:
        """Make version 0, as from a start file."""
        self._at, crash_point = lambda point: None, self._at
        _, _, publisher = self.open()
        publisher.found_weights(layout, weights, at)
        self.crash()
        self._at = crash_point

    def open(self) -> tuple[Journal, Staging, Publisher]:
        """See ``Store``."""
        config = self._config
        self._journal = journal = Journal(
            FOLDER, run=config.run, files=self.files, keep_versions=config.coordinator.keep_versions, at=self._at
        )
        return journal, Staging(journal, config.limits), Publisher(journal, config)

    def crash(self) -> None:
        """See ``Store``."""
        if self._journal is not None:
            self._journal.close()
        self.files.crash()
