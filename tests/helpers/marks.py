"""Updates that can be told apart in the weights: update k is 1 at element k of either half, and 0 everywhere else.

From weights of zero, plain averaging leaves -(its share of its version's samples) at its own elements, whatever else was merged:
an update that was counted twice, lost, or torn between its halves is seen. The halves travel in different chunks.
"""

from __future__ import annotations

import google_crc32c
import numpy as np
import torch
from torch import nn

from fleetddp.common import codecs
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.transport import Parent
from fleetddp.common.update import Kind, Receipt, Slice, Tier, UpdateHeader, UpdateId

HALF = 512 * 1024 // 4  # elements of a chunk
MARKS = 64 * 1024
ELEMENTS = HALF + MARKS


class Flat(nn.Module):
    """Nothing but weights, all 0."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ELEMENTS))


LAYOUT = Layout.from_module(Flat())
GEOMETRY = Geometry(LAYOUT, codecs.get("float32"))


def push(parent: Parent, update_id: UpdateId, *, base_version: int, mark: int, samples: float, tier: Tier = Tier.EDGE) -> Receipt:
    """Push update number ``mark``, as a member of this tier."""
    vector = np.zeros(ELEMENTS, np.float32)
    vector[[mark, HALF + mark]] = 1.0
    return _push(parent, update_id, Kind.DELTA, tier, base_version, vector, samples)


def found(parent: Parent, update_id: UpdateId) -> Receipt:
    """Push the first weights."""
    return _push(parent, update_id, Kind.INIT, Tier.SITE, -1, np.zeros(ELEMENTS, np.float32), 1.0)


def _push(parent: Parent, update_id: UpdateId, kind: Kind, tier: Tier, base: int, vector: np.ndarray, samples: float) -> Receipt:
    header = UpdateHeader(
        update_id=update_id,
        kind=kind,
        tier=tier,
        base_version=base,
        codec="float32",
        layout=LAYOUT.fingerprint,
        layout_spec=LAYOUT.to_json() if kind is Kind.INIT else b"",
    )
    payload = vector.tobytes()
    part = Slice(intervals=GEOMETRY.required(), samples=samples, digest=google_crc32c.value(payload))
    return parent.push(header, part, memoryview(payload))
