"""What goes into the aggregator (events), what it answers (replies) and what it asks its driver to do (effects).

The aggregator reads no clock, opens no file and no socket. A driver hands it events with the time they happened at, sends its
``Reply`` to whoever asked, and carries out the other effects; ``Persist``, ``Found`` and ``Merge`` touch the disk and come back
as ``Persisted`` and ``Published``. Join, Heartbeat, Leave, Offer and Share get exactly one ``Reply``; the rest get none. Those of
a regional aggregator, which has a parent, are under a heading of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Union

from fleetddp.common.decision import Conclusion as Conclusion
from fleetddp.common.decision import Decision as Decision
from fleetddp.common.decision import Sealing as Sealing
from fleetddp.common.decision import Term as Term
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.layout import Layout
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
class Share:
    """Hard samples are offered as open items of the proxy set, or taken back: may this member?"""

    node: str
    incarnation: int
    of: str  # whose samples they are: through a region another than ``node``
    run: str = ""
    shape: tuple[int, ...] = ()  # of a sample
    digests: tuple[str, ...] = ()  # of those offered; taken back are these, or all where none is named
    takes_back: bool = False


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


# ---- events of a region, from above and from its disk ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """The parent has let the region in (each time): its rules are the region's."""

    joined: Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A heartbeat's answer, or news. ``finished`` is told after the receipts of all that was open."""

    version: int
    closes_at: float = 0.0
    finished: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The parent's receipt of a partial, or of a leaf update that was asked about. ``push_s``: how long sending it took."""

    receipt: Receipt
    push_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PushFailed:
    """A partial could not be delivered now."""

    update_id: UpdateId


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version of the parent's is durable here, as it is, and may be served. ``layout``: the run's."""

    version: Version
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchFailed:
    """A version could not be brought here now."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A partial is durable: it may be pushed."""

    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """What became of a partial, or of single updates, is durable."""

    conclusion: Conclusion


Event = Union[
    Join, Heartbeat, Leave, Offer, Share, Progressed, SliceStaged, SliceRejected, Persisted, PersistFailed, Published, Tick,
    Enrolled, Told, Answered, PushFailed, Fetched, FetchFailed, Sealed, Concluded,
]  # fmt: skip

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
    fragments: int = 1  # that the run's layout is cut into; an update covers one of them, or all
    steps: int = 0  # for its next unit of work; 0: as its own settings say


class Heard(NamedTuple):
    """Answer to ``Heartbeat``. Most of what an aggregator makes is this and ``Reply``: a tuple is made in a third of the time."""

    version: int
    closes_at: float  # when the window is expected to close (seconds since the epoch); 0: unknown
    receipts: tuple[Receipt, ...] = ()
    finished: str = ""
    steps: int = 0  # as in ``Joined``


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Answer to ``Leave``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proceed:
    """Answer to ``Offer``: send (what of the slice is already staged, the staging area knows); to ``Share``: it may."""


# ---- effects --------------------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
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


# ---- effects of a region -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Journal the sealing, make the partial durable, then report ``Sealed``. The next window opened at ``sealing.at``."""

    sealing: Sealing


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Push a sealed partial to the parent, then report ``Answered`` or ``PushFailed``."""

    update: Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclude:
    """Make the end of updates durable, then report ``Concluded``."""

    conclusion: Conclusion


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Bring this version here and make it durable, then report ``Fetched`` or ``FetchFailed``."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """From now on ask the parent about these; it answers by ``Answered``."""

    ids: tuple[UpdateId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Journal what the parent said at a join: a region that is started while its parent is away goes by it."""

    joined: Joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Tell the parent, by and by: what the members train from, and how many leaf members there are."""

    version: int
    leaves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Tell the parent what a member measured on a version."""

    metrics: Mapping[str, float]
    version: int


Effect = Union[
    Reply, Persist, Found, Merge, Settle, Discard, Announce, Opened, Ended, Wake, Say,
    Seal, Push, Conclude, Fetch, Ask, Rules, Stand, Report,
]  # fmt: skip

# ---- news: what a Watch stream carries -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One message of a ``Watch`` stream."""

    version: int = NO_VERSION  # newest published
    receipts: tuple[Receipt, ...] = ()
    finished: str = ""
    closes_at: float = 0.0


ByteRange = Interval  # [start, stop) in a payload's bytes
