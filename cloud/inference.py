"""``fleetddp serve``: the fleet's model in service, each version as it is published, answering the edges' hard samples.

It follows the coordinator without being a member. When the coordinator is away, or the run is over, the version in service stays.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fleetddp.common.config import FleetConfig
from fleetddp.common.predictor import Gate, Served
from fleetddp.common.task import Task
from fleetddp.common.transport import Parent
from fleetddp.common.transport.failover import connect
from fleetddp.common.transport.follower import supply
from fleetddp.common.transport.inference_server import ServerThread
from fleetddp.common.transport.uplink import Patience

LOOK_S = 0.5  # how often ``run`` looks for what a person must mend

_log = logging.getLogger(__name__)


class Inference:
    """A running server of ``task``'s model, as node ``name``. ``parent`` is where versions come from (closed by ``close``).

    Raises ``ConfigError`` where it cannot listen. What comes while there is no version yet is refused with ``NO_VERSION``.
    """

    def __init__(self, config: FleetConfig, task: Task, *, name: str, parent: Parent | None = None) -> None:
        gate = Gate.of_task(config.serve.gate, task)
        if gate is None:
            _log.info("serve.gate names no metric: every version is taken into service")
        state = config.serve.state
        self.served = Served(gate, kept=None if state is None else state / f"{name}.safetensors")
        parent = parent or _parent(config, name)
        self._follower = supply(self.served, task, parent, node=name, device=config.serve.device)
        try:
            self._server = ServerThread(self.served, config.serve, config.security, allow=config.members.allow)
        except BaseException:
            self._follower.close()
            raise
        self._follower.start()
        _log.info("%s listens on port %d", name, self.port)

    @property
    def port(self) -> int:
        """What the server listens on."""
        return self._server.port

    @property
    def failure(self) -> Exception | None:
        """Why no more versions come: what a person must mend."""
        return self._follower.failure

    def close(self) -> None:
        """Answer what is open, then end."""
        self._follower.close()
        self._server.stop()


def run(config: FleetConfig, task: Task, *, name: str) -> None:
    """Serve until SIGTERM, or Ctrl-C (then ``KeyboardInterrupt``). Raises what a person must mend."""
    with _signals() as (stopped, signals):
        inference = Inference(config, task, name=name)
        try:
            while not stopped.wait(LOOK_S):
                if inference.failure is not None:
                    raise inference.failure
        finally:
            inference.close()
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    _log.info("stopped by SIGTERM")


def _parent(config: FleetConfig, name: str) -> Parent:
    """The track's versions come from the coordinator, which keeps them all."""
    return connect(
        (config.coordinator.address,),
        config.security,
        node=name,
        run=config.run,
        patience=Patience(),
        after_s=config.members.lease_s,
        track=config.serve.track,
    )


@contextmanager
def _signals() -> Iterator[tuple[threading.Event, list[int]]]:
    """SIGINT and SIGTERM set the event, and are listed, for the time of a ``with`` block."""
    stopped, seen = threading.Event(), list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        stopped.set()

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped, seen
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
