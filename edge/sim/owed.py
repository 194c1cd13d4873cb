"""What a simulated member owes its parent, by the rules of the edge node's outbox (``edge/outbox.py``), without a disk.

Durable: a member that crashes finds it as it was. One update per base version; while nobody has seen it, it grows; once offered
it stays as it is and the next one starts where it ended; a refusal leads back to the base.
"""

from __future__ import annotations

from enum import Enum

from fleetddp.common.update import NO_VERSION, Kind, Receipt, State, UpdateId
from fleetddp.edge.sim.learning import Parcel, Unit, Weights


class Stage(Enum):
    """Where an update stands."""

    PENDING = "pending"  # nobody has seen it
    OFFERED = "offered"
    ACCEPTED = "accepted"


class Entry:
    """An update that is not settled."""

    __slots__ = (
        "base_version",
        "before",
        "chain",
        "end",
        "kind",
        "parcel",
        "samples",
        "seconds",
        "stage",
        "start",
        "steps",
        "update_id",
    )

    def __init__(self, update_id: UpdateId, kind: Kind, base_version: int, start: Weights) -> None:
        self.update_id = update_id
        self.kind = kind
        self.base_version = base_version
        self.start = start
        self.end = start
        self.before: Weights = None  # the residual that its parcel carries ...
        self.chain = 0  # ... and the chain of residuals that this is of
        self.samples = 0.0
        self.steps = 0
        self.seconds = 0.0
        self.stage = Stage.PENDING
        self.parcel: Parcel | None = None  # made when it is offered first


class Owed:
    """The unsettled updates of one member, and where it stands between versions."""

    __slots__ = (
        "_base",
        "_chain",
        "_entries",
        "_node",
        "_residual_version",
        "_sequence",
        "_start",
        "base_version",
        "incarnation",
        "local",
        "residual",
        "rewinding",
        "trained",
    )

    def __init__(self, node: str) -> None:
        self._node = node
        self._sequence = 0
        self._entries: list[Entry] = []
        self._base: Weights = None
        self._start: Weights = None  # where the next update starts
        self.incarnation = 0
        self.base_version = NO_VERSION
        self.local: Weights = None  # the newest local weights that are in an update; at first the base
        self.residual: Weights = None
        self._residual_version = NO_VERSION
        self._chain = 0  # residuals that follow from one another; a new one begins when one is dropped
        self.trained = False  # an update was made on this base
        self.rewinding = False  # an update on this base was refused

    def __len__(self) -> int:
        return len(self._entries)

    def open(self) -> tuple[UpdateId, ...]:
        """Updates that the parent may know."""
        return tuple([entry.update_id for entry in self._entries if entry.stage is not Stage.PENDING])

    def restart(self, incarnation: int) -> None:
        """A new process: what was being trained is lost, what is owed is not."""
        self.incarnation = max(incarnation, self.incarnation + 1)
        pending = self._pending()
        self.local = self._start if pending is None else pending.end

    def adopt(self, version: int, weights: Weights, max_staleness: int) -> None:
        """Train from this version on; a residual older than ``max_staleness`` is dropped."""
        if self.residual is not None and version - self._residual_version > max_staleness:
            self.residual = None
            self._chain += 1
        self.base_version = version
        self._base = self._start = self.local = weights
        self.trained = self.rewinding = False

    def rewind(self) -> None:
        """Give up where a refused update led."""
        pending = self._pending()
        if pending is not None:  # it starts where the refused one ended
            self._entries.remove(pending)
        self._start = self.local = self._base
        self.trained = self.rewinding = False

    def put(self, kind: Kind, unit: Unit, end: Weights) -> None:
        """A unit of work on this base is done."""
        entry = self._pending() or self._new(kind)
        entry.samples += unit.samples
        entry.steps += unit.steps
        entry.seconds += unit.seconds
        entry.end = self.local = end
        self.trained = True

    def put_init(self, weights: Weights) -> None:
        """The first weights of a run."""
        entry = self._new(Kind.INIT)
        entry.samples, entry.steps, entry.end = 1.0, 1, weights

    def offer(self) -> Entry | None:
        """The oldest update that the parent may not have, to be sent now; None if there is none."""
        for entry in self._entries:
            if entry.stage is not Stage.ACCEPTED:
                if entry.stage is Stage.PENDING:
                    entry.stage = Stage.OFFERED
                    if entry.base_version == self.base_version:
                        self._start = entry.end
                return entry
        return None

    def encoded(self, entry: Entry, parcel: Parcel) -> None:
        """An update that is offered was encoded, on top of the residual so far."""
        entry.parcel, entry.before, entry.chain = parcel, self.residual, self._chain
        self.residual, self._residual_version = parcel.residual, entry.base_version

    def record(self, receipt: Receipt) -> bool:
        """Take note of a receipt; whether it settles an update."""
        update_id = receipt.update_id
        for entry in self._entries:
            if entry.update_id == update_id and entry.stage is not Stage.PENDING:
                break
        else:
            return False
        if receipt.state.final:
            self._entries.remove(entry)
            if receipt.state is State.REFUSED and entry.kind is not Kind.INIT:
                if entry.chain == self._chain:
                    self.residual = entry.before
                self.rewinding = self.rewinding or entry.base_version == self.base_version
            return True
        if receipt.state is State.ACCEPTED:
            entry.stage = Stage.ACCEPTED
        elif receipt.state is State.UNKNOWN:
            entry.stage = Stage.OFFERED
        return False

    def drop(self, entry: Entry) -> None:
        """It cannot be encoded: training diverged."""
        self._entries.remove(entry)
        self.rewinding = self.rewinding or entry.base_version == self.base_version

    def _pending(self) -> Entry | None:
        last = self._entries[-1] if self._entries else None
        if last is not None and last.stage is Stage.PENDING and last.base_version == self.base_version:
            return last
        return None

    def _new(self, kind: Kind) -> Entry:
        self._sequence += 1
        update_id = UpdateId(self._node, self.incarnation, self._sequence)
        entry = Entry(update_id, kind, self.base_version, self._start)
        self._entries.append(entry)
        return entry
