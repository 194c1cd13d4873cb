"""An aggregator and its members in one process under a clock that the test moves: what a network would carry, without one."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from helpers.fleet import fleet_config
from helpers.models import batch_norm

from fleetddp.common.clock import SystemClock, VirtualClock
from fleetddp.common.errors import Reason, Refused, Unreachable
from fleetddp.common.events import Heartbeat, Join
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.transport import Parent
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.update import Kind, Receipt, Slice, State, Tier, UpdateHeader, UpdateId

WAIT_S = 20.0
START = 1_000_000.0
MODULE = batch_norm()
LAYOUT = Layout.from_module(MODULE)
WEIGHTS = LAYOUT.read(MODULE)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(START)


@pytest.fixture
def fleet(tmp_path: Path, clock: VirtualClock) -> Iterator[MemoryFleet]:
    """The window closes with two updates, or after a minute with one."""
    config = fleet_config(tmp_path, window={"quorum": 2, "deadline_s": 60.0}, members={"stall_s": 20.0, "lease_s": 600.0})
    made = MemoryFleet(config, clock)
    yield made
    made.stop()


def join(parent: Parent, node: str, incarnation: int = 1) -> Any:
    return parent.join(Join(node=node, tier=Tier.SITE, incarnation=incarnation))


def header(node: str, sequence: int, kind: Kind = Kind.DELTA, codec: str = "float32") -> UpdateHeader:
    return UpdateHeader(
        update_id=UpdateId(node, 1, sequence),
        kind=kind,
        tier=Tier.SITE,
        base_version=-1 if kind is Kind.INIT else 0,
        codec=codec,
        layout=LAYOUT.fingerprint,
        layout_spec=LAYOUT.to_json() if kind is Kind.INIT else b"",
    )


def push(
    parent: Parent,
    of: UpdateHeader,
    vector: torch.Tensor,
    *,
    samples: float = 1.0,
    part: int = 0,
    parts: int = 1,
    spoil: bytes = b"",
) -> Receipt:
    """One of ``parts`` streams of an update; ``spoil`` are its first bytes instead of the right ones."""
    geometry = Geometry.of_update(of, LAYOUT)
    intervals = geometry.split(parts)[part]
    payload = b"".join(bytes(bytes_of(geometry.encode(vector[a:b], (a, b)))) for a, b in intervals)
    payload = spoil + payload[len(spoil) :]
    return parent.push(of, Slice(intervals=intervals, samples=samples, digest=google_crc32c.value(payload)), memoryview(payload))


def pulled(parent: Parent, version: int) -> torch.Tensor:
    geometry = Geometry.of_update(header("x", 0), LAYOUT)
    data = bytearray(geometry.payload_bytes)

    def sink(offset: int, chunk: memoryview) -> None:
        data[offset : offset + len(chunk)] = chunk

    assert parent.pull(version, (), sink).number == version
    values = torch.frombuffer(data, dtype=torch.float32)
    flat = torch.zeros(LAYOUT.elements)
    flat[: LAYOUT.parameters], flat[LAYOUT.buffer_start :] = values[: LAYOUT.parameters], values[LAYOUT.parameters :]
    return flat


def found(fleet: MemoryFleet, node: str = "a") -> Parent:
    parent = fleet.parent(run="test")
    assert join(parent, node).wants_init
    assert push(parent, header(node, 0, Kind.INIT), WEIGHTS).state is State.ACCEPTED
    assert parent.status()["version"] == 0
    return parent


def test_everything_happens_in_the_call_that_causes_it(fleet: MemoryFleet) -> None:
    a, b = found(fleet), fleet.parent()
    assert join(b, "b").version == 0
    assert a.layout() == LAYOUT
    assert torch.equal(pulled(b, 0), WEIGHTS)
    first, second = torch.full((LAYOUT.elements,), 0.5), torch.full((LAYOUT.elements,), -0.25)
    push(a, header("a", 1), first, samples=3.0)
    assert b.status()["version"] == 0
    push(b, header("b", 1), second, samples=1.0)
    assert b.status()["version"] == 1
    mean = (3 * first + second) / 4
    expected = torch.cat([WEIGHTS[: LAYOUT.parameters] - mean[: LAYOUT.parameters], torch.zeros(LAYOUT.buffer_start - 134),
                          mean[LAYOUT.buffer_start :]])  # fmt: skip
    torch.testing.assert_close(pulled(a, 1), expected, rtol=0, atol=1e-7)
    heard = a.heartbeat(Heartbeat(node="a", incarnation=1, base_version=1, open=(UpdateId("a", 1, 1),)))
    assert [(r.state, r.version) for r in heard.receipts] == [(State.MERGED, 1)]


def test_a_deadline_passes_when_the_clock_is_moved(fleet: MemoryFleet, clock: VirtualClock) -> None:
    a = found(fleet)
    join(fleet.parent(), "b")
    push(a, header("a", 1), torch.ones(LAYOUT.elements))
    clock.advance(59.9)
    fleet.tick()
    assert fleet.driver.version == 0
    clock.advance(0.2)
    fleet.tick()
    assert fleet.driver.version == 1
    assert a.status()["versions"][1]["published_at"] == START + 60.1


def test_several_streams_wait_for_each_other(fleet: MemoryFleet) -> None:
    ranks = [found(fleet), fleet.parent()]
    with ThreadPoolExecutor(2) as pool:
        pushed = [
            pool.submit(push, parent, header("a", 1), torch.ones(LAYOUT.elements), part=part, parts=2)
            for part, parent in enumerate(ranks)
        ]
        assert [p.result(WAIT_S).state for p in pushed] == [State.ACCEPTED] * 2
    assert ranks[0].status()["members"][0]["updates"] == 1


def test_refusals_are_raised_or_returned_as_over_a_network(fleet: MemoryFleet) -> None:
    stranger = fleet.parent()
    with pytest.raises(Refused) as refused:
        stranger.layout()
    assert refused.value.reason is Reason.NO_VERSION
    with pytest.raises(Refused) as refused:
        stranger.pull(-1, (), lambda offset, data: None)
    assert refused.value.reason is Reason.NO_VERSION
    a = found(fleet)
    with pytest.raises(Refused) as refused:
        push(stranger, header("stranger", 1), WEIGHTS)
    assert refused.value.reason is Reason.UNKNOWN_NODE
    nan = struct.pack("<f", math.nan)
    assert push(a, header("a", 1), WEIGHTS, spoil=nan).reason == "NOT_FINITE"
    assert push(a, header("a", 1), WEIGHTS, spoil=nan).reason == "NOT_FINITE"  # remembered
    assert push(a, header("a", 2), WEIGHTS, samples=0.0).reason == "BAD_WEIGHT"
    assert push(a, header("a", 3), torch.zeros(LAYOUT.elements)).state is State.ACCEPTED
    assert push(a, header("a", 3), torch.zeros(LAYOUT.elements)).duplicate
    assert a.status()["counters"]["refused"] == {"UNKNOWN_NODE": 1, "NOT_FINITE": 1, "BAD_WEIGHT": 1}


def test_news_are_heard_by_those_who_wait(fleet: MemoryFleet) -> None:
    a = found(fleet)
    heard: list[Any] = []
    listening, merged = threading.Event(), threading.Event()

    def listen() -> None:
        try:
            for news in fleet.parent().watch("a", 1, -1):
                heard.append(news)
                listening.set()
                if any(receipt.state is State.MERGED and receipt.version == 1 for receipt in news.receipts):
                    merged.set()
        except Unreachable:
            heard.append("over")

    listener = threading.Thread(target=listen)
    listener.start()
    assert listening.wait(WAIT_S)
    assert heard[0].version == 0
    push(a, header("a", 1), torch.ones(LAYOUT.elements))
    join(fleet.parent(), "b")
    push(fleet.parent(), header("b", 1), torch.ones(LAYOUT.elements))
    assert merged.wait(WAIT_S)
    fleet.stop()
    listener.join(WAIT_S)
    assert heard[-1] == "over"
    assert heard[-2].version == 1
    receipts = {r.update_id: (r.state, r.version) for news in heard[:-1] for r in news.receipts}
    assert receipts == {UpdateId("a", 1, 1): (State.MERGED, 1)}


def test_who_waits_for_others_is_let_go(fleet: MemoryFleet) -> None:
    found(fleet)
    parent = fleet.parent()
    opened = threading.Event()
    failures: list[Exception] = []

    def wait() -> None:
        opened.set()
        try:
            push(parent, header("a", 1), torch.ones(LAYOUT.elements), parts=2)
        except Unreachable as error:
            failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert opened.wait(WAIT_S)
    parent.close()
    waiter.join(WAIT_S)
    assert "was closed" in str(failures[0])
    with pytest.raises(Unreachable):
        parent.status()
    fleet.stop()
    with pytest.raises(Unreachable):
        join(fleet.parent(), "a")


def test_an_incomplete_update_is_forgotten_after_a_while(fleet: MemoryFleet, clock: VirtualClock) -> None:
    a = found(fleet)
    refusals: list[Refused] = []

    def wait() -> None:
        try:
            push(a, header("a", 1), torch.ones(LAYOUT.elements), parts=2)
        except Refused as error:
            refusals.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    looks = threading.Event()
    while waiter.is_alive():
        clock.advance(10.0)
        fleet.tick()
        looks.wait(0.01)
    assert refusals[0].reason is Reason.STALLED
    assert push(a, header("a", 1), torch.ones(LAYOUT.elements)).state is State.ACCEPTED


def test_a_restart_goes_on_from_the_journal(tmp_path: Path) -> None:
    config = fleet_config(tmp_path, window={"quorum": 2})
    fleet = MemoryFleet(config, SystemClock())
    push(found(fleet), header("a", 1, codec="int8"), torch.full((LAYOUT.elements,), 0.127))
    fleet.stop()
    fleet = MemoryFleet(config, SystemClock())
    b = fleet.parent()
    join(b, "b")
    push(b, header("b", 1), torch.full((LAYOUT.elements,), 0.127))
    assert fleet.driver.version == 1
    difference = (WEIGHTS - pulled(b, 1))[: LAYOUT.parameters]
    torch.testing.assert_close(difference, torch.full_like(difference, 0.127), rtol=0, atol=1e-6)
    fleet.stop()
