"""How the ranks of a site agree while the network is awaited: through the c10d store, in short polls, never in a collective.

Rank 0 writes numbered *orders*, every other rank reads the same orders and carries them out. Ranks report back by *tallies* that
rank 0 polls. A wait on a store blocks every other call of the same client: each thread uses a clone of its own, and none waits.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from fleetddp.common.errors import ConfigError
from fleetddp.common.update import NO_VERSION

SIGN_S = 5.0  # between two signs of life of a rank that waits for an order

Do = Literal["init", "push", "again", "move", "pull", "adopt", "go", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What rank 0 tells all ranks, itself included.

    ``init``: push your slice of the first weights, as update ``number``. ``push``: that of what you have learnt of ``fragment``.
    ``again``: push your slice of update ``number`` once more. ``move``: ``address`` is the parent from now on.
    ``pull``: fetch your slice of ``version``: of the fragments that have changed since yours, or of all (``whole``). ``adopt``:
    gather the slices of the ``fragments`` of ``version`` and load them; what was learnt since the last update is lost if
    ``dropped``, added if ``carry``; the codec's residual is too old to be sent if ``forget``. ``go``: train on; the run is over
    if ``finished`` says why; updates other than ``open`` need not be kept. ``fail``: raise.
    """

    do: Do
    version: int = NO_VERSION
    number: int = 0  # of an update: its sequence; of a pull: tells it from a repeated one
    fragment: int = 0
    fragments: tuple[int, ...] = (0,)
    whole: bool = False
    codec: str = ""  # of adopt: what the version is published in
    dropped: bool = False
    carry: bool = False
    forget: bool = False
    address: str = ""
    open: tuple[int, ...] = ()
    run: str = ""  # of go: the run that the site is in
    finished: str = ""
    reason: str = ""  # of fail: a Reason's value, if the parent refused
    message: str = ""
    gave_up: bool = False  # no parent was found


class Store(Protocol):
    """What we use of a ``torch.distributed.Store``; torch's stub lacks ``clone``."""

    def set(self, key: str, value: str) -> None: ...  # noqa: D102
    def get(self, key: str) -> bytes: ...  # noqa: D102
    def add(self, key: str, value: int) -> int: ...  # noqa: D102
    def check(self, keys: list[str]) -> bool: ...  # noqa: D102
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...  # noqa: D102
    def delete_key(self, key: str) -> bool: ...  # noqa: D102
    def clone(self) -> Store: ...  # noqa: D102


class Rendezvous:
    """One thread's view of a store. ``clone`` makes another thread's."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def of(cls, group: dist.ProcessGroup, prefix: str) -> Rendezvous:
        """Over the store that ``group`` was formed by, which torch gives no public name."""
        store: Any = dist.PrefixStore(prefix, dist.distributed_c10d._get_process_group_store(group))  # type: ignore[attr-defined]
        if not hasattr(store, "clone"):
            raise ConfigError(f"a site needs torch 2.8 or newer (Store.clone); this is torch {torch.__version__}")
        return cls(store.clone())

    def clone(self) -> Rendezvous:
        """The same store through a client of its own."""
        return Rendezvous(self._store.clone())

    def give(self, place: int, order: Order) -> None:
        """Write the order at ``place``: 0, 1, ..."""
        self._store.set(f"order/{place}", json.dumps(asdict(order)))

    def await_order(self, place: int, rank: int) -> Order:
        """The order at ``place``, as soon as it is there. Until then ``rank`` gives signs of life."""
        key, sign_at = f"order/{place}", SIGN_S
        for waited_s in polls():
            if self._store.check([key]):
                break
            if waited_s >= sign_at:
                self.report(f"alive/{rank}")
                sign_at = waited_s + SIGN_S
        fields: dict[str, Any] = json.loads(self._store.get(key))
        return Order(**{**fields, "fragments": tuple(fields["fragments"]), "open": tuple(fields["open"])})

    def forget(self, places: range) -> None:
        """Delete these orders; every rank must have carried them out."""
        for place in places:
            self._store.delete_key(f"order/{place}")

    def report(self, tally: str) -> None:
        """Add one to a tally."""
        self._store.add(tally, 1)

    def tally(self, tally: str) -> int:
        """How many ranks have reported so far."""
        return self._store.add(tally, 0)

    def signs(self, rank: int) -> int:
        """How many signs of life this rank has given."""
        return self.tally(f"alive/{rank}")

    def drop(self, *tallies: str) -> None:
        """Delete tallies that nobody reads any more."""
        for tally in tallies:
            self._store.delete_key(tally)

    def fail(self, reason: str, message: str) -> None:
        """Leave word of a failure that ends training; the first one is kept."""
        self._store.compare_set("failed", "", json.dumps([reason, message]))

    def failure(self) -> tuple[str, str] | None:
        """The (reason, message) that some rank left."""
        if not self._store.check(["failed"]):
            return None
        reason, message = json.loads(self._store.get("failed"))
        return str(reason), str(message)


def polls(longest_s: float = 0.05, bell: threading.Event | None = None) -> Iterator[float]:
    """Yield the seconds waited so far, first at once, then after pauses: 2 ms at first, later 3 % of the time waited.

    What is waited for is thus seen little later than it is there. No pause is longer than ``longest_s``; one that rings
    the ``bell`` cuts it short.
    """
    begun = time.monotonic()
    waited_s = 0.0
    while True:
        yield waited_s
        pause_s = min(max(0.002, 0.03 * waited_s), longest_s)
        if bell is None:
            time.sleep(pause_s)
        else:
            bell.wait(pause_s)
            bell.clear()
        waited_s = time.monotonic() - begun
