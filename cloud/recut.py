"""What a site's ranks knew of their slices, for another number of ranks: slices are cut anew, and nothing of them is lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetddp.common.update import Interval

Own = Mapping[str, Any]  # one rank's part of ``Site.state``


def joined(owns: Sequence[Own | None], *, counts: bool) -> Own | None:
    """All ranks' parts as one. ``counts``: with their samples, which only one of the ranks to come may take over."""
    known = [own for own in owns if own is not None]
    if not known:
        return None
    pieces = [(i, a, r) for own in known for i, a, r in zip(own["intervals"], own["anchor"], own["residual"], strict=True)]
    pieces.sort(key=lambda piece: piece[0])
    intervals, anchor, residual = ([piece[n] for piece in pieces] for n in range(3))
    samples = sum(own["samples"] for own in known) if counts else 0.0
    by_fragment = zip(*(own["owed"] for own in known), strict=True)
    owed = [[sum(n for n, _ in ranks) if counts else 0.0, ranks[0][1]] for ranks in by_fragment]
    return {**known[0], "intervals": intervals, "anchor": anchor, "residual": residual, "samples": samples, "owed": owed}


def recut(own: Own, intervals: Sequence[Interval]) -> Own | None:
    """The same for ``intervals``; None where ``own`` does not cover them all (a machine took its part with it)."""
    if own["intervals"] == [list(i) for i in intervals]:
        return own
    anchor: list[Tensor] = []
    residual: list[Tensor | None] = []
    for interval in intervals:
        parts = list(_parts(own, interval))
        if sum(base.numel() for base, _ in parts) != interval[1] - interval[0]:
            return None
        anchor.append(torch.cat([base for base, _ in parts]))
        lossless = all(left is None for _, left in parts)
        residual.append(None if lossless else torch.cat([torch.zeros_like(b) if left is None else left for b, left in parts]))
    return {**own, "intervals": [list(i) for i in intervals], "anchor": anchor, "residual": residual}


def _parts(own: Own, interval: Interval) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The anchor and residual of what lies in ``interval``, in order."""
    for (start, stop), base, left in zip(own["intervals"], own["anchor"], own["residual"], strict=True):
        inside = slice(max(start, interval[0]) - start, max(0, min(stop, interval[1]) - start))
        if inside.start < inside.stop:
            yield base[inside], None if left is None else left[inside]
