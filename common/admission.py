"""What an offered update must pass, as tables of checks in the order they are made.

``HEADER`` is checked when the first stream of an update is offered, before a byte of it is taken. ``check_slice`` is checked
for each stream. ``COMPLETE`` is checked when all streams have arrived. The first check that fails names the refusal.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fleetddp.common import labels
from fleetddp.common.codecs import NAMES, get
from fleetddp.common.codecs.prob import SoftLabels
from fleetddp.common.codecs.prob64 import Prob64
from fleetddp.common.config import MAX_NORM, MIN_SAMPLES, FleetConfig
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.events import Joined, Share
from fleetddp.common.fragments import Changes, cut
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry
from fleetddp.common.update import NO_VERSION, Fragment, Group, Kind, Receipt, Slice, Tier, Update, UpdateHeader, UpdateId

# before the colon of a spec, by what a track exchanges
CODECS = {
    "weights": tuple(name for name in NAMES if not name.startswith("prob")),
    "logits": tuple(name for name in NAMES if name.startswith("prob")),
}


@dataclass(slots=True, kw_only=True)
class Standing:
    """Where the run stands: what the checks compare with."""

    config: FleetConfig
    run: str
    version: int = NO_VERSION  # newest published
    head: int = NO_VERSION  # what an update accepted now is merged on top of: ``version``, or the one being made
    layout: Layout | None = None  # known from the first weights on
    finished: str = ""
    init_by: str = ""  # who brought the first weights, once they have arrived whole
    regional: bool = False  # this aggregator has a parent, where the first weights come from
    known: int = NO_VERSION  # the newest version that a parent told of
    fragments: int = 1  # that the layout is cut into
    changes: Changes | None = None  # of the fragments up to ``head``; None where the layout is not cut

    def wants_init(self, tier: Tier) -> bool:
        """Whether a member of this tier should upload the first weights."""
        awaited = self.version == NO_VERSION and not self.init_by and self.config.start.bootstrap == "site" and not self.regional
        return awaited and tier is Tier.SITE and not self.finished

    def staleness(self, base_version: int, fragment: Fragment | None) -> int:
        """Of an update that is merged on top of ``head``."""
        return self.head - base_version if self.changes is None else self.changes.oldest(base_version, fragment)

    def joined(self, tier: Tier, receipts: tuple[Receipt, ...], steps: int = 0) -> Joined:
        """What a member of this tier needs to know to take part."""
        return Joined(
            run=self.run,
            version=self.version,
            layout=self.layout.fingerprint if self.layout is not None else "",
            wants_init=self.wants_init(tier),
            heartbeat_s=self.config.members.heartbeat_s,
            lease_s=self.config.members.lease_s,
            gradient_lr=self.config.merge.gradient_lr,
            max_staleness=self.config.merge.bound(tier),
            codecs=CODECS[self.config.kind],
            receipts=receipts,
            finished=self.finished,
            fragments=self.fragments,
            steps=steps,
        )


def check_run(run: str, standing: Standing) -> None:
    """A member that names a run must mean this one. Raises ``Refused``."""
    if run not in ("", standing.run):
        raise Refused(Reason.WRONG_RUN, f"this is run {standing.run}, not {run}")


def check_layout(fingerprint: str, standing: Standing) -> None:
    """Once there is a layout, it is everyone's. Raises ``Refused``."""
    if standing.layout is not None and fingerprint != standing.layout.fingerprint:
        raise Refused(Reason.WRONG_LAYOUT, f"layout {fingerprint[:12]}; this run's is {standing.layout.fingerprint[:12]}")


def check_share(event: Share, tier: Tier, standing: Standing) -> None:
    """Whether this member may share these samples, or take them back. Raises ``Refused``."""
    proxy = standing.config.proxy
    if proxy is None or proxy.open is None:
        raise Refused(Reason.NO_OPEN_ITEMS, "this track takes no samples of devices")
    if event.of != event.node and tier is not Tier.REGION:
        raise Refused(Reason.WRONG_IDENTITY, f"{event.node} speaks for {event.of}; only a region speaks for others")
    if event.takes_back:  # whoever it was that may: what was shared may always be taken back
        return
    if standing.finished:
        raise Refused(Reason.FINISHED, f"the run has ended: {standing.finished}")
    if not any(fnmatch.fnmatchcase(event.of, pattern) for pattern in proxy.open.allow):
        raise Refused(Reason.NOT_PERMITTED, f"{event.of!r} matches no pattern of proxy.open.allow")
    if not event.digests:
        raise Refused(Reason.MALFORMED, "an offer of no sample")


# ---- the header -------------------------------------------------------------------------------------------------------------


def _run_goes_on(header: UpdateHeader, standing: Standing) -> None:
    if standing.finished:
        raise Refused(Reason.FINISHED, f"the run has ended: {standing.finished}")


