"""The aggregator's invariants (design §11) under random members, a disk that is slow or dies, and crashes at any moment."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from helpers.steering import LAYOUT, Steered, fleet, header, init, part, uid, version
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fleetddp.common import events
from fleetddp.common.aggregator import Aggregator
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.recovered import Recovered
from fleetddp.common.update import NO_VERSION, Kind, Receipt, Slice, State, Tier, Update, UpdateHeader, UpdateId

NODES = ("paris", "e1", "e2", "e3")
TIERS = {"paris": Tier.SITE}
STALENESS = 2
HALVES = (
    part(samples=2.0, intervals=((0, 1536),), digest=1),
    part(samples=1.0, intervals=((1536, 3100), (3584, 3591)), digest=2),
)
WINDOWS: list[dict[str, Any]] = [
    {"preset": "sync"},
    {"preset": "semi_sync", "quorum": 0.5, "deadline_s": 30, "require": ["site"]},
    {"preset": "semi_sync", "quorum": 0.5, "deadline_s": 20, "min_updates": 2},
    {"preset": "async"},
    {"preset": "fedbuff", "quorum": 3},
    {"preset": "periodic", "deadline_s": 10},
]


@dataclass
class Disk:
    """A journal in memory: what was done survives a crash, what was only asked for does not."""

    rows: dict[UpdateId, Update] = field(default_factory=dict)
    high_water: dict[tuple[str, int], int] = field(default_factory=dict)
    merged: dict[UpdateId, int] = field(default_factory=dict)
    decision: events.Decision | None = None
    number: int = NO_VERSION
    opened_at: float | None = None
    finished: str = ""
    versions: list[tuple[UpdateId, ...]] = field(default_factory=list)  # what each version holds

    def do(self, effect: events.Effect, now: float) -> events.Event | None:
        """Carry it out; returns what to report."""
        if isinstance(effect, events.Persist):
            update_id = effect.update.update_id
            self.rows[update_id] = effect.update
            mark = update_id[:2]
            self.high_water[mark] = max(self.high_water.get(mark, -1), update_id.sequence)
            return events.Persisted(update=effect.update)
        if isinstance(effect, events.Discard):
            self.rows.pop(effect.update_id, None)
        elif isinstance(effect, events.Opened):
            self.opened_at = effect.at
        elif isinstance(effect, events.Ended):
            self.finished = effect.reason
        elif isinstance(effect, events.Found):
            return self.publish((effect.update.update_id,), now)
        elif isinstance(effect, events.Merge):
            if self.decision is None:
                self.decision, self.opened_at = effect.decision, effect.decision.at
                return None  # the making of it is asked for next
            assert self.decision == effect.decision, "a decision changed after it was journaled"
            self.decision = None
            return self.publish(effect.decision.ids, now)
        return None

    def publish(self, ids: tuple[UpdateId, ...], now: float) -> events.Event:
        self.number += 1
        for update_id in ids:
            assert update_id not in self.merged, f"{update_id} is merged twice"
            del self.rows[update_id]
            self.merged[update_id] = self.number
        self.versions.append(ids)
        return events.Published(version=version(self.number, now))

    def recover(self) -> Recovered:
        return Recovered(
            run="fleet",
            layout=LAYOUT if self.number >= 0 or self.rows else None,
            version=version(self.number) if self.number >= 0 else None,
            window_opened_at=self.opened_at,
            accepted=tuple(self.rows.values()),
            decision=self.decision,
            high_water=dict(self.high_water),
            merged=dict(self.merged),
            finished=self.finished,
        )


class Fleet(RuleBasedStateMachine):
    """Four members that push in sequence order and again after a crash; a disk that takes its time; time that passes."""

    nodes = st.sampled_from(NODES)

    @initialize(window=st.sampled_from(WINDOWS), ends=st.booleans(), founded=st.sampled_from([True, True, True, False]))
    def begin(self, window: dict[str, Any], ends: bool, founded: bool) -> None:
        self.config = fleet(
            window=window,
            members={"heartbeat_s": 2, "lease_s": 8, "stall_s": 3, "sites": ["paris"]},
            merge={"staleness": {"max_staleness": STALENESS}},
            limits={"max_norm": 10.0},
            until={"versions": 4} if ends else {},
        )
        self.now = 0.0
        self.disk = Disk(number=0, versions=[()]) if founded else Disk()
        self.incarnation = dict.fromkeys(NODES, 1)
        self.sequence = dict.fromkeys(NODES, 0)
        self.open: dict[str, UpdateHeader] = {}  # a member's update that is neither acknowledged nor refused
        self.headers: dict[UpdateId, UpdateHeader] = {}
        self.streams: dict[UpdateId, tuple[Slice, ...]] = {}
        self.acknowledged: set[UpdateId] = set()
        self.final: dict[UpdateId, Receipt] = {}
        self.boot()

    def boot(self) -> None:
        self.asked: deque[events.Effect] = deque()
        self.done: deque[events.Event] = deque()
        self.wake_at = math.inf
        self.started_from, self.started_at = self.disk.recover(), self.now
        self.history: list[tuple[events.Event, float, list[events.Effect]]] = []
        self.aggregator = Aggregator(self.config, self.started_from)
        decision = self.disk.decision
        self.take(None, self.aggregator.start(self.now))
        if decision is not None:
            issued = [e.decision for e in self.asked if isinstance(e, events.Merge)]
            assert issued == [decision], "a journaled decision is issued again as it was"

    # ---- the driver ---------------------------------------------------------------------------------------------------------

    def send(self, event: events.Event) -> Any:
        effects = self.aggregator.handle(event, self.now)
        self.history.append((event, self.now, effects))
        return self.take(event, effects)

    def take(self, event: events.Event | None, effects: list[events.Effect]) -> Any:
        replies = [e.value for e in effects if isinstance(e, events.Reply)]
        needs_one = isinstance(event, (events.Join, events.Heartbeat, events.Leave, events.Offer))
        assert len(replies) == (1 if needs_one else 0)
        for effect in effects:
            if isinstance(effect, events.Settle):
                for receipt in effect.receipts:
                    self.settled(receipt)
            elif isinstance(effect, events.Wake):
                self.wake_at = min(self.wake_at, effect.at)
            elif isinstance(effect, events.Merge):
                self.check_decision(effect.decision)
                known = self.disk.decision is not None
                self.asked.extend([effect] if known else [effect, effect])  # journal it, then make it
            elif isinstance(effect, (events.Persist, events.Found, events.Discard, events.Opened, events.Ended)):
                self.asked.append(effect)
        return replies[0] if replies else None

    def settled(self, receipt: Receipt) -> None:
        update_id = receipt.update_id
        before = self.final.get(update_id)
        assert before is None or (before.state, before.version) == (receipt.state, receipt.version), "settled in two ways"
        if receipt.state is State.ACCEPTED:
            assert update_id in self.disk.rows, "acknowledged before it was durable"
            self.acknowledged.add(update_id)
        elif receipt.state.final:
            assert receipt.state is not State.REFUSED or update_id not in self.acknowledged, "refused after it was acknowledged"
            self.final[update_id] = receipt
        if receipt.state is not State.UNKNOWN and receipt.state is not State.STAGED:
            current = self.open.get(update_id.node)
            if current is not None and current.update_id == update_id:
                del self.open[update_id.node]

    def check_decision(self, decision: events.Decision) -> None:
        assert list(decision.ids) == sorted(set(decision.ids))
        assert decision.ids, "a version is made of something"
        assert [(t.update_id, t.row) for t in decision.terms] == sorted((t.update_id, t.row) for t in decision.terms)
        for update_id in decision.ids:
            head = self.headers[update_id]
            assert 0 <= decision.version - 1 - head.base_version <= STALENESS, "staler than its bound"

    # ---- what happens -------------------------------------------------------------------------------------------------------

    @rule(node=nodes)
    def join(self, node: str) -> None:
        self.send(events.Join(node=node, tier=TIERS.get(node, Tier.EDGE), incarnation=self.incarnation[node]))

    @rule(node=nodes)
    def restart_member(self, node: str) -> None:
        """A new process of it; its outbox still holds what is open."""
        self.incarnation[node] += 1
        self.join(node)

    @rule(node=nodes)
    def beat(self, node: str) -> None:
        mine = tuple(i for i in self.headers if i.node == node)
        answer = self.send(events.Heartbeat(node=node, incarnation=self.incarnation[node], open=mine))
        if isinstance(answer, events.Heard):
            for receipt in answer.receipts:
                if receipt.update_id in self.acknowledged:
                    assert receipt.state in (State.ACCEPTED, State.MERGED, State.EXPIRED)
        else:
            assert answer.reason is Reason.UNKNOWN_NODE

    @rule(node=nodes)
    def leave(self, node: str) -> None:
        self.send(events.Leave(node=node, incarnation=self.incarnation[node]))

    @rule(
        node=nodes,
        behind=st.sampled_from([0, 0, 0, 1, 2, 3]),
        bad=st.integers(0, 5),
        pieces=st.integers(1, 2),
        bring=st.integers(0, 4),
    )
    def push(self, node: str, behind: int, bad: int, pieces: int, bring: int) -> None:
        """Offer a new update, or the open one again, in one stream or two; bring some of them."""
        head = self.open.get(node)
        if head is None:
            update_id = UpdateId(node, self.incarnation[node], self.sequence[node])
            tier = TIERS.get(node, Tier.EDGE)
            if self.aggregator.version == NO_VERSION:
                head = init(update_id, tier=tier)
            else:
                head = header(update_id, tier=tier, base_version=max(0, self.aggregator.version - behind))
            self.sequence[node] += 1
            self.headers[update_id] = self.open[node] = head
            self.streams[update_id] = HALVES if pieces == 2 else (part(),)
        for index, piece in enumerate(self.streams[head.update_id]):
            answer = self.send(events.Offer(header=head, slice=piece))
            if isinstance(answer, Refused) and answer.reason is Reason.UNKNOWN_NODE:
                self.join(node)
                answer = self.send(events.Offer(header=head, slice=piece))
            if isinstance(answer, Receipt) or (isinstance(answer, Refused) and not answer.retry):
                if not isinstance(answer, Receipt) or answer.state is not State.STAGED:
                    reused = isinstance(answer, Refused) and answer.reason is Reason.ID_REUSED
                    if not reused:
                        self.open.pop(node, None)
                return
            if isinstance(answer, events.Proceed) and index < bring:
                self.send(events.Progressed(update_id=head.update_id))
                norm = 1e6 if bad == 5 and head.kind is not Kind.INIT else 1.0
                self.send(events.SliceStaged(update_id=head.update_id, slice=piece, squared_norm=norm))

    @rule(node=nodes, reason=st.sampled_from([Reason.BAD_CHECKSUM, Reason.STORAGE, Reason.TRUNCATED, Reason.NOT_FINITE]))
    def break_stream(self, node: str, reason: Reason) -> None:
        head = self.open.get(node)
        if head is not None:
            refusal = Refused(reason, "broken")
            self.send(events.SliceRejected(update_id=head.update_id, slice=part(), refusal=refusal))

    @precondition(lambda self: self.acknowledged)
    @rule(place=st.integers(0, 20))
    def repeat(self, place: int) -> None:
        """What was acknowledged is offered again: nothing changes."""
        update_id = sorted(self.acknowledged)[place % len(self.acknowledged)]
        before = self.aggregator.status(self.now)["window"]
        answer = self.send(events.Offer(header=self.headers[update_id], slice=part()))
        effects = self.history[-1][2]
        asked = (events.Persist, events.Merge, events.Settle, events.Discard, events.Found)
        if answer == Receipt(update_id=update_id, state=State.ACCEPTED, duplicate=True):
            assert update_id in self.disk.rows or update_id in self.disk.merged  # published, but not heard of yet
        elif isinstance(answer, Receipt):
            assert answer.duplicate
            assert answer.state in (State.MERGED, State.EXPIRED)
        else:
            assert answer.reason in (Reason.UNKNOWN_NODE, Reason.ID_REUSED)  # it had come in two streams
        after = self.aggregator.status(self.now)["window"]
        if self.now < self.wake_at:  # otherwise time does something as well
            assert not any(isinstance(e, asked) for e in effects)
            assert before == after

    @precondition(lambda self: self.asked or self.done)
    @rule(works=st.lists(st.integers(0, 9), max_size=4), reports=st.integers(0, 4))
    def work(self, works: list[int], reports: int) -> None:
        """The disk does some of what was asked (0: in vain), and the aggregator hears of some of it."""
        for luck in works:
            if self.asked:
                effect = self.asked.popleft()
                if isinstance(effect, events.Persist) and luck == 0:
                    self.done.append(events.PersistFailed(update=effect.update, message="disk full"))
                elif (event := self.disk.do(effect, self.now)) is not None:
                    self.done.append(event)
        for _ in range(reports):
            if self.done:
                self.send(self.done.popleft())

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0, 9.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; each wake-up that was asked for comes."""
        until = self.now + seconds
        while self.wake_at <= until:
            self.now, self.wake_at = max(self.now, self.wake_at), math.inf
            self.send(events.Tick())
        self.now = until

    @rule(luck=st.integers(0, 3))
    def crash(self, luck: int) -> None:
        if luck == 0:
            self.check_replay()
            self.boot()

    # ---- what holds ---------------------------------------------------------------------------------------------------------

    @invariant()
    def every_acknowledged_update_is_in_one_place(self) -> None:
        for update_id in self.acknowledged:
            assert (update_id in self.disk.rows) != (update_id in self.disk.merged), f"{update_id} is lost or twice"
            if update_id in self.disk.merged and update_id in self.final:
                assert self.final[update_id].version == self.disk.merged[update_id]

    @invariant()
    def versions_are_gapless(self) -> None:
        assert len(self.disk.versions) == self.disk.number + 1
        assert self.aggregator.version <= self.disk.number

    @invariant()
    def counts_are_those_of_a_recount(self) -> None:
        members = self.aggregator._members
        weights = [member.weights() for member in members._members.values()]
        totals = tuple(sum(column) for column in zip(*weights, strict=True)) if weights else (0, 0, 0)
        assert (members.expected, members.arrived, members.outstanding) == totals
        assert sum(members.live_by_tier.values()) == sum(member.live for member in members._members.values())

    @invariant()
    def an_idle_window_that_could_close_has_closed(self) -> None:
        """Whenever a window waits there is a reason for it, and a wake-up if time can end the wait."""
        aggregator = self.aggregator
        if aggregator._window is not None and aggregator._merging is None and self.now < self.wake_at:
            window = aggregator.status(self.now)["window"]
            assert window["quorum_at"] is None or window["outstanding"] > 0
            assert window["deadline_at"] is None or self.wake_at <= window["deadline_at"]

    def check_replay(self) -> None:
        """The same (event, now) give the same effects."""
        again = Aggregator(self.config, self.started_from)
        again.start(self.started_at)
        for event, now, effects in self.history:
            replayed = again.handle(event, now)
            assert [_comparable(e) for e in replayed] == [_comparable(e) for e in effects]

    def teardown(self) -> None:
        """While a quorum is reachable, versions advance; in the end everything acknowledged is settled."""
        if not hasattr(self, "disk"):
            return
        self.check_replay()
        goal = self.disk.number + 2
        for _ in range(12):
            for node in NODES:
                self.join(node)
                self.push(node, behind=0, bad=0, pieces=1, bring=2)
            while self.asked or self.done:
                self.work([1], 1)
            self.wait(9.0)
            if self.aggregator.finished or self.disk.number >= goal:
                break
        assert self.aggregator.finished or self.disk.number >= goal, self.aggregator.status(self.now)["window"]
        self.every_acknowledged_update_is_in_one_place()


