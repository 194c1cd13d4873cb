"""``attach``: a site's outer loop for a model that is no ``FleetDDP``: one under ``fully_shard``, or wrapped by other means.

fully_shard(model)
member = attach(model, optimizer, sync_every=100)               # coordinator: argument or FLEETDDP_COORDINATOR
for x, y in loader:                                             # the rest of the script as it was
    loss_fn(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fleetddp.cloud.exchange import Exchange
from fleetddp.cloud.participant import Connect, Optimizers, Participant, member_of, settings_of
from fleetddp.cloud.roster import Member
from fleetddp.cloud.sharded import ShardedExchange, is_sharded, shards
from fleetddp.common.config import SecurityConfig, SiteConfig
from fleetddp.common.errors import ConfigError
from fleetddp.common.layout import Layout, unwrap

SETTINGS = (
    "sync_every",
    "codec",
    "uplink",
    "wait_s",
    "give_up_s",
    "overlap",
    "adopt_every",
    "fragments",
    "warmup_sync_steps",
    "buffers",
)


def attach(
    module: nn.Module,
    optimizer: Optimizers = None,
    *,
    coordinator: str | Sequence[str] | Connect | None = None,
    site: str | None = None,
    tier: str = "site",
    track: str | None = None,
    include: Sequence[str] = (),
    run: str = "",
    security: SecurityConfig | None = None,
    group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> Attached:
    """Let ``module`` train with a fleet; all ranks of ``group`` (default: of the job) call it alike.

    Its parameters are plain tensors, which the script itself keeps alike on all ranks; or all are sharded by ``fully_shard`` over
    ``group``, on a 1-D mesh by ``Shard(0)``: then each rank exchanges its own shards. ``settings``: those of ``SETTINGS``, as in
    the fleet file's ``site`` section. All else is as in ``FleetDDP``. It lasts until ``close`` or the end of the process. Raises
    ``ConfigError`` for a wrong setting, and for a parameter that is placed in another way, by name.
    """
    unknown = sorted(set(settings) - set(SETTINGS))
    if unknown:
        raise ConfigError(f"attach: {', '.join(unknown)}: no setting of attach; allowed are {', '.join(SETTINGS)}")
    config = settings_of("attach", run, settings)
    member = member_of(
        "attach", coordinator=coordinator, site=site, tier=tier, run=run, security=security, track=track, include=include
    )
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ConfigError("attach: call torch.distributed.init_process_group first")
    return Attached(module, member, config, optimizer, group)


class Attached(Participant):
    """What ``attach`` returns. A ``Checkpoint`` takes it as it takes a ``FleetDDP``, unless its parameters are sharded."""

    def __init__(
        self, module: nn.Module, member: Member, config: SiteConfig, optimizer: Optimizers, group: dist.ProcessGroup
    ) -> None:
        self.module, self.process_group = unwrap(module), group
        self.device = next((p.device for p in module.parameters() if p.requires_grad), torch.device("cpu"))
        self.sharded = is_sharded(module)
        if self.sharded:
            shards(self.module, Layout.from_module(module, include=member.include), group)  # raises
        exchange = ShardedExchange if self.sharded else Exchange
        self._enter(self.module, member, config, optimizer, group=group, device=self.device, exchange=exchange)
        # Before fully_shard's own hook, which gathers the parameters that a start may set. It keeps this object alive.
        self._hook = module.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True)

    def close(self) -> None:
        """Leave the fleet; training may go on without it. All ranks call it; done by itself when the process ends."""
        self._hook.remove()
        super().close()

    def _forward(self, module: nn.Module, inputs: Any, kwargs: Any) -> None:
        self._before_forward(module.training, inputs, kwargs)
