"""Who a site is: the ranks agree on its name and settings before anyone talks to the network."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from fleetddp.cloud.collective import tell_all
from fleetddp.common.config import SiteConfig
from fleetddp.common.errors import ConfigError
from fleetddp.common.transport import Parent
from fleetddp.common.update import Tier


class Member(NamedTuple):
    """Who the site is in the fleet, and how a rank reaches its parent."""

    node: str  # empty: named after the torchrun job or the machine of rank 0
    tier: Tier
    run: str
    connect: Callable[[str], Parent]  # node -> Parent
    track: str = ""
    include: tuple[str, ...] = ()  # patterns of the tensors that are exchanged; none: all that can be


class Roster(NamedTuple):
    """What the ranks have agreed on. ``carriers`` are the ranks that talk to the parent; rank 0 always does."""

    node: str
    incarnation: int
    carriers: list[int]


def muster(member: Member, config: SiteConfig, group: dist.ProcessGroup, device: torch.device) -> Roster:
    """Agree; a collective. Raises ``ConfigError``, on all ranks, where their settings differ."""
    settings = (member.tier.value, member.track, member.include, config.model_dump_json())
    card = (member.node or own_name(), time.time_ns() // 1000, _machine(), *settings)
    cards = tell_all(card, group, device)
    node, _, _, *first = cards[0]
    for rank, (_, _, _, *theirs) in enumerate(cards):
        if theirs != first:
            raise ConfigError(f"the ranks of a site have the same settings; rank 0: {first}, rank {rank}: {theirs}")
    incarnation = max(now for _, now, *_ in cards)  # rank 0 may have moved to a machine whose clock is behind
    return Roster(node, incarnation, _carriers(config, [machine for _, _, machine, *_ in cards]))


def _carriers(config: SiteConfig, machines: list[str]) -> list[int]:
    if config.uplink == "rank0":
        return [0]
    if config.uplink == "per_node":
        return [machines.index(name) for name in dict.fromkeys(machines)]
    return list(range(len(machines)))


def own_name() -> str:
    """A node name for a site that was given none: the torchrun job's id, or else this machine's host name."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    name = socket.gethostname() if job == "none" else job
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:64] or "site"


def _machine() -> str:
    """The machine this rank runs on, as torchrun numbers them."""
    return os.environ.get("GROUP_RANK", socket.gethostname())
