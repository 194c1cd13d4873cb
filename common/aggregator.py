"""The aggregator: a state machine that gathers updates in windows and decides what each version is made of (design §4).

It takes events and the time, and returns effects (events.py); it reads no clock and does no input or output, so that the
same sequence of (event, now) gives the same effects under any driver. The nouns it is made of: ``Membership`` (who takes
part), ``Intake`` (how an update gets in), ``Receipts`` (what became of it), ``Window`` and ``decide`` (when to merge),
``decision_on`` (what each counts for).

An accepted update counts in the open window. When that closes, a Decision is made of all it holds, and the next window opens
at once; at most one merge is in flight. Published settles the updates that are in the version.

After a restart (``Recovered``) a journaled decision is re-issued as it stands and the accepted updates are in the open
window again. Members are asked to join by UNKNOWN_NODE. Those behind the accepted updates, and behind the versions that the
journal still keeps, are expected meanwhile, under a fresh lease: the window does not close merely because nobody has come
back yet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from fleetddp.common import admission, events
from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.events import Decision, Effect, Event, Reply, Say, Settle
from fleetddp.common.fragments import Changes
from fleetddp.common.intake import Intake
from fleetddp.common.layout import Layout
from fleetddp.common.membership import Membership, superseded
from fleetddp.common.merge import decision_on
from fleetddp.common.overview import MAX_STATUS_MEMBERS, overview
from fleetddp.common.receipts import Receipts
from fleetddp.common.recovered import Recovered
from fleetddp.common.scores import Scores
from fleetddp.common.update import NO_VERSION, Kind, Receipt, Tier, Update, UpdateId
from fleetddp.common.window import Action, Counts, Grace, Verdict, Window, decide, quorum_reached, resolve
from fleetddp.common.work import Work


class Aggregator:
    """See the module. ``version``, ``layout``, ``finished`` and ``closes_at`` may be read at any time."""

    def __init__(self, config: FleetConfig, recovered: Recovered) -> None:
        self.config = config
        self.run = recovered.run
        self.closes_at = 0.0  # when the window is expected to close; 0: unknown
        self.policy = resolve(config.window, bool(config.members.sites))
        self._recovered = recovered
        self._standing = admission.Standing(
            config=config, run=recovered.run, layout=recovered.layout, finished=recovered.finished
        )
        if recovered.version is not None:
            self._standing.version = self._standing.head = recovered.version.number
        self._cut(config.site.fragments)
        self._members = Membership(config.members)
        self._receipts = Receipts(recovered.high_water, recovered.merged, gaps=recovered.gaps)
        self._intake = Intake(self._standing, self._members, self._receipts)
        self._grace = Grace(self.policy)
        self._work = Work(config.work)
        self._scores = Scores()
        self._window: Window | None = None
        self._windows = 0  # opened by this process
        self._merging: Decision | None = None
        self._founding: Update | None = None
        self._verdict: Verdict | None = None
        self._last_quorum_at: float | None = None  # of the window before
        self._look_at = math.inf  # when the verdict may change by time alone
        self._ends_at = math.inf
        self._passes_at = math.inf  # when time alone may change something else
        self._woken_at = math.inf  # the wake-up that was asked for
        self._counters: Counter[str] = Counter()
        self._handlers: dict[type, Callable[[Any, float, list[Effect]], None]] = {
            events.Join: self._join,
            events.Heartbeat: self._heartbeat,
            events.Leave: self._leave,
            events.Offer: self._intake.offer,
            events.Share: self._share,
            events.Progressed: self._intake.progressed,
            events.SliceStaged: self._intake.slice_staged,
            events.SliceRejected: self._intake.slice_rejected,
            events.Persisted: self._persisted,
            events.PersistFailed: self._intake.persist_failed,
            events.Published: self._published,
            events.Tick: lambda event, now, out: None,
        }

    @property
    def version(self) -> int:
        """The newest published version, or ``NO_VERSION``."""
        return self._standing.version

    @property
    def layout(self) -> Layout | None:
        """The run's layout, once version 0 is published."""
        return self._standing.layout

    @property
    def finished(self) -> str:
        """Why the run is over; empty while it goes on."""
        return self._standing.finished

    @property
    def live_members(self) -> int:
        """How many members hold a lease."""
        return sum(self._members.live_by_tier.values())

    @property
    def has_regions(self) -> bool:
        """Whether members may come that were below a region so far."""
        return self._members.knows(Tier.REGION)

    def _cut(self, fragments: int) -> None:
        """The layout is cut into so many fragments."""
        recovered, standing = self._recovered, self._standing
        begun = 1 if recovered.changes is None else len(recovered.changes.at)
        if recovered.version is not None and begun != fragments:
            raise ConfigError(f"site.fragments is {fragments}, but this run began with {begun}: a run never changes it")
        standing.fragments = fragments
        if fragments > 1:
            standing.changes = recovered.changes or Changes.at_the_start(fragments)

    # ---- driving ----------------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Effect]:
        """Take up what was recovered. To be called once, before the first event."""
        out: list[Effect] = []
        recovered = self._recovered
        self._begin(now if recovered.began_at is None else min(recovered.began_at, now))
        merging: frozenset[UpdateId] = frozenset()
        waiting: list[Update] = []
        if recovered.decision is not None:
            self._merging = recovered.decision
            self._standing.head = recovered.decision.version
            self._standing.changes = recovered.decision.changes
            merging = frozenset(recovered.decision.ids)
            out.append(events.Merge(decision=recovered.decision))
        for update in recovered.accepted:
            if update.update_id in merging:
                self._receipts.accept(update)
            elif self._readmit(update, out):
                waiting.append(update)
        if self.finished:
            self._expire(waiting, out)
        elif self.version == NO_VERSION:
            for init in waiting[:1]:
                self._found(init, now, out)
        else:
            self._reopen(waiting, now, out)
            self._check_end(now, out)
        self._after(now, out)
        return out

    def handle(self, event: Event, now: float) -> list[Effect]:
        """What follows from an event that happened at ``now``, seconds since the epoch, never less than before."""
        out: list[Effect] = []
        if now >= self._passes_at:
            self._pass_time(now, out)
        self._handlers[type(event)](event, now, out)
        self._after(now, out)
        return out

    def _pass_time(self, now: float, out: list[Effect]) -> None:
        """Leases that ended, transfers that stalled, the end of the run."""
        if now >= self._members.next_lease:
            for member in self._members.expire(now):
                out.append(Say(what="lost", message="its lease ended", node=member.node))
        if now >= self._intake.arrivals.next_due:
            self._intake.pass_time(now, out)
        if now >= self._ends_at:
            self._check_end(now, out)

    def _after(self, now: float, out: list[Effect]) -> None:
        """Look at the window if anything it depends on has changed, and ask to be woken for what time will change."""
        if self._members.changed or now >= self._look_at:
            self._members.changed = False
            self._look(now, out)
        self._passes_at = self._next_due()
        due = min(self._look_at, self._passes_at)
        if due < self._woken_at or self._woken_at <= now:
            self._woken_at = due
            if due < math.inf:
                out.append(events.Wake(at=due))

    def _next_due(self) -> float:
        """When time alone may change something other than the verdict."""
        return min(self._members.next_lease, self._intake.arrivals.next_due, self._ends_at)

    # ---- the window -------------------------------------------------------------------------------------------------------

    def _look(self, now: float, out: list[Effect]) -> None:
        window = self._window
        self._look_at, self.closes_at = math.inf, 0.0
        if window is None:
            return
        counts = self._counts(window)
        if window.quorum_at is None and quorum_reached(now, counts, self.policy):
            window.quorum_at = now
            window.grace_s = self._grace.seconds(now - window.opened_at)
            counts = self._counts(window)
        if self._merging is not None:
            return
        verdict = decide(now, counts, self.policy)
        if self._verdict is None or verdict.why is not self._verdict.why:
            out.append(Say(what="window", message=verdict.reason))
        self._verdict = verdict
        if verdict.action is Action.MERGE:
            self._merge(window, verdict.reason, now, out)
            return
        if verdict.until is not None:
            self._look_at = self.closes_at = verdict.until
        if verdict.action is Action.EXTEND:
            window.deadline_at = self._look_at

    def _counts(self, window: Window) -> Counts:
        return window.counts(self._members.expected, self._members.arrived, self._members.outstanding)

    def _open(self, now: float) -> Window:
        """Arrivals from now on belong to a new window."""
        self._members.open_window()
        self._last_quorum_at = self._window.quorum_at if self._window else None
        self._window = Window(opened_at=now, deadline_at=now + self.policy.deadline_s)
        self._windows += 1
        return self._window

    def _reopen(self, waiting: Iterable[Update], now: float, out: list[Effect]) -> None:
        """The window that was open before a restart, with the updates that were accepted in it."""
        self._look_at = now
        recovered = self._recovered
        if recovered.window_opened_at is None:
            self._open(now)
            out.append(events.Opened(at=now))
        else:
            window = self._open(min(recovered.window_opened_at, now))  # the machine's clock may have been set back since
            window.settling_until = now + self.config.members.heartbeat_s
            window.deadline_at = max(window.deadline_at, window.settling_until)
        self._members.presume(recovered, now)
        for update in waiting:
            self._count(update)

    def _readmit(self, update: Update, out: list[Effect]) -> bool:
        """After a restart: whether this durable update is to be in the window."""
        return self._intake.readmit(update, out)

    def _persisted(self, event: events.Persisted, now: float, out: list[Effect]) -> None:
        update = self._intake.persisted(event, out)
        if update is None:
            return
        if self.finished:
            self._expire([update], out)
            return
        if update.header.kind is Kind.INIT:
            self._found(update, now, out)
            return
        self._learn(update, now)
        self._count(update)
        self._counters["accepted"] += 1
        self._look_at = now

    def _learn(self, update: Update, now: float) -> None:
        """How fast is its member, and how long after a quorum does one come in that was on its way then?"""
        member = self._members.get(update.update_id.node)
        assert self._window is not None
        if member is None:  # long gone
            return
        member.speed = self._work.learn(member.speed, update.header, member.joined_at, now)
        missed_the_last = update.header.base_version < self._standing.head and member.last_window < self._windows - 1
        if missed_the_last and self._last_quorum_at is not None:
            self._grace.observe(now - self._last_quorum_at)
        elif self._window.quorum_at is not None and not member.arrived:
            self._grace.observe(now - self._window.quorum_at)

    def _count(self, update: Update) -> None:
        """An accepted update is in the open window."""
        assert self._window is not None  # there is a version, and the run goes on
        self._window.add(update)
        self._members.arrive(update, self._windows, self._standing.staleness(update.header.base_version, update.header.fragment))

    def _found(self, init: Update, now: float, out: list[Effect]) -> None:
        """Version 0 is made of the first weights that are durable."""
        self._founding = init
        self._standing.init_by = init.update_id.node
        out.append(events.Found(update=init, at=now))

    def _merge(self, window: Window, reason: str, now: float, out: list[Effect]) -> None:
        """Decide the next version. The journal takes the decision's time as the next window's opening."""
        changes = self._standing.changes
        sums = self.config.kind == "logits"
        self._merging = decision_on(window.updates, self.version + 1, now, reason, self.config.merge, changes, sums=sums)
        self._standing.head, self._standing.changes = self._merging.version, self._merging.changes
        out.append(events.Merge(decision=self._merging))
        self._open(now)

    def _published(self, event: events.Published, now: float, out: list[Effect]) -> None:
        number = event.version.number
        if number <= self.version:  # a driver's repeat
            return
        assert number == self.version + 1, f"version {number} published after {self.version}"
        if self._merging is not None:
            settled = self._merging.ids
            self._merging = None
            self._counters["merged"] += len(settled)
        else:
            assert self._founding is not None, "version 0 published without first weights"
            settled = (self._founding.update_id,)
            self._standing.layout = Layout.from_json(self._founding.header.layout_spec)
            self._founding = None
        self._standing.version = self._standing.head = number
        changed = self._work.published(number, self._members.speeds(), self.live_members, now)
        if changed:
            out.append(Say(what="work", message=changed))
        self._intake.refuse_late(out)
        receipts = [receipt for update_id in settled for receipt in self._receipts.merge(update_id, number)]
        out.append(Settle(receipts=tuple(receipts)))
        if number == 0 and not self.finished:
            self._begin(event.version.published_at)
            self._open(now)
            out.append(events.Opened(at=now))
        out.append(events.Announce(version=number, finished=self.finished))
        self._look_at = now
        self._check_end(now, out)

    # ---- the end ----------------------------------------------------------------------------------------------------------

    def _begin(self, at: float) -> None:
        """The run's hours count from version 0 on; until there is one, from the start of this process."""
        if self.config.until.hours is not None:
            self._ends_at = at + self.config.until.hours * 3600

    def _check_end(self, now: float, out: list[Effect]) -> None:
        until = self.config.until
        if self.finished:
            return
        if until.versions is not None and self.version >= until.versions:
            self._end(f"version {self.version} is published", out)
        elif now >= self._ends_at:
            self._end(f"{until.hours:g} hours have passed", out)

    def _end(self, reason: str, out: list[Effect]) -> None:
        """The run is over: what is accepted and in no version expires, what is arriving is refused."""
        self._standing.finished = reason
        out.append(events.Ended(reason=reason))
        out.append(Say(what="finished", message=reason))
        if self._window is not None:
            self._expire(self._window.updates, out)
            self._window = None
        self._intake.close(out)
        self._ends_at = self._look_at = math.inf
        self.closes_at = 0.0
        out.append(events.Announce(version=self.version, finished=reason))

    def _expire(self, updates: Iterable[Update], out: list[Effect]) -> None:
        for update in updates:
            receipts = self._receipts.expire(update.update_id, Reason.FINISHED, f"the run has ended: {self.finished}")
            self._counters["expired"] += 1
            out.append(Settle(receipts=receipts))

    # ---- members ----------------------------------------------------------------------------------------------------------

    def _join(self, event: events.Join, now: float, out: list[Effect]) -> None:
        try:
            admission.check_run(event.run, self._standing)
            if event.layout:
                admission.check_layout(event.layout, self._standing)
            newest = self._receipts.newest(event.node)
            if event.incarnation < newest:  # the journal knows of it, though it has not joined since a restart
                raise superseded(event.node, event.incarnation, newest)
            before = self._members.get(event.node)
            new_process = before is None or before.incarnation != event.incarnation
            new = before is None or new_process or not before.live or before.presumed
            member = self._members.join(event, now)
        except Refused as refusal:
            self._intake.reply_no(event.node, refusal, out)
            return
        if new_process:
            self._intake.supersede(event.node, event.incarnation, out)
        if new:
            message = f"joined as {event.tier.value}; {self.live_members} members"
            out.append(Say(what="joined", message=message, node=event.node))
        out.append(
            Reply(
                value=self._standing.joined(
                    event.tier, self._receipts_of(event.open, out), self._work.steps(member.tier, member.speed, NO_VERSION, now)
                )
            )
        )

    def _heartbeat(self, event: events.Heartbeat, now: float, out: list[Effect]) -> None:
        try:
            member = self._members.hear(event, now)
        except Refused as refusal:
            self._intake.reply_no(event.node, refusal, out)
            return
        if event.metrics:
            if 0 <= event.metrics_version <= self.version:
                self._scores.add(event.metrics_version, event.metrics)
                reached = self._scores.reached(event.metrics_version, self.config.until)
                if reached and not self.finished:
                    self._end(reached, out)
            elif event.metrics_version == NO_VERSION:
                member.metrics = dict(event.metrics)
        standing = self._standing
        heard = events.Heard(
            version=standing.version,
            closes_at=self.closes_at,
            receipts=self._receipts_of(event.open, out) if event.open else (),
            finished=standing.finished,
            steps=self._work.steps(member.tier, member.speed, member.base_version, now),
        )
        out.append(Reply(value=heard))

    def _receipts_of(self, ids: Iterable[UpdateId], out: list[Effect]) -> tuple[Receipt, ...]:
        receipt = self._intake.receipt
        return tuple([receipt(update_id) for update_id in ids])

    def _leave(self, event: events.Leave, now: float, out: list[Effect]) -> None:
        if self._members.leave(event.node, event.incarnation):
            out.append(Say(what="left", message="left", node=event.node))
        out.append(Reply(value=events.Left()))

    def _share(self, event: events.Share, now: float, out: list[Effect]) -> None:
        try:
            admission.check_run(event.run, self._standing)
            member = self._members.process(event.node, event.incarnation)
            self._members.see(member, now)
            admission.check_share(event, member.tier, self._standing)
        except Refused as refusal:
            self._intake.reply_no(event.node, refusal, out)
            return
        out.append(Reply(value=events.Proceed()))

    # ---- what people see --------------------------------------------------------------------------------------------------

    def status(self, now: float, most: int = MAX_STATUS_MEMBERS) -> dict[str, Any]:
        """How the run stands, with ``most`` members at most, as JSON-able values; the schema is in WIRE.md."""
        status = overview(now, most, self._standing, self._members, self._intake, self._scores, self._counters)
        return {**status, "window": self._window_status()}

    def _window_status(self) -> dict[str, Any]:
        if self._window is None:
            return {"reason": "" if not self.finished else f"the run has ended: {self.finished}"}
        counts = self._counts(self._window)
        if self._merging is not None:
            reason = f"making version {self._merging.version}; {counts.arrived} updates for the next one so far"
        else:
            reason = self._verdict.reason if self._verdict is not None else ""
        return {"reason": reason, "closes_at": self.closes_at, **counts.status(), "live": self._members.live()}
