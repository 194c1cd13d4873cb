"""What a driver does with effects, in which order, and what it keeps; the aggregator is played by a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from helpers.steering import header, part, uid

from fleetddp.common.clock import VirtualClock
from fleetddp.common.config import FleetConfig, MembersConfig
from fleetddp.common.driver import RETRY_MAX_S, Driver, Lane
from fleetddp.common.errors import Reason, StorageError
from fleetddp.common.events import Effect, Ended, Event, Offer, Progressed, Settle, Tick
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.transport.memory import InlineHost
from fleetddp.common.update import Receipt, State

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
