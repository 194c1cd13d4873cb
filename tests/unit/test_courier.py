"""A rank's courier (``cloud/courier.py``): what it tries again, what it drops, what ends training."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import google_crc32c
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fleetddp.cloud.courier import Courier, Errand, Parcel
from fleetddp.cloud.rendezvous import Rendezvous, polls
from fleetddp.common.errors import Reason, Refused, Unreachable
from fleetddp.common.events import ByteRange
from fleetddp.common.transport import Sink
from fleetddp.common.update import Kind, Receipt, Slice, State, Tier, UpdateHeader, UpdateId, Version

HEADER = UpdateHeader(
    update_id=UpdateId("lab", 1, 7), kind=Kind.DELTA, tier=Tier.SITE, base_version=0, codec="float32", layout="x"
)
ACCEPTED = Receipt(update_id=HEADER.update_id, state=State.ACCEPTED)
PARCEL = Parcel(header=HEADER, intervals=((0, 512),), samples=3.0, payload=lambda: memoryview(b"abcd"))


class Parent:
    """Answers with what it is given, one after another; the bytes of a version are its number's."""

    def __init__(self, *answers: Receipt | Exception | str) -> None:
        self.answers = list(answers)
        self.slices: list[Slice] = []
        self.asked: list[tuple[int, list[ByteRange]]] = []
        self.closed = threading.Event()

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        self.slices.append(slice)
        return cast(Receipt, self.answer())

    def pull(self, version: int, ranges: Sequence[ByteRange], sink: Sink) -> Version:
        self.asked.append((version, list(ranges)))
        codec = cast(str, self.answer())
        for start, stop in ranges:
            for offset in range(start, stop, 3):
                sink(offset, memoryview(bytes(n % 256 for n in range(offset, min(offset + 3, stop)))))
        return Version(number=version, layout="x", codec=codec, payload_bytes=1000, digest=0, published_at=0.0)

    def answer(self) -> Receipt | str:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.closed.set()


class Bench:
    def __init__(self, *answers: Receipt | Exception | str) -> None:
        self.parent = Parent(*answers)
        self.rendezvous = Rendezvous(cast(Any, dist.HashStore()))
        self.courier = Courier(cast(Any, self.parent), self.rendezvous)

    def wait(self, tally: str) -> None:
        for waited in polls():
            assert waited < 10
            if self.rendezvous.tally(tally):
                return

    def failure(self) -> tuple[str, str]:
        for waited in polls():
            assert waited < 10
            if failure := self.rendezvous.failure():
                return failure
        raise AssertionError


@pytest.fixture
def bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(*answers: Receipt | Exception | str) -> Bench:
        made.append(Bench(*answers))
        return made[-1]

    yield make
    for one in made:
        one.courier.close()


def refused(reason: Reason) -> Receipt:
    return Receipt(update_id=HEADER.update_id, state=State.REFUSED, reason=reason.value, message="no")


def test_a_push_is_tried_again_until_it_is_answered(bench: Any) -> None:
    one = bench(Unreachable("gone"), Refused(Reason.UNKNOWN_NODE, "not joined yet"), Unreachable("still gone"), ACCEPTED)
    one.courier.push(PARCEL)
    one.wait("answered/7")
    assert one.courier.take_receipt() == ACCEPTED
    assert one.courier.take_receipt() is None
    assert one.rendezvous.tally("refused/7") == 0
    assert one.parent.slices == [Slice(intervals=((0, 512),), samples=3.0, digest=google_crc32c.value(b"abcd"))] * 4


@pytest.mark.parametrize("reason", [Reason.STALE, Reason.NORM_BOUND, Reason.NOT_FINITE, Reason.INIT_TAKEN, Reason.STALLED])
def test_an_update_may_be_refused(bench: Any, reason: Reason) -> None:
    one = bench(refused(reason))
    one.courier.push(PARCEL)
    one.wait("answered/7")
    assert one.rendezvous.tally("refused/7") == 1
    assert one.courier.take_receipt().reason == reason.value
    assert one.rendezvous.failure() is None


@pytest.mark.parametrize("reason", [Reason.WRONG_LAYOUT, Reason.UNKNOWN_CODEC, Reason.BAD_WEIGHT, Reason.FUTURE_BASE])
def test_a_refusal_of_every_update_ends_training(bench: Any, reason: Reason) -> None:
    one = bench(refused(reason))
    one.courier.push(PARCEL)
    assert one.failure() == (reason.value, "no")


@pytest.mark.parametrize("error", [Refused(Reason.WRONG_IDENTITY, "no"), Refused(Reason.SUPERSEDED, "no")])
def test_a_refusal_of_the_member_ends_training(bench: Any, error: Refused) -> None:
    one = bench(error)
    one.courier.push(PARCEL)
    assert one.failure() == (error.reason.value, "no")


def test_a_fault_of_ours_ends_training_on_all_ranks(bench: Any) -> None:
    one = bench(ZeroDivisionError("a bug"))
    one.courier.push(PARCEL)
    assert one.failure() == ("", "ZeroDivisionError: a bug")


def landing(ranges: tuple[ByteRange, ...]) -> Any:
    def lay(codec: str, fragments: Sequence[int]) -> tuple[tuple[ByteRange, ...], Tensor]:
        assert codec == "int8"
        return ranges, torch.empty(sum(stop - start for start, stop in ranges), dtype=torch.uint8)

    return lay


def test_ranges_land_one_after_another(bench: Any) -> None:
    one = bench("int8", Unreachable("gone"), "int8", "int8")
    one.courier.pull(Errand(number=1, version=4, landing=landing(((10, 20), (40, 44)))))
    one.wait("pulled/1")
    landed = one.courier.take_landed()
    assert (landed.version, landed.codec, one.courier.published) == (4, "int8", "int8")
    assert landed.data.tolist() == [*range(10, 20), *range(40, 44)]
    one.courier.pull(Errand(number=2, version=5, landing=landing(((0, 1),))))
    one.wait("pulled/2")
    assert one.parent.asked[0] == (4, [(0, 1)])  # once, to learn the codec
    assert one.parent.asked[3:] == [(5, [(0, 1)])]


def test_a_rank_without_a_slice_pulls_nothing(bench: Any) -> None:
    one = bench("int8")
    one.courier.pull(Errand(number=1, version=4, landing=landing(())))
    one.wait("pulled/1")
    assert one.courier.take_landed().data.numel() == 0
    assert len(one.parent.asked) == 1


def test_a_version_that_is_gone(bench: Any) -> None:
    one = bench(Refused(Reason.UNKNOWN_VERSION, "retention"))
    one.courier.pull(Errand(number=1, version=4, landing=landing(((0, 1),))))
    one.wait("pulled/1")
    assert one.rendezvous.tally("gone/1") == 1
    assert one.courier.take_landed() is None


def test_a_run_does_not_change_its_codec(bench: Any) -> None:
    one = bench("int8", "float32")
    one.courier.pull(Errand(number=1, version=4, landing=landing(((0, 1),))))
    assert "published in float32, those before it in int8" in one.failure()[1]


def test_close_gives_up_what_is_under_way(bench: Any) -> None:
    one = bench(*[Unreachable("gone")] * 1000)
    one.courier.push(PARCEL)
    one.courier.close()
    one.courier._thread.join(10)
    assert not one.courier._thread.is_alive()
    assert one.parent.closed.is_set()
    assert one.rendezvous.failure() is None
