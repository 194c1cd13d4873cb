"""A parent that may be one of several."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fleetddp.common.errors import Reason, Refused, Unreachable
from fleetddp.common.transport import failover
from fleetddp.common.transport.failover import Failover


class Scripted:
    """A parent whose answers are whatever ``said`` holds; None: it does not answer."""

    def __init__(self, address: str) -> None:
        self.address, self.said, self.closed = address, "fine", False

    def status(self) -> Any:
        if self.closed or self.said is None:
            raise Unreachable(f"{self.address} is gone")
        if isinstance(self.said, Exception):
            raise self.said
        return {"of": self.address}

    def watch(self, node: str, incarnation: int, after_version: int) -> Any:
        yield from self.said

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(failover.time, "monotonic", lambda: clock[0])
    return clock


@pytest.fixture
def made() -> list[Scripted]:
    return []


def several(made: list[Scripted], *addresses: str) -> Failover:
    def make(address: str) -> Any:
        made.append(Scripted(address))
        return made[-1]

    return Failover(addresses, make, patience_s=10.0, rng=random.Random(0))


def fails(parent: Failover) -> None:
    with pytest.raises(Unreachable):
        parent.status()


def test_it_stays_with_a_parent_that_is_silent_for_a_short_time(now: list[float], made: list[Scripted]) -> None:
    parent = several(made, "a", "b")
    made[0].said = None
    now[0] = 9.9
    fails(parent)
    made[0].said = "fine"
    assert parent.status() == {"of": "a"}
    made[0].said = None
    now[0] = 19.8
    fails(parent)
    assert parent.address == "a"


def test_then_it_goes_to_the_next_and_in_the_end_back_to_the_first(now: list[float], made: list[Scripted]) -> None:
    parent = several(made, "a", "b")
    made[0].said = None
    now[0] = 15.0  # with half as much again at most
    fails(parent)
    assert (parent.address, made[0].closed) == ("b", True)
    assert parent.status() == {"of": "b"}
    made[1].said = None
    now[0] = 31.0
    fails(parent)
    assert parent.status() == {"of": "a"}
    assert [m.address for m in made] == ["a", "b", "a"]


def test_a_refusal_is_an_answer(now: list[float], made: list[Scripted]) -> None:
    parent = several(made, "a", "b")
    made[0].said = Refused(Reason.UNKNOWN_NODE, "join first")
    now[0] = 100.0
    with pytest.raises(Refused):
        parent.status()
    made[0].said = None
    now[0] = 109.0
    fails(parent)
    assert parent.address == "a"


def test_members_of_a_dead_region_do_not_all_come_at_once(now: list[float]) -> None:
    moved = []
    for seed in range(50):
        made: list[Scripted] = []

        def make(address: str, made: list[Scripted] = made) -> Any:
            made.append(Scripted(address))
            made[-1].said = None
            return made[-1]

        now[0] = 0.0
        parent = Failover(("a", "b"), make, patience_s=10.0, rng=random.Random(seed))
        while parent.address == "a":
            now[0] += 0.1
            fails(parent)
        moved.append(now[0])
    assert min(moved) >= 10.0
    assert max(moved) <= 15.2
    assert max(moved) - min(moved) > 3.0


def test_after_close_it_goes_nowhere(now: list[float], made: list[Scripted]) -> None:
    parent = several(made, "a", "b")
    parent.close()
    now[0] = 100.0
    fails(parent)
    assert len(made) == 1


def test_news_are_a_sign_of_life(now: list[float], made: list[Scripted]) -> None:
    parent = several(made, "a", "b")
    made[0].said = ["news"]
    now[0] = 9.0
    assert list(parent.watch("n", 1, -1)) == ["news"]
    made[0].said = None
    now[0] = 18.0
    fails(parent)
    assert parent.address == "a"


def test_only_one_address_is_never_left(now: list[float], made: list[Scripted]) -> None:
    parent = several(made, "a")
    made[0].said = None
    now[0] = 1000.0
    fails(parent)
    assert (parent.address, len(made)) == ("a", 1)


def test_one_that_stays_goes_only_when_it_is_told(now: list[float], made: list[Scripted]) -> None:
    parent = several(made, "a", "b", "c")
    parent.stay()
    made[0].said = None
    for _ in range(5):
        now[0] += 100.0
        fails(parent)
    assert parent.address == "a"
    parent.go_to("c")
    assert (parent.address, made[0].closed, parent.status()) == ("c", True, {"of": "c"})
    parent.go_to("c")
    assert len(made) == 2
