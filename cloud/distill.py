"""A site's part in a track of soft labels: it teaches the fleet, and learns from it.

    teacher = Distillation(model, load("fleet.yaml").for_track("knowledge"), track="knowledge")
    for x, y in loader:
        teacher.step()                                                # takes up what has come, labels what is due
        indices = teacher.draw(32)
        with model.no_sync():                                         # the gradients of both losses are averaged once
            loss_fn(model(x), y).backward()
        model.distillation_loss(model(teacher.items(indices)), indices).backward()
        optimizer.step(); optimizer.zero_grad()

The ranks share the work: each labels every n-th item that is due, and draws items of its own to learn from. Rank 0 talks to the
parent, in the background (``envoy.py``); what it has is told to the others at every ``sync_every``-th step, so that no rank is in
a collective while the network is awaited.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fleetddp.cloud.collective import tell_all
from fleetddp.cloud.envoy import Envoy
from fleetddp.cloud.participant import Connect, Participant, member_of
from fleetddp.cloud.roster import own_name
from fleetddp.common.config import FleetConfig, SecurityConfig
from fleetddp.common.errors import ConfigError, FleetError, Refused
from fleetddp.common.events import Join
from fleetddp.common.knowledge import Knowledge, Opened, outputs_of, proxy_of
from fleetddp.common.layout import unwrap
from fleetddp.common.proxy import ProxySet
from fleetddp.common.transport import Parent
from fleetddp.common.update import NO_VERSION, UpdateId

_log = logging.getLogger(__name__)


class Distillation:
    """One rank of it. Every method but ``close``, ``draw`` and ``items`` is called by all ranks alike.

    ``model`` is a ``FleetDDP`` (whose ``distillation_loss`` is this one's ``loss`` from now on), or any
    ``DistributedDataParallel``: a site may take part whose architecture nobody else has. ``config`` is the fleet file as the
    track sees it; ``proxy`` the proxy set where it is at hand, else it is found (``knowledge.proxy_of``) and put in ``folder``.
    ``task`` may have ``logits(model, items)`` and ``proxy()``. The rest is ``FleetDDP``'s. Raises ``ConfigError``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        config: FleetConfig,
        *,
        track: str = "",
        proxy: ProxySet | None = None,
        folder: Path = Path("proxy"),
        task: object = None,
        coordinator: str | Connect | None = None,
        site: str | None = None,
        tier: str = "site",
        security: SecurityConfig | None = None,
    ) -> None:
        self._model, self._config, self._task = model, config, task
        self._group: dist.ProcessGroup = model.process_group
        self._rank, self._world = self._group.rank(), self._group.size()
        self._device = next(model.parameters()).device
        address = coordinator or config.coordinator.address
        member = member_of(
            "Distillation", coordinator=address, site=site, tier=tier, run=config.run, security=security, track=track, include=()
        )
        cards = tell_all((member.node or own_name(), time.time_ns() // 1000), self._group, self._device)
        self._node, self._incarnation = cards[0][0], max(at for _, at in cards)
        self._sequence = self._steps = 0
        parent = member.connect(self._node) if self._rank == 0 else None
        found = proxy if proxy is not None else self._find(parent, folder)
        self.knowledge = Knowledge(found, config, member.tier, device=self._device)
        self._generator = torch.Generator().manual_seed(config.seed * self._world + self._rank)
        self._envoy: Envoy | None = None
        if parent is not None:
            layout = self.knowledge.layout.fingerprint
            join = Join(node=self._node, tier=member.tier, incarnation=self._incarnation, run=config.run, layout=layout)
            store = folder / f"{self._node}.items.db"
            self._envoy = Envoy(parent, join, Knowledge(found, config, member.tier, store=store))
            self._envoy.start()
            weakref.finalize(self, self._envoy.stop)
        if isinstance(model, Participant):
            model.learn_from(self)

    # ---- what training calls --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the track, as it was taken up last."""
        return self.knowledge.version

    @property
    def known(self) -> int:
        """Of how many items somebody's opinion is held; the same on all ranks."""
        return self.knowledge.known

    @property
    def batch_items(self) -> int:
        """Of the proxy set, in a step of each rank, as the fleet file says."""
        return self._config.distill.batch_items

    def draw(self, count: int) -> Tensor:
        """Item numbers i64[count], this rank's own, of those that somebody has an opinion of (of all, where nobody has)."""
        return self.knowledge.draw(count, self._generator)

    def items(self, indices: Tensor) -> Tensor:
        """Those items, on the model's device."""
        return self.knowledge.items(indices)

    def loss(self, outputs: Tensor, indices: Tensor) -> Tensor:
        """See ``FleetDDP.distillation_loss``."""
        return self.knowledge.loss(outputs, indices)

    def outputs(self, indices: Tensor) -> Tensor:
        """What the model says of items, with gradient: a forward of the wrapped model."""
        return outputs_of(self._task, self._model, self.items(indices))

    def step(self, optimizer: Optimizer | None = None) -> bool:
        """To be called once a training step. Every ``sync_every``-th time it takes up a version that has come, if one has, and
        labels the items whose turn it is; says whether it did. With ``optimizer`` it learns in between as ``ensemble`` does, for
        ``ensemble_steps``. Raises on all ranks what ended the exchange (another layout, identity, ...)."""
        self._steps += 1
        if self._steps % self._config.site.sync_every:
            return False
        brought, failure = self._tell()
        if failure is not None:
            raise failure
        if brought is None:
            return False
        version, rows, is_new = brought
        held = self.knowledge.rows  # a restart may have taken up more than rank 0 has brought since
        self.knowledge.adopt(version, torch.where(rows[:, -1:] > 0, rows, held))
        if not is_new:
            return False
        if optimizer is not None and self._config.distill.ensemble_steps:
            self.ensemble(optimizer, self._config.distill.ensemble_steps)
        self._label()
        return True

    def ensemble(self, optimizer: Optimizer, steps: int) -> float:
        """Distil the fleet's consensus into the model, on the proxy set alone; returns the mean loss of this rank.

        ``steps`` of the optimizer, each on ``batch_items`` of every rank's own; DDP averages the gradients, so that the ranks
        share a batch of world size times that (Lin et al., FedDF, 2020, where a server does it). Nothing happens while nobody has
        an opinion of anything.
        """
        if not self.known:
            return 0.0
        training, total = self._model.training, torch.zeros((), device=self._device)
        self._model.train()  # type: ignore[no-untyped-call]
        for _ in range(steps):
            indices = self.draw(self._config.distill.batch_items)
            optimizer.zero_grad()
            loss = self.loss(self.outputs(indices), indices)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach()
        optimizer.zero_grad()
        self._model.train(training)  # type: ignore[no-untyped-call]
        return float(total) / steps

    def close(self) -> None:
        """Leave the track; done by itself when the process ends."""
        if self._envoy is not None:
            self._envoy.stop()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"version": self.knowledge.version, "rows": self.knowledge.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; what is newer is taken up as it comes."""
        self.knowledge.adopt(int(state["version"]), state["rows"])

    # ---- among the ranks ------------------------------------------------------------------------------------------------------

    def _find(self, parent: Parent | None, folder: Path) -> ProxySet:
        """Rank 0 finds the set and tells the others."""
        found: ProxySet | FleetError | None = None
        if parent is not None:
            try:
                found = proxy_of(self._config, self._task, parent, folder)
            except FleetError as error:
                found = error
        told = tell_all(found, self._group, self._device)[0]
        if isinstance(told, FleetError):
            raise told
        assert told is not None
        return told

    def _tell(self) -> tuple[tuple[int, Tensor, bool] | None, Exception | None]:
        """What rank 0 has brought, on all ranks."""
        brought, failure = None, None
        if self._envoy is not None:
            try:
                brought = self._envoy.take()
            except Exception as error:
                failure = error
        number, is_new = (NO_VERSION, False) if brought is None else (brought.version, brought.is_new)
        version = torch.tensor([number, failure is not None, is_new], device=self._device)
        source = dist.get_global_rank(self._group, 0)
        dist.broadcast(version, source, group=self._group)
        if bool(version[1]):
            return None, failure or ConfigError("rank 0 of the site can no longer exchange soft labels; its log says why")
        if int(version[0]) == NO_VERSION:
            return None, None
        rows = (self.knowledge.rows if brought is None else brought.rows).to(self._device, copy=True)
        dist.broadcast(rows, source, group=self._group)
        if self._config.proxy is not None and self._config.proxy.open is not None:
            self._share_out(None if brought is None else brought.opened)
        return (int(version[0]), rows.cpu(), bool(version[2])), None

    def _share_out(self, opened: Opened | None) -> None:
        """The open items that rank 0 has, to all ranks: those that are new to them as one tensor."""
        mine = self.knowledge.opened
        had = {(item.slot, item.digest) for item in mine.items if item.slot in mine.held}
        note = None
        if opened is not None:
            held = [item for item in opened.items if item.slot in opened.held]
            note = opened.items, [item.slot for item in held if (item.slot, item.digest) not in had], sorted(opened.held)
        told = tell_all(note, self._group, self._device)[0]
        assert told is not None
        items, new, slots = told
        found = {slot: mine.held[slot] for slot in slots if slot not in new}
        if new:
            shape = self.knowledge.proxy.items.shape[1:]
            stack = torch.empty((len(new), *shape), device=self._device)
            if opened is not None:
                stack = torch.stack([opened.held[slot] for slot in new]).to(self._device)
            dist.broadcast(stack, dist.get_global_rank(self._group, 0), group=self._group)
            found |= dict(zip(new, stack, strict=True))
        self.knowledge.open(Opened(items, found))

    @torch.no_grad()
    def _label(self) -> None:
        """Label what is due, each rank its share; rank 0 sends it."""
        due = self.knowledge.due()
        mine = due[self._rank :: self._world]
        module = unwrap(self._model)
        training = module.training
        module.eval()
        rows = self.knowledge.rows_of(outputs_of(self._task, module, self.items(mine))) if len(mine) else torch.zeros(0)
        module.train(training)
        shares = tell_all(rows, self._group, self._device)
        if self._envoy is None:
            return
        said = torch.empty(len(due), self.knowledge.proxy.classes + 1)
        for rank, share in enumerate(shares):
            if len(share):
                said[rank :: self._world] = share
        self._sequence += 1
        try:
            self._envoy.send(self.knowledge.say(UpdateId(self._node, self._incarnation, self._sequence), said))
        except Refused as refusal:  # NOT_FINITE
            _log.error("%s: nothing is said of the proxy set: %s", self._node, refusal.message)
