"""Events, replies and value types to and from protobuf messages. ``unpack_*`` holds each field to WIRE.md.

``pack_*`` trusts its caller, except that it leaves out metrics that are not finite (a diverged member still has to be heard) and
cuts messages for people. Offers of updates are in ``offers``. Refusals travel as a gRPC status, the message as details and the
reason under ``REASON_KEY``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import ByteRange, Heard, Heartbeat, Join, Joined, Leave, News
from fleetddp.common.transport import limits
from fleetddp.common.update import Interval, ProxyInfo, Receipt, State, Tier, UpdateId, Version
from fleetddp.protos import fleet_pb2 as pb

REASON_KEY = "fleet-reason"  # trailing metadata: a Reason's value

TIERS = {Tier.SITE: pb.SITE, Tier.EDGE: pb.EDGE, Tier.REGION: pb.REGION}
_STATES = {
    State.STAGED: pb.STAGED,
    State.ACCEPTED: pb.ACCEPTED,
    State.MERGED: pb.MERGED,
    State.EXPIRED: pb.EXPIRED,
    State.REFUSED: pb.REFUSED,
    State.UNKNOWN: pb.UNKNOWN,
}
_TIER_OF: dict[int, Tier] = {number: tier for tier, number in TIERS.items()}
_STATE_OF = {number: state for state, number in _STATES.items()}


# ---- pieces ---------------------------------------------------------------------------------------------------------------


def pack_id(update_id: UpdateId) -> pb.UpdateId:
    """One update id."""
    return pb.UpdateId(node=update_id.node, incarnation=update_id.incarnation, sequence=update_id.sequence)


def unpack_id(message: pb.UpdateId) -> UpdateId:
    """One update id, checked."""
    return UpdateId(
        limits.node(message.node, "update_id.node"),
        limits.integer(message.incarnation, "update_id.incarnation"),
        limits.integer(message.sequence, "update_id.sequence"),
    )


def _unpack_ids(messages: Sequence[pb.UpdateId], field: str, high: int = limits.MAX_IDS) -> tuple[UpdateId, ...]:
    limits.count(len(messages), field, high)
    return tuple(unpack_id(m) for m in messages)


def pack_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that are finite."""
    return {key: float(value) for key, value in metrics.items() if math.isfinite(value)}


def pack_ranges(ranges: Iterable[Interval]) -> list[pb.Range]:
    """Intervals of elements or bytes."""
    return [pb.Range(start=start, stop=stop) for start, stop in ranges]


def unpack_ranges(messages: Sequence[pb.Range], field: str) -> tuple[Interval, ...]:
    """Intervals, checked: ascending, not empty, not overlapping."""
    limits.count(len(messages), field, limits.MAX_RANGES)
    ranges = tuple((m.start, m.stop) for m in messages)
    end = 0
    for start, stop in ranges:
        if not end <= start < stop <= limits.MAX_VERSION:
            raise limits.malformed(field, (start, stop), f"[start, stop) with {end} <= start < stop, ascending, not overlapping")
        end = stop
    return ranges


def unpack_tier(number: int) -> Tier:
    """A tier, checked."""
    if number not in _TIER_OF:
        raise limits.malformed("tier", number, "SITE, EDGE or REGION")
    return _TIER_OF[number]


def pack_receipt(receipt: Receipt) -> pb.Receipt:
    """One receipt."""
    return pb.Receipt(
        update_id=pack_id(receipt.update_id),
        state=_STATES[receipt.state],
        version=receipt.version,
        reason=receipt.reason,
        message=limits.text(receipt.message),
        duplicate=receipt.duplicate,
        overlap=[pack_id(i) for i in receipt.overlap],
    )


def unpack_receipt(message: pb.Receipt) -> Receipt:
    """One receipt, checked."""
    if message.state not in _STATE_OF:
        raise limits.malformed("receipt.state", message.state, "STAGED to UNKNOWN")
    return Receipt(
        update_id=unpack_id(message.update_id),
        state=_STATE_OF[message.state],
        version=limits.version(message.version, "receipt.version"),
        reason=message.reason,
        message=limits.text(message.message),
        duplicate=message.duplicate,
        overlap=_unpack_ids(message.overlap, "receipt.overlap", limits.MAX_GROUP_IDS),
    )


def _unpack_receipts(messages: Sequence[pb.Receipt]) -> tuple[Receipt, ...]:
    limits.count(len(messages), "receipts", limits.MAX_IDS)
    return tuple(unpack_receipt(m) for m in messages)


# ---- control calls --------------------------------------------------------------------------------------------------------


