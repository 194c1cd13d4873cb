"""A parent that does what a test tells it: for members alone, without a coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import google_crc32c
import torch
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common.errors import Reason, Refused, Unreachable
from fleetddp.common.events import ByteRange, Heard, Heartbeat, Join, Joined, News
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of, tensor_over
from fleetddp.common.transport import Sink
from fleetddp.common.update import NO_VERSION, Kind, Receipt, Slice, State, UpdateHeader, UpdateId, Version

PATIENCE_S = 20.0


class ScriptedParent:
    """Serves the weights it is given, records what is pushed, answers as ``verdict`` says. ``down`` makes it unreachable."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.changed = threading.Condition()
        self.versions: dict[int, Tensor] = {}
        self.newest = NO_VERSION
        self.finished = ""
        self.down = self.closed = False
        self.refuse_join: Refused | None = None
        self.pushed: list[tuple[UpdateHeader, Slice, Tensor]] = []  # decoded
        self.verdict: Callable[[UpdateHeader, Tensor], State | Reason] = lambda header, values: State.ACCEPTED
        self.standing: dict[UpdateId, Receipt] = {}
        self.joins: list[Join] = []
        self.heartbeats: list[Heartbeat] = []
        self.left: list[str] = []

    # ---- what a test does -----------------------------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; fails the test when it does not in time."""
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), "the condition did not come about in time"

    def publish(self, weights: Tensor, number: int | None = None) -> None:
        """A new version (by default the next); all accepted updates are settled as merged into it."""
        with self.changed:
            self.newest = self.newest + 1 if number is None else number
            self.versions[self.newest] = weights.clone()
            for update_id, receipt in self.standing.items():
                if receipt.state is State.ACCEPTED:
                    self.standing[update_id] = Receipt(update_id=update_id, state=State.MERGED, version=self.newest)
            self.changed.notify_all()

    def set(self, **values: Any) -> None:
        """Change attributes and wake everyone."""
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    # ---- what a member calls --------------------------------------------------------------------------------------------------

    def _called(self) -> None:
        self.changed.notify_all()
        if self.down or self.closed:
            raise Unreachable("the scripted parent is down")

    def _receipts(self, ids: Sequence[UpdateId]) -> tuple[Receipt, ...]:
        return tuple(self.standing.get(i, Receipt(update_id=i, state=State.UNKNOWN)) for i in ids)

    def join(self, request: Join) -> Joined:
        with self.changed:
            self._called()
            self.joins.append(request)
            if self.refuse_join is not None:
                raise self.refuse_join
            return Joined(
                run="run",
                version=self.newest,
                layout=self._layout.fingerprint,
                wants_init=False,
                heartbeat_s=0.05,
                lease_s=1.0,
                gradient_lr=0.01,
                max_staleness=10,
                codecs=codecs.NAMES,
                receipts=self._receipts(request.open),
                finished=self.finished,
            )

    def heartbeat(self, request: Heartbeat) -> Heard:
        with self.changed:
            self._called()
            self.heartbeats.append(request)
            return Heard(version=self.newest, closes_at=0.0, receipts=self._receipts(request.open), finished=self.finished)

    def leave(self, node: str, incarnation: int) -> None:
        with self.changed:
            self._called()
            self.left.append(node)

    def layout(self) -> Layout:
        return self._layout

    def pull(self, version: int, ranges: Sequence[ByteRange], sink: Sink) -> Version:
        with self.changed:
            self._called()
            weights = self.versions[version]
        geometry = Geometry(self._layout, codecs.get("float32"))
        payload = torch.cat([geometry.encode(weights[a:b], (a, b)) for a, b in geometry.required()])
        half = payload.numel() // 8 * 4
        sink(0, bytes_of(payload[:half]))
        sink(half, bytes_of(payload[half:]))
        return Version(
            number=version,
            layout=self._layout.fingerprint,
            codec="float32",
            payload_bytes=payload.numel(),
            digest=google_crc32c.value(bytes(bytes_of(payload))),
            published_at=0.0,
        )

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        assert slice.digest == google_crc32c.value(bytes(payload))
        geometry = Geometry(self._layout, codecs.get(header.codec), buffers=header.kind is not Kind.GRADIENT)
        assert slice.intervals == geometry.required()
        values = torch.zeros(self._layout.elements)
        for start, stop in geometry.required():
            first, last = geometry.byte_range((start, stop))
            values[start:stop] = geometry.decode(tensor_over(payload[first:last]), (start, stop))
        with self.changed:
            self._called()
            verdict = self.verdict(header, values)
            if isinstance(verdict, Reason):
                receipt = Receipt(update_id=header.update_id, state=State.REFUSED, reason=verdict.value, message="as scripted")
            else:
                receipt = Receipt(update_id=header.update_id, state=verdict)
            self.standing[header.update_id] = receipt
            self.pushed.append((header, slice, values))
            self.changed.notify_all()
            return receipt

    def watch(self, node: str, incarnation: int, after_version: int) -> Iterator[News]:
        told = [after_version]
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.down or self.closed or self.finished or self.newest > told[0])
                self._called()
                told[0] = self.newest
                news = News(version=self.newest, finished=self.finished)
            yield news
            if news.finished:
                return

    def status(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
