"""The ``faults`` section of a scenario: what is to go wrong in a simulated fleet. When and to whom, see ``faults.py``.

faults:
  quiet_s: 600                                          # by then, all has mended itself
  root: {crashes_per_h: 2, at_points: 0.001}
  members: {crashes_per_h: 1}
  messages: {drop: 0.01, duplicate: 0.01, reorder: 0.01, delay: 0.05, corrupt: 0.01}
  partitions: {per_h: 1, mean_s: 60, share: 0.5}
  byzantine: {share: 0.1, kind: sign_flip}
  at: [{what: crash, node: root, point: "publish:renamed", occurrence: 3}, {what: drop, node: phones-3, point: Upload}]
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from fleetddp.common.config import Section
from fleetddp.edge.sim.observer import ROOT

Probability = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0)]
REQUESTS = ("Join", "Heartbeat", "Leave", "Offer", "Upload", "Pull")  # named by what they carry
ANSWERS = ("Joined", "Heard", "Left", "Held", "Receipt", "Refused", "Unreachable", "Pulled", "News")


class MemberFaults(Section):
    """Crashes of each member: a Poisson process, and how long it is down (exponential)."""

    crashes_per_h: Rate = 0.0
    down_s: PositiveFloat = 60.0


class RootFaults(MemberFaults):
    """Crashes of the root, at any time or in the middle of making something durable."""

    at_points: Probability = 0.0  # that it loses power at one of ``CRASH_POINTS`` as it is passed (not in timing mode)


class MessageFaults(Section):
    """Probabilities, for each message."""

    drop: Probability = 0.0  # its call breaks: the caller notices ``timeout_s`` later
    duplicate: Probability = 0.0  # a request comes again up to ``delay_s`` later; after an upload, the whole push is made again
    reorder: Probability = 0.0  # it comes after the next message of the same member in its direction
    delay: Probability = 0.0  # it comes later by ``delay_s`` in the mean
    corrupt: Probability = 0.0  # a byte of its payload is changed on the way
    delay_s: PositiveFloat = 10.0
    timeout_s: PositiveFloat = 10.0


class PartitionFaults(Section):
    """Times at which some of the members and the root cannot reach each other; what is on its way then waits."""

    per_h: Rate = 0.0
    mean_s: PositiveFloat = 60.0
    share: Probability = 0.5  # of the members


LieKind = Literal["sign_flip", "scale", "nan"]


class ByzantineFaults(Section):
    """Members whose updates are not what their training led to."""

    share: Probability = 0.0  # of the members; or by name:
    members: tuple[str, ...] = ()
    kind: LieKind = "sign_flip"
    factor: float = 1e6  # of ``scale``


class NamedFault(Section):
    """One fault at one point: the ``occurrence``-th message of a type that ``node`` sends or gets (``REQUESTS``, ``ANSWERS``), a
    crash point of the root's journal (``CRASH_POINTS``), or a time."""

    what: Literal["crash", "drop", "duplicate", "reorder", "delay", "corrupt"]
    node: str = ROOT
    point: str = ""
    occurrence: PositiveInt = 1
    at_s: Annotated[float, Field(ge=0)] | None = None  # of a crash
    down_s: PositiveFloat = 30.0  # of a crash

    @model_validator(mode="after")
    def _point_exists(self) -> NamedFault:
        from fleetddp.common.journal import CRASH_POINTS  # here: it needs torch, for which a scenario need not wait

        if (self.at_s is None) == (self.point == ""):
            raise ValueError("a fault happens at a point or at a time (at_s): give one of them")
        if self.at_s is not None and self.what != "crash":
            raise ValueError(f"a {self.what} happens to a message: give its point")
        if self.point in CRASH_POINTS:
            if (self.what, self.node) != ("crash", ROOT):
                raise ValueError(f"{self.point} is passed by the root: only a crash of it can happen there")
        elif self.point and self.point not in (*REQUESTS, *ANSWERS):
            raise ValueError(f"there is no point {self.point!r}; there are {', '.join((*REQUESTS, *ANSWERS, *CRASH_POINTS))}")
        elif self.point and self.node == ROOT and self.what != "crash":
            raise ValueError(f"whose {self.point}? give the member's name as the node")
        return self


class FaultsConfig(Section):
    """Everything that goes wrong."""

    quiet_s: Rate = 0.0  # no fault begins in so many seconds before the horizon, and in them a version must come
    root: RootFaults = RootFaults()
    members: MemberFaults = MemberFaults()
    messages: MessageFaults = MessageFaults()
    partitions: PartitionFaults = PartitionFaults()
    byzantine: ByzantineFaults = ByzantineFaults()
    at: tuple[NamedFault, ...] = ()
