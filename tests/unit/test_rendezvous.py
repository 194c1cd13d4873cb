"""How ranks agree through a store (``cloud/rendezvous.py``), and what a site is called (``cloud/roster.py``)."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch.distributed as dist
from helpers.one_rank import process_group

from fleetddp.cloud.rendezvous import Order, Rendezvous, polls
from fleetddp.cloud.roster import _carriers, own_name
from fleetddp.common.config import SiteConfig
from fleetddp.common.errors import ConfigError


@pytest.fixture(params=["tcp", "hash"])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "hash":
        yield dist.HashStore()
    else:
        yield dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def test_orders_are_read_as_they_were_given(store: Any) -> None:
    rank0, other = Rendezvous(store), Rendezvous(store).clone()
    order = Order(do="adopt", version=3, codec="int8", dropped=True)
    got: list[Order] = []
    reader = threading.Thread(target=lambda: got.append(other.await_order(0, 1)))
    reader.start()
    rank0.give(0, order)
    reader.join(10)
    assert got == [order]
    rank0.give(1, Order(do="go", finished="enough"))
    assert other.await_order(1, 1).finished == "enough"


def test_forgotten_orders_are_no_longer_in_the_store(store: Any) -> None:
    rendezvous = Rendezvous(store)
    for place in range(4):
        rendezvous.give(place, Order(do="go"))
    rendezvous.forget(range(1, 3))
    assert [store.check([f"order/{place}"]) for place in range(4)] == [True, False, False, True]


def test_tallies_count_ranks(store: Any) -> None:
    rank0, other = Rendezvous(store), Rendezvous(store).clone()
    assert rank0.tally("pulled/1") == 0
    rank0.report("pulled/1")
    other.report("pulled/1")
    assert rank0.tally("pulled/1") == 2
    rank0.drop("pulled/1")
    assert other.tally("pulled/1") == 0


def test_the_first_failure_is_kept(store: Any) -> None:
    rank0, other = Rendezvous(store), Rendezvous(store).clone()
    assert rank0.failure() is None
    other.fail("WRONG_RUN", "first")
    other.fail("", "second")
    assert rank0.failure() == ("WRONG_RUN", "first")


def test_polls_see_what_is_there_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3 % of the time waited, or 2 ms; and at least every 50 ms."""
    looks = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: looks[-1])
    monkeypatch.setattr(time, "sleep", lambda pause: looks.append(looks[-1] + pause))
    assert list(itertools.islice(polls(), 300)) == looks[:300]  # none before the first look
    pauses = [after - before for before, after in itertools.pairwise(looks)]
    assert pauses[0] == pytest.approx(0.002)
    assert pauses[-1] == pytest.approx(0.05)
    assert all(pause <= max(0.002, 0.03 * waited) + 1e-9 for pause, waited in zip(pauses, looks, strict=False))
    assert list(itertools.islice(polls(0.001), 1)) == [0.0]


def test_a_torch_without_clone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with process_group():
        group = dist.group.WORLD
        assert group is not None
        monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: object())
        with pytest.raises(ConfigError, match=r"needs torch 2\.8 or newer"):
            Rendezvous.of(group, "x")


@pytest.mark.parametrize(
    ("uplink", "machines", "carriers"),
    [
        ("every_rank", ["a", "a", "b"], [0, 1, 2]),
        ("per_node", ["a", "a", "b", "a", "b"], [0, 2]),
        ("rank0", ["a", "b"], [0]),
    ],
)
def test_carriers(uplink: Any, machines: list[str], carriers: list[int]) -> None:
    assert _carriers(SiteConfig(uplink=uplink), machines) == carriers


@pytest.mark.parametrize(
    ("job", "host", "name"),
    [("lab.7", "host", "lab.7"), ("none", "gpu_1.example", "gpu_1.example"), ("a b/c", "host", "a-b-c"), ("--", "host", "site")],
)
def test_a_site_without_a_name(monkeypatch: pytest.MonkeyPatch, job: str, host: str, name: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setattr(socket, "gethostname", lambda: cast(Any, host))
    assert own_name() == name


def test_a_bell_cuts_a_pause_short(monkeypatch: pytest.MonkeyPatch) -> None:
    bell, pauses = threading.Event(), []

    def wait(pause: float) -> bool:
        pauses.append(pause)
        return True  # it rang

    monkeypatch.setattr(bell, "wait", wait)
    monkeypatch.setattr(time, "sleep", lambda pause: pytest.fail("it slept through"))
    looks = polls(bell=bell)
    next(looks)
    bell.set()
    next(looks)
    assert not bell.is_set()  # what rings after the next look is heard
    assert pauses == [pytest.approx(0.002)]
