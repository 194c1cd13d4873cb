"""The server's calls about open items: what there is of them, what devices share, what they take back.

Its threads are its own: at a region they wait for the parent, and nobody who pulls a version is to wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from fleetddp.common.checksum import checksum
from fleetddp.common.driver import Driver
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import Proceed, Share
from fleetddp.common.item_pool import ItemPool
from fleetddp.common.open_items import ItemStore, Shared
from fleetddp.common.region_items import RegionItems
from fleetddp.common.transport import chunks, items, limits
from fleetddp.protos import fleet_pb2 as pb

T = TypeVar("T")

THREADS = 2
AT_ONCE = 16  # offers whose bytes are received at one time, in memory


class Desk(Protocol):
    """Who takes what devices share: a pool, or a region for its parent. May block."""

    @property
    def item_bytes(self) -> int:
        """Of one sample."""
        ...

    def wanted(self, offer: Share, most_bytes: int) -> tuple[str, ...]:
        """Of what is offered, what is to be sent now."""
        ...

    def take(self, offer: Share, found: Mapping[str, bytes]) -> Shared:
        """Keep these."""
        ...

    def withdraw(self, node: str, digests: Sequence[str]) -> int:
        """Erase what a node takes back; how many there were."""
        ...


class ItemCalls:
    """Of one server."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="fleet-items")
        self._sharing: set[tuple[Driver, str]] = set()

    def close(self) -> None:
        """Finish what is in hand."""
        self._threads.shutdown()

    async def share(self, driver: Driver, offer: Share, context: Any) -> None:
        """Take what is wanted of an offer."""
        driver.ask(offer, Proceed)
        desk = desk_of(driver)
        with self._alone(driver, offer.of):  # else one device could fill the memory
            wanted = await self._off_loop(desk.wanted, offer, limits.SHARE_BYTES)
            await context.write(items.pack_wanted(wanted))
            data = await self._receive(driver, context, len(wanted) * desk.item_bytes)
            size = desk.item_bytes
            found = {digest: bytes(data[place * size : (place + 1) * size]) for place, digest in enumerate(wanted)}
            shared = await self._off_loop(desk.take, offer, found)
        driver.keep_items()
        await context.write(items.pack_shared(shared))

    async def withdraw(self, driver: Driver, share: Share) -> pb.WithdrawReply:
        """Erase what is taken back."""
        driver.ask(share, Proceed)
        return pb.WithdrawReply(erased=await self._off_loop(desk_of(driver).withdraw, share.of, share.digests))

    async def _receive(self, driver: Driver, context: Any, size: int) -> bytearray:
        """So many bytes, in chunks, in order."""
        data, stall_s = bytearray(), driver.config.members.stall_s
        while True:
            try:
                request = await asyncio.wait_for(context.read(), stall_s)
            except asyncio.TimeoutError:
                raise Refused(Reason.STALLED, f"no byte of the samples came for {stall_s:g} s") from None
            if not request:  # the end of the stream is false
                break
            if not isinstance(request, chunks.ChunkBytes):
                raise Refused(Reason.MALFORMED, "after its header an offer holds nothing but chunks")
            offset, crc32c, piece = chunks.checked(request)
            if offset != len(data):
                raise Refused(Reason.OUT_OF_ORDER, f"bytes from {offset} came where those from {len(data)} are due")
            if len(data) + len(piece) > size:
                raise Refused(Reason.WRONG_SIZE, f"more than the {size} bytes of the samples that were wanted")
            if checksum(piece) != crc32c:
                raise Refused(Reason.BAD_CHECKSUM, f"bytes [{offset}, {offset + len(piece)}) of the samples")
            data += piece
            driver.telemetry.bytes_in(len(piece))
        if len(data) != size:
            raise Refused(Reason.TRUNCATED, f"{len(data)} bytes of the samples came; {size} are due")
        return data

    @contextlib.contextmanager
    def _alone(self, driver: Driver, node: str) -> Iterator[None]:
        key = (driver, node)
        if key in self._sharing:
            raise Refused(Reason.TOO_MANY, f"samples of {node} are arriving already")
        if len(self._sharing) >= AT_ONCE:
            raise Refused(Reason.TOO_MANY, f"samples of {AT_ONCE} nodes are arriving now")
        self._sharing.add(key)
        try:
            yield
        finally:
            self._sharing.discard(key)

    def _off_loop(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return self._loop.run_in_executor(self._threads, work, *args)


def store_of(driver: Driver) -> ItemStore:
    """A track's open items; ``Refused(NO_OPEN_ITEMS)`` if it has none."""
    if driver.items is None:
        raise Refused(Reason.NO_OPEN_ITEMS, "this track takes no samples of devices")
    return driver.items


def desk_of(driver: Driver) -> Desk:
    """Who takes what devices share with a track."""
    store = store_of(driver)
    assert isinstance(store, (ItemPool, RegionItems))
    return store
