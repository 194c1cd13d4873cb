"""Whoever follows versions without being a member: takes the newest, comes back, gives up for good reasons only."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.processes import eventually

from fleetddp.common.errors import LayoutMismatch, Reason, Refused, Unreachable
from fleetddp.common.events import News
from fleetddp.common.transport.follower import Follower


class Scripted:
    """A parent that tells what the test puts into ``news``: versions, a reason to end, or an error; ``watched`` has each call."""

    def __init__(self) -> None:
        self.news: queue.Queue[Any] = queue.Queue()
        self.watched: list[int] = []
        self.closed = threading.Event()

    def watch(self, node: str, incarnation: int, after_version: int) -> Iterator[News]:
        self.watched.append(after_version)
        while True:
            said = self.news.get()
            if isinstance(said, Exception):
                raise said
            yield said

    def close(self) -> None:
        self.closed.set()
        self.news.put(Unreachable("closed"))


class Quick(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return 0.001


@pytest.fixture
def parent() -> Scripted:
    return Scripted()


def news(version: int, finished: str = "") -> News:
    return News(version=version, finished=finished)


class Taker:
    def __init__(self) -> None:
        self.taken: list[int] = []
        self.errors: list[Exception] = []

    def __call__(self, version: int) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append(version)


@pytest.fixture
def take() -> Taker:
    return Taker()


@pytest.fixture
def follower(parent: Scripted, take: Taker) -> Iterator[Follower]:
    following = Follower(parent, "pi", take, rng=Quick())  # type: ignore[arg-type]
    following.start()
    yield following
    following.close()
    assert parent.closed.is_set()


def test_each_version_once_and_none_before_the_first(parent: Scripted, take: Taker, follower: Follower) -> None:
    for version in (-1, 0, 0, 3, 2):  # a parent restored from a backup is at an older one
        parent.news.put(news(version))
    eventually(lambda: take.taken == [0, 3, 2], "all are taken")
    assert follower.version == 2


def test_a_lost_parent_is_asked_again_from_where_it_was(parent: Scripted, take: Taker, follower: Follower) -> None:
    parent.news.put(news(4))
    parent.news.put(Unreachable("gone"))
    parent.news.put(news(6))
    eventually(lambda: take.taken == [4, 6], "the new one is taken")
    assert parent.watched == [-1, 4]


@pytest.mark.parametrize(
    "error", [Unreachable("gone"), Refused(Reason.UNKNOWN_VERSION, "too old"), Refused(Reason.BAD_CHECKSUM, "again")]
)
def test_a_version_that_could_not_be_taken_is_tried_again(
    error: Exception, parent: Scripted, take: Taker, follower: Follower
) -> None:
    take.errors.append(error)
    parent.news.put(news(4))
    parent.news.put(news(5))
    eventually(lambda: take.taken == [5], "the next one is taken")
    assert parent.watched == [-1, -1]
    assert follower.failure is None


@pytest.mark.parametrize("error", [Refused(Reason.WRONG_IDENTITY, "never"), LayoutMismatch("other"), ZeroDivisionError()])
def test_what_a_person_must_mend_ends_it(error: Exception, parent: Scripted, take: Taker, follower: Follower) -> None:
    take.errors.append(error)
    parent.news.put(news(4))
    eventually(lambda: follower.failure is not None, "it ends")
    assert follower.failure is error


def test_the_last_version_is_taken_before_the_end_of_the_run(parent: Scripted, take: Taker, follower: Follower) -> None:
    parent.news.put(news(9, "until.versions"))
    eventually(lambda: follower.finished == "until.versions", "it ends")
    assert (take.taken, follower.failure) == ([9], None)
