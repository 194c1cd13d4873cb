"""The weights of a published version, as one vector."""

from __future__ import annotations

import torch
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, tensor_over
from fleetddp.common.transport import Parent


def fetch(parent: Parent, version: int, layout: Layout) -> Tensor:
    """Pull a version: float32[layout.elements]. ``Refused(WRONG_LAYOUT)`` if it is of another layout."""
    payload = bytearray()

    def sink(offset: int, data: memoryview) -> None:
        payload[offset : offset + len(data)] = data

    found = parent.pull(version, (), sink)
    if found.layout != layout.fingerprint:
        raise Refused(Reason.WRONG_LAYOUT, f"version {version} has layout {found.layout[:12]}, mine is {layout.fingerprint[:12]}")
    geometry = Geometry(layout, codecs.get(found.codec))
    weights = torch.zeros(layout.elements)
    for start, stop in geometry.required():
        first, last = geometry.byte_range((start, stop))
        weights[start:stop] = geometry.decode(tensor_over(memoryview(payload)[first:last]), (start, stop))
    return weights
