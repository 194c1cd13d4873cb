"""Every checker finds what it is there for: production code is broken on purpose, and the run says what does not hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from helpers.synthetic import SyntheticSimulation

from fleetddp.common import admission, aggregator, merge
from fleetddp.common.aggregator import Aggregator
from fleetddp.common.events import Decision, Effect, SliceStaged
from fleetddp.common.intake import Intake
from fleetddp.common.journal import Journal
from fleetddp.common.publish import Publisher
from fleetddp.common.receipts import Receipts
from fleetddp.common.recovered import Recovered
from fleetddp.common.staging import Stream
from fleetddp.common.stored import StagedFile
from fleetddp.common.update import Receipt, State, Update, UpdateId, Version
from fleetddp.common.window import Action, Verdict, Why
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.scenario import Scenario, parse
from fleetddp.edge.sim.simulator import Simulation
from fleetddp.edge.sim.violations import InvariantViolation

TIMES = {"crashes_per_h": 60, "down_s": 5}


def fleet(*, quiet_s: float = 300, faults: dict[str, Any] | None = None, horizon_s: float = 900, **sections: Any) -> Scenario:
    """Four phones without a fault of their own."""
    members = {"heartbeat_s": 10, "lease_s": 40, "stall_s": 30}
    window = {"preset": "semi_sync", "quorum": 2, "grace_s": 5, "deadline_s": 100}
    regions = sections.pop("regions", {})
    return parse(
        {
            "seed": 7,
            "horizon_s": horizon_s,
            "fleet": {"window": window, "members": members, "until": {"versions": 12}, **sections},
            "model": {"parameters": 611},
            "regions": regions,
            "populations": {"phones": {"count": 4, "profile": "phones", "work": 3, "region": next(iter(regions), None)}},
            "faults": {"quiet_s": quiet_s, **(faults or {})},
        }
    )


def broken(scenario: Scenario) -> set[str]:
    """The invariants that do not hold in a run."""
    with pytest.raises(InvariantViolation) as caught:
        SyntheticSimulation(scenario).run()
    return {violation.invariant for violation in caught.value.violations}


REPEATS = {"messages": {"duplicate": 0.5, "delay_s": 20}}
CRASHES = {"root": TIMES}


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    for faults in (None, REPEATS, CRASHES):
        simulation = SyntheticSimulation(fleet(faults=faults))
        timeline = simulation.run()
        assert timeline.version == simulation.invariants.version >= 8
        assert (faults is CRASHES) == (simulation.root.starts > 1)


def test_a_decision_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_order_of_arrival(updates: Iterable[Update], *rest: Any, **how: Any) -> Decision:
        updates = list(updates)
        decision = merge.decision_on(updates, *rest, **how)
        place = {update.update_id: n for n, update in enumerate(updates)}
        return replace(decision, terms=tuple(sorted(decision.terms, key=lambda term: place[term.update_id])))

    monkeypatch.setattr(aggregator, "decision_on", in_order_of_arrival)
    assert broken(fleet()) == {"order"}


def test_a_mean_that_depends_on_who_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def favouring(updates: Iterable[Update], *rest: Any, **how: Any) -> Decision:
        first, *others = updates
        return merge.decision_on([replace(first, samples=2 * first.samples), *others], *rest, **how)

    monkeypatch.setattr(aggregator, "decision_on", favouring)
    assert broken(fleet()) == {"order"}


def test_a_repeat_that_is_taken_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Intake, "_known", lambda self, event: None)
    assert "duplicates" in broken(fleet(faults=REPEATS))


def test_a_repeat_that_is_answered_as_if_it_were_none(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Intake._known

    def first_time(self: Intake, event: Any) -> Receipt | None:
        receipt = known(self, event)
        return None if receipt is None else replace(receipt, duplicate=False)

    monkeypatch.setattr(Intake, "_known", first_time)
    assert broken(fleet(faults=REPEATS)) == {"duplicates"}


def test_an_acknowledged_update_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    count, calls = Aggregator._count, itertools.count(1)

    def forgetful(self: Aggregator, update: Update) -> None:
        if next(calls) % 5:
            count(self, update)

    monkeypatch.setattr(Aggregator, "_count", forgetful)
    assert "settled" in broken(fleet())


def test_an_update_that_is_in_two_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[Update] = []

    def again(updates: Iterable[Update], *rest: Any, **how: Any) -> Decision:
        updates = list(updates)
        decision = merge.decision_on([*updates, *before], *rest, **how)
        before[:] = updates[:1]
        return decision

    monkeypatch.setattr(aggregator, "decision_on", again)
    assert "settled" in broken(fleet())


def test_a_receipt_that_is_not_true(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgotten(self: Receipts, update_id: UpdateId) -> Receipt | None:
        return None

    monkeypatch.setattr(Receipts, "find", forgotten)  # what a heartbeat asks about is said to be unknown
    assert "settled" in broken(fleet(window={"preset": "periodic", "deadline_s": 100}))


def test_a_refusal_of_what_was_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Receipts, update: Update) -> tuple[Receipt, ...]:
        self._accepted[update.update_id] = update
        return (
            Receipt(update_id=update.update_id, state=State.ACCEPTED),
            Receipt(update_id=update.update_id, state=State.REFUSED),
        )

    monkeypatch.setattr(Receipts, "accept", refused)
    assert "settled" in broken(fleet())


def test_an_end_that_forgets_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Aggregator, "_expire", lambda self, updates, out: None)
    scenario = fleet(until={"hours": 0.1}, window={"preset": "periodic", "deadline_s": 3000}, quiet_s=0)
    assert broken(scenario) == {"settled"}


def test_an_update_that_is_too_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = fleet(merge={"staleness": {"max_staleness": 0}}, window={"preset": "async"})
    assert SyntheticSimulation(scenario).run().totals.refused["STALE"] > 0
    lax = [check for check in admission.HEADER if check is not admission._not_stale]
    monkeypatch.setattr(admission, "HEADER", lax)
    monkeypatch.setattr(admission, "_not_stale", lambda header, standing: None)
    assert broken(scenario) == {"staleness"}


def test_a_version_number_that_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    published = Aggregator._published

    def unmoved(self: Aggregator, event: Any, now: float, out: list[Effect]) -> None:
        before = self._standing.version
        published(self, event, now, out)
        self._standing.version = max(before, 0)

    monkeypatch.setattr(Aggregator, "_published", unmoved)
    assert "gapless" in broken(fleet())


def broken_recovery(change: Callable[[Recovered], Recovered], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    recover = Journal.recover
    monkeypatch.setattr(Journal, "recover", lambda self: change(recover(self)))
    return broken(fleet(faults=CRASHES, window={"preset": "periodic", "deadline_s": 60}))


RECOVERIES: dict[str, Callable[[Recovered], Recovered]] = {
    "an update": lambda r: replace(r, accepted=r.accepted[1:]),
    "its samples": lambda r: replace(r, accepted=tuple(replace(u, samples=u.samples + 1) for u in r.accepted)),
    "the version": lambda r: replace(r, version=replace(r.version, number=max(0, r.version.number - 1)) if r.version else None),
    "when the window opened": lambda r: replace(r, window_opened_at=(r.window_opened_at or 0.0) - 1.0),
    "what was merged": lambda r: replace(r, merged={}),
    "the marks": lambda r: replace(r, high_water={}),
    "the end": lambda r: replace(r, finished="the run is over"),
}


@pytest.mark.parametrize("what", RECOVERIES)
def test_a_start_that_recovers_otherwise(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "resume" in broken_recovery(RECOVERIES[what], monkeypatch)


def test_a_decision_that_is_made_again_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    recover = Journal.recover

    def otherwise(self: Journal) -> Recovered:
        found = recover(self)
        decided = found.decision
        return found if decided is None else replace(found, decision=replace(decided, at=decided.at + 1))

    monkeypatch.setattr(Journal, "recover", otherwise)
    crash = {"what": "crash", "node": "root", "point": "version:begun", "occurrence": 2}
    assert "resume" in broken(fleet(faults={"at": [crash]}))


def test_a_window_that_does_not_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        aggregator, "decide", lambda now, counts, policy: Verdict(Action.WAIT, now + 10, Why.QUORUM_MISSING, counts, policy)
    )
    assert broken(fleet()) == {"progress"}


def test_a_fleet_that_does_not_recover() -> None:
    """A backhaul that stays down: no fault of the section is in effect, and no version comes."""
    assert broken(fleet(regions={"town": {"cuts": [[500, 900]]}}, horizon_s=900)) == {"progress"}


def test_a_norm_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    lies = {"byzantine": {"members": ["phones-1"], "kind": "scale"}}
    scenario = fleet(limits={"max_norm": 1e4}, faults=lies)
    assert SyntheticSimulation(scenario).run().totals.refused["NORM_BOUND"] > 0
    monkeypatch.setattr(admission, "COMPLETE", [c for c in admission.COMPLETE if c is not admission._norm_is_bounded])
    assert broken(scenario) == {"limits"}


def test_a_driver_that_fails_on_something(monkeypatch: pytest.MonkeyPatch) -> None:
    publish, calls = Publisher.merge, itertools.count(1)

    def fails_once(self: Publisher, decision: Decision) -> Version:
        if next(calls) == 3:
            raise OSError("no space left on device")
        return publish(self, decision)

    monkeypatch.setattr(Publisher, "merge", fails_once)
    assert broken(fleet()) == {"defects"}


def test_damage_that_nobody_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checksums, damaged payloads are merged; only the replica, which has what was sent, can tell."""

    def write(self: Stream, offset: int, crc32c: int, data: Any) -> None:
        self._arriving.file.write(offset, data)
        self._part.squared_norm = 1.0
        self._part.advance(len(data))

    def finish(self: Stream) -> SliceStaged:
        return SliceStaged(update_id=self._update_id, slice=self._part.slice, squared_norm=1.0)

    scenario = fleet(faults={"messages": {"corrupt": 0.3}}, edge={"codec": "int8"})
    assert SyntheticSimulation(scenario).run().totals.refused["BAD_CHECKSUM"] > 0
    monkeypatch.setattr(Stream, "write", write)
    monkeypatch.setattr(Stream, "finish", finish)
    assert broken(scenario) == {"bytes"}


