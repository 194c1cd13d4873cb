"""The limits of the wire (WIRE.md §2) and the checks that hold a message to them.

Every check returns the value it was given, or raises ``Refused(MALFORMED)`` (``TOO_LARGE`` where a size is exceeded) naming the
field, what it held and what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from fleetddp.common.distill_config import MAX_ITEM_BYTES as MAX_ITEM_BYTES
from fleetddp.common.distill_config import MAX_OPEN_ITEMS as MAX_OPEN_ITEMS
from fleetddp.common.errors import Reason, Refused

CHUNK_BYTES = 512 * 1024  # payload bytes in one chunk
MESSAGE_BYTES = 1024 * 1024  # one message, packed
LAYOUT_BYTES = 960 * 1024  # a layout's JSON, so that it fits one message
MAX_INT = 2**63 - 1  # incarnations, sequences, offsets: what a signed 64-bit column holds
MAX_VERSION = 2**53  # versions and element offsets: exact in a double, so exact in JSON
MAX_IDS = 256  # open updates named in one join or heartbeat, receipts in one reply or news
MAX_ARRIVING = 4  # updates of one member that are not durable yet: it sends one after another, and is not to fill the disk
MAX_GROUPS = 1024  # rows of a partial
MAX_GROUP_IDS = 8192  # leaf updates named in one partial, all groups together
MAX_RANGES = 1024  # intervals of one stream, or byte ranges of one pull
MAX_METRICS = 64
MAX_WORD = 64  # characters of a codec spec, a metric's name
MAX_TEXT = 2000  # characters of a message for people
MAX_FRAGMENTS = 64  # that a layout is cut into
MAX_LEAVES = 1_000_000  # members behind one region
MAX_CODECS = 64
MAX_STEPS = 2**31 - 1
TENSOR_BYTES = 960 * 1024  # of a tensor's data, so that it fits one message
MAX_OFFERED = 256  # samples named in one offer, or taken back at once
SHARE_BYTES = 2**20  # of samples that are taken by one call, or one sample
MAX_ROWS = 4096  # samples of one request
MAX_AXES = 16  # dimensions of a tensor

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")
_WORD = re.compile(r"[!-~]+")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def malformed(field: str, value: object, allowed: str) -> Refused:
    """The refusal of one field."""
    return Refused(Reason.MALFORMED, f"{field} is {_shown(value)}; allowed: {allowed}")


def node(value: str, field: str = "node") -> str:
    """A node id or a run's name."""
    if not _NODE.fullmatch(value):
        raise malformed(field, value, "1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit")
    return value


def run(value: str, field: str = "run") -> str:
    """A run's name, or empty for any; or a track's, or empty for the only one."""
    return node(value, field) if value else value


def fingerprint(value: str) -> str:
    """A layout's fingerprint, or empty for none."""
    if value and not _FINGERPRINT.fullmatch(value):
        raise malformed("layout", value, "64 hexadecimal digits, or empty")
    return value


def word(value: str, field: str) -> str:
    """A codec spec or a metric's name: printable ASCII without spaces."""
    if len(value) > MAX_WORD or not _WORD.fullmatch(value):
        raise malformed(field, value, f"1 to {MAX_WORD} printable ASCII characters without spaces")
    return value


def text(value: str) -> str:
    """A message for people, cut to what the wire carries."""
    return value if len(value) <= MAX_TEXT else value[: MAX_TEXT - 3] + "..."


def integer(value: int, field: str, low: int = 0, high: int = MAX_INT) -> int:
    """A whole number in [low, high]."""
    if not low <= value <= high:
        raise malformed(field, value, f"{low} to {high}")
    return value


def version(value: int, field: str) -> int:
    """A version's number, or -1 for none."""
    return integer(value, field, -1, MAX_VERSION)


def amount(value: float, field: str) -> float:
    """A finite number that is not negative."""
    if not math.isfinite(value) or value < 0:
        raise malformed(field, value, "a finite number >= 0")
    return value


def count(length: int, field: str, high: int) -> None:
    """A list's length."""
    if length > high:
        raise malformed(field, f"a list of {length}", f"at most {high} entries")


def metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Names and finite values."""
    count(len(values), "metrics", MAX_METRICS)
    for key, value in values.items():
        word(key, "a metric's name")
        if not math.isfinite(value):
            raise malformed(f"metric {key!r}", value, "a finite number (leave it out otherwise)")
    return dict(values)


def size(length: int, field: str, high: int) -> None:
    """A number of bytes, at least one."""
    if length > high:
        raise Refused(Reason.TOO_LARGE, f"{field} holds {length} bytes; at most {high} are allowed")
    if not length:
        raise malformed(field, b"", f"1 to {high} bytes")
