"""The edge side: a node that pulls, trains, keeps what it owes in an outbox, and pushes, whatever happens to its network; and
``Cascade``, which answers on the device and asks the cloud about hard samples.

Nothing is imported before it is used: ``import fleetddp.edge`` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import fleetddp.common  # noqa: F401  its first act (see common/fork.py) must come before anybody imports grpc

if TYPE_CHECKING:
    from fleetddp.edge.cascade import Cascade as Cascade
    from fleetddp.edge.node import EdgeNode as EdgeNode

__all__ = ["Cascade", "EdgeNode"]

_HOMES = {"Cascade": "cascade", "EdgeNode": "node"}


def __getattr__(name: str) -> Any:
    """Import what is asked for (PEP 562)."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"fleetddp.edge.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
