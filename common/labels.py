"""The vector of a track of soft labels: a row for each item of the proxy set, (w p_1, ..., w p_C, w).

p are the probabilities that members give the C classes, w > 0 what their opinion weighs; all zeros: nobody has one. Rows are
sums, in updates, partials and versions alike, so that consensus is a division by the last element: sum(d w p) / sum(d w), with d
the discount of each update (a weighted form of the average of Li and Wang, FedMD, 2019, and Lin et al., FedDF, 2020). The rows
are one tensor of a ``Layout``, or, with ``by_tier``, one for what sites say and one for what edges say. An update covers whole
rows of its tier's tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fleetddp.common.codecs import Codec
from fleetddp.common.codecs.prob import SoftLabels
from fleetddp.common.codecs.prob64 import Prob64
from fleetddp.common.config import MIN_SAMPLES
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.layout import Layout
from fleetddp.common.update import Interval, Tier, UpdateHeader

ALL = "all"  # the tensor of all tiers together


def layout_of(name: str, digest: str, items: int, classes: int, *, by_tier: bool) -> Layout:
    """The layout of a proxy set's soft labels: another set, or other contents, is another fingerprint."""
    parts = (Tier.SITE.value, Tier.EDGE.value) if by_tier else (ALL,)
    return Layout.of([(f"{name}@{digest[:16]}/{part}", (items, classes + 1)) for part in parts])


@dataclass(frozen=True, slots=True)
class Labels:
    """What a layout of soft labels holds."""

    items: int
    classes: int
    by_tier: bool

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.classes + 1

    def tensor(self, tier: Tier) -> Interval:
        """The elements of a leaf tier's rows."""
        size = self.items * self.width
        first = size if self.by_tier and tier is Tier.EDGE else 0
        return first, first + size


def space_of(layout: Layout) -> Labels:
    """Read off the shapes of a layout that ``layout_of`` made."""
    items, width = layout.tensors[0].shape
    return Labels(items, width - 1, len(layout.tensors) > 1)


def elements(layout: Layout, tier: Tier, items: Sequence[Interval]) -> tuple[Interval, ...]:
    """The rows of some items, [start, stop) each, as element intervals of the tier's tensor: what an update ``covers``."""
    labels = space_of(layout)
    first, width = labels.tensor(tier)[0], labels.width
    return tuple((first + start * width, first + stop * width) for start, stop in items)


def check_covers(header: UpdateHeader, layout: Layout) -> None:
    """Whole rows of the tier's tensor, ascending, none twice. Raises ``Refused(WRONG_ITEMS)``."""
    labels = space_of(layout)
    first, last = labels.tensor(header.tier)
    end = first
    for start, stop in header.covers:
        whole = (start - first) % labels.width == 0 and (stop - first) % labels.width == 0
        if not (end <= start < stop <= last and whole):
            raise Refused(
                Reason.WRONG_ITEMS,
                f"{header.update_id} covers elements [{start}, {stop}); tier {header.tier.value}'s rows of {labels.width} lie in "
                f"[{first}, {last}), {labels.items} of them; each comes once, ascending",
            )
        end = stop
    if not header.covers:
        raise Refused(Reason.WRONG_ITEMS, f"{header.update_id} covers no item")


def check_codec(codec: Codec, layout: Layout, *, sums: bool) -> None:
    """Of an update, or of a region's ``sums``: one for soft labels of our classes. ``Refused``: UNKNOWN_CODEC, WRONG_CLASSES."""
    if not isinstance(codec, Prob64 if sums else SoftLabels):
        what, allowed = ("sums of soft labels", "prob64") if sums else ("soft labels", "prob16 or probtop")
        raise Refused(Reason.UNKNOWN_CODEC, f"{what} in {codec.spec}; they travel in {allowed}")
    assert isinstance(codec, (SoftLabels, Prob64))
    classes = space_of(layout).classes
    if codec.classes != classes:
        raise Refused(Reason.WRONG_CLASSES, f"soft labels of {codec.classes} classes; this track's proxy set has {classes}")


def check_rows(values: Tensor, width: int, limit: float) -> None:
    """Decoded rows f32[n * width] of an update: each has an opinion, of a weight up to ``limit``. ``Refused(BAD_WEIGHT)``.

    What else a row must be (finite, not negative, adding up to its weight) its codec has seen to.
    """
    weights = values.view(-1, width)[:, -1]
    low, high = torch.aminmax(weights)
    if not (float(low) >= MIN_SAMPLES and float(high) <= limit):
        wrong = float(low) if not float(low) >= MIN_SAMPLES else float(high)
        raise Refused(Reason.BAD_WEIGHT, f"a soft label of weight {wrong:g}; allowed are {MIN_SAMPLES:g} to {limit:g}")