def _kind_is_taken(header: UpdateHeader, standing: Standing) -> None:
    of_labels = standing.config.kind == "logits"
    if header.kind is not Kind.PARTIAL and (header.kind is Kind.LOGITS) != of_labels:
        said = f"a {header.kind.value}: this track takes soft labels" if of_labels else "soft labels are not taken in this track"
        raise Refused(Reason.WRONG_KIND, said)
    if (header.kind is Kind.PARTIAL) != bool(header.groups):
        raise Refused(
            Reason.MALFORMED, f"a {header.kind.value} with {len(header.groups)} groups; a partial has them, no other kind"
        )
    if (header.kind is Kind.PARTIAL) != (header.tier is Tier.REGION):
        raise Refused(Reason.MALFORMED, f"a {header.kind.value} of tier {header.tier.value}; regions send partials, no one else")
    if header.kind is not Kind.INIT:
        return
    if standing.regional:
        raise Refused(Reason.WRONG_KIND, "first weights at a region; a site brings them to the root")
    if header.tier is not Tier.SITE:
        raise Refused(Reason.WRONG_KIND, f"a member of tier {header.tier.value} sent first weights; a site brings them")
    if standing.config.start.bootstrap == "file":
        raise Refused(Reason.INIT_TAKEN, f"the first weights come from {standing.config.start.file}")
    if standing.init_by or standing.version != NO_VERSION:
        raise Refused(Reason.INIT_TAKEN, f"the first weights are there already, from {standing.init_by or 'an earlier start'}")


def _layout_is_ours(header: UpdateHeader, standing: Standing) -> None:
    if header.kind is Kind.INIT:
        named = Layout.from_json(header.layout_spec)
        if named.elements > standing.config.limits.max_elements:
            limit = standing.config.limits.max_elements
            raise Refused(Reason.TOO_LARGE, f"a layout of {named.elements} elements; limits.max_elements is {limit}")
        if named.fingerprint != header.layout:
            raise Refused(
                Reason.WRONG_LAYOUT, f"the header names layout {header.layout[:12]}, its spec is {named.fingerprint[:12]}"
            )
        try:
            cut(named, standing.fragments)
        except ConfigError as error:
            raise Refused(Reason.WRONG_LAYOUT, str(error)) from None
    else:
        check_layout(header.layout, standing)


def _fragment_is_ours(header: UpdateHeader, standing: Standing) -> None:
    fragment = header.fragment
    if fragment is None:
        return
    if header.kind is Kind.INIT:
        raise Refused(Reason.WRONG_KIND, "first weights are whole")
    if fragment.count != standing.fragments or not 0 <= fragment.index < fragment.count:
        raise Refused(Reason.WRONG_INTERVALS, f"{fragment}; this run cuts its layout into {standing.fragments} (site.fragments)")


def _proxy_rows(standing: Standing) -> Layout:
    if standing.layout is None:  # at a region that has no version yet
        raise Refused(Reason.NO_VERSION, "nothing is known here of the proxy set yet")
    return standing.layout


def _items_are_ours(header: UpdateHeader, standing: Standing) -> None:
    if header.kind is Kind.LOGITS:
        labels.check_covers(header, _proxy_rows(standing))
    elif header.covers:
        raise Refused(Reason.MALFORMED, f"a {header.kind.value} that covers rows; soft labels do, no other kind")


def _codec_is_known(header: UpdateHeader, standing: Standing) -> None:
    codec = get(header.codec)
    if standing.config.kind == "logits":
        labels.check_codec(codec, _proxy_rows(standing), sums=header.kind is Kind.PARTIAL)
    elif isinstance(codec, (SoftLabels, Prob64)):
        raise Refused(Reason.UNKNOWN_CODEC, f"a {header.kind.value} in {header.codec}, which is for soft labels")
    if header.kind is Kind.INIT and header.codec != "float32":
        raise Refused(Reason.UNKNOWN_CODEC, f"first weights in {header.codec}; they travel in float32")
    if header.codec == "float64" and header.kind is not Kind.PARTIAL:
        raise Refused(Reason.UNKNOWN_CODEC, f"a {header.kind.value} in float64, which is for partials")


def _groups_add_up(header: UpdateHeader, standing: Standing) -> None:
    ids = [i for group in header.groups for i in group.ids]
    if len(set(ids)) != len(ids):
        raise Refused(Reason.MALFORMED, "a partial names an update twice")
    for group in header.groups:
        if not group.ids or group.tier is Tier.REGION:
            raise Refused(Reason.MALFORMED, f"a group of tier {group.tier.value} with {len(group.ids)} updates")
        limit = standing.config.limits.max_samples * len(group.ids)
        if not MIN_SAMPLES <= group.samples <= limit:
            raise Refused(Reason.BAD_WEIGHT, f"a group of {group.samples} samples; allowed are {MIN_SAMPLES:g} to {limit:g}")
        if group.buffer_samples != 0 and not MIN_SAMPLES <= group.buffer_samples <= group.samples:
            raise Refused(Reason.BAD_WEIGHT, f"a group of {group.samples} samples, {group.buffer_samples} with buffers")


