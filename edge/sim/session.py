"""A simulated member's standing with the root: it joins, sends heartbeats, hears news, as ``common/transport/session.py``."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import Heard, Heartbeat, Join, Joined, Leave, News
from fleetddp.common.transport import MEMBER_REASONS
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.update import NO_VERSION, Receipt, Tier
from fleetddp.edge.node import CUT_OFF
from fleetddp.edge.sim.network import Path
from fleetddp.edge.sim.owed import Owed
from fleetddp.edge.sim.world import World


class Owner(Protocol):
    """The member, as its session sees it."""

    name: str
    path: Path
    life: int
    owed: Owed

    def entered(self, joined: Joined) -> None:
        """It is a member now."""
        ...

    def settle(self, receipt: Receipt) -> None:
        """A receipt has come."""
        ...

    def look(self) -> None:
        """Something may have changed."""
        ...

    def finish(self) -> None:
        """The run is over."""
        ...

    def fail(self) -> None:
        """A refusal for good: a person would have to act."""
        ...


class SimSession:
    """One life's session; a new life has a new one."""

    __slots__ = (
        "_backoff",
        "_beat",
        "_heard_at",
        "_heartbeat_s",
        "_metrics",
        "_owner",
        "_rng",
        "_tier",
        "_world",
        "finished",
        "joined",
        "life",
        "max_staleness",
        "name",
        "newest",
        "path",
        "steps",
    )

    def __init__(self, owner: Owner, world: World, tier: Tier, rng: random.Random) -> None:
        self.name, self.path, self.life = owner.name, owner.path, owner.life
        self.joined = False
        self.newest = NO_VERSION  # the version that the root told of
        self.finished = ""
        self.max_staleness = 0  # of updates and residuals; told by the root
        self.steps = 0  # that the root wants in the next unit of work; 0: it leaves that to the member
        self._owner, self._world, self._tier, self._rng = owner, world, tier, rng
        self._heard_at = world.loop.now()
        self._heartbeat_s = world.config.members.heartbeat_s
        self._backoff = Backoff(rng)
        self._beat: Heartbeat | None = None  # the last one sent, if what it says still holds
        self._metrics: tuple[int, Mapping[str, float]] = (NO_VERSION, {})  # the version they are of first

    @property
    def cut_off(self) -> bool:
        """Whether the root has not been heard for so long that the member goes on alone."""
        return self._world.loop.now() - self._heard_at > CUT_OFF * self._heartbeat_s

    def touch(self) -> None:
        """The root answered something."""
        self._heard_at = self._world.loop.now()

    def changed(self) -> None:
        """The base version or the open updates did."""
        self._beat = None

    def report(self, version: int, metrics: Mapping[str, float]) -> None:
        """Tell the root what a version was measured to be."""
        self._metrics = version, metrics
        self._beat = None

    def join(self) -> None:
        """Begin."""
        self._enter(self.life)

    def listen(self) -> None:
        """Watch for news, until some come."""
        if self.joined:
            self._world.root.listen(self)

    def end(self) -> None:
        """The process stops."""
        self.life = -1
        self._world.root.unlisten(self)

    # ---- joining --------------------------------------------------------------------------------------------------------------

    def _enter(self, life: int) -> None:
        if life != self.life or self.finished:
            return
        owed = self._owner.owed
        request = Join(
            node=self.name,
            tier=self._tier,
            incarnation=owed.incarnation,
            run=self._world.config.run,
            layout=self._world.learning.layout.fingerprint,
            open=owed.open(),
        )
        self._world.network.call(self, request, self._entered)

    def _entered(self, answer: Any) -> None:
        if not isinstance(answer, Joined):
            self._missed(answer)
            return
        self.joined = True
        self._heartbeat_s, self.max_staleness, self.steps = answer.heartbeat_s, answer.max_staleness, answer.steps
        self._backoff.reset()
        self.newest = answer.version  # even an older one: the parent may have lost its journal
        self._learn(answer.version, answer.receipts, answer.finished)
        self._world.loop.after(self._heartbeat_s, self._send_beat, self.life)
        self._owner.entered(answer)

    # ---- heartbeats -----------------------------------------------------------------------------------------------------------

    def _send_beat(self, life: int) -> None:
        if life != self.life or self.finished:
            return
        if self._beat is None:
            owed = self._owner.owed
            incarnation, base_version = owed.incarnation, owed.base_version
            version, metrics = self._metrics
            self._beat = Heartbeat(
                node=self.name,
                incarnation=incarnation,
                base_version=base_version,
                open=owed.open(),
                metrics=metrics,
                metrics_version=version,
            )
        self._world.network.call(self, self._beat, self._heard)

    def _heard(self, answer: Any) -> None:
        if not isinstance(answer, Heard):
            self._missed(answer)
            return
        self._backoff.reset()
        self.steps = answer.steps
        loop = self._world.loop
        if answer.version > self.newest or answer.receipts or answer.finished:
            self._learn(answer.version, answer.receipts, answer.finished)
            self._owner.look()
        else:
            self._heard_at = loop.now()
        loop.after(self._heartbeat_s * (0.8 + 0.2 * self._rng.random()), self._send_beat, self.life)

    def _missed(self, error: Any) -> None:
        """A join or a heartbeat led nowhere."""
        if isinstance(error, Refused):
            if error.reason is Reason.FINISHED:
                self._finish(error.message)
                return
            if not error.retry and (not self.joined or error.reason in MEMBER_REASONS):
                self._owner.fail()
                return
            if error.reason is Reason.UNKNOWN_NODE:
                self.joined = False
                self._backoff.reset()  # it is back, and only waits for us to join
        self._world.loop.after(self._backoff.delay(), self._send_beat if self.joined else self._enter, self.life)
        self._owner.look()  # it may be cut off by now

    # ---- news -----------------------------------------------------------------------------------------------------------------

    def hear(self, news: Any) -> None:
        """See ``Listener``."""
        if isinstance(news, News):
            self._learn(news.version, news.receipts, news.finished)
        self._owner.look()

    def _learn(self, version: int, receipts: tuple[Receipt, ...], finished: str) -> None:
        self._heard_at = self._world.loop.now()
        for receipt in receipts:
            self._owner.settle(receipt)
        if version > self.newest:
            self.newest = version
        if finished:
            self._finish(finished)

    def _finish(self, reason: str) -> None:
        """The run is over: leave."""
        if self.finished:
            return
        self.finished = reason
        self._owner.finish()
        self._world.root.unlisten(self)
        self._world.network.call(self, Leave(node=self.name, incarnation=self._owner.owed.incarnation), self._left)

    def _left(self, answer: Any) -> None:
        self.life = -1
