"""A disk in memory that can lose power: what the real journal rests on in a simulation.

As on a real disk, a file's bytes survive a crash from its ``fsync`` on, and names (new, changed or removed) from ``fsync_dir`` of
their folder on. SQLite keeps its database in memory; what it has committed survives.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from fleetddp.common.files import Data, File, Files


class _Inode:
    """A file's bytes, whatever its name."""

    __slots__ = ("content", "durable")

    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = b""


class _MemoryFile(File):
    def __init__(self, inode: _Inode, path: Path) -> None:
        self._inode, self._path = inode, path

    def pwrite(self, data: Data, offset: int) -> None:
        content, end = self._inode.content, offset + len(data)
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        content[offset:end] = data

    def pread(self, size: int, offset: int) -> bytes:
        content = self._inode.content
        if offset + size > len(content):
            raise OSError(f"{self._path} ends at byte {len(content)}; bytes up to {offset + size} were asked for")
        return bytes(content[offset : offset + size])

    def start_flush(self) -> None:
        pass

    def fsync(self) -> None:
        self._inode.durable = bytes(self._inode.content)

    def size(self) -> int:
        return len(self._inode.content)

    def close(self) -> None:
        pass


class _Database(sqlite3.Connection):
    """Outlives the process that closes it: only what it had not committed is lost."""

    def close(self) -> None:
        if self.in_transaction:
            self.rollback()


class MemoryFiles(Files):
    """The disk of one simulated machine; not for threads."""

    def __init__(self) -> None:
        self._folders: dict[Path, dict[str, _Inode]] = {}
        self._durable: dict[Path, dict[str, _Inode]] = {}
        self._databases: dict[Path, _Database] = {}

    def create(self, path: Path) -> File:
        """See ``Files``."""
        inode = self._folder(path)[path.name] = _Inode()
        return _MemoryFile(inode, path)

    def open(self, path: Path) -> File:
        """See ``Files``."""
        inode = self._folder(path).get(path.name)
        if inode is None:
            raise FileNotFoundError(f"no file {path}")
        return _MemoryFile(inode, path)

    def make_dir(self, path: Path) -> None:
        """See ``Files``; a folder is durable at once."""
        self._folders.setdefault(path, {})

    def rename(self, source: Path, target: Path) -> None:
        """See ``Files``."""
        self._folder(target)[target.name] = self._folder(source).pop(source.name)

    def unlink(self, path: Path) -> None:
        """See ``Files``."""
        self._folder(path).pop(path.name, None)

    def list_dir(self, path: Path) -> list[str]:
        """See ``Files``."""
        return sorted(self._folders[path])

    def fsync_dir(self, path: Path) -> None:
        """See ``Files``."""
        self._durable[path] = dict(self._folders.get(path, {}))

    def connect(self, path: Path) -> sqlite3.Connection:
        """See ``Files``."""
        database = self._databases.get(path)
        if database is None:
            options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}
            database = self._databases[path] = sqlite3.connect(":memory:", factory=_Database, **options)
        return database

    def crash(self) -> None:
        """Power is lost: everything that is not durable is gone."""
        for path, names in self._folders.items():
            durable = self._durable.get(path, {})
            names.clear()
            names.update(durable)
            for inode in durable.values():
                inode.content = bytearray(inode.durable)

    def _folder(self, path: Path) -> dict[str, _Inode]:
        folder = self._folders.get(path.parent)
        if folder is None:
            raise FileNotFoundError(f"no folder {path.parent}")
        return folder
