"""Whole-state checkpoints of a site of one rank (``cloud/checkpoint.py``); several ranks are in the boundary contract's tests."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import models
from helpers.one_rank import OneRank, process_group, step, vector
from torch import nn

from fleetddp.cloud import Checkpoint, FleetDDP, checkpoint
from fleetddp.cloud.rendezvous import Rendezvous
from fleetddp.common.errors import ConfigError, Reason, Refused, StorageError


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with process_group():
        yield


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[[str], OneRank]]:
    made: list[OneRank] = []

    def make(name: str) -> OneRank:
        made.append(OneRank(tmp_path / name))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Training:
    """A site with dropout (random numbers), AdamW, a schedule, a lossy codec; every third step is a boundary."""

    def __init__(self, one: OneRank, folder: Path, *, seed: int = 0, **kwargs: Any) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Dropout(0.5), nn.Linear(50, 7))
        self.model: FleetDDP = one.site(self.module, sync_every=3, codec="int8", **kwargs)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.checkpoint = Checkpoint(folder, self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def steps(self, n: int) -> None:
        for _ in range(n):
            step(self.model, self.optimizer)
            self.scheduler.step()


def test_a_resumed_site_is_bit_for_bit_where_it_would_have_been(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    whole = Training(fleet("whole"), tmp_path / "unused")
    random.seed(5)
    np.random.seed(5)
    whole.steps(9)
    draws = (random.random(), float(np.random.rand()))

    one = fleet("broken")
    first = Training(one, tmp_path / "kept")
    random.seed(5)
    np.random.seed(5)
    first.steps(6)
    first.checkpoint.save()
    first.steps(1)  # lost
    first.model.close()
    second = Training(one, tmp_path / "kept", seed=99)
    random.seed(6)
    np.random.seed(6)
    assert second.checkpoint.load()
    second.steps(3)

    assert second.model.version == whole.model.version == 3
    assert second.model.boundaries == 3
    assert torch.equal(vector(second.module), vector(whole.module))
    for name, buffer in whole.module.named_buffers():
        assert torch.equal(buffer, second.module.get_buffer(name)), name
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()
    assert (random.random(), float(np.random.rand())) == draws


def test_in_the_middle_of_a_window(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    """Saved two steps after a boundary: the third one is a boundary, and sends what all three learnt."""
    whole = Training(fleet("whole"), tmp_path / "unused")
    whole.steps(6)
    one = fleet("broken")
    first = Training(one, tmp_path / "kept")
    first.steps(5)
    first.checkpoint.save()
    first.model.close()
    second = Training(one, tmp_path / "kept", seed=99)
    assert second.checkpoint.load()
    second.steps(1)
    assert second.model.version == 2
    assert torch.equal(vector(second.module), vector(whole.module))


def test_the_fleet_has_gone_on_meanwhile(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    """The newest version is taken up, with the optimizer of the checkpoint."""
    one = fleet("fleet")
    first = Training(one, tmp_path / "kept")
    first.steps(3)
    first.checkpoint.save()
    first.steps(3)
    first.model.close()
    second = Training(one, tmp_path / "kept", seed=99)
    assert second.checkpoint.load()
    second.model.start()
    assert second.model.version == 2
    assert torch.equal(vector(second.module), vector(first.module))
    assert second.optimizer.state_dict()["state"][0]["step"] == 3


def test_a_coordinator_that_lost_its_journal_is_founded_anew(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    first = Training(fleet("lost"), tmp_path / "kept")
    first.steps(3)
    first.checkpoint.save()
    second = Training(fleet("new"), tmp_path / "kept", seed=99)
    assert second.checkpoint.load()
    second.model.start()
    assert second.model.version == 0
    assert torch.equal(vector(second.module), vector(first.module))


def test_a_coordinator_that_is_behind_is_an_error(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    first = Training(fleet("ahead"), tmp_path / "kept")
    first.steps(6)
    first.checkpoint.save()
    behind = fleet("behind")
    Training(behind, tmp_path / "other").model.start()
    second = Training(behind, tmp_path / "kept", site="second")
    second.checkpoint.load()
    with pytest.raises(Refused) as caught:
        second.model.start()
    assert caught.value.reason is Reason.FUTURE_BASE


def test_names_and_files(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    training = Training(fleet("fleet"), tmp_path / "kept")
    for _ in range(4):
        training.steps(3)
        training.checkpoint.save()
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["000000000003", "000000000004"]  # the two newest
    newest = tmp_path / "kept" / "000000000004"
    (common,) = newest.glob("common-*.pt")
    state = torch.load(common, weights_only=True)
    assert sorted(state["model"]) == sorted(training.module.state_dict())  # no "module."
    assert state["site"]["version"] == 4
    assert json.loads((newest / "manifest.json").read_text())["world"] == 1


def test_only_a_complete_checkpoint_counts(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    one = fleet("fleet")
    training = Training(one, tmp_path / "kept")
    training.steps(3)
    training.checkpoint.save()
    training.steps(3)
    training.checkpoint.save()
    (tmp_path / "kept" / "000000000002" / "manifest.json").unlink()  # as if killed before it was renamed
    training.model.close()
    second = Training(one, tmp_path / "kept", seed=99)
    assert second.checkpoint.load()
    assert second.model.boundaries == 1


def test_a_shard_is_durable_before_its_rank_says_so(
    fleet: Callable[[str], OneRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk of its own nobody else does it for the rank: without the folder's fsync a power cut forgets the file's name."""
    training = Training(fleet("kept"), tmp_path / "kept")
    training.steps(3)
    said: list[str] = []
    fsync, report = os.fsync, Rendezvous.report

    def note_fsync(handle: int) -> None:
        said.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def note_report(rendezvous: Rendezvous, tally: str) -> None:
        said.append(tally)
        report(rendezvous, tally)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Rendezvous, "report", note_report)
    training.checkpoint.save()
    before = said[: said.index("written")]
    assert {"kept", "000000000001"} < set(before)
    assert max(before.index("kept"), before.index("000000000001")) > max(
        i for i, name in enumerate(before) if name.endswith(".pt")
    )


