"""What a training script may ask of its site, or tell it, however its model is wrapped."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fleetddp.cloud.exchange import Exchange
from fleetddp.cloud.roster import Member
from fleetddp.cloud.site import Site
from fleetddp.common.config import NodeName, SecurityConfig, SiteConfig, parse
from fleetddp.common.errors import ConfigError
from fleetddp.common.task import samples_in
from fleetddp.common.transport import Parent
from fleetddp.common.update import NO_VERSION, Tier

Connect = Callable[[str], Parent]  # node -> Parent
Optimizers = Optimizer | Iterable[Optimizer] | None


class Teacher(Protocol):
    """Whose consensus a model learns from: a ``Distillation``."""

    def loss(self, outputs: Tensor, indices: Tensor) -> Tensor:
        """See ``Participant.distillation_loss``."""
        ...


class Participant:
    """Base of ``FleetDDP`` and ``Attached``, which call ``_enter``."""

    _site: Site | None
    _teacher: Teacher | None = None
    _counts_forwards = True

    def _enter(
        self,
        module: nn.Module,
        member: Member,
        config: SiteConfig,
        optimizer: Optimizers,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        exchange: type[Exchange] = Exchange,
    ) -> None:
        """Make this rank's site. Neither it nor torch's hook keeps the model alive; with it goes the membership."""
        this = weakref.ref(self)
        site = Site(
            module,
            member,
            config,
            group=group,
            device=device,
            optimizers=[optimizer] if isinstance(optimizer, Optimizer) else optimizer,
            deferred=lambda: (model := this()) is not None and model._deferred,
            exchange=exchange,
        )
        handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: site.stepped(optimizer))
        weakref.finalize(self, _part, site, handle)
        self._site = site

    @property
    def _deferred(self) -> bool:
        """Whether ranks may be unable to take part in an exchange now."""
        return False

    # ---- what a script may ask or tell ----------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The fleet's version that these weights started from; -1 before the first training forward."""
        return self.site.version

    @property
    def boundaries(self) -> int:
        """How many exchanges there were."""
        return self.site.boundaries

    @property
    def finished(self) -> str:
        """Why the fleet's run is over for this site; empty while it goes on."""
        return self.site.finished

    @property
    def site(self) -> Site:
        """This rank's outer loop. A copy of a ``FleetDDP`` is no member of the fleet and has none (``ConfigError``)."""
        if self._site is None:
            raise ConfigError("this is a copy of a FleetDDP: it is no member of the fleet")
        return self._site

    def start(self) -> None:
        """Join the fleet and take up its weights now, not at the first training forward. All ranks call it."""
        if not self.site.started:
            self.site.start()

    def count_samples(self, n: float) -> None:
        """Count ``n`` samples (or tokens) towards this rank's next update; from now on no longer each forward's batch size."""
        if self._counts_forwards:
            self._counts_forwards = False
            self.site.samples = 0.0
        self.site.samples += n

    def report(self, metrics: Mapping[str, float], *, training: bool = False) -> None:
        """Tell the fleet of metrics evaluated on the version these weights are (``training``: of training). Rank 0's are sent."""
        self.site.report(metrics, NO_VERSION if training else self.site.version)

    def learn_from(self, teacher: Teacher) -> None:
        """Take ``distillation_loss`` from this one; a ``Distillation`` does so for its model."""
        self._teacher = teacher

    def distillation_loss(self, outputs: Tensor, indices: Tensor) -> Tensor:
        """How far what the model says of proxy items is from what the fleet says of them: a scalar to be added to the loss.

        ``outputs`` f[b, C]: this model's logits of the items ``indices`` i64[b], from a forward of the model, so that DDP
        averages the gradient like any other; T^2 KL, times ``distill.mix`` (``distill.soft_loss``). 0, with a gradient, while
        nobody has an opinion of them. Raises ``ConfigError`` where no ``Distillation`` is of this model, or for other shapes.
        """
        if self._teacher is None:
            raise ConfigError("distillation_loss: make a fleetddp.cloud.Distillation of this model first")
        return self._teacher.loss(outputs, indices)

    def close(self) -> None:
        """Leave the fleet; training may go on without it. All ranks call it; done by itself when the process ends."""
        self.site.close()

    def _before_forward(self, training: bool, inputs: Any, kwargs: Mapping[str, Any]) -> None:
        """While training: the first forward joins the fleet, and each counts its samples."""
        site = self._site
        if site is not None and training and torch.is_grad_enabled():
            if not site.started:
                self.start()
            if self._counts_forwards:
                site.samples += _batch_size(inputs, kwargs)


