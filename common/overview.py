"""What people see of an aggregator: its status as JSON-able values. The schema is in WIRE.md."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fleetddp.common.admission import Standing
from fleetddp.common.intake import Intake
from fleetddp.common.membership import Membership
from fleetddp.common.scores import Scores

MAX_STATUS_MEMBERS = 1000


def overview(
    now: float, most: int, standing: Standing, members: Membership, intake: Intake, scores: Scores, counters: Counter[str]
) -> dict[str, Any]:
    """How the run stands, with ``most`` members at most; all but the window."""
    shown = members.status(most)
    return {
        "at": now,
        "run": standing.run,
        "version": standing.version,
        "layout": standing.layout.fingerprint if standing.layout is not None else "",
        "finished": standing.finished,
        "members": shown,
        "members_omitted": len(members) - len(shown),
        "scores": {str(version): dict(metrics) for version, metrics in scores.by_version.items()},
        "counters": {
            **{word: counters[word] for word in ("accepted", "merged", "expired")},
            "duplicates": intake.duplicates,
            "refused": {reason.value: n for reason, n in sorted(intake.refused.items())},
        },
    }
