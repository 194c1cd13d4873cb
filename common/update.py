"""The frozen value types that travel: identities, updates, versions and receipts.

An *update* is what one member computed from a ``base_version``. It may arrive in several *streams* (one for each rank of a
site), each carrying a ``Slice``: some element intervals of the layout, their samples and the digest of their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

Interval = tuple[int, int]  # [start, stop), in elements or in bytes as named
NO_VERSION = -1  # "no version yet": the run waits for its first weights


class Tier(str, Enum):
    """Where a member stands. A partial's own tier is ``region``; its groups name the leaf tiers."""

    SITE = "site"
    EDGE = "edge"
    REGION = "region"


class Kind(str, Enum):
    """What an update holds (design §2)."""

    INIT = "init"  # the first weights; the first one wins
    DELTA = "delta"  # outer gradient = base - local, after local steps
    GRADIENT = "gradient"  # mean local gradient at base
    LOGITS = "logits"  # soft labels on the shared proxy set
    PARTIAL = "partial"  # a region's weighted sums of its children's updates


class UpdateId(NamedTuple):
    """(node, incarnation, sequence). Sorting these is the canonical order of a merge."""

    node: str
    incarnation: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.node}/{self.incarnation}/{self.sequence}"

    @classmethod
    def parse(cls, text: str) -> UpdateId:
        """The inverse of ``str``; a node name holds no slash (WIRE.md)."""
        node, incarnation, sequence = text.split("/")
        return cls(node, int(incarnation), int(sequence))


@dataclass(frozen=True, slots=True)
class Fragment:
    """One of the ``count`` runs of blocks that a layout is cut into (``fragments.py``)."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"fragment {self.index} of {self.count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One row of a partial: sum(w u) over leaf updates of one tier on one base version.

    ``buffer_samples`` is the sum of w over those that carried buffers (a ``gradient`` carries none).
    """

    tier: Tier
    base_version: int
    samples: float
    buffer_samples: float
    ids: tuple[UpdateId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateHeader:
    """What is known of an update before its bytes; the same on each of its streams."""

    update_id: UpdateId
    kind: Kind
    tier: Tier
    base_version: int
    codec: str  # spec of the codec of the parameters, e.g. "int8" or "topk:0.03"; buffers are always float32
    layout: str  # fingerprint
    steps: int = 1  # local optimizer steps it stands for
    seconds: float = 0.0  # time the member spent computing it
    metrics: Mapping[str, float] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()  # of a partial, else empty
    fragment: Fragment | None = None  # all that it covers; None: the whole layout
    covers: tuple[Interval, ...] = ()  # of logits, else empty: the elements that it covers, whole rows (``labels.py``)
    layout_spec: bytes = b""  # of an init: Layout.to_json(), so that the coordinator learns the layout

    @property
    def rows(self) -> int:
        """How many vectors of the layout the payload holds: one, or one for each group of a partial."""
        return len(self.groups) or 1

    @property
    def leaf_ids(self) -> tuple[UpdateId, ...]:
        """The ids of the leaf updates this one stands for (itself, unless it is a partial)."""
        if self.kind is not Kind.PARTIAL:
            return (self.update_id,)
        return tuple(i for g in self.groups for i in g.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What one stream carries of an update.

    ``intervals`` are element intervals in the payload's element space: row r of a partial starts at r * layout.elements.
    A slice starts at a multiple of 512 within its section and stops at another, or at the section's end.
    """

    intervals: tuple[Interval, ...]
    samples: float  # samples (or tokens) behind this stream; the aggregator adds them up
    digest: int  # CRC32C of the stream's bytes, in the order of the intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A complete, checked update: its header and what its streams added up to."""

    header: UpdateHeader
    samples: float
    squared_norm: float  # of the decoded parameters, all streams together
    payload_bytes: int
    slices: tuple[Slice, ...]  # sorted by first interval

    @property
    def update_id(self) -> UpdateId:
        """Its identity."""
        return self.header.update_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What is known of a published version besides its bytes."""

    number: int
    layout: str
    codec: str  # of the published parameters
    payload_bytes: int  # of the published payload
    digest: int  # CRC32C of the published payload
    published_at: float
    updates: int = 0  # leaf updates merged into it
    changed: tuple[int, ...] = ()  # for each fragment the last version that changed it; empty where the layout is not cut
    metrics: Mapping[str, float] = field(default_factory=dict)  # weighted means of what members reported


class ProxyInfo(NamedTuple):
    """What the file of a proxy set is."""

    name: str
    digest: str  # of its items (``ProxySet.digest``), not of its bytes
    file_bytes: int


class State(str, Enum):
    """Where an offered update stands."""

    STAGED = "staged"  # arriving; nothing promised
    ACCEPTED = "accepted"  # durable: the sender may stop sending, not forget
    MERGED = "merged"  # in version ``version``
    EXPIRED = "expired"  # accepted below, too stale by the time it reached the root
    REFUSED = "refused"  # never accepted; ``reason`` says why
    UNKNOWN = "unknown"  # never heard of it: the sender pushes (again)

    @property
    def final(self) -> bool:
        """Whether the sender may forget the update now."""
        return self in (State.MERGED, State.EXPIRED, State.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """The parent's answer about one update."""

    update_id: UpdateId
    state: State
    version: int = NO_VERSION  # of MERGED: the version it is in
    reason: str = ""  # of REFUSED: a Reason's value
    message: str = ""
    duplicate: bool = False  # this push was a repeat; settled before
    overlap: tuple[UpdateId, ...] = ()  # of a partial refused with OVERLAP or STALE: the ids to leave out
