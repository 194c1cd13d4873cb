"""Follows the versions of a parent without being a member of its fleet: no window waits for one who only looks on."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from fleetddp.common.errors import FleetError, Reason, Refused, Unreachable
from fleetddp.common.predictor import ModulePredictor, Served
from fleetddp.common.task import Task
from fleetddp.common.transport import Parent
from fleetddp.common.transport.backoff import Backoff
from fleetddp.common.transport.weights import fetch
from fleetddp.common.update import NO_VERSION

_log = logging.getLogger(__name__)


class Follower:
    """Calls ``take(version)``, in a thread of its own, for the newest version whenever it is another than the last one taken.

    ``take`` may ask the parent itself; where the parent is lost meanwhile, or a version is gone, it is tried again, with growing
    waits. A refusal that no retry can mend, and whatever else ``take`` raises, ends the follower: see ``failure``. The end of the
    run ends it too (``finished``). ``close`` closes ``parent``.
    """

    def __init__(self, parent: Parent, node: str, take: Callable[[int], None], *, rng: random.Random | None = None) -> None:
        self._parent, self._node, self._take = parent, node, take
        self._backoff = Backoff(rng or random.Random(), cap_s=5.0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleetddp-follower", daemon=True)
        self.version = NO_VERSION  # the last one taken
        self.finished = ""  # why the run is over
        self.failure: Exception | None = None

    def start(self) -> None:
        """Begin, in the background."""
        self._thread.start()

    def close(self) -> None:
        """End; returns when ``take`` is not running any more."""
        self._stopped.set()
        self._parent.close()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        lost = ""
        while not (self._stopped.is_set() or self.finished):
            try:
                self._follow()
                lost = ""
            except Exception as error:
                if not _passes(error):
                    if not self._stopped.is_set():
                        unknown = not isinstance(error, FleetError)
                        _log.error("%s follows no more versions: %s", self._node, error, exc_info=unknown)
                        self.failure = error
                    return
                if not self._stopped.is_set() and str(error) != lost:
                    _log.warning("%s: %s", self._node, error)
                lost = str(error)
            self._stopped.wait(self._backoff.delay())

    def _follow(self) -> None:
        """Until the news stream breaks, or ends with the run."""
        for news in self._parent.watch(self._node, 0, self.version):
            if self._stopped.is_set():
                return
            if news.version not in (NO_VERSION, self.version):  # a parent restored from a backup may be at an older one
                self._take(news.version)
                self.version = news.version
            self._backoff.reset()
            self.finished = news.finished


def supply(served: Served, task: Task, parent: Parent, *, node: str, device: str = "cpu") -> Follower:
    """A follower that offers ``served`` each version of ``task``'s model; not started yet. What was in service is again."""
    served.resume(task.model(), device)

    def take(version: int) -> None:
        model, layout = task.model(), parent.layout()
        layout.write_(model, fetch(parent, version, layout))
        if served.offer(ModulePredictor(model, device), version):
            _log.info("version %d is in service", version)

    return Follower(parent, node, take)


def _passes(error: Exception) -> bool:
    """Whether trying again can help."""
    if isinstance(error, Refused):
        return error.retry or error.reason is Reason.UNKNOWN_VERSION
    return isinstance(error, Unreachable)
