"""The fleet file: every setting, its unit and its default. Unknown keys are refused; errors name the key and what is allowed.

``load("fleet.yaml")`` reads one. All classes are keyword-only and frozen; a preset fills in what the file leaves out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from fleetddp.common.distill_config import DistillConfig
from fleetddp.common.errors import ConfigError
from fleetddp.common.inference_config import CascadeConfig, ServeConfig
from fleetddp.common.sections import Address, host_port
from fleetddp.common.sections import Section as Section
from fleetddp.common.update import Tier

NodeName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
TrackName = Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")]  # empty: the only one
Fraction = Annotated[float, Field(gt=0, le=1)]
MAX_NORM = 1e18  # of anything merged: far beyond any training, and far from where float32 weights overflow
MIN_SAMPLES, MAX_SAMPLES = 1e-9, 1e18  # behind anything merged: their sums and quotients stay clear of 0 and infinity


class SecurityConfig(Section):
    """Mutual TLS: all three files, or ``insecure: true`` (plaintext is otherwise allowed on loopback only)."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    insecure: bool = False

    @model_validator(mode="after")
    def _all_or_none(self) -> SecurityConfig:
        given = [name for name in ("ca", "cert", "key") if getattr(self, name) is not None]
        if len(given) not in (0, 3):
            raise ValueError(f"mutual TLS needs ca, cert and key together; only {', '.join(given)} given")
        if given and self.insecure:
            raise ValueError("insecure: true contradicts ca, cert and key; remove one of them")
        return self


class CoordinatorConfig(Section):
    """Where the coordinator listens and keeps its journal."""

    address: str = "127.0.0.1:7070"  # what members dial
    listen: str = ""  # what the server binds; empty: the address
    journal: Path = Path("fleet-journal")
    keep_versions: PositiveInt = 3
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0  # Prometheus; 0: off

    @field_validator("address", "listen")
    @classmethod
    def _dialable(cls, value: str) -> str:
        return host_port(value)


class MembersConfig(Section):
    """Who may take part and when a silent member is given up."""

    sites: tuple[NodeName, ...] = ()  # naming a site makes `require: [site]` the default of semi_sync
    allow: tuple[str, ...] = ("*",)  # shell patterns of node names that may join
    heartbeat_s: PositiveFloat = 5.0
    lease_s: PositiveFloat = 20.0  # a member silent for so long is no longer expected
    stall_s: PositiveFloat = 20.0  # a transfer without a byte for so long is dropped

    @model_validator(mode="after")
    def _lease_outlives_heartbeat(self) -> MembersConfig:
        if self.lease_s <= self.heartbeat_s:
            raise ValueError(f"lease_s ({self.lease_s}) must be greater than heartbeat_s ({self.heartbeat_s})")
        return self


Preset = Literal["sync", "semi_sync", "async", "fedbuff", "periodic"]


class WindowConfig(Section):
    """When to merge (design §4). ``None`` means: as the preset says (table ``PRESETS`` in window.py)."""

    preset: Preset = "semi_sync"
    quorum: PositiveInt | Fraction | None = None  # an int counts updates; a float is a fraction of the live members
    require: tuple[Tier, ...] | None = None
    grace_s: Annotated[float, Field(ge=0)] | Literal["auto"] | None = None
    deadline_s: PositiveFloat | None = None
    min_updates: PositiveInt | None = None


class Constant(Section):
    """No discount: d(s) = 1."""

    kind: Literal["constant"] = "constant"


class Polynomial(Section):
    """d(s) = (1 + s)^-a (Xie et al., Asynchronous Federated Optimization, 2019, §5)."""

    kind: Literal["polynomial"] = "polynomial"
    a: Annotated[float, Field(ge=0)] = 0.5


class Hinge(Section):
    """d(s) = 1 if s <= b else 1 / (a (s - b) + 1) (ibid.)."""

    kind: Literal["hinge"] = "hinge"
    a: PositiveFloat = 10.0
    b: Annotated[float, Field(ge=0)] = 4.0


Discount = Annotated[Constant | Polynomial | Hinge, Field(discriminator="kind")]


class StalenessConfig(Section):
    """How much a late update counts, and from when on it is refused."""

    max_staleness: Annotated[int, Field(ge=0)] = 10
    discount: Discount = Polynomial()


