"""An edge node that exchanges no weights: it trains a model of its own and trades soft labels with the fleet.

Its model may be of any architecture, also one that nobody else has; what it has in common with others are the proxy set and the
classes. For each version of the track it brings what others have said, trains on its own data and on their consensus, labels the
items whose turn it is and pushes that. Labels that cannot be delivered are made anew on the next version: nothing is owed.

A device that answers, keeps what it finds hard and trains on it does all that in one process::

    reservoir = open_reservoir(config.cascade.hard_samples, "pi")     # None without consent
    node = DistilledNode(config, task, parent, name="pi", reservoir=reservoir, label_source=ask_somebody, served=served)
    cascade = Cascade.of_fleet(config, "pi", served, threshold, on_hard=reservoir and reservoir.add)
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import LayoutMismatch, Reason, Refused, StorageError, Unreachable
from fleetddp.common.events import Join
from fleetddp.common.files import OsFiles
from fleetddp.common.knowledge import Knowledge, Saying, outputs_of, proxy_of
from fleetddp.common.predictor import ModulePredictor, Served
from fleetddp.common.proxy import ProxySet
from fleetddp.common.stored import storage
from fleetddp.common.task import Task
from fleetddp.common.transport import MEMBER_REASONS, Parent
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.transport.session import Session
from fleetddp.common.update import NO_VERSION, Kind, Receipt, State, Tier, UpdateId
from fleetddp.edge.closed_loop import ClosedLoop
from fleetddp.edge.reservoir import LabelSource, Reservoir
from fleetddp.edge.trainer import DeltaTrainer, Work

log = logging.getLogger(__name__)

POLL_S = 0.5  # how long at most until the node looks around again while it waits


class DistilledTrainer(DeltaTrainer):
    """Local steps on the member's own data and, beside it, on the consensus of others on the proxy set."""

    kind = Kind.LOGITS

    def __init__(self, task: Task, member: str, config: FleetConfig, knowledge: Knowledge, **where: Any) -> None:
        super().__init__(task, member, config.edge, seed=config.seed, **where)
        self._knowledge = knowledge
        self._generator = torch.Generator().manual_seed(config.seed)

    def _step(self, batch: Any) -> tuple[Tensor, int]:
        """The task's loss and, once there are any, that of soft labels; the loss told is the task's."""
        told = super()._step(batch)
        if self._knowledge.known:
            indices = self._knowledge.draw(self._knowledge.config.batch_items, self._generator)
            loss = self._knowledge.loss(outputs_of(self._task, self.model, self._knowledge.items(indices)), indices)
            loss.backward()  # type: ignore[no-untyped-call]
        return told

    @torch.no_grad()
    def label(self) -> Tensor:
        """What the model says of the items whose turn it is: rows f32[b, C + 1]."""
        self.model.eval()
        return self._knowledge.rows_of(outputs_of(self._task, self.model, self._knowledge.items(self._knowledge.due())))


