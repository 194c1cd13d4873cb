"""Updates accepted by a real journal, for the tests of merging and publishing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fleetddp.common.journal import Journal
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.update import Group, Kind, Tier, Update, UpdateHeader, UpdateId


def make_update(
    node: str,
    *,
    samples: float = 1.0,
    base: int = 0,
    tier: Tier = Tier.EDGE,
    kind: Kind = Kind.DELTA,
    sequence: int = 0,
    codec: str = "float32",
    layout: Layout | None = None,
    groups: tuple[Group, ...] = (),
    layout_spec: bytes = b"",
) -> Update:
    """A complete update, without its bytes."""
    header = UpdateHeader(
        update_id=UpdateId(node, 1, sequence),
        kind=kind,
        tier=tier,
        base_version=base,
        codec=codec,
        layout="" if layout is None else layout.fingerprint,
        groups=groups,
        layout_spec=layout_spec,
    )
    payload_bytes = 0 if layout is None else Geometry.of_update(header, layout).payload_bytes
    return Update(header=header, samples=samples, squared_norm=1.0, payload_bytes=payload_bytes, slices=())


def encoded(header: UpdateHeader, layout: Layout, rows: Sequence[Tensor]) -> bytes:
    """The canonical payload of these rows, each f32[layout.elements]."""
    geometry = Geometry.of_update(header, layout)
    flat = torch.cat(list(rows))
    return b"".join(bytes(bytes_of(geometry.encode(flat[start:stop], (start, stop)))) for start, stop in geometry.required())


def accept(journal: Journal, update: Update, layout: Layout, *rows: Tensor) -> Update:
    """Stage and accept an update whose payload holds ``rows``."""
    journal.stage(update.update_id, update.payload_bytes).write(0, encoded(update.header, layout, rows))
    journal.accept(update, 0.0)
    return update


def init_of(layout: Layout, node: str = "site") -> Update:
    """An ``init`` of this layout."""
    return make_update(node, kind=Kind.INIT, tier=Tier.SITE, base=-1, layout=layout, layout_spec=layout.to_json())