def _batch_size(inputs: Any, kwargs: Mapping[str, Any]) -> int:
    """Of the first tensor among a forward's arguments; 0 when there is none (a boundary without samples is an error)."""
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim():  # nearly always; each step pays for this
        return inputs[0].shape[0]
    try:
        return samples_in((inputs, kwargs))
    except ConfigError:
        return 0


def member_of(
    caller: str,
    *,
    coordinator: str | Sequence[str] | Connect | None,
    site: str | None,
    tier: str,
    run: str,
    security: SecurityConfig | None,
    track: str | None,
    include: Sequence[str],
) -> Member:
    """Who joins, and how, by arguments and else by the environment. ``caller``: for the messages of ``ConfigError``."""
    track = os.environ.get("FLEETDDP_TRACK", "") if track is None else track
    return Member(
        node=_node(caller, site),
        tier=_tier(caller, tier),
        run=run,
        connect=_connect(caller, coordinator, security or security_from_environment(), run, track),
        track=track,
        include=tuple(include),
    )


def settings_of(caller: str, run: str, settings: Mapping[str, Any]) -> SiteConfig:
    """The ``site`` section of a fleet file with these settings."""
    return parse({"site": dict(settings), **({"run": run} if run else {})}, source=caller).site


def _part(site: Site, handle: Any) -> None:
    handle.remove()
    site.close()


def _node(caller: str, site: str | None) -> str:
    """The site's name; empty when none is given."""
    name = site or os.environ.get("FLEETDDP_NODE", "")
    if name:
        try:
            TypeAdapter(NodeName).validate_python(name)
        except ValidationError:
            allowed = "1 to 64 of A-Z a-z 0-9 . _ -, the first a letter or a digit"
            raise ConfigError(f"{caller}: site: {name!r} is no node name; allowed: {allowed}") from None
    return name


def _tier(caller: str, tier: str) -> Tier:
    if tier not in ("site", "edge"):
        raise ConfigError(f"{caller}: tier: {tier!r}; allowed are site and edge")
    return Tier(tier)


def security_from_environment() -> SecurityConfig:
    """What ``FLEETDDP_CA``, ``_CERT``, ``_KEY`` and ``_INSECURE`` say."""
    files = {k: Path(v) for k in ("ca", "cert", "key") if (v := os.environ.get(f"FLEETDDP_{k.upper()}"))}
    return parse({"security": {**files, "insecure": os.environ.get("FLEETDDP_INSECURE") == "1"}}, source="FLEETDDP_*").security


def _connect(
    caller: str, coordinator: str | Sequence[str] | Connect | None, security: SecurityConfig, run: str, track: str
) -> Connect:
    if callable(coordinator):
        return coordinator
    addresses = coordinator or os.environ.get("FLEETDDP_COORDINATOR")
    if not addresses:
        raise ConfigError(f"{caller}: coordinator: give its HOST:PORT, or set FLEETDDP_COORDINATOR")
    parents = [addresses] if isinstance(addresses, str) else list(addresses)
    configs = [parse({"coordinator": {"address": address}}, source=caller) for address in parents]
    after_s = configs[0].members.lease_s
    return dialer([c.coordinator.address for c in configs], security, run=run, track=track, after_s=after_s)


def dialer(parents: Sequence[str], security: SecurityConfig, *, run: str, track: str, after_s: float) -> Connect:
    """What connects a node to the first of ``parents``, and to the next one when one was silent for ``after_s``."""

    def dial(node: str) -> Parent:
        from fleetddp.common.transport.failover import connect
        from fleetddp.common.transport.uplink import Patience

        return connect(parents, security, node=node, run=run, track=track, patience=Patience(), after_s=after_s)

    return dial
