"""The sections of the fleet file about answering: ``serve`` (a model in service) and ``cascade`` (a device before it)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from fleetddp.common.sections import Address, Section

Share = Annotated[float, Field(ge=0, le=1)]


class GateConfig(Section):
    """Which new model may take the place of the one in service (gate.py)."""

    metric: str | None = None  # of the task's ``evaluate``, e.g. accuracy; None: no gate, every version is taken into service
    tolerance: Annotated[float, Field(ge=0)] = 0.01  # how much worse than the best so far is still good enough
    better: Literal["higher", "lower"] = "higher"


class ServeConfig(Section):
    """``fleetddp serve``: where it listens, how it batches, what it takes into service."""

    address: Address = "127.0.0.1:7072"  # what edges dial
    listen: Address = ""  # what it binds; empty: the address
    max_batch: PositiveInt = 32  # samples that are computed at once
    max_wait_s: Annotated[float, Field(ge=0)] = 0.002  # for a batch to fill, from its first request on
    max_queue: PositiveInt = 1024  # samples that may wait; what comes on top is refused
    device: str = "cpu"  # of torch
    track: str = ""  # whose versions are served, where the fleet has several
    gate: GateConfig = GateConfig()
    state: Path | None = None  # a folder where the model in service outlives the process, and what the gate has seen


class HardSamplesConfig(Section):
    """What becomes of samples that the device found hard (edge/reservoir.py). Nothing, unless somebody consents."""

    consent: bool = False  # that samples are kept; taking it back erases what was kept
    share: bool = False  # that they leave the device, to all members of its track; taking it back erases them there, too
    retention_hours: PositiveFloat | None = None  # how long one is kept; has to be said where there is consent
    keep: PositiveInt = 1000  # at most so many
    state: Path = Path("hard-samples")  # they live in <state>/<node>
    label_share: Share = 0.0  # of the samples that the label source is asked about
    label_after_s: Annotated[float, Field(ge=0)] = 0.0  # not before they are so old

    @model_validator(mode="after")
    def _kept_for_a_time(self) -> HardSamplesConfig:
        if self.consent and self.retention_hours is None:
            raise ValueError("consent: true needs retention_hours: how long a sample may be kept")
        if self.share and not self.consent:
            raise ValueError("share: true needs consent: true: what is not kept cannot be shared")
        return self


class CascadeConfig(Section):
    """When a device asks the cloud's model (edge/cascade.py). Calibrated to one of ``offload_rate`` and ``accuracy``."""

    rule: Literal["margin", "entropy", "energy"] = "margin"  # edge/hardness.py
    offload_rate: Share | None = None  # of samples like those it is calibrated on; with neither given: 0.2
    accuracy: Share | None = None  # of the pair, on samples like those it is calibrated on
    deadline_s: PositiveFloat = 0.2  # for the cloud's answer; then the edge's stands
    pause_s: PositiveFloat = 1.0  # that the cloud is left alone after it was away or overloaded; doubling up to ...
    pause_cap_s: PositiveFloat = 30.0  # ... so much
    hard_samples: HardSamplesConfig = HardSamplesConfig()

    @model_validator(mode="after")
    def _one_aim(self) -> CascadeConfig:
        if self.offload_rate is not None and self.accuracy is not None:
            raise ValueError("give offload_rate or accuracy, not both: the threshold can be set for one")
        return self
