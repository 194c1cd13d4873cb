"""Drives a regional aggregator by hand, without a journal, a transport or a parent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleetddp.common import events
from fleetddp.common.recovered import Recovered, RecoveredRegion
from fleetddp.common.region_assembly import region_config
from fleetddp.common.regional import RegionalAggregator
from fleetddp.common.update import Receipt, State, Update, UpdateId
from helpers.steering import LAYOUT, Steered, fleet, founded, part, version

NODE = "west"


def joined(**fields: Any) -> events.Joined:
    """What a parent at version 0 answers to a join."""
    given: dict[str, Any] = {
        "run": "fleet",
        "version": 0,
        "layout": LAYOUT.fingerprint,
        "wants_init": False,
        "heartbeat_s": 5.0,
        "lease_s": 20.0,
        "gradient_lr": 0.5,
        "max_staleness": 3,
        "codecs": ("float64",),
    }
    return events.Joined(**{**given, **fields})


def made(sealing: events.Sealing) -> Update:
    """The partial of a sealing; its bytes are nobody's business here."""
    samples = sum(group.samples for group in sealing.header.groups)
    return Update(header=sealing.header, samples=samples, squared_norm=1.0, payload_bytes=8, slices=(part(samples),))


@dataclass
class SteeredRegion(Steered):
    """A region and everything it has asked for. ``prompt``: its disk is fast, too."""

    @classmethod
    def of(  # type: ignore[override]
        cls,
        recovered: Recovered | None = None,
        entered: RecoveredRegion | None = None,
        *,
        now: float = 0.0,
        prompt: bool = True,
        enrolled: bool = True,
        **sections: Any,
    ) -> SteeredRegion:
        """A region at version 0 that the parent has let in, unless told otherwise."""
        entered = entered or RecoveredRegion(node=NODE, incarnation=7)
        config = region_config(fleet(**sections))
        steered = cls(RegionalAggregator(config, recovered if recovered is not None else founded(), entered), now, prompt)
        steered._take(steered.aggregator.start(now))
        if enrolled:
            steered.send(events.Enrolled(joined=joined()))
        return steered

    def _take(self, effects: list[events.Effect]) -> Any:
        answer = super()._take(effects)
        if self.prompt:
            for effect in effects:
                if isinstance(effect, events.Seal):
                    self.send(events.Sealed(update=made(effect.sealing)))
                elif isinstance(effect, events.Conclude):
                    self.send(events.Concluded(conclusion=effect.conclusion))
        return answer

    def fetch(self, number: int) -> None:
        """A version of the parent's is here."""
        self.send(events.Told(version=number))
        self.send(events.Fetched(version=version(number), layout=LAYOUT))

    def answer(self, update_id: UpdateId, state: State, **fields: Any) -> None:
        """The parent says how an update stands, in a heartbeat."""
        self.send(events.Answered(receipt=Receipt(update_id=update_id, state=state, **fields)))

    def pushed(self, state: State = State.ACCEPTED, *, took: float = 1.0, **fields: Any) -> None:
        """The push in hand ends with this receipt."""
        update_id = self.pushes()[-1].update_id
        self.send(events.Answered(receipt=Receipt(update_id=update_id, state=state, **fields), push_s=took))

    def sealings(self) -> list[events.Sealing]:
        return [effect.sealing for effect in self.all(events.Seal)]

    def pushes(self) -> list[Update]:
        return [effect.update for effect in self.all(events.Push)]

    def conclusions(self) -> list[events.Conclusion]:
        return [effect.conclusion for effect in self.all(events.Conclude)]

    @property
    def asked(self) -> tuple[UpdateId, ...]:
        """What the parent is being asked about."""
        asks = self.all(events.Ask)
        return asks[-1].ids if asks else ()


def told(receipt: Receipt | None) -> tuple[str, int] | None:
    """A receipt in short."""
    return None if receipt is None else (receipt.state.value, receipt.version)