def _comparable(effect: events.Effect) -> object:
    """Refusals are exceptions, which compare by identity."""
    if isinstance(effect, events.Reply) and isinstance(effect.value, Refused):
        return (effect.value.reason, effect.value.message)
    return effect


Fleet.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestFleet = Fleet.TestCase


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: "-".join(str(value) for value in window.values()))
def test_long_lives(window: dict[str, Any]) -> None:
    """The same machine through long lives, in which each thing happens about as often as it does in a bad week."""
    merged = decided = 0
    for seed in range(40):
        chance = random.Random(seed)
        machine = Fleet()
        machine.begin(window, ends=False, founded=seed % 4 > 0)
        for _ in range(250):
            decided += _live(machine, chance)
            machine.every_acknowledged_update_is_in_one_place()
            machine.versions_are_gapless()
            machine.counts_are_those_of_a_recount()
            machine.an_idle_window_that_could_close_has_closed()
        merged += len(machine.disk.merged)
        machine.teardown()
    assert merged > 400, "the lives were long, but little happened"
    assert decided >= 4, "hardly any crash left a decision to be carried out"


def _live(machine: Fleet, chance: random.Random) -> bool:
    """One thing happens; returns whether it was a crash that left a decision to be carried out."""
    node = chance.choice(NODES)
    match chance.choices(["push", "work", "wait", "beat", "repeat", "rare"], [40, 28, 10, 8, 4, 10])[0]:
        case "push":
            behind = chance.choices([0, 1, 2, 3], [70, 15, 10, 5])[0]
            machine.push(node, behind, chance.choice([0, 0, 0, 0, 0, 0, 0, 5]), chance.choice([1, 2]), chance.choice([1, 2, 2]))
        case "work":
            machine.work([chance.randrange(10) for _ in range(chance.randrange(4))], chance.randrange(4))
        case "wait":
            machine.wait(chance.choice([0.0, 0.5, 1.0, 2.0, 3.0, 9.0]))
        case "beat":
            machine.beat(node)
        case "repeat" if machine.acknowledged:
            machine.repeat(chance.randrange(1000))
        case "rare":
            match chance.randrange(5):
                case 0:
                    decided = machine.disk.decision is not None
                    machine.crash(luck=0)
                    return decided
                case 1:
                    machine.restart_member(node)
                case 2:
                    machine.leave(node)
                case _:
                    machine.break_stream(node, chance.choice([Reason.BAD_CHECKSUM, Reason.STORAGE, Reason.NOT_FINITE]))
    return False


