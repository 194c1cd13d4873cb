"""``FleetDDP``: a ``DistributedDataParallel`` that also trains with a fleet.

model = FleetDDP(model, device_ids=[local_rank], sync_every=100)    # instead of torch's; the rest of the script as it was
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from fleetddp.cloud.hierarchy import register_hierarchy
from fleetddp.cloud.participant import Connect, Optimizers, Participant, member_of, settings_of
from fleetddp.common.config import SecurityConfig, SiteConfig


class FleetDDP(Participant, DistributedDataParallel):
    """DDP inside the site; every ``sync_every`` counted optimizer steps an exchange with the fleet (the contract: ``site.py``).

    Positional arguments after the module, and all other keywords, are ``DistributedDataParallel``'s. Ours:

    ``coordinator``: HOST:PORT (default: ``FLEETDDP_COORDINATOR``); several, of which the next one is called when one is gone; or
    a function that connects a node name to a ``Parent``.
    ``site``: this site's node name (default: ``FLEETDDP_NODE``, else the torchrun job's id or the host name).
    ``sync_every``, ``codec``, ``uplink``, ``wait_s``, ``give_up_s``, ``overlap``, ``adopt_every``, ``fragments``,
    ``warmup_sync_steps``, ``buffers``: as in the fleet file's ``site`` section (``SiteConfig``).
    ``hierarchy``, ``cross_node``: likewise; gradients are averaged node by node, then between nodes (``hierarchy.py``). "auto":
    where that saves traffic, unless a communication hook was registered before the first training forward.
    ``tier``: "edge" for a group of gateway devices that joins as one edge member, and never founds a run.
    ``track``: which of the fleet's tracks this model takes part in (default: ``FLEETDDP_TRACK``, else the only one).
    ``include``: shell patterns of tensor names (``["adapter.*", "head.*"]``): only these are exchanged, the rest stays local.
    ``run``: refuse to take part in another run. ``security``: default ``FLEETDDP_CA``, ``_CERT``, ``_KEY`` or ``_INSECURE``.
    ``optimizer``: one or several; only needed where they should not be found by themselves.

    The first training forward joins the fleet, and waits for its coordinator. Where a boundary changes weights it does so inside
    ``optimizer.step()``, on all ranks alike. Raises ``ConfigError`` for a wrong setting.
    """

    def __init__(
        self,
        module: nn.Module,
        *args: Any,
        coordinator: str | Sequence[str] | Connect | None = None,
        site: str | None = None,
        sync_every: int = SiteConfig.model_fields["sync_every"].default,
        codec: str = SiteConfig.model_fields["codec"].default,
        uplink: str = SiteConfig.model_fields["uplink"].default,
        wait_s: float | None = None,
        give_up_s: float | None = SiteConfig.model_fields["give_up_s"].default,
        overlap: str = SiteConfig.model_fields["overlap"].default,
        adopt_every: int = SiteConfig.model_fields["adopt_every"].default,
        fragments: int = SiteConfig.model_fields["fragments"].default,
        warmup_sync_steps: int = SiteConfig.model_fields["warmup_sync_steps"].default,
        buffers: str = SiteConfig.model_fields["buffers"].default,
        hierarchy: str = SiteConfig.model_fields["hierarchy"].default,
        cross_node: str = SiteConfig.model_fields["cross_node"].default,
        tier: str = "site",
        track: str | None = None,
        include: Sequence[str] = (),
        run: str = "",
        security: SecurityConfig | None = None,
        optimizer: Optimizers = None,
        **kwargs: Any,
    ) -> None:
        settings = {"sync_every": sync_every, "codec": codec, "uplink": uplink, "wait_s": wait_s, "buffers": buffers}
        settings["give_up_s"] = give_up_s
        settings |= {"overlap": overlap, "adopt_every": adopt_every, "fragments": fragments}
        settings |= {"warmup_sync_steps": warmup_sync_steps}
        settings |= {"hierarchy": hierarchy, "cross_node": cross_node}
        config = settings_of("FleetDDP", run, settings)
        member = member_of(
            "FleetDDP",
            coordinator=coordinator,
            site=site,
            tier=tier,
            run=run,
            security=security,
            track=track,
            include=include,
        )
        super().__init__(module, *args, **kwargs)
        self._settings, self._in_join = config, False
        self._enter(self.module, member, config, optimizer, group=self.process_group, device=self.device)

    def start(self) -> None:
        """Join the fleet and take up its weights now, not at the first training forward. All ranks call it."""
        if not self.site.started:
            super().start()
            register_hierarchy(self, when=self._settings.hierarchy, cross_node=self._settings.cross_node)

    # ---- DistributedDataParallel ----------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DDP's forward; while training it counts the samples, and the first one joins the fleet."""
        self._before_forward(self.training, inputs, kwargs)
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
        return {**super().__getstate__(), "_site": None, "_teacher": None, "_comm_hooks": []}  # type: ignore[no-untyped-call]


class _FleetJoinHook(JoinHook):
    def __init__(self, inner: JoinHook, model: FleetDDP) -> None:
        self._inner, self._model = inner, model

    def main_hook(self) -> None:
        self._inner.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._inner.post_hook(is_last_joiner)
        self._model._join_ended()
