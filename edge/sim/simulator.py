"""Builds a fleet from a scenario and runs it: ``Simulation(scenario).run()`` gives a ``Timeline``."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

from fleetddp.common.codecs import get
from fleetddp.common.errors import ConfigError
from fleetddp.common.payload import Geometry
from fleetddp.common.task import Task
from fleetddp.common.update import Kind, Tier, Version
from fleetddp.edge.sim import availability as when
from fleetddp.edge.sim import profiles
from fleetddp.edge.sim.calls import Network
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.durable import DurableStore
from fleetddp.edge.sim.faults import Faults
from fleetddp.edge.sim.invariants import Invariants
from fleetddp.edge.sim.loop import EventLoop
from fleetddp.edge.sim.member import SimMember
from fleetddp.edge.sim.modes import Mode, timing, train
from fleetddp.edge.sim.network import NEVER_CUT, Cuts, Path, SharedLink
from fleetddp.edge.sim.observer import Observer, Observers
from fleetddp.edge.sim.root import SimRoot
from fleetddp.edge.sim.scenario import Nights, PopulationConfig, Recorded, RegionConfig, Scenario
from fleetddp.edge.sim.tampering import Byzantine, FaultyNetwork
from fleetddp.edge.sim.timeline import Timeline
from fleetddp.edge.sim.world import Conduct, World

PARTS = 200  # of a run, for its progress


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Millions of objects come and go, next to none of them in cycles: to look for those would take a quarter of the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class _Region:
    """What the devices of a region share."""

    def __init__(self, name: str, section: RegionConfig, draws: Draws) -> None:
        self.down = [SharedLink(section.down_bytes_per_s)] if section.down_bytes_per_s else []
        self.up = [SharedLink(section.up_bytes_per_s)] if section.up_bytes_per_s else []
        self.outages: list[when.Availability] = []
        if section.outages is not None:
            outages = section.outages
            self.outages.append(when.Outages(draws, f"region {name}", daily=outages.daily, mean_s=outages.mean_s))


class Simulation:
    """One run of a scenario. ``observers`` look on; ``log`` gets the events as JSON lines; ``task`` replaces the fleet file's,
    ``mode`` what the scenario's would be.

    ``loop``, ``network``, ``root``, ``world`` and ``members`` (by name) may be used before ``run``, to schedule a crash
    for instance. The invariants of design §11 are checked all the time (``invariants``).
    """

    root_type: type[SimRoot] = SimRoot

    def __init__(
        self,
        scenario: Scenario,
        *,
        observers: Sequence[Observer] = (),
        log: TextIO | None = None,
        network: Callable[[EventLoop, float], Network] = Network,
        task: Task | None = None,
        mode: Mode | None = None,
    ) -> None:
        self.scenario = scenario
        self.draws = Draws(scenario.seed)
        self.loop = EventLoop()
        config = scenario.fleet
        progress_s = config.members.stall_s / 4
        self.network = network(self.loop, progress_s)
        if mode is None:
            mode = train(scenario, self.draws, task) if scenario.mode == "train" else timing(scenario)
        self._mode = mode
        self.learning, store = mode.learning, mode.store
        self.faults: Faults | None = None
        if scenario.faults is not None:
            names = (name for name, _, _ in scenario.devices)
            self.faults = Faults(scenario.faults, self.draws, self.loop, names, scenario.horizon_s)
            self.network = FaultyNetwork(self.loop, progress_s, self.faults)
            self.learning = Byzantine(self.learning, self.faults.lies)
            if isinstance(store, DurableStore):
                store.at = self.faults.point
        self.timeline = Timeline(self.network, log, self._evaluate)
        self.invariants = Invariants(config, self.loop.stop)
        observer = Observers(self.timeline, self.invariants, *observers)
        root = scenario.root
        times = {"disk_s": root.disk_s, "merge_s": root.merge_s}
        self.root = self.root_type(config, store, self.loop, self.network, observer, **times)
        self.world = World(
            config=config,
            loop=self.loop,
            network=self.network,
            root=self.root,
            learning=self.learning,
            observer=observer,
            required={
                kind: Geometry(self.learning.layout, get("float32"), buffers=kind is not Kind.GRADIENT).required()
                for kind in Kind
            },
        )
        self.members: dict[str, SimMember] = {member.name: member for member in self._build()}

    def run(self, progress: Callable[[float], None] = lambda virtual_s: None) -> Timeline:
        """From time 0 to the end of the run, or to the horizon; once. ``progress`` is told of the virtual time now and then.

        Raises ``InvariantViolation``.
        """
        if self.faults is not None:
            self.faults.begin(self.root, self.members)
        self.root.start()
        for member in self.members.values():
            member.begin()
        try:
            with _few_collections():
                end = self._run(progress)
        finally:
            self._mode.close()
        for member in self.members.values():
            member.settle_usage()
        usages = ((m.tier, m.usage.seconds, m.usage.push_s) for m in self.members.values())
        self.timeline.close(end, self.loop.handled, usages)
        quiet = self.faults is not None and self.faults.config.quiet_s > 0
        self.invariants.check(end, quiet_since=self.faults.until_s if self.faults is not None and quiet else None)
        return self.timeline

    def _run(self, progress: Callable[[float], None]) -> float:
        end = self.loop.now()
        for part in range(1, PARTS + 1):
            end = self.loop.run(until=self.scenario.horizon_s * part / PARTS)
            progress(end)
            left = self.timeline.finished and not self.loop  # the run is over and everybody has left
            if left or self.invariants.violations:
                break
        return end

    # ---- building -------------------------------------------------------------------------------------------------------------

    def _evaluate(self, version: Version) -> Mapping[str, float]:
        driver = self.root.driver
        assert driver is not None
        with driver.journal.read_version(version.number) as reader:
            return self.learning.evaluate(version, reader.read(0, reader.size))

    def _build(self) -> Iterator[SimMember]:
        root = self.scenario.root
        regions = {name: _Region(name, section, self.draws) for name, section in self.scenario.regions.items()}
        down, up = SharedLink(root.down_bytes_per_s), SharedLink(root.up_bytes_per_s)
        populations = {name: getattr(profiles, section.profile)() for name, section in self.scenario.populations.items()}
        conducts: dict[tuple[str, float | None], Conduct] = {}
        available = {name: _Available(section, self.draws) for name, section in self.scenario.populations.items()}
        for name, population, section in self.scenario.devices:
            region = regions[section.region] if section.region is not None else None
            profile = profiles.sample(populations[population], self.draws, name)
            path = Path(
                down_bytes_per_s=profile.down_bytes_per_s,
                up_bytes_per_s=profile.up_bytes_per_s,
                latency_s=profile.latency_s,
                jitter=profile.link_jitter,
                stream=self.draws.stream("path", name),
                down=[down, *(region.down if region else ())],
                up=[*(region.up if region else ()), up],
                cuts=self._cuts(name, section),
            )
            availability = available[population].of(name, region.outages if region else [])
            stream = self.draws.stream("member", name)
            held = self._mode.samples(name)
            if (population, held) not in conducts:
                conducts[population, held] = self._conduct(section, held)
            yield SimMember(name, self.world, conducts[population, held], profile, path, availability, stream)

    def _cuts(self, name: str, section: PopulationConfig) -> Cuts:
        cuts = [*self.scenario.regions[section.region].cuts] if section.region is not None else []
        cuts += self.faults.cuts(name) if self.faults is not None else ()
        return Cuts(cuts) if cuts else NEVER_CUT

    def _conduct(self, section: PopulationConfig, held: float | None) -> Conduct:
        """How members of a population work that hold so many samples: by the fleet file's ``edge`` or ``site`` section."""
        edge, site = self.world.config.edge, self.world.config.site
        if section.tier is Tier.SITE:
            codec, wait_s, max_owed = site.codec, site.wait_s, math.inf
            steps, batch, epoch, pinned = site.sync_every, section.samples, held, True
        else:
            codec, wait_s, max_owed = edge.codec, None, edge.max_outbox
            batch, epoch, pinned = edge.batch_size, section.samples if held is None else held, edge.steps is not None
            steps = edge.epochs * math.ceil(epoch / edge.batch_size) if edge.steps is None else edge.steps
        gradient = section.tier is Tier.EDGE and edge.update == "gradient"
        return Conduct(
            tier=section.tier,
            kind=Kind.GRADIENT if gradient else Kind.DELTA,
            codec=codec,
            steps=steps,
            pinned=pinned,
            batch=batch,
            epoch=epoch,
            work=section.work,
            max_owed=max_owed,
            wait_s=math.inf if wait_s is None else wait_s,
            dropout=section.dropout,
            restart_s=section.restart_s,
            partial=section.partial,
            clock_skew_s=section.clock_skew_s,
        )


