"""How children and parents talk: one interface, ``Parent``, over gRPC (``uplink``) or in memory (``memory``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from fleetddp.common.errors import Reason
from fleetddp.common.events import ByteRange, Heard, Heartbeat, Join, Joined, News, Share
from fleetddp.common.layout import Layout
from fleetddp.common.open_items import Catalogue, Shared
from fleetddp.common.update import ProxyInfo, Receipt, Slice, UpdateHeader, Version

Sink = Callable[[int, memoryview], None]  # (offset in the version's payload, bytes): where pulled chunks go

# A push refused for one of these says nothing about the update: the member must act (join, stop, be let in) and can then push it.
MEMBER_REASONS = frozenset({Reason.UNKNOWN_NODE, Reason.WRONG_IDENTITY, Reason.WRONG_RUN, Reason.WRONG_TRACK, Reason.SUPERSEDED})


class Parent(Protocol):
    """What a child needs of its parent, whatever carries it.

    Every method raises ``Refused`` when the parent says no and ``Unreachable`` when it cannot be asked; ``join``, ``heartbeat``,
    ``leave``, ``layout`` and ``status`` are single attempts, ``pull`` and ``push`` retry and resume by themselves while
    progress is made. All block the calling thread, may be called from several threads, and return at once with
    ``Unreachable`` after ``close``.
    """

    def join(self, request: Join) -> Joined:
        """Enter the fleet."""
        ...

    def heartbeat(self, request: Heartbeat) -> Heard:
        """Extend the lease; hear about open updates."""
        ...

    def leave(self, node: str, incarnation: int) -> None:
        """Go for good."""
        ...

    def layout(self) -> Layout:
        """The run's layout; ``Refused(NO_VERSION)`` before the first weights."""
        ...

    def pull(self, version: int, ranges: Sequence[ByteRange], sink: Sink) -> Version:
        """Bring byte ranges of a version's published payload (none: all of it) to ``sink``, each byte once, checked.

        The ranges ascend and do not overlap. ``Refused(BAD_CHECKSUM)`` after the last byte: the payload as a whole is damaged.
        """
        ...

    def pull_proxy(self, ranges: Sequence[ByteRange], sink: Sink) -> ProxyInfo:
        """Bring byte ranges of the file of the track's proxy set to ``sink``; none: only what it is. See ``shelf.bring``."""
        ...

    def pull_items(self, pool: int, known: int, ranges: Sequence[ByteRange], sink: Sink) -> Catalogue:
        """What changed since version ``known`` of ``pool``; byte ranges of items go to ``sink``. See ``open_items.bring``."""
        ...

    def share(self, offer: Share, data: Callable[[str], bytes]) -> Shared:
        """Offer samples as open items, and send what is wanted of them (``data``: a sample's little-endian float32, by digest).

        Not all need be wanted at once: what is not ``known`` afterwards is offered again, as long as there is ``room``.
        """
        ...

    def withdraw(self, share: Share) -> int:
        """Take back what was shared; how many samples were erased."""
        ...

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        """Send one stream of an update; returns when the update is accepted, settled or refused.

        ``payload`` holds the encoded bytes of the slice's intervals, one after another. A refusal of the update for good is
        *returned* as a receipt of state ``REFUSED``; raised are those that a retry can mend and ``MEMBER_REASONS``. A repeat is
        answered with the receipt of the update as it stands, ``duplicate`` set.
        """
        ...

    def watch(self, node: str, incarnation: int, after_version: int) -> Iterator[News]:
        """News as they come, until the stream breaks (``Unreachable``) or the parent is closed."""
        ...

    def status(self) -> dict[str, Any]:
        """What ``fleetddp status`` shows."""
        ...

    def close(self) -> None:
        """Drop the connection; calls in flight end with ``Unreachable``."""
        ...


class Roaming(Parent):
    """A ``Parent`` that is one of several, by address: another when the one before is gone."""

    @property
    def address(self) -> str:
        """Of the parent that calls go to now."""
        raise NotImplementedError

    def stay(self) -> None:
        """From now on go to another parent only by ``go_to``: one rank of a site decides for all."""
        raise NotImplementedError

    def go_to(self, address: str) -> None:
        """Call this one of the parents from now on; calls to the one before end with ``Unreachable``."""
        raise NotImplementedError
