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

    def __init__(self, config: FleetConfig) -> None:
        self.files = MemoryFiles()
        self.at: Callable[[str], None] = lambda point: None
        self._config = config
        self._journal: Journal | None = None

    def found(self, layout: Layout, weights: Weights, at: float) -> None:
        """Make version 0, as from a start file."""
        _, _, publisher = self.open()
        publisher.found_weights(layout, weights, at)
        self.crash()

    def open(self) -> tuple[Journal, Staging, Publisher]:
        """See ``Store``."""
        config = self._config
        keep = config.coordinator.keep_versions
        at: Callable[[str], None] = lambda point: self.at(point)  # noqa: E731
        self._journal = journal = Journal(FOLDER, run=config.run, files=self.files, keep_versions=keep, at=at)
        return journal, Staging(journal, config.limits), Publisher(journal, config)

    def crash(self) -> None:
        """See ``Store``."""
        if self._journal is not None:
            self._journal.close()
        self.files.crash()
