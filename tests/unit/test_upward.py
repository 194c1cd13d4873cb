"""A region's way to its parent, over a parent that is scripted."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.region_steering import joined
from helpers.steering import uid

from fleetddp.common.errors import ConfigError, Unreachable
from fleetddp.common.events import Answered, Enrolled, Event, Heard, Heartbeat, Join, Joined, News, Told
from fleetddp.common.recovered import RecoveredRegion
from fleetddp.common.region_journal import RegionJournal
from fleetddp.common.transport.limits import MAX_IDS
from fleetddp.common.transport.upward import Upward
from fleetddp.common.update import Receipt, State, Tier, UpdateId
from fleetddp.edge.region import Region
from fleetddp.edge.sim.memory_files import MemoryFiles

IDS = tuple(uid("w", n) for n in range(MAX_IDS + 44))


class Scripted:
    """Knows every update as merged into version 3, and ends the run when told to."""

    def __init__(self) -> None:
        self.joins: list[Join] = []
        self.heartbeats: queue.Queue[Heartbeat] = queue.Queue()
        self.finished = ""
        self.away_at_the_end = False

    def receipts(self, ids: tuple[UpdateId, ...]) -> tuple[Receipt, ...]:
        assert len(ids) <= MAX_IDS
        return tuple(Receipt(update_id=i, state=State.MERGED, version=3) for i in ids)

    def join(self, request: Join) -> Joined:
        self.joins.append(request)
        return joined(receipts=self.receipts(request.open), heartbeat_s=0.01, lease_s=1.0, finished=self.finished)

    def heartbeat(self, request: Heartbeat) -> Heard:
        self.heartbeats.put(request)
        if self.finished and self.away_at_the_end:
            raise Unreachable("gone")
        return Heard(version=3, closes_at=7.0, receipts=self.receipts(request.open))

    def watch(self, node: str, incarnation: int, after_version: int) -> Iterator[News]:
        raise Unreachable("no news")
        yield News()

    def leave(self, node: str, incarnation: int) -> None:
        pass


class Side:
    """The driver's side: what it was told, in order."""

    def __init__(self, parent: Scripted) -> None:
        self.told: queue.Queue[Event] = queue.Queue()
        journal = RegionJournal(Path("/journal"), run="fleet", files=MemoryFiles())
        entered = RecoveredRegion(node="west", incarnation=4)

        def call(what: Callable[[], None]) -> None:
            what()

        self.upward = Upward(parent, journal, entered, run="fleet", tell=self.told.put, call=call)  # type: ignore[arg-type]

    def until(self, kind: type[Any], **fields: Any) -> list[Event]:
        """Everything up to an event of this kind with these fields."""
        events: list[Event] = []
        while True:
            events.append(self.told.get(timeout=20.0))
            last = events[-1]
            if isinstance(last, kind) and all(getattr(last, name) == value for name, value in fields.items()):
                return events

    def close(self) -> None:
        self.upward.stop(leave=False)
        self.upward.close()


@pytest.fixture
def parent() -> Scripted:
    return Scripted()


@pytest.fixture
def side(parent: Scripted) -> Iterator[Side]:
    side = Side(parent)
    yield side
    side.close()


def test_it_joins_as_a_region_and_passes_on_what_it_hears_receipts_first(parent: Scripted, side: Side) -> None:
    side.upward.ask(IDS[:2])
    side.upward.start()
    first = side.until(Told)
    assert [type(event) for event in first] == [Answered, Answered, Enrolled, Told]
    assert side.until(Told, closes_at=7.0)
    (join,) = parent.joins
    assert (join.node, join.tier, join.incarnation, join.run, join.leaves) == ("west", Tier.REGION, 4, "fleet", 0)


def test_more_questions_than_a_message_holds_are_asked_in_turn(parent: Scripted, side: Side) -> None:
    side.upward.ask(IDS)
    side.upward.start()
    asked: set[UpdateId] = set()
    for _ in range(4):
        asked |= set(parent.heartbeats.get(timeout=20.0).open)
    assert asked == set(IDS)


def test_the_parent_hears_of_members_at_once_and_of_the_version(parent: Scripted, side: Side) -> None:
    side.upward.start()
    parent.heartbeats.get(timeout=20.0)
    side.upward.stand(3, 12)
    while (heard := parent.heartbeats.get(timeout=20.0)).leaves != 12:
        pass
    assert heard.base_version == 3


def test_at_the_end_everything_open_is_asked_before_the_end_is_told(parent: Scripted, side: Side) -> None:
    side.upward.ask(IDS)
    parent.finished = "enough"
    side.upward.start()
    events = side.until(Told, finished="enough")
    answered = {event.receipt.update_id for event in events if isinstance(event, Answered)}
    assert answered == set(IDS)


def test_a_parent_that_is_gone_at_the_end_does_not_keep_the_end_away(parent: Scripted, side: Side) -> None:
    side.upward.ask(IDS)
    parent.finished, parent.away_at_the_end = "enough", True
    side.upward.start()
    side.until(Told, finished="enough")


def test_a_codec_that_there_is_not_is_a_wrong_setting(tmp_path: Path) -> None:
    import asyncio

    from helpers.fleet import fleet_config

    config = fleet_config(tmp_path, region={"codec": "int3", "journal": str(tmp_path / "region"), "address": "127.0.0.1:0"})

    async def start() -> None:
        await Region(config, "west").start()

    with pytest.raises(ConfigError, match=r"region\.codec: there is no codec 'int3'"):
        asyncio.run(start())
