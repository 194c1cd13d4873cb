"""One member of a simulated fleet, an edge node or a site: on the wire it does what ``edge/node.py`` does, driven by the loop.

Two activities go on side by side, as there: *work* (pull the newest version, train on it, wait for the next) and *delivery* (push
what is owed, oldest first). Beside both it joins, sends heartbeats, and watches for news while it waits.

It stops when it becomes unavailable or crashes, and what it was doing is lost; what it owes is kept, and its next life has a new
incarnation. A site differs in numbers only: its codec, its steps between boundaries, and how long it waits at one for a version.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleetddp.common.errors import Refused, Unreachable
from fleetddp.common.events import Joined, Offer
from fleetddp.common.transport import MEMBER_REASONS
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.update import NO_VERSION, Kind, Receipt, Slice, State, Tier, UpdateHeader
from fleetddp.edge.node import DAMAGED
from fleetddp.edge.sim.availability import Availability
from fleetddp.edge.sim.calls import Held, Pull, Pulled, Upload
from fleetddp.edge.sim.learning import Parcel, Unit
from fleetddp.edge.sim.network import Path
from fleetddp.edge.sim.owed import Entry, Owed
from fleetddp.edge.sim.profiles import Profile
from fleetddp.edge.sim.session import SimSession
from fleetddp.edge.sim.world import Conduct, World

RESENT = 3  # times that an upload damaged on its way is sent before its sender gives up


@dataclass(slots=True)
class Usage:
    """What its time went into. It may push while it waits or trains."""

    seconds: dict[str, float] = field(default_factory=lambda: {"down": 0.0, "wait": 0.0, "pull": 0.0, "train": 0.0})
    push_s: float = 0.0


class SimMember:
    """See the module. ``begin`` once; ``crash`` at any time."""

    __slots__ = (
        "_availability",
        "_busy",
        "_conduct",
        "_delay",
        "_doing",
        "_end",
        "_impatient",
        "_later",
        "_missed",
        "_not_before",
        "_over",
        "_profile",
        "_pull_delay",
        "_pull_not_before",
        "_push_began",
        "_pushing",
        "_resent",
        "_rng",
        "_session",
        "_since",
        "_skew_s",
        "_soon",
        "_unit",
        "_units",
        "_world",
        "life",
        "name",
        "owed",
        "path",
        "up",
        "usage",
    )

    def __init__(
        self,
        name: str,
        world: World,
        conduct: Conduct,
        profile: Profile,
        path: Path,
        availability: Availability,
        stream: random.Random,
    ) -> None:
        self.name = name
        self.path = path
        self.life = 0  # a new number each time it starts or stops: what is meant for an earlier life is not delivered
        self.up = False
        self.owed = Owed(name)
        self.usage = Usage()
        self._world, self._conduct, self._profile, self._availability, self._rng = world, conduct, profile, availability, stream
        self._skew_s = stream.gauss(0.0, conduct.clock_skew_s) if conduct.clock_skew_s else 0.0
        self._over = False  # it will not start again
        self._units = 0
        self._doing, self._since = "down", world.loop.now()
        self._reset()

    def _reset(self) -> None:
        """What a process knows when it starts."""
        self._session = SimSession(self, self._world, self._conduct.tier, self._rng)
        self._busy = self._pushing = self._impatient = False
        self._not_before = -math.inf
        self._push_began = 0.0
        self._resent = 0
        self._unit: Unit | None = None  # being trained
        self._end: Any = None  # the weights that it leads to
        # As in the node: after an update that led nowhere; of pulls; of pushes that cost little, and of others.
        self._delay, self._pull_delay = self._sparing(), self._sparing()
        self._soon, self._later = Backoff(self._rng), self._sparing()
        self._missed, self._pull_not_before = NO_VERSION, -math.inf  # a version that could not be pulled

    # ---- life -----------------------------------------------------------------------------------------------------------------

    @property
    def tier(self) -> Tier:
        """Where it stands."""
        return self._conduct.tier

    def begin(self) -> None:
        """Take part from now on, whenever it is available. A fleet does not start at one instant: it comes within a heartbeat."""
        loop = self._world.loop
        if self._availability.state_at(loop.now()):
            loop.after(self._rng.random() * self._world.config.members.heartbeat_s, self._recover)
        self._await_change()

    def crash(self, down_s: float) -> None:
        """Stop at once, and start again in ``down_s`` seconds if it is available then."""
        self._stop()
        self._world.loop.after(down_s, self._recover)

    def _await_change(self) -> None:
        change = self._availability.next_change(self._world.loop.now())
        if change < math.inf:
            self._world.loop.at(change, self._change)

    def _change(self, _: None) -> None:
        if self._over:
            return
        if self._availability.state_at(self._world.loop.now()):
            self._start()
        else:
            self._stop()
        self._await_change()

    def _recover(self, _: None) -> None:
        if self._availability.state_at(self._world.loop.now()):
            self._start()

    def _start(self) -> None:
        if self.up or self._over:
            return
        self.up = True
        self.life += 1
        self._reset()
        self.owed.restart(round((self._world.loop.now() + self._skew_s) * 1e6))
        self._spend("wait")
        self._note("started")
        self._session.join()

    def _stop(self) -> None:
        if not self.up:
            return
        if self._unit is not None:
            self._note("lost work")
        self._spend("down")
        self.up = False
        self.life += 1
        self._session.end()
        self._note("stopped")

    def finish(self) -> None:
        """The run is over."""
        self._over = True
        self._spend("down")
        self.up = False
        self.life += 1
        self._note("left")

    def fail(self) -> None:
        """See ``Owner``."""
        self._over = True
        self._note("failed")
        self._stop()

    def _sparing(self) -> Backoff:
        return Backoff(self._rng, first_s=1.0, cap_s=60.0)

    def _note(self, what: str) -> None:
        self._world.observer.noted(self.name, what, self._world.loop.now())

    def _spend(self, doing: str) -> None:
        """From now on its time goes into something else."""
        now = self._world.loop.now()
        self.usage.seconds[self._doing] += now - self._since
        self._doing, self._since = doing, now

    def settle_usage(self) -> None:
        """The simulation ends: count what its time went into up to now."""
        self._spend(self._doing)

    # ---- what its session brings ----------------------------------------------------------------------------------------------

    def entered(self, joined: Joined) -> None:
        """See ``Owner``."""
        if joined.wants_init and self.owed.base_version == NO_VERSION and not self.owed:
            self.owed.put_init(None)
        self._deliver()
        self.look()

    def settle(self, receipt: Receipt) -> None:
        """See ``Owner``."""
        self._world.observer.told(self.name, receipt, self._world.loop.now())
        if self.owed.record(receipt):
            self._session.changed()
            if receipt.state is State.MERGED:
                self._delay.reset()

    # ---- work -----------------------------------------------------------------------------------------------------------------

    def _look(self, life: int) -> None:
        if life == self.life:
            self.look()

    def look(self) -> None:
        """One look around: adopt what is new, then train if there is something to train, else wait for news."""
        if self._busy or not self.up:
            return
        owed, session = self.owed, self._session
        if owed.rewinding:
            owed.rewind()
            self._put_off()
        newest = session.newest
        if newest not in (NO_VERSION, owed.base_version) and session.joined and not session.cut_off and self._may_pull(newest):
            self._pull(newest)
        elif self._due():
            self._train()
        else:
            session.listen()

    def _put_off(self) -> None:
        """What led nowhere is not repeated at once; a new version ends the delay."""
        delay = self._delay.delay()
        self._not_before = self._world.loop.now() + delay
        self._world.loop.after(delay, self._look, self.life)

    def _due(self) -> bool:
        owed = self.owed
        if owed.base_version == NO_VERSION or len(owed) >= self._conduct.max_owed:
            return False
        # A gradient is about the weights as they were: one will do.
        again = self._impatient or (self._session.cut_off and self._conduct.kind is Kind.DELTA)
        return (again or not owed.trained) and self._world.loop.now() >= self._not_before

    def _may_pull(self, version: int) -> bool:
        return version != self._missed or self._world.loop.now() >= self._pull_not_before

    def _pull(self, version: int) -> None:
        self._busy = True
        self._missed = version  # until it is here
        self._spend("pull")
        self._world.network.call(self, Pull(version), self._pulled)

    def _pulled(self, answer: Any) -> None:
        self._busy = False
        self._spend("wait")
        if not isinstance(answer, Pulled):
            delay = self._pull_delay.delay()
            self._pull_not_before = self._world.loop.now() + delay
            self._world.loop.after(delay, self._look, self.life)
            self.look()
            return
        self._missed = NO_VERSION
        self._pull_delay.reset()
        self._session.touch()
        self._not_before = -math.inf
        self._impatient = False
        self._session.changed()
        learning = self._world.learning
        weights = learning.adopt(answer.version, answer.payload)
        self.owed.adopt(answer.version.number, weights, self._session.max_staleness)
        if self.tier is Tier.SITE:  # its rank 0 evaluates what it adopts
            self._session.report(answer.version.number, learning.evaluate(answer.version, answer.payload))
        self._note("adopted")
        self.look()

    def _train(self) -> None:
        conduct, rng = self._conduct, self._rng
        wanted = conduct.steps if conduct.pinned else self._session.steps or conduct.steps
        samples, steps = conduct.samples(wanted), wanted
        if conduct.partial and rng.random() < conduct.partial:
            steps = max(1, math.floor(steps * rng.random()))
            samples *= steps / wanted
        seconds = self._profile.train_s(samples, rng, work=conduct.work)
        self._unit = Unit(self._units, samples, steps, seconds)
        self._units += 1
        self._busy = True
        self._impatient = False
        self._spend("train")
        self._end = self._world.learning.train(self.name, self.owed.local, self._unit)
        if conduct.dropout and rng.random() < conduct.dropout:
            self._world.loop.after(seconds * rng.random(), self._drop_out, self.life)
        else:
            self._world.loop.after(seconds, self._trained, self.life)

    def _drop_out(self, life: int) -> None:
        if life == self.life:
            self.crash(self._conduct.restart_s)

    def _trained(self, life: int) -> None:
        if life != self.life or self._unit is None:
            return
        self.owed.put(self._conduct.kind, self._unit, self._end)
        self._unit = self._end = None
        self._busy = False
        self._spend("wait")
        self._note("trained")
        if self._conduct.wait_s < math.inf:
            self._world.loop.after(self._conduct.wait_s, self._tire, (self.life, self._units))
        self._deliver()
        self.look()

    def _tire(self, since: tuple[int, int]) -> None:
        """It has waited for a newer version for long enough."""
        if since == (self.life, self._units) and not self._busy:
            self._impatient = True
            self.look()

    # ---- delivery -------------------------------------------------------------------------------------------------------------

    def _redeliver(self, life: int) -> None:
        if life == self.life:
            self._deliver()

    def _deliver(self) -> None:
        """Push the oldest update that the parent may not have."""
        if self._pushing or not self.up or not self._session.joined or self._session.cut_off:
            return
        entry = self.owed.offer()
        if entry is None:
            return
        try:
            offer, parcel = self._offer_of(entry)
        except Refused:  # NOT_FINITE
            self._note("diverged")
            self.owed.drop(entry)
            self.look()
            return
        self._pushing = True
        self._push_began = self._world.loop.now()
        self._session.changed()
        self._world.network.call(self, offer, partial(self._offered, offer, parcel))

    def _offer_of(self, entry: Entry) -> tuple[Offer, Parcel]:
        learning, conduct = self._world.learning, self._conduct
        first = entry.kind is Kind.INIT
        codec = "float32" if first else conduct.codec
        parcel = entry.parcel
        if parcel is None:
            parcel = learning.encode(self.name, entry.kind, codec, entry.start, entry.end, self.owed.residual)
            self.owed.encoded(entry, parcel)
        header = UpdateHeader(
            update_id=entry.update_id,
            kind=entry.kind,
            tier=conduct.tier,
            base_version=entry.base_version,
            codec=codec,
            layout=learning.layout.fingerprint,
            steps=entry.steps,
            seconds=entry.seconds,
            metrics=parcel.metrics,
            layout_spec=learning.layout.to_json() if first else b"",
        )
        part = Slice(intervals=self._world.required[entry.kind], samples=entry.samples, digest=parcel.digest)
        return Offer(header=header, slice=part, run=self._world.config.run), parcel

    def _offered(self, offer: Offer, parcel: Parcel, answer: Any) -> None:
        if isinstance(answer, Held):
            upload = Upload(offer, answer.stream, parcel.payload)
            self._world.network.call(self, upload, partial(self._pushed, offer), parcel.size - answer.stream.held)
        else:
            self._pushed(offer, answer)

    def _pushed(self, offer: Offer, answer: Any) -> None:
        """The push has ended, one way or another."""
        now = self._world.loop.now()
        self._pushing = False
        self.usage.push_s += now - self._push_began
        if isinstance(answer, Refused) and self._is_verdict(answer):
            reason, message = answer.reason.value, answer.message
            answer = Receipt(update_id=offer.header.update_id, state=State.REFUSED, reason=reason, message=message)
        if not isinstance(answer, Receipt) or answer.state is State.UNKNOWN:
            # What cost little: it was not sent for nothing.
            cheap = isinstance(answer, Unreachable) or (isinstance(answer, Refused) and answer.reason in MEMBER_REASONS)
            delay = (self._soon if cheap else self._later).delay()
            self._world.loop.after(delay, self._redeliver, self.life)
            return
        self._session.touch()
        self._resent = 0
        self._soon.reset()
        self._later.reset()
        self.settle(answer)
        self._deliver()
        self.look()

    def _is_verdict(self, refusal: Refused) -> bool:
        """Whether a refusal of a push is about the update itself, and for good."""
        if refusal.reason in DAMAGED:
            self._resent += 1
            return self._resent >= RESENT
        return not refusal.retry and refusal.reason not in MEMBER_REASONS
