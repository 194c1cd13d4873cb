"""A scripted parent decides what each call answers and when; the tests wait for conditions, never for time to pass."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fleetddp.common.errors import GaveUp, Reason, Refused, StorageError, Unreachable
from fleetddp.common.events import ByteRange, Heard, Heartbeat, Join, Joined, News
from fleetddp.common.layout import Layout
from fleetddp.common.transport import Parent, Sink
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.transport.session import Session
from fleetddp.common.update import NO_VERSION, Receipt, Slice, State, Tier, UpdateHeader, UpdateId, Version

WAIT_S = 10.0  # no test waits so long unless it fails
FIRST = UpdateId("edge-1", 7, 1)
SECOND = UpdateId("edge-1", 7, 2)
JOIN = Join(node="edge-1", tier=Tier.EDGE, incarnation=7)


def joined(version: int = 3, *, heartbeat_s: float = 1000.0, receipts: tuple[Receipt, ...] = (), finished: str = "") -> Joined:
    return Joined(
        run="fleet",
        version=version,
        layout="",
        wants_init=False,
        heartbeat_s=heartbeat_s,
        lease_s=2000.0,
        gradient_lr=0.01,
        max_staleness=10,
        codecs=("float32",),
        receipts=receipts,
        finished=finished,
    )


def heard(version: int = 3, *, receipts: tuple[Receipt, ...] = (), finished: str = "", closes_at: float = 0.0) -> Heard:
    return Heard(version=version, receipts=receipts, finished=finished, closes_at=closes_at)


def accepted(update_id: UpdateId) -> Receipt:
    return Receipt(update_id=update_id, state=State.ACCEPTED)


class ScriptedParent:
    """Each call waits for the test to ``answer`` it; ``asked`` hands the test what the session sent."""

    def __init__(self) -> None:
        self._asked: dict[str, queue.Queue[Any]] = {}
        self._answers: dict[str, queue.Queue[Any]] = {}
        self._lock = threading.Lock()

    def _queue(self, of: dict[str, queue.Queue[Any]], name: str) -> queue.Queue[Any]:
        with self._lock:
            return of.setdefault(name, queue.Queue())

    def asked(self, name: str) -> Any:
        return self._queue(self._asked, name).get(timeout=WAIT_S)

    def answer(self, name: str, *answers: Any) -> None:
        for answer in answers:
            self._queue(self._answers, name).put(answer)

    def _call(self, name: str, request: Any) -> Any:
        self._queue(self._asked, name).put(request)
        answer = self._queue(self._answers, name).get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def join(self, request: Join) -> Joined:
        return self._call("join", request)  # type: ignore[no-any-return]

    def heartbeat(self, request: Heartbeat) -> Heard:
        return self._call("heartbeat", request)  # type: ignore[no-any-return]

    def leave(self, node: str, incarnation: int) -> None:
        self._call("leave", (node, incarnation))

    def watch(self, node: str, incarnation: int, after_version: int) -> Iterator[News]:
        self._queue(self._asked, "watch").put((node, incarnation, after_version))
        while True:
            news = self._queue(self._answers, "watch").get()
            if isinstance(news, Exception):
                raise news
            yield news

    def close(self) -> None:
        """Let every thread that still waits for an answer go."""
        for name in ("join", "heartbeat", "leave", "watch"):
            self.answer(name, *[Unreachable("the test is over")] * 3)

    def layout(self) -> Layout:
        raise NotImplementedError

    def pull(self, version: int, ranges: Sequence[ByteRange], sink: Sink) -> Version:
        raise NotImplementedError

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        raise NotImplementedError

    def status(self) -> dict[str, Any]:
        raise NotImplementedError


class Receipts:
    """Where ``on_receipt`` puts them."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Receipt] = queue.Queue()

    def next(self) -> Receipt:
        return self.queue.get(timeout=WAIT_S)


@pytest.fixture
def parent() -> Iterator[ScriptedParent]:
    scripted = ScriptedParent()
    yield scripted
    scripted.close()


