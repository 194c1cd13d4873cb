"""What a driver does with effects, in which order, and what it keeps; the aggregator is played by a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from helpers.steering import header, part, uid, version

from fleetddp.common.clock import VirtualClock
from fleetddp.common.config import FleetConfig, MembersConfig
from fleetddp.common.driver import RETRY_MAX_S, Driver, answered
from fleetddp.common.errors import FleetError, Reason, Refused, StorageError
from fleetddp.common.events import (
    Announce,
    Decision,
    Effect,
    Ended,
    Event,
    Left,
    Merge,
    News,
    Offer,
    Persist,
    Persisted,
    PersistFailed,
    Progressed,
    Published,
    Reply,
    Settle,
    Tick,
    Wake,
)
from fleetddp.common.host import Lane
from fleetddp.common.news import MAX_RECEIPTS, Watcher
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport.memory import InlineHost
from fleetddp.common.update import Receipt, State, Update, UpdateId, Version

OFFER = Offer(header=header(uid("a")), slice=part())
REFUSED = Receipt(update_id=uid("a"), state=State.REFUSED, reason=Reason.NOT_FINITE.value, message="nan")
EXPIRED = Receipt(update_id=uid("a"), state=State.EXPIRED, reason=Reason.FINISHED.value, message="over")


class Script:
    """Stands for the aggregator, the journal and the host: notes what the driver does; disk work waits."""

    version, finished, closes_at, layout = 0, "", 0.0, None

    def __init__(self, stall_s: float = 20.0) -> None:
        self.config = FleetConfig(members=MembersConfig(stall_s=stall_s))
        self.effects: list[Effect] = []  # of the next event
        self.events: list[Event] = []
        self.log: list[str] = []
        self.full = False  # the disk
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.clock = VirtualClock()
        me = cast(Any, self)
        self.driver = Driver(me, me, me, me, clock=self.clock, host=me, telemetry=Telemetry())

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        effects, self.effects = self.effects, []
        return effects

    def ended(self, reason: str) -> None:
        if self.full:
            raise StorageError("no space left")
        self.log.append("journaled")

    def submit(self, lane: Lane, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.log.append("submitted")

    def later(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        self.timers.append((seconds, call))
        return lambda: None


def test_the_end_is_durable_before_anybody_is_told_that_an_update_expired() -> None:
    script = Script()
    script.driver.wait(uid("a"), lambda receipt: script.log.append(receipt.state.value))
    script.effects = [Ended(reason="over"), Settle(receipts=(EXPIRED,))]
    script.driver.handle(Tick())
    assert script.log == ["journaled", "expired"]


def test_an_end_that_the_disk_refused_is_journaled_later() -> None:
    script = Script()
    script.full = True
    script.effects = [Ended(reason="over")]
    script.driver.handle(Tick())
    script.full = False
    ((seconds, again),) = script.timers
    assert (seconds, script.log) == (RETRY_MAX_S, [])
    again()
    assert script.log == ["journaled"]


def test_bytes_are_told_now_and_then_and_only_of_what_is_arriving() -> None:
    script = Script(stall_s=2.0)
    script.driver.arrived(uid("a"), 10)  # never let in
    script.driver.open(OFFER, lambda stream: None)
    for _ in range(10):
        script.driver.arrived(uid("a"), 10)
        script.clock.advance(0.2)
    # a quarter of stall_s at most between two: else a transfer that moves would be taken for one that stands still
    assert script.events == [Progressed(update_id=uid("a"))] * 4
    script.effects = [Settle(receipts=(REFUSED,))]
    script.driver.handle(Tick())
    script.events.clear()
    script.driver.arrived(uid("a"), 10)  # chunks that were on their way
    assert script.events == []
    assert script.driver._progress == {}


def test_a_status_holds_so_many_members_as_fit_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    asked: list[int] = []

    def status(now: float, most: int) -> dict[str, Any]:
        asked.append(most)
        return {"members": ["x" * 3000] * most, "counters": {}}

    monkeypatch.setattr(script, "status", status, raising=False)
    assert len(script.driver.status()["members"]) == 250  # 500 would be one and a half MB
    assert asked == [1000, 500, 250]


def test_a_restarted_coordinator_shows_the_versions_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    kept = tuple(version(number) for number in (3, 4))
    monkeypatch.setattr(script, "versions", lambda: kept, raising=False)
    monkeypatch.setattr(script, "start", lambda now: [], raising=False)
    script.driver.start()
    assert script.driver.telemetry._version == 4  # the gauge, not -1 until the next version
    assert [(v, reason) for v, reason in script.driver._versions] == [(v, "") for v in kept]


def test_a_timer_that_is_early_is_set_again() -> None:
    script = Script()
    script.effects = [Wake(at=5.0)]
    script.driver.handle(Tick())
    script.events.clear()
    script.clock.advance(4.75)
    script.timers.pop()[1]()
    assert script.events == []  # too early for the aggregator: nothing has changed, and it would not ask again
    script.clock.advance(0.25)
    ((seconds, fire),) = script.timers
    assert seconds == 0.25
    fire()
    assert script.events == [Tick()]


def test_timers_in_memory_fire_in_order_and_a_cancelled_one_never() -> None:
    clock, fired = VirtualClock(), []
    host = InlineHost(clock)
    host.later(2, lambda: fired.append("second"))
    host.later(1, lambda: fired.append("first"))
    cancel = host.later(1, lambda: fired.append("cancelled"))
    cancel()
    host.later(2, lambda: fired.append("third"))
    clock.advance(2)
    host.run_due()
    cancel()  # too late; nothing of it is kept
    assert fired == ["first", "second", "third"]
    assert host._timers == []


class Broken(Script):
    """Some disk work fails, some events do: as often as told. Disk work is done at once, as the host of a simulation does it."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0  # of the events or the disk work to come
        self.answers: list[list[Effect]] = []  # effects of the events to come, one list each

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        if self.failures and isinstance(event, Tick):
            self.failures -= 1
            raise ZeroDivisionError("a defect")
        return self.answers.pop(0) if self.answers else []

    def submit(self, lane: Lane, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        try:
            outcome = work()
        except Exception as error:
            outcome = error
        done(outcome)

    def accept(self, update: Update, at: float) -> None:
        self._disk("accept")

    def merge(self, decision: Decision) -> Version:
        self._disk("merge")
        return VERSION

    def opened(self, at: float) -> None:
        self._disk("opened")

    def sweep(self) -> None:
        self._disk("sweep")

    def discard(self, update_id: UpdateId) -> None:
        self._disk("discard")

    def versions(self) -> tuple[Version, ...]:
        return ()

    def _disk(self, what: str) -> None:
        if self.failures:
            self.failures -= 1
            raise StorageError("no space left")
        self.log.append(what)


VERSION = Version(number=1, layout="", codec="float32", payload_bytes=0, digest=0, published_at=0.0)
UPDATE = Update(header=header(uid("a")), samples=1.0, squared_norm=0.0, payload_bytes=0, slices=())
MERGE = Merge(decision=Decision(version=1, at=0.0, terms=(), ids=(), leaf_ids=(), reason="quorum"))


def test_a_defect_in_one_event_is_answered_and_counted_and_the_next_event_is_handled(caplog: pytest.LogCaptureFixture) -> None:
    script = Broken()
    script.failures = 1
    with pytest.raises(FleetError, match="the coordinator failed on this request"):
        script.driver.handle(Tick())
    assert "the aggregator failed on Tick" in caplog.text
    script.answers = [[Reply(value=Left())]]
    assert script.driver.handle(Tick()) == Left()
    assert script.driver.telemetry.totals()["failed"] == 1


def test_an_effect_that_fails_keeps_none_of_the_others_back(caplog: pytest.LogCaptureFixture) -> None:
    script = Broken()
    heard: list[Receipt] = []

    def burst(receipt: Receipt) -> None:
        raise ZeroDivisionError("a waiter's defect")

    script.driver.wait(uid("a"), burst)
    script.driver.wait(uid("b"), heard.append)
    other = Receipt(update_id=uid("b"), state=State.ACCEPTED)
    script.answers = [[Settle(receipts=(REFUSED,)), Settle(receipts=(other,)), Reply(value=Left())]]
    assert script.driver.handle(Tick()) == Left()
    assert heard == [other]
    assert "the effect Settle failed" in caplog.text


def test_disk_work_comes_back_as_an_event_after_all_effects_of_the_first() -> None:
    script = Broken()
    script.driver.wait(uid("a"), lambda receipt: script.log.append("settled"))
    script.answers = [[Persist(update=UPDATE, at=0.0), Settle(receipts=(REFUSED,))]]
    script.driver.handle(Tick())
    assert script.log == ["accept", "settled"]
    assert script.events == [Tick(), Persisted(update=UPDATE)]


def test_what_the_disk_refused_is_told_to_the_aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(update: Update, at: float) -> None:
        raise StorageError("no space left")

    script = Broken()
    monkeypatch.setattr(script, "accept", accept)
    script.answers = [[Persist(update=UPDATE, at=0.0)]]
    script.driver.handle(Tick())
    assert script.events == [Tick(), PersistFailed(update=UPDATE, message="no space left")]


def test_a_merge_that_the_disk_refuses_is_tried_again_with_growing_pauses() -> None:
    script = Broken()
    script.failures = 7
    script.driver._carry_out_all([MERGE])
    while script.timers:
        assert script.events == []
        seconds, again = script.timers.pop()
        script.log.append(f"{seconds:g} s")
        again()
    assert script.log == ["1 s", "2 s", "4 s", "8 s", "16 s", "30 s", "30 s", "merge", "sweep"]
    assert script.events == [Published(version=VERSION)]
    assert list(script.driver._versions) == [(VERSION, "quorum")]


def test_the_earliest_wake_up_wins() -> None:
    script = Script()
    for at in (20.0, 5.0, 10.0):
        script.effects = [Wake(at=at)]
        script.driver.handle(Tick())
    assert [seconds for seconds, _ in script.timers] == [20.0, 5.0]
    script.events.clear()
    script.clock.advance(5.0)
    script.effects = [Wake(at=10.0)]
    script.timers[1][1]()
    assert script.events == [Tick()]
    assert script.timers[2][0] == 5.0


def test_a_stopped_driver_does_nothing_more() -> None:
    script = Broken()
    script.answers = [[Wake(at=1.0)]]
    script.driver.handle(Tick())
    script.events.clear()
    script.driver.stop()
    script.timers[0][1]()
    script.driver._carry_out_all([MERGE, Persist(update=UPDATE, at=0.0)])
    assert script.events == []
    assert script.log == ["accept"]  # its promise was not given to anybody; the journal may hold it


def test_who_no_longer_waits_is_not_told_and_leaves_nothing_behind() -> None:
    script = Script()
    told: list[str] = []
    first = script.driver.wait(uid("a"), lambda receipt: told.append("first"))
    second = script.driver.wait(uid("a"), lambda receipt: told.append("second"))
    first()
    script.effects = [Settle(receipts=(REFUSED,))]
    script.driver.handle(Tick())
    second()
    assert told == ["second"]
    assert script.driver._waiters == {}


def test_an_update_that_is_being_made_durable_settles_nobody() -> None:
    script = Script()
    told: list[State] = []
    script.driver.wait(uid("a"), lambda receipt: told.append(receipt.state))
    for state in (State.STAGED, State.ACCEPTED):
        script.effects = [Settle(receipts=(Receipt(update_id=uid("a"), state=state),))]
        script.driver.handle(Tick())
    assert told == [State.ACCEPTED]


def test_watchers_hear_of_versions_and_of_their_own_receipts() -> None:
    script = Script()
    bells: list[str] = []
    one = script.driver.watch("a", 0, lambda: bells.append("a"))
    other = script.driver.watch("b", -1, lambda: bells.append("b"))
    assert (one.take(), other.take()) == (None, News(version=0))
    script.effects = [Settle(receipts=(REFUSED,)), Announce(version=0)]
    script.driver.handle(Tick())
    assert (one.take(), other.take()) == (News(version=0, receipts=(REFUSED,)), News(version=0))
    assert (one.take(), other.take()) == (None, None)
    assert bells == ["b", "a", "a", "b"]
    script.driver.unwatch(one)
    script.driver.unwatch(other)
    assert script.driver._watchers == {}


def test_a_watcher_that_does_not_take_its_news_keeps_the_newest_receipts() -> None:
    watcher = Watcher("a", lambda: None)
    receipts = [Receipt(update_id=uid("a", sequence), state=State.ACCEPTED) for sequence in range(MAX_RECEIPTS + 5)]
    for receipt in receipts:
        watcher.put(News(version=3, receipts=(receipt,)))
    settled = Receipt(update_id=uid("a", MAX_RECEIPTS), state=State.MERGED, version=4)
    watcher.put(News(version=4, receipts=(settled,)))
    news = watcher.take()
    assert news is not None
    assert news.version == 4
    assert len(news.receipts) == MAX_RECEIPTS
    assert news.receipts[-1] == settled
    assert receipts[4] not in news.receipts


@pytest.mark.parametrize(
    ("receipt", "reason"),
    [
        (REFUSED, Reason.NOT_FINITE),
        (Receipt(update_id=uid("a"), state=State.UNKNOWN, reason="STORAGE", message="full"), Reason.STORAGE),
        (Receipt(update_id=uid("a"), state=State.UNKNOWN), Reason.STALLED),
    ],
)
def test_a_receipt_that_says_no_is_a_refusal(receipt: Receipt, reason: Reason) -> None:
    with pytest.raises(Refused) as refused:
        answered(receipt)
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    "receipt",
    [
        Receipt(update_id=uid("a"), state=State.ACCEPTED, duplicate=True),
        EXPIRED,
        Receipt(update_id=uid("a"), state=State.REFUSED, reason="OVERLAP", overlap=(uid("b"),)),
    ],
)
def test_any_other_receipt_is_the_answer(receipt: Receipt) -> None:
    assert answered(receipt) is receipt
