"""Drives an aggregator by hand, without a journal or a transport: does what a driver would, at once or when the test says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fleetddp.common import config as settings
from fleetddp.common import events
from fleetddp.common.aggregator import Aggregator
from fleetddp.common.layout import Layout
from fleetddp.common.recovered import Recovered
from fleetddp.common.update import (
    NO_VERSION,
    Group,
    Interval,
    Kind,
    Receipt,
    Slice,
    Tier,
    Update,
    UpdateHeader,
    UpdateId,
    Version,
)

E = TypeVar("E")

LAYOUT = Layout.of([("weight", (30, 100)), ("bias", (100,))], [("running_mean", (7,))])  # 3100 parameters, 7 buffers
INTERVALS: tuple[Interval, ...] = ((0, 3100), (LAYOUT.buffer_start, LAYOUT.buffer_start + 7))


def fleet(**sections: Any) -> settings.FleetConfig:
    """A fleet file from keywords."""
    return settings.parse(sections)


def uid(node: str, sequence: int = 0, incarnation: int = 1) -> UpdateId:
    return UpdateId(node, incarnation, sequence)


def header(update_id: UpdateId, **fields: Any) -> UpdateHeader:
    """A delta of an edge node on version 0, unless told otherwise."""
    given: dict[str, Any] = {
        "update_id": update_id,
        "kind": Kind.DELTA,
        "tier": Tier.EDGE,
        "base_version": 0,
        "codec": "float32",
        "layout": LAYOUT.fingerprint,
    }
    return UpdateHeader(**{**given, **fields})


def part(samples: float = 10.0, intervals: tuple[Interval, ...] = INTERVALS, digest: int = 7) -> Slice:
    """One stream; by default it carries the whole update."""
    return Slice(intervals=intervals, samples=samples, digest=digest)


def partial(region: UpdateId, ids: Iterable[UpdateId], base_version: int = 0, tier: Tier = Tier.EDGE) -> UpdateHeader:
    """A region's sum over ``ids``: one group, ten samples each."""
    ids = tuple(ids)
    samples = 10.0 * len(ids)
    group = Group(tier=tier, base_version=base_version, samples=samples, buffer_samples=samples, ids=ids)
    return header(region, kind=Kind.PARTIAL, tier=Tier.REGION, base_version=base_version, groups=(group,))


def version(number: int, at: float = 0.0, updates: int = 0) -> Version:
    """A published version; its bytes are nobody's business here."""
    return Version(
        number=number, layout=LAYOUT.fingerprint, codec="float32", payload_bytes=1, digest=0, published_at=at, updates=updates
    )


def founded(number: int = 0, **fields: Any) -> Recovered:
    """What a journal holds right after version ``number`` was published, before any window was opened."""
    return Recovered(run="fleet", layout=LAYOUT, version=version(number), **fields)