class MergeConfig(Section):
    """How to weigh updates."""

    share: Literal["samples"] | dict[Tier, PositiveFloat] = "samples"
    staleness: StalenessConfig = StalenessConfig()
    tiers: dict[Tier, StalenessConfig] = Field(default={})  # overrides ``staleness`` for a tier
    gradient_lr: PositiveFloat = 0.01  # a `gradient` joins as the delta of one local step of this size

    @field_validator("share")
    @classmethod
    def _both_leaf_tiers(cls, value: object) -> object:
        if isinstance(value, dict) and set(value) != {Tier.SITE, Tier.EDGE}:
            raise ValueError("shares are {site: ..., edge: ...}: both tiers and no other (a region's updates are its members')")
        return value

    @field_validator("tiers")
    @classmethod
    def _leaf_tiers(cls, value: dict[Tier, StalenessConfig]) -> dict[Tier, StalenessConfig]:
        if Tier.REGION in value:
            raise ValueError("a region has no staleness of its own: its updates count as its members'; allowed are site, edge")
        return value

    def for_tier(self, tier: Tier) -> StalenessConfig:
        """The staleness rule of one leaf tier."""
        return self.tiers.get(tier, self.staleness)

    def bound(self, tier: Tier) -> int:
        """The largest staleness that is merged, of one tier; of a region that of its members who may be the latest."""
        tiers = (Tier.SITE, Tier.EDGE) if tier is Tier.REGION else (tier,)
        return max(self.for_tier(t).max_staleness for t in tiers)


ElementWise = Literal["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"]


class OuterConfig(Section):
    """The outer optimizer: a class of torch.optim by name and its options, or a preset (table ``PRESETS`` in outer.py).

    Only element-wise optimizers are allowed: the outer step is taken block by block. Options left out are torch's defaults,
    except that SGD's ``lr`` is 1.0 (plain averaging).
    """

    preset: Literal["average", "diloco", "fedasync"] | None = None
    optimizer: ElementWise = "SGD"
    options: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _preset_or_optimizer(self) -> OuterConfig:
        if self.preset is not None and {"optimizer", "options"} & self.model_fields_set:
            raise ValueError("give either preset, or optimizer and options; not both")
        return self


class WorkConfig(Section):
    """How much an edge node does for one update (work.py). One whose own file fixes its steps (``edge.steps``) keeps them, and so
    does a site (``site.sync_every``)."""

    steps: Literal["fixed", "adaptive"] = "fixed"  # adaptive: so many local steps that fast and slow members arrive together
    min_steps: PositiveInt = 1
    max_steps: Annotated[int, Field(gt=0, lt=2**31)] = 100

    @model_validator(mode="after")
    def _bounds_in_order(self) -> WorkConfig:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps ({self.min_steps}) is more than max_steps ({self.max_steps})")
        return self


class LimitsConfig(Section):
    """What an update may be. Anything beyond is refused before it is staged or merged."""

    max_norm: Annotated[float, Field(gt=0, le=MAX_NORM)] = MAX_NORM  # of the decoded parameters of one update
    max_samples: Annotated[float, Field(ge=MIN_SAMPLES, le=MAX_SAMPLES)] = 1e9  # behind one leaf update
    max_elements: PositiveInt = 2**34


class UntilConfig(Section):
    """When the run ends: at the first of these that is given. None given: never by itself."""

    versions: PositiveInt | None = None
    metric: str | None = None  # a metric that members report for versions, e.g. "accuracy"
    at_least: float | None = None
    hours: PositiveFloat | None = None  # since version 0; until there is one, since the coordinator started

    @model_validator(mode="after")
    def _metric_has_a_target(self) -> UntilConfig:
        if (self.metric is None) != (self.at_least is None):
            raise ValueError("until.metric and until.at_least go together")
        return self


class StartConfig(Section):
    """Where version 0 comes from: a safetensors file, or the first site's upload."""

    bootstrap: Literal["site", "file"] = "site"
    file: Path | None = None

    @model_validator(mode="after")
    def _file_named(self) -> StartConfig:
        if (self.bootstrap == "file") != (self.file is not None):
            raise ValueError("start.bootstrap: file needs start.file, and start.file needs bootstrap: file")
        return self


class TaskConfig(Section):
    """The user's Task: ``target`` is ``package.module:Class``; ``args`` are passed to it as keywords."""

    target: str
    args: dict[str, Any] = Field(default={})

    @field_validator("target")
    @classmethod
    def _module_colon_name(cls, value: str) -> str:
        if value.count(":") != 1 or not all(value.split(":")):
            raise ValueError(f"{value!r} is not package.module:Class")
        return value


