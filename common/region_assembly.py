"""A regional aggregator put together: what of the fleet file is a region's own, journal recovered, driver ready to start."""

from __future__ import annotations

import math

from fleetddp.common import codecs
from fleetddp.common.assembly import ITEMS, proxy_of
from fleetddp.common.clock import Clock
from fleetddp.common.config import CoordinatorConfig, FleetConfig, StartConfig, UntilConfig, WindowConfig
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.host import Host
from fleetddp.common.layout import Layout
from fleetddp.common.open_items import bring
from fleetddp.common.recovered import RecoveredRegion
from fleetddp.common.region_driver import Above, RegionDriver
from fleetddp.common.region_items import RegionItems
from fleetddp.common.region_journal import RegionJournal
from fleetddp.common.regional import RegionalAggregator
from fleetddp.common.staging import Staging
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport import Parent
from fleetddp.common.update import Version
from fleetddp.common.window import resolve

DEADLINE_S = 60.0  # where neither the fleet's window nor the parent has one: a region always delivers in the end


def region_config(config: FleetConfig) -> FleetConfig:
    """The fleet file as a region's aggregator and server see it.

    They listen at ``region.listen`` and keep ``region.journal``; the run ends when the parent says so; version 0 comes from
    above. Without ``region.window`` a window is sealed as the fleet's ``window`` says, but no tier is required, and where that
    counts updates (of the whole fleet) each live member of the region is waited for instead.
    """
    region = config.region
    own = CoordinatorConfig(
        address=region.address,
        listen=region.listen,
        journal=region.journal,
        keep_versions=region.keep_versions,
        metrics_port=region.metrics_port,
    )
    changes = {
        "coordinator": own,
        "window": region.window or _window_like(config.window),
        "until": UntilConfig(),
        "start": StartConfig(),
        "site": config.site.model_copy(update={"fragments": 1}),  # whole updates only
    }
    return config.model_copy(update=changes)


def _window_like(fleet: WindowConfig) -> WindowConfig:
    policy = resolve(fleet, sites_named=False)
    counts = isinstance(policy.quorum, int) and policy.quorum > 1
    return WindowConfig(
        preset=fleet.preset,
        quorum=1.0 if counts else fleet.quorum,
        require=(),
        grace_s=fleet.grace_s,
        deadline_s=policy.deadline_s if math.isfinite(policy.deadline_s) else DEADLINE_S,
        min_updates=1,
    )


def open_region_journal(config: FleetConfig) -> RegionJournal:
    """The region's journal on disk; raises ``ConfigError`` (another run's), ``StorageError`` (the disk, another process)."""
    region = config.region
    return RegionJournal(region.journal, run=config.run, keep_versions=region.keep_versions)


def assemble_region(
    config: FleetConfig,
    journal: RegionJournal,
    entered: RecoveredRegion,
    above: Above,
    *,
    clock: Clock,
    host: Host,
    telemetry: Telemetry,
    items: RegionItems | None = None,
) -> RegionDriver:
    """The driver of a region that has entered its journal, not started. ``config`` is the fleet file; ``items`` its open items.

    Raises ``ConfigError`` (the codec of its partials), ``StorageError``.
    """
    try:
        codecs.get(config.region.codec)
    except Refused as refusal:
        raise ConfigError(f"region.codec: {refusal.message}") from refusal
    own = region_config(config)
    aggregator = RegionalAggregator(own, journal.recover(), entered)
    staging = Staging(journal, own.limits)
    driver = RegionDriver(aggregator, staging, journal, above, clock=clock, host=host, telemetry=telemetry, items=items)
    if own.proxy is not None and own.proxy.file is not None and own.proxy.file.exists():
        driver.shelf = proxy_of(own.proxy)[0]
    return driver


def open_region_items(
    config: FleetConfig, journal: RegionJournal, entered: RecoveredRegion, parent: Parent, clock: Clock
) -> RegionItems | None:
    """The open items of a region that has entered its journal; None where its track has room for none."""
    if config.proxy is None or config.proxy.open is None:
        return None
    database = journal.connect(ITEMS)
    return RegionItems(database, clock, parent, node=entered.node, incarnation=entered.incarnation, run=config.run)


def fetch(parent: Parent, number: int, journal: RegionJournal, items: RegionItems | None = None) -> tuple[Version, Layout]:
    """Bring a version of the parent's into the journal, as it is, and first the open items that are labelled on it.

    Raises what ``Parent.pull`` and ``open_items.bring`` do, and ``StorageError``.
    """
    if items is not None:
        bring(parent, items, number)
    draft = journal.begin_version(number)
    try:
        version = parent.pull(number, (), lambda offset, data: draft.pwrite(data, offset))
        layout = journal.layout() or parent.layout()
        if version.layout != layout.fingerprint:
            mine, theirs = layout.fingerprint[:12], version.layout[:12]
            raise Refused(Reason.WRONG_LAYOUT, f"version {number} has layout {theirs}; this region's run has {mine}")
        journal.adopt(version, draft, layout)
    finally:
        draft.close()
    return version, layout
