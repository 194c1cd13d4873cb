"""The scenario file: which fleet, how it is used, and for how long. Unknown keys are refused, as in the fleet file.

seed: 1
horizon_s: 86400
fleet: {window: {preset: semi_sync}, until: {versions: 100}}     # a fleet file (common/config.py)
model: {parameters: 78000}                                       # of timing mode; train mode takes the fleet's task
populations:
  phones: {count: 500, profile: phones, samples: 50, work: 1.2e-5, availability: {kind: nights}}
  site: {count: 1, profile: datacenter, tier: site, samples: 3200, work: 1.2e-5}
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from fleetddp.common.config import (
    EdgeConfig,
    FleetConfig,
    MergeConfig,
    NodeName,
    OuterConfig,
    Preset,
    Section,
    SiteConfig,
    WindowConfig,
)
from fleetddp.common.errors import ConfigError
from fleetddp.common.update import Tier
from fleetddp.edge.sim.fault_config import FaultsConfig

Probability = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]


class Always(Section):
    """Available at all times."""

    kind: Literal["always"] = "always"


class Nights(Section):
    """Available at night, see availability.py; each device lives in one of these time zones."""

    kind: Literal["nights"]
    utc_offsets_h: tuple[float, ...] = (0.0,)
    start_h: float = 22.5
    length_h: float = 7.5
    share: float = 0.85


class Recorded(Section):
    """Available as a trace file says (``read_traces``); device n takes its n-th trace, and the first again after the last."""

    kind: Literal["trace"]
    file: Path


AvailabilityConfig = Annotated[Always | Nights | Recorded, Field(discriminator="kind")]


class Own(Section):
    """The task gives each device its data, by the device's name."""

    kind: Literal["own"] = "own"


class Iid(Section):
    """The population's data dealt at random; this and the next four: see dealt.py and partition.py."""

    kind: Literal["iid"]


class Dirichlet(Section):
    """Mixtures of labels from a Dirichlet distribution: the smaller ``alpha``, the less alike they are."""

    kind: Literal["dirichlet"]
    alpha: PositiveFloat


class Shards(Section):
    """Few labels for each device."""

    kind: Literal["shards"]
    each: PositiveInt = 2


class Natural(Section):
    """What belongs together (a writer's letters) stays together."""

    kind: Literal["natural"]


class Drawn(Section):
    """Mixtures as ``dirichlet``; each device draws ``samples`` from the data with replacement: for more devices than data."""

    kind: Literal["drawn"]
    alpha: PositiveFloat


PartitionConfig = Annotated[Own | Iid | Dirichlet | Shards | Natural | Drawn, Field(discriminator="kind")]


class OutagesConfig(Section):
    """At most one outage a day, of exponential length."""

    daily: Probability
    mean_s: PositiveFloat


class RegionConfig(Section):
    """A region: the backhaul that its devices share, and outages that befall all of them at once."""

    down_bytes_per_s: PositiveFloat | None = None  # None: nothing is shared
    up_bytes_per_s: PositiveFloat | None = None
    cuts: tuple[tuple[float, float], ...] = ()  # [start, stop) in virtual seconds, during which nothing passes
    outages: OutagesConfig | None = None


class PopulationConfig(Section):
    """Some devices of a kind. A device's name is the population's, a dash and its number from 0."""

    count: PositiveInt
    profile: Literal["phones", "jetsons", "gateways", "datacenter"]
    tier: Literal[Tier.SITE, Tier.EDGE] = Tier.EDGE
    region: str | None = None
    samples: PositiveFloat = 50.0  # an edge device's own (train mode: as it has); of a site: its batch, all ranks together
    work: PositiveFloat = 1.0  # cost of one sample over that of the profiles' reference task
    partition: PartitionConfig = Own()  # train mode: who has which of the task's data
    availability: AvailabilityConfig = Always()
    outages: OutagesConfig | None = None  # each device's own
    dropout: Probability = 0.0  # that a device stops in the middle of a unit of work
    restart_s: PositiveFloat = 60.0  # and for how long
    partial: Probability = 0.0  # that it does only a part of a unit's steps
    clock_skew_s: Seconds = 0.0  # standard deviation of its clock's error