class SiteConfig(Section):
    """How a site takes part; read by ``fleetddp.cloud.train``, and the defaults of ``FleetDDP``."""

    track: TrackName = ""  # that it takes part in, where the fleet has several
    sync_every: PositiveInt = 100  # counted optimizer steps between boundaries
    codec: str = "float32"
    uplink: Literal["every_rank", "per_node", "rank0"] = "every_rank"
    wait_s: Annotated[float, Field(ge=0)] | None = None  # at a boundary, for a new version; None: as long as it takes
    overlap: Literal["none", "steps"] = "none"  # steps: train on while an update travels and a version is made
    adopt_every: PositiveInt = 5  # counted steps between those at which a version may be adopted, with overlap
    fragments: Annotated[int, Field(ge=1, le=64)] = 1  # of the layout, each exchanged every sync_every steps, in turn
    warmup_sync_steps: Annotated[int, Field(ge=0)] = 0  # the run's first versions: an exchange at every step, no overlap
    checkpoint: Path | None = None
    checkpoint_every: PositiveInt = 1  # boundaries
    epochs: PositiveInt = 1_000_000
    batch_size: PositiveInt = 32  # samples of a rank in a step; with global_batch: at once, at most
    global_batch: PositiveInt | None = None  # samples of all ranks in a step, however many ranks there are
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"  # of the task's learning rate, by the batch of all ranks
    lr_reference_batch: PositiveInt | None = None  # the batch that the task's learning rate is meant for
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0  # the learning rate rises to its value over so many steps
    workers: Annotated[int, Field(ge=0)] = 0  # DataLoader processes of each rank
    buffers: Literal["average", "local"] = "average"
    hierarchy: Literal["auto", "on", "off"] = "auto"  # gradients averaged inside each node first, then between nodes
    cross_node: Literal["float32", "bfloat16", "int8"] = "float32"  # of gradients between nodes, where hierarchy is used

    @model_validator(mode="after")
    def _a_step_for_each_fragment(self) -> SiteConfig:
        if self.sync_every % self.fragments:
            raise ValueError(f"sync_every ({self.sync_every}) must be a multiple of fragments ({self.fragments})")
        if self.fragments > 1 and self.warmup_sync_steps:
            raise ValueError("warmup_sync_steps exchanges all there is at every step; fragments must be 1 with it")
        return self

    @model_validator(mode="after")
    def _scaled_from_something(self) -> SiteConfig:
        if self.lr_scaling != "none" and self.lr_reference_batch is None:
            raise ValueError(f"lr_scaling: {self.lr_scaling} needs lr_reference_batch")
        return self


class RegionConfig(Section):
    """How a regional aggregator takes part: it listens as a coordinator does, and is a member of its parent."""

    track: TrackName = ""  # that its members and it take part in, where the fleet has several
    parents: tuple[Address, ...] = ()  # in the order to be tried; none: the coordinator's address
    address: Address = "127.0.0.1:7071"  # what its members dial
    listen: Address = ""  # what it binds; empty: the address
    journal: Path = Path("region-journal")
    keep_versions: PositiveInt = 3
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0  # Prometheus; 0: off
    codec: str = "float64"  # of its partials; any other than float64 loses something, which is carried into the next one
    window: WindowConfig | None = None  # when to seal; None: as the fleet's ``window``, but see ``region_config``

    @property
    def deadline_is_fixed(self) -> bool:
        """Else a window closes in time for the parent's."""
        return self.window is not None and self.window.deadline_s is not None


class EdgeConfig(Section):
    """How an edge node takes part."""

    track: TrackName = ""  # that it takes part in, where the fleet has several
    update: Literal["delta", "gradient"] = "delta"
    steps: PositiveInt | None = None  # local optimizer steps per update; None: whole epochs
    epochs: PositiveInt = 1
    batch_size: PositiveInt = 32
    codec: str = "float32"
    parents: tuple[Address, ...] = ()  # in the order to be tried; none: the coordinator's address
    state: Path = Path("edge-state")  # the outbox and the newest version live in <state>/<node>
    max_outbox: Annotated[int, Field(gt=0, le=256)] = 16  # updates not yet settled; beyond it the node waits
    buffers: Literal["average", "local"] = "average"


ONLY_TRACK = "main"  # the name of a fleet's only track, where the fleet file names none


