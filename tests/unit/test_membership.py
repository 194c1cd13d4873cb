"""Leases, incarnations and the running counts."""

from __future__ import annotations

import pytest
from helpers.steering import durable, header, partial, uid

from fleetddp.common.config import MembersConfig
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import Heartbeat, Join
from fleetddp.common.membership import Membership
from fleetddp.common.recovered import Recovered
from fleetddp.common.update import Tier


def members(*nodes: str, now: float = 0.0) -> Membership:
    """These edge nodes have joined; leases last 10 s."""
    membership = Membership(MembersConfig(heartbeat_s=1, lease_s=10))
    for node in nodes:
        membership.join(Join(node=node, tier=Tier.EDGE, incarnation=1), now)
    return membership


def counts(membership: Membership) -> tuple[int, int, int]:
    return membership.expected, membership.arrived, membership.outstanding


def test_a_lease_ends_after_the_last_sign_of_life() -> None:
    membership = members("a", "b", "c")
    membership.hear(Heartbeat(node="a", incarnation=1), 4)
    membership.touch("b", 6)
    assert membership.next_lease == 10
    assert [m.node for m in membership.expire(9.99)] == []
    assert [m.node for m in membership.expire(10)] == ["c"]
    assert membership.next_lease == 14
    assert [m.node for m in membership.expire(14)] == ["a"]
    assert [m.node for m in membership.expire(16)] == ["b"]
    assert counts(membership) == (0, 0, 0)
    assert membership.live() == {"site": 0, "edge": 0, "region": 0}


def test_who_could_not_be_heard_is_not_given_up() -> None:
    membership = members("a", "b")
    assert membership.expire(50) == []  # this process stood still for 40 s: what members sent meanwhile waits to be read
    assert membership.next_lease == 51
    membership.hear(Heartbeat(node="a", incarnation=1), 50.5)
    assert [m.node for m in membership.expire(51)] == ["b"]
    assert membership.next_lease == 60.5


def test_a_member_without_a_lease_must_join_again() -> None:
    membership = members("a")
    membership.expire(10)
    with pytest.raises(Refused, match="lease of 10 s") as refused:
        membership.hear(Heartbeat(node="a", incarnation=1), 11)
    assert refused.value.reason is Reason.UNKNOWN_NODE
    membership.join(Join(node="a", tier=Tier.EDGE, incarnation=1), 12)
    assert membership.next_lease == 22
    assert counts(membership) == (1, 0, 1)


def test_leaving_and_coming_back_many_times_leaves_one_lease_entry() -> None:
    membership = members("a")
    for _ in range(5):
        assert membership.leave("a", 1)
        assert not membership.leave("a", 1)
        membership.join(Join(node="a", tier=Tier.EDGE, incarnation=1), 3)
    assert membership.expire(10) == []
    assert [m.node for m in membership.expire(13)] == ["a"]
    assert membership.next_lease == float("inf")


def test_an_older_process_is_told_that_it_was_replaced() -> None:
    membership = members("a")
    membership.join(Join(node="a", tier=Tier.EDGE, incarnation=5), 1)
    for call in (
        lambda: membership.join(Join(node="a", tier=Tier.EDGE, incarnation=4), 2),
        lambda: membership.hear(Heartbeat(node="a", incarnation=1), 2),
    ):
        with pytest.raises(Refused, match=r"of a was replaced by 5") as refused:
            call()
        assert refused.value.reason is Reason.SUPERSEDED
    assert not membership.leave("a", 4)
    assert counts(membership) == (1, 0, 1)
    with pytest.raises(Refused, match="incarnation 6 of a has not joined"):
        membership.hear(Heartbeat(node="a", incarnation=6), 2)


def test_an_older_process_is_told_so_even_after_the_newer_one_left() -> None:
    membership = members("a")
    membership.join(Join(node="a", tier=Tier.EDGE, incarnation=5), 1)
    membership.leave("a", 5)
    with pytest.raises(Refused, match="SUPERSEDED"):
        membership.join(Join(node="a", tier=Tier.EDGE, incarnation=4), 2)