class RootConfig(Section):
    """The coordinator's machine."""

    disk_s: PositiveFloat = 0.002  # to make one update durable
    merge_s: PositiveFloat = 0.05  # to make a version
    down_bytes_per_s: PositiveFloat = 1.25e9  # of its own link, towards members
    up_bytes_per_s: PositiveFloat = 1.25e9


class ModelConfig(Section):
    """How large the model is, in elements."""

    parameters: PositiveInt = 100_000
    buffers: Annotated[int, Field(ge=0)] = 0


class TrainerConfig(Section):
    """How train mode trains on this machine."""

    workers: Annotated[int, Field(ge=0)] | None = None  # processes; None: one for each processor; 0: none, all in this process
    path: Literal["auto", "single", "channels_last", "stacked"] = "single"  # auto: the fastest, which need not give the same bits


class PolicyConfig(Section):
    """What a policy changes in the fleet file: whole sections. Left out: as the scenario's ``fleet`` says."""

    window: WindowConfig | None = None
    merge: MergeConfig | None = None
    outer: OuterConfig | None = None
    edge: EdgeConfig | None = None
    site: SiteConfig | None = None


class Scenario(Section):
    """A whole scenario file."""

    seed: int = 0
    horizon_s: PositiveFloat
    mode: Literal["timing", "train"] = "timing"
    fleet: FleetConfig = FleetConfig()
    model: ModelConfig = ModelConfig()
    root: RootConfig = RootConfig()
    trainer: TrainerConfig = TrainerConfig()
    faults: FaultsConfig | None = None
    regions: dict[str, RegionConfig] = Field(default_factory=dict)
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)  # for ``--compare``, by a name of your own or a preset's
    populations: Annotated[dict[NodeName, PopulationConfig], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_track_of_whole_models(self) -> Scenario:
        if self.fleet.tracks or self.fleet.include or self.fleet.kind != "weights":
            raise ValueError("fleet: tracks, include and kind: logits are not simulated")
        return self

    @model_validator(mode="after")
    def _regions_exist(self) -> Scenario:
        for name, population in self.populations.items():
            if population.region is not None and population.region not in self.regions:
                raise ValueError(
                    f"populations.{name}.region is {population.region!r}; there are {sorted(self.regions) or 'no regions'}"
                )
        return self

    @property
    def devices(self) -> Iterable[tuple[str, str, PopulationConfig]]:
        """(name, population, its section) of every device, in the order of the file."""
        for population, section in self.populations.items():
            for number in range(section.count):
                yield f"{population}-{number}", population, section


def with_policy(scenario: Scenario, name: str) -> Scenario:
    """The same fleet under another policy: one of ``policies``, or a preset as it is. ``ConfigError`` if it is neither."""
    if name in scenario.policies:
        policy = scenario.policies[name]
        changes: dict[str, Any] = {key: value for key in PolicyConfig.model_fields if (value := getattr(policy, key)) is not None}
    elif name in get_args(Preset):
        changes = {"window": WindowConfig.model_validate({"preset": name})}
        if name == "async" and "outer" not in scenario.fleet.model_fields_set:
            changes["outer"] = OuterConfig(preset="fedasync")
    else:
        known = ", ".join([*scenario.policies, *(preset for preset in get_args(Preset) if preset not in scenario.policies)])
        raise ConfigError(f"there is no policy {name!r}; there are {known}")
    return scenario.model_copy(update={"fleet": scenario.fleet.model_copy(update=changes)})


def parse(data: object, *, source: str = "scenario") -> Scenario:
    """Validate a mapping; raises ``ConfigError`` with one line for each wrong key."""
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        lines = (
            f"{source}: {'.'.join(map(str, e['loc'])) or '(top level)'}: {_message(e['type'], e['msg'])}" for e in error.errors()
        )
        raise ConfigError("\n".join(lines)) from None


def load(path: str | Path) -> Scenario:
    """Read and validate a YAML scenario file."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the scenario {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    return parse({} if data is None else data, source=str(path))


def _message(kind: str, message: str) -> str:
    return "unknown key" if kind == "extra_forbidden" else message.removeprefix("Value error, ")
