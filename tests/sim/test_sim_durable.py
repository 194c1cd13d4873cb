"""The disk in memory loses what a real one may lose, and the real journal over it does not notice the difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetddp.edge.sim.memory_files import MemoryFiles

FOLDER = Path("/folder")


@pytest.fixture
def files() -> MemoryFiles:
    made = MemoryFiles()
    made.make_dir(FOLDER)
    return made


def test_bytes_and_names_that_are_not_synced_are_lost(files: MemoryFiles) -> None:
    kept = files.create(FOLDER / "kept")
    kept.pwrite(b"durable", 0)
    kept.fsync()
    nameless = files.create(FOLDER / "nameless")
    files.fsync_dir(FOLDER)
    kept.pwrite(b"DURABLE, and more", 0)
    nameless.pwrite(b"never synced", 0)
    later = files.create(FOLDER / "later")
    later.pwrite(b"synced, but its name is not", 0)
    later.fsync()
    files.crash()
    assert files.list_dir(FOLDER) == ["kept", "nameless"]
    assert files.open(FOLDER / "kept").pread(7, 0) == b"durable"
    assert files.open(FOLDER / "kept").size() == 7
    assert files.open(FOLDER / "nameless").size() == 0


def test_a_name_that_was_removed_or_changed_comes_back(files: MemoryFiles) -> None:
    for name in ("removed", "renamed"):
        files.create(FOLDER / name).fsync()
    files.fsync_dir(FOLDER)
    files.unlink(FOLDER / "removed")
    files.rename(FOLDER / "renamed", FOLDER / "new")
    assert files.list_dir(FOLDER) == ["new"]
    files.crash()
    assert files.list_dir(FOLDER) == ["removed", "renamed"]


def test_a_replaced_file_is_the_old_one_again(files: MemoryFiles) -> None:
    old = files.create(FOLDER / "file")
    old.pwrite(b"old", 0)
    old.fsync()
    files.fsync_dir(FOLDER)
    files.create(FOLDER / "file").pwrite(b"new", 0)
    assert old.pread(3, 0) == b"old"  # whoever has it open still reads it
    files.crash()
    assert files.open(FOLDER / "file").pread(3, 0) == b"old"


def test_what_is_not_there_is_an_error(files: MemoryFiles) -> None:
    with pytest.raises(FileNotFoundError):
        files.open(FOLDER / "nothing")
    with pytest.raises(FileNotFoundError):
        files.create(Path("/elsewhere/file"))
    file = files.create(FOLDER / "file")
    file.pwrite(b"12345", 0)
    with pytest.raises(OSError, match="ends at byte 5"):
        file.pread(6, 0)
    assert file.pread(2, 3) == b"45"


def test_a_database_keeps_what_was_committed(files: MemoryFiles) -> None:
    database = files.connect(FOLDER / "db")
    database.execute("CREATE TABLE facts (value TEXT)")
    database.execute("INSERT INTO facts VALUES ('committed')")
    database.execute("BEGIN")
    database.execute("INSERT INTO facts VALUES ('open')")
    database.close()
    again = files.connect(FOLDER / "db")
    assert again.execute("SELECT value FROM facts").fetchall() == [("committed",)]
    assert files.connect(FOLDER / "other").execute("SELECT name FROM sqlite_master").fetchall() == []
