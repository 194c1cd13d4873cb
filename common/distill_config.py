"""The section ``distill`` of the fleet file: how members teach each other by soft labels on a proxy set."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from fleetddp.common.sections import Section


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