def _base_exists(header: UpdateHeader, standing: Standing) -> None:
    if header.kind is Kind.INIT:
        return
    for base in (header.base_version, *(group.base_version for group in header.groups)):
        if base < 0:
            raise Refused(Reason.MALFORMED, f"base_version {base} is negative")
        if base > max(standing.version, standing.known):
            if standing.regional:  # it comes from another parent, and we are behind
                raise Refused(Reason.NO_VERSION, f"version {base} is not known here yet; the newest is {standing.version}")
            raise Refused(Reason.FUTURE_BASE, f"base_version {base}; the newest version is {standing.version}")


def _not_stale(header: UpdateHeader, standing: Standing) -> None:
    if header.kind is Kind.INIT or header.groups:  # of a partial it is told which of its updates are: ``stale_in``
        return
    base, bound = header.base_version, standing.config.merge.bound(header.tier)
    staleness = standing.staleness(base, header.fragment)
    if staleness > bound:
        raise Refused(
            Reason.STALE, f"based on version {base}, {staleness} behind; the bound of tier {header.tier.value} is {bound}"
        )


def stale_in(header: UpdateHeader, standing: Standing) -> tuple[UpdateId, ...]:
    """Of a partial: the leaf updates in it that are too stale by now."""
    bound, staleness = standing.config.merge.bound, standing.staleness
    return tuple(i for g in header.groups if staleness(g.base_version, header.fragment) > bound(g.tier) for i in g.ids)


HeaderCheck = Callable[[UpdateHeader, Standing], None]
HEADER: tuple[HeaderCheck, ...] = (
    _run_goes_on,
    _kind_is_taken,
    _layout_is_ours,
    _fragment_is_ours,
    _codec_is_known,
    _items_are_ours,
    _groups_add_up,
    _base_exists,
    _not_stale,
)


def check_header(header: UpdateHeader, standing: Standing) -> None:
    """All of ``HEADER``; raises ``Refused``."""
    for check in HEADER:
        check(header, standing)


# ---- one stream -------------------------------------------------------------------------------------------------------------


def _most_samples(header: UpdateHeader, standing: Standing) -> float:
    """A partial stands for many leaf updates."""
    return standing.config.limits.max_samples * len(header.leaf_ids)


def check_slice(part: Slice, header: UpdateHeader, geometry: Geometry, standing: Standing) -> None:
    """Samples finite, not negative, within the limit; intervals of whole blocks. Raises ``Refused``."""
    limit = _most_samples(header, standing)
    if not 0 <= part.samples <= limit:  # NaN fails too
        raise Refused(Reason.BAD_WEIGHT, f"{part.samples} samples; allowed are 0 to {limit:g} behind a stream")
    if not part.intervals:
        raise Refused(Reason.WRONG_INTERVALS, "a stream that carries no element")
    for interval in part.intervals:
        geometry.byte_range(interval)


# ---- the complete update ----------------------------------------------------------------------------------------------------


def _has_weight(update: Update, standing: Standing) -> None:
    if update.header.kind is Kind.INIT:
        return
    limit = _most_samples(update.header, standing)
    if not MIN_SAMPLES <= update.samples <= limit:
        raise Refused(
            Reason.BAD_WEIGHT, f"{update.samples:g} samples behind the update; allowed are {MIN_SAMPLES:g} to {limit:g}"
        )


def _norm_is_bounded(update: Update, standing: Standing) -> None:
    # the fleet file's bound is of outer gradients; all else only has to stay clear of overflow
    bound = standing.config.limits.max_norm
    if update.header.kind is Kind.INIT or standing.config.kind == "logits":
        bound = MAX_NORM
    # row g of a partial is sum(w u): at most samples_g times the bound if each u keeps to it
    scale = math.sqrt(sum((g.samples * _most_of_one(g)) ** 2 for g in update.header.groups)) if update.header.groups else 1.0
    norm = math.sqrt(update.squared_norm)
    if not norm <= bound * scale:
        raise Refused(Reason.NORM_BOUND, f"the norm is {norm:.6g}; allowed is {bound * scale:.6g} (limits.max_norm)")


def _most_of_one(group: Group) -> int:
    """How many updates of one member are in it: each of them weighs as much as all of them (``merge.plan``)."""
    return max(Counter(i.node for i in group.ids).values())


def _still_in_time(update: Update, standing: Standing) -> None:
    for check in (_run_goes_on, _kind_is_taken, _not_stale):
        check(update.header, standing)


UpdateCheck = Callable[[Update, Standing], None]
COMPLETE: tuple[UpdateCheck, ...] = (_has_weight, _norm_is_bounded, _still_in_time)


def check_complete(update: Update, standing: Standing) -> None:
    """All of ``COMPLETE``; raises ``Refused``."""
    for check in COMPLETE:
        check(update, standing)


def check_not_stale(header: UpdateHeader, standing: Standing) -> None:
    """What a merge that began while an update was made durable can have changed. Raises ``Refused(STALE)``."""
    _not_stale(header, standing)
