"""Members in threads of a test, on real uplinks: each pushes one marked update a version, and writes down what it is told."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import google_crc32c

from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import Refused, Unreachable
from fleetddp.common.events import ByteRange, Join, Joined
from fleetddp.common.transport import Parent, Sink
from fleetddp.common.transport.failover import Failover
from fleetddp.common.transport.session import Session
from fleetddp.common.transport.transfers import PushTransfer
from fleetddp.common.transport.uplink import Patience, Uplink
from fleetddp.common.update import Receipt, State, Tier, UpdateId, Version
from helpers.marks import push

PATIENCE_S = 60.0
STRIDE = 16  # members at most: update s of member i has mark s * STRIDE + i


class Moments:
    """Counts what happens by kind ("chunk", "acknowledged", "pulled", "settled"), so that a test can strike at the n-th."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Nothing more can be expected."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def note(self, kind: str) -> None:
        with self._changed:
            self._counts[kind] += 1
            self._changed.notify_all()

    def wait(self, kind: str, more: int) -> None:
        """Until ``more`` of a kind have happened from now on."""
        with self._changed:
            due = self._counts[kind] + more
            self._changed.wait_for(lambda: self._counts[kind] >= due or self._failure, PATIENCE_S)
            if self._failure is not None:
                raise self._failure
            assert self._counts[kind] >= due, f"{self._counts}: no {due} {kind} in time"

    def counting(self, chunks: type[PushTransfer]) -> object:
        """``PushTransfer.chunks``, counted as they are sent."""
        original = chunks.chunks

        def counted(transfer: PushTransfer, held: int) -> object:
            for chunk in original(transfer, held):
                yield chunk
                self.note("chunk")

        return counted


class WatchedUplink(Uplink):
    """An uplink that remembers when the latest join that succeeded was sent, and when it was answered (``time.monotonic``)."""

    joined_at = (0.0, 0.0)

    def join(self, request: Join) -> Joined:
        sent = time.monotonic()
        joined = super().join(request)
        self.joined_at = (sent, time.monotonic())
        return joined


class Member:
    """Member number ``index``. ``patient=False``: it tries again so soon that a test of many kills is quick."""

    def __init__(self, index: int, address: str, moments: Moments, *, seed: int, patient: bool = False) -> None:
        self.node, self.index = f"m{index}", index
        self.pushed: dict[UpdateId, tuple[int, float, int]] = {}  # mark, samples, base version
        self.acknowledged: dict[UpdateId, Receipt] = {}
        self.settled: dict[UpdateId, set[tuple[State, int]]] = defaultdict(set)
        self.pulled: dict[int, int] = {}  # version -> CRC32C of its bytes
        self.error: BaseException | None = None
        self._rng = random.Random(f"{seed} {index}")
        self._moments = moments
        self._changed = threading.Condition()
        self._enough = threading.Event()
        quick = {} if patient else {"retry_s": 0.02, "retry_cap_s": 0.2}
        self.uplink = WatchedUplink(
            address, SecurityConfig(), node=self.node, patience=Patience(give_up_s=PATIENCE_S, **quick), rng=self._rng
        )
        self.session = Session(
            self.uplink,
            Join(node=self.node, tier=Tier.EDGE, incarnation=1),
            open_updates=self.open,
            on_receipt=self._settle,
            rng=random.Random(f"{seed} {index} session"),
            **({} if patient else {"retry_cap_s": 0.2}),
        )
        self._thread = threading.Thread(target=self._run, name=self.node)

    def start(self) -> None:
        self.session.start()
        self._thread.start()

    def finish(self) -> None:
        """Make no more updates; wait until all are settled."""
        self._enough.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.node} hangs"
        if self.error is not None:
            raise self.error
        with self._changed:
            assert self._changed.wait_for(lambda: not self.open(), PATIENCE_S), f"not settled: {self.open()}"

    def close(self) -> None:
        self._enough.set()
        self.session.stop(leave=False)
        self.uplink.close()
        self._thread.join(PATIENCE_S)

    def open(self) -> Sequence[UpdateId]:
        return [update_id for update_id in tuple(self.pushed) if update_id not in self.settled]

    def _settle(self, receipt: Receipt) -> None:
        if receipt.state.final:
            with self._changed:
                self.settled[receipt.update_id].add((receipt.state, receipt.version))
                self._changed.notify_all()
            self._moments.note("settled")

    def _run(self) -> None:
        base = -1
        try:
            while not self._enough.is_set():
                version = self.session.wait_version(base, timeout_s=0.2)
                if version is not None:
                    assert version > base
                    base = version
                    self._take(version)
                    self._give(version)
        except BaseException as error:
            if not self._enough.is_set():
                self.error = error
                self._moments.fail(error)

    def _take(self, version: int) -> None:
        payload = bytearray()

        def sink(offset: int, data: memoryview) -> None:
            payload[offset : offset + len(data)] = data
            self._moments.note("pulled")

        ranges: tuple[ByteRange, ...] = ()
        pull: Sink = sink
        found: Version = self.uplink.pull(version, ranges, pull)
        assert found.number == version
        self.pulled[version] = google_crc32c.value(bytes(payload))

    def _give(self, base: int) -> None:
        update_id = UpdateId(self.node, 1, len(self.pushed) + 1)
        mark, samples = update_id.sequence * STRIDE + self.index, float(self._rng.randint(1, 5))
        self.pushed[update_id] = mark, samples, base
        receipt = push(self.uplink, update_id, base_version=base, mark=mark, samples=samples)
        assert receipt.state in (State.ACCEPTED, State.MERGED), receipt
        self.acknowledged[update_id] = receipt
        self._moments.note("acknowledged")
        self._settle(receipt)
        if self._rng.random() < 0.3:  # as if the answer had got lost
            again = push(self.uplink, update_id, base_version=base, mark=mark, samples=samples)
            assert (again.state in (State.ACCEPTED, State.MERGED), again.duplicate) == (True, True), again
            self._settle(again)


