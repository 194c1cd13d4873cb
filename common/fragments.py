"""Fragments: a layout cut into P runs of blocks that are synchronised in turn, so that a site sends 1/P of its update at a time.

As in Streaming DiLoCo (Douillard et al., Streaming DiLoCo with overlapping communication, 2025), with fragments that follow one
another in the flat vector. The parameters' blocks and then the averaged buffers' are dealt out evenly: every element is in
exactly one fragment, and buffers belong to the last ones. A function of the layout's sizes and P alone, so both ends agree.

A version may change some fragments and leave the others, weights and outer state, as they were. An update's staleness is counted
for each fragment by itself: the versions after its base that changed that fragment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleetddp.common.codecs.base import BLOCK
from fleetddp.common.errors import ConfigError
from fleetddp.common.layout import Layout
from fleetddp.common.update import Fragment, Interval


def cut(layout: Layout, count: int) -> tuple[tuple[Interval, ...], ...]:
    """The elements of each of ``count`` fragments, ascending; ``ConfigError`` where there are not that many blocks."""
    sections = [(0, layout.parameters)]
    if layout.buffer_elements:
        sections.append((layout.buffer_start, layout.elements))
    fragments = tuple(deal(sections, count))
    if not all(fragments):
        blocks = sum(-(-(stop - start) // BLOCK) for start, stop in sections)
        raise ConfigError(f"site.fragments is {count}: the model has only {blocks} blocks of {BLOCK} elements")
    return fragments


def elements_of(layout: Layout, fragment: Fragment | None) -> tuple[Interval, ...] | None:
    """What an update covers; None: the whole layout."""
    return None if fragment is None else cut(layout, fragment.count)[fragment.index]


def deal(sections: Sequence[Interval], parts: int) -> list[tuple[Interval, ...]]:
    """Cut sections into ``parts`` runs of blocks, equal but for one block; some are empty where there are fewer blocks."""
    blocks = sum(-(-(stop - start) // BLOCK) for start, stop in sections)
    shares: list[tuple[Interval, ...]] = []
    for part in range(parts):
        first, last = part * blocks // parts, (part + 1) * blocks // parts
        intervals: list[Interval] = []
        for start, stop in sections:
            begin, end = start + max(first, 0) * BLOCK, min(start + last * BLOCK, stop)
            if begin < end:
                intervals.append((begin, end))
            inside = -(-(stop - start) // BLOCK)
            first, last = first - inside, last - inside
        shares.append(tuple(intervals))
    return shares


@dataclass(frozen=True, slots=True)
class Changes:
    """For each fragment the versions that changed it, ascending, as far back as any update may be based."""

    at: tuple[tuple[int, ...], ...]

    @classmethod
    def at_the_start(cls, count: int) -> Changes:
        """Version 0 made all of it."""
        return cls(((0,),) * count)

    @property
    def last(self) -> tuple[int, ...]:
        """For each fragment the last version that changed it."""
        return tuple(versions[-1] for versions in self.at)

    def staleness(self, base_version: int, fragment: int) -> int:
        """How many versions after ``base_version`` changed the fragment."""
        return len(self.at[fragment]) - bisect_right(self.at[fragment], base_version)

    def oldest(self, base_version: int, fragment: Fragment | None) -> int:
        """The staleness of an update: of the fragment it covers, or the largest of all."""
        covered = range(len(self.at)) if fragment is None else (fragment.index,)
        return max(self.staleness(base_version, index) for index in covered)

    def after(self, version: int, changed: Iterable[int], *, kept: int) -> Changes:
        """With ``version``, which changes these fragments; the last ``kept`` changes of each are remembered."""
        changed = frozenset(changed)
        return Changes(tuple(((*a, version) if i in changed else a)[-kept:] for i, a in enumerate(self.at)))