class DistilledNode:
    """One edge member of a track of soft labels. ``run`` blocks until the run is finished or ``stop`` is called from anywhere.

    ``config`` is the fleet file as the track sees it; the arguments are ``EdgeNode``'s. ``proxy``: the proxy set, where it is at
    hand already. A task may have ``known_classes(proxy)`` (see ``Knowledge.know``). ``reservoir`` and ``label_source``: see
    ``ClosedLoop``; the reservoir stays the caller's. ``served`` is offered a copy of the model after each unit of work. Model,
    consensus and open items lie in ``<edge.state>/<name>`` and outlive the process. Raises what a person must mend:
    ``ConfigError``, ``StorageError`` at the start, ``Refused`` with WRONG_RUN, WRONG_LAYOUT, WRONG_IDENTITY, ...
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
        proxy: ProxySet | None = None,
        ready: Callable[[], bool] = lambda: True,
        reservoir: Reservoir | None = None,
        label_source: LabelSource | None = None,
        served: Served | None = None,
    ) -> None:
        self._loop = ClosedLoop(config, name, reservoir=reservoir, label_source=label_source)
        self._config, self._parent, self._name, self._ready = config, parent, name, ready
        self._task, self._served = self._loop.task(task), served
        self._where: dict[str, Any] = {"index": index, "count": count, "device": device}
        self._folder = config.edge.state / name
        self._stopped = threading.Event()
        self._session: Session | None = None
        self._proxy, self._said_on = proxy, NO_VERSION
        self._knowledge: Knowledge | None = None
        self._saying: Saying | None = None  # made, and not answered yet
        self._open: dict[UpdateId, None] = {}  # accepted, and not settled yet
        self._incarnation = self._sequence = 0
        self._backoff = Backoff(random.Random(), first_s=1.0, cap_s=60.0)
        self.metrics: Mapping[str, float] = {}  # the newest of the task's ``evaluate``
        self.counts: Counter[str] = Counter()  # units of work; diverged; merged, expired, refused

    @property
    def knowledge(self) -> Knowledge:
        """What it holds of what others say; once ``run`` has begun."""
        assert self._knowledge is not None
        return self._knowledge

    @property
    def model(self) -> torch.nn.Module:
        """The node's own model; once ``run`` has begun."""
        return self._trainer.model

    # ---- life -----------------------------------------------------------------------------------------------------------------

    def run(self) -> str:
        """Take part until the run is finished; returns why it ended, empty after ``stop``."""
        try:
            if not self._prepare():
                return ""
            session = self._session = Session(
                self._parent,
                self._join(),
                open_updates=lambda: tuple(self._open),
                on_receipt=self._settle,
                give_up_s=self._config.edge.give_up_s,
            )
            session.start()
            while not (self._stopped.is_set() or session.finished or session.failure is not None):
                self._turn(session)
            if session.failure is not None:
                raise session.failure
            return session.finished
        except Refused as refusal:
            if refusal.reason is Reason.WRONG_LAYOUT:
                difference = self._parent.layout().first_difference(self.knowledge.layout)
                raise LayoutMismatch(f"this is not the fleet's proxy set: {difference} ({refusal.message})") from refusal
            raise
        finally:
            self.stop()
            if self._knowledge is not None:
                self._knowledge.close(finished=self._session is not None and bool(self._session.finished))

    def stop(self) -> None:
        """End ``run`` soon, from any thread: after the current batch at the latest."""
        self._stopped.set()
        if self._session is not None:
            self._session.stop(leave=True)
        self._parent.close()

    def _prepare(self) -> bool:
        """The proxy set, which may have to be waited for, and what an earlier process left; False if stopped meanwhile."""
        while self._proxy is None:
            try:
                self._proxy = proxy_of(self._config, self._task, self._parent, self._folder / "proxy")
            except (Unreachable, Refused) as error:
                if isinstance(error, Refused) and not error.retry:
                    raise
                log.warning("%s: cannot bring the proxy set now: %s", self._name, error)
                if self._stopped.wait(self._backoff.delay()):
                    return False
        self._backoff.reset()
        store = self._folder / "items.db"
        self._knowledge = Knowledge(self._proxy, self._config, Tier.EDGE, device=self._where["device"], store=store)
        certain = getattr(self._task, "known_classes", None)
        if callable(certain):
            self.knowledge.know(certain(self._proxy))
        self._trainer = DistilledTrainer(self._task, self._name, self._config, self.knowledge, **self._where)
        self._memory = Memory(self._folder, f"{self._config.run}/{self.knowledge.layout.fingerprint}", self._trainer)
        self._incarnation = self._memory.enter(self.knowledge)
        if self._served is not None:
            self._served.resume(self._task.model(), self._where["device"])
        return not self._stopped.is_set()

    def _join(self) -> Join:
        layout = self.knowledge.layout.fingerprint
        return Join(node=self._name, tier=Tier.EDGE, incarnation=self._incarnation, run=self._config.run, layout=layout)

    # ---- one turn -------------------------------------------------------------------------------------------------------------

    def _turn(self, session: Session) -> None:
        """Learn and label on a version that is new, or deliver what was said, or wait a little."""
        newest = session.version
        if session.joined(timeout_s=0.0) is None or newest == NO_VERSION:
            session.joined(timeout_s=POLL_S)
            return
        try:
            self.knowledge.expire()
            if newest != self._said_on and self._ready():
                self._learn(session, newest)
            if self._saying is not None:
                self._deliver(self._saying)
                self._saying = None
            self._loop.exchange(self._parent, self._incarnation, self._memory.identity, offers=self._ready())
            self._backoff.reset()
        except (Unreachable, Refused, StorageError) as error:
            if self._stopped.is_set():
                return
            log.warning("%s: trying again: %s", self._name, error)
            session.wait_version(after=max(newest, session.version), timeout_s=self._backoff.delay())
            return
        session.wait_version(after=newest, timeout_s=POLL_S)

    def _learn(self, session: Session, version: int) -> None:
        """One unit of work on a version: bring it, train, label."""
        if version != self.knowledge.version:
            self.knowledge.take(self._parent, version)
        session.base_version = version
        self._loop.learn(self.knowledge)
        work = self._trainer.train(lambda: not self._stopped.is_set() and not session.finished, session.steps or None)
        if work is None:
            return
        self.counts["units"] += 1
        self._sequence += 1
        update_id = UpdateId(self._name, self._incarnation, self._sequence)
        try:
            self._saying = self._say(update_id, work)
        except Refused as refusal:  # NOT_FINITE, by the codec
            self.counts["diverged"] += 1
            session.report({"diverged": float(self.counts["diverged"])}, NO_VERSION)
            self._memory.restore(self.knowledge)
            raise refusal
        self._said_on = version
        self._memory.save(self.knowledge)
        if self._served is not None:
            self._served.offer(ModulePredictor(copy.deepcopy(self.model), self._where["device"]), version)
        self.metrics = self._task.evaluate(self.model)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        log.info("%s: version %d, %d of %d items known: loss %.4f, %s", self._name, version, *self._shares(), work.loss, shown)

    def _say(self, update_id: UpdateId, work: Work) -> Saying:
        rows = self._trainer.label()
        return self.knowledge.say(update_id, rows, steps=work.steps, seconds=work.seconds, metrics=work.metrics)

    def _shares(self) -> tuple[int, int]:
        return self.knowledge.known, len(self.knowledge.proxy) + len(self.knowledge.opened.held)

    def _deliver(self, saying: Saying) -> None:
        self._open[saying.header.update_id] = None
        try:
            receipt = self._parent.push(*saying)
        except Refused as refusal:
            if refusal.retry or refusal.reason in MEMBER_REASONS:
                raise
            receipt = Receipt(update_id=saying.header.update_id, state=State.REFUSED, message=str(refusal))
        self._settle(receipt)

    def _settle(self, receipt: Receipt) -> None:
        """Take a receipt from a push or a heartbeat."""
        if receipt.state is State.UNKNOWN and (self._saying is None or self._saying.header.update_id != receipt.update_id):
            self._open.pop(receipt.update_id, None)  # it never arrived, or the parent lost its journal
        if receipt.state.final and receipt.update_id in self._open:
            with contextlib.suppress(KeyError):  # another thread was first
                del self._open[receipt.update_id]
                self.counts[receipt.state.value] += 1
                if receipt.state is not State.MERGED:
                    log.warning("update %s: %s %s %s", receipt.update_id, receipt.state.value, receipt.reason, receipt.message)


