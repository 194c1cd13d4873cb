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

from fleetddp.common.distill_config import DistillConfig, OpenItemsConfig, ProxyConfig
from fleetddp.common.errors import ConfigError
from fleetddp.common.inference_config import CascadeConfig, ServeConfig
from fleetddp.common.member_config import EdgeConfig, RegionConfig, SiteConfig
from fleetddp.common.policy_config import (
    MAX_NORM,
    MAX_SAMPLES,
    MIN_SAMPLES,
    Constant,
    Discount,
    ElementWise,
    Hinge,
    LimitsConfig,
    MergeConfig,
    OuterConfig,
    Polynomial,
    Preset,
    StalenessConfig,
    UntilConfig,
    WindowConfig,
    WorkConfig,
)
from fleetddp.common.sections import Fraction, NodeName, Section, TrackName, host_port

__all__ = [
    "MAX_NORM",
    "MAX_SAMPLES",
    "MIN_SAMPLES",
    "ONLY_TRACK",
    "CascadeConfig",
    "Constant",
    "CoordinatorConfig",
    "Discount",
    "DistillConfig",
    "EdgeConfig",
    "ElementWise",
    "FleetConfig",
    "Fraction",
    "Hinge",
    "LimitsConfig",
    "MembersConfig",
    "MergeConfig",
    "NodeName",
    "OpenItemsConfig",
    "OuterConfig",
    "Polynomial",
    "Preset",
    "ProxyConfig",
    "Publish",
    "RegionConfig",
    "Section",
    "SecurityConfig",
    "ServeConfig",
    "SiteConfig",
    "StalenessConfig",
    "StartConfig",
    "TaskConfig",
    "TrackConfig",
    "TrackKind",
    "TrackName",
    "UntilConfig",
    "WindowConfig",
    "WorkConfig",
    "load",
    "parse",
]


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


ONLY_TRACK = "main"  # the name of a fleet's only track, where the fleet file names none


TrackKind = Literal["weights", "logits"]  # what a track exchanges: a model's weights, or soft labels on a proxy set
Publish = Literal["float32", "bfloat16", "int8", "prob16"]


class TrackConfig(Section):
    """One of several tracks. A section given here is the track's, whole; one left out is as in the fleet file."""

    kind: TrackKind | None = None
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
    tracks: dict[NodeName, TrackConfig] = Field(default={}, max_length=64)
    kind: TrackKind = "weights"
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
            if self.site.fragments > 1:
                raise ValueError("site.fragments is for weights: an update of soft labels covers the items that it is of")
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
        taught = self.site.knowledge
        if self.tracks and taught and (taught not in self.tracks or self.for_track(taught).kind != "logits"):
            raise ValueError(f"site.knowledge: {taught!r} is no track of kind: logits")
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
        if given.get("kind") == "weights":
            given.setdefault("proxy", None)
        elif given.get("kind") == "logits":
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
