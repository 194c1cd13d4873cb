"""An aggregator put together: journal recovered, version 0 made if the fleet file says of what, driver ready to start."""

from __future__ import annotations

from fleetddp.common.aggregator import Aggregator
from fleetddp.common.clock import Clock
from fleetddp.common.config import FleetConfig, ProxyConfig
from fleetddp.common.driver import Driver
from fleetddp.common.errors import ConfigError
from fleetddp.common.host import Host
from fleetddp.common.item_pool import ItemPool
from fleetddp.common.journal import Journal
from fleetddp.common.labels import layout_of
from fleetddp.common.layout import Layout
from fleetddp.common.proxy import ProxySet, shape_of
from fleetddp.common.publish import Publisher
from fleetddp.common.shelf import Shelf
from fleetddp.common.staging import Staging
from fleetddp.common.telemetry import Telemetry

ITEMS = "items.db"  # beside the journal: what is erased in it must not lie in the journal's log


def assemble(config: FleetConfig, journal: Journal, *, clock: Clock, host: Host, telemetry: Telemetry) -> Driver:
    """The driver of ``config``'s run over its journal, not started.

    Raises ``ConfigError`` (the outer optimizer, the start file, the proxy set), ``StorageError``.
    """
    config = config.for_track("")  # of several tracks each has a driver of its own: raises
    publisher = Publisher(journal, config)
    recovered = journal.recover()
    shelf = items = None
    if config.proxy is not None:
        shelf, layout, shape = proxy_of(config.proxy)
        if recovered.layout not in (None, layout):
            name = config.proxy.name
            raise ConfigError(
                f"proxy: this run began with another proxy set than {name}, or other room in it (proxy.open.items): a run never "
                "changes it"
            )
        if recovered.version is None:
            publisher.found_labels(layout, clock.now())
            recovered = journal.recover()
        if config.proxy.open is not None:
            began = recovered.version is not None and recovered.version.number > 0
            items = ItemPool(journal.connect(ITEMS), config.proxy.open, shape, clock, began=began)
    elif config.start.file is not None and recovered.version is None:
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
        shelf=shelf,
        items=items,
    )


def proxy_of(config: ProxyConfig) -> tuple[Shelf | None, Layout, tuple[int, ...]]:
    """The file to hand out, if there is one, the layout of the set's soft labels, and the shape of an open item.

    Raises ``ConfigError``.
    """
    shelf, items, digest = None, config.items, config.digest
    shape = config.open.shape if config.open is not None else None
    if config.file is not None:
        proxy = ProxySet.open(config.file, name=config.name, classes=config.classes)
        shelf, items, digest = Shelf(config.file, proxy), len(proxy), proxy.digest
        if config.open is not None:
            shape = shape_of(proxy, config.open)
    assert items is not None
    assert digest is not None  # by the section's validation
    return shelf, layout_of(config.name, digest, items + config.open_items, config.classes, by_tier=config.by_tier), shape or ()


def open_journal(config: FleetConfig) -> Journal:
    """The run's journal on disk; raises ``ConfigError`` (another run's), ``StorageError`` (the disk, another process)."""
    return Journal(config.coordinator.journal, run=config.run, keep_versions=config.coordinator.keep_versions)
