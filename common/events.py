"""What goes into the aggregator (events), what it answers (replies) and what it asks its driver to do (effects).

The aggregator reads no clock, opens no file and no socket. A driver hands it events with the time they happened at, sends its
``Reply`` to whoever asked, and carries out the other effects; ``Persist``, ``Found`` and ``Merge`` touch the disk and come back
as ``Persisted`` and ``Published``. Join, Heartbeat, Leave and Offer get exactly one ``Reply``; the rest get none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

from fleetddp.common.errors import Reason, Refused
from fleetddp.common.update import NO_VERSION, Interval, Receipt, Slice, Tier, Update, UpdateHeader, UpdateId, Version

# ---- events ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A member enters, or comes back. A higher incarnation than before replaces the older process."""

    node: str
    tier: Tier
    incarnation: int
    run: str = ""  # the run it believes in; empty: any
    layout: str = ""  # fingerprint; empty: it does not know yet
    leaves: int = 1  # of a region: how many leaf members stand behind it; else without meaning
    open: tuple[UpdateId, ...] = ()  # updates it has not seen settled; each gets a receipt in the reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A member is alive: extends its lease, reports metrics, asks about its open updates."""

    node: str
    incarnation: int
    base_version: int = NO_VERSION  # what it is training from
    open: tuple[UpdateId, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_version: int = NO_VERSION  # the version that ``metrics`` were evaluated on; NO_VERSION: of its training
    leaves: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A member goes for good; windows no longer expect it."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A stream of an update was opened: may it send?"""

    header: UpdateHeader
    slice: Slice
    run: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """Bytes of an incomplete update arrived (the driver may thin these out to one a second)."""

    update_id: UpdateId


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceStaged:
    """One slice arrived whole and passed its checks (size, checksum, finite). ``squared_norm`` is of its parameters."""

    update_id: UpdateId
    slice: Slice
    squared_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRejected:
    """A stream broke a rule: the whole update is refused (unless the refusal is one that a retry can mend)."""

    update_id: UpdateId
    slice: Slice
    refusal: Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Persisted:
    """An update is durable (its payload and its journal row)."""

    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed:
    """The disk refused an update."""

    update: Update
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version is durable and may be served."""

    version: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed; nothing else happened."""


Event = Union[Join, Heartbeat, Leave, Offer, Progressed, SliceStaged, SliceRejected, Persisted, PersistFailed, Published, Tick]

# ---- replies --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Answer to ``Join``: what a member needs to know to take part."""

    run: str
    version: int  # newest published, or NO_VERSION
    layout: str  # fingerprint, or empty before the first weights
    wants_init: bool  # no weights yet: a site with ``bootstrap: site`` uploads an ``init``
    heartbeat_s: float
    lease_s: float
    gradient_lr: float
    max_staleness: int  # of the member's tier: an older update is refused, an older codec residual is dropped
    codecs: tuple[str, ...]  # what the parent decodes
    receipts: tuple[Receipt, ...] = ()
    finished: str = ""  # why the run is over; empty while it goes on


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Answer to ``Heartbeat``."""

    version: int
    closes_at: float  # when the window is expected to close (seconds since the epoch); 0: unknown
    receipts: tuple[Receipt, ...] = ()
    finished: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Answer to ``Leave``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proceed:
    """Answer to ``Offer``: send. (What of the slice is already staged, the staging area knows.)"""


# ---- effects --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to the event just handled. A ``Receipt`` answers an Offer of an update already known (a repeat)."""

    value: Union[Joined, Heard, Left, Proceed, Receipt, Refused]


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """All slices are staged: make the update durable, then report ``Persisted``."""

    update: Update
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Make version 0 from an ``init`` update that was persisted, then report ``Published``."""

    update: Update
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """How one update's row enters a merge. Coefficients are final: weight, discount, share and scale multiplied."""

    update_id: UpdateId
    row: int  # 0, or the group's index in a partial
    coefficient: float  # of the parameters; the outer gradient is sum(coefficient * u)
    buffer_coefficient: float  # of the buffers, whose mean is sum(buffer_coefficient * b) (all 0: no term carries buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What version ``version`` is made of. Journaled before merging; from then on the bytes are fixed."""

    version: int
    at: float
    terms: tuple[Term, ...]  # sorted by (update_id, row): the canonical order
    ids: tuple[UpdateId, ...]  # of the accepted updates merged (sorted)
    leaf_ids: tuple[UpdateId, ...]  # those they stand for
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Journal the decision, make the version, then report ``Published``. The next window opened at ``decision.at``."""

    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """These updates have a new state: wake the streams that wait for it and tell the watchers of their nodes.

    State UNKNOWN with a reason (STALLED, STORAGE, SUPERSEDED): what had arrived is forgotten, as if it had never been offered.
    """

    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Forget what is staged, or stored but unacknowledged, of this update."""

    update_id: UpdateId


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell every watcher: a version was published, or the run finished."""

    version: int
    finished: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The first window opened: journal its opening time (it survives a restart). Later ones open at a ``Decision``'s time."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The run is over: journal the reason (a restarted coordinator tells members FINISHED, it does not train on).

    Before the effects that follow it: an update that was said to have expired must not be merged after a crash.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """Send a ``Tick`` at this time, unless a later effect asks for an earlier one."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Something people want to know: the window's reason changed, an update was refused. To log and count."""

    what: str  # a word for the counter, e.g. "window", "refused", "joined", "lost"
    message: str
    node: str = ""
    reason: Reason | None = None  # of "refused"


Effect = Union[Reply, Persist, Found, Merge, Settle, Discard, Announce, Opened, Ended, Wake, Say]

# ---- news: what a Watch stream carries -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One message of a ``Watch`` stream."""

    version: int = NO_VERSION  # newest published
    receipts: tuple[Receipt, ...] = ()
    finished: str = ""
    closes_at: float = 0.0


ByteRange = Interval  # [start, stop) in a payload's bytes
