"""A site's outer loop: what happens at the steps where a site and its fleet exchange what they have learnt.

The boundary contract; ``tests/integration/test_site_contract.py`` has one test a row.

    which steps count   A step counts when every optimizer that holds parameters of the model has stepped and none was told to
                        skip by a GradScaler. Optimizers are found by torch's global hook (``steps.py``).
    boundary            Every ``sync_every``-th counted step, inside the last optimizer's ``step()``: the same one on all ranks.
    what goes out       Each carrier rank encodes its own slice of ``base - local`` (residual kept for that range) and pushes it,
                        in the background, as its range of the site's one update (``exchange.py``, ``courier.py``). First the
                        ranks all-gather their samples; those of the streams add up to the site's. Buffers are rank 0's.
    one in flight       While an update is on its way no other is made; the next one starts where it ended, samples added up.
                        (It is made at the boundary at which the one before is answered.)
    what comes in       Each carrier pulls its slice of a new version; the slices are then gathered inside the site.
    when it is adopted  Only at boundaries, when all that the site has learnt is in an update: rank 0 gives the order through the
                        c10d store once all slices are there, and the others read it in short polls (``rendezvous.py``,
                        ``lead.py``). No rank is in a collective while the network is awaited.
    how long it waits   ``wait_s`` for a newer version, None: as long as it takes. Then it trains on from where it is; a pull goes
                        on in the background, to be adopted at the next boundary.
    overlap: steps      A boundary first adopts the version after the last update, if it has not been yet (waiting as above), then
                        makes the next update, and waits for nothing more. While a version is awaited every ``adopt_every``-th
                        counted step is a *candidate*: if all slices are there by then, it is adopted, and the local
                        progress since the update is carried on (the equations: ``exchange.py``).
    fragments           Where the layout is cut into P there is a boundary every ``sync_every / P`` steps, which exchanges one
                        fragment, in turn: an update covers it alone, with what was learnt of it since its last turn.
                        Pulled are the fragments that have changed; what is in no update yet of these is carried on as with
                        ``overlap``. What is dropped is dropped of all.
    synchronous start   Until version ``warmup_sync_steps`` every counted step is a boundary, and none overlaps.
    several parents     Where the parent is gone, rank 0's session finds another, and orders all ranks there. What one has
                        accepted is kept by each rank until it is settled; what the next does not know is pushed again.
    refused             The update is dropped, the residual before it restored, the newest version adopted. A refusal that
                        would befall every update (layout, codec, identity, ...) is raised on all ranks. A site with values
                        that are not finite sends nothing and adopts the newest version.
    one rank fails      What it raises at a boundary, and that it closed alone, is raised on all ranks.
    checkpoint          Anchor, residual and counts are part of it, at any step: what is behind an update that was on its way is
                        not made again (the parent has it, or it is lost), what was learnt since is. A newer version is
                        adopted at the restart, with ``overlap`` by carrying that on, else in its place.
    start               At the first training forward: rank 0 joins, waiting as long as it takes; the site founds the run
                        (each rank pushes its slice of the ``init``) or adopts the newest version.
    join()              Inside DDP's ``join`` boundaries are put off to its end (the join hook's ``post_hook``), where the
                        ranks agree on the number of steps.
    end                 When the run is finished the last version is adopted, ``finished`` says why, and training goes on alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fleetddp.cloud.courier import Courier, Errand, Parcel
from fleetddp.cloud.exchange import Exchange
from fleetddp.cloud.lead import Lead
from fleetddp.cloud.owed import Owed, samples_of_stream, tell
from fleetddp.cloud.recut import recut
from fleetddp.cloud.rendezvous import Order, Rendezvous
from fleetddp.cloud.roster import Member, Roster, muster
from fleetddp.cloud.steps import StepCounter
from fleetddp.cloud.unsettled import Unsettled
from fleetddp.common.codecs import get
from fleetddp.common.config import SiteConfig
from fleetddp.common.errors import ConfigError, FleetError, GaveUp, Reason, Refused
from fleetddp.common.events import Join
from fleetddp.common.layout import Layout
from fleetddp.common.transport import Parent, Roaming
from fleetddp.common.transport.session import Session
from fleetddp.common.update import NO_VERSION, Fragment, Interval, Kind, State, UpdateHeader, UpdateId

DIVERGED = (
    "%s: a value is inf or nan: training has diverged. Its progress since version %d is dropped and the newest version adopted; "
    "if it recurs, lower the learning rate, and begin with a fresh inner optimizer (its state may hold such values too)"
)

_log = logging.getLogger(__name__)


class Site:
    """One rank of a site. Every method but ``report`` and ``close`` is called by all ranks alike."""

    def __init__(
        self,
        module: nn.Module,
        member: Member,
        config: SiteConfig,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        optimizers: Iterable[Optimizer] | None,
        deferred: Callable[[], bool],
        exchange: type[Exchange] = Exchange,
    ) -> None:
        self.version = NO_VERSION  # the one adopted last
        self.finished = ""
        self._run = member.run
        self.started = False
        self.boundaries = 0
        self.samples = 0.0  # seen by this rank since the last boundary
        self.counter = StepCounter(module, optimizers)
        self.layout = Layout.from_module(module, buffers=config.buffers, include=member.include)
        self._module, self._member, self._config = module, member, config
        self._group, self._device = group, device
        self._deferred, self._exchange_type = deferred, exchange
        self._codec = get(config.codec)
        self._pid = os.getpid()
        self._restored: tuple[Mapping[str, Any], Mapping[str, Any] | None] | None = None
        self._session: Session | None = None  # rank 0's
        self._lead: Lead | None = None  # rank 0's
        self._parent: Parent | None = None  # a carrier's
        self._courier: Courier | None = None
        self._place = 0  # of the next order
        self._forgotten = 0  # orders before this one are no longer in the store
        self._owed = [Owed() for _ in range(config.fragments)]  # until the last boundary; by fragment
        self._turn: int | None = None  # the fragment that is next; None: the version decides
        self._awaiting = False  # a version, after the last update
        self._trained_since = time.monotonic()

    # ---- what training calls --------------------------------------------------------------------------------------------------

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped; if this was the last one of a boundary step or a candidate, exchange."""
        if not self.counter.stepped(optimizer):
            return
        if self.counter.at_most >= self._sync_every:
            if self._takes_part() and self.counter.count >= self._sync_every:
                self._boundary()
        elif self._overlaps and self._awaiting and self.counter.at_most % self._config.adopt_every == 0 and self._takes_part():
            with self._together():
                self._follow(self._lead.glance() if self._lead else None)

    def joined_again(self) -> None:
        """DDP's ``join`` has ended: the ranks may have made unequal numbers of steps; go on from the largest."""
        steps = torch.tensor([self.counter.count], dtype=torch.int64, device=self._device)
        dist.all_reduce(steps, dist.ReduceOp.MAX, group=self._group)
        self.counter.restart(int(steps.item()))
        if self.started and not self.finished and self.counter.count >= self._sync_every:
            self._boundary()

    def _takes_part(self) -> bool:
        return self.started and not self.finished and not self._deferred()

    @property
    def _sync_every(self) -> int:
        return 1 if self.version < self._config.warmup_sync_steps else self._config.sync_every // self._config.fragments

    @property
    def _overlaps(self) -> bool:
        return self._config.overlap == "steps" and self.version >= self._config.warmup_sync_steps

    def report(self, metrics: Mapping[str, float], version: int) -> None:
        """Tell the fleet of metrics of a version (``NO_VERSION``: of training). Only rank 0's are sent."""
        if self._session is not None:
            self._session.report(metrics, version)

    def close(self) -> None:
        """Leave the fleet and stop all transfers, on all ranks alike. Training may go on without them."""
        self._close("has left the fleet, and the others have not: all ranks call close()")

    def _close(self, word: str = "") -> None:
        """``word``: what has become of this rank, for others that may wait for it."""
        if os.getpid() != self._pid:  # a forked child inherits us, but not our threads, and must not speak for the site
            return
        if word and self.started and not self.finished:
            self._leave_word(f"rank {self._group.rank()} {word}")
        session, self._session, self._lead = self._session, None, None
        courier, self._courier = self._courier, None
        self.finished = self.finished or "closed"
        if session is not None:
            session.stop(leave=True)
        if courier is not None:
            courier.close()

    def _leave_word(self, word: str) -> None:
        with contextlib.suppress(RuntimeError):  # without its store the job has ended
            if self._lead is not None:
                self._rendezvous.give(self._place, Order(do="fail", message=word))
            else:
                self._rendezvous.fail("", word)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What one rank raises inside ends the exchange on all: those who wait for it in polls would wait for ever."""
        try:
            yield
        except Exception as error:
            self._close(f"failed: {type(error).__name__}: {error}")
            raise

    # ---- start ----------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Join the fleet and take up its weights. Blocks for as long as no coordinator can be reached."""
        roster = muster(self._member, self._config, self._group, self._device)
        self._node, self._incarnation = roster.node, roster.incarnation
        self._exchange = self._exchange_type(
            self._module,
            self.layout,
            self._codec,
            group=self._group,
            device=self._device,
            carriers=roster.carriers,
            fragments=self._config.fragments,
        )
        self._exchange.share_buffers()
        self._rendezvous = Rendezvous.of(self._group, f"fleetddp/{roster.incarnation}")
        self.started = True
        with self._together():
            self._enter(roster)
        self._trained_since = time.monotonic()

    def _enter(self, roster: Roster) -> None:
        rank = self._group.rank()
        if rank in roster.carriers:
            parent = self._parent = self._member.connect(roster.node)
            bell, several = threading.Event(), isinstance(parent, Roaming)
            if isinstance(parent, Roaming) and rank:
                parent.stay()
            self._courier = Courier(parent, self._rendezvous.clone(), bell, keeps=several)
            if rank == 0:
                self._lead = self._appoint(parent, self._courier, bell, carriers=len(roster.carriers))
        base, run = (NO_VERSION, "") if self._restored is None else (self._restored[0]["version"], self._restored[0]["run"])
        self._take_up()
        lead = self._lead
        where = base, run, self._awaiting, self._turn
        self._follow(lead.opening(self.layout, self._codec.spec, self._member.tier, *where) if lead else None)
        if self.version == NO_VERSION:  # the checkpoint's is still the newest
            self.version = base

    def _appoint(self, parent: Parent, courier: Courier, bell: threading.Event, *, carriers: int) -> Lead:
        """Rank 0 begins to join, and leads."""
        join = Join(
            node=self._node,
            tier=self._member.tier,
            incarnation=self._incarnation,
            run=self._member.run,
            layout=self.layout.fingerprint,
        )
        unsettled = Unsettled(self._node, self._incarnation)
        give_up_s = self._config.give_up_s
        self._session = Session(
            parent, join, open_updates=unsettled.open, on_receipt=unsettled.take, bell=bell, give_up_s=give_up_s
        )
        self._session.start()
        ranks, pushers = self._group.size(), sum(map(bool, self._exchange.shares))
        return Lead(
            parent,
            self._session,
            self._rendezvous,
            courier,
            ranks=ranks,
            pushers=pushers,
            carriers=carriers,
            bell=bell,
            unsettled=unsettled if isinstance(parent, Roaming) else None,
            carry=self._config.overlap == "steps" or self._config.fragments > 1,
            turns=[len(self._exchange.pushers(fragment)) for fragment in range(self._config.fragments)],
        )

    def _take_up(self) -> None:
        """Before the first orders: what a checkpoint knows of this rank's slice and of what was learnt since the last update."""
        restored, self._restored = self._restored, None
        if restored is None:
            return
        alike, own = restored
        exchange = self._exchange
        self._turn, self._awaiting = alike["turn"], bool(alike["awaiting"])
        if len(alike["steps"]) == len(self._owed):
            for owed, steps in zip(self._owed, alike["steps"], strict=True):
                owed.steps = int(steps)
        if own is not None and (own := recut(own, exchange.intervals)) is None:
            _log.warning("the checkpoint lacks some ranks' parts: the residual of the codec is lost")
        if own is None:
            exchange.anchor = exchange.read()
            return
        exchange.residual = [None if r is None else r.to(self._device) for r in own["residual"]]
        exchange.anchor = [a.to(self._device) for a in own["anchor"]]
        self.samples = own["samples"]
        if len(own["owed"]) == len(self._owed):
            for owed, (samples, seconds) in zip(self._owed, own["owed"], strict=True):
                owed.samples, owed.seconds = samples, seconds

    # ---- a boundary -----------------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        self.boundaries += 1
        for owed in self._owed:
            owed.steps += self.counter.count
            owed.samples += self.samples
            owed.seconds += time.monotonic() - self._trained_since
        self.samples = 0.0
        self.counter.restart()
        with self._together():
            self._follow(self._lead.orders(self._config.wait_s, overlap=self._overlaps) if self._lead else None)
        self._trained_since = time.monotonic()

    def _follow(self, given: Iterator[Order] | None) -> None:
        """Carry out the orders of one exchange: rank 0 gives them (``given``), the others read them."""
        do = ""
        while do != "go":
            place = self._place
            if given is not None:
                order = next(given)
                self._rendezvous.give(place, order)
            else:
                order = self._rendezvous.await_order(place, self._group.rank())
            self._place += 1
            self._carry_out(order)
            do = order.do
            if do == "push" and given is not None:  # a collective: all ranks have carried out what came before
                self._rendezvous.forget(range(self._forgotten, place))
                self._forgotten = place

    def _carry_out(self, order: Order) -> None:
        self._take_receipt()
        match order.do:
            case "init":
                initial = self._exchange.initial()
                self._push(self._header(Kind.INIT, "float32", order.number), 1.0, lambda: initial, self._exchange.intervals)
            case "push":
                self._push_progress(order.number, order.fragment)
            case "again":
                if self._courier is not None:
                    self._courier.push_again(order.number)
            case "move":
                if isinstance(self._parent, Roaming):
                    self._parent.go_to(order.address)
            case "pull":
                self._pull(order)
            case "adopt":
                self._adopt(order)
            case "go":
                self._run = order.run
                if self._courier is not None:
                    self._courier.forget(order.open)
                if order.finished:
                    self._finish(order.finished)
            case "fail":
                self._close()
                if order.reason:
                    raise Refused(Reason(order.reason), order.message)
                raise (GaveUp if order.gave_up else FleetError)(order.message)

    def _pull(self, order: Order) -> None:
        """Begin to fetch this rank's slice of a version."""
        since = NO_VERSION if order.whole else self.version
        if self._courier is not None:
            errand = Errand(
                number=order.number,
                version=order.version,
                landing=self._exchange.landing,
                fragments=self._config.fragments,
                since=since,
            )
            self._courier.pull(errand)

    def _push_progress(self, sequence: int, fragment: int) -> None:
        """Begin to push this rank's slice of the site's update, unless a rank has values that are not finite."""
        self._exchange.share_buffers()
        owed, self._turn = self._owed[fragment], fragment + 1
        outgoing = self._exchange.snapshot(fragment)
        told = tell(owed, finite=outgoing.finite(), group=self._group, device=self._device)
        if all(t.finite for t in told):
            if sum(t.samples for t in told) <= 0:
                raise ConfigError("no samples were counted since the last update: call model.count_samples(n) once a batch")
            seconds = told[0].seconds  # the header is the same on all ranks
            of = Fragment(fragment, self._config.fragments) if self._config.fragments > 1 else None
            header = self._header(Kind.DELTA, self._codec.spec, sequence, steps=owed.steps, seconds=seconds, fragment=of)
            samples = samples_of_stream(told, self._exchange.pushers(fragment), self._group.rank())
            self._push(header, samples, outgoing.payload, self._exchange.part(fragment))
            self._exchange.commit(outgoing, fragment)
        else:
            if self._group.rank() == 0:
                _log.error(DIVERGED, self._node, self.version)
            if self._lead is not None:
                self._lead.not_sent()
        self._awaiting = True
        self._owed[fragment] = Owed()

    def _push(
        self, header: UpdateHeader, samples: float, payload: Callable[[], memoryview], intervals: tuple[Interval, ...]
    ) -> None:
        if self._courier is not None and intervals:
            self._courier.push(Parcel(header=header, intervals=intervals, samples=samples, payload=payload))

    def _header(self, kind: Kind, codec: str, sequence: int, **measured: Any) -> UpdateHeader:
        return UpdateHeader(
            update_id=UpdateId(self._node, self._incarnation, sequence),
            kind=kind,
            tier=self._member.tier,
            base_version=self.version,
            codec=codec,
            layout=self.layout.fingerprint,
            layout_spec=self.layout.to_json() if kind is Kind.INIT else b"",
            **measured,
        )

    def _take_receipt(self) -> None:
        """Learn the fate of the last update, if it is known."""
        receipt = self._courier.take_receipt() if self._courier is not None else None
        if receipt is None or receipt.state is not State.REFUSED:
            return
        if self._group.rank() == 0 and receipt.reason not in (Reason.INIT_TAKEN, Reason.FINISHED):
            _log.warning("update %s was refused (%s): %s", receipt.update_id, receipt.reason, receipt.message)
        self._exchange.restore_residual()

    def _adopt(self, order: Order) -> None:
        landed = self._courier.take_landed() if self._courier is not None else None
        data = torch.empty(0, dtype=torch.uint8) if landed is None else landed.data
        self._exchange.adopt(order.codec, data, carry=order.carry, fragments=order.fragments)
        at_the_start = self.version == NO_VERSION
        self.version, self._awaiting = order.version, False
        if order.forget:
            self._exchange.forget_residual()
        if order.dropped or (at_the_start and not order.carry):
            self._progress_is_settled()

    def _progress_is_settled(self) -> None:
        """It was sent or dropped: what is counted next belongs to the next update."""
        self.samples = 0.0
        self._owed = [Owed() for _ in self._owed]

    def _finish(self, reason: str) -> None:
        """The run is over: leave, so that the coordinator need not wait for us."""
        if self._group.rank() == 0:
            _log.info("the run is finished (%s) at version %d; training goes on without the fleet", reason, self.version)
        self.finished = reason
        self._close()

    # ---- checkpoints -------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where it stands, for a checkpoint: what is alike on all ranks, and this rank's own."""
        exchange = self._exchange
        alike = {
            "version": self.version,
            "boundaries": self.boundaries,
            "count": self.counter.count,
            "steps": [owed.steps for owed in self._owed],
            "turn": self._turn,
            "awaiting": self._awaiting,
            "run": self._run,
        }
        own = {
            "intervals": [list(i) for i in exchange.intervals],
            "anchor": [a.cpu() for a in exchange.anchor],
            "residual": [None if r is None else r.cpu() for r in exchange.residual],
            "samples": self.samples,
            "owed": [[owed.samples, owed.seconds] for owed in self._owed],
        }
        return alike, own

    def restore(self, alike: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on from there when ``start`` is called; raises ``ConfigError`` after that."""
        if self.started:
            raise ConfigError("load a checkpoint before the first training step: the site has taken up weights already")
        self._restored = (alike, own)
        self.counter.restart(int(alike["count"]))
        self.boundaries = int(alike["boundaries"])
