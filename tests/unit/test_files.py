"""The file layer, the real one and the one of the crash tests."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest
from helpers.losing_files import LosingFiles

from fleetddp.common.files import Files, OsFiles


@pytest.fixture(params=[OsFiles, LosingFiles])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return OsFiles() if request.param is OsFiles else LosingFiles(tmp_path)


def write(files: Files, path: Path, data: bytes, *, fsync: bool = True) -> None:
    with contextlib.closing(files.create(path)) as file:
        file.pwrite(data, 0)
        if fsync:
            file.fsync()


def test_bytes_are_written_and_read_by_offset(files: Files, tmp_path: Path) -> None:
    with contextlib.closing(files.create(tmp_path / "f")) as file:
        file.pwrite(b"world", 6)
        file.pwrite(memoryview(b"hello "), 0)
        file.start_flush()
        file.fsync()
        assert file.size() == 11
        assert file.pread(11, 0) == b"hello world"
        assert file.pread(0, 11) == b""
    file.close()  # twice is fine


def test_reading_beyond_the_end_names_the_file_and_the_bytes(files: Files, tmp_path: Path) -> None:
    write(files, tmp_path / "f", b"12345")
    with contextlib.closing(files.open(tmp_path / "f")) as file, pytest.raises(OSError, match=r"/f ends at byte 5; .* up to 7"):
        file.pread(4, 3)


def test_an_open_file_outlives_its_name(files: Files, tmp_path: Path) -> None:
    write(files, tmp_path / "f", b"12345")
    with contextlib.closing(files.open(tmp_path / "f")) as file:
        files.unlink(tmp_path / "f")
        files.unlink(tmp_path / "f")
        assert files.list_dir(tmp_path) == []
        assert file.pread(5, 0) == b"12345"


def test_create_and_rename_replace(files: Files, tmp_path: Path) -> None:
    write(files, tmp_path / "b", b"old, and longer")
    write(files, tmp_path / "a", b"first")
    write(files, tmp_path / "a", b"new")
    files.rename(tmp_path / "a", tmp_path / "b")
    assert files.list_dir(tmp_path) == ["b"]
    assert (tmp_path / "b").read_bytes() == b"new"


def test_payloads_are_for_this_user_only(tmp_path: Path) -> None:
    write(OsFiles(), tmp_path / "f", b"1")
    assert (tmp_path / "f").stat().st_mode & 0o077 == 0


# ---- what a power loss leaves ----------------------------------------------------------------------------------------------


def surviving(files: LosingFiles, tmp_path: Path, luck: random.Random | None = None) -> dict[str, bytes]:
    target = tmp_path / "after"
    files.crash(target, luck)
    return {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}


@pytest.fixture
def losing(tmp_path: Path) -> LosingFiles:
    root = tmp_path / "root"
    files = LosingFiles(root)
    files.make_dir(root / "d")
    files.fsync_dir(root)
    files.fsync_dir(tmp_path)
    return files


def test_what_was_synced_survives(losing: LosingFiles, tmp_path: Path) -> None:
    write(losing, losing.root / "d" / "f", b"12345")
    losing.fsync_dir(losing.root / "d")
    assert surviving(losing, tmp_path) == {"d/f": b"12345"}


def test_a_name_that_was_not_synced_is_lost(losing: LosingFiles, tmp_path: Path) -> None:
    write(losing, losing.root / "d" / "f", b"12345")
    assert surviving(losing, tmp_path) == {}


def test_bytes_that_were_not_synced_are_lost(losing: LosingFiles, tmp_path: Path) -> None:
    with contextlib.closing(losing.create(losing.root / "d" / "f")) as file:
        file.pwrite(b"123", 0)
        file.fsync()
        file.pwrite(b"45678", 1)
        losing.fsync_dir(losing.root / "d")
        assert surviving(losing, tmp_path) == {"d/f": b"123"}


def test_a_removal_or_a_new_name_that_was_not_synced_is_undone(losing: LosingFiles, tmp_path: Path) -> None:
    for name in ("kept", "renamed"):
        write(losing, losing.root / "d" / name, name.encode())
    losing.fsync_dir(losing.root / "d")
    losing.unlink(losing.root / "d" / "kept")
    losing.rename(losing.root / "d" / "renamed", losing.root / "d" / "other")
    assert surviving(losing, tmp_path) == {"d/kept": b"kept", "d/renamed": b"renamed"}


def test_a_folder_that_was_not_synced_is_lost(losing: LosingFiles, tmp_path: Path) -> None:
    losing.make_dir(losing.root / "e")
    write(losing, losing.root / "e" / "f", b"12345")
    losing.fsync_dir(losing.root / "e")
    assert surviving(losing, tmp_path) == {}


def test_a_file_of_sqlite_survives_once_its_name_was_synced(losing: LosingFiles, tmp_path: Path) -> None:
    (losing.root / "journal.db").write_bytes(b"db")
    (losing.root / "other.db").write_bytes(b"db")
    losing.fsync_dir(losing.root)
    (losing.root / "journal.db-wal").write_bytes(b"wal")
    (losing.root / "late.db").write_bytes(b"db")
    assert surviving(losing, tmp_path) == {"journal.db": b"db", "journal.db-wal": b"wal", "other.db": b"db"}


def test_with_luck_some_of_the_rest_survives_whole_or_torn(losing: LosingFiles, tmp_path: Path) -> None:
    with contextlib.closing(losing.create(losing.root / "d" / "f")) as file:
        file.fsync()
        losing.fsync_dir(losing.root / "d")
        file.pwrite(b"12345678", 0)
        outcomes = {len(surviving(losing, tmp_path / str(seed), random.Random(seed))["d/f"]) for seed in range(60)}
    assert {0, 8} < outcomes <= set(range(9))


def test_a_file_that_nobody_holds_any_more_is_closed(tmp_path: Path) -> None:
    file = OsFiles().create(tmp_path / "f")
    descriptor = file._fd
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
