"""When and to whom the faults of a scenario happen (its ``faults`` section: ``fault_config.py``).

Faults come by seeded rates, or at named points (``at``). Each node, and each kind of fault, draws from a stream of its own, so
that one more fault shifts no other. What a fault does to a message or an update is in ``tampering.py``.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.fault_config import FaultsConfig, LieKind, MemberFaults, NamedFault
from fleetddp.edge.sim.loop import EventLoop
from fleetddp.edge.sim.observer import ROOT
from fleetddp.edge.sim.root import PlugPulled


class Lie(NamedTuple):
    """What a Byzantine member does to its updates."""

    kind: LieKind
    factor: float


class Crashable(Protocol):
    """A member."""

    def crash(self, down_s: float) -> None:
        """Stop at once, and start again after so many seconds."""
        ...


class Restartable(Protocol):
    """The root."""

    def crash(self) -> None:
        """Stop at once."""
        ...

    def start(self) -> None:
        """Recover and begin to answer."""
        ...


class Faults:
    """When and to whom faults happen. ``begin`` once the nodes are there."""

    def __init__(self, config: FaultsConfig, draws: Draws, loop: EventLoop, names: Iterable[str], horizon_s: float) -> None:
        self.config = config
        self.until_s = horizon_s - config.quiet_s  # no fault begins or lasts beyond
        self._draws, self._loop = draws, loop
        self._names = tuple(names)
        self._streams: dict[str, random.Random] = {}
        self._points = draws.stream("faults", "points")
        self._passed: Counter[tuple[str, str]] = Counter()  # (node, point)
        self._named = {(f.node, f.point, f.occurrence): f for f in config.at if f.point}
        self._anyone = {point for node, point, _ in self._named if node == ROOT}
        self._partitions = self._draw_partitions()
        self._members: Mapping[str, Crashable] = {}
        self._root: Restartable | None = None
        self.lies = {name: Lie(config.byzantine.kind, config.byzantine.factor) for name in self._names if self._lies(name)}

    def _lies(self, name: str) -> bool:
        byzantine = self.config.byzantine
        return name in byzantine.members or self._draws.uniform("faults", "byzantine", name) < byzantine.share

    # ---- partitions -----------------------------------------------------------------------------------------------------------

    def _draw_partitions(self) -> list[tuple[float, float]]:
        section, stream = self.config.partitions, self._draws.stream("faults", "partitions")
        found: list[tuple[float, float]] = []
        now = 0.0
        while section.per_h and (now := now + stream.expovariate(section.per_h / 3600)) < self.until_s:
            found.append((now, min(now + max(stream.expovariate(1 / section.mean_s), 1e-3), self.until_s)))
        return found

    def cuts(self, name: str) -> list[tuple[float, float]]:
        """[start, stop) of the times at which this member is cut off."""
        share = self.config.partitions.share
        drawn = (self._draws.uniform("faults", "partition", number, name) for number in range(len(self._partitions)))
        return [cut for cut, draw in zip(self._partitions, drawn, strict=True) if draw < share]

    # ---- crashes --------------------------------------------------------------------------------------------------------------

    def begin(self, root: Restartable, members: Mapping[str, Crashable]) -> None:
        """Schedule what happens by time."""
        self._root, self._members = root, members
        for name in members:
            self._next_crash(name)
        self._next_crash(ROOT)
        for fault in self.config.at:
            if fault.at_s is not None:
                self._loop.at(fault.at_s, self._crash, (fault.node, fault.down_s))

    def _rates(self, node: str) -> MemberFaults:
        return self.config.root if node == ROOT else self.config.members

    def _next_crash(self, node: str) -> None:
        per_h = self._rates(node).crashes_per_h
        if per_h:
            at = self._loop.now() + self._stream("crash", node).expovariate(per_h / 3600)
            if at < self.until_s:
                self._loop.at(at, self._crash_by_rate, node)

    def _crash_by_rate(self, node: str) -> None:
        self._crash((node, self._down_s(self._rates(node).down_s, self._stream("crash", node))))
        self._next_crash(node)

    def _down_s(self, mean_s: float, stream: random.Random) -> float:
        return max(min(stream.expovariate(1 / mean_s), self.until_s - self._loop.now()), 1e-3)

    def _crash(self, what: tuple[str, float]) -> None:
        node, down_s = what
        root = self._root
        assert root is not None
        if node != ROOT:
            self._members[node].crash(down_s)
        else:
            root.crash()
            self._loop.after(down_s, lambda _: root.start())

    def point(self, name: str) -> None:
        """The root passes a crash point of its journal. Raises ``PlugPulled`` if that is where it loses power."""
        if self._root is None:  # it was not started yet
            return
        fault = self._due(ROOT, name)
        if fault is not None:
            raise PlugPulled(name, fault.down_s)
        section = self.config.root
        if section.at_points and self._loop.now() < self.until_s and self._points.random() < section.at_points:
            raise PlugPulled(name, self._down_s(section.down_s, self._points))

    def _due(self, node: str, point: str) -> NamedFault | None:
        if not self._named:
            return None
        self._passed[node, point] += 1
        return self._named.get((node, point, self._passed[node, point]))

    # ---- messages -------------------------------------------------------------------------------------------------------------

    def fate(self, name: str, point: str, arrives_at: float) -> str:
        """What befalls a message of this type, to or from the member: a field of ``MessageFaults``, or nothing ("")."""
        fate = ""
        if self._named:
            if point in self._anyone and (fault := self._due(ROOT, point)) is not None:
                self._loop.at(arrives_at, self._after_arrival, (ROOT, fault.down_s))
            fault = self._due(name, point)
            if fault is not None and fault.what == "crash":
                self._loop.after(0.0, self._crash, (name, fault.down_s))
            elif fault is not None:
                fate = fault.what
        if self._loop.now() >= self.until_s or fate:
            return fate
        section, drawn = self.config.messages, -1.0
        for kind in ("drop", "duplicate", "reorder", "delay", "corrupt"):
            chance: float = getattr(section, kind)
            if chance:
                drawn = self.stream(name).random() if drawn < 0 else drawn
                if drawn < chance:
                    return kind
                drawn -= chance
        return ""

    def _after_arrival(self, what: tuple[str, float]) -> None:
        # Scheduled before the message itself: one more turn, and it has arrived.
        self._loop.after(0.0, self._crash, what)

    def stream(self, name: str) -> random.Random:
        """The draws for one member's messages."""
        return self._stream("messages", name)

    def _stream(self, *names: str) -> random.Random:
        key = "/".join(names)
        found = self._streams.get(key)
        if found is None:
            found = self._streams[key] = self._draws.stream("faults", *names)
        return found

    def delay_s(self, name: str) -> float:
        """How much later a message comes; never beyond the time at which faults end."""
        drawn = self.stream(name).expovariate(1 / self.config.messages.delay_s)
        return min(drawn, max(self.until_s - self._loop.now(), 0.0)) if self.until_s < math.inf else drawn
