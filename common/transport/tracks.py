"""The tracks that one server runs: which driver a call is for, and what people see of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetddp.common.driver import Driver
from fleetddp.common.errors import Reason, Refused


class Tracks:
    """Drivers by the name of their track, at least one."""

    def __init__(self, drivers: Mapping[str, Driver]) -> None:
        self._drivers = dict(drivers)
        self.first = next(iter(self._drivers.values()))

    def driver(self, name: str) -> Driver:
        """Of a track; an empty name means the only one. Raises ``Refused(WRONG_TRACK)``, which names those that there are."""
        found = self.first if not name and len(self._drivers) == 1 else self._drivers.get(name)
        if found is None:
            which = f"there is no track {name!r} here" if name else "several tracks run here, and the call names none"
            raise Refused(Reason.WRONG_TRACK, f"{which}; there are: {self._all()}")
        return found

    def explain(self, refusal: Refused) -> Refused:
        """A member that has another model than its track's may mean another track."""
        if refusal.reason is not Reason.WRONG_LAYOUT or len(self._drivers) == 1:
            return refusal
        return Refused(refusal.reason, f"{refusal.message}; the tracks here are: {self._all()}")

    def status(self, name: str) -> dict[str, Any]:
        """Of one track (empty: the first), with a word on each where there are several."""
        if name or len(self._drivers) == 1:
            status = self.driver(name).status()
        else:
            name, status = next(iter(self._drivers)), self.first.status()
        if len(self._drivers) > 1:
            status["track"] = name
            status["tracks"] = {
                track: {"kind": driver.config.kind, "version": driver.version, "finished": driver.finished}
                for track, driver in self._drivers.items()
            }
        return status

    def _all(self) -> str:
        return ", ".join(
            f"{name} (layout {driver.layout.fingerprint[:12] if driver.layout else 'not known yet'})"
            for name, driver in self._drivers.items()
        )
