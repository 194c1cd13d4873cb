"""Open items: what a pool takes, when an item is labelled, what erases it, and how a member comes by it."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fleetddp.common.clock import VirtualClock
from fleetddp.common.config import OpenItemsConfig
from fleetddp.common.errors import ConfigError, Reason, Refused, StorageError
from fleetddp.common.events import Share
from fleetddp.common.item_pool import ITEM_CRASH_POINTS, ItemPool
from fleetddp.common.open_items import NEVER, ItemStore, OpenItem, Shared, bring, bytes_of_sample, digest_of
from fleetddp.common.proxy import assigned, runs
from fleetddp.common.update import Interval

HOUR_S = 3600.0
SIZE = 12  # bytes of a sample
MOST = 10 * SIZE


def sample(number: float) -> Tensor:
    return torch.tensor([number, -number, 0.5])


class Coordinator:
    """A pool on a disk, and devices that share with it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.clock, self.stop_at = folder, VirtualClock(1000.0), ""
        self.options = {"items": 5, "retention_hours": 1.0, **options}
        self.version = 0
        self.pulled: list[tuple[Interval, ...]] = []
        self.pool = self.open()

    def open(self, shape: tuple[int, ...] = (3,)) -> ItemPool:
        db = sqlite3.connect(self.folder / "items.db", timeout=0.1, check_same_thread=False, isolation_level=None)
        try:
            return ItemPool(db, OpenItemsConfig(**self.options), shape, self.clock, at=self._at)
        except BaseException:
            db.close()  # as the journal does
            raise

    def restart(self) -> None:
        self.pool.close()
        self.pool = self.open()

    def _at(self, point: str) -> None:
        if point == self.stop_at:
            raise OSError(f"killed at {point}")

    def offer(self, node: str, *numbers: float) -> Shared:
        samples = {digest_of(sample(n)): sample(n) for n in numbers}
        share = Share(node=node, incarnation=1, of=node, shape=(3,), digests=tuple(samples))
        wanted = self.pool.wanted(share, MOST)
        return self.pool.take(share, {digest: bytes_of_sample(samples[digest]) for digest in wanted})

    def publish(self) -> int:
        self.pool.fix(self.version + 1)
        self.version += 1
        return self.version

    # what a ``Parent`` would do
    def pull_items(self, pool: int, known: int, ranges: Any, sink: Callable[[int, memoryview], None]) -> Any:
        catalogue = self.pool.catalogue(pool, known, self.version)
        self.pulled += [tuple(ranges)] if ranges else []
        for start, stop in ranges:
            sink(start, memoryview(self.pool.read(start, stop)))
        return catalogue

    def numbers(self) -> dict[int, float]:
        """What is here, by slot."""
        found = {slot: self.pool.tensor(slot) for slot in self.pool.held()}
        return {slot: float(item[0]) for slot, item in found.items() if item is not None}


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Callable[..., Coordinator]]:
    made: list[Coordinator] = []

    def make(**options: Any) -> Coordinator:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Coordinator(folder, **options))
        return made[-1]

    yield make
    for one in made:
        one.pool.close()


def refused(reason: Reason, match: str = "") -> Any:
    return pytest.raises(Refused, match=f"^{reason.value}: .*{match}")


# ---- which items are labelled on a version ----------------------------------------------------------------------------------


def test_open_items_get_half_of_the_labels_and_go_round_by_themselves() -> None:
    opened = [40, 41, 43, 44, 45]
    assert assigned(0, 40, 6) == ((0, 6),)
    assert assigned(0, 40, 6, opened) == ((0, 3), (40, 42), (43, 44))
    assert assigned(1, 40, 6, opened) == ((3, 6), (40, 41), (44, 46))
    assert assigned(2, 40, 6, [41]) == ((10, 15), (41, 42))  # of one open item there is no more to label
    assert assigned(3, 4, 10, opened) == ((0, 4), (40, 42), (43, 46))  # a small set leaves room
    assert assigned(7, 40, 1, opened) == ((7, 8),)
    seen = {row for version in range(14) for start, stop in assigned(version, 40, 6, opened) for row in range(start, stop)}
    assert seen == {*range(40), *opened}
    assert runs([]) == []
    assert runs([3, 4, 7]) == [(3, 5), (7, 8)]


# ---- the pool ---------------------------------------------------------------------------------------------------------------


