"""A hundred fault scenarios; a thousand are ``make sweep``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import sweeping

from fleetddp.common.intake import Intake

SWEEP = Path(__file__).with_name("sweep.py")


@pytest.mark.parametrize("tens", range(10))
def test_every_invariant_holds_whatever_goes_wrong(tens: int) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        outcome = sweeping.run(seed)
        assert not outcome.wrong, f'{outcome.wrong}\n    make sweep ARGS="--seed {seed}"'


def test_the_scenarios_have_faults_of_every_kind() -> None:
    faults = [section for seed in range(100) if (section := sweeping.scenario(seed).faults) is not None]
    for kind in ("drop", "duplicate", "reorder", "delay", "corrupt"):
        assert sum(getattr(section.messages, kind) > 0 for section in faults) > 30
    assert sum(section.root.crashes_per_h > 0 for section in faults) > 30
    assert sum(section.root.at_points > 0 for section in faults) > 20
    assert sum(section.members.crashes_per_h > 0 for section in faults) > 30
    assert sum(section.partitions.per_h > 0 for section in faults) > 30
    assert {section.byzantine.kind for section in faults if section.byzantine.members} == {"sign_flip", "scale", "nan"}


def test_a_defect_is_found_and_its_seed_can_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "_known", lambda self, event: None)  # a repeat is taken for new
    assert any("duplicates" in sweeping.run(seed).wrong for seed in range(10))


def test_a_seed_alone_comes_to_the_same_end_in_another_process() -> None:
    seed = 6
    done = subprocess.run([sys.executable, str(SWEEP), "--seed", str(seed)], capture_output=True, text=True, check=True)
    assert sweeping.run(seed).fingerprint in done.stdout
    assert "all invariants hold" in done.stdout


def test_the_sweep_runs_in_processes_and_prints_its_figures() -> None:
    options = ["--count", "9", "--processes", "2"]
    done = subprocess.run([sys.executable, str(SWEEP), *options], capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert (figures["scenarios"], figures["wrong"]) == (9, 0)
    assert figures["runs"] > 9  # some twice
