"""Runs one regional aggregator: the driver with a parent above it, whatever carries the messages there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from fleetddp.common.clock import Clock
from fleetddp.common.driver import RETRY_MAX_S, Driver
from fleetddp.common.errors import Refused, Unreachable
from fleetddp.common.events import (
    Answered,
    Ask,
    Conclude,
    Concluded,
    Effect,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Push,
    PushFailed,
    Report,
    Rules,
    Seal,
    Sealed,
    Stand,
)
from fleetddp.common.host import Host, Lane
from fleetddp.common.layout import Layout
from fleetddp.common.open_items import ItemStore
from fleetddp.common.region_journal import RegionJournal
from fleetddp.common.regional import RegionalAggregator
from fleetddp.common.sealer import Sealer
from fleetddp.common.staging import Staging
from fleetddp.common.telemetry import Telemetry
from fleetddp.common.update import Receipt, Update, UpdateId, Version

T = TypeVar("T")


class Above(Protocol):
    """How a region reaches its parent. Nothing here blocks; ``done`` is called on the driver's thread.

    What the parent says by itself comes to ``Driver.handle`` as ``Enrolled``, ``Told`` and ``Answered``.
    """

    def push(
        self, update: Update, payload: Callable[[], bytes], done: Callable[[tuple[Receipt, float] | Exception], None]
    ) -> None:
        """Push a partial; ``done`` gets the receipt and the seconds it took."""
        ...

    def fetch(self, version: int, done: Callable[[tuple[Version, Layout] | Exception], None]) -> None:
        """Bring a version into the journal (``adopt``)."""
        ...

    def ask(self, ids: tuple[UpdateId, ...]) -> None:
        """From now on ask about these."""
        ...

    def stand(self, version: int, leaves: int) -> None:
        """What the members train from, and how many leaf members there are."""
        ...

    def report(self, metrics: Mapping[str, float], version: int) -> None:
        """What a member measured on a version."""
        ...


class RegionDriver(Driver):
    """``Driver`` for a ``RegionalAggregator``."""

    def __init__(
        self,
        aggregator: RegionalAggregator,
        staging: Staging,
        journal: RegionJournal,
        above: Above,
        *,
        clock: Clock,
        host: Host,
        telemetry: Telemetry,
        items: ItemStore | None = None,
    ) -> None:
        super().__init__(aggregator, staging, journal, None, clock=clock, host=host, telemetry=telemetry, items=items)
        self._partials = journal
        self._sealer = Sealer(journal)
        self._above = above
        self._others: dict[type, Callable[[Any], None]] = {
            Seal: self._seal,
            Conclude: self._conclude,
            Push: self._push,
            Fetch: self._fetch,
            Rules: lambda effect: self._write("the parent's rules", lambda: journal.rules(effect.joined)),
            Ask: lambda effect: above.ask(effect.ids),
            Stand: lambda effect: above.stand(effect.version, effect.leaves),
            Report: lambda effect: above.report(effect.metrics, effect.version),
        }

    def _carry_out(self, effect: Effect) -> None:
        other = self._others.get(type(effect))
        if other is not None:
            other(effect)
        else:
            super()._carry_out(effect)

    def _seal(self, effect: Seal) -> None:
        sealing = effect.sealing
        self._insist(f"partial {sealing.update_id}", lambda: self._sealer.seal(sealing), lambda update: Sealed(update=update))

    def _conclude(self, effect: Conclude) -> None:
        conclusion = effect.conclusion
        what = f"the end of {conclusion.partial}"
        self._insist(what, lambda: self._sealer.conclude(conclusion), lambda _: Concluded(conclusion=conclusion))

    def _insist(self, what: str, work: Callable[[], T], report: Callable[[T], Event], attempt: int = 0) -> None:
        """What is decided must be made durable: again and again if the disk refuses. In order, and beside acceptances."""

        def done(result: T | Exception) -> None:
            if isinstance(result, Exception):
                wait = min(RETRY_MAX_S, 2.0**attempt)
                self._failed(f"{what} could not be made durable; trying again in {wait:g} s", result)
                self._host.later(wait, lambda: self._insist(what, work, report, attempt + 1))
            else:
                self._report(report(result))

        if not self._stopped:
            self._host.submit(Lane.MERGE, work, done)

    def _push(self, effect: Push) -> None:
        update_id = effect.update.update_id

        def done(result: tuple[Receipt, float] | Exception) -> None:
            if isinstance(result, Exception):
                self._not_now(f"{update_id} cannot be delivered now", result)
                self._report(PushFailed(update_id=update_id))
            else:
                self._report(Answered(receipt=result[0], push_s=result[1]))

        self._above.push(effect.update, lambda: self._partials.partial_payload(update_id), done)

    def _fetch(self, effect: Fetch) -> None:
        def done(result: tuple[Version, Layout] | Exception) -> None:
            if isinstance(result, Exception):
                self._not_now(f"version {effect.version} cannot be fetched now", result)
                self._report(FetchFailed(version=effect.version))
            else:
                version, layout = result
                self._versions.append((version, ""))
                self.telemetry.published(version)
                self.keep_items()
                self._report(Fetched(version=version, layout=layout))

        self._above.fetch(effect.version, done)

    def _not_now(self, what: str, error: Exception) -> None:
        if isinstance(error, (Unreachable, Refused)):
            self.telemetry.note(f"{what}: {error}")
        else:
            self._failed(what, error)