class RoamingMember(Member):
    """A member that goes to the next of ``parents`` when one is gone, and pushes again what nobody there knows."""

    def __init__(self, index: int, parents: Sequence[str], moments: Moments, *, seed: int, after_s: float = 0.5) -> None:
        super().__init__(index, parents[0], moments, seed=seed)
        self.uplink.close()
        self._lost: set[UpdateId] = set()
        patience = Patience(give_up_s=after_s, retry_s=0.02, retry_cap_s=0.2)

        def dial(address: str) -> Parent:
            return Uplink(address, SecurityConfig(), node=self.node, patience=patience)

        self.failover = Failover(parents, dial, patience_s=after_s, rng=self._rng)
        self.uplink = self.failover  # type: ignore[assignment]
        self.session = Session(
            self.failover,
            Join(node=self.node, tier=Tier.EDGE, incarnation=1),
            open_updates=self.open,
            on_receipt=self._settle,
            rng=random.Random(f"{seed} {index} session"),
            retry_cap_s=0.2,
        )

    @property
    def holding(self) -> bool:
        """Whether a parent has accepted something that is not settled."""
        return any(update_id in self.acknowledged for update_id in self.open())

    def _settle(self, receipt: Receipt) -> None:
        super()._settle(receipt)
        with self._changed:
            if receipt.state is State.UNKNOWN and receipt.update_id in self.acknowledged:
                self._lost.add(receipt.update_id)
            elif receipt.state is not State.STAGED:
                self._lost.discard(receipt.update_id)
            self._changed.notify_all()

    def finish(self) -> None:
        """As ``Member``; what is lost meanwhile is pushed again."""
        self._enough.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.node} hangs"
        if self.error is not None:
            raise self.error
        over = time.monotonic() + PATIENCE_S
        while self.open():
            assert time.monotonic() < over, f"not settled: {self.open()}"
            with self._changed:
                self._changed.wait_for(lambda: self._lost or not self.open(), 1.0)
            self._push_lost()

    def _take(self, version: int) -> None:
        self._push_lost()
        while not self._enough.is_set():
            try:
                super()._take(version)
                return
            except (Unreachable, Refused):
                self.session.wait_version(version, timeout_s=0.1)  # the next parent may be behind

    def _give(self, base: int) -> None:
        update_id = UpdateId(self.node, 1, len(self.pushed) + 1)
        mark, samples = update_id.sequence * STRIDE + self.index, float(self._rng.randint(1, 5))
        self.pushed[update_id] = mark, samples, base
        self._push(update_id)
        self._moments.note("acknowledged")

    def _push_lost(self) -> None:
        for update_id in sorted(self._lost):
            self._push(update_id)

    def _push(self, update_id: UpdateId) -> None:
        """Until somebody has it."""
        mark, samples, base = self.pushed[update_id]
        over = time.monotonic() + PATIENCE_S
        while update_id in self.open():
            assert time.monotonic() < over, f"{update_id} cannot be delivered"
            try:
                receipt = push(self.uplink, update_id, base_version=base, mark=mark, samples=samples)
            except (Unreachable, Refused):
                self.session.wait_version(base + 1_000_000, timeout_s=0.1)
                continue
            assert receipt.state in (State.ACCEPTED, State.MERGED), receipt
            self.acknowledged[update_id] = receipt
            self._settle(receipt)
            return
