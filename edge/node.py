"""The edge node: pull, train, put in the outbox, push, repeat, and survive whatever happens in between.

Two threads share the work. The caller's thread trains and pulls; a delivery thread pushes the outbox in order, so that a slow or
dead uplink does not stop training. A ``Session`` (heartbeats, news, joining again) runs beside both.

One member, one update per base version (design §4): having made its update a node waits for the next version, unless it is cut
off. Then it trains on and the update, while nobody has seen it, grows. A refused update is dropped and the node starts again
from the version it holds, or from the newest.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import ConfigError, FleetError, LayoutMismatch, Reason, Refused, StorageError, Unreachable
from fleetddp.common.events import Join
from fleetddp.common.task import Task, load
from fleetddp.common.transport import MEMBER_REASONS, Parent
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.transport.failover import connect
from fleetddp.common.transport.session import Session
from fleetddp.common.transport.uplink import Patience
from fleetddp.common.transport.weights import fetch
from fleetddp.common.update import NO_VERSION, Kind, Receipt, State, Tier
from fleetddp.edge.outbox import Nature, Outbox
from fleetddp.edge.trainer import TRAINERS, Work

if TYPE_CHECKING:
    from fleetddp.edge.distilled import DistilledNode

log = logging.getLogger(__name__)

LAST_BATCH_S = 5.0  # that a node which was told to stop has to end by itself
POLL_S = 0.5  # how long at most until the node looks around again while it waits
CUT_OFF = 2.0  # heartbeats without an answer until the node counts itself as cut off
DAMAGED = frozenset({Reason.BAD_CHECKSUM, Reason.TRUNCATED, Reason.OUT_OF_ORDER})  # what arrived was not what was meant


class EdgeNode:
    """One edge member of a fleet. ``run`` blocks until the run is finished or ``stop`` is called from anywhere.

    ``parent`` is the connection to the coordinator or region; the node closes it. ``ready`` is asked before each unit of work:
    False while the device had better not train (battery, metered network, schedule). Raises what a person must
    mend: ``ConfigError``, ``LayoutMismatch``, ``StorageError`` at the start, ``Refused`` with WRONG_RUN, WRONG_IDENTITY, ...
    """

    def __init__(
        self,
        config: FleetConfig,
        task: Task,
        parent: Parent,
        *,
        name: str,
        index: int = 0,
        count: int = 1,
        device: torch.device | str = "cpu",
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        config = config.for_track("")  # of several tracks a node is of one: raises
        self._config, self._parent, self._ready = config, parent, ready
        edge = config.edge
        self._trainer = TRAINERS[edge.update](
            task, name, edge, seed=config.seed, index=index, count=count, device=device, include=config.include
        )
        self._layout = self._trainer.layout
        nature = Nature(
            name, config.run, self._layout.fingerprint, self._trainer.kind, edge.codec, self._trainer.geometry.required()
        )
        self.outbox = Outbox(edge.state / name, nature)
        join = Join(
            node=name, tier=Tier.EDGE, incarnation=self.outbox.incarnation, run=config.run, layout=self._layout.fingerprint
        )
        self._session = Session(parent, join, open_updates=self.outbox.open, on_receipt=self._settle, give_up_s=edge.give_up_s)
        self._delivery = threading.Thread(target=self._deliver, name="fleetddp-delivery", daemon=True)
        self._stopped, self._parcel = threading.Event(), threading.Event()
        self._work = Work()  # done and not yet in the outbox
        self._backoff = _sparing()  # after an update that led nowhere
        self._not_before = 0.0
        self._pull_backoff = _sparing()  # after a version that could not be taken up ...
        self._missed, self._pull_not_before = NO_VERSION, 0.0  # ... which one, and when to try it again
        self._alone = False  # as last logged
        self.counts: Counter[str] = Counter()  # units of work; diverged

    # ---- life -----------------------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Take part until the run is finished; returns why it ended, empty after ``stop``."""
        try:
            if self.outbox.base_version != NO_VERSION:
                self._trainer.adopt(self.outbox.local())
                self._session.base_version = self.outbox.base_version
                log.info("going on from version %d, %d updates in the outbox", self.outbox.base_version, len(self.outbox))
            self._session.start()
            self._delivery.start()
            while self._is_going():
                self._turn()
            if self._session.failure is not None:
                raise self._session.failure
            return self._session.finished
        except Refused as refusal:
            self._explain(refusal)
            raise
        finally:
            self._close()

    def stop(self) -> None:
        """End ``run`` soon, from any thread: after the current batch at the latest."""
        self._stopped.set()
        self._parcel.set()
        self._session.stop(leave=True)
        self._parent.close()

    def _close(self) -> None:
        self.stop()
        if self._delivery.ident is not None:
            self._delivery.join(timeout=2.0)
        self.outbox.close()

    def _explain(self, refusal: Refused) -> None:
        """Say which tensor differs, if that is what is wrong: raises ``LayoutMismatch``."""
        if refusal.reason is Reason.WRONG_LAYOUT:
            difference = self._parent.layout().first_difference(self._layout)
            raise LayoutMismatch(f"this model is not the fleet's model: {difference} ({refusal.message})") from refusal

    def _is_going(self) -> bool:
        return not (self._stopped.is_set() or self._session.finished or self._session.failure is not None)

    @property
    def _cut_off(self) -> bool:
        return self._session.silent_s > CUT_OFF * self._config.members.heartbeat_s

    # ---- training -------------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """One look around: adopt what is new, then train if there is something to train, else wait a little."""
        try:
            self._rewind()
            self._refresh()
            if self._due():
                self._train()
                return
        except StorageError as error:
            log.error("%s; trying again", error)
            self._delay()
        if self._session.version == self.outbox.base_version:
            self._session.wait_version(after=self.outbox.base_version, timeout_s=POLL_S)
        else:
            self._stopped.wait(POLL_S)

    def _due(self) -> bool:
        """Whether to train now."""
        cut_off = self._cut_off
        if cut_off and not self._alone:
            log.warning("no word from the parent for %.1f s; going on alone", self._session.silent_s)
        self._alone = cut_off
        again = cut_off and self._trainer.kind is Kind.DELTA  # a gradient is about the weights as they were: one will do
        if self.outbox.base_version == NO_VERSION or len(self.outbox) >= self._config.edge.max_outbox:
            return False
        return (again or not self.outbox.trained) and time.monotonic() >= self._not_before and self._ready()

    def _train(self) -> None:
        """One unit of work, into the outbox."""
        work = self._trainer.train(self._is_going, self._session.steps or None)
        if work is None:
            return
        self.counts["units"] += 1
        self._work += work
        try:
            update_id = self.outbox.put(self._work, self._trainer.encode, self._trainer.weights())
        except Refused as refusal:  # NOT_FINITE, by the codec
            self.counts["diverged"] += 1
            log.error("training diverged, the work is dropped (%d so far): %s", self.counts["diverged"], refusal.message)
            self._session.report({"diverged": float(self.counts["diverged"])}, NO_VERSION)
            self._restart_at(self.outbox.local())
            self._delay()
            return
        log.debug("update %s holds %d more samples", update_id, self._work.samples)
        self._work = Work()
        self._parcel.set()

    def _refresh(self) -> None:
        """Pull and adopt the newest version, unless it is held already. It may be an older one: a parent may lose its journal."""
        newest, joined = self._session.version, self._session.joined(timeout_s=0.0)
        if joined is None or newest in (NO_VERSION, self.outbox.base_version) or self._cut_off:
            return
        if newest == self._missed and time.monotonic() < self._pull_not_before:
            return
        try:
            weights = fetch(self._parent, newest, self._layout)
            self.outbox.adopt(newest, weights, joined.max_staleness)
        except (Unreachable, Refused, StorageError) as error:
            if isinstance(error, Refused) and error.reason is Reason.WRONG_LAYOUT:
                raise
            pause = self._pull_backoff.delay()
            self._missed, self._pull_not_before = newest, time.monotonic() + pause
            log.warning("cannot take up version %d, trying again in %.0f s: %s", newest, pause, error)
            return
        self._pull_backoff.reset()
        self._restart_at(weights)
        self._not_before = 0.0
        self._session.base_version = newest

    def _rewind(self) -> None:
        """After a refusal: leave where the refused update led."""
        base = self.outbox.rewind()
        if base is not None:
            self._restart_at(base)
            self._delay()

    def _restart_at(self, weights: Tensor) -> None:
        self._trainer.adopt(weights)
        self._work = Work()

    def _delay(self) -> None:
        """What led nowhere is not repeated at once; a new version ends the delay."""
        self._not_before = time.monotonic() + self._backoff.delay()

    # ---- delivery -------------------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Push the outbox in order, until stopped."""
        soon, later = Backoff(random.Random()), _sparing()
        while not self._stopped.is_set():
            self._parcel.clear()
            try:
                if not self._push_next():
                    self._parcel.wait(POLL_S)
                soon.reset()
                later.reset()
            except (Unreachable, Refused, StorageError) as error:
                if not self._stopped.is_set():
                    log.warning("cannot deliver now: %s", error)
                    self._stopped.wait((soon if _costs_little(error) else later).delay())

    def _push_next(self) -> bool:
        """Push the oldest update that the parent may not have; whether there was one and a parent to push it to."""
        if self._cut_off or self._session.joined(timeout_s=0.0) is None:
            return False
        entry = self.outbox.offer()
        if entry is None:
            return False
        header = entry.header
        log.info("update %s: pushing %d samples since version %d", header.update_id, entry.slice.samples, header.base_version)
        try:
            receipt = self._parent.push(header, entry.slice, entry.payload)
        except Refused as refusal:
            if refusal.reason not in DAMAGED:
                raise
            # Repeats did not mend it: the stored bytes are damaged.
            reason, message = refusal.reason.value, refusal.message
            receipt = Receipt(update_id=header.update_id, state=State.REFUSED, reason=reason, message=message)
        self._settle(receipt)
        return True

    def _settle(self, receipt: Receipt) -> None:
        """Take a receipt from a push or a heartbeat."""
        if not self.outbox.record(receipt):
            return
        if receipt.state is State.MERGED:
            self._backoff.reset()
            log.info("update %s is in version %d", receipt.update_id, receipt.version)
        else:
            log.warning("update %s: %s %s %s", receipt.update_id, receipt.state.value, receipt.reason, receipt.message)


