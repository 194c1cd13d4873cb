"""What must be true of a fleet of marked updates in the end, whatever was killed meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from fleetddp.common.config import FleetConfig
from fleetddp.common.journal import Journal
from fleetddp.common.update import State
from helpers.marks import ELEMENTS, GEOMETRY, HALF
from helpers.members import Member


def check_settlement(config: FleetConfig, fleet: Sequence[Member], regions: frozenset[str] = frozenset()) -> int:
    """Receipts, journal and published weights tell the same story, and each update is in it once; returns the newest version.

    ``regions``: nodes whose updates stand for those of others.
    """
    pushed = {update_id: what for member in fleet for update_id, what in member.pushed.items()}
    receipts = {update_id: states for member in fleet for update_id, states in member.settled.items()}
    journal = Journal(config.coordinator.journal, run=config.run)
    try:
        recovered, versions = journal.recover(), journal.versions()
        assert [version.number for version in versions] == list(range(len(versions)))
        assert (recovered.accepted, recovered.decision) == ((), None)
        merged = {update_id: version for update_id, version in recovered.merged.items() if update_id.node not in regions}
        assert set(merged) == set(pushed)
        assert all(pushed.keys() == {*pushed.keys(), *member.acknowledged} for member in fleet)
        assert receipts == {update_id: {(State.MERGED, version)} for update_id, version in merged.items()}
        inside = defaultdict(list)
        for update_id, version in merged.items():
            inside[version].append(update_id)
        weights, expected = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
        for version in versions:
            ids = inside.pop(version.number, [])
            assert (version.number == 0) == (not ids)
            assert version.updates == len(ids)
            total = sum(pushed[update_id][1] for update_id in ids)
            for update_id in ids:
                mark, samples, base = pushed[update_id]
                assert base < version.number
                expected[[mark, HALF + mark]] -= samples / total
            with journal.read_version(version.number) as reader:
                weights = np.frombuffer(reader.read(0, GEOMETRY.payload_bytes), np.float32)
            np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=0)  # exactly 0 where nothing was merged
            for member in fleet:
                assert member.pulled.get(version.number, version.digest) == version.digest
        assert not inside
    finally:
        journal.close()
    folder = config.coordinator.journal
    assert list((folder / "payloads").iterdir()) == []
    assert {file.name for file in (folder / "versions").iterdir()} == {f"{v.number}.safetensors" for v in versions}
    return versions[-1].number
