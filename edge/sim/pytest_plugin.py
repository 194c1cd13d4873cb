"""Simulated fleets in your own tests: the fixture ``simulated_fleet``. pytest finds it by itself once fleetddp is installed.

Nothing is imported before a test asks for a fleet: pytest starts as quickly as without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fleetddp.common.task import Task
    from fleetddp.edge.sim.simulator import Simulation
    from fleetddp.edge.sim.timeline import Timeline


class SimulatedFleet:
    """A fleet that runs once, when it is told to. See ``simulated_fleet`` for what it is made of."""

    def __init__(self, scenario: Mapping[str, Any], task: Task | None) -> None:
        self._scenario, self._task = dict(scenario), task
        self._events: list[tuple[float, Callable[[Simulation], None]]] = []
        self.simulation: Simulation | None = None  # once it runs

    def crash_coordinator(self, *, at_s: float, down_s: float) -> None:
        """The coordinator crashes at a virtual time and starts again ``down_s`` seconds later."""
        self.at(at_s, lambda simulation: simulation.root.crash())
        self.at(at_s + down_s, lambda simulation: simulation.root.start())

    def crash_device(self, name: str, *, at_s: float, down_s: float) -> None:
        """A device (``phones-0``, ``phones-1``, ...) crashes at a virtual time and starts again ``down_s`` seconds later."""
        self.at(at_s, lambda simulation: simulation.members[name].crash(down_s))

    def at(self, time_s: float, act: Callable[[Simulation], None]) -> None:
        """Call ``act`` with the simulation at a virtual time."""
        self._events.append((time_s, act))

    def run(self, *, hours: float = 0.0, minutes: float = 0.0, seconds: float = 0.0) -> Timeline:
        """Run it for so long in virtual time. Raises ``ConfigError`` where there can be no such fleet, and ``InvariantViolation``
        if an update was lost or merged twice, a version left out, or another invariant of the protocol broken."""
        from fleetddp.edge.sim.scenario import parse
        from fleetddp.edge.sim.simulator import Simulation

        horizon_s = 3600 * hours + 60 * minutes + seconds
        simulation = self.simulation = Simulation(parse({**self._scenario, "horizon_s": horizon_s}), task=self._task)
        for time_s, act in self._events:
            simulation.loop.at(time_s, lambda act: act(simulation), act)
        return simulation.run()


@pytest.fixture
def simulated_fleet() -> Callable[..., SimulatedFleet]:
    """Makes fleets: ``simulated_fleet(devices=200, profile="phones", seed=1)``.

    ``profile``: phones, jetsons, gateways or datacenter; the devices are called ``phones-0`` and so on. ``task``: an object with
    the methods of a ``Task``, to train for real (in this process). ``fleet``: sections of a fleet file. ``faults``: as in a
    scenario file. All else is of the population, such as ``samples``, ``work``, ``dropout``, ``availability``: see
    ``fleetddp.edge.sim.scenario``.
    """

    def make(
        *,
        devices: int,
        profile: str,
        seed: int = 0,
        task: Task | None = None,
        fleet: Mapping[str, Any] | None = None,
        faults: Mapping[str, Any] | None = None,
        **population: Any,
    ) -> SimulatedFleet:
        scenario = {
            "seed": seed,
            "mode": "timing" if task is None else "train",
            "trainer": {"workers": 0},
            "fleet": dict(fleet or {}),
            "faults": faults,
            "populations": {profile: {"count": devices, "profile": profile, **population}},
        }
        return SimulatedFleet(scenario, task)

    return make
