"""Open items on the wire: their messages to and from protobuf, and the state of a transfer of them.

``unpack_*`` holds each field to WIRE.md; ``pack_*`` trusts its caller (see ``wire``).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import ByteRange, Share
from fleetddp.common.open_items import NEVER, Catalogue, OpenItem, Shared
from fleetddp.common.transport import Sink, chunks, limits, wire
from fleetddp.common.transport.chunks import ChunkBytes
from fleetddp.common.transport.transfers import StallWatch, deliver, skip, total
from fleetddp.protos import fleet_pb2 as pb

# ---- messages ---------------------------------------------------------------------------------------------------------------


class ItemsAsk(NamedTuple):
    """What a child wants of the open items."""

    node: str
    pool: int
    known: int
    ranges: tuple[ByteRange, ...]


def pack_items_ask(node: str, pool: int, known: int, ranges: Sequence[ByteRange]) -> pb.ItemsRequest:
    """Byte ranges of items (none: only what there is)."""
    return pb.ItemsRequest(node=node, pool=pool, known=known, ranges=wire.pack_ranges(ranges))


def unpack_items_ask(message: pb.ItemsRequest) -> ItemsAsk:
    """Byte ranges of items, checked against everything but what there is."""
    return ItemsAsk(
        limits.node(message.node),
        limits.integer(message.pool, "pool"),
        limits.version(message.known, "known"),
        wire.unpack_ranges(message.ranges, "ranges"),
    )


def pack_catalogue(catalogue: Catalogue) -> pb.Catalogue:
    """What there is of open items."""
    return pb.Catalogue(
        pool=catalogue.pool,
        version=catalogue.version,
        shape=catalogue.shape,
        whole=catalogue.whole,
        items=[
            pb.OpenItem(
                slot=item.slot,
                digest=bytes.fromhex(item.digest),
                since=item.since,
                until=0 if item.until == NEVER else item.until,
                expires_at=item.expires_at,
            )
            for item in catalogue.items
        ],
        gone=catalogue.gone,
        at=catalogue.at,
    )


def unpack_catalogue(message: pb.Catalogue) -> Catalogue:
    """What there is of open items, checked."""
    for name, count in (("items", len(message.items)), ("gone", len(message.gone))):
        limits.count(count, name, limits.MAX_OPEN_ITEMS)
    return Catalogue(
        limits.integer(message.pool, "pool", 1),
        limits.version(message.version, "version"),
        _unpack_shape(message.shape),
        message.whole,
        tuple(_unpack_item(item) for item in message.items),
        tuple(_slot(slot) for slot in message.gone),
        limits.amount(message.at, "at"),
    )


def _unpack_item(message: pb.OpenItem) -> OpenItem:
    return OpenItem(
        _slot(message.slot),
        _unpack_digest(message.digest),
        limits.integer(message.since, "since", 0, limits.MAX_VERSION),
        limits.integer(message.until, "until", 0, limits.MAX_VERSION) or NEVER,
        limits.amount(message.expires_at, "expires_at"),
    )


def pack_share(share: Share) -> pb.ShareHeader:
    """The first request of an offer."""
    return pb.ShareHeader(
        run=share.run,
        node=share.node,
        incarnation=share.incarnation,
        of=share.of,
        shape=share.shape,
        digests=[bytes.fromhex(digest) for digest in share.digests],
    )


def unpack_share(message: pb.ShareHeader) -> Share:
    """The first request of an offer, checked."""
    return Share(
        run=limits.run(message.run),
        node=limits.node(message.node),
        incarnation=limits.integer(message.incarnation, "incarnation"),
        of=limits.node(message.of, "of"),
        shape=_unpack_shape(message.shape),
        digests=unpack_digests(message.digests),
    )


def pack_withdraw(share: Share) -> pb.WithdrawRequest:
    """Samples are taken back."""
    digests = [bytes.fromhex(digest) for digest in share.digests]
    return pb.WithdrawRequest(run=share.run, node=share.node, incarnation=share.incarnation, of=share.of, digests=digests)


def unpack_withdraw(message: pb.WithdrawRequest) -> Share:
    """Samples are taken back, checked."""
    return Share(
        run=limits.run(message.run),
        node=limits.node(message.node),
        incarnation=limits.integer(message.incarnation, "incarnation"),
        of=limits.node(message.of, "of"),
        digests=unpack_digests(message.digests),
        takes_back=True,
    )


def pack_wanted(digests: Sequence[str]) -> pb.ShareReply:
    """What is to be sent of an offer."""
    return pb.ShareReply(wanted=pb.Wanted(digests=[bytes.fromhex(digest) for digest in digests]))


def pack_shared(shared: Shared) -> pb.ShareReply:
    """What became of an offer."""
    known = [bytes.fromhex(digest) for digest in shared.known]
    return pb.ShareReply(shared=pb.Shared(known=known, room=min(shared.room, limits.MAX_OPEN_ITEMS)))


def unpack_shared(message: pb.Shared) -> Shared:
    """What became of an offer, checked."""
    return Shared(unpack_digests(message.known), limits.integer(message.room, "room", 0, limits.MAX_OPEN_ITEMS))


def unpack_digests(digests: Sequence[bytes]) -> tuple[str, ...]:
    """Of samples, in hex."""
    limits.count(len(digests), "digests", limits.MAX_OFFERED)
    found = tuple(_unpack_digest(digest) for digest in digests)
    if len(set(found)) != len(found):
        raise limits.malformed("digests", "one twice", "each once")
    return found


def _unpack_digest(digest: bytes) -> str:
    if len(digest) != 32:
        raise limits.malformed("digest", digest, "32 bytes")
    return digest.hex()


def _unpack_shape(shape: Sequence[int]) -> tuple[int, ...]:
    limits.count(len(shape), "shape", limits.MAX_AXES)
    return tuple(limits.integer(size, "shape", 1, limits.MAX_ITEM_BYTES) for size in shape)


def _slot(slot: int) -> int:
    return limits.integer(slot, "slot", 0, limits.MAX_OPEN_ITEMS - 1)


# ---- transfers --------------------------------------------------------------------------------------------------------------


class ItemsTransfer:
    """Byte ranges of open items on their way to a sink."""

    method = "PullItems"

    def __init__(self, node: str, pool: int, known: int, ranges: Sequence[ByteRange], sink: Sink) -> None:
        self.done = 0  # bytes given to the sink
        self.moved_at = time.monotonic()
        self.info: Catalogue | None = None
        self._node, self._pool, self._known, self._ranges, self._sink = node, pool, known, tuple(ranges), sink
        self._described = False

    def request(self) -> pb.ItemsRequest:
        """Ask for what is missing: the first message of an attempt."""
        self._described = False
        return pack_items_ask(self._node, self._pool, self._known, skip(self._ranges, self.done))

    @property
    def complete(self) -> bool:
        """Whether the sink has all that was asked for."""
        return self.info is not None and self.done == total(self._ranges)

    def take(self, reply: pb.ItemsReply | ChunkBytes) -> None:
        """Check one message and give its bytes to the sink. Raises ``Refused`` where it is not the one that is due."""
        if self._described and isinstance(reply, ChunkBytes):
            deliver(self, self._ranges, self._sink, chunks.checked(reply), "the open items")
            return
        if self._described or isinstance(reply, ChunkBytes) or not reply.HasField("items"):
            raise Refused(Reason.MALFORMED, "open items come as what there is of them, then chunks")
        info = unpack_catalogue(reply.items)
        if self._ranges and info.pool != self._pool:
            raise Refused(Reason.ITEM_GONE, f"the items asked for are of another pool than {info.pool}")
        self.info, self._described = info, True


class ShareAttempt:
    """One call of an offer: ``requests`` runs in grpc's sending thread, the rest in the caller's."""

    watch: StallWatch

    def __init__(self, header: pb.ShareHeader, data: Callable[[str], bytes]) -> None:
        self.header, self._data = header, data
        self._wanted: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()  # the answer to the header; none: the call is over

    def requests(self) -> Iterator[pb.ShareRequest | bytes]:
        """The header, then what is wanted, chunk by chunk."""
        yield pb.ShareRequest(header=self.header)
        at = 0
        for digest in self._wanted.get():
            data = self._data(digest)
            for start in range(0, len(data), limits.CHUNK_BYTES):
                piece = data[start : start + limits.CHUNK_BYTES]
                yield chunks.pack(at, piece)
                at += len(piece)
                self.watch.moved()
        self.watch.pause()  # what is made durable, or asked about further up, takes its time

    def take(self, reply: pb.ShareReply) -> Shared | None:
        """One answer: what became of it, or None while there is more to come."""
        if reply.WhichOneof("what") == "shared":
            return unpack_shared(reply.shared)
        wanted = unpack_digests(reply.wanted.digests)
        if not set(wanted) <= {digest.hex() for digest in self.header.digests}:
            raise Refused(Reason.MALFORMED, "samples are wanted that were not offered")
        self.watch.moved()
        self._wanted.put(wanted)
        return None

    def end(self) -> None:
        """The call is over: let the sending thread go."""
        self._wanted.put(())