def _sparing() -> Backoff:
    """For what costs a battery or a metered network something each time."""
    return Backoff(random.Random(), first_s=1.0, cap_s=60.0)


def _costs_little(error: FleetError) -> bool:
    """Whether a push that failed so had not sent the payload for nothing: it goes on where it broke, or was not let in."""
    return isinstance(error, Unreachable) or (isinstance(error, Refused) and error.reason in MEMBER_REASONS)


def run_node(config: FleetConfig, *, name: str, track: str = "") -> None:
    """``fleetddp edge``: run one node until the run is finished, or SIGTERM ends it; both return. Ctrl-C raises.

    ``track``: instead of ``edge.track``.
    """
    track = track or config.edge.track
    config = config.for_track(track)
    if config.task is None:
        raise ConfigError("task: an edge node needs a Task; give task.target in the fleet file")
    parent = connect(
        config.edge.parents or (config.coordinator.address,),
        config.security,
        node=name,
        run=config.run,
        track=track,
        patience=patience(config),
        after_s=config.members.lease_s,
    )
    task = load(config.task)
    if config.kind == "logits":
        from fleetddp.edge.distilled import DistilledNode  # an ordinary node needs none of it
        from fleetddp.edge.reservoir import open_reservoir

        reservoir = open_reservoir(config.cascade.hard_samples, name)
        source = getattr(task, "label_source", None)
        with nullcontext() if reservoir is None else reservoir:
            serve(DistilledNode(config, task, parent, name=name, reservoir=reservoir, label_source=source))
    else:
        serve(EdgeNode(config, task, parent, name=name))