# ---- the order of arrival ---------------------------------------------------------------------------------------------------

MANY = [uid(f"n{number}", sequence) for number in range(4) for sequence in range(2)]


def _decided(order: list[UpdateId]) -> events.Decision:
    steered = Steered.of(window={"preset": "fedbuff", "quorum": len(MANY)})
    steered.join(*{i.node: None for i in MANY})
    for place, update_id in enumerate(order):
        # weights that differ, and do not add up exactly, in floating point
        samples, loss = 0.1 + MANY.index(update_id), 1 / (1 + MANY.index(update_id))
        steered.at(place * 0.5).push(header(update_id, metrics={"loss": loss}), part(samples))
    return steered.merges()[0]


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(MANY))
def test_the_order_of_arrival_does_not_change_a_decision(order: list[UpdateId]) -> None:
    assert _decided(order) == replace(_decided(MANY), at=_decided(order).at)


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(6)))
def test_the_order_of_streams_does_not_change_an_update(order: list[int]) -> None:
    cuts = [0, 512, 1024, 1536, 2048, 2560, 3100]
    pieces = [
        part(samples=0.1 + n, intervals=((cuts[n], cuts[n + 1]),) + (((3584, 3591),) if n == 5 else ()), digest=n)
        for n in range(6)
    ]

    def update(indices: list[int]) -> Update:
        steered = Steered.of(window={"preset": "async"})
        steered.join("a")
        for n in indices:
            steered.offer(header(uid("a")), pieces[n])
        for n in reversed(indices):
            steered.staged(uid("a"), pieces[n], squared_norm=1 / (n + 1))
        return steered.all(events.Persist)[0].update

    assert update(order) == update([0, 1, 2, 3, 4, 5])