def test_a_rank_that_never_writes_is_not_waited_for_for_ever(
    fleet: Callable[[str], OneRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(fleet("kept"), tmp_path / "kept")
    training.steps(3)
    monkeypatch.setattr(checkpoint, "WRITE_S", 0.1)
    monkeypatch.setattr(Rendezvous, "report", lambda rendezvous, tally: None)
    with pytest.raises(StorageError, match=r"after 0\.1 s only 0 of 1 ranks have said that the checkpoint is written"):
        training.checkpoint.save()


def test_nothing_to_load(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    training = Training(fleet("fleet"), tmp_path / "kept")
    assert not training.checkpoint.load()
    training.steps(3)
    assert training.model.version == 1


def test_too_late_to_load(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    training = Training(fleet("fleet"), tmp_path / "kept")
    training.steps(1)
    training.checkpoint.save()
    with pytest.raises(ConfigError, match="before the first training step"):
        training.checkpoint.load()


class Odd:
    """An object with a state that only unpickling could bring back."""

    def state_dict(self) -> dict[str, Any]:
        return {"fine": [1, (2.0, "three")], "then": {"bad": object()}}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("never saved")


def test_a_state_that_is_not_plain_is_refused_when_it_is_saved(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    model = fleet("fleet").site(models.wide())
    with pytest.raises(ConfigError, match=r"objects\.odd\.then\.bad: a object"):
        Checkpoint(tmp_path / "kept", model, odd=Odd()).save()


def test_a_checkpoint_that_would_run_code_is_not_read(fleet: Callable[[str], OneRank], tmp_path: Path) -> None:
    one = fleet("fleet")
    training = Training(one, tmp_path / "kept")
    training.steps(3)
    training.checkpoint.save()
    (common,) = (tmp_path / "kept").glob("*/common-*.pt")

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.write_text, (tmp_path / "exploded", "boom")

    torch.save({"format": 1, "bomb": Bomb()}, common)
    with pytest.raises(Exception, match="Weights only load failed"):
        Training(one, tmp_path / "kept", site="second").checkpoint.load()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("module", "objects", "says"),
    [
        (models.odd, ["optimizer", "scheduler"], "of another model"),
        (models.wide, ["optimizer"], r"holds the states of \['optimizer', 'scheduler'\], but .* given \['optimizer'\]"),
    ],
)
def test_a_checkpoint_of_something_else(
    fleet: Callable[[str], OneRank], tmp_path: Path, module: Callable[[], nn.Module], objects: list[str], says: str
) -> None:
    one = fleet("fleet")
    training = Training(one, tmp_path / "kept")
    training.steps(3)
    training.checkpoint.save()
    given = {name: getattr(training, name) for name in objects}
    with pytest.raises(ConfigError, match=says):
        Checkpoint(tmp_path / "kept", one.site(module(), site="second"), **given).load()


def test_a_full_disk_is_an_error_that_names_the_rank(
    fleet: Callable[[str], OneRank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(fleet("fleet"), tmp_path / "kept")
    training.steps(3)

    def full(state: Any, file: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(StorageError, match=r"rank 0 cannot write the checkpoint .* No space left on device"):
        training.checkpoint.save()
    assert list((tmp_path / "kept").glob("*/manifest.json")) == []
