"""What people see of a running aggregator: its log, and counters for Prometheus where prometheus-client is installed.

The totals are kept here in any case, for ``fleetddp status``.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fleetddp.common.clock import Clock, SystemClock
from fleetddp.common.errors import ConfigError, Reason
from fleetddp.common.events import Say
from fleetddp.common.update import NO_VERSION, Version

_log = logging.getLogger("fleetddp")
_LOUD = frozenset({"refused", "lost", "failed", "expired"})  # words of ``Say`` that a person may have to act on
REFUSALS_PER_MINUTE = 30  # lines of the log for each reason: one broken device, or many, must not fill a disk


def log_to_terminal(level: int = logging.INFO) -> None:
    """Write this package's log to standard error, one line a message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    _log.addHandler(handler)
    _log.setLevel(level)


@dataclass(slots=True)
class _Minute:
    """Since ``began``: refusals for one reason."""

    began: float
    refusals: int = 0


class Telemetry:
    """Counts and logs what one aggregator says; ``track`` names it, where there are several."""

    def __init__(self, track: str = "", clock: Clock | None = None) -> None:
        self.track = track
        self._clock = clock or SystemClock()
        self._lately: dict[Reason, _Minute] = {}
        self._events: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._bytes_in = 0
        self._bytes_out = 0
        self._version = NO_VERSION

    def say(self, what: Say) -> None:
        """Log a sentence and count its word."""
        self._events[what.what] += 1
        if what.reason is not None:
            self._refused[what.reason.value] += 1
            if not self._may_log(what.reason):
                return
        who = f"{what.node}: " if what.node else ""
        level = logging.WARNING if what.what in _LOUD else logging.INFO
        _log.log(level, "%s%s: %s%s", f"{self.track}: " if self.track else "", what.what, who, what.message)

    def _may_log(self, reason: Reason) -> bool:
        now, minute = self._clock.now(), self._lately.get(reason)
        if minute is None or now - minute.began >= 60.0:
            if minute is not None and minute.refusals > REFUSALS_PER_MINUTE:
                self.note(f"{minute.refusals - REFUSALS_PER_MINUTE} more were refused for {reason.value} and not logged")
            minute = self._lately[reason] = _Minute(now)
        minute.refusals += 1
        return minute.refusals <= REFUSALS_PER_MINUTE

    def note(self, message: str) -> None:
        """Log what mends itself and a person may want to know."""
        _log.warning("%s", message)

    def count(self, what: str) -> None:
        """Count something that was logged elsewhere."""
        self._events[what] += 1

    def published(self, version: Version) -> None:
        """A version was made."""
        self._version = version.number

    def bytes_in(self, size: int) -> None:
        """Payload bytes of updates arrived."""
        self._bytes_in += size

    def bytes_out(self, size: int) -> None:
        """Payload bytes of versions were sent."""
        self._bytes_out += size

    def totals(self) -> dict[str, Any]:
        """What ``status`` shows of these counts; ``failed``: how often the aggregator or its disk failed, see the log."""
        return {
            "refused": dict(self._refused),
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
            "failed": self._events["failed"],
        }


def serve(telemetries: Sequence[Telemetry], port: int) -> Callable[[], None]:
    """Open http://*:port/metrics; returns what closes it. ``ConfigError``: prometheus-client is missing, or the port is taken."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ConfigError("coordinator.metrics_port needs prometheus-client: pip install 'fleetddp[dashboard]'") from None
    registry = CollectorRegistry()
    registry.register(_Exporter(telemetries))
    try:
        server, thread = start_http_server(port, registry=registry)
    except OSError as error:
        raise ConfigError(f"coordinator.metrics_port: cannot listen on {port}: {error.strerror}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


class _Exporter:
    """Reads telemetries when Prometheus asks; counts only grow, so no lock is needed. Several have the label ``track``."""

    def __init__(self, telemetries: Sequence[Telemetry]) -> None:
        self._telemetries = telemetries

    def collect(self) -> Any:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names = ["track"] if any(t.track for t in self._telemetries) else []
        events = CounterMetricFamily("fleetddp_events", "What happened, by word.", labels=[*names, "what"])
        refused = CounterMetricFamily("fleetddp_refused", "Requests and updates refused, by reason.", labels=[*names, "reason"])
        received = CounterMetricFamily("fleetddp_received_bytes", "Payload bytes of updates received.", labels=names)
        sent = CounterMetricFamily("fleetddp_sent_bytes", "Payload bytes of versions sent.", labels=names)
        version = GaugeMetricFamily("fleetddp_version", "The newest published version; -1 before the first.", labels=names)
        for t in self._telemetries:
            track = [t.track] if names else []
            for what, count in list(t._events.items()):
                events.add_metric([*track, what], count)
            for reason, count in list(t._refused.items()):
                refused.add_metric([*track, reason], count)
            received.add_metric(track, t._bytes_in)
            sent.add_metric(track, t._bytes_out)
            version.add_metric(track, t._version)
        return [events, refused, received, sent, version]
