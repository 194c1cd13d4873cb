"""Sections of the fleet file that say what the coordinator does with updates: when it merges, how, and until when."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from fleetddp.common.sections import Fraction, Section
from fleetddp.common.update import Tier

MAX_NORM = 1e18  # of anything merged: far beyond any training, and far from where float32 weights overflow
MIN_SAMPLES, MAX_SAMPLES = 1e-9, 1e18  # behind anything merged: their sums and quotients stay clear of 0 and infinity

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