@pytest.fixture
def begin(parent: ScriptedParent) -> Iterator[Callable[..., Session]]:
    """Start sessions that are stopped at the end of the test."""
    sessions: list[Session] = []

    def start(**options: Any) -> Session:
        as_parent: Parent = parent
        session = Session(as_parent, JOIN, rng=random.Random(1), retry_cap_s=0.01, **options)
        sessions.append(session)
        session.start()
        return session

    yield start
    for session in sessions:
        session.stop(leave=False)


def test_join_is_tried_until_it_works(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", Unreachable("refused"), Refused(Reason.STORAGE, "disk full"), joined(5))
    session = begin()
    answer = session.joined(WAIT_S)
    assert answer is not None
    assert answer.version == session.version == 5
    assert [parent.asked("join").node for _ in range(3)] == ["edge-1"] * 3


def test_the_bell_rings_when_a_version_is_known_and_at_a_failure(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    bell = threading.Event()
    parent.answer("join", joined(5))
    session = begin(bell=bell)
    assert bell.wait(WAIT_S)
    assert session.version == 5
    bell.clear()
    parent.answer("heartbeat", Refused(Reason.SUPERSEDED, "no"))
    session.hurry()
    while session.failure is None:
        assert bell.wait(WAIT_S)
        bell.clear()


def test_a_session_that_finds_no_parent_gives_up_when_it_was_told_to(
    parent: ScriptedParent, begin: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    parent.answer("join", *[Unreachable("gone")] * 100)
    session = begin(give_up_s=0.05)
    with pytest.raises(
        GaveUp, match=r"edge-1: no parent has answered for \d+ s \(give_up_s: 0.05\); perhaps the run is over: gone"
    ):
        session.joined(WAIT_S)
    assert isinstance(session.failure, GaveUp)
    assert "the session has ended" in caplog.text


def test_joined_times_out() -> None:
    parent = ScriptedParent()
    session = Session(parent, JOIN)
    session.start()
    assert session.joined(0.001) is None
    session.stop(leave=False)
    parent.close()


def test_joined_returns_when_the_session_is_stopped(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    session = begin()
    parent.asked("join")  # and never answered
    waiter: queue.Queue[Joined | None] = queue.Queue()
    threading.Thread(target=lambda: waiter.put(session.joined()), daemon=True).start()
    session.stop(leave=True)
    assert waiter.get(timeout=WAIT_S) is None


@pytest.mark.parametrize("reason", [Reason.WRONG_RUN, Reason.WRONG_LAYOUT, Reason.WRONG_IDENTITY, Reason.SUPERSEDED])
def test_a_final_refusal_to_join_ends_the_session(
    parent: ScriptedParent, begin: Callable[..., Session], reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    parent.answer("join", Refused(reason, "no"))
    session = begin()
    with pytest.raises(Refused) as raised:
        session.joined(WAIT_S)
    assert raised.value.reason is reason
    with pytest.raises(Refused):
        session.wait_version(0, WAIT_S)
    assert session.failure is raised.value
    assert "the session has ended" in caplog.text


def test_heartbeats_ask_about_open_updates_and_carry_the_base(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    open_updates = [FIRST]
    receipts = Receipts()
    parent.answer("join", joined(heartbeat_s=0.001, receipts=(accepted(FIRST),)))
    session = begin(open_updates=lambda: open_updates, on_receipt=receipts.queue.put)
    assert parent.asked("join").open == (FIRST,)
    assert receipts.next() == accepted(FIRST)
    first = parent.asked("heartbeat")
    assert (first.node, first.incarnation, first.open, first.base_version) == ("edge-1", 7, (FIRST,), NO_VERSION)
    session.base_version = 3
    open_updates.append(SECOND)
    parent.answer("heartbeat", heard(receipts=(accepted(SECOND),), closes_at=99.0))
    assert receipts.next() == accepted(SECOND)
    second = parent.asked("heartbeat")
    assert (second.open, second.base_version) == ((FIRST, SECOND), 3)
    assert session.closes_at == 99.0


def test_a_forgotten_member_joins_again_with_its_run(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(4, heartbeat_s=0.001))
    session = begin()
    assert parent.asked("join").run == ""
    parent.answer("heartbeat", Unreachable("connection refused"), Refused(Reason.UNKNOWN_NODE, "who?"))
    assert parent.asked("join").run == "fleet"
    parent.answer("join", joined(2, heartbeat_s=0.001))
    parent.asked("heartbeat")
    parent.asked("heartbeat")
    parent.asked("heartbeat")  # after the second join
    assert session.version == 2  # the parent was restored from a backup: what it says counts
    first = session.joined()
    assert first is not None
    assert first.version == 4


def test_a_superseded_process_stops(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(heartbeat_s=0.001))
    parent.answer("heartbeat", Refused(Reason.SUPERSEDED, "incarnation 8 joined"))
    session = begin()
    with pytest.raises(Refused, match="SUPERSEDED: incarnation 8 joined"):
        session.wait_version(100, WAIT_S)


def test_a_refused_heartbeat_is_repeated_without_its_metrics(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined())
    session = begin()
    session.joined(WAIT_S)
    session.report({"accuracy": 0.5}, 3)
    assert parent.asked("heartbeat").metrics == {"accuracy": 0.5}
    parent.answer("heartbeat", Refused(Reason.MALFORMED, "metrics"))
    assert parent.asked("heartbeat").metrics == {}
    assert session.failure is None


def test_metrics_of_a_version_are_reported_at_once_and_until_heard(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined())  # the next regular heartbeat is 1000 s away
    session = begin()
    session.joined(WAIT_S)
    session.report({"loss": 2.0})
    session.report({"accuracy": 0.9}, 3)
    first = parent.asked("heartbeat")
    assert (first.metrics_version, first.metrics) == (NO_VERSION, {"loss": 2.0})
    parent.answer("heartbeat", Unreachable("lost"), heard())
    again = parent.asked("heartbeat")
    assert again.metrics == first.metrics
    last = parent.asked("heartbeat")
    assert (last.metrics_version, last.metrics) == (3, {"accuracy": 0.9})


def test_news_wakes_who_waits_for_a_version(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(3))
    receipts = Receipts()
    session = begin(on_receipt=receipts.queue.put)
    assert parent.asked("watch") == ("edge-1", 7, 3)
    assert session.wait_version(2, WAIT_S) == 3
    assert session.wait_version(3, 0.001) is None
    waiter: queue.Queue[int | None] = queue.Queue()
    threading.Thread(target=lambda: waiter.put(session.wait_version(3)), daemon=True).start()
    merged = Receipt(update_id=FIRST, state=State.MERGED, version=4)
    parent.answer("watch", News(version=4, receipts=(merged,), closes_at=5.0))
    assert waiter.get(timeout=WAIT_S) == 4
    assert receipts.queue.get_nowait() == merged  # delivered before anybody is woken
    assert session.closes_at == 5.0


def test_a_broken_news_stream_is_opened_again_and_the_parent_asked(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(3))
    session = begin()
    assert parent.asked("watch") == ("edge-1", 7, 3)
    parent.answer("watch", News(version=6), Unreachable("reset"))
    assert parent.asked("watch") == ("edge-1", 7, 6)
    parent.asked("heartbeat")  # not 1000 s later: a restarted parent may have forgotten us
    parent.answer("heartbeat", Refused(Reason.UNKNOWN_NODE, "who?"))
    parent.asked("join")
    assert parent.asked("join").incarnation == 7
    assert session.failure is None


def test_silence_is_measured_from_the_last_answer(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(3))
    session = begin()
    session.joined(WAIT_S)
    parent.asked("watch")
    before = time.monotonic()
    parent.answer("watch", News(version=4))
    session.wait_version(3, WAIT_S)
    assert 0 <= session.silent_s <= time.monotonic() - before


def test_the_end_of_the_run_reaches_who_waits(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(3))
    session = begin()
    session.joined(WAIT_S)
    waiter: queue.Queue[int | None] = queue.Queue()
    threading.Thread(target=lambda: waiter.put(session.wait_version(3)), daemon=True).start()
    parent.answer("watch", News(version=3, finished="20 versions are made"))
    assert waiter.get(timeout=WAIT_S) is None
    assert session.finished == "20 versions are made"


def test_joining_a_finished_run(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(9, finished="the time is up"))
    session = begin()
    answer = session.joined(WAIT_S)
    assert answer is not None
    assert session.finished == "the time is up"
    assert session.wait_version(8, WAIT_S) == 9


def test_a_second_stop_waits_for_the_first_to_take_leave(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(3))
    session = begin()
    session.joined(WAIT_S)
    first = threading.Thread(target=session.stop, kwargs={"leave": True})
    first.start()
    parent.asked("leave")
    second = threading.Thread(target=session.stop, kwargs={"leave": True})
    second.start()
    second.join(0.2)
    assert second.is_alive()  # its caller would close the parent under the first one's leave
    parent.answer("leave", None)
    for stopping in (first, second):
        stopping.join(WAIT_S)
        assert not stopping.is_alive()


def test_stop_takes_leave_once_and_delivers_nothing_afterwards(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(3))
    parent.answer("leave", None)
    receipts = Receipts()
    session = begin(on_receipt=receipts.queue.put)
    session.joined(WAIT_S)
    parent.asked("watch")
    session.stop(leave=True)
    session.stop(leave=True)
    assert parent.asked("leave") == ("edge-1", 7)
    parent.answer("watch", News(version=4, receipts=(accepted(FIRST),)))
    names = {"fleetddp_stay", "fleetddp_follow"}
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join(WAIT_S)
            assert not thread.is_alive()
    assert receipts.queue.empty()
    with pytest.raises(queue.Empty):
        parent._asked["leave"].get_nowait()


def test_a_leave_that_gets_lost_is_no_error(parent: ScriptedParent, begin: Callable[..., Session]) -> None:
    parent.answer("join", joined(3))
    parent.answer("leave", Unreachable("gone"))
    session = begin()
    session.joined(WAIT_S)
    session.stop(leave=True)


def test_a_fault_in_a_callback_is_raised_to_the_member(
    parent: ScriptedParent, begin: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(receipt: Receipt) -> None:
        raise StorageError("the outbox's disk is full")

    parent.answer("join", joined(3, receipts=(accepted(FIRST),)))
    session = begin(on_receipt=fail)
    with pytest.raises(StorageError, match="disk is full"):
        session.joined(WAIT_S)
    assert "disk is full" in caplog.text


def test_the_same_trouble_is_logged_once(
    parent: ScriptedParent, begin: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    parent.answer("join", Unreachable("refused"), Unreachable("refused"), Unreachable("refused"), joined(3))
    begin().joined(WAIT_S)
    parent.asked("watch")
    session_log = [r.message for r in caplog.records if r.name.endswith("session")]
    assert session_log.count("edge-1: refused") == 1


def test_backoff_doubles_up_to_its_cap_and_is_jittered() -> None:
    class Highest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return b

    class Lowest(random.Random):
        def uniform(self, a: float, b: float) -> float:
            return a

    most, least = Backoff(Highest(), first_s=0.1, cap_s=1.0), Backoff(Lowest(), first_s=0.1, cap_s=1.0)
    assert [most.delay() for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0])
    assert [least.delay() for _ in range(6)] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.5, 0.5])
    most.reset()
    assert most.delay() == pytest.approx(0.1)
    drawn = [Backoff(random.Random(seed), first_s=1.0, cap_s=1.0).delay() for seed in range(100)]
    assert len(set(drawn)) == 100
    assert all(0.5 <= d <= 1.0 for d in drawn)
