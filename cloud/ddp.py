"""``FleetDDP``: a ``DistributedDataParallel`` that also trains with a fleet.

model = FleetDDP(model, device_ids=[local_rank], sync_every=100)    # instead of torch's; the rest of the script as it was
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from fleetddp.cloud.hierarchy import register_hierarchy
from fleetddp.cloud.roster import Member
from fleetddp.cloud.site import Site
from fleetddp.common.config import FleetConfig, NodeName, SecurityConfig, SiteConfig, parse
from fleetddp.common.errors import ConfigError
from fleetddp.common.task import samples_in
from fleetddp.common.transport import Parent
from fleetddp.common.update import NO_VERSION, Tier

Connect = Callable[[str], Parent]  # node -> Parent


class FleetDDP(DistributedDataParallel):
    """DDP inside the site; every ``sync_every`` counted optimizer steps an exchange with the fleet (the contract: ``site.py``).

    Positional arguments after the module, and all other keywords, are ``DistributedDataParallel``'s. Ours:

    ``coordinator``: HOST:PORT (default: ``FLEETDDP_COORDINATOR``), or a function that connects a node name to a ``Parent``.
    ``site``: this site's node name (default: ``FLEETDDP_NODE``, else the torchrun job's id or the host name).
    ``sync_every``, ``codec``, ``uplink``, ``wait_s``, ``overlap``, ``adopt_every``, ``warmup_sync_steps``, ``buffers``: as in the
    fleet file's ``site`` section (``SiteConfig``).
    ``hierarchy``, ``cross_node``: likewise; gradients are averaged node by node, then between nodes (``hierarchy.py``). "auto":
    where that saves traffic, unless a communication hook was registered before the first training forward.
    ``tier``: "edge" for a group of gateway devices that joins as one edge member, and never founds a run.
    ``run``: refuse to take part in another run. ``security``: default ``FLEETDDP_CA``, ``_CERT``, ``_KEY`` or ``_INSECURE``.
    ``optimizer``: one or several; only needed where they should not be found by themselves.

    The first training forward joins the fleet, and waits for its coordinator. Where a boundary changes weights it does so inside
    ``optimizer.step()``, on all ranks alike. Raises ``ConfigError`` for a wrong setting.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        coordinator: str | Connect | None = None,
        site: str | None = None,
        sync_every: int = SiteConfig.model_fields["sync_every"].default,
        codec: str = SiteConfig.model_fields["codec"].default,
        uplink: str = SiteConfig.model_fields["uplink"].default,
        wait_s: float | None = None,
        overlap: str = SiteConfig.model_fields["overlap"].default,
        adopt_every: int = SiteConfig.model_fields["adopt_every"].default,
        warmup_sync_steps: int = SiteConfig.model_fields["warmup_sync_steps"].default,
        buffers: str = SiteConfig.model_fields["buffers"].default,
        hierarchy: str = SiteConfig.model_fields["hierarchy"].default,
        cross_node: str = SiteConfig.model_fields["cross_node"].default,
        tier: str = "site",
        run: str = "",
        security: SecurityConfig | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        **kwargs: Any,
    ) -> None:
        settings = {"sync_every": sync_every, "codec": codec, "uplink": uplink, "wait_s": wait_s, "buffers": buffers}
        settings |= {"overlap": overlap, "adopt_every": adopt_every, "warmup_sync_steps": warmup_sync_steps}
        settings |= {"hierarchy": hierarchy, "cross_node": cross_node}
        config = parse({"site": settings, **({"run": run} if run else {})}, source="FleetDDP")
        member = Member(
            node=_node(site),
            tier=_tier(tier),
            run=run,
            connect=_connect(coordinator, security or _security_from_environment(), run),
        )
        super().__init__(module, *args, **kwargs)
        self._counts_forwards = True
        self._in_join = False
        self._settings = config.site
        self._site: Site | None = self._enter(member, config, optimizer)

    def _enter(self, member: Member, config: FleetConfig, optimizer: Optimizer | Iterable[Optimizer] | None) -> Site:
        """This rank's site. Neither it nor torch's hook keeps the model alive; with it goes the membership."""
        this = weakref.ref(self)
        site = Site(
            self.module,
            member,
            config.site,
            group=self.process_group,
            device=self.device,
            optimizers=[optimizer] if isinstance(optimizer, Optimizer) else optimizer,
            deferred=lambda: (model := this()) is not None and model._deferred,
        )
        handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: site.stepped(optimizer))
        weakref.finalize(self, _part, site, handle)
        return site

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
        site = self.site
        if not site.started:
            site.start()
            register_hierarchy(self, when=self._settings.hierarchy, cross_node=self._settings.cross_node)

    def count_samples(self, n: float) -> None:
        """Count ``n`` samples (or tokens) towards this rank's next update; from now on no longer each forward's batch size."""
        if self._counts_forwards:
            self._counts_forwards = False
            self.site.samples = 0.0
        self.site.samples += n

    def report(self, metrics: Mapping[str, float], *, training: bool = False) -> None:
        """Tell the fleet of metrics evaluated on the version these weights are (``training``: of training). Rank 0's are sent."""
        self.site.report(metrics, NO_VERSION if training else self.site.version)

    def close(self) -> None:
        """Leave the fleet; training may go on without it. All ranks call it; done by itself when the process ends."""
        self.site.close()

    # ---- DistributedDataParallel ----------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DDP's forward; while training it counts the samples, and the first one joins the fleet."""
        site = self._site
        if site is not None and self.training and torch.is_grad_enabled():
            if not site.started:
                self.start()
            if self._counts_forwards:
                site.samples += _batch_size(inputs, kwargs)
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """DDP's, followed by the boundary that was put off. A rank without any input joins the fleet here."""
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[no-untyped-call]
        if self._site is None:
            return hook
        self.start()
        self._in_join = True
        return _FleetJoinHook(hook, self)

    @property
    def _deferred(self) -> bool:
        """Whether ranks may be joined already, and could not take part in an exchange."""
        # torch leaves the config as it was when the context ends. With throw_on_early_termination all ranks end together.
        config = self._join_config
        return self._in_join and config.enable and not config.throw_on_early_termination

    def _join_ended(self) -> None:
        self._in_join = False
        self.site.joined_again()

    def __getstate__(self) -> dict[str, Any]:
        """For copies (an average of weights, say): they are no members of the fleet."""
        return {**super().__getstate__(), "_site": None, "_comm_hooks": []}  # type: ignore[no-untyped-call]


