"""The few file operations the journal rests on, behind one small interface.

Durability is explicit: a file's bytes survive power loss from ``File.fsync`` on, its name from ``Files.fsync_dir`` of its folder
on. The crash tests put another implementation in place, which forgets everything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any, Protocol, Union

Data = Union[bytes, bytearray, memoryview]

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start writing the range's dirty pages, wait for nothing


class File(Protocol):
    """An open file, read and written by offset; safe to use from several threads. Errors are ``OSError``."""

    def pwrite(self, data: Data, offset: int) -> None:
        """Write all of ``data`` at ``offset``; not durable before ``fsync``."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """Exactly ``size`` bytes from ``offset``; an ``OSError`` if the file ends before."""
        ...

    def start_flush(self) -> None:
        """A hint that an fsync will come soon: the disk may begin now. Promises nothing."""
        ...

    def fsync(self) -> None:
        """Return when the bytes and the size are durable."""
        ...

    def size(self) -> int:
        """Length in bytes."""
        ...

    def close(self) -> None:
        """Release the file; closing twice is fine."""
        ...


class Files(Protocol):
    """A file system. Errors are ``OSError``."""

    def create(self, path: Path) -> File:
        """A new, empty file to write and read; a leftover of that name is replaced."""
        ...

    def open(self, path: Path) -> File:
        """An existing file to read. It stays readable while open, even if unlinked."""
        ...

    def make_dir(self, path: Path) -> None:
        """Make a folder, and its parents, unless it is there."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name within its folder, replacing a file that has it."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a name; fine if it is gone already."""
        ...

    def list_dir(self, path: Path) -> list[str]:
        """The names in a folder, sorted."""
        ...

    def fsync_dir(self, path: Path) -> None:
        """Return when the folder's entries (new, renamed, removed) are durable."""
        ...

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open or make an SQLite database, for use by several threads, one at a time; transactions are begun explicitly."""
        ...


class OsFile:
    """A ``File`` of the operating system."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._path = path

    def pwrite(self, data: Data, offset: int) -> None:
        """Write all of it, however many system calls that takes."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written

    def pread(self, size: int, offset: int) -> bytes:
        """Exactly ``size`` bytes, or an ``OSError`` that names the file."""
        data = os.pread(self._fd, size, offset)
        while len(data) < size:
            more = os.pread(self._fd, size - len(data), offset + len(data))
            if not more:
                raise OSError(f"{self._path} ends at byte {offset + len(data)}; bytes up to {offset + size} were asked for")
            data += more
        return data

    def start_flush(self) -> None:
        """``sync_file_range`` where there is one."""
        if _sync_file_range is not None:
            _sync_file_range(self._fd, 0, 0, _WRITE)  # a hint: what it returns does not matter

    def fsync(self) -> None:
        """``fdatasync``, which makes the size durable too."""
        _fdatasync(self._fd)

    def size(self) -> int:
        """Length in bytes."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Release the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # Opened in a thread for a call that was cancelled meanwhile: nobody else can.
        with contextlib.suppress(AttributeError):  # not even opened
            self.close()


class OsFiles:
    """The operating system's files."""

    def create(self, path: Path) -> OsFile:
        """Readable by this user only: updates may tell of private data."""
        return OsFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)

    def open(self, path: Path) -> OsFile:
        """Read-only."""
        return OsFile(path, os.O_RDONLY)

    def make_dir(self, path: Path) -> None:
        """With parents."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Fine if it is gone already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def list_dir(self, path: Path) -> list[str]:
        """Sorted."""
        return sorted(os.listdir(path))

    def fsync_dir(self, path: Path) -> None:
        """Open the folder, fsync, close."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def connect(self, path: Path) -> sqlite3.Connection:
        """Gives up soon when another process has it open."""
        return sqlite3.connect(path, timeout=0.2, isolation_level=None, check_same_thread=False)


# fdatasync makes the size durable too (POSIX: whatever is needed to read the data back); macOS has only fsync.
_fdatasync = getattr(os, "fdatasync", os.fsync)

_sync_file_range: Any = None
if sys.platform == "linux":
    _sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # glibc has it, some C libraries do not
    if _sync_file_range is not None:
        _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
