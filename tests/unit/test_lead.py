"""The orders that rank 0 gives (``cloud/lead.py``), with the fleet's news and the other ranks' reports told by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch.distributed as dist

from fleetddp.cloud import lead, rendezvous
from fleetddp.cloud.lead import Lead
from fleetddp.cloud.rendezvous import Order, Rendezvous
from fleetddp.cloud.unsettled import MAX_OPEN, Unsettled
from fleetddp.common.errors import LayoutMismatch, Reason, Refused
from fleetddp.common.events import Joined
from fleetddp.common.layout import Layout
from fleetddp.common.transport import Roaming
from fleetddp.common.update import NO_VERSION, Receipt, State, Tier, UpdateId

LAYOUT = Layout.of([("w", (10,))])


class News:
    """What a session says of the fleet."""

    def __init__(self) -> None:
        self.version = NO_VERSION
        self.base_version = NO_VERSION
        self.finished = ""
        self.failure: Exception | None = None
        self.wants_init = True
        self.refusal: Refused | None = None

    def joined(self, timeout_s: float) -> Joined:
        if self.refusal is not None:
            raise self.refusal
        return Joined(
            run="run",
            version=self.version,
            layout="",
            wants_init=self.wants_init,
            heartbeat_s=1.0,
            lease_s=2.0,
            gradient_lr=0.1,
            max_staleness=10,
            codecs=("float32", "int8", "topk"),
        )


class Known:
    """The parent, and the courier of rank 0."""

    published = "bfloat16"

    def layout(self) -> Layout:
        return Layout.of([("w", (11,))])


class Roams(Known, Roaming):
    """One of several."""

    address = "west"  # type: ignore[assignment]


class Site:
    """Two ranks that push and one more that only pulls; orders come one by one."""

    def __init__(self, *, carry: bool = False, several: bool = False) -> None:
        self.news, self.rendezvous = News(), Rendezvous(cast(Any, dist.HashStore()))
        self.known = Roams() if several else Known()
        self.unsettled = Unsettled("lab", 7) if several else None
        known = cast(Any, self.known)
        self.lead = Lead(
            *(known, cast(Any, self.news), self.rendezvous, known),
            ranks=3,
            pushers=2,
            carriers=3,
            carry=carry,
            unsettled=self.unsettled,
        )

    def opening(self, *, base: int = NO_VERSION, run: str = "", codec: str = "int8", tier: Tier = Tier.SITE) -> Iterator[Order]:
        return self.lead.opening(LAYOUT, codec, tier, base, run)

    def answer(self, sequence: int, *, refused: int = 0) -> None:
        for rank in range(2):
            if rank < refused:
                self.rendezvous.report(f"refused/{sequence}")
            self.rendezvous.report(f"answered/{sequence}")

    def arrive(self, number: int, *, gone: int = 0) -> None:
        for rank in range(3):
            if rank < gone:
                self.rendezvous.report(f"gone/{number}")
            self.rendezvous.report(f"pulled/{number}")

    def opened(self) -> Site:
        """With version 0 adopted."""
        self.news.version = 0
        orders = self.opening()
        assert next(orders) == Order(do="init", number=1)
        self.answer(1, refused=2)  # as if another site had been first
        assert next(orders) == Order(do="pull", version=0, number=1)
        self.arrive(1)
        assert next(orders) == Order(do="adopt", version=0, codec="bfloat16", dropped=True)
        assert list(orders) == [Order(do="go", run="run")]
        assert self.news.base_version == 0
        return self


GO = Order(do="go", run="run")


def test_a_boundary_pushes_waits_pulls_and_adopts() -> None:
    site = Site().opened()
    orders = site.lead.orders(None)
    assert next(orders) == Order(do="push", number=2)
    site.answer(2)
    site.news.version = 1
    assert next(orders) == Order(do="pull", version=1, number=2)
    site.arrive(2)
    assert list(orders) == [Order(do="adopt", version=1, codec="bfloat16"), GO]
    assert site.news.base_version == 1


def test_a_residual_older_than_the_bound_is_forgotten() -> None:
    for newest, forget in ((10, False), (11, True)):  # ten versions, and one more than the coordinator takes
        site = Site().opened()
        orders = site.lead.orders(None)
        next(orders)
        site.answer(2)
        site.news.version = newest
        next(orders)
        site.arrive(2)
        assert next(orders) == Order(do="adopt", version=newest, codec="bfloat16", forget=forget)


def test_the_residual_of_an_old_checkpoint_is_forgotten() -> None:
    site = Site()
    site.news.version, site.news.wants_init = 20, False
    orders = site.opening(base=9, run="run")
    assert next(orders) == Order(do="pull", version=20, number=1)
    site.arrive(1)
    assert next(orders) == Order(do="adopt", version=20, codec="bfloat16", forget=True)


def test_time_up_before_the_update_is_answered() -> None:
    """It goes on; the next boundary waits for the answer before it makes another, then adopts."""
    site = Site().opened()
    assert list(site.lead.orders(0.0)) == [Order(do="push", number=2), GO]
    assert list(site.lead.orders(0.0)) == [GO]  # still on its way: nothing is made, nothing adopted
    site.answer(2)
    site.news.version = 1
    assert list(site.lead.orders(0.0)) == [Order(do="push", number=3), Order(do="pull", version=1, number=2), GO]
    site.arrive(2)
    assert list(site.lead.orders(0.0)) == [GO]  # what was learnt since is in no update yet
    site.answer(3)
    assert list(site.lead.orders(0.0)) == [Order(do="push", number=4), Order(do="adopt", version=1, codec="bfloat16"), GO]


def test_a_refused_update_is_followed_by_the_newest_version_even_the_same() -> None:
    site = Site().opened()
    orders = site.lead.orders(None)
    next(orders)
    site.answer(2, refused=1)
    assert next(orders) == Order(do="pull", version=0, number=2)
    site.arrive(2)
    assert list(orders) == [Order(do="adopt", version=0, codec="bfloat16", dropped=True), GO]


def test_progress_on_a_refused_update_is_not_pushed() -> None:
    site = Site().opened()
    assert list(site.lead.orders(0.0)) == [Order(do="push", number=2), GO]
    site.answer(2, refused=2)
    assert list(site.lead.orders(0.0)) == [Order(do="pull", version=0, number=2), GO]
    site.arrive(2)
    assert list(site.lead.orders(0.0)) == [Order(do="adopt", version=0, codec="bfloat16", dropped=True), GO]


def test_a_refusal_heard_after_a_version_was_adopted_costs_nothing_more() -> None:
    site = Site().opened()
    assert list(site.lead.orders(0.0)) == [Order(do="push", number=2), GO]
    site.answer(2)
    site.news.version = 1
    list(site.lead.orders(0.0))  # pushes 3, begins to pull 1
    site.answer(3)
    site.arrive(2)
    assert list(site.lead.orders(0.0))[1] == Order(do="adopt", version=1, codec="bfloat16")  # after pushing 4
    site.answer(4, refused=2)
    assert list(site.lead.orders(0.0)) == [Order(do="push", number=5), GO]


def test_a_site_that_diverged_goes_back_to_the_version() -> None:
    site = Site().opened()
    orders = site.lead.orders(None)
    assert next(orders).do == "push"
    site.lead.not_sent()
    assert next(orders) == Order(do="pull", version=0, number=2)
    site.arrive(2)
    assert next(orders) == Order(do="adopt", version=0, codec="bfloat16", dropped=True)


def test_a_version_that_is_gone_before_all_have_it_is_followed_by_a_newer_one() -> None:
    site = Site().opened()
    orders = site.lead.orders(None)
    next(orders)
    site.answer(2)
    site.news.version = 1
    assert next(orders) == Order(do="pull", version=1, number=2)
    site.arrive(2, gone=1)
    site.news.version = 5
    assert next(orders) == Order(do="pull", version=5, number=3)
    site.arrive(3)
    assert next(orders) == Order(do="adopt", version=5, codec="bfloat16")


# ---- overlap -----------------------------------------------------------------------------------------------------------------


def overlapping(site: Site, wait_s: float | None = 0.0) -> list[Order]:
    return list(site.lead.orders(wait_s, overlap=True))


CARRIED = Order(do="adopt", version=1, codec="bfloat16", carry=True)


def test_an_overlapping_boundary_pushes_and_goes_on_and_candidates_adopt() -> None:
    site = Site(carry=True).opened()
    assert overlapping(site, None) == [Order(do="push", number=2), GO]
    site.news.version = 1
    assert list(site.lead.glance()) == [GO]  # the update's fate is not known yet
    site.answer(2)
    assert list(site.lead.glance()) == [Order(do="pull", version=1, number=2), GO]
    assert list(site.lead.glance()) == [GO]
    site.arrive(2)
    assert list(site.lead.glance()) == [CARRIED, GO]
    assert overlapping(site, None) == [Order(do="push", number=3), GO]


def test_an_overlapping_boundary_first_adopts_what_is_awaited() -> None:
    site = Site(carry=True).opened()
    overlapping(site)
    site.answer(2)
    site.news.version = 1
    orders = site.lead.orders(None, overlap=True)
    assert next(orders) == Order(do="pull", version=1, number=2)
    site.arrive(2)
    assert list(orders) == [CARRIED, Order(do="push", number=3), GO]


def test_an_overlapping_boundary_whose_time_is_up_before_the_answer_makes_no_update() -> None:
    site = Site(carry=True).opened()
    overlapping(site)
    assert overlapping(site) == [GO]
    site.answer(2)  # but no version came of it in time: another update on the same base
    assert overlapping(site) == [Order(do="push", number=3), GO]


def test_what_was_learnt_on_a_refused_update_is_neither_carried_nor_sent() -> None:
    site = Site(carry=True).opened()
    overlapping(site)
    site.answer(2, refused=1)
    orders = site.lead.orders(None, overlap=True)
    assert next(orders) == Order(do="pull", version=0, number=2)
    site.arrive(2)
    assert list(orders) == [Order(do="adopt", version=0, codec="bfloat16", dropped=True), GO]
    assert overlapping(site) == [Order(do="push", number=3), GO]


def test_the_last_version_is_adopted_as_it_is() -> None:
    site = Site(carry=True).opened()
    overlapping(site)
    site.answer(2)
    site.news.version, site.news.finished = 1, "enough"
    orders = site.lead.glance()
    assert next(orders) == Order(do="pull", version=1, number=2)
    site.arrive(2)
    assert list(orders) == [Order(do="adopt", version=1, codec="bfloat16"), Order(do="go", run="run", finished="enough")]


def test_a_failure_of_any_rank_is_raised_at_a_candidate() -> None:
    site = Site(carry=True).opened()
    site.rendezvous.fail("", "gone wrong")
    assert list(site.lead.glance()) == [Order(do="fail", message="gone wrong")]


def test_a_resumed_site_awaits_the_version_after_its_update_and_carries_its_progress_on() -> None:
    site = Site(carry=True)
    site.news.version, site.news.wants_init = 0, False
    assert list(site.lead.opening(LAYOUT, "int8", Tier.SITE, 0, "run", awaiting=True)) == [GO]
    site.news.version = 1
    orders = site.lead.orders(None, overlap=True)
    assert next(orders) == Order(do="pull", version=1, number=1)
    site.arrive(1)
    assert list(orders) == [CARRIED, Order(do="push", number=1), GO]


# ---- the end and the beginning -----------------------------------------------------------------------------------------------


def test_the_last_version_is_adopted_before_the_end() -> None:
    site = Site().opened()
    orders = site.lead.orders(None)
    next(orders)
    site.answer(2)
    site.news.version, site.news.finished = 1, "enough"
    assert next(orders).do == "pull"
    site.arrive(2)
    assert list(orders) == [Order(do="adopt", version=1, codec="bfloat16"), Order(do="go", run="run", finished="enough")]


def test_nothing_is_pushed_once_the_run_is_over() -> None:
    site = Site().opened()
    site.news.finished = "enough"
    assert list(site.lead.orders(None)) == [Order(do="go", run="run", finished="enough")]


def test_edge_devices_do_not_found_a_run() -> None:
    site = Site()
    site.news.version = 0
    assert next(site.opening(tier=Tier.EDGE)).do == "pull"


def test_a_checkpoint_of_the_newest_version_is_trained_on() -> None:
    site = Site()
    site.news.version, site.news.wants_init = 3, False
    assert list(site.opening(base=3, run="run")) == [GO]


def test_a_checkpoint_of_an_older_version_is_refreshed() -> None:
    site = Site()
    site.news.version, site.news.wants_init = 3, False
    assert next(site.opening(base=2, run="run")) == Order(do="pull", version=3, number=1)


@pytest.mark.parametrize(
    ("opening", "reason", "says"),
    [
        ({"base": 4, "run": "run"}, Reason.FUTURE_BASE, "of version 4, run 'run' is at 3"),
        ({"base": 1, "run": "other"}, Reason.WRONG_RUN, "of run 'other', the coordinator's run is 'run'"),
        ({"codec": "int4"}, Reason.UNKNOWN_CODEC, "takes float32, int8, topk, this site sends int4"),
    ],
)
def test_what_cannot_succeed_is_raised_on_all_ranks(opening: dict[str, Any], reason: Reason, says: str) -> None:
    site = Site()
    site.news.version = 3
    (order,) = site.opening(**opening)
    assert (order.do, order.reason) == ("fail", reason.value)
    assert says in order.message


def test_another_model_is_told_by_its_first_differing_tensor() -> None:
    site = Site()
    site.news.refusal = Refused(Reason.WRONG_LAYOUT, "another layout")
    (order,) = site.opening()
    assert (order.do, order.reason) == ("fail", "")
    assert "expected parameter 'w' of shape (11,)" in order.message


def test_the_end_of_the_session_or_a_failure_of_any_rank_ends_a_boundary() -> None:
    site = Site().opened()
    site.rendezvous.fail(Reason.WRONG_IDENTITY.value, "no certificate")
    site.rendezvous.fail("", "a later one")
    assert list(site.lead.orders(None)) == [Order(do="fail", reason="WRONG_IDENTITY", message="no certificate")]
    other = Site().opened()
    other.news.failure = LayoutMismatch("gone wrong")
    assert list(other.lead.orders(None)) == [Order(do="fail", message="gone wrong")]


def test_a_rank_whose_machine_is_gone_is_not_waited_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "LOST_S", 0.5)
    for module in (lead, rendezvous):
        monkeypatch.setattr(module, "SIGN_S", 0.01)
    site = Site().opened()
    waiting = threading.Thread(target=site.rendezvous.clone().await_order, args=(99, 1))  # rank 1 is there, rank 2 is not
    waiting.start()
    orders = site.lead.orders(None)
    assert next(orders) == Order(do="push", number=2)
    assert list(orders) == [
        Order(do="fail", message="rank 2 of the site has given no sign of life for 0.5 s; its machine may be gone")
    ]
    site.rendezvous.give(99, GO)
    waiting.join()


def told(site: Site, sequence: int, state: State) -> None:
    assert site.unsettled is not None
    site.unsettled.take(Receipt(update_id=UpdateId("lab", 7, sequence), state=state, version=1))


def test_an_update_that_the_next_parent_does_not_know_is_sent_again() -> None:
    site = Site(several=True)
    site.news.wants_init, site.news.version = False, 0
    orders = site.opening()
    assert next(orders).do == "pull"
    site.arrive(1)
    assert [order.do for order in orders] == ["adopt", "go"]
    orders = site.lead.orders(None)
    assert next(orders) == Order(do="push", number=1)
    assert site.unsettled is not None
    assert site.unsettled.open() == (UpdateId("lab", 7, 1),)
    told(site, 1, State.UNKNOWN)  # it is on its way: nothing is lost
    site.answer(1)
    site.known.address = "east"  # type: ignore[attr-defined]
    assert next(orders) == Order(do="move", address="east")
    told(site, 1, State.UNKNOWN)
    told(site, 1, State.UNKNOWN)  # asked twice, sent once
    assert next(orders) == Order(do="again", number=1)
    site.answer(1)
    site.news.version = 1
    assert next(orders) == Order(do="pull", version=1, number=2)
    site.arrive(2)
    assert list(orders) == [Order(do="adopt", version=1, codec="bfloat16"), Order(do="go", run="run", open=(1,))]
    told(site, 1, State.MERGED)
    assert site.unsettled.open() == ()


def test_a_site_makes_no_more_updates_than_it_can_keep() -> None:
    site = Site(several=True)
    assert site.unsettled is not None
    for sequence in range(100, 100 + MAX_OPEN):
        site.unsettled.sent(sequence)
    assert [order.do for order in site.lead.orders(0.0)] == ["go"]
    told(site, 100, State.EXPIRED)
    assert [order.do for order in site.lead.orders(0.0)] == ["push", "go"]
    site.lead.not_sent()
    assert site.unsettled.room