class _FleetJoinHook(JoinHook):
    def __init__(self, inner: JoinHook, model: FleetDDP) -> None:
        self._inner, self._model = inner, model

    def main_hook(self) -> None:
        self._inner.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._inner.post_hook(is_last_joiner)
        self._model._join_ended()


def _part(site: Site, handle: Any) -> None:
    handle.remove()
    site.close()


def _batch_size(inputs: Any, kwargs: Mapping[str, Any]) -> int:
    """Of the first tensor among a forward's arguments; 0 when there is none (a boundary without samples is an error)."""
    if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim():  # nearly always; each step pays for this
        return inputs[0].shape[0]
    try:
        return samples_in((inputs, kwargs))
    except ConfigError:
        return 0


def _node(site: str | None) -> str:
    """The site's name; empty when none is given."""
    name = site or os.environ.get("FLEETDDP_NODE", "")
    if name:
        try:
            TypeAdapter(NodeName).validate_python(name)
        except ValidationError:
            allowed = "1 to 64 of A-Z a-z 0-9 . _ -, the first a letter or a digit"
            raise ConfigError(f"FleetDDP: site: {name!r} is no node name; allowed: {allowed}") from None
    return name


def _tier(tier: str) -> Tier:
    if tier not in ("site", "edge"):
        raise ConfigError(f"FleetDDP: tier: {tier!r}; allowed are site and edge")
    return Tier(tier)


def _security_from_environment() -> SecurityConfig:
    files = {k: Path(v) for k in ("ca", "cert", "key") if (v := os.environ.get(f"FLEETDDP_{k.upper()}"))}
    return parse({"security": {**files, "insecure": os.environ.get("FLEETDDP_INSECURE") == "1"}}, source="FLEETDDP_*").security


def _connect(coordinator: str | Connect | None, security: SecurityConfig, run: str) -> Connect:
    if callable(coordinator):
        return coordinator
    address = coordinator or os.environ.get("FLEETDDP_COORDINATOR")
    if not address:
        raise ConfigError("FleetDDP: coordinator: give its HOST:PORT, or set FLEETDDP_COORDINATOR")
    config = parse({"coordinator": {"address": address}}, source="FleetDDP").coordinator

    def dial(node: str) -> Parent:
        from fleetddp.common.transport.uplink import Uplink

        return Uplink(config.address, security, node=node, run=run)

    return dial
