"""The first request of a push, to and from protobuf: an update's header and what one stream carries of it.

``unpack`` holds each field to WIRE.md; ``pack`` trusts its caller (see ``wire``).
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetddp.common.events import Offer
from fleetddp.common.transport import limits, wire
from fleetddp.common.update import Fragment, Group, Interval, Kind, Slice, Tier, UpdateHeader
from fleetddp.protos import fleet_pb2 as pb

_KINDS = {Kind.INIT: pb.INIT, Kind.DELTA: pb.DELTA, Kind.GRADIENT: pb.GRADIENT, Kind.LOGITS: pb.LOGITS, Kind.PARTIAL: pb.PARTIAL}
_KIND_OF = {number: kind for kind, number in _KINDS.items()}


def pack(offer: Offer) -> pb.PushHeader:
    """The first request of a push."""
    header, part = offer.header, offer.slice
    return pb.PushHeader(
        run=offer.run,
        update_id=wire.pack_id(header.update_id),
        kind=_KINDS[header.kind],
        tier=wire.TIERS[header.tier],
        base_version=header.base_version,
        codec=header.codec,
        layout=header.layout,
        steps=header.steps,
        seconds=header.seconds,
        metrics=wire.pack_metrics(header.metrics),
        groups=[_pack_group(g) for g in header.groups],
        fragment=None if header.fragment is None else pb.Fragment(index=header.fragment.index, count=header.fragment.count),
        layout_spec=header.layout_spec,
        covers=wire.pack_ranges(header.covers),
        intervals=wire.pack_ranges(part.intervals),
        samples=part.samples,
        digest=part.digest,
    )


def unpack(message: pb.PushHeader) -> Offer:
    """The first request of a push, checked. Samples are the aggregator's to judge (``BAD_WEIGHT``)."""
    if message.kind not in _KIND_OF:
        raise limits.malformed("kind", message.kind, "INIT, DELTA, GRADIENT, LOGITS or PARTIAL")
    kind = _KIND_OF[message.kind]
    if not message.intervals:
        raise limits.malformed("intervals", [], "at least one interval")
    header = UpdateHeader(
        update_id=wire.unpack_id(message.update_id),
        kind=kind,
        tier=wire.unpack_tier(message.tier),
        base_version=message.base_version,
        codec=limits.word(message.codec, "codec"),
        layout=limits.fingerprint(message.layout),
        steps=limits.integer(message.steps, "steps", 0, limits.MAX_STEPS),
        seconds=limits.amount(message.seconds, "seconds"),
        metrics=limits.metrics(message.metrics),
        groups=_unpack_groups(message.groups, kind),
        fragment=_unpack_fragment(message.fragment) if message.HasField("fragment") else None,
        layout_spec=_unpack_layout_spec(message.layout_spec, kind),
        covers=_unpack_covers(message.covers, kind),
    )
    part = Slice(intervals=wire.unpack_ranges(message.intervals, "intervals"), samples=message.samples, digest=message.digest)
    return Offer(header=header, slice=part, run=limits.run(message.run))


def _pack_group(group: Group) -> pb.Group:
    return pb.Group(
        tier=wire.TIERS[group.tier],
        base_version=group.base_version,
        samples=group.samples,
        buffer_samples=group.buffer_samples,
        ids=[wire.pack_id(i) for i in group.ids],
    )


def _unpack_leaf_tier(number: int) -> Tier:
    tier = wire.unpack_tier(number)
    if tier is Tier.REGION:
        raise limits.malformed("group.tier", "REGION", "SITE or EDGE: groups name the leaf tiers")
    return tier


def _unpack_groups(messages: Sequence[pb.Group], kind: Kind) -> tuple[Group, ...]:
    if bool(messages) != (kind is Kind.PARTIAL):
        raise limits.malformed("groups", f"a list of {len(messages)} for kind {kind.value}", "some of a partial, none otherwise")
    limits.count(len(messages), "groups", limits.MAX_GROUPS)
    limits.count(sum(len(m.ids) for m in messages), "the groups' ids", limits.MAX_GROUP_IDS)
    return tuple(
        Group(
            tier=_unpack_leaf_tier(m.tier),
            base_version=limits.version(m.base_version, "group.base_version"),
            samples=limits.amount(m.samples, "group.samples"),
            buffer_samples=limits.amount(m.buffer_samples, "group.buffer_samples"),
            ids=tuple(wire.unpack_id(i) for i in m.ids),
        )
        for m in messages
    )


def _unpack_fragment(message: pb.Fragment) -> Fragment:
    count = limits.integer(message.count, "fragment.count", 1, limits.MAX_FRAGMENTS)
    return Fragment(limits.integer(message.index, "fragment.index", 0, count - 1), count)


def _unpack_covers(messages: Sequence[pb.Range], kind: Kind) -> tuple[Interval, ...]:
    if messages and kind is not Kind.LOGITS:
        raise limits.malformed("covers", f"a list of {len(messages)} for kind {kind.value}", "some of logits, none otherwise")
    return wire.unpack_ranges(messages, "covers")


def _unpack_layout_spec(data: bytes, kind: Kind) -> bytes:
    if bool(data) != (kind is Kind.INIT):
        raise limits.malformed("layout_spec", f"{len(data)} bytes for kind {kind.value}", "some of an init, none otherwise")
    if data:
        limits.size(len(data), "layout_spec", limits.LAYOUT_BYTES)
    return data