class _Available:
    """When the devices of a population are available."""

    def __init__(self, section: PopulationConfig, draws: Draws) -> None:
        self._section, self._draws = section, draws
        self._traces = (
            list(when.read_traces(section.availability.file).values()) if isinstance(section.availability, Recorded) else []
        )
        if isinstance(section.availability, Recorded) and not self._traces:
            raise ConfigError(f"{section.availability.file} holds no trace")
        self._made = 0

    def of(self, device: str, outages: list[when.Availability]) -> when.Availability:
        """Of the next device; ``outages`` are its region's."""
        section, draws, parts = self._section, self._draws, list(outages)
        wanted = section.availability
        if isinstance(wanted, Nights):
            offsets = wanted.utc_offsets_h
            offset = offsets[int(draws.uniform("time zone", device) * len(offsets))]
            nights = when.Nights(start_h=wanted.start_h, length_h=wanted.length_h, share=wanted.share)
            parts.append(when.Nightly(draws, device, nights, utc_offset_h=offset))
        elif self._traces:
            parts.append(self._traces[self._made % len(self._traces)])
            self._made += 1
        if section.outages is not None:
            parts.append(when.Outages(draws, device, daily=section.outages.daily, mean_s=section.outages.mean_s))
        if not parts:
            return when.Always()
        return parts[0] if len(parts) == 1 else when.Every(*parts)
