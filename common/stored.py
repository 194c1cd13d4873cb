"""Open files of the journal: the bytes of an update that arrives, and payloads to read."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from fleetddp.common.errors import Reason, Refused, StorageError
from fleetddp.common.files import Data, File
from fleetddp.common.update import Version

_FLUSH_EVERY = 4 * 2**20  # bytes written between hints to the disk to begin: the fsync at the end then waits little


@contextmanager
def storage(what: str) -> Iterator[None]:
    """Turn what the disk and SQLite raise into ``StorageError`` that says what could not be done."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{what}: {error}") from error


class StagedFile:
    """The bytes of an update that is still arriving. Nothing in it is durable; its streams write at the same time."""

    def __init__(self, file: File, payload_bytes: int) -> None:
        self._file = file
        self.payload_bytes = payload_bytes
        self._unflushed = 0

    def write(self, offset: int, data: Data) -> None:
        """Put ``data`` at byte ``offset`` of the payload; ``Refused(WRONG_SIZE)`` beyond its end."""
        if offset + len(data) > self.payload_bytes:
            raise Refused(Reason.WRONG_SIZE, f"bytes up to {offset + len(data)} were sent of a payload of {self.payload_bytes}")
        with storage("cannot stage an update"):
            self._file.pwrite(data, offset)
            self._unflushed += len(data)
            if self._unflushed >= _FLUSH_EVERY:
                self._unflushed = 0
                self._file.start_flush()

    def fsync(self) -> None:
        """Return when everything written is durable."""
        self._file.fsync()

    def close(self) -> None:
        """Release the file."""
        self._file.close()


class Reader:
    """Reads a payload: ``size`` bytes that begin at byte ``start`` of a file. Thread-safe; close it, or use ``with``."""

    def __init__(self, file: File, start: int, size: int) -> None:
        self._file = file
        self.start = start
        self.size = size

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the payload; ``Refused(WRONG_INTERVALS)`` if it has no such bytes."""
        if not 0 <= start <= stop <= self.size:
            raise Refused(Reason.WRONG_INTERVALS, f"bytes [{start}, {stop}) are not within a payload of {self.size} bytes")
        with storage("cannot read a payload"):
            return self._file.pread(stop - start, self.start + start)

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class VersionReader(Reader):
    """Reads a version; it stays readable while open, whatever retention removes. ``read`` is of the published payload."""

    def __init__(self, file: File, start: int, info: Version) -> None:
        super().__init__(file, start, info.payload_bytes)
        self.info = info

    def pread(self, size: int, offset: int) -> bytes:
        """Bytes of the whole version file (header, master, outer optimizer state)."""
        with storage(f"cannot read version {self.info.number}"):
            return self._file.pread(size, offset)

    def __enter__(self) -> VersionReader:
        return self
