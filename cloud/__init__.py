"""The cloud side: a site's ``FleetDDP``, and the coordinator.

Nothing is imported before it is used: the command line and a coordinator need no ``torch.distributed``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import fleetddp.common  # noqa: F401  its first act (see common/fork.py) must come before anybody imports grpc

if TYPE_CHECKING:
    from fleetddp.cloud.attached import attach as attach
    from fleetddp.cloud.checkpoint import Checkpoint as Checkpoint
    from fleetddp.cloud.ddp import FleetDDP as FleetDDP
    from fleetddp.cloud.distill import Distillation as Distillation
    from fleetddp.cloud.hierarchy import register_hierarchy as register_hierarchy

__all__ = ["Checkpoint", "Distillation", "FleetDDP", "attach", "register_hierarchy"]


_HOMES = {
    "Checkpoint": "checkpoint",
    "Distillation": "distill",
    "FleetDDP": "ddp",
    "attach": "attached",
    "register_hierarchy": "hierarchy",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fleetddp.cloud.{_HOMES[name]}"), name)
