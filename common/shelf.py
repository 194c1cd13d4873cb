"""A proxy set's file as a coordinator hands it out, and how a member brings it here: in chunks, resumed, checked."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.files import OsFiles
from fleetddp.common.proxy import ProxySet
from fleetddp.common.stored import Reader, storage
from fleetddp.common.update import Interval, ProxyInfo


class ProxySource(Protocol):
    """Whoever hands it out: a ``Parent``."""

    def pull_proxy(self, ranges: Sequence[Interval], sink: Callable[[int, memoryview], None]) -> ProxyInfo:
        """Bring byte ranges of the file to ``sink``; none: nothing, only what it is. ``Refused(NO_PROXY)``: there is none."""
        ...


class Shelf:
    """The file of one proxy set, which nobody changes while it is served."""

    def __init__(self, path: Path, proxy: ProxySet) -> None:
        self._path = path
        self.info = ProxyInfo(proxy.name, proxy.digest, path.stat().st_size)

    def open(self) -> Reader:
        """Its bytes; to be closed."""
        with storage(f"cannot read the proxy set {self._path}"):
            file = OsFiles().open(self._path)
            return Reader(file, 0, file.size())


def place(folder: Path, digest: str) -> Path:
    """Where ``bring`` puts a set of this digest."""
    return folder / f"{digest}.safetensors"


def bring(source: ProxySource, folder: Path, *, classes: int) -> ProxySet:
    """The source's proxy set, from ``folder`` if it is there already; what an earlier attempt brought is not asked for again.

    Raises ``Refused`` (``NO_PROXY``; ``BAD_CHECKSUM``: it is not what it was said to be, and is asked for anew the next time),
    ``Unreachable``, ``StorageError``.
    """
    info = source.pull_proxy((), lambda offset, data: None)
    target, draft = place(folder, info.digest), folder / f"{info.digest}.partial"
    if not target.exists():
        with storage(f"cannot write {draft}"):
            folder.mkdir(parents=True, exist_ok=True)
            with open(draft, "ab") as file:
                held = min(file.tell(), info.file_bytes)
                file.truncate(held)
                if held < info.file_bytes:
                    source.pull_proxy(((held, info.file_bytes),), lambda offset, data: _append(file.write, data))
                file.flush()
                os.fsync(file.fileno())
            wrong = _wrong(draft, info, classes)
            if wrong:
                draft.unlink()
                raise Refused(Reason.BAD_CHECKSUM, f"proxy set {info.name}: {wrong}")
            os.replace(draft, target)
    return ProxySet.open(target, name=info.name, classes=classes)


def _wrong(file: Path, info: ProxyInfo, classes: int) -> str:
    """What of a file that has arrived is not as it was said to be; empty: nothing."""
    try:
        found = ProxySet.open(file, name=info.name, classes=classes).digest
    except ConfigError as error:
        return str(error)
    return "" if found == info.digest else f"digest {found[:12]}, not {info.digest[:12]}"


def _append(write: Callable[[memoryview], int], data: memoryview) -> None:
    write(data)