def pack_join(event: Join) -> pb.JoinRequest:
    """A member enters."""
    return pb.JoinRequest(
        node=event.node,
        tier=TIERS[event.tier],
        incarnation=event.incarnation,
        run=event.run,
        layout=event.layout,
        leaves=event.leaves,
        open=[pack_id(i) for i in event.open],
    )


def unpack_join(message: pb.JoinRequest) -> Join:
    """A member enters, checked."""
    return Join(
        node=limits.node(message.node),
        tier=unpack_tier(message.tier),
        incarnation=limits.integer(message.incarnation, "incarnation"),
        run=limits.run(message.run),
        layout=limits.fingerprint(message.layout),
        leaves=limits.integer(message.leaves, "leaves", 0, limits.MAX_LEAVES),
        open=_unpack_ids(message.open, "open"),
    )


def pack_joined(reply: Joined) -> pb.JoinReply:
    """The answer to a join."""
    return pb.JoinReply(
        run=reply.run,
        version=reply.version,
        layout=reply.layout,
        wants_init=reply.wants_init,
        heartbeat_s=reply.heartbeat_s,
        lease_s=reply.lease_s,
        gradient_lr=reply.gradient_lr,
        max_staleness=reply.max_staleness,
        codecs=reply.codecs,
        receipts=[pack_receipt(r) for r in reply.receipts],
        finished=limits.text(reply.finished),
        steps=reply.steps,
        fragments=reply.fragments if reply.fragments > 1 else 0,
    )


def unpack_joined(message: pb.JoinReply) -> Joined:
    """The answer to a join, checked."""
    limits.count(len(message.codecs), "codecs", limits.MAX_CODECS)
    return Joined(
        run=limits.node(message.run, "run"),
        version=limits.version(message.version, "version"),
        layout=limits.fingerprint(message.layout),
        wants_init=message.wants_init,
        heartbeat_s=limits.amount(message.heartbeat_s, "heartbeat_s"),
        lease_s=limits.amount(message.lease_s, "lease_s"),
        gradient_lr=limits.amount(message.gradient_lr, "gradient_lr"),
        max_staleness=message.max_staleness,
        codecs=tuple(limits.word(c, "codec") for c in message.codecs),
        receipts=_unpack_receipts(message.receipts),
        finished=limits.text(message.finished),
        steps=limits.integer(message.steps, "steps", 0, limits.MAX_STEPS),
        fragments=limits.integer(message.fragments, "fragments", 0, limits.MAX_FRAGMENTS) or 1,
    )


def pack_heartbeat(event: Heartbeat) -> pb.HeartbeatRequest:
    """A member is alive."""
    return pb.HeartbeatRequest(
        node=event.node,
        incarnation=event.incarnation,
        base_version=event.base_version,
        open=[pack_id(i) for i in event.open],
        metrics=pack_metrics(event.metrics),
        metrics_version=event.metrics_version,
        leaves=event.leaves,
    )


def unpack_heartbeat(message: pb.HeartbeatRequest) -> Heartbeat:
    """A member is alive, checked."""
    return Heartbeat(
        node=limits.node(message.node),
        incarnation=limits.integer(message.incarnation, "incarnation"),
        base_version=limits.version(message.base_version, "base_version"),
        open=_unpack_ids(message.open, "open"),
        metrics=limits.metrics(message.metrics),
        metrics_version=limits.version(message.metrics_version, "metrics_version"),
        leaves=limits.integer(message.leaves, "leaves", 0, limits.MAX_LEAVES),
    )


def pack_heard(reply: Heard) -> pb.HeartbeatReply:
    """The answer to a heartbeat."""
    return pb.HeartbeatReply(
        version=reply.version,
        closes_at=reply.closes_at,
        receipts=[pack_receipt(r) for r in reply.receipts],
        finished=limits.text(reply.finished),
        steps=reply.steps,
    )


def unpack_heard(message: pb.HeartbeatReply) -> Heard:
    """The answer to a heartbeat, checked."""
    return Heard(
        version=limits.version(message.version, "version"),
        closes_at=limits.amount(message.closes_at, "closes_at"),
        receipts=_unpack_receipts(message.receipts),
        finished=limits.text(message.finished),
        steps=limits.integer(message.steps, "steps", 0, limits.MAX_STEPS),
    )


def pack_leave(node: str, incarnation: int) -> pb.LeaveRequest:
    """A member goes."""
    return pb.LeaveRequest(node=node, incarnation=incarnation)


def unpack_leave(message: pb.LeaveRequest) -> Leave:
    """A member goes, checked."""
    return Leave(node=limits.node(message.node), incarnation=limits.integer(message.incarnation, "incarnation"))


# ---- versions -------------------------------------------------------------------------------------------------------------


class PullAsk(NamedTuple):
    """What a child wants of a version; -1: the newest."""

    node: str
    version: int
    ranges: tuple[ByteRange, ...]


