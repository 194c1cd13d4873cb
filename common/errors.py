"""Every error FleetDDP raises on purpose, as one small tree.

    FleetError
    ├── ConfigError      the fleet file or an argument is wrong; whoever wrote it must act        never retry
    ├── LayoutMismatch   this model is not the fleet's model; names the first differing tensor    never retry
    ├── StorageError     a disk refused (full, read-only); the machine's operator must act        retry when mended
    ├── Unreachable      the parent cannot be reached, or a transfer stalled                      retry with backoff
    │   ├── Late         no answer came by the deadline that the caller set                       retry if it still helps
    │   └── GaveUp       no parent has answered for so long that the member ends (``give_up_s``)  never retry
    └── Refused          the parent answered, and its answer is no: see ``Reason``                by reason

``REASONS`` gives each reason its gRPC status, who must act, and whether the *same* request can succeed later.
The server aborts a call with that status, the message as details and the reason in the trailing metadata
(``fleet-reason``); the uplink turns it back into the same ``Refused``.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class FleetError(Exception):
    """Base of all errors of this package."""


class ConfigError(FleetError, ValueError):
    """A setting is wrong. The message names the key and what is allowed."""


class LayoutMismatch(FleetError):
    """Two layouts differ. The message names the first differing tensor."""


class StorageError(FleetError):
    """A file could not be written or read durably."""


class Unreachable(FleetError):
    """The parent cannot be reached or the transfer stalled; the same call can be tried again."""


class Late(Unreachable):
    """No answer came by the caller's deadline; nothing is said about whether the request was carried out."""


class GaveUp(Unreachable):
    """No parent has answered for as long as the member was told to look for one. Its process ends with exit code 3."""


class Reason(str, Enum):
    """Why a parent refused. The value travels on the wire; never renumber or rename one."""

    STALE = "STALE"
    FUTURE_BASE = "FUTURE_BASE"
    WRONG_RUN = "WRONG_RUN"
    WRONG_LAYOUT = "WRONG_LAYOUT"
    WRONG_SIZE = "WRONG_SIZE"
    WRONG_INTERVALS = "WRONG_INTERVALS"
    WRONG_KIND = "WRONG_KIND"
    TOO_LARGE = "TOO_LARGE"
    TOO_MANY = "TOO_MANY"
    TRUNCATED = "TRUNCATED"
    OUT_OF_ORDER = "OUT_OF_ORDER"
    BAD_CHECKSUM = "BAD_CHECKSUM"
    NOT_FINITE = "NOT_FINITE"
    NORM_BOUND = "NORM_BOUND"
    BAD_WEIGHT = "BAD_WEIGHT"
    BAD_PROBABILITIES = "BAD_PROBABILITIES"
    UNKNOWN_CODEC = "UNKNOWN_CODEC"
    UNKNOWN_NODE = "UNKNOWN_NODE"
    UNKNOWN_VERSION = "UNKNOWN_VERSION"
    WRONG_IDENTITY = "WRONG_IDENTITY"
    ID_REUSED = "ID_REUSED"
    SUPERSEDED = "SUPERSEDED"
    OVERLAP = "OVERLAP"
    INIT_TAKEN = "INIT_TAKEN"
    NO_VERSION = "NO_VERSION"
    MALFORMED = "MALFORMED"
    STALLED = "STALLED"
    STORAGE = "STORAGE"
    FINISHED = "FINISHED"
    WRONG_TRACK = "WRONG_TRACK"
    WRONG_CLASSES = "WRONG_CLASSES"
    WRONG_ITEMS = "WRONG_ITEMS"
    NO_PROXY = "NO_PROXY"
    NO_OPEN_ITEMS = "NO_OPEN_ITEMS"
    NOT_PERMITTED = "NOT_PERMITTED"
    WRONG_SHAPE = "WRONG_SHAPE"
    WRONG_DIGEST = "WRONG_DIGEST"
    ITEMS_FULL = "ITEMS_FULL"
    ITEM_GONE = "ITEM_GONE"
    NO_PARENT = "NO_PARENT"
    OVERLOADED = "OVERLOADED"


class Rule(NamedTuple):
    """One row of ``REASONS``."""

    status: str  # name of a grpc.StatusCode
    retry: bool  # can the same request succeed later?
    action: str  # who must do what


