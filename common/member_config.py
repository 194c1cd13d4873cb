"""Sections of the fleet file that say how members take part: sites, regions, edge nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from fleetddp.common.policy_config import WindowConfig
from fleetddp.common.sections import Address, Section, TrackName


class SiteConfig(Section):
    """How a site takes part; read by ``fleetddp.cloud.train``, and the defaults of ``FleetDDP``."""

    track: TrackName = ""  # that it takes part in, where the fleet has several
    knowledge: TrackName = ""  # the track of soft labels in which it teaches and learns besides; empty: none
    sync_every: PositiveInt = 100  # counted optimizer steps between boundaries
    codec: str = "float32"
    parents: tuple[Address, ...] = ()  # in the order to be tried; none: the coordinator's address
    give_up_s: PositiveFloat | None = 604_800.0  # without any parent; then it ends, exit code 3. None: it searches for ever
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
    give_up_s: PositiveFloat | None = 604_800.0  # without any parent; then it ends, exit code 3. None: it searches for ever
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
    give_up_s: PositiveFloat | None = 604_800.0  # without any parent; then it ends, exit code 3. None: it searches for ever
    state: Path = Path("edge-state")  # the outbox and the newest version live in <state>/<node>
    max_outbox: Annotated[int, Field(gt=0, le=256)] = 16  # updates not yet settled; beyond it the node waits
    buffers: Literal["average", "local"] = "average"
