"""Builds a fleet from a scenario and runs it: ``Simulation(scenario).run()`` gives a ``Timeline``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from fleetddp.common.codecs import get
from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import ConfigError
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.update import Kind, Tier
from fleetddp.edge.sim import availability as when
from fleetddp.edge.sim import profiles
from fleetddp.edge.sim.calls import Network
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.learning import Learning
from fleetddp.edge.sim.loop import EventLoop
from fleetddp.edge.sim.member import SimMember
from fleetddp.edge.sim.network import NEVER_CUT, Cuts, Path, SharedLink
from fleetddp.edge.sim.observer import Observer, Observers
from fleetddp.edge.sim.root import SimRoot, Store
from fleetddp.edge.sim.scenario import Nights, PopulationConfig, Recorded, RegionConfig, Scenario
from fleetddp.edge.sim.timeline import Timeline
from fleetddp.edge.sim.timing import FactsStore, NoLearning
from fleetddp.edge.sim.world import Conduct, World


class _Region:
    """What the devices of a region share."""

    def __init__(self, name: str, section: RegionConfig, draws: Draws) -> None:
        self.down = [SharedLink(section.down_bytes_per_s)] if section.down_bytes_per_s else []
        self.up = [SharedLink(section.up_bytes_per_s)] if section.up_bytes_per_s else []
        self.cuts = Cuts(section.cuts)
        self.outages: list[when.Availability] = []
        if section.outages is not None:
            outages = section.outages
            self.outages.append(when.Outages(draws, f"region {name}", daily=outages.daily, mean_s=outages.mean_s))


class Simulation:
    """One run of a scenario. ``observers`` look on; ``log`` gets the events as JSON lines.

    ``loop``, ``network``, ``root``, ``world`` and ``members`` (by name) may be used before ``run``, to schedule a crash
    for instance.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        observers: Sequence[Observer] = (),
        log: TextIO | None = None,
        network: Callable[[EventLoop, float], Network] = Network,
    ) -> None:
        self.scenario = scenario
        self.draws = Draws(scenario.seed)
        self.loop = EventLoop()
        config = scenario.fleet
        self.network = network(self.loop, config.members.stall_s / 4)
        self.timeline = Timeline(self.network, log)
        observer = Observers(self.timeline, *observers)
        self.learning, store = self._mode(config)
        root = scenario.root
        self.root = SimRoot(config, store, self.loop, self.network, observer, disk_s=root.disk_s, merge_s=root.merge_s)
        self.world = World(
            config=config,
            loop=self.loop,
            network=self.network,
            root=self.root,
            learning=self.learning,
            observer=observer,
            required=Geometry(self.learning.layout, get("float32"), buffers=config.edge.update != "gradient").required(),
        )
        self.members: dict[str, SimMember] = {member.name: member for member in self._build()}

    def run(self) -> Timeline:
        """From time 0 to the end of the run, or to the horizon."""
        self.root.start()
        for member in self.members.values():
            member.begin()
        end = self.loop.run(until=self.scenario.horizon_s)
        for member in self.members.values():
            member.settle_usage()
        usages = ((m.tier, m.usage.seconds, m.usage.push_s) for m in self.members.values())
        self.timeline.close(end, self.loop.handled, usages)
        return self.timeline

    # ---- building -------------------------------------------------------------------------------------------------------------

    def _mode(self, config: FleetConfig) -> tuple[Learning, Store]:
        model = self.scenario.model
        layout = Layout.of([("weights", (model.parameters,))], [("statistics", (model.buffers,))] if model.buffers else [])
        store = FactsStore(config)
        if not any(section.tier is Tier.SITE for section in self.scenario.populations.values()):
            store.found(layout, self.loop.now())  # else the first site brings the first weights
        return NoLearning(layout), store

    def _build(self) -> Iterator[SimMember]:
        root = self.scenario.root
        regions = {name: _Region(name, section, self.draws) for name, section in self.scenario.regions.items()}
        down, up = SharedLink(root.down_bytes_per_s), SharedLink(root.up_bytes_per_s)
        populations = {name: getattr(profiles, section.profile)() for name, section in self.scenario.populations.items()}
        conducts = {name: self._conduct(section) for name, section in self.scenario.populations.items()}
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
                cuts=region.cuts if region else NEVER_CUT,
            )
            availability = available[population].of(name, region.outages if region else [])
            stream = self.draws.stream("member", name)
            yield SimMember(name, self.world, conducts[population], profile, path, availability, stream)

    def _conduct(self, section: PopulationConfig) -> Conduct:
        """How the members of a population work: by the fleet file's ``edge`` or ``site`` section."""
        edge, site = self.world.config.edge, self.world.config.site
        if section.tier is Tier.SITE:
            steps, samples, codec, wait_s = site.sync_every, section.samples * site.sync_every, site.codec, site.wait_s
            max_owed = math.inf
        else:
            epoch = math.ceil(section.samples / edge.batch_size)
            steps = edge.epochs * epoch if edge.steps is None else edge.steps
            samples = edge.epochs * section.samples if edge.steps is None else min(edge.batch_size, section.samples) * edge.steps
            codec, wait_s, max_owed = edge.codec, None, edge.max_outbox
        gradient = section.tier is Tier.EDGE and edge.update == "gradient"
        return Conduct(
            tier=section.tier,
            kind=Kind.GRADIENT if gradient else Kind.DELTA,
            codec=codec,
            samples=samples,
            steps=steps,
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