class ProxyConfig(Section):
    """The proxy set of a track of soft labels: unlabelled items that every member has, and gives its opinion of.

    Either ``file``, from which the coordinator learns what it holds (and which it hands out to members), or ``items`` and
    ``digest``: members bring a set of that content themselves.
    """

    name: NodeName
    classes: Annotated[int, Field(ge=2, le=65_535)]
    file: Path | None = None  # safetensors with one tensor, ``items``
    items: PositiveInt | None = None
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # of the items (``ProxySet.digest``)
    by_tier: bool = False  # what sites say and what edges say are kept apart

    @model_validator(mode="after")
    def _known_content(self) -> ProxyConfig:
        if (self.items is None) != (self.digest is None) or (self.file is None) == (self.items is None):
            raise ValueError("give either file, or items and digest together")
        return self


Kind = Literal["weights", "logits"]  # what a track exchanges: a model's weights, or soft labels on a proxy set
Publish = Literal["float32", "bfloat16", "int8", "prob16"]


class TrackConfig(Section):
    """One of several tracks. A section given here is the track's, whole; one left out is as in the fleet file."""

    kind: Kind | None = None
    proxy: ProxyConfig | None = None
    distill: DistillConfig | None = None
    include: tuple[str, ...] | None = None
    members: MembersConfig | None = None
    window: WindowConfig | None = None
    merge: MergeConfig | None = None
    outer: OuterConfig | None = None
    work: WorkConfig | None = None
    publish: Publish | None = None
    limits: LimitsConfig | None = None
    until: UntilConfig | None = None
    start: StartConfig | None = None
    task: TaskConfig | None = None
    site: SiteConfig | None = None
    edge: EdgeConfig | None = None


class FleetConfig(Section):
    """A whole fleet file. With ``tracks``, one coordinator runs each of them (``for_track``)."""

    run: NodeName = "fleet"
    tracks: dict[NodeName, TrackConfig] = Field(default={})
    kind: Kind = "weights"
    proxy: ProxyConfig | None = None  # of kind logits
    distill: DistillConfig = DistillConfig()  # of kind logits
    include: tuple[str, ...] = ()  # shell patterns of the tensors that are exchanged; none: all that can be
    coordinator: CoordinatorConfig = CoordinatorConfig()
    security: SecurityConfig = SecurityConfig()
    members: MembersConfig = MembersConfig()
    window: WindowConfig = WindowConfig()
    merge: MergeConfig = MergeConfig()
    outer: OuterConfig = OuterConfig()
    work: WorkConfig = WorkConfig()
    publish: Publish = "float32"
    limits: LimitsConfig = LimitsConfig()
    until: UntilConfig = UntilConfig()
    start: StartConfig = StartConfig()
    task: TaskConfig | None = None
    site: SiteConfig = SiteConfig()
    region: RegionConfig = RegionConfig()
    edge: EdgeConfig = EdgeConfig()
    serve: ServeConfig = ServeConfig()
    cascade: CascadeConfig = CascadeConfig()
    seed: int = 0

    @model_validator(mode="after")
    def _work_is_counted_in_steps(self) -> FleetConfig:
        if self.work.steps == "adaptive" and self.edge.update == "gradient":
            raise ValueError("work.steps: adaptive is for local steps, and edge.update: gradient makes none")
        return self

    @model_validator(mode="after")
    def _kind_fits(self) -> FleetConfig:
        if (self.kind == "logits") != (self.proxy is not None):
            raise ValueError("a track of kind logits has a proxy set, and no other: kind: logits and proxy go together")
        if self.kind == "weights" and self.publish == "prob16":
            raise ValueError("publish: prob16 is for soft labels (kind: logits)")
        if self.kind == "logits":
            if self.publish == "int8":
                raise ValueError("publish: int8 is for weights; of kind logits allowed are prob16, float32, bfloat16")
            if self.merge.share != "samples":
                raise ValueError("merge.share is for weights; of kind logits, proxy.by_tier keeps the tiers apart")
            if self.outer != OuterConfig() or self.start != StartConfig():
                raise ValueError("start and outer are for weights: a track of soft labels starts empty, and takes no outer step")
            if self.region.codec != "float64":
                raise ValueError(f"region.codec: {self.region.codec} is for weights; sums of soft labels travel in float64")
            if self.include:
                raise ValueError("include names tensors of a model: of kind logits there are none")
            if self.proxy is not None:
                self.distill.check(self.proxy.classes, by_tier=self.proxy.by_tier)
        return self

    @model_validator(mode="after")
    def _tracks_fit(self) -> FleetConfig:
        for name in self.tracks:
            try:
                self.for_track(name)
            except ValidationError as error:
                said = "; ".join(found["msg"].removeprefix("Value error, ") for found in error.errors())
                raise ValueError(f"tracks.{name}: {said}") from None
        for section, track in (("site", self.site.track), ("region", self.region.track), ("edge", self.edge.track)):
            if track and track not in (self.tracks or (ONLY_TRACK,)):
                raise ValueError(
                    f"{section}.track: there is no track {track!r}; there are: {', '.join(self.tracks) or ONLY_TRACK}"
                )
        return self

    def for_track(self, name: str) -> FleetConfig:
        """The fleet file as one track's coordinator and members see it; empty: the only one. ``ConfigError`` if there is none.

        A section that the track gives is its own, whole. Journal and edge nodes' state are in folders of the track's name.
        """
        if not self.tracks:
            if name not in ("", ONLY_TRACK):
                raise ConfigError(f"there is no track {name!r}: the fleet file names no tracks")
            return self
        if not name and len(self.tracks) == 1:
            (name,) = self.tracks
        if name not in self.tracks:
            which = f"there is no track {name!r}" if name else "the fleet has several tracks, and none is named"
            raise ConfigError(f"{which}; there are: {', '.join(self.tracks)} (site.track, edge.track, region.track)")
        track = self.tracks[name]
        given = {key: value for key in TrackConfig.model_fields if (value := getattr(track, key)) is not None}
        if given.get("kind") == "logits":
            given.setdefault("publish", "prob16")
            given.setdefault("merge", self.merge.model_copy(update={"share": "samples"}))
            given.setdefault("include", ())
            given.setdefault("start", StartConfig())
            given.setdefault("outer", OuterConfig())
        merged = {key: getattr(self, key) for key in self.model_fields_set if key != "tracks"} | given
        merged["coordinator"] = self.coordinator.model_copy(update={"journal": self.coordinator.journal / name})
        edge = merged.get("edge", self.edge)
        merged["edge"] = edge.model_copy(update={"state": edge.state / name})
        for section in {"site", "region", "edge"} & set(merged):
            merged[section] = merged[section].model_copy(update={"track": ""})
        if given.get("kind") == "logits":
            for section, change in (("site", {"fragments": 1}), ("region", {"codec": "float64"})):
                if section in merged:
                    merged[section] = merged[section].model_copy(update=change)
        return FleetConfig.model_validate(merged)


