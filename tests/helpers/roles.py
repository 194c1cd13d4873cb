"""What a preloaded process can be: a coordinator, an edge node, a member that gets stuck in the middle of a push."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from fleetddp.cloud.coordinator import Coordinator
from fleetddp.common.config import SecurityConfig, load
from fleetddp.common.events import Join
from fleetddp.common.telemetry import log_to_terminal
from fleetddp.common.transport.session import Session
from fleetddp.common.transport.transfers import PushTransfer
from fleetddp.common.transport.uplink import Uplink
from fleetddp.common.update import Receipt, Slice, Tier, UpdateHeader, UpdateId
from fleetddp.edge.node import run_node
from fleetddp.edge.region import Region
from helpers.marks import LAYOUT, push

Say = Callable[[str], None]


def coordinator(say: Say, config: str) -> None:
    """``fleetddp coordinator CONFIG``; says "listening"."""

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "listens on port" in record.msg:
                say("listening")

    log_to_terminal()
    logging.getLogger("fleetddp.common.service").addHandler(Listening())
    Coordinator(load(config)).run()


def region(say: Say, config: str, name: str) -> None:
    """``fleetddp region CONFIG --name NAME``; says "listening"."""

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "listens on port" in record.msg:
                say("listening")

    log_to_terminal()
    logging.getLogger("fleetddp.common.service").addHandler(Listening())
    Region(load(config), name).run()


def edge(say: Say, config: str, name: str, stuck: str = "", track: str = "") -> None:
    """``fleetddp edge CONFIG --name NAME --track TRACK``. ``stuck``: where in its first push it stops for ever, and says so."""
    log_to_terminal()
    if stuck == "half":
        _stick_at_half(say)
    elif stuck == "acknowledged":
        _stick_at_acknowledgement(say)
    run_node(load(config), name=name, track=track)


def half_pusher(say: Say, address: str, node: str) -> None:
    """Joins ("joined"), waits for version 0, and sends half of an update ("half")."""
    log_to_terminal()
    _stick_at_half(say)
    uplink = Uplink(address, SecurityConfig(), node=node)
    session = Session(uplink, Join(node=node, tier=Tier.EDGE, incarnation=1, layout=LAYOUT.fingerprint))
    session.start()
    session.joined()
    say("joined")
    session.wait_version(after=-1)
    push(uplink, UpdateId(node, 1, 1), base_version=0, mark=0, samples=1.0)


def _stick_at_half(say: Say) -> None:
    chunks = PushTransfer.chunks

    def half(self: PushTransfer, held: int) -> Iterator[bytes]:
        sending = chunks(self, held)
        for _ in range(-(-len(self.payload) // (2 * 512 * 1024))):
            yield next(sending)
        say("half")
        threading.Event().wait()

    PushTransfer.chunks = half  # type: ignore[method-assign]


def _stick_at_acknowledgement(say: Say) -> None:
    push = Uplink.push

    def acknowledged(self: Uplink, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        push(self, header, slice, payload)
        say("acknowledged")
        threading.Event().wait()
        raise AssertionError

    Uplink.push = acknowledged  # type: ignore[method-assign]
