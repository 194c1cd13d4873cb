"""What happened in a simulation: one row a version, what the devices' time went into, and a log of single events.

A row tells of the time from the decision before it to its own: what was merged, what was not, and what travelled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from fleetddp.common.errors import Reason
from fleetddp.common.events import Effect, Ended, Event, Merge, Persist, Published, Say
from fleetddp.common.update import Tier, Update, UpdateId, Version
from fleetddp.edge.sim.assertions import Assertions
from fleetddp.edge.sim.calls import Network
from fleetddp.edge.sim.observer import Observer

# Refusals of a call, not of an update.
_OF_CALLS = frozenset({Reason.UNKNOWN_NODE, Reason.SUPERSEDED, Reason.WRONG_RUN, Reason.WRONG_IDENTITY, Reason.ID_REUSED})
_QUIET = frozenset({"trained", "adopted", "window"})  # too many for a log


@dataclass(slots=True, kw_only=True)
class Row:
    """One version. Times are in virtual seconds."""

    version: int
    opened_at: float  # of the window it was gathered in
    decided_at: float
    published_at: float
    reason: str  # why its window closed then
    arrived: int  # leaf updates in it
    late: int  # those of them that were based on an older version than the one before it
    stale: int  # updates refused as STALE since the row before
    refused: int  # for any other reason
    dropped: int  # units of work lost with their device, and transfers given up
    bytes_up: int  # payloads, as encoded, that arrived since the row before
    bytes_down: int
    samples: float
    loss: float | None  # mean of what members report of their training; None if they report none
    accuracy: float | None = None  # of this version, where it is evaluated


@dataclass(slots=True, kw_only=True)
class TierUsage:
    """What the time of one tier's devices went into, in seconds over all its devices. Pushing goes on beside the rest."""

    devices: int = 0
    down_s: float = 0.0
    wait_s: float = 0.0
    pull_s: float = 0.0
    train_s: float = 0.0
    push_s: float = 0.0

    @property
    def available_s(self) -> float:
        """While they were up."""
        return self.wait_s + self.pull_s + self.train_s

    @property
    def idle(self) -> float:
        """The share in which they waited."""
        return self.wait_s / self.available_s if self.available_s else 0.0

    @property
    def utilisation(self) -> float:
        """The share of the time they were up in which they trained."""
        return self.train_s / self.available_s if self.available_s else 0.0


@dataclass(slots=True)
class _Since:
    """Counts since the last row."""

    stale: int = 0
    refused: int = 0
    dropped: int = 0
    bytes_up: int = 0  # the network's count then
    bytes_down: int = 0


@dataclass(slots=True)
class Totals:
    """Of the whole run."""

    virtual_s: float = 0.0
    handled: int = 0  # events of the loop
    counts: Counter[str] = field(default_factory=Counter)  # what was noted of nodes, e.g. ``started``, ``trained``
    refused: Counter[str] = field(default_factory=Counter)  # by reason, calls too


