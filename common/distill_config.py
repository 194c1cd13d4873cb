"""The section ``distill`` of the fleet file: how members teach each other by soft labels on a proxy set."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from fleetddp.common.sections import NodeName, Section

MAX_OPEN_ITEMS = 8192  # so that what there is of them fits one message
MAX_ITEM_BYTES = 16 * 2**20  # of one: it is received in memory


class OpenItemsConfig(Section):
    """Room in a proxy set for hard samples that devices share (``cascade.hard_samples.share``), with all members of the track."""

    items: Annotated[int, Field(gt=0, le=MAX_OPEN_ITEMS)]  # at most, in the whole run
    retention_hours: PositiveFloat  # how long one is kept, by the coordinator and by members
    allow: tuple[str, ...] = ("*",)  # shell patterns of the names of nodes that may share
    per_node: PositiveInt | None = None  # of one node, at most; None: as many as there is room for
    shape: tuple[PositiveInt, ...] | None = None  # of an item; to be said where there is no proxy.file

    @model_validator(mode="after")
    def _an_item_is_small(self) -> OpenItemsConfig:
        if self.shape is not None:
            check_item(self.shape)
        return self


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
    open: OpenItemsConfig | None = None  # room for hard samples; None: nobody's samples are taken

    @model_validator(mode="after")
    def _known_content(self) -> ProxyConfig:
        if (self.items is None) != (self.digest is None) or (self.file is None) == (self.items is None):
            raise ValueError("give either file, or items and digest together")
        if self.open is not None and self.open.shape is None and self.file is None:
            raise ValueError("open.shape: what shape an item has must be said where there is no file")
        return self

    @property
    def open_items(self) -> int:
        """For how many items there is room beyond the set itself."""
        return 0 if self.open is None else self.open.items


def check_item(shape: tuple[int, ...]) -> None:
    """Whether an open item may have this shape, in float32; ``ValueError``."""
    size = 4 * math.prod(shape)
    if size > MAX_ITEM_BYTES:
        raise ValueError(f"proxy.open: an item of shape {list(shape)} has {size} bytes; at most {MAX_ITEM_BYTES} are taken")


class DistillConfig(Section):
    """What a member of a track of soft labels says of the proxy set, and how it learns from what others say (distill.py)."""

    temperature: PositiveFloat = 2.0  # of the softmax, of who labels and of who learns
    mix: Annotated[float, Field(ge=0)] = 1.0  # what the loss on soft labels weighs beside the task's own
    ramp_versions: Annotated[int, Field(ge=0)] = 0  # the first of the track, over which that weight rises to ``mix``
    learn_from: Literal["others", "all"] = "all"  # others: the other tier alone; needs ``proxy.by_tier``
    batch_items: PositiveInt = 32  # of the proxy set, in a step
    ensemble_steps: Annotated[int, Field(ge=0)] = 0  # a site takes on the proxy set alone when it has taken up a version
    label_items: PositiveInt = 100  # that a member labels in a window
    pull_items: PositiveInt | None = None  # whose labels it brings for a version, at most; None: of all that changed
    entropy_power: Annotated[float, Field(ge=0)] = 2.0  # how much less an unsure label weighs; 0: all weigh the same
    entropy_floor: Annotated[float, Field(gt=0, le=1)] = 0.01  # of certainty: what the least sure label weighs, before the power
    known_weight: PositiveFloat = 10.0  # of an item whose class a member knows; the surest opinion weighs 1
    codec: str = Field(default="prob16", pattern=r"^(prob16|probtop:[1-9][0-9]{0,4})$")  # of a member's labels

    def check(self, classes: int, *, by_tier: bool) -> None:
        """Whether this fits a proxy set; ``ValueError``."""
        if self.learn_from == "others" and not by_tier:
            raise ValueError("distill.learn_from: others needs proxy.by_tier: true")
        kept = self.codec.partition(":")[2]
        if kept and int(kept) >= classes:
            raise ValueError(f"distill.codec: {self.codec} of {classes} classes; fewer than all are due, or prob16")
