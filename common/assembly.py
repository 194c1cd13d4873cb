"""An aggregator put together: journal recovered, version 0 from a file if the fleet file names one, driver ready to start."""

from __future__ import annotations

from fleetddp.common.aggregator import Aggregator
from fleetddp.common.clock import Clock
from fleetddp.common.config import FleetConfig
from fleetddp.common.driver import Driver, Host
from fleetddp.common.journal import Journal
from fleetddp.common.publish import Publisher
from fleetddp.common.staging import Staging
from fleetddp.common.telemetry import Telemetry


def assemble(config: FleetConfig, journal: Journal, *, clock: Clock, host: Host, telemetry: Telemetry) -> Driver:
    """The driver of ``config``'s run over its journal, not started.

    Raises ``ConfigError`` (the outer optimizer, the start file), ``StorageError``.
    """
    publisher = Publisher(journal, config)
    recovered = journal.recover()
    if config.start.file is not None and recovered.version is None:
        publisher.found_file(config.start.file, clock.now())
        recovered = journal.recover()
    return Driver(
        Aggregator(config, recovered),
        Staging(journal, config.limits),
        journal,
        publisher,
        clock=clock,
        host=host,
        telemetry=telemetry,
    )


def open_journal(config: FleetConfig) -> Journal:
    """The run's journal on disk; raises ``ConfigError`` (another run's), ``StorageError`` (the disk, another process)."""
    return Journal(config.coordinator.journal, run=config.run, keep_versions=config.coordinator.keep_versions)
