"""The regional aggregator: the aggregator with a parent. Its windows are sealed into partials instead of merged (design §4).

The half that it adds to ``Aggregator``, as pure as the rest. A window closes by the same ``decide``; then

    Seal -> Sealed -> Push -> Answered         a partial is durable before its first byte leaves; they are pushed in order
    ACCEPTED                                   the parent has it; the region keeps what it is made of until a final receipt
    MERGED, EXPIRED, REFUSED                   settles everything in it, and travels down
    REFUSED that names ids (OVERLAP, STALE)    the partial is sealed anew without those, under a new id

A leaf update named by OVERLAP has come another way: the region asks the parent what became of it (``questions``), and takes it
back into its window if that is UNKNOWN. One named by STALE expires. One that lies in a partial from below cannot be taken out of
that sum: the refusal is passed down to whoever sealed it.

A member that comes from another parent asks about updates that nobody here knows: the region asks its own parent, and answers
STAGED until it knows. Versions are the parent's, fetched once and served as they are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fleetddp.common import events
from fleetddp.common.aggregator import Aggregator
from fleetddp.common.config import FleetConfig, StalenessConfig
from fleetddp.common.errors import Reason
from fleetddp.common.events import Conclude, Conclusion, Effect, Joined, Say, Sealing, Settle
from fleetddp.common.overview import MAX_STATUS_MEMBERS
from fleetddp.common.questions import Questions
from fleetddp.common.recovered import Recovered, RecoveredRegion
from fleetddp.common.sealing import loads, sealing_of
from fleetddp.common.update import NO_VERSION, Kind, Receipt, State, Update, UpdateId
from fleetddp.common.window import Window

TRANSFERS = 8  # pushes whose durations are remembered


@dataclass(slots=True, eq=False)
class _Partial:
    """A sealing on its way to a version."""

    sealing: Sealing
    update: Update | None = None  # None: not durable yet
    offered: bool = False
    accepted: bool = False
    concluding: Receipt | None = None  # what it ends with; being made durable


class RegionalAggregator(Aggregator):
    """See the module. ``config`` is a region's own (``region_config``): its window, no end of the run but the parent's."""

    def __init__(self, config: FleetConfig, recovered: Recovered, region: RecoveredRegion) -> None:
        super().__init__(config, recovered)
        self._standing.regional = True
        self._region = region
        proxy = config.proxy
        self._codec = config.region.codec if proxy is None else f"prob64:{proxy.classes}"
        self._sequence = region.sequence
        self._partials = {s.update_id: _Partial(s, made, offered=made is not None) for s, made in region.sealings}  # in order
        self._sealed = {update_id for sealing, _ in region.sealings for update_id in sealing.ids}
        self._questions = Questions(self._receipts)
        self._rules: Joined | None = None
        self._above = NO_VERSION  # the parent's newest
        self._parent_closes_at = 0.0
        self._transfers: deque[float] = deque(maxlen=TRANSFERS)
        self._fetching: int | None = None
        self._pushing: UpdateId | None = None
        self._fetch_at = self._push_at = -math.inf
        self._asked: tuple[UpdateId, ...] = ()
        self._stands = (NO_VERSION, -1)
        if region.rules is not None:
            self._obey(region.rules)
        for receipt in region.closed:
            self._receipts.note(receipt)
        self._handlers |= {
            events.Enrolled: self._enrolled,
            events.Told: self._told,
            events.Answered: self._answered,
            events.PushFailed: self._push_failed,
            events.Fetched: self._fetched,
            events.FetchFailed: self._fetch_failed,
            events.Sealed: self._sealed_,
            events.Concluded: self._concluded,
        }

    def start(self, now: float) -> list[Effect]:
        """See ``Aggregator``."""
        undone: list[Effect] = [events.Seal(sealing=s) for s, made in self._region.sealings if made is None and not self.finished]
        out = undone + super().start(now)
        if self.finished:
            for partial in self._partials.values():
                self._expire_partial(partial, out)
        return out

    def _readmit(self, update: Update, out: list[Effect]) -> bool:
        """What is durable here was acknowledged, or may have been: it stays, however stale. Is it in no partial yet?"""
        self._receipts.accept(update)
        return update.update_id not in self._sealed

    # ---- after every event ------------------------------------------------------------------------------------------------

    def _after(self, now: float, out: list[Effect]) -> None:
        self._fetch(now, out)
        self._push(now, out)
        self._ask(out)
        stands = (self.version, self._members.expected)
        if stands != self._stands:
            self._stands = stands
            out.append(events.Stand(version=self.version, leaves=stands[1]))
        super()._after(now, out)

    def _next_due(self) -> float:
        waits = [at for at, due in ((self._fetch_at, self._may_fetch()), (self._push_at, self._next_push() is not None)) if due]
        return min([super()._next_due(), *waits])

    def _may_fetch(self) -> bool:
        return self._above not in (NO_VERSION, self.version) and self._fetching is None and not self.finished

    def _fetch(self, now: float, out: list[Effect]) -> None:
        if self._may_fetch() and now >= self._fetch_at:
            self._fetching = self._above
            out.append(events.Fetch(version=self._above))

    def _next_push(self) -> _Partial | None:
        """The oldest partial that the parent may not have, unless one is being pushed."""
        if self._pushing is not None or self.finished or self._rules is None:
            return None
        for partial in self._partials.values():
            if partial.concluding is None and not partial.accepted:
                return partial if partial.update is not None else None  # in order: a later one waits for it
        return None

    def _push(self, now: float, out: list[Effect]) -> None:
        partial = self._next_push()
        if partial is not None and now >= self._push_at:
            assert partial.update is not None
            self._pushing, partial.offered = partial.sealing.update_id, True
            out.append(events.Push(update=partial.update))

    def _ask(self, out: list[Effect]) -> None:
        offered = (i for i, partial in self._partials.items() if partial.offered and partial.concluding is None)
        asked = tuple(dict.fromkeys([*offered, *self._questions.ids])) if not self.finished else ()
        if asked != self._asked:
            self._asked = asked
            out.append(events.Ask(ids=asked))

    # ---- windows ----------------------------------------------------------------------------------------------------------

    def _merge(self, window: Window, reason: str, now: float, out: list[Effect]) -> None:
        """Seal what the window holds. The journal takes the sealing's time as the next window's opening."""
        for sealing in self._sealings(window.updates, reason, now):
            self._partials[sealing.update_id] = _Partial(sealing)
            out.append(events.Seal(sealing=sealing))
        self._open(now)

    def _sealings(self, updates: Iterable[Update], reason: str, now: float) -> tuple[Sealing, ...]:
        assert self.layout is not None  # updates were accepted
        sealings = []
        for load in loads(updates):
            self._sequence += 1
            sealing = sealing_of(
                load,
                UpdateId(self._region.node, self._region.incarnation, self._sequence),
                codec=self._codec,
                layout=self.layout.fingerprint,
                gradient_lr=self._standing.config.merge.gradient_lr,
                at=now,
                reason=reason,
                residuals_from=self.version - self._standing.config.merge.staleness.max_staleness,
            )
            sealings.append(sealing)
        return tuple(sealings)

    def _open(self, now: float) -> Window:
        window = super()._open(now)
        self._aim(window)
        return window

    def _aim(self, window: Window | None) -> None:
        """The default deadline: when the parent is expected to close, minus what a transfer takes; if that can be made."""
        if window is None or self.config.region.deadline_is_fixed:
            return
        due = self._parent_closes_at - max(self._transfers, default=0.0)
        if due > window.opened_at:
            window.deadline_at = due

    def _sealed_(self, event: events.Sealed, now: float, out: list[Effect]) -> None:
        partial = self._partials.get(event.update.update_id)
        if partial is not None:
            partial.update = event.update
            out.append(Say(what="sealed", message=f"{len(event.update.header.leaf_ids)} updates as {event.update.update_id}"))

    # ---- the parent -------------------------------------------------------------------------------------------------------

    def _obey(self, rules: Joined) -> None:
        """The parent's rules instead of the fleet file's; a tier's own, smaller bound stays."""
        self._rules = rules
        merge = self.config.merge
        bounded = {
            tier: rule.model_copy(update={"max_staleness": min(rule.max_staleness, rules.max_staleness)})
            for tier, rule in merge.tiers.items()
        }
        changes = {
            "gradient_lr": rules.gradient_lr,
            "staleness": StalenessConfig(max_staleness=rules.max_staleness),
            "tiers": bounded,
        }
        self._standing.config = self.config.model_copy(update={"merge": merge.model_copy(update=changes)})

    def _enrolled(self, event: events.Enrolled, now: float, out: list[Effect]) -> None:
        joined = event.joined
        settled = replace(joined, receipts=(), version=NO_VERSION, finished="")  # what does not change from join to join
        if self._rules != settled:
            self._obey(settled)
            out.append(events.Rules(joined=settled))
        self._above = self._standing.known = joined.version  # even an older one: a parent restored from a backup
        self._fetch_at = self._push_at = -math.inf

    def _told(self, event: events.Told, now: float, out: list[Effect]) -> None:
        self._above = self._standing.known = max(self._above, event.version)
        if event.closes_at and event.closes_at != self._parent_closes_at:
            self._parent_closes_at = event.closes_at
            self._aim(self._window)
            self._look_at = now
        if event.finished and not self.finished:
            self._end(event.finished, out)
            for partial in self._partials.values():
                self._expire_partial(partial, out)
            self._expire(self._questions.own, out)

    def _expire_partial(self, partial: _Partial, out: list[Effect]) -> None:
        if partial.concluding is None:
            self._expire([update for i in partial.sealing.ids if (update := self._receipts.accepted(i)) is not None], out)

    def _fetched(self, event: events.Fetched, now: float, out: list[Effect]) -> None:
        self._fetching = None
        self._standing.layout = event.layout
        self._standing.version = self._standing.head = event.version.number
        out.append(events.Announce(version=event.version.number, finished=self.finished))
        if self._window is None and not self.finished:
            self._open(now)
            out.append(events.Opened(at=now))
        self._look_at = now

    def _fetch_failed(self, event: events.FetchFailed, now: float, out: list[Effect]) -> None:
        self._fetching = None
        if event.version == self._above:  # else there is a newer one to try
            self._fetch_at = now + self.config.members.heartbeat_s

    def _push_failed(self, event: events.PushFailed, now: float, out: list[Effect]) -> None:
        if self._pushing == event.update_id:
            self._pushing = None
            self._push_at = now + self.config.members.heartbeat_s

    # ---- what the parent answers ------------------------------------------------------------------------------------------

    def _answered(self, event: events.Answered, now: float, out: list[Effect]) -> None:
        receipt = event.receipt
        if event.push_s is not None and self._pushing == receipt.update_id:
            self._pushing = None
            if not receipt.duplicate:
                self._transfers.append(event.push_s)
        if self.finished:
            return
        partial = self._partials.get(receipt.update_id)
        if partial is not None:
            if partial.concluding is None:
                self._partial_answered(partial, receipt, now, out)
        elif receipt.update_id in self._questions:
            update = self._questions.answered(receipt, out)
            if update is not None and self._window is not None:
                self._window.add(update)
                self._look_at = now

    def _partial_answered(self, partial: _Partial, receipt: Receipt, now: float, out: list[Effect]) -> None:
        if receipt.state is State.ACCEPTED:
            partial.accepted = True
        elif receipt.state is State.UNKNOWN:  # the parent has lost it; or never had it, and it is being pushed
            partial.accepted = False
        elif receipt.state is State.REFUSED and receipt.reason == Reason.FINISHED.value:
            self._push_at = math.inf  # the end is told next; or the parent turns out to go on, when it lets us in again
        elif not set(receipt.overlap).isdisjoint(partial.sealing.header.leaf_ids):
            self._seal_again(partial, receipt, now, out)
        elif receipt.state.final:
            verdicts = [
                replace(receipt, update_id=i, duplicate=False) for own in partial.sealing.ids for i in self._receipts.held_by(own)
            ]
            undo = receipt.state is State.REFUSED
            conclusion = Conclusion(partial=receipt.update_id, receipts=tuple(verdicts), undo=undo)
            self._conclude(partial, receipt, conclusion, out)

    def _conclude(self, partial: _Partial, receipt: Receipt, conclusion: Conclusion, out: list[Effect]) -> None:
        partial.concluding = receipt
        out.append(Conclude(conclusion=conclusion))

    def _seal_again(self, partial: _Partial, receipt: Receipt, now: float, out: list[Effect]) -> None:
        """Without the updates that the parent names."""
        named = set(receipt.overlap)
        left: list[Update] = []
        dropped: list[UpdateId] = []
        expired: list[Receipt] = []
        for own in partial.sealing.ids:
            update = self._receipts.accepted(own)
            assert update is not None  # it is accepted until its partial is concluded
            if named.isdisjoint(update.header.leaf_ids):
                left.append(update)
            elif update.header.kind is Kind.PARTIAL:
                dropped.append(own)
            elif receipt.reason == Reason.STALE.value:
                expired.append(Receipt(update_id=own, state=State.EXPIRED, reason=receipt.reason, message=receipt.message))
            else:
                self._questions.elsewhere(update)
        out.append(Say(what="resealed", message=f"{partial.sealing.update_id}: {receipt.reason}: {receipt.message}"))
        conclusion = Conclusion(
            partial=receipt.update_id,
            receipts=tuple(expired),
            dropped=tuple(dropped),
            undo=True,
            instead=self._sealings(left, partial.sealing.reason, now),
        )
        self._conclude(partial, receipt, conclusion, out)

    def _concluded(self, event: events.Concluded, now: float, out: list[Effect]) -> None:
        conclusion = event.conclusion
        partial = self._partials.pop(conclusion.partial, None) if conclusion.partial is not None else None
        for receipt in conclusion.receipts:
            self._receipts.close(receipt)
            word = {State.MERGED: "merged", State.EXPIRED: "expired"}.get(receipt.state)
            if word is not None:
                self._counters[word] += 1
        out.append(Settle(receipts=conclusion.receipts))
        verdict = partial.concluding if partial is not None else None
        if verdict is not None:
            for own in conclusion.dropped:
                self._pass_down(own, verdict, out)
        for sealing in conclusion.instead:
            self._partials[sealing.update_id] = _Partial(sealing)
            if self.finished:
                self._expire_partial(self._partials[sealing.update_id], out)
            else:
                out.append(events.Seal(sealing=sealing))

    def _pass_down(self, own: UpdateId, verdict: Receipt, out: list[Effect]) -> None:
        """A partial from below holds what the parent named: whoever sealed it must seal it again."""
        update = self._receipts.release(own)
        named = tuple(i for i in update.header.leaf_ids if i in set(verdict.overlap))
        if verdict.reason == Reason.OVERLAP.value:
            for leaf in named:
                self._questions.hold(leaf)
        receipt = replace(verdict, update_id=own, overlap=named, duplicate=False)
        self._receipts.note(receipt)
        out.append(Settle(receipts=(receipt,)))

    # ---- members ----------------------------------------------------------------------------------------------------------

    def _receipts_of(self, ids: Iterable[UpdateId], out: list[Effect]) -> tuple[Receipt, ...]:
        """How each of these stands. What nobody here knows, the parent is asked about first."""
        receipts = super()._receipts_of(ids, out)
        return receipts if self.finished else tuple(self._questions.inquire(receipt) for receipt in receipts)

    def _heartbeat(self, event: events.Heartbeat, now: float, out: list[Effect]) -> None:
        super()._heartbeat(event, now, out)
        if event.metrics and 0 <= event.metrics_version <= self.version:
            out.append(events.Report(metrics=event.metrics, version=event.metrics_version))

    # ---- what people see --------------------------------------------------------------------------------------------------

    def status(self, now: float, most: int = MAX_STATUS_MEMBERS) -> dict[str, Any]:
        """See ``Aggregator``; ``parent`` is a region's own."""
        return {
            **super().status(now, most),
            "parent": {
                "node": self._region.node,
                "version": self._above,
                "partials": len(self._partials),
                "accepted": sum(partial.accepted for partial in self._partials.values()),
                "asked": len(self._asked),
            },
        }