class Timeline(Observer, Assertions):
    """An observer that writes it all down; ``log`` gets one JSON object a line. ``evaluate`` measures a version."""

    def __init__(
        self,
        network: Network,
        log: TextIO | None = None,
        evaluate: Callable[[Version], Mapping[str, float]] = lambda version: {},
    ) -> None:
        self.rows: list[Row] = []
        self.usage: dict[Tier, TierUsage] = {}
        self.staleness: dict[Tier, Counter[int]] = {}  # of merged updates
        self.totals = Totals()
        self.finished = ""  # why the run is over
        self.finished_at: float | None = None
        self._network, self._log, self._evaluate = network, log, evaluate
        self._arrived: dict[UpdateId, Update] = {}  # whole, and not in a version yet
        self._deciding: Row | None = None
        self._since = _Since()
        self._opened_at = 0.0
        self._effects: dict[type, Callable[[Any, float], None]] = {
            Persist: self._persist,
            Merge: self._merge,
            Say: self._say,
            Ended: self._ended,
        }

    # ---- what is watched ------------------------------------------------------------------------------------------------------

    def handled(self, event: Event | None, effects: Sequence[Effect], now: float) -> None:
        """See ``Observer``."""
        if type(event) is Published:
            self._published(event, now)
        for effect in effects:
            handler = self._effects.get(type(effect))
            if handler is not None:
                handler(effect, now)

    def noted(self, node: str, what: str, now: float) -> None:
        """See ``Observer``."""
        self.totals.counts[what] += 1
        if what == "lost work":
            self._since.dropped += 1
        if what not in _QUIET:
            self._write(now, what, node=node)

    def _persist(self, effect: Persist, now: float) -> None:
        self._arrived[effect.update.update_id] = effect.update

    def _merge(self, effect: Merge, now: float) -> None:
        decision, since, network = effect.decision, self._since, self._network
        samples, late = 0.0, 0
        for update_id in decision.ids:
            update = self._arrived.pop(update_id, None)
            if update is None:  # counted before the root's crash, which the same decision outlived
                continue
            samples += update.samples
            header = update.header
            for tier, base, count in [(g.tier, g.base_version, len(g.ids)) for g in header.groups] or [
                (header.tier, header.base_version, 1)
            ]:
                staleness = decision.version - 1 - base
                self.staleness.setdefault(tier, Counter())[staleness] += count
                late += count if staleness else 0
        self._deciding = Row(
            version=decision.version,
            opened_at=self._opened_at,
            decided_at=decision.at,
            published_at=decision.at,
            reason=decision.reason,
            arrived=len(decision.leaf_ids),
            late=late,
            stale=since.stale,
            refused=since.refused,
            dropped=since.dropped,
            bytes_up=network.bytes_up - since.bytes_up,
            bytes_down=network.bytes_down - since.bytes_down,
            samples=samples,
            loss=decision.metrics.get("train_loss"),
        )
        self._since = _Since(bytes_up=network.bytes_up, bytes_down=network.bytes_down)
        self._opened_at = decision.at

    def _published(self, event: Published, now: float) -> None:
        row, self._deciding = self._deciding, None
        if row is None:  # version 0
            self._opened_at = now
            return
        row.published_at = now
        row.accuracy = self._evaluate(event.version).get("accuracy")
        self.rows.append(row)
        self._write(now, "version", **asdict(row))

    def _say(self, effect: Say, now: float) -> None:
        if effect.reason is not None:
            self.totals.refused[effect.reason.value] += 1
            if effect.reason is Reason.STALE:
                self._since.stale += 1
            elif effect.reason is Reason.STALLED:
                self._since.dropped += 1
            elif effect.reason not in _OF_CALLS:
                self._since.refused += 1
        if effect.what not in _QUIET and self._log is not None:
            self._write(now, effect.what, node=effect.node, message=effect.message)

    def _ended(self, effect: Ended, now: float) -> None:
        self.finished, self.finished_at = effect.reason, now

    # ---- what is kept ---------------------------------------------------------------------------------------------------------

    def close(self, now: float, handled: int, usages: Iterable[tuple[Tier, dict[str, float], float]]) -> None:
        """The simulation is over; ``usages`` are of the members: tier, seconds by activity, seconds of pushing."""
        self.totals.virtual_s, self.totals.handled = now, handled
        for tier, seconds, push_s in usages:
            usage = self.usage.setdefault(tier, TierUsage())
            usage.devices += 1
            usage.down_s += seconds["down"]
            usage.wait_s += seconds["wait"]
            usage.pull_s += seconds["pull"]
            usage.train_s += seconds["train"]
            usage.push_s += push_s
        for tier, usage in self.usage.items():
            self._write(now, "usage", tier=tier.value, utilisation=usage.utilisation, **asdict(usage))

    def _write(self, now: float, what: str, **values: Any) -> None:
        if self._log is not None:
            self._log.write(json.dumps({"t": round(now, 6), "what": what, **values}) + "\n")

    @property
    def virtual_s(self) -> float:
        """How long the run took in virtual time."""
        return self.totals.virtual_s if self.finished_at is None else self.finished_at

    @property
    def version(self) -> int:
        """The newest version."""
        return self.rows[-1].version if self.rows else 0

    def seconds_to(self, accuracy: float) -> float | None:
        """When a version of at least this accuracy was published first; None: never."""
        return next((row.published_at for row in self.rows if row.accuracy is not None and row.accuracy >= accuracy), None)