@dataclass
class Steered:
    """An aggregator, the time, and everything it has asked for so far.

    With ``prompt`` the disk is fast: what is to be persisted is persisted before the next event. Merges wait for ``publish``.
    """

    aggregator: Aggregator
    now: float = 0.0
    prompt: bool = True
    effects: list[events.Effect] = field(default_factory=list)
    receipts: dict[UpdateId, list[Receipt]] = field(default_factory=dict)
    wake_at: float | None = None

    @classmethod
    def of(cls, recovered: Recovered | None = None, *, now: float = 0.0, prompt: bool = True, **sections: Any) -> Steered:
        """A fleet with these sections in its file, resumed from ``recovered`` (default: version 0 is published)."""
        steered = cls(Aggregator(fleet(**sections), recovered if recovered is not None else founded()), now, prompt)
        steered._take(steered.aggregator.start(now))
        return steered

    def send(self, event: events.Event) -> Any:
        """Feed an event; returns the answer, None if there is none."""
        return self._take(self.aggregator.handle(event, self.now))

    def _take(self, effects: list[events.Effect]) -> Any:
        answer = None
        for effect in effects:
            self.effects.append(effect)
            if isinstance(effect, events.Reply):
                assert answer is None, "two answers to one event"
                answer = effect.value
            elif isinstance(effect, events.Settle):
                for receipt in effect.receipts:
                    self.receipts.setdefault(receipt.update_id, []).append(receipt)
            elif isinstance(effect, events.Wake):
                self.wake_at = effect.at if self.wake_at is None else min(self.wake_at, effect.at)
        if self.prompt:
            for effect in effects:
                if isinstance(effect, events.Persist):
                    self.send(events.Persisted(update=effect.update))
        return answer

    def all(self, kind: type[E]) -> list[E]:
        """Every effect of one kind so far."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def at(self, when: float) -> Steered:
        """Let time pass until ``when``, with a Tick at each moment that was asked for."""
        while self.wake_at is not None and self.wake_at <= when:
            self.now, self.wake_at = max(self.now, self.wake_at), None
            self.send(events.Tick())
        self.now = max(self.now, when)
        return self

    # ---- what members do ----------------------------------------------------------------------------------------------------

    def join(self, *nodes: str, tier: Tier = Tier.EDGE, incarnation: int = 1, **fields: Any) -> Any:
        """Join each; returns the last answer."""
        answer = None
        for node in nodes:
            answer = self.send(events.Join(node=node, tier=tier, incarnation=incarnation, **fields))
        return answer

    def beat(self, *nodes: str, incarnation: int = 1, **fields: Any) -> Any:
        """A heartbeat of each; returns the last answer."""
        answer = None
        for node in nodes:
            answer = self.send(events.Heartbeat(node=node, incarnation=incarnation, **fields))
        return answer

    def offer(self, head: UpdateHeader, piece: Slice | None = None, run: str = "") -> Any:
        return self.send(events.Offer(header=head, slice=piece or part(), run=run))

    def staged(self, update_id: UpdateId, piece: Slice | None = None, squared_norm: float = 1.0) -> None:
        self.send(events.SliceStaged(update_id=update_id, slice=piece or part(), squared_norm=squared_norm))

    def push(self, head: UpdateHeader, piece: Slice | None = None) -> Receipt | None:
        """Offer and stage a whole update; returns its newest receipt."""
        answer = self.offer(head, piece)
        if not isinstance(answer, events.Proceed):
            return answer  # type: ignore[no-any-return]
        self.staged(head.update_id, piece)
        return self.receipt(head.update_id)

    def update(self, node: str, sequence: int = 0, **fields: Any) -> Receipt | None:
        """A whole update of a node, on the newest version unless told otherwise."""
        return self.push(header(uid(node, sequence), **{"base_version": self.aggregator.version, **fields}))

    def publish(self) -> None:
        """The merge in flight is done."""
        self.send(events.Published(version=version(self.aggregator.version + 1, self.now)))

    # ---- what there is to see -----------------------------------------------------------------------------------------------

    def receipt(self, update_id: UpdateId) -> Receipt | None:
        """The newest receipt of an update."""
        return self.receipts.get(update_id, [None])[-1]

    def merges(self) -> list[events.Decision]:
        return [effect.decision for effect in self.all(events.Merge)]

    @property
    def reason(self) -> str:
        """The window's current sentence."""
        return str(self.aggregator.status(self.now)["window"]["reason"])

    @property
    def window(self) -> Mapping[str, Any]:
        return self.aggregator.status(self.now)["window"]  # type: ignore[no-any-return]


def init(update_id: UpdateId, **fields: Any) -> UpdateHeader:
    """First weights from a site."""
    given: dict[str, Any] = {
        "kind": Kind.INIT,
        "tier": Tier.SITE,
        "base_version": NO_VERSION,
        "layout_spec": LAYOUT.to_json(),
    }
    return header(update_id, **{**given, **fields})


def durable(head: UpdateHeader, samples: float = 10.0) -> Update:
    """An accepted update as a journal gives it back."""
    return Update(header=head, samples=samples, squared_norm=1.0, payload_bytes=100, slices=(part(samples),))
