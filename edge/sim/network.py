"""How long bytes take: a device's own link, links it shares with others, and times at which nothing passes.

The model, chosen to be simple, work-conserving and O(1) a transfer:

* A device's **own link** carries n bytes in n / rate seconds, the rate scaled for each transfer by lognormal jitter of median 1.
* A **shared link** (a region's backhaul, the coordinator's uplink) is a queue: it sends its transfers one after another at its
  full rate. Under fair sharing each would be slower and all would go on together; the last of a burst ends at the same time in
  both, the earlier ones end earlier here. A device slower than the shared link keeps it busy only for n / (the shared rate).
* A transfer ends when the slowest of these is done, one latency later.
* During a **cut** (``Cuts``) a transfer stands still and goes on after it, as the uplink resumes from what the other side holds.

No transfer is free: rates are finite and every path has a positive latency.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import cos, exp, log, sin, sqrt

from fleetddp.common.errors import ConfigError


class Cuts:
    """Times at which a link is down, as [start, stop) intervals; overlapping ones are joined. Pure: it keeps no state."""

    __slots__ = ("_edges",)

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        edges: list[float] = []
        for start, stop in sorted(intervals):
            if not -math.inf < start < stop < math.inf:
                raise ConfigError(f"a cut needs a finite start before a finite stop; got {start} to {stop}")
            if edges and start <= edges[-1]:
                edges[-1] = max(edges[-1], stop)
            else:
                edges += (start, stop)
        self._edges = tuple(edges)

    def open_at(self, t: float) -> bool:
        """Whether bytes pass at ``t``."""
        return bisect_right(self._edges, t) % 2 == 0

    def finish(self, start: float, seconds: float) -> float:
        """When something that needs ``seconds`` of an open link, begun at ``start``, is done."""
        if not self._edges:
            return start + seconds
        k = bisect_right(self._edges, start)
        if k % 2:  # begun during a cut
            start = self._edges[k]
            k += 1
        while k < len(self._edges) and start + seconds > self._edges[k]:
            seconds -= self._edges[k] - start
            start = self._edges[k + 1]
            k += 2
        return start + seconds


NEVER_CUT = Cuts(())
TWO_PI = 2.0 * math.pi


class SharedLink:
    """A link that several devices send over, in one direction: a queue served at ``bytes_per_s``."""

    __slots__ = ("_free_at", "bytes_per_s", "carried")

    def __init__(self, bytes_per_s: float) -> None:
        if not 0 < bytes_per_s < math.inf:
            raise ConfigError(f"a shared link needs a positive, finite rate; got {bytes_per_s} B/s")
        self.bytes_per_s = bytes_per_s
        self.carried = 0  # bytes so far
        self._free_at = -math.inf

    def send(self, now: float, size: int) -> float:
        """Queue ``size`` bytes behind what was queued before; returns when the last of them has left. ``now`` never goes back."""
        self.carried += size
        self._free_at = max(now, self._free_at) + size / self.bytes_per_s
        return self._free_at


class Path:
    """The way between one device and its parent, in both directions.

    ``down`` and ``up`` are the shared links on the way. ``stream`` gives the jitter: it belongs to this path alone.
    """

    __slots__ = ("_cuts", "_down", "_down_rate", "_jitter", "_latency", "_random", "_spare", "_up", "_up_rate")

    def __init__(
        self,
        *,
        down_bytes_per_s: float,
        up_bytes_per_s: float,
        latency_s: float,
        jitter: float,
        stream: random.Random,
        down: Sequence[SharedLink] = (),
        up: Sequence[SharedLink] = (),
        cuts: Cuts = NEVER_CUT,
    ) -> None:
        if not (0 < down_bytes_per_s < math.inf and 0 < up_bytes_per_s < math.inf and 0 < latency_s < math.inf and jitter >= 0):
            raise ConfigError(
                f"a path needs positive, finite rates and latency, and jitter >= 0; "
                f"got {down_bytes_per_s} and {up_bytes_per_s} B/s, {latency_s} s, jitter {jitter}"
            )
        self._down_rate, self._up_rate, self._latency, self._jitter = down_bytes_per_s, up_bytes_per_s, latency_s, jitter
        self._down, self._up, self._cuts = tuple(down), tuple(up), cuts
        self._random, self._spare = stream.random, math.nan

    def message(self, now: float) -> float:
        """When a message too small to count in bytes, sent at ``now``, arrives: one latency, at least."""
        seconds = self._latency * self._slow()
        return now + seconds if self._cuts is NEVER_CUT else self._cuts.finish(now, seconds)

    def download(self, now: float, size: int) -> float:
        """When ``size`` bytes that the parent starts to send at ``now`` have arrived at the device."""
        return self._transfer(now, size, self._down_rate, self._down)

    def upload(self, now: float, size: int) -> float:
        """When ``size`` bytes that the device starts to send at ``now`` have arrived at the parent."""
        return self._transfer(now, size, self._up_rate, self._up)

    def is_open(self, t: float) -> bool:
        """Whether the path is not cut at ``t``."""
        return self._cuts.open_at(t)

    def _transfer(self, now: float, size: int, rate: float, shared: tuple[SharedLink, ...]) -> float:
        seconds = size / rate * self._slow()
        for link in shared:
            seconds = max(seconds, link.send(now, size) - now)
        return self._cuts.finish(now, seconds + self._latency)

    def _slow(self) -> float:
        """How many times slower than usual this time.

        Every message asks: this is ``random.gauss`` (Box and Muller, 1958: two numbers at a time), number for number, without its
        call and its care for threads.
        """
        if not self._jitter:
            return 1.0
        normal = self._spare
        if normal == normal:
            self._spare = math.nan
        else:
            angle = self._random() * TWO_PI
            radius = sqrt(-2.0 * log(1.0 - self._random()))
            normal, self._spare = cos(angle) * radius, sin(angle) * radius
        return exp(normal * self._jitter)