def test_counts_follow_each_member() -> None:
    membership = members("a", "b", "c", "d")
    assert counts(membership) == (4, 0, 4)
    membership.arrive(durable(header(uid("a"))), window=1, staleness=0)
    assert counts(membership) == (4, 1, 3)
    membership.arrive(durable(header(uid("a", 1))), window=1, staleness=0)
    assert counts(membership) == (4, 1, 3)
    membership.stall("b", +1)
    assert counts(membership) == (4, 1, 2)
    membership.spoil(membership.known("c"))
    assert counts(membership) == (3, 1, 1)
    membership.leave("a", 1)  # what it sent stays
    assert counts(membership) == (3, 1, 1)
    membership.leave("d", 1)
    assert counts(membership) == (2, 1, 0)
    membership.stall("b", -1)
    assert counts(membership) == (2, 1, 1)
    membership.open_window()
    assert counts(membership) == (2, 0, 2)  # b and c


def test_a_region_stands_for_its_leaves() -> None:
    membership = members()
    membership.join(Join(node="r", tier=Tier.REGION, incarnation=1, leaves=5), 0)
    assert counts(membership) == (5, 0, 5)
    membership.hear(Heartbeat(node="r", incarnation=1, leaves=4), 1)
    assert counts(membership) == (4, 0, 4)
    membership.arrive(durable(partial(uid("r"), [uid("x"), uid("x", 1), uid("y")])), window=1, staleness=0)
    assert counts(membership) == (4, 2, 0)  # x and y; the region has come in
    membership.arrive(durable(partial(uid("r", 1), [uid(n) for n in "yzuvw"])), window=1, staleness=0)
    assert counts(membership) == (6, 6, 0)  # more than it declared


def test_no_other_member_stands_for_many() -> None:
    membership = Membership(MembersConfig(heartbeat_s=1, lease_s=10))
    membership.join(Join(node="a", tier=Tier.EDGE, incarnation=1, leaves=1000), 0)
    assert counts(membership) == (1, 0, 1)
    membership.hear(Heartbeat(node="a", incarnation=1, leaves=1000), 1)
    assert counts(membership) == (1, 0, 1)


def test_members_known_from_the_journal_count_but_are_not_answered() -> None:
    membership = Membership(MembersConfig(heartbeat_s=1, lease_s=10, sites=("paris",)))
    accepted = (durable(partial(uid("r"), [uid("x"), uid("y")])),)
    merged = dict.fromkeys([uid("paris"), uid("r"), uid("s"), uid("z")], 1)
    recovered = Recovered(run="fleet", accepted=accepted, merged=merged, inside={uid("z")}, partials={uid("s"), uid("r")})
    membership.presume(recovered, 50)
    assert counts(membership) == (4, 0, 4)
    assert membership.live() == {"site": 1, "edge": 0, "region": 2}
    with pytest.raises(Refused, match="UNKNOWN_NODE"):
        membership.known("paris")
    membership.join(Join(node="paris", tier=Tier.SITE, incarnation=3), 55)
    assert counts(membership) == (4, 0, 4)
    assert membership.known("paris").incarnation == 3
    assert [m.node for m in membership.expire(60)] == ["r", "s"]


def test_a_change_of_the_counts_is_noted() -> None:
    membership = members("a")
    membership.changed = False
    membership.hear(Heartbeat(node="a", incarnation=1), 1)
    assert not membership.changed
    membership.leave("a", 1)
    assert membership.changed


def test_of_members_that_are_gone_the_last_are_remembered() -> None:
    membership = Membership(MembersConfig(heartbeat_s=1, lease_s=10), remembered=2)
    for number, node in enumerate("abcd"):
        membership.join(Join(node=node, tier=Tier.EDGE, incarnation=1), number)
    membership.arrive(durable(header(uid("a"))), 0, 0)
    assert membership.leave("b", 1)
    membership.expire(10)  # a
    membership.join(Join(node="b", tier=Tier.EDGE, incarnation=2), 11)
    membership.expire(12)  # c
    membership.expire(13)  # d
    assert [member is not None for member in map(membership.get, "abcd")] == [False, True, True, True]
    assert counts(membership) == (2, 1, 1)  # b, and a whose update is in
    membership.arrive(durable(header(uid("a", 1))), 0, 0)  # it was being made durable: it harms nobody
    membership.open_window()
    assert counts(membership) == (1, 0, 1)
    membership.join(Join(node="a", tier=Tier.EDGE, incarnation=1), 14)
    assert counts(membership) == (2, 0, 2)
