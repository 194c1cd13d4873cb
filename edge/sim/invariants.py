"""The invariants of design §11, checked in every simulation, at every event of the root.

``Invariants`` keeps books of its own: what was accepted, what was decided, what was settled, what a start must recover. It looks
at the root's events and effects and at what members are told, and believes neither. Its cost is a few look-ups for an event and
a pass over a window's updates for a version; its memory is what is open, and one mark a node.

    order      the decision is the same, whatever order the updates arrived in                                        (2)
    duplicates an update that is known is not taken again, and its repeat is told how it stands                       (3)
    settled    what was acknowledged is merged in one version, or expires when the run ends; and nobody hears otherwise (4)
    staleness  nothing in a version is staler than its tier's bound                                                   (5)
    gapless    versions are 0, 1, 2, ...                                                                              (6)
    resume     a start recovers all that was acknowledged, decided and published, as it was                           (7)
    progress   a window that holds enough closes in time, and where faults have ended a version comes                 (10)
    limits     nothing is merged that the limits of the fleet file forbid
    defects    the root's driver has not failed on anything

That the bytes of the versions are right too, ``Replica`` checks; that a seed always gives the same run (8), ``fingerprint``
tells.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fleetddp.common import events
from fleetddp.common.config import FleetConfig
from fleetddp.common.events import Decision, Effect, Event, Merge, Offer, Persist, Persisted, Published, Reply, Settle
from fleetddp.common.merge import decision_on
from fleetddp.common.receipts import REMEMBERED
from fleetddp.common.recovered import Recovered
from fleetddp.common.update import NO_VERSION, Kind, Receipt, State, Update, UpdateId
from fleetddp.common.window import resolve
from fleetddp.edge.sim.observer import ROOT, Observer
from fleetddp.edge.sim.violations import InvariantViolation, Violation

SLACK_S = 1e-6  # of sums of times
_TOLD = struct.Struct("<dqqq")  # the numbers of a receipt, for the fingerprint: there are too many of them to write them out


class Invariants(Observer):
    """See the module. ``stop`` is called at the first violation; ``check`` raises. ``made`` hears of each version that is
    certain, with its decision (None: from the first weights) and the updates in it."""

    def __init__(self, config: FleetConfig, stop: Callable[[], None]) -> None:
        self.violations: list[Violation] = []
        self.made: Callable[[int, Decision | None, Sequence[Update]], None] = lambda number, decision, updates: None
        self.version = NO_VERSION
        self.versions_at: deque[float] = deque(maxlen=1024)  # when the newest of them were published
        self.finished = ""
        self._config, self._stop = config, stop
        self._policy = resolve(config.window, bool(config.members.sites))
        self._arriving: dict[UpdateId, Update] = {}  # whole, not acknowledged
        self._accepted: dict[UpdateId, Update] = {}  # acknowledged, in no version yet
        self._by_leaf: dict[UpdateId, UpdateId] = {}  # of the accepted partials: leaf -> partial
        self._deciding: Decision | None = None
        self._marks: dict[str, tuple[int, int]] = {}  # node -> (incarnation, sequence) of its last update that was merged
        self._kept: deque[tuple[int, tuple[UpdateId, ...]]] = deque(maxlen=config.coordinator.keep_versions)
        self._merged: dict[UpdateId, int] = {}  # of the versions in _kept
        self._refused: dict[UpdateId, None] = {}  # the last of them, oldest first
        self._expired: dict[UpdateId, Update] = {}
        self._opened: tuple[float | None, ...] = (None,)  # what the journal may say of the window, newest first
        self._decide_by = math.inf
        self._digest = hashlib.blake2b(digest_size=16)
        self._effects: dict[type, Callable[[Any, float], None]] = {
            Persist: self._persist,
            Merge: self._merge,
            events.Opened: lambda effect, now: self._open(effect.at, now),
            events.Ended: self._end,
        }
        self._events: dict[type, Callable[[Any, Sequence[Effect], float], None]] = {
            Offer: self._offered,
            Persisted: self._persisted,
            Published: self._published,
        }

    @property
    def fingerprint(self) -> str:
        """Of all that was decided, published and told so far."""
        return self._digest.hexdigest()

    def check(self, now: float, *, quiet_since: float | None = None) -> None:
        """The simulation is over. Raises ``InvariantViolation``.

        ``quiet_since``: no fault has been in effect since then, so that a version must have come, or the run be over.
        """
        self._look(now)
        if self.finished and self._accepted and self._deciding is None:
            self.wrong("settled", now, f"the run is over, and {_some(self._accepted)} are neither merged nor expired")
        moved = self.finished or self.violations or any(at >= (quiet_since or 0.0) for at in self.versions_at)
        if quiet_since is not None and not moved:
            last = f"{self.versions_at[-1]:.0f} s" if self.versions_at else "never"
            self.wrong(
                "progress", now, f"no version since {quiet_since:.0f} s, when the last fault was over; the last one: {last}"
            )
        if self.violations:
            raise InvariantViolation(self.violations)

    def wrong(self, invariant: str, now: float, what: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(invariant, now, what))
        self._stop()

    # ---- what is watched ------------------------------------------------------------------------------------------------------

    def handled(self, event: Event | None, effects: Sequence[Effect], now: float) -> None:
        """See ``Observer``."""
        check = self._events.get(type(event))
        if check is not None:
            check(event, effects, now)
        for effect in effects:
            kind = type(effect)
            if kind is Reply:
                receipts = getattr(effect.value, "receipts", None)  # type: ignore[union-attr]
                if receipts:
                    self._stated(receipts, now)
            elif kind is Settle:
                self._settle(effect.receipts, now)  # type: ignore[union-attr]
            elif kind in self._effects:
                self._effects[kind](effect, now)
        if now > self._decide_by:
            self._look(now)

    def told(self, node: str, receipt: Receipt, now: float) -> None:
        """See ``Observer``. It was true when it was sent: what has become of the update since may be more."""
        update_id, state = receipt.update_id, receipt.state
        sender, incarnation, sequence = update_id
        self._digest.update(_TOLD.pack(now, incarnation, sequence, receipt.version))
        self._digest.update(f"{sender} {state._value_} {receipt.reason}".encode())
        if sender != node:
            self.wrong("settled", now, f"{node} was told of {update_id}")
        if state is State.ACCEPTED and not (
            update_id in self._accepted or update_id in self._expired or self._is_merged(update_id)
        ):
            self.wrong("settled", now, f"{update_id} was acknowledged, and the root does not have it")
        elif state is State.REFUSED and (update_id in self._accepted or update_id in self._merged):
            self.wrong("settled", now, f"{update_id} was accepted, and its sender told that it was refused: {receipt.message}")
        elif state in (State.MERGED, State.EXPIRED):
            self._stated((receipt,), now)

    def noted(self, node: str, what: str, now: float) -> None:
        """See ``Observer``."""
        if node == ROOT and what == "failed":
            self.wrong("defects", now, "the root's driver failed on something; its log says on what")
        elif node == ROOT and what == "stopped":
            self._decide_by = math.inf

    # ---- updates --------------------------------------------------------------------------------------------------------------

    def _is_merged(self, update_id: UpdateId) -> bool:
        return update_id in self._merged or update_id[1:] <= self._marks.get(update_id.node, (-1, -1))

    def _offered(self, event: Offer, effects: Sequence[Effect], now: float) -> None:
        """A repeat of an update that is known is answered, and nothing else comes of it."""
        update_id = event.header.update_id
        if update_id not in self._accepted and update_id not in self._merged:
            return
        for effect in effects:
            value = effect.value if isinstance(effect, Reply) else None
            if isinstance(effect, Persist) and effect.update.update_id == update_id:
                self.wrong("duplicates", now, f"{update_id} is taken in again")
            elif isinstance(value, Receipt):
                if not value.duplicate:
                    self.wrong("duplicates", now, f"a repeat of {update_id} was answered as if it were none")
                self._stated((value,), now)
            elif value is not None and type(value).__name__ == "Proceed":
                self.wrong("duplicates", now, f"{update_id} is known, and its sender told to send it again")

    def _persist(self, effect: Persist, now: float) -> None:
        update_id = effect.update.update_id
        if update_id in self._accepted or update_id in self._merged or update_id in self._arriving:
            self.wrong("duplicates", now, f"{update_id} is made durable twice")
        self._arriving[update_id] = effect.update

    def _persisted(self, event: Persisted, effects: Sequence[Effect], now: float) -> None:
        update_id = event.update.update_id
        acknowledged = any(
            receipt.update_id == update_id and receipt.state is State.ACCEPTED
            for effect in effects
            if isinstance(effect, Settle)
            for receipt in effect.receipts
        )
        if acknowledged:
            self._accept(event.update, now)

    def _accept(self, update: Update, now: float) -> None:
        update_id = update.update_id
        self._arriving.pop(update_id, None)
        if self._is_merged(update_id):
            self.wrong("duplicates", now, f"{update_id} was merged, and is accepted again")
        elif update_id in self._refused:
            self.wrong("settled", now, f"{update_id} was refused, and is accepted")
        elif update_id in self._accepted:
            self.wrong("duplicates", now, f"{update_id} is accepted twice")
        self._accepted[update_id] = update
        for leaf in update.header.leaf_ids:
            self._by_leaf[leaf] = update_id
        self._wait(now)

    def _settle(self, receipts: Sequence[Receipt], now: float) -> None:
        for receipt in receipts:
            update_id, state = receipt.update_id, receipt.state
            if state is State.EXPIRED and update_id in self._accepted:
                if not self.finished:
                    self.wrong("settled", now, f"{update_id} expired before the run was over")
                self._expired[update_id] = self._accepted.pop(update_id)
            elif state is State.REFUSED:
                self._arriving.pop(update_id, None)
                self._refused[update_id] = None
                if len(self._refused) > REMEMBERED:
                    del self._refused[next(iter(self._refused))]
            elif state is State.UNKNOWN:
                self._arriving.pop(update_id, None)
        self._stated(receipts, now)

    def _stated(self, receipts: Sequence[Receipt], now: float) -> None:
        """The root says how updates stand."""
        for receipt in receipts:
            update_id, state = receipt.update_id, receipt.state
            held = self._by_leaf.get(update_id, update_id)
            if held in self._accepted:
                if state is not State.ACCEPTED:
                    self.wrong("settled", now, f"{update_id} was acknowledged, and is now said to be {_said(receipt)}")
            elif update_id in self._merged:
                if state is not State.MERGED or receipt.version not in (NO_VERSION, self._merged[update_id]):
                    self.wrong(
                        "settled", now, f"{update_id} is in version {self._merged[update_id]}, and said to be {_said(receipt)}"
                    )
            elif state is State.ACCEPTED or (state is State.MERGED and not self._is_merged(update_id)):
                self.wrong("settled", now, f"{update_id} is said to be {_said(receipt)}, and was not acknowledged")
            elif state is State.EXPIRED and update_id not in self._expired:
                self.wrong("settled", now, f"{update_id} is said to have expired, and was not acknowledged")

    # ---- versions -------------------------------------------------------------------------------------------------------------

    def _merge(self, effect: Merge, now: float) -> None:
        decision = effect.decision
        if self._deciding is not None:
            if decision != self._deciding:
                self.wrong("resume", now, f"version {decision.version} was decided, and is now to be made of something else")
            return
        self._digest.update(repr(decision).encode())
        if decision.version != self.version + 1:
            self.wrong("gapless", now, f"version {decision.version} is decided after {self.version}")
        if set(decision.ids) != self._accepted.keys() or len(set(decision.ids)) != len(decision.ids):
            self.wrong(
                "settled", now, f"version {decision.version} is made of {_some(decision.ids)}, not of {_some(self._accepted)}"
            )
        else:
            self._decided_well(decision, now)
        self._deciding = decision
        self._open(decision.at, now)
        self._decide_by = math.inf  # while that version is made

    def _decided_well(self, decision: Decision, now: float) -> None:
        backwards = [self._accepted[update_id] for update_id in sorted(decision.ids, reverse=True)]
        if decision != decision_on(backwards, decision.version, decision.at, decision.reason, self._config.merge):
            self.wrong("order", now, f"version {decision.version} depends on the order in which its updates came")
        for update in backwards:
            header = update.header
            for tier, base in [(g.tier, g.base_version) for g in header.groups] or [(header.tier, header.base_version)]:
                staleness, bound = decision.version - 1 - base, self._config.merge.for_tier(tier).max_staleness
                if not 0 <= staleness <= bound:
                    self.wrong(
                        "staleness", now, f"{update.update_id} is {staleness} versions old in {decision.version}; bound {bound}"
                    )
            if not header.groups and not update.squared_norm <= self._config.limits.max_norm**2 * (1 + 1e-9):
                self.wrong("limits", now, f"{update.update_id} has norm {math.sqrt(update.squared_norm):g}, and is merged")

    def _published(self, event: Published, effects: Sequence[Effect], now: float) -> None:
        version = event.version
        if version.number <= self.version:
            self.wrong("gapless", now, f"version {version.number} is published again, after {self.version}")
            return
        self._digest.update(f"{now} {version}".encode())
        self._make(version.number, now)

    def _make(self, number: int, now: float) -> None:
        """A version is durable: what is in it is settled."""
        decision, self._deciding = self._deciding, None
        if number != self.version + 1 or (decision.version if decision else 0) != number:
            self.wrong("gapless", now, f"version {number} is published after {self.version}")
        first = [update_id for update_id, update in self._accepted.items() if update.header.kind is Kind.INIT]
        ids = decision.ids if decision is not None else tuple(first)
        updates = [self._accepted.pop(update_id) for update_id in ids if update_id in self._accepted]
        leaves = tuple(leaf for update in updates for leaf in {update.update_id, *update.header.leaf_ids})
        for update_id in sorted(leaves):
            self._by_leaf.pop(update_id, None)
            if self._is_merged(update_id):
                self.wrong("settled", now, f"{update_id} is in version {number} too")
            self._marks[update_id.node] = update_id[1:]
            self._merged[update_id] = number
        if len(self._kept) == self._kept.maxlen:
            for update_id in self._kept[0][1]:
                del self._merged[update_id]
        self._kept.append((number, leaves))
        self.version = number
        self.versions_at.append(now)
        self._wait(now)
        if updates:  # else it came from a file
            self.made(number, decision, updates)

    # ---- time -----------------------------------------------------------------------------------------------------------------

    def _open(self, at: float, now: float) -> None:
        self._opened = (at, self._opened[0])
        self._wait(now)

    def _wait(self, now: float) -> None:
        """From now on the window must close within its bounds, if it holds enough."""
        if (
            self._deciding is not None
            or self.finished
            or self.version == NO_VERSION
            or len(self._by_leaf) < self._policy.min_updates
        ):
            self._decide_by = math.inf
        elif self._decide_by == math.inf:  # heartbeat: a window that is open again waits for members to come back
            self._decide_by = now + max(self._policy.deadline_s, self._config.members.heartbeat_s) + SLACK_S

    def _look(self, now: float) -> None:
        if now > self._decide_by:
            self._decide_by = math.inf
            have = len(self._by_leaf)
            self.wrong("progress", now, f"the window has held {have} updates for longer than its deadline, and does not close")

    def _end(self, effect: events.Ended, now: float) -> None:
        self.finished = effect.reason
        self._decide_by = math.inf

    # ---- a start --------------------------------------------------------------------------------------------------------------

    def recovered(self, recovered: Recovered, now: float) -> None:
        """See ``Observer``."""
        if self.finished and not recovered.finished:  # it lost power while it wrote that down, and nobody has heard
            self._accepted.update(self._expired)
            self._expired.clear()
        elif recovered.finished != self.finished:
            self.wrong("resume", now, f"the run had ended ({self.finished!r}), and now {recovered.finished!r}")
        self.finished = recovered.finished
        number = NO_VERSION if recovered.version is None else recovered.version.number
        founding = self.version == NO_VERSION and number == 0
        if number == self.version + 1 and (self._deciding is not None or founding):  # it was durable, and not yet said
            self._make(number, now)
        elif number != self.version:
            self.wrong("resume", now, f"version {self.version} was published; the journal's newest is {number}")
        if recovered.decision is None:
            self._deciding = None  # it was not written down
        elif recovered.decision != self._deciding:
            self.wrong("resume", now, f"version {recovered.decision.version} was decided otherwise than the journal says")
        self._recovered_updates(recovered, now)
        if (
            recovered.window_opened_at is not None
            and self._opened[0] is not None
            and recovered.window_opened_at not in self._opened
        ):
            self.wrong("resume", now, f"the window opened at {self._opened[0]}; the journal says {recovered.window_opened_at}")
        self._opened = (recovered.window_opened_at,)
        self._arriving.clear()
        self._decide_by = math.inf
        self._wait(now)

    def _recovered_updates(self, recovered: Recovered, now: float) -> None:
        found = {update.update_id: update for update in recovered.accepted}
        for update_id, update in self._accepted.items():
            if found.get(update_id) != update:
                self.wrong("resume", now, f"{update_id} was acknowledged; the journal has {found.get(update_id)}")
        for update_id, update in found.items():
            if update_id in self._accepted or update_id in self._expired:  # what has expired stays there, and expires again
                continue
            if update_id not in self._arriving and update_id not in self._refused:
                self.wrong("resume", now, f"{update_id} was never whole, and the journal has it")
            # Durable and not acknowledged. It will be, unless a decision has made it stale since.
            bound = self._config.merge.for_tier(update.header.tier).max_staleness
            head = self.version if recovered.decision is None else recovered.decision.version
            if self.finished or update.header.kind is Kind.INIT or head - update.header.base_version <= bound:
                self._accept(update, now)
        for update_id, version in self._merged.items():
            if recovered.merged.get(update_id) != version:
                self.wrong(
                    "resume", now, f"{update_id} is in version {version}; the journal says {recovered.merged.get(update_id)}"
                )
        for node, (incarnation, sequence) in self._marks.items():
            if recovered.high_water.get((node, incarnation), -1) < sequence:
                self.wrong("resume", now, f"the journal has forgotten that {node}/{incarnation}/{sequence} was merged")


def _some(ids: Any) -> str:
    shown = [str(update_id) for update_id in list(ids)[:3]]
    return ", ".join(shown) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "") or "nothing"


def _said(receipt: Receipt) -> str:
    return receipt.state.value + (f" ({receipt.reason})" if receipt.reason else "")
