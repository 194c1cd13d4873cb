"""Whole-state checkpoints: a site that is killed goes on from the newest complete one.

    <directory>/000000000042/            named after the boundaries behind it
        common-<stamp>.pt                rank 0: weights (names without ``module.``), every object's state, the base version
        rank-<r>-of-<n>-<stamp>.pt       each rank: random states, anchor and residual of its slice
        manifest.json                    rank 0, renamed into place last: it makes the checkpoint complete

The directory may be shared by the machines of a site, or be each one's own. At a restart the newest complete checkpoint that any
rank finds is taken; what another rank needs of it and cannot see is sent to it. All is read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from fleetddp.cloud.collective import send_bytes, tell_all
from fleetddp.cloud.ddp import FleetDDP
from fleetddp.cloud.recut import joined
from fleetddp.cloud.rendezvous import Rendezvous, polls
from fleetddp.common.errors import ConfigError, StorageError
from fleetddp.common.layout import unwrap

if TYPE_CHECKING:
    from fleetddp.cloud.attached import Attached  # importing it takes torch's FSDP with it

FORMAT = 1
WRITE_S = 3600.0  # for all ranks to write a checkpoint: longer than any disk takes; who has not by then is gone with its machine
PLAIN = (int, float, str, type(None), torch.Tensor, torch.dtype, torch.device)  # what ``weights_only=True`` reads back

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """An optimizer, scheduler, sampler, GradScaler: anything whose state is made of plain values and tensors."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Take a state up."""
        ...


class _Found(NamedTuple):
    """A complete checkpoint, as far as one rank can see."""

    number: int  # -1: none
    stamp: int
    world: int