def test_bytes_that_a_crash_takes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceptance without its fsync: the journal itself finds that it has promised what is not there."""
    monkeypatch.setattr(StagedFile, "fsync", lambda self: None)
    with pytest.raises(Exception, match=r"the journal promises"):
        SyntheticSimulation(fleet(faults=CRASHES, window={"preset": "periodic", "deadline_s": 60})).run()


def test_the_same_seed_gives_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = fleet(faults={**CRASHES, **REPEATS})
    first, again = (SyntheticSimulation(scenario) for _ in range(2))
    other = SyntheticSimulation(scenario.model_copy(update={"seed": 8}))
    for simulation in (first, again, other):
        simulation.run()
    assert first.invariants.fingerprint == again.invariants.fingerprint != other.invariants.fingerprint
    assert first.timeline.totals == again.timeline.totals
    monkeypatch.setattr(Draws, "stream", lambda self, *names: random.Random())
    unseeded = SyntheticSimulation(scenario)
    unseeded.run()
    assert unseeded.invariants.fingerprint != first.invariants.fingerprint


def test_timing_mode_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = fleet(faults={**CRASHES, **REPEATS})
    assert Simulation(scenario).run().version >= 8
    count, calls = Aggregator._count, itertools.count(1)
    monkeypatch.setattr(Aggregator, "_count", lambda self, update: count(self, update) if next(calls) % 5 else None)
    with pytest.raises(InvariantViolation, match="settled"):
        Simulation(scenario).run()
