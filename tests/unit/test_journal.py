"""What the journal keeps, forgets and refuses. (What it keeps through a crash: tests/integration/test_crash_points.py.)"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fleetddp.common.errors import ConfigError, Reason, Refused, StorageError
from fleetddp.common.events import Decision, Term
from fleetddp.common.files import OsFile, OsFiles
from fleetddp.common.high_water import INCARNATIONS
from fleetddp.common.journal import Journal, Recovered
from fleetddp.common.layout import Layout
from fleetddp.common.recovered import decision_from_json, decision_to_json, update_from_json, update_to_json
from fleetddp.common.update import Group, Kind, Slice, Tier, Update, UpdateHeader, UpdateId, Version

LAYOUT = Layout.of([("w", (4,))])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def journal(folder: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(folder, run="fleet", keep_versions=2)) as journal:
        yield journal


def make(
    node: str = "a", sequence: int = 1, kind: Kind = Kind.DELTA, *, incarnation: int = 7, payload: bytes = b"x" * 16
) -> Update:
    header = UpdateHeader(
        update_id=UpdateId(node, incarnation, sequence),
        kind=kind,
        tier=Tier.EDGE,
        base_version=0,
        codec="float32",
        layout=LAYOUT.fingerprint,
        layout_spec=LAYOUT.to_json() if kind is Kind.INIT else b"",
    )
    return Update(header=header, samples=1.5, squared_norm=0.1, payload_bytes=len(payload), slices=())


def accept(journal: Journal, update: Update, payload: bytes = b"x" * 16) -> Update:
    journal.stage(update.update_id, len(payload)).write(0, payload)
    journal.accept(update, 1.0)
    return update


def decision_of(number: int, *ids: UpdateId, leaves: tuple[UpdateId, ...] = ()) -> Decision:
    terms = tuple(Term(update_id=i, row=0, coefficient=1 / len(ids), buffer_coefficient=0.1) for i in ids)
    return Decision(
        version=number, at=100.1 + number, terms=terms, ids=ids, leaf_ids=leaves or ids, reason="quorum", metrics={"loss": 0.3}
    )


def publish(journal: Journal, number: int, decision: Decision | None = None) -> Version:
    version = Version(
        number=number,
        layout=LAYOUT.fingerprint,
        codec="float32",
        payload_bytes=4,
        digest=number,
        published_at=0.1 + number,
        metrics={"accuracy": 0.7},
    )
    draft = journal.begin_version(number)
    draft.pwrite(b"head%dtail" % (1000 + number), 0)
    journal.publish(version, draft, payload_start=4, layout=LAYOUT, decision=decision)
    journal.sweep()
    return version


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def reopened(journal: Journal) -> Recovered:
    """What the next process finds."""
    journal.close()
    with contextlib.closing(Journal(journal.directory, run=journal.run)) as again:
        return again.recover()


# ---- rows ------------------------------------------------------------------------------------------------------------------


def test_every_field_of_an_update_and_a_decision_survives_its_row() -> None:
    groups = tuple(
        Group(tier=tier, base_version=b, samples=0.1 * b, buffer_samples=b / 3, ids=(UpdateId("x.y", 2**62, b),))
        for tier, b in ((Tier.SITE, 3), (Tier.EDGE, 4))
    )
    header = replace(
        make(kind=Kind.PARTIAL).header, groups=groups, steps=9, seconds=0.7, metrics={"loss": 1e-300}, layout_spec=b"{}"
    )
    slices = (Slice(intervals=((0, 512), (1024, 1030)), samples=2.5, digest=2**32 - 1),)
    update = Update(header=header, samples=1 / 3, squared_norm=1e30, payload_bytes=2**40, slices=slices)
    assert update_from_json(update_to_json(update)) == update
    decision = decision_of(3, UpdateId("a", 1, 2), UpdateId("b", 1, 2), leaves=(UpdateId("c", 5, 6),))
    assert decision_from_json(decision_to_json(decision)) == decision


def test_a_new_journal_is_empty(journal: Journal) -> None:
    assert journal.recover() == Recovered.empty("fleet")
    assert journal.versions() == ()


def test_sqlite_syncs_every_commit(journal: Journal) -> None:
    # The crash tests trust SQLite's commits, which holds for these settings only (2: FULL).
    assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


# ---- a run, step by step ---------------------------------------------------------------------------------------------------


def test_accepted_updates_come_back_in_the_order_they_were_accepted(journal: Journal) -> None:
    updates = tuple(accept(journal, make(node, sequence)) for node, sequence in (("b", 1), ("a", 1), ("b", 2)))
    with journal.payload(updates[0].update_id) as payload:
        assert payload.read(2, 5) == b"xxx"
    assert journal.update(updates[1].update_id) == updates[1]
    recovered = reopened(journal)
    assert recovered.accepted == updates
    assert recovered.high_water == {}  # each is known by its row; if it is refused yet, it was never settled as merged
    assert recovered.merged == {}


def test_what_was_only_staged_is_gone(journal: Journal, folder: Path) -> None:
    journal.stage(make().update_id, 16).write(0, b"12")
    assert reopened(journal) == Recovered.empty("fleet")
    assert names(folder / "payloads") == []


def test_version_0_settles_the_init_and_brings_the_layout(journal: Journal, folder: Path) -> None:
    init = accept(journal, make("site", 0, Kind.INIT))
    version = publish(journal, 0)
    assert names(folder / "payloads") == []
    recovered = reopened(journal)
    assert (recovered.version, recovered.layout, recovered.accepted) == (version, LAYOUT, ())
    assert recovered.began_at == version.published_at
    assert recovered.merged == {init.update_id: 0}


def test_a_decision_stands_until_its_version_is_published(journal: Journal) -> None:
    publish(journal, 0)
    journal.opened(50.25)
    assert journal.recover().window_opened_at == 50.25
    update = accept(journal, make())
    late = accept(journal, make("z"))
    decision = decision_of(1, update.update_id)
    journal.decide(decision)
    recovered = journal.recover()
    assert recovered.decision == decision
    assert recovered.window_opened_at == decision.at  # the next window opened at once
    assert recovered.accepted == (update, late)
    version = publish(journal, 1, decision)
    recovered = reopened(journal)
    assert (recovered.decision, recovered.version, recovered.accepted) == (None, version, (late,))
    assert recovered.window_opened_at == decision.at
    assert recovered.merged == {update.update_id: 1}


def test_a_partial_settles_its_leaf_updates_too(journal: Journal) -> None:
    publish(journal, 0)
    partial = accept(journal, make("region", 3))
    leaves = (UpdateId("x", 1, 8), UpdateId("y", 1, 9))
    decision = decision_of(1, partial.update_id, leaves=leaves)
    journal.decide(decision)
    publish(journal, 1, decision)
    recovered = journal.recover()
    assert recovered.merged == dict.fromkeys((partial.update_id, *leaves), 1)
    assert recovered.high_water == {("region", 7): 3, ("x", 1): 8, ("y", 1): 9}
    assert (recovered.inside, recovered.partials) == (set(leaves), {partial.update_id})


def test_the_end_is_remembered(journal: Journal) -> None:
    journal.ended("version 5 is published")
    assert reopened(journal).finished == "version 5 is published"


def merge(journal: Journal, number: int, *updates: Update) -> None:
    decision = decision_of(number, *(accept(journal, update).update_id for update in updates))
    journal.decide(decision)
    publish(journal, number, decision)


def test_high_water_never_falls(journal: Journal) -> None:
    publish(journal, 0)
    merge(journal, 1, make(sequence=5))
    merge(journal, 2, make(sequence=3), make(incarnation=8))
    assert journal.recover().high_water == {("a", 7): 5, ("a", 8): 1}


def test_marks_of_the_newest_processes_of_a_node_are_kept(journal: Journal) -> None:
    publish(journal, 0)
    merge(journal, 1, make("b", incarnation=1))
    for incarnation in range(1, INCARNATIONS + 3):
        merge(journal, 1 + incarnation, make(incarnation=incarnation))
    newest = {("a", incarnation): 1 for incarnation in range(3, INCARNATIONS + 3)}
    assert journal.recover().high_water == {**newest, ("b", 1): 1}


def test_a_discarded_update_is_gone_whether_staged_or_accepted(journal: Journal, folder: Path) -> None:
    accepted = accept(journal, make("a"))
    journal.stage(make("b").update_id, 16).write(0, b"12")
    for node in ("a", "b", "never heard of"):
        journal.discard(UpdateId(node, 7, 1))
    assert names(folder / "payloads") == []
    assert journal.recover().accepted == ()
    assert journal.recover().high_water == {}  # it is in no version: a repeat must not be told that it was merged
    with pytest.raises(StorageError, match="no accepted update a/7/1"):
        journal.update(accepted.update_id)
    with pytest.raises(StorageError, match="nothing of it is staged"):
        journal.accept(make("b"), 0.0)


# ---- retention -------------------------------------------------------------------------------------------------------------


def test_the_last_versions_are_kept_and_open_readers_outlive_theirs(journal: Journal, folder: Path) -> None:
    publish(journal, 0)
    first = journal.read_version(0)
    for number in (1, 2, 3):
        update = accept(journal, make(sequence=number))
        decision = decision_of(number, update.update_id)
        journal.decide(decision)
        publish(journal, number, decision)
    assert [version.number for version in journal.versions()] == [2, 3]
    assert names(folder / "versions") == ["2.safetensors", "3.safetensors"]
    assert names(folder / "payloads") == []
    recovered = journal.recover()
    assert recovered.merged == {UpdateId("a", 7, 2): 2, UpdateId("a", 7, 3): 3}
    assert recovered.high_water == {("a", 7): 3}  # so that a/7/1 is still known to be settled
    with first:
        assert first.read(0, 4) == b"1000"
    with journal.read_version(3) as reader:
        assert (reader.info.digest, reader.read(1, 4), reader.pread(4, 8)) == (3, b"003", b"tail")
        with pytest.raises(Refused, match=r"\[3, 5\) are not within a payload of 4 bytes") as refused:
            reader.read(3, 5)
    assert refused.value.reason is Reason.WRONG_INTERVALS
    with pytest.raises(Refused, match=r"version 1 is not kept here; kept: \[2, 3\]") as refused:
        journal.read_version(1)
    assert refused.value.reason is Reason.UNKNOWN_VERSION


def test_versions_are_gapless(journal: Journal) -> None:
    with pytest.raises(StorageError, match="version 1 does not follow version None"):
        publish(journal, 1)
    publish(journal, 0)
    with pytest.raises(StorageError, match="version 0 does not follow version 0"):
        publish(journal, 0)
    assert [version.number for version in journal.versions()] == [0]


def test_a_version_stands_although_an_old_file_cannot_be_removed(folder: Path) -> None:
    class Stubborn(OsFiles):
        stubborn = True

        def unlink(self, path: Path) -> None:
            if self.stubborn:
                raise PermissionError(13, "no")
            super().unlink(path)

    files = Stubborn()
    with contextlib.closing(Journal(folder, run="fleet", keep_versions=1, files=files)) as journal:
        publish(journal, 0)
        publish(journal, 1)
        assert names(folder / "versions") == ["0.safetensors", "1.safetensors"]
        files.stubborn = False
        assert journal.recover().version == journal.versions()[0]
        assert names(folder / "versions") == ["1.safetensors"]


# ---- what goes wrong -------------------------------------------------------------------------------------------------------


def test_the_journal_of_another_run_is_refused(journal: Journal, folder: Path) -> None:
    journal.close()
    with pytest.raises(ConfigError, match="is the journal of run 'fleet', not of 'other'"):
        Journal(folder, run="other")


def test_a_second_process_on_the_same_folder_is_refused(journal: Journal, folder: Path) -> None:
    with pytest.raises(StorageError, match="locked"):
        Journal(folder, run="fleet")
    accept(journal, make())  # and the first one goes on


def test_a_journal_of_a_newer_fleetddp_is_refused(journal: Journal, folder: Path) -> None:
    journal.close()
    with contextlib.closing(sqlite3.connect(folder / "journal.db")) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(StorageError, match="newer fleetddp"):
        Journal(folder, run="fleet")


@pytest.mark.parametrize(("damage", "message"), [("remove", "is gone"), ("cut", "has 3 bytes, but the journal promises 16")])
def test_a_payload_that_was_promised_and_is_damaged_stops_the_start(
    journal: Journal, folder: Path, damage: str, message: str
) -> None:
    accept(journal, make())
    path = folder / "payloads" / "a.7.1"
    path.unlink() if damage == "remove" else path.write_bytes(b"123")
    with pytest.raises(StorageError, match=message):
        journal.recover()


def test_a_version_that_is_gone_stops_the_start(journal: Journal, folder: Path) -> None:
    publish(journal, 0)
    (folder / "versions" / "0.safetensors").unlink()
    with pytest.raises(StorageError, match=r"0\.safetensors is gone"):
        journal.recover()


class _FullFile(OsFile):
    def fsync(self) -> None:
        raise OSError(28, "No space left on device")


class _FullDisk(OsFiles):
    full = True

    def create(self, path: Path) -> OsFile:
        file = super().create(path)
        if self.full:
            file.__class__ = _FullFile
        return file


def test_a_full_disk_accepts_nothing_and_what_comes_later_is_accepted(folder: Path) -> None:
    files = _FullDisk()
    with contextlib.closing(Journal(folder, run="fleet", files=files)) as journal:
        with pytest.raises(StorageError, match=r"cannot make a/7/1 durable: .*No space left"):
            accept(journal, make())
        assert journal.recover().accepted == ()
        # After a failed fsync the system may call the lost bytes clean: the update must be staged anew.
        with pytest.raises(StorageError, match="nothing of it is staged"):
            journal.accept(make(), 1.0)
        with pytest.raises(StorageError, match=r"cannot publish version 0: .*No space left"):
            publish(journal, 0)
        files.full = False
        accept(journal, make())
        publish(journal, 0)
        assert journal.recover().accepted == (make(),)


def test_a_staged_update_makes_room_on_a_disk_that_is_too_full_for_a_row(journal: Journal, folder: Path) -> None:
    journal.stage(make().update_id, 16).write(0, b"x")
    journal._db.execute("PRAGMA query_only=ON")  # as a disk without room for the log: nothing can be committed
    with pytest.raises(StorageError):
        journal.opened(1.0)
    journal.discard(make().update_id)
    assert names(folder / "payloads") == []


def test_a_transaction_that_fails_leaves_nothing_behind(journal: Journal) -> None:
    class StopError(Exception):
        pass

    def stop(point: str) -> None:
        if point == "accept:rows-written":
            raise StopError

    journal.at = stop
    with pytest.raises(StopError):
        accept(journal, make())
    assert journal.recover() == Recovered.empty("fleet")
    journal.at = lambda point: None
    accept(journal, make())
    assert journal.recover().accepted == (make(),)


def test_an_update_is_accepted_once(journal: Journal) -> None:
    accept(journal, make())
    with pytest.raises(StorageError, match="UNIQUE"):
        accept(journal, make())
    assert journal.recover().accepted == (make(),)


def test_a_node_cannot_name_a_file_outside_the_folder(journal: Journal, folder: Path) -> None:
    accept(journal, make("../../evil/x"))
    assert names(folder / "payloads") == ["..%2F..%2Fevil%2Fx.7.1"]
    assert names(folder.parent) == ["journal"]


def test_what_is_staged_stays_within_its_declared_size(journal: Journal, folder: Path) -> None:
    staged = journal.stage(make().update_id, 16)
    assert journal.stage(make().update_id, 16) is staged
    staged.write(4, b"abc")
    assert names(folder / "payloads") == ["a.7.1"]
    assert (folder / "payloads" / "a.7.1").read_bytes()[4:] == b"abc"
    with pytest.raises(Refused, match="up to 17 were sent of a payload of 16") as refused:
        staged.write(10, b"1234567")
    assert refused.value.reason is Reason.WRONG_SIZE
    with pytest.raises(Refused, match="has 16 bytes, now 20") as refused:
        journal.stage(make().update_id, 20)
    assert refused.value.reason is Reason.ID_REUSED


def test_many_threads_accept_at_the_same_time(journal: Journal) -> None:
    updates = [make(node, sequence) for node in "abcd" for sequence in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda update: accept(journal, update), updates))
    recovered = reopened(journal)
    assert {update.update_id for update in recovered.accepted} == {update.update_id for update in updates}


def test_keep_versions_must_keep_something(folder: Path) -> None:
    with pytest.raises(ConfigError, match="keep_versions is 0"):
        Journal(folder, run="fleet", keep_versions=0)
