"""A file layer with which a test can pull the plug."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fleetddp.common.files import Data, OsFile, OsFiles


@dataclass(eq=False)
class _Inode:
    """A file's bytes, whatever its name: what is on the disk, and what was done to it since."""

    durable: bytes = b""
    pending: list[tuple[int, bytes] | None] = field(default_factory=list)  # writes; None: cut to nothing

    def after_crash(self, luck: random.Random | None) -> bytes:
        """Nothing of what is pending survives; with ``luck``, any of it, some of it torn."""
        content = bytearray(self.durable)
        for change in self.pending:
            if luck is None or luck.random() < 0.4:
                continue
            if change is None:
                content.clear()
                continue
            offset, data = change
            data = data[: luck.choice([len(data), luck.randrange(len(data) + 1)])]
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data
        return bytes(content)


class LosingFiles(OsFiles):
    """Real files below ``root``, of which ``crash`` rebuilds elsewhere only what had been made durable.

    A file's bytes are durable from ``fsync`` on, a name (new, changed or removed) from ``fsync_dir`` of its folder on. SQLite
    writes through the operating system, past this layer: what it committed counts as durable, provided that the name of the
    database file was. ``ignored`` names fsyncs that shall do nothing, as ``file:FOLDER`` or ``dir:FOLDER`` (``.``: the root), to
    show what they are there for. ``before`` is called before every operation that changes something, with its name.
    """

    def __init__(
        self, root: Path, *, ignored: frozenset[str] = frozenset(), before: Callable[[str], None] = lambda operation: None
    ) -> None:
        self.root = root
        self.before = before
        self._ignored = ignored
        self._inodes: dict[Path, _Inode] = {}
        self._durable_names: dict[Path, dict[str, _Inode]] = {}
        self._durable_folders: set[Path] = set()
        self._durable_foreign: set[Path] = set()  # files that others made
        if root.exists():  # what is there at the start has survived
            for path in [root, *root.rglob("*")]:
                if path.is_dir():
                    self._durable_folders.add(path)
                    self._durable_names[path] = {}
                elif path.parent == root:
                    self._durable_foreign.add(path)
            for path in root.rglob("*"):
                if path.is_file() and path.parent != root:
                    self._inodes[path] = self._durable_names[path.parent][path.name] = _Inode(path.read_bytes())

    # ---- Files ----------------------------------------------------------------------------------------------------------------

    def create(self, path: Path) -> OsFile:
        self.before("create")
        inode = self._inodes.setdefault(path, _Inode())
        inode.pending.append(None)
        return _LosingFile(super().create(path), self, path, inode)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename")
        super().rename(source, target)
        self._inodes[target] = self._inodes.pop(source)

    def unlink(self, path: Path) -> None:
        self.before("unlink")
        super().unlink(path)
        self._inodes.pop(path, None)

    def fsync_dir(self, path: Path) -> None:
        self.before("fsync_dir")
        if self.ignores("dir", path):
            return
        if path == self.root.parent:
            self._durable_folders.add(self.root)
            return
        self._durable_names[path] = self._names(path)
        for entry in path.iterdir():
            if entry.is_dir():
                self._durable_folders.add(entry)
            elif entry not in self._inodes:
                self._durable_foreign.add(entry)

    # ---- the crash ------------------------------------------------------------------------------------------------------------

    def crash(self, target: Path, luck: random.Random | None = None) -> None:
        """Rebuild in ``target`` what a power loss at this moment would leave; with ``luck``, also some of what it need not."""
        if self.root not in self._durable_folders:
            return
        target.mkdir(parents=True)
        for folder in sorted(self._durable_folders):
            (target / folder.relative_to(self.root)).mkdir(exist_ok=True)
            lucky = luck is not None and luck.random() < 0.5
            names = self._names(folder) if lucky else self._durable_names.get(folder, {})
            for name, inode in names.items():
                (target / folder.relative_to(self.root) / name).write_bytes(inode.after_crash(luck))
        for path in self.root.iterdir():
            # SQLite syncs the folder itself for its own side files (-wal); the database's name is ours to sync.
            if path.is_file() and any(path.name.startswith(known.name) for known in self._durable_foreign):
                shutil.copyfile(path, target / path.name)

    def ignores(self, what: str, folder: Path) -> bool:
        """Whether this fsync shall do nothing."""
        return f"{what}:{os.path.relpath(folder, self.root)}" in self._ignored

    def _names(self, folder: Path) -> dict[str, _Inode]:
        return {path.name: inode for path, inode in self._inodes.items() if path.parent == folder}


class _LosingFile(OsFile):
    """A file that tells its inode what happens to it."""

    def __init__(self, real: OsFile, files: LosingFiles, path: Path, inode: _Inode) -> None:
        self._real, self._files, self._folder, self._inode = real, files, path.parent, inode

    def pwrite(self, data: Data, offset: int) -> None:
        self._files.before("pwrite")
        self._inode.pending.append((offset, bytes(data)))
        self._real.pwrite(data, offset)

    def pread(self, size: int, offset: int) -> bytes:
        return self._real.pread(size, offset)

    def start_flush(self) -> None:
        self._real.start_flush()

    def fsync(self) -> None:
        self._files.before("fsync")
        self._real.fsync()
        if not self._files.ignores("file", self._folder):
            self._inode.durable = self._real.pread(self._real.size(), 0)
            self._inode.pending.clear()

    def size(self) -> int:
        return self._real.size()

    def close(self) -> None:
        self._real.close()
