"""The edge side: a node that pulls, trains, keeps what it owes in an outbox, and pushes, whatever happens to its network.

Nothing is imported before it is used: ``import fleetddp.edge`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fleetddp.common  # noqa: F401  its first act (see common/fork.py) must come before anybody imports grpc

if TYPE_CHECKING:
    from fleetddp.edge.node import EdgeNode as EdgeNode

__all__ = ["EdgeNode"]


def __getattr__(name: str) -> Any:
    """Import ``EdgeNode`` when it is asked for (PEP 562)."""
    if name == "EdgeNode":
        from fleetddp.edge.node import EdgeNode

        return EdgeNode
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
