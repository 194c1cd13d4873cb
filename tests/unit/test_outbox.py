"""The outbox: what it offers and when, error feedback through refusals, and a crash between any two of its steps."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import google_crc32c
import pytest
import torch
from helpers.losing_files import LosingFiles
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common.errors import Reason, Refused, StorageError
from fleetddp.common.payload import tensor_over
from fleetddp.common.update import NO_VERSION, Kind, Receipt, UpdateId
from fleetddp.common.update import State as Standing
from fleetddp.edge.outbox import CRASH_POINTS, Entry, Nature, Outbox
from fleetddp.edge.trainer import Encoded, Work

N = 6
NATURE = Nature("phone", "run", "f" * 64, Kind.DELTA, "float32", ((0, N),))


def encoder(end: Tensor, spec: str) -> Callable[[Tensor, Tensor | None], Encoded]:
    return lambda start, residual: Encoded(*codecs.get(spec).encode_with_feedback(start - end, residual))


def put(box: Outbox, end: Tensor, *, samples: float = 10, spec: str = "float32") -> UpdateId:
    return box.put(Work(samples, 2, 0.5, 1.0), encoder(end, spec), end)


def offer(box: Outbox) -> Entry:
    entry = box.offer()
    assert entry is not None
    return entry


def said(entry: Entry) -> Tensor:
    return codecs.get(entry.header.codec).decode(tensor_over(entry.payload), N)


def answer(box: Outbox, entry: Entry, state: Standing) -> bool:
    return box.record(Receipt(update_id=entry.header.update_id, state=state))


def at_base(folder: Path, *, nature: Nature = NATURE) -> Outbox:
    box = Outbox(folder, nature)
    box.adopt(3, torch.zeros(N), max_staleness=10)
    return box


def vector(*values: float) -> Tensor:
    return torch.tensor([*values, *[0.0] * (N - len(values))], dtype=torch.float32)


def test_a_new_outbox_holds_nothing(tmp_path: Path) -> None:
    box = Outbox(tmp_path, NATURE)
    assert (box.base_version, box.trained, box.offer(), box.open(), len(box)) == (NO_VERSION, False, None, (), 0)


def test_an_update_goes_out_whole(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    assert torch.equal(box.local(), torch.zeros(N))
    update_id = put(box, vector(-1, 2))
    entry = offer(box)
    assert entry.header.update_id == update_id == UpdateId("phone", box.incarnation, 1)
    assert (entry.header.base_version, entry.header.steps, entry.header.seconds) == (3, 2, 0.5)
    assert entry.header.metrics == {"train_loss": 1.0}
    assert (entry.slice.samples, entry.slice.intervals) == (10, ((0, N),))
    assert entry.slice.digest == google_crc32c.value(bytes(entry.payload))
    assert torch.equal(said(entry), vector(1, -2))
    assert box.open() == (update_id,)
    assert box.trained


def test_a_pending_update_is_replaced_by_a_longer_one(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    first = put(box, vector(-1), samples=10)
    second = put(box, vector(-5), samples=7)
    assert (first, len(box), box.open()) == (second, 1, ())
    entry = offer(box)
    assert torch.equal(said(entry), vector(5))  # from its base, not from where the first one ended
    assert (entry.slice.samples, entry.header.steps) == (17, 4)


def test_after_an_offer_the_next_starts_where_it_ended(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    put(box, vector(-1), samples=10)
    first = offer(box)
    put(box, vector(-5), samples=7)
    assert torch.equal(box.local(), vector(-5))
    assert offer(box) == first  # not acknowledged yet: it is offered again
    assert not answer(box, first, Standing.ACCEPTED)
    second = offer(box)
    assert torch.equal(said(second), vector(4))
    assert second.slice.samples == 7
    assert second.header.update_id.sequence == 2
    assert box.open() == (first.header.update_id, second.header.update_id)
    assert answer(box, first, Standing.MERGED)
    assert not answer(box, first, Standing.MERGED)
    assert box.open() == (second.header.update_id,)
    assert torch.equal(box.local(), vector(-5))


def test_a_pending_update_keeps_its_base_when_a_version_is_adopted(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    put(box, vector(-1))
    box.adopt(4, vector(9), max_staleness=10)
    assert not box.trained
    put(box, vector(8))
    old, new = offer(box), None
    answer(box, old, Standing.ACCEPTED)
    new = offer(box)
    assert [old.header.base_version, new.header.base_version] == [3, 4]
    assert torch.equal(said(new), vector(1))
    assert torch.equal(box.local(), vector(8))


def test_an_accepted_update_that_the_parent_forgot_is_sent_again(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    put(box, vector(-1))
    entry = offer(box)
    answer(box, entry, Standing.ACCEPTED)
    assert box.offer() is None
    answer(box, entry, Standing.UNKNOWN)
    assert offer(box) == entry


def test_receipts_of_unknown_or_unoffered_updates_change_nothing(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    update_id = put(box, vector(-1))
    assert not box.record(Receipt(update_id=update_id, state=Standing.REFUSED))
    assert not box.record(Receipt(update_id=UpdateId("phone", 1, 1), state=Standing.MERGED))
    assert len(box) == 1


def test_a_refusal_drops_the_update_and_starts_at_the_base_again(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    put(box, vector(-1))
    refused = offer(box)
    put(box, vector(-5))  # on top of it
    assert box.rewind() is None
    assert answer(box, refused, Standing.REFUSED)
    rewound = box.rewind()
    assert rewound is not None
    assert torch.equal(rewound, torch.zeros(N))
    assert torch.equal(box.local(), torch.zeros(N))
    assert (len(box), box.trained, box.rewind()) == (0, False, None)
    assert (box.counts["refused"], box.counts["dropped"]) == (1, 1)


def test_a_refusal_of_an_older_base_leaves_the_newer_one_alone(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    put(box, vector(-1))
    old = offer(box)
    box.adopt(4, vector(9), max_staleness=10)
    put(box, vector(8))
    answer(box, old, Standing.REFUSED)
    assert box.rewind() is None
    assert torch.equal(box.local(), vector(8))


def lossy(folder: Path) -> Outbox:
    return at_base(folder, nature=replace(NATURE, codec="topk:0.3"))  # ceil(0.002 * 512) = 2 of the six are sent


def put_lossy(box: Outbox, *values: float) -> None:
    put(box, vector(*values), spec="topk:0.3")


def test_what_was_left_out_is_sent_later(tmp_path: Path) -> None:
    box = lossy(tmp_path)
    put_lossy(box, -1, -2, -3)
    first = offer(box)
    assert torch.equal(said(first), vector(0, 2, 3))  # 1 is left
    put_lossy(box, -1, -2, -3, -0.5, -0.25)  # means 0.5 and 0.25 more
    answer(box, first, Standing.ACCEPTED)
    assert torch.equal(said(offer(box)), vector(1, 0, 0, 0.5))


def test_a_refusal_restores_the_residual_before_it(tmp_path: Path) -> None:
    box = lossy(tmp_path)
    put_lossy(box, -1, -2, -3)
    answer(box, offer(box), Standing.MERGED)  # leaves (1)
    box.adopt(4, torch.zeros(N), max_staleness=10)
    put_lossy(box, 0, 0, 0, -4, -5, -6)
    refused = offer(box)
    assert torch.equal(said(refused), vector(0, 0, 0, 0, 5, 6))
    answer(box, refused, Standing.REFUSED)  # its (4) is forgotten, (1) is owed
    box.adopt(5, torch.zeros(N), max_staleness=10)
    put_lossy(box, 0, -0.5)
    assert torch.equal(said(offer(box)), vector(1, 0.5))


def test_a_refusal_below_a_later_update_takes_only_its_own_part_out(tmp_path: Path) -> None:
    box = lossy(tmp_path)
    put_lossy(box, -1, -2, -3)
    first = offer(box)  # leaves (1)
    box.adopt(4, torch.zeros(N), max_staleness=10)
    put_lossy(box, 0, 0, 0, -4, -5, -6)  # says 5 and 6, leaves (1, 0, 0, 4)
    answer(box, first, Standing.REFUSED)  # (1) was the refused one's: (0, 0, 0, 4) is owed
    answer(box, offer(box), Standing.MERGED)
    box.adopt(5, torch.zeros(N), max_staleness=10)
    put_lossy(box, 0)
    assert torch.equal(said(offer(box)), vector(0, 0, 0, 4))


def test_a_residual_that_is_too_old_is_dropped_and_counted(tmp_path: Path) -> None:
    box = lossy(tmp_path)
    put_lossy(box, -1, -2, -3)
    first = offer(box)
    box.adopt(5, torch.zeros(N), max_staleness=2)
    assert box.counts["residuals_dropped"] == 0
    box.adopt(6, torch.zeros(N), max_staleness=2)
    assert box.counts["residuals_dropped"] == 1
    answer(box, first, Standing.REFUSED)  # must not bring back what was dropped
    put_lossy(box, 0, 0, -7)
    assert torch.equal(said(offer(box)), vector(0, 0, 7))


def test_a_restart_goes_on_where_it_was_under_a_new_incarnation(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    put(box, vector(-1))
    entry = offer(box)
    put(box, vector(-5))
    old = box.incarnation
    box.close()
    again = Outbox(tmp_path, NATURE)
    assert again.incarnation > old
    assert again.base_version == 3
    assert torch.equal(again.local(), vector(-5))
    assert offer(again) == entry  # under its old name: the parent may have it
    answer(again, entry, Standing.ACCEPTED)
    assert offer(again).header.update_id == UpdateId("phone", old, 2)


def test_an_outbox_of_another_run_is_emptied(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    put(box, vector(-1))
    old = box.incarnation
    box.close()
    again = Outbox(tmp_path, replace(NATURE, run="other"))
    assert (again.base_version, len(again), again.counts["dropped"]) == (NO_VERSION, 0, 1)
    assert again.incarnation > old
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix == ".raw"] == []


def test_what_the_encoder_refuses_changes_nothing(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    put(box, vector(-1))
    with pytest.raises(Refused) as refused:
        put(box, vector(float("nan")))
    assert refused.value.reason is Reason.NOT_FINITE
    assert torch.equal(box.local(), vector(-1))
    assert torch.equal(said(offer(box)), vector(1))


def test_two_processes_cannot_share_an_outbox(tmp_path: Path) -> None:
    box = at_base(tmp_path)
    with pytest.raises(StorageError, match="in use by another process of this node: database is locked"):
        Outbox(tmp_path, NATURE)
    box.close()


class Crash(BaseException):
    """Stands for a kill -9."""


def contents(folder: Path) -> list[object]:
    """Everything a closed outbox holds, files by their bytes; fails if a row names a missing file."""
    files = ("base", "start", "residual", "payload", "end", "before", "after")
    state: list[object] = []
    with sqlite3.connect(folder / "outbox.sqlite") as database:
        database.row_factory = sqlite3.Row
        for table in ("node", "entry"):
            for row in database.execute(f"SELECT * FROM {table}").fetchall():
                keys = [key for key in row.keys() if key != "incarnation"]  # noqa: SIM118 (a Row iterates over values)
                state += [(folder / row[key]).read_bytes() if key in files and row[key] else row[key] for key in keys]
    database.close()
    return state


STEPS: dict[str, Callable[[Outbox], object]] = {
    "adopt": lambda box: box.adopt(7, vector(1), max_staleness=2),
    "put": lambda box: put_lossy(box, -1, -2, -3),
    "replace": lambda box: put_lossy(box, -7, -8, -9),
    "offer": lambda box: box.offer(),
    "put on top": lambda box: put_lossy(box, -4, -4, -4),
    "accepted": lambda box: answer(box, offer(box), Standing.ACCEPTED),
    "refused": lambda box: box.record(Receipt(update_id=box.open()[0], state=Standing.REFUSED)),
    "rewind": lambda box: box.rewind(),
    "put again": lambda box: put_lossy(box, -3, -2, -1),
    "offer again": lambda box: box.offer(),
    "merged": lambda box: box.record(Receipt(update_id=box.open()[0], state=Standing.MERGED)),
}


@pytest.mark.parametrize("luck", [None, 1], ids=["all unsynced lost", "some unsynced kept"])
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_power_loss_leaves_the_state_before_or_after_the_step(tmp_path: Path, point: str, luck: int | None) -> None:
    nature = replace(NATURE, codec="topk:0.3")
    armed = False

    def crash(reached: str) -> None:
        if armed and reached == point:
            raise Crash

    folder = tmp_path / "0"
    for number, step in enumerate(STEPS.values(), start=1):
        files = LosingFiles(folder)
        box = Outbox(folder, nature, files=files, at=crash)
        box.close()
        before = contents(folder)
        box = Outbox(folder, nature, files=files, at=crash)
        armed = True
        with pytest.raises(Crash):
            step(box)
        armed = False
        box.close()
        folder = tmp_path / str(number)
        files.crash(folder, None if luck is None else random.Random(luck))
        if point in ("files written", "files durable"):
            assert contents(folder) == before
            box = Outbox(folder, nature)
            step(box)
            box.close()
        assert contents(folder) != before


def test_only_files_that_count_stay(tmp_path: Path) -> None:
    box = lossy(tmp_path)
    for step in STEPS.values():
        step(box)
    assert len(box) == 0
    assert len(list(tmp_path.glob("*.raw"))) <= 3  # base, where the next starts, residual


def test_a_damaged_outbox_is_an_error_that_says_what_can_be_done(tmp_path: Path) -> None:
    Outbox(tmp_path / "box", NATURE).close()
    (tmp_path / "box" / "outbox.sqlite").write_bytes(b"junk" * 1000)
    with pytest.raises(StorageError, match=r"is damaged \(if it is removed, the node starts anew"):
        Outbox(tmp_path / "box", NATURE)