def test_slots_are_filled_in_order_and_once(coordinator: Callable[..., Coordinator]) -> None:
    one = coordinator()
    first = one.offer("a", 1.0, 2.0)
    assert (set(first.known), first.room) == ({digest_of(sample(1.0)), digest_of(sample(2.0))}, 3)
    second = one.offer("b", 2.0, 3.0)  # one of them another device has shared already
    assert (len(second.known), second.room) == (2, 2)
    assert sorted(one.numbers().values()) == [1.0, 2.0, 3.0]
    assert one.pool.counts() == {"filled": 3, "held": 3}


def test_the_content_is_what_counts(coordinator: Callable[..., Coordinator]) -> None:
    """Of what another device has shared already, no bytes are asked for."""
    one = coordinator()
    one.offer("a", 1.0)
    share = Share(node="b", incarnation=1, of="b", shape=(3,), digests=(digest_of(sample(1.0)), digest_of(sample(4.0))))
    assert one.pool.wanted(share, MOST) == (digest_of(sample(4.0)),)
    assert one.pool.wanted(share, 1) == (digest_of(sample(4.0)),)  # one at a time, however large


def test_when_it_is_full_no_more_are_taken_and_the_sender_hears_it(coordinator: Callable[..., Coordinator]) -> None:
    one = coordinator(items=3)
    shared = one.offer("a", 1.0, 2.0, 3.0, 4.0)
    assert (len(shared.known), shared.room) == (3, 0)
    with refused(Reason.ITEMS_FULL, "3 of 3 slots are filled"):
        one.offer("b", 5.0)
    assert one.offer("b", next(iter(one.numbers().values()))).room == 0  # known: no refusal
    one.clock.advance(HOUR_S + 1)
    one.pool.erase_expired()
    with refused(Reason.ITEMS_FULL):  # slots stay empty
        one.offer("b", 5.0)


def test_one_node_may_fill_its_share_only(coordinator: Callable[..., Coordinator]) -> None:
    one = coordinator(per_node=2)
    assert one.offer("a", 1.0, 2.0, 3.0).room == 0
    with refused(Reason.ITEMS_FULL, "2 by it"):
        one.offer("a", 4.0)
    assert one.offer("b", 4.0, 5.0).room == 0
    assert one.pool.counts()["filled"] == 4