class Memory:
    """What a node keeps on disk: its weights and the consensus it holds, in one safetensors file, replaced as a whole.

    ``identity`` names the run and the proxy set; what belongs to another is not read. Raises ``StorageError``.
    """

    def __init__(self, folder: Path, identity: str, trainer: DistilledTrainer) -> None:
        self._path, self.identity, self._trainer = folder / "model.safetensors", identity, trainer
        self._first = trainer.weights()
        self._incarnation = 0

    def enter(self, knowledge: Knowledge) -> int:
        """Take up what is there; returns a new incarnation, later than all before it even if the clock was set back."""
        self._incarnation = max(time.time_ns() // 1000, self.restore(knowledge) + 1)
        self.save(knowledge)
        return self._incarnation

    def save(self, knowledge: Knowledge) -> None:
        """Durable when it returns."""
        known = {"weights": self._trainer.weights(), "rows": knowledge.rows}
        about = {"identity": self.identity, "version": str(knowledge.version), "incarnation": str(self._incarnation)}
        files, draft = OsFiles(), self._path.with_suffix(".partial")
        with storage(f"cannot write {self._path}"):
            files.make_dir(self._path.parent)
            file = files.create(draft)
            with contextlib.closing(file):
                file.pwrite(save(known, about), 0)
                file.fsync()
            files.rename(draft, self._path)
            files.fsync_dir(self._path.parent)

    def restore(self, knowledge: Knowledge) -> int:
        """Go back to what was saved last, or to the first weights; returns the incarnation that saved it, 0 if none did."""
        try:
            with safe_open(self._path, framework="pt") as file:
                about = file.metadata() or {}
                weights, rows = file.get_tensor("weights"), file.get_tensor("rows")
        except (OSError, SafetensorError):
            self._trainer.adopt(self._first)
            return 0
        if about["identity"] == self.identity and weights.shape == self._first.shape:
            self._trainer.adopt(weights)
            knowledge.adopt(int(about["version"]), rows)
        return int(about["incarnation"])