class Checkpoint:
    """Checkpoints of ``model`` and ``objects`` (``optimizer=...``, ``scheduler=...``, ``sampler=...``) in ``directory``.

    All ranks make it with the same names; an object's state is the same on all ranks. The newest ``keep`` are kept. Raises
    ``ConfigError`` for a model that is sharded.
    """

    def __init__(self, directory: str | Path, model: FleetDDP | Attached, *, keep: int = 2, **objects: Stateful) -> None:
        if getattr(model, "sharded", False):
            raise ConfigError(
                "Checkpoint: no rank holds the whole of a model under fully_shard; save it by torch.distributed.checkpoint. A "
                "site that is started again adopts the fleet's newest version"
            )
        self._directory = Path(directory)
        self._model, self._objects, self._keep = model, objects, keep
        self._group, self._device = model.process_group, model.device
        self._rank, self._world = self._group.rank(), self._group.size()

    # ---- save -----------------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint. All ranks call it after the same step; it returns when the checkpoint is complete.

        Raises ``ConfigError`` where a state could not be read back, ``StorageError`` on all ranks where a disk of one refuses.
        """
        self._model.start()
        stamp = tell_all(time.time_ns(), self._group, self._device)[0]
        alike, own = self._model.site.state()
        found = _Found(int(alike["boundaries"]), stamp, self._world)
        folder = self._folder(found)
        common = {
            "format": FORMAT,
            "site": alike,
            "model": dict(unwrap(self._model.module).state_dict()),
            "objects": {name: thing.state_dict() for name, thing in self._objects.items()},
        }
        _require_plain(common["objects"], "objects")
        agreement = Rendezvous.of(self._group, f"fleetddp/checkpoint/{stamp}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / self._shard(found, self._rank), {"site": own, "random": _random_states(self._device)})
            if self._rank == 0:
                _write(folder / _common(found), common)
            _keep_names(folder)
        except OSError as error:
            agreement.fail("", f"rank {self._rank} cannot write the checkpoint {folder}: {error}")
        agreement.report("written")
        self._complete(folder, found, agreement)
        self._prune(found.number)

    def _complete(self, folder: Path, found: _Found, agreement: Rendezvous) -> None:
        """Rank 0 adds the manifest once every rank has written; the others wait for that, off the process group."""
        if self._rank == 0:
            _await(agreement, "written", self._world)
            try:
                _write_manifest(folder, found)
            except OSError as error:
                agreement.fail("", f"cannot write the manifest of the checkpoint {folder}: {error}")
            agreement.report("complete")
        _await(agreement, "complete", 1)

    def _prune(self, newest: int) -> None:
        """Delete older checkpoints; several ranks may do so at once."""
        numbers = [n for n in self._numbers() if n <= newest]
        for number in numbers[: -self._keep]:
            folder = self._directory / f"{number:012d}"
            (folder / "manifest.json").unlink(missing_ok=True)  # first: what is half deleted is not complete
            shutil.rmtree(folder, ignore_errors=True)

    # ---- load -----------------------------------------------------------------------------------------------------------------

    def load(self) -> bool:
        """Take up the newest complete checkpoint that any rank finds; False if there is none. All ranks call it.

        To be called before the first training step, with everything that was saved made anew. Raises ``ConfigError`` where it
        holds another model or other objects.
        """
        found = max(tell_all(self._newest(), self._group, self._device))
        if found.number < 0:
            return False
        folder, same = self._folder(found), found.world == self._world
        paths = [folder / _common(found), *(folder / self._shard(found, rank) for rank in range(found.world))]
        seen = tell_all([path.exists() for path in paths], self._group, self._device)
        common, *states = (
            self._bring(path, [by[n] for by in seen], needed_by=[n - 1] if n and same else range(self._world))
            for n, path in enumerate(paths)
        )
        if common is None:
            raise StorageError(f"the checkpoint {folder} has lost {paths[0].name}")
        own = states[self._rank] if same else self._cut_anew(states)
        self._take_up(common, own)
        _log.info("resumed from the checkpoint %s, version %d", folder, common["site"]["version"])
        return True

    def _cut_anew(self, states: list[dict[str, Any] | None]) -> dict[str, Any]:
        """Another number of ranks has saved it: what all of them knew of their slices, and this one's random states."""
        site = joined([None if state is None else state["site"] for state in states], counts=self._rank == 0)
        mine = states[self._rank] if self._rank < len(states) else None
        return {"site": site, "random": None if mine is None else mine["random"]}

    def _bring(self, path: Path, seen_by: list[bool], needed_by: range | list[int]) -> dict[str, Any] | None:
        """A file's contents on the ranks that need it, sent by one that sees it where some do not; None if nobody does."""
        if not any(seen_by):
            return None
        if all(seen_by[rank] for rank in needed_by):
            return _read(path) if self._rank in needed_by else None
        source = seen_by.index(True)
        data = send_bytes(path.read_bytes() if self._rank == source else None, source, self._group, self._device)
        return _read(io.BytesIO(data)) if self._rank in needed_by else None

    def _take_up(self, common: dict[str, Any], own: dict[str, Any] | None) -> None:
        if common["format"] != FORMAT:
            raise ConfigError(f"the checkpoint has format {common['format']}; this release reads {FORMAT}")
        if set(common["objects"]) != set(self._objects):
            held, given = sorted(common["objects"]), sorted(self._objects)
            raise ConfigError(f"the checkpoint holds the states of {held}, but Checkpoint(...) was given {given}")
        try:
            unwrap(self._model.module).load_state_dict(common["model"])
        except RuntimeError as error:
            raise ConfigError(f"the checkpoint is of another model: {error}") from None
        for name, thing in self._objects.items():
            thing.load_state_dict(common["objects"][name])
        if own is None:
            _log.warning("rank %d: the checkpoint has nothing of this rank: no random states, no residual", self._rank)
        elif own["random"] is not None:  # a rank that there was not has none
            _restore_random_states(own["random"], self._device)
        self._model.site.restore(common["site"], None if own is None else own["site"])

    def _newest(self) -> _Found:
        """The newest complete checkpoint that this rank sees."""
        for number in reversed(self._numbers()):
            try:
                manifest = json.loads((self._directory / f"{number:012d}" / "manifest.json").read_bytes())
                return _Found(number, int(manifest["stamp"]), int(manifest["world"]))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError) as error:
                _log.warning("skipping the checkpoint %012d: its manifest cannot be read: %s", number, error)
        return _Found(-1, 0, 0)

    # ---- names ----------------------------------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        try:
            return sorted(int(entry.name) for entry in self._directory.iterdir() if entry.name.isdigit())
        except FileNotFoundError:
            return []

    def _folder(self, found: _Found) -> Path:
        return self._directory / f"{found.number:012d}"

    @staticmethod
    def _shard(found: _Found, rank: int) -> str:
        return f"rank-{rank}-of-{found.world}-{found.stamp}.pt"


def _common(found: _Found) -> str:
    return f"common-{found.stamp}.pt"


def _write(path: Path, state: dict[str, Any]) -> None:
    """Durable: the manifest vouches for it."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _write_manifest(folder: Path, found: _Found) -> None:
    temporary = folder / "manifest.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "stamp": found.stamp, "world": found.world}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / "manifest.json")
    _keep_names(folder)


def _keep_names(folder: Path) -> None:
    """Make the names in ``folder``, and its own, durable."""
    for directory in (folder, folder.parent):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _read(source: Path | io.BytesIO) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
    return state


def _await(agreement: Rendezvous, tally: str, count: int) -> None:
    for waited_s in polls():
        failure = agreement.failure()
        if failure is not None:
            raise StorageError(failure[1])
        done = agreement.tally(tally)
        if done >= count:
            return
        if waited_s > WRITE_S:
            raise StorageError(f"after {WRITE_S:g} s only {done} of {count} ranks have said that the checkpoint is {tally}")


def _require_plain(value: Any, where: str) -> None:
    """Raise ``ConfigError`` for a state that only unpickling arbitrary objects could bring back."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _require_plain(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple, set)):
        for index, inner in enumerate(value):
            _require_plain(inner, f"{where}[{index}]")
    elif not isinstance(value, PLAIN) or isinstance(value, np.generic):
        raise ConfigError(f"cannot checkpoint {where}: a {type(value).__name__}; a state holds numbers, strings and tensors only")


def _random_states(device: torch.device) -> dict[str, Any]:
    """Of Python, numpy, torch and this rank's GPU."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