GOOD = digest_of(sample(1.0))
BAD: dict[str, tuple[str, bytes, Reason]] = {
    "shorter": (GOOD, bytes_of_sample(sample(1.0))[:-1], Reason.WRONG_SIZE),
    "another": (GOOD, bytes_of_sample(sample(2.0)), Reason.WRONG_DIGEST),
    "nan": (digest_of(sample(math.nan)), bytes_of_sample(sample(math.nan)), Reason.NOT_FINITE),
    "infinite": (digest_of(sample(math.inf)), bytes_of_sample(sample(math.inf)), Reason.NOT_FINITE),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_sample_is_refused_and_takes_no_slot(coordinator: Callable[..., Coordinator], name: str) -> None:
    digest, data, reason = BAD[name]
    one = coordinator()
    share = Share(node="a", incarnation=1, of="a", shape=(3,), digests=(digest,))
    assert one.pool.wanted(share, MOST) == (digest,)
    with refused(reason):
        one.pool.take(share, {digest: data})
    assert one.pool.counts() == {"filled": 0, "held": 0}


def test_another_shape_is_refused(coordinator: Callable[..., Coordinator]) -> None:
    one = coordinator()
    with refused(Reason.WRONG_SHAPE, r"samples of shape \[4\]; the proxy set's have \[3\]"):
        one.pool.wanted(Share(node="a", incarnation=1, of="a", shape=(4,), digests=(GOOD,)), MOST)
    one.pool.close()
    with pytest.raises(ConfigError, match=r"have the shape \(3,\), not \(4,\)"):
        one.open((4,))


# ---- versions ---------------------------------------------------------------------------------------------------------------


def test_what_is_labelled_on_a_version_is_fixed_before_it_is_published(coordinator: Callable[..., Coordinator]) -> None:
    one = coordinator()
    one.offer("a", 1.0)
    assert one.pool.catalogue(0, -1, one.version).items == ()
    one.publish()
    one.offer("a", 2.0)
    assert [item[:1] + item[2:4] for item in one.pool.catalogue(0, -1, 1).items] == [(0, 1, NEVER)]
    one.pool.fix(2)  # not published yet: nobody hears of it, not after a crash either
    one.restart()
    assert len(one.pool.catalogue(0, -1, 1).items) == 1
    one.publish()
    assert [(item.slot, item.since) for item in one.pool.catalogue(0, -1, 2).items] == [(0, 1), (1, 2)]


def test_an_expired_item_is_erased_and_labelled_no_more_from_the_next_version_on(coordinator: Callable[..., Coordinator]) -> None:
    one = coordinator()
    one.offer("a", 7.25)
    one.publish()
    one.clock.advance(HOUR_S / 2)
    one.offer("a", 2.0)
    assert one.pool.erase_expired() == 1000.0 + HOUR_S
    one.clock.advance(HOUR_S / 2)
    assert one.pool.erase_expired() == 1000.0 + 1.5 * HOUR_S
    assert one.numbers() == {1: 2.0}
    assert bytes_of_sample(sample(7.25)) not in b"".join(path.read_bytes() for path in one.folder.iterdir())
    with refused(Reason.ITEM_GONE):
        one.pool.read(0, SIZE)
    assert one.pool.catalogue(0, -1, 1).gone == (0,)
    assert one.publish() == 2
    catalogue = one.pool.catalogue(one.pool.pool, 1, 2)
    assert [(item.slot, item.since, item.until) for item in catalogue.items] == [(0, 1, 2), (1, 2, NEVER)]
    assert (catalogue.gone, catalogue.whole) == ((), False)
    assert one.offer("b", 7.25) == Shared((digest_of(sample(7.25)),), 3)  # not taken again
    assert one.numbers() == {1: 2.0}
    one.clock.advance(HOUR_S)
    assert one.pool.erase_expired() == math.inf


def test_what_is_taken_back_is_erased_unless_another_shares_it(coordinator: Callable[..., Coordinator]) -> None:
    one = coordinator()
    one.offer("a", 1.0, 2.0, 3.0)
    one.offer("b", 2.0)
    assert one.pool.withdraw("c", ()) == 0
    assert one.pool.withdraw("a", (digest_of(sample(3.0)), "00" * 32)) == 1
    assert sorted(one.numbers().values()) == [1.0, 2.0]
    one.restart()
    assert one.pool.withdraw("a", ()) == 1
    assert list(one.numbers().values()) == [2.0]
    assert one.pool.withdraw("b", ()) == 1
    assert one.numbers() == {}
    assert bytes_of_sample(sample(2.0)) not in b"".join(path.read_bytes() for path in one.folder.iterdir())
    assert one.offer("a", 1.0).room == 2  # it is known, and does not come back
    assert one.numbers() == {}


# ---- what a crash leaves ----------------------------------------------------------------------------------------------------


def story(one: Coordinator) -> None:
    """Everything that is ever written, twice where that must change nothing."""
    one.offer("a", 1.0, 2.0)
    one.offer("b", 2.0, 3.0)
    if one.version == 0:
        one.publish()
    one.pool.withdraw("a", (digest_of(sample(1.0)),))
    one.clock.advance(HOUR_S)
    one.pool.erase_expired()


@pytest.mark.parametrize("point", ITEM_CRASH_POINTS)
def test_killed_at_any_write_it_goes_on_as_if_it_had_not_been(coordinator: Callable[..., Coordinator], point: str) -> None:
    one, other = coordinator(), coordinator()
    story(other)
    if point.startswith("found"):
        one.pool.close()
        (one.folder / "items.db").unlink()
        one.stop_at = point
        with pytest.raises((StorageError, OSError)):
            one.open()
    else:
        one.stop_at = point
        with pytest.raises((StorageError, OSError), match="killed"):
            story(one)
    one.stop_at = ""
    one.restart()
    story(one)
    assert one.pool.counts() == other.pool.counts()
    assert [item[:4] for item in one.pool.items()] == [item[:4] for item in other.pool.items()]
    assert one.numbers() == other.numbers()


# ---- members ----------------------------------------------------------------------------------------------------------------


def store_in(folder: Path, one: Coordinator) -> ItemStore:
    return ItemStore.open(folder / "mine" / "items.db", one.clock)


def test_a_member_brings_what_it_lacks_and_no_more(coordinator: Callable[..., Coordinator], tmp_path: Path) -> None:
    one = coordinator()
    store = store_in(tmp_path, one)
    with refused(Reason.NO_VERSION):
        store.read(0, 1)
    one.offer("a", 1.0, 2.0)
    bring(one, store, one.publish())
    assert one.pulled == [((0, 2 * SIZE),)]
    assert (store.pool, store.known, store.shape, store.held()) == (one.pool.pool, 1, (3,), {0, 1})
    one.offer("b", 3.0)
    bring(one, store, one.publish())
    store.close()
    store = store_in(tmp_path, one)  # a restart
    bring(one, store, one.version)
    assert one.pulled[1:] == [((2 * SIZE, 3 * SIZE),)]
    assert store.items() == one.pool.items()
    assert all(torch.equal(store.tensor(slot), one.pool.tensor(slot)) for slot in range(3))  # type: ignore[arg-type]
    one.pool.withdraw("a", ())
    bring(one, store, one.version)
    assert store.held() == {2}
    bring(one, store, one.publish())
    assert [item.until for item in store.items()] == [3, 3, NEVER]
    one.clock.advance(HOUR_S)
    store.erase_expired()  # no parent is needed for that
    assert store.held() == frozenset()
    store.close()


def test_an_item_that_arrives_in_two_tries_is_asked_for_once(coordinator: Callable[..., Coordinator], tmp_path: Path) -> None:
    """What a broken transfer brought whole stays; the next asks for the rest."""
    one = coordinator()
    store = store_in(tmp_path, one)
    one.offer("a", *(float(n) for n in range(1, 5)))
    version = one.publish()
    store.apply(one.pool.catalogue(0, -1, version))
    store.put({1: one.pool.read(SIZE, 2 * SIZE)})
    bring(one, store, version)
    assert one.pulled == [((0, SIZE), (2 * SIZE, 4 * SIZE))]
    assert store.held() == {0, 1, 2, 3}
    store.close()


def test_a_damaged_item_is_refused(coordinator: Callable[..., Coordinator], tmp_path: Path) -> None:
    one = coordinator()
    store = store_in(tmp_path, one)
    one.offer("a", 1.0)
    store.apply(one.pool.catalogue(0, -1, one.publish()))
    with refused(Reason.WRONG_DIGEST):
        store.put({0: bytes(SIZE)})
    assert store.held() == frozenset()
    store.close()


def test_of_a_source_that_knows_less_nothing_is_believed_yet(coordinator: Callable[..., Coordinator], tmp_path: Path) -> None:
    one = coordinator()
    store = store_in(tmp_path, one)
    one.publish()
    with refused(Reason.NO_VERSION, "due is 2"):
        bring(one, store, 2)
    store.close()


def test_of_another_pool_nothing_is_kept(coordinator: Callable[..., Coordinator], tmp_path: Path) -> None:
    """The coordinator's disk was replaced: slot 0 is another item now; the item of slot 1 is the same."""
    one, other = coordinator(), coordinator()
    store = store_in(tmp_path, one)
    one.offer("a", 1.0)
    one.offer("a", 2.0)
    bring(one, store, one.publish())
    other.offer("a", 3.0)
    other.offer("a", 2.0)
    other.publish()
    bring(other, store, other.publish())
    assert (store.pool, store.known) == (other.pool.pool, 2)
    assert other.pulled == [((0, SIZE),)]
    assert [float(store.tensor(slot)[0]) for slot in (0, 1)] == [3.0, 2.0]  # type: ignore[index]
    other.version = 1  # restored from a backup
    bring(other, store, 1)
    assert store.known == 1
    store.close()


def test_an_item_is_labelled_from_a_version_to_another() -> None:
    item = OpenItem(0, GOOD, 3, 5, 0.0)
    assert [version for version in range(8) if item.is_labelled(version)] == [3, 4]


def test_a_clock_that_is_years_away_keeps_an_item_as_long_as_any(coordinator: Callable[..., Coordinator], tmp_path: Path) -> None:
    one = coordinator()
    for name, clock in (("behind", VirtualClock(0.0)), ("ahead", VirtualClock(1e9))):
        store = ItemStore.open(tmp_path / name / "items.db", clock)
        one.offer("a", 1.0)
        bring(one, store, one.publish())
        clock.advance(HOUR_S - 1)
        assert (store.erase_expired(), store.held()) == (clock.now() + 1, {0})
        clock.advance(1)
        assert (store.erase_expired(), store.held()) == (math.inf, frozenset())
        store.close()


def test_a_pool_that_is_gone_is_not_begun_anew(coordinator: Callable[..., Coordinator]) -> None:
    """Its slots would be filled again, and the versions hold labels of what was in them."""
    one = coordinator()
    db = sqlite3.connect(":memory:", isolation_level=None)
    with pytest.raises(StorageError, match="open items are gone"):
        ItemPool(db, OpenItemsConfig(**one.options), (3,), one.clock, began=True)
    db.close()