# ---- crash + resume equals no crash -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    senders=st.lists(st.sampled_from(NODES), min_size=3, max_size=14),
    crashes=st.sets(st.integers(0, 13)),
    quorum=st.integers(1, 4),
)
def test_a_crash_between_two_events_changes_no_decision(senders: list[str], crashes: set[int], quorum: int) -> None:
    """With a quorum by count: a fraction depends on who has come back when."""
    assume(crashes)

    def decisions(crashes: set[int]) -> list[events.Decision]:
        disk, config = Disk(number=0, versions=[()]), fleet(window={"quorum": quorum, "grace_s": 0, "deadline_s": 1e9})
        made: list[events.Decision] = []
        aggregator = Aggregator(config, disk.recover())

        def carry_out(effects: list[events.Effect], now: float) -> None:
            for effect in effects:
                if isinstance(effect, events.Merge):
                    made.append(effect.decision)
                    disk.do(effect, now)
                event = disk.do(effect, now)
                if event is not None:
                    carry_out(aggregator.handle(event, now), now)

        carry_out(aggregator.start(0.0), 0.0)
        for place, node in enumerate(senders):
            now = 1.0 + place
            if place in crashes:
                aggregator = Aggregator(config, disk.recover())
                carry_out(aggregator.start(now), now)
            for member in NODES:
                carry_out(aggregator.handle(events.Join(node=member, tier=Tier.EDGE, incarnation=1), now), now)
            head = header(uid(node, place), base_version=aggregator.version)
            for event in (
                events.Offer(header=head, slice=part()),
                events.SliceStaged(update_id=head.update_id, slice=part(), squared_norm=1.0),
            ):
                carry_out(aggregator.handle(event, now), now)
        return made

    assert decisions(crashes) == decisions(set())