def parse(data: object, *, source: str = "fleet file") -> FleetConfig:
    """Validate a mapping; raises ``ConfigError`` with one line for each wrong key."""
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: a fleet file is a mapping of sections, not {type(data).__name__}")
    try:
        return FleetConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(source, data, error)) from None


def load(path: str | Path) -> FleetConfig:
    """Read and validate a YAML fleet file; relative paths in it are relative to the working directory."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the fleet file {path}: {error.strerror}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    return parse({} if data is None else data, source=str(path))


def _explain(source: str, data: object, error: ValidationError) -> str:
    """One line a key: which, what is wrong with it, and for an unknown key which there are."""
    messages: dict[str, list[str]] = {}
    for found in error.errors():
        message = found["msg"].removeprefix("Value error, ")
        if found["type"] == "extra_forbidden":
            message = f"unknown key; allowed here: {', '.join(_allowed(found['loc'][:-1]))}"
        messages.setdefault(_key(data, found["loc"]), []).append(message)
    return "\n".join(f"{source}: {key}: {'; or: '.join(said)}" for key, said in messages.items())


def _key(data: object, loc: tuple[int | str, ...]) -> str:
    """The key as it stands in the file: pydantic's location without the branches of unions that it tried."""
    parts = []
    for part in loc:
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            parts.append(str(part))
            data = data[part]  # type: ignore[index]
    return ".".join(parts) or "(top level)"


def _allowed(loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at this location."""
    section: type[BaseModel] = FleetConfig
    choices = [section]
    for part in loc:
        if isinstance(part, str) and part in section.model_fields:
            choices = _sections_in(section.model_fields[part].annotation)
        tagged = [c for c in choices if "kind" in c.model_fields and c.model_fields["kind"].default == part]
        section = (tagged or choices)[0]
    return sorted(section.model_fields)


def _sections_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]