def patience(config: FleetConfig) -> Patience:
    """Of a node's uplink: it gives up soon, for the node can train meanwhile, and tries again later."""
    return Patience(give_up_s=CUT_OFF * config.members.heartbeat_s)


def serve(node: EdgeNode | DistilledNode) -> None:
    """Run a node as a process of its own: SIGTERM ends it as Ctrl-C does, but is no failure.

    The node lives in a thread: a signal strikes the main thread wherever it is, and must never find it holding a lock.
    """
    outcome: list[str | BaseException] = []
    life = threading.Thread(target=_live, args=(node, outcome), name="edge-node", daemon=True)
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        life.start()
        while life.is_alive():
            life.join(POLL_S)
    except (_Terminated, KeyboardInterrupt) as struck:
        node.stop()
        life.join(LAST_BATCH_S)
        if life.is_alive():  # in a long batch; the outbox withstands this, torch would not withstand a tidy exit
            logging.shutdown()
            os._exit(130 if isinstance(struck, KeyboardInterrupt) else 0)
        if isinstance(struck, KeyboardInterrupt):
            raise
        log.info("stopped by SIGTERM; what is not delivered is in the outbox")
        return
    finally:
        signal.signal(signal.SIGTERM, previous)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    log.info("the run is finished: %s", outcome[0])


def _live(node: EdgeNode | DistilledNode, outcome: list[str | BaseException]) -> None:
    try:
        outcome.append(node.run())
    except BaseException as error:
        outcome.append(error)


class _Terminated(BaseException):
    """SIGTERM, like KeyboardInterrupt: it ends the main thread's wait."""


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # cleaning up is under way; a second signal must not break it
    raise _Terminated