def pack_pull(node: str, version: int, ranges: Sequence[ByteRange]) -> pb.PullRequest:
    """Byte ranges of a version (none: all of it)."""
    return pb.PullRequest(node=node, version=version, ranges=pack_ranges(ranges))


def unpack_pull(message: pb.PullRequest) -> PullAsk:
    """Byte ranges of a version, checked against everything but its size."""
    return PullAsk(limits.node(message.node), limits.version(message.version, "version"), unpack_ranges(message.ranges, "ranges"))


def pack_version(version: Version) -> pb.VersionInfo:
    """A version's description."""
    return pb.VersionInfo(
        number=version.number,
        layout=version.layout,
        codec=version.codec,
        payload_bytes=version.payload_bytes,
        digest=version.digest,
        published_at=version.published_at,
        updates=version.updates,
        changed=version.changed,
        metrics=pack_metrics(version.metrics),
    )


def unpack_version(message: pb.VersionInfo) -> Version:
    """A version's description, checked."""
    return Version(
        number=limits.integer(message.number, "number", 0, limits.MAX_VERSION),
        layout=limits.fingerprint(message.layout),
        codec=limits.word(message.codec, "codec"),
        payload_bytes=limits.integer(message.payload_bytes, "payload_bytes"),
        digest=message.digest,
        published_at=limits.amount(message.published_at, "published_at"),
        updates=message.updates,
        changed=_unpack_changed(message.changed),
        metrics=limits.metrics(message.metrics),
    )


def _unpack_changed(numbers: Sequence[int]) -> tuple[int, ...]:
    limits.count(len(numbers), "changed", limits.MAX_FRAGMENTS)
    return tuple(limits.integer(number, "changed", 0, limits.MAX_VERSION) for number in numbers)


class ProxyAsk(NamedTuple):
    """What a child wants of the file of a proxy set."""

    node: str
    ranges: tuple[ByteRange, ...]


def pack_proxy_ask(node: str, ranges: Sequence[ByteRange]) -> pb.ProxyRequest:
    """Byte ranges of the file (none: only what it is)."""
    return pb.ProxyRequest(node=node, ranges=pack_ranges(ranges))


def unpack_proxy_ask(message: pb.ProxyRequest) -> ProxyAsk:
    """Byte ranges of the file, checked against everything but its size."""
    return ProxyAsk(limits.node(message.node), unpack_ranges(message.ranges, "ranges"))


def pack_proxy(info: ProxyInfo) -> pb.ProxyInfo:
    """What a proxy set's file is."""
    return pb.ProxyInfo(name=info.name, digest=info.digest, file_bytes=info.file_bytes)


def unpack_proxy(message: pb.ProxyInfo) -> ProxyInfo:
    """What a proxy set's file is, checked."""
    if not message.digest:
        raise limits.malformed("digest", "", "64 hexadecimal digits")
    return ProxyInfo(
        limits.node(message.name, "name"),
        limits.fingerprint(message.digest),
        limits.integer(message.file_bytes, "file_bytes"),
    )


# ---- news -----------------------------------------------------------------------------------------------------------------


def pack_news(news: News) -> pb.News:
    """One message of a watch."""
    return pb.News(
        version=news.version,
        receipts=[pack_receipt(r) for r in news.receipts],
        finished=limits.text(news.finished),
        closes_at=news.closes_at,
    )


def unpack_news(message: pb.News) -> News:
    """One message of a watch, checked."""
    return News(
        version=limits.version(message.version, "version"),
        receipts=_unpack_receipts(message.receipts),
        finished=limits.text(message.finished),
        closes_at=limits.amount(message.closes_at, "closes_at"),
    )


class WatchAsk(NamedTuple):
    """Whose news, and the newest version it knows of."""

    node: str
    incarnation: int
    after_version: int


def pack_watch(node: str, incarnation: int, after_version: int) -> pb.WatchRequest:
    """A member wants news."""
    return pb.WatchRequest(node=node, incarnation=incarnation, after_version=after_version)


def unpack_watch(message: pb.WatchRequest) -> WatchAsk:
    """A member wants news, checked."""
    return WatchAsk(
        limits.node(message.node),
        limits.integer(message.incarnation, "incarnation"),
        limits.version(message.after_version, "after_version"),
    )


def refusal(metadata: Iterable[tuple[str, str | bytes]] | None, details: str) -> Refused | None:
    """The ``Refused`` that a server sent with a call's trailing metadata; ``None`` when the call ended otherwise."""
    for key, value in metadata or ():
        if key == REASON_KEY:
            try:
                return Refused(Reason(value.decode() if isinstance(value, bytes) else value), details)
            except ValueError:
                return None
    return None
