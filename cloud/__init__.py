"""The cloud side: a site's ``FleetDDP``, and the coordinator.

Nothing is imported before it is used: the command line and a coordinator need no ``torch.distributed``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fleetddp.common  # noqa: F401  its first act (see common/fork.py) must come before anybody imports grpc

if TYPE_CHECKING:
    from fleetddp.cloud.checkpoint import Checkpoint as Checkpoint
    from fleetddp.cloud.ddp import FleetDDP as FleetDDP
    from fleetddp.cloud.hierarchy import register_hierarchy as register_hierarchy

__all__ = ["Checkpoint", "FleetDDP", "register_hierarchy"]


def __getattr__(name: str) -> Any:
    """Import what is asked for (PEP 562)."""
    if name == "FleetDDP":
        from fleetddp.cloud.ddp import FleetDDP

        return FleetDDP
    if name == "Checkpoint":
        from fleetddp.cloud.checkpoint import Checkpoint

        return Checkpoint
    if name == "register_hierarchy":
        from fleetddp.cloud.hierarchy import register_hierarchy

        return register_hierarchy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