REASONS: dict[Reason, Rule] = {
    Reason.STALE: Rule("FAILED_PRECONDITION", False, "the member pulls the newest version and trains from it"),
    Reason.FUTURE_BASE: Rule("OUT_OF_RANGE", False, "the member joins again; its base is of another run or a lost journal"),
    Reason.WRONG_RUN: Rule("FAILED_PRECONDITION", False, "the operator points the member at the right coordinator"),
    Reason.WRONG_LAYOUT: Rule("FAILED_PRECONDITION", False, "the operator gives the member the fleet's model"),
    Reason.WRONG_SIZE: Rule("INVALID_ARGUMENT", False, "the sender's developer: the payload is not of the declared size"),
    Reason.WRONG_INTERVALS: Rule("INVALID_ARGUMENT", False, "the sender's developer: intervals overlap or miss a block"),
    Reason.WRONG_KIND: Rule("INVALID_ARGUMENT", False, "the sender's developer: this kind is not taken here"),
    Reason.TOO_LARGE: Rule("RESOURCE_EXHAUSTED", False, "the sender keeps to the limits in WIRE.md"),
    Reason.TOO_MANY: Rule("RESOURCE_EXHAUSTED", True, "the sender finishes the updates that it has begun to send"),
    Reason.TRUNCATED: Rule("DATA_LOSS", True, "the sender pushes again from what the server holds"),
    Reason.OUT_OF_ORDER: Rule("INVALID_ARGUMENT", True, "the sender pushes again from what the server holds"),
    Reason.BAD_CHECKSUM: Rule("DATA_LOSS", True, "the sender pushes again; if it recurs, suspect its memory or network"),
    Reason.NOT_FINITE: Rule("INVALID_ARGUMENT", False, "the member drops it: its training diverged, or a sample is none"),
    Reason.NORM_BOUND: Rule("INVALID_ARGUMENT", False, "the member lowers its learning rate, or the operator the bound"),
    Reason.BAD_WEIGHT: Rule("INVALID_ARGUMENT", False, "the member: samples must be positive, finite and within the limit"),
    Reason.BAD_PROBABILITIES: Rule("INVALID_ARGUMENT", False, "the sender's developer: soft labels are >= 0 and sum to 1"),
    Reason.UNKNOWN_CODEC: Rule("UNIMPLEMENTED", False, "the operator picks a codec both ends have"),
    Reason.UNKNOWN_NODE: Rule("NOT_FOUND", True, "the member joins (again), then repeats the call"),
    Reason.UNKNOWN_VERSION: Rule("NOT_FOUND", False, "the member pulls the newest version"),
    Reason.WRONG_IDENTITY: Rule("PERMISSION_DENIED", False, "the operator issues a certificate for this node id"),
    Reason.ID_REUSED: Rule("ALREADY_EXISTS", False, "the sender's developer: one id, two payloads; use a new incarnation"),
    Reason.SUPERSEDED: Rule("ABORTED", False, "an older process of this node must stop; a newer one has joined"),
    Reason.OVERLAP: Rule("ABORTED", False, "the region seals again without the ids named"),
    Reason.INIT_TAKEN: Rule("ALREADY_EXISTS", False, "the site pulls version 0; another site was first"),
    Reason.NO_VERSION: Rule("UNAVAILABLE", True, "wait: no site has uploaded the first weights yet"),
    Reason.MALFORMED: Rule("INVALID_ARGUMENT", False, "the sender's developer: a field breaks a rule of WIRE.md"),
    Reason.STALLED: Rule("DEADLINE_EXCEEDED", True, "the sender pushes again; its network made no progress"),
    Reason.STORAGE: Rule("UNAVAILABLE", True, "the coordinator's operator frees or mends its disk"),
    Reason.FINISHED: Rule("FAILED_PRECONDITION", False, "nobody: the run has ended; the member leaves and exits 0"),
    Reason.WRONG_TRACK: Rule("FAILED_PRECONDITION", False, "the operator gives the member one of the run's tracks"),
    Reason.WRONG_CLASSES: Rule("INVALID_ARGUMENT", False, "the operator gives the member the task that the proxy set is of"),
    Reason.WRONG_ITEMS: Rule("INVALID_ARGUMENT", False, "the sender's developer: these are no rows of its tier in the proxy set"),
    Reason.NO_PROXY: Rule("NOT_FOUND", False, "the member brings the proxy set itself: the coordinator has no file of it"),
    Reason.NO_OPEN_ITEMS: Rule("FAILED_PRECONDITION", False, "the operator gives the proxy set room for samples (proxy.open)"),
    Reason.NOT_PERMITTED: Rule("PERMISSION_DENIED", False, "the operator names this node in proxy.open.allow"),
    Reason.WRONG_SHAPE: Rule("INVALID_ARGUMENT", False, "the device shares samples of the shape that the proxy set has"),
    Reason.WRONG_DIGEST: Rule("INVALID_ARGUMENT", False, "the sender's developer: a sample is not the one that was announced"),
    Reason.ITEMS_FULL: Rule("RESOURCE_EXHAUSTED", False, "the device keeps what it has; a new run may have more room"),
    Reason.ITEM_GONE: Rule("NOT_FOUND", False, "the member asks again which items there are"),
    Reason.NO_PARENT: Rule("UNAVAILABLE", True, "wait: the region cannot reach its parent, which must be asked about this"),
    Reason.OVERLOADED: Rule("RESOURCE_EXHAUSTED", True, "the caller answers by itself, or asks again later"),
}


class Refused(FleetError):
    """A request was answered with no.

    ``reason`` says why as a word, ``message`` what exactly was wrong; ``retry`` whether the same request can succeed later.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason.value}: {message} ({REASONS[reason].action})")
        self.reason = reason
        self.message = message

    @property
    def retry(self) -> bool:
        """Whether the same request can succeed later."""
        return REASONS[self.reason].retry

    @property
    def status(self) -> str:
        """Name of the gRPC status this refusal travels as."""
        return REASONS[self.reason].status
