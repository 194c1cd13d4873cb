"""What people see of a running aggregator: its log, and counters for Prometheus where prometheus-client is installed.

The totals are kept here in any case, for ``fleetddp status``.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from fleetddp.common.errors import ConfigError
from fleetddp.common.events import Say
from fleetddp.common.update import NO_VERSION, Version

_log = logging.getLogger("fleetddp")
_LOUD = frozenset({"refused", "lost", "failed", "expired"})  # words of ``Say`` that a person may have to act on


def log_to_terminal(level: int = logging.INFO) -> None:
    """Write this package's log to standard error, one line a message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    _log.addHandler(handler)
    _log.setLevel(level)


class Telemetry:
    """Counts and logs what one aggregator says. ``serve`` opens the Prometheus endpoint."""

    def __init__(self) -> None:
        self._events: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._bytes_in = 0
        self._bytes_out = 0
        self._version = NO_VERSION
        self._stop_serving: Callable[[], None] = lambda: None

    def say(self, what: Say) -> None:
        """Log a sentence and count its word."""
        self._events[what.what] += 1
        if what.reason is not None:
            self._refused[what.reason.value] += 1
        who = f"{what.node}: " if what.node else ""
        _log.log(logging.WARNING if what.what in _LOUD else logging.INFO, "%s: %s%s", what.what, who, what.message)

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

    def serve(self, port: int) -> None:
        """Open http://*:port/metrics; ``ConfigError`` when prometheus-client is missing or the port is taken."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise ConfigError("coordinator.metrics_port needs prometheus-client: pip install 'fleetddp[dashboard]'") from None
        registry = CollectorRegistry()
        registry.register(_Exporter(self))
        try:
            server, thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise ConfigError(f"coordinator.metrics_port: cannot listen on {port}: {error.strerror}") from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        self._stop_serving = stop

    def close(self) -> None:
        """Close the endpoint, if it is open."""
        self._stop_serving()
        self._stop_serving = lambda: None


class _Exporter:
    """Reads a ``Telemetry`` when Prometheus asks; its counts only grow, so no lock is needed."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Any:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        t = self._telemetry
        events = CounterMetricFamily("fleetddp_events", "What happened, by word.", labels=["what"])
        for what, count in list(t._events.items()):
            events.add_metric([what], count)
        refused = CounterMetricFamily("fleetddp_refused", "Requests and updates refused, by reason.", labels=["reason"])
        for reason, count in list(t._refused.items()):
            refused.add_metric([reason], count)
        yield events
        yield refused
        yield CounterMetricFamily("fleetddp_received_bytes", "Payload bytes of updates received.", value=t._bytes_in)
        yield CounterMetricFamily("fleetddp_sent_bytes", "Payload bytes of versions sent.", value=t._bytes_out)
        yield GaugeMetricFamily("fleetddp_version", "The newest published version; -1 before the first.", value=t._version)
