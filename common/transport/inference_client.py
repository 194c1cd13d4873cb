"""Asking a model in service: ``RemotePredictor`` is a predictor whose model is elsewhere (the cloud's, another node's)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
import torch
from torch import Tensor

from fleetddp.common import fork
from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import FleetError, Late, Reason, Refused, Unreachable
from fleetddp.common.predictor import Prediction
from fleetddp.common.security import channel_credentials, check_plaintext, explain
from fleetddp.common.transport import limits, tensors, wire
from fleetddp.protos import inference_pb2 as pb
from fleetddp.protos.inference_pb2_grpc import InferenceStub

_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 2),
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class _Link:
    """One channel, its stub, and when something last came by it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.stub: Any = InferenceStub(channel)  # type: ignore[no-untyped-call]
        self.heard_at = time.monotonic()


class RemotePredictor:
    """The model in service at ``address`` (HOST:PORT or ``unix:PATH``), as asked by ``node``; safe to use from several threads.

    ``timeout_s`` is how long a call waits that names no time of its own. No call is tried again: who asks has a deadline.
    A connection on which nothing has come for ``redial_s`` is dialled anew when a call gets no answer in time: behind NAT, or
    when a device changes networks, it never breaks by itself.
    Raises ``Late`` (no answer by then), ``Unreachable``, ``Refused`` (``OVERLOADED``, ``NO_VERSION``, ...).
    """

    def __init__(
        self, address: str, security: SecurityConfig, *, node: str, timeout_s: float = 1.0, redial_s: float = 5.0
    ) -> None:
        fork.warn_once()
        check_plaintext(address, security)
        self.address = address
        self._credentials = channel_credentials(security)
        self._node, self._timeout_s, self._redial_s = node, timeout_s, redial_s
        self._lock = threading.Lock()
        self._closed = False
        self._link = self._dial()

    def __call__(self, inputs: Tensor) -> Tensor:
        """f32[n, ...] to f32[n, classes]."""
        return self.predict(inputs, self._timeout_s).outputs

    def predict(self, inputs: Tensor, timeout_s: float) -> Prediction:
        """Answers for f32[n, ...] within ``timeout_s``; what does not fit one request goes in several at once."""
        parts = torch.split(inputs, tensors.rows_at_once(inputs))
        requests = [pb.InferRequest(node=self._node, inputs=tensors.pack(part)) for part in parts]
        replies = self._ask("Infer", requests, timeout_s)
        outputs = [tensors.unpack(reply.outputs) for reply in replies]
        for part, output in zip(parts, outputs, strict=True):
            if len(output) != len(part) or output.shape[1:] != outputs[0].shape[1:]:
                raise Refused(Reason.MALFORMED, f"{self.address} answered {len(part)} samples with {tuple(output.shape)}")
        versions = [reply.version for reply, part in zip(replies, parts, strict=True) for _ in range(len(part))]
        return Prediction(torch.cat(outputs) if len(outputs) > 1 else outputs[0], tuple(versions))

    def serving(self) -> dict[str, int]:
        """What is in service and what it does, as in ``ServingReply`` (protos/inference.proto)."""
        (reply,) = self._ask("Serving", [pb.ServingRequest(node=self._node)], self._timeout_s)
        return {field.name: getattr(reply, field.name) for field in pb.ServingReply.DESCRIPTOR.fields}

    def close(self) -> None:
        """Drop the connection; calls in flight end with ``Unreachable``."""
        with self._lock:
            self._closed = True
            self._link.channel.close()

    def _ask(self, method: str, requests: Sequence[Any], timeout_s: float) -> list[Any]:
        """The replies to all requests, sent at once."""
        link = self._link
        calls: list[Any] = []
        try:
            calls += [getattr(link.stub, method).future(request, timeout=timeout_s) for request in requests]
            replies = [call.result() for call in calls]
        except (grpc.FutureCancelledError, ValueError):
            raise Unreachable(f"{self.address}: the connection was closed") from None
        except grpc.RpcError as error:
            meaning = self._meaning(error)
            if isinstance(meaning, Late):
                self._redial(link)
            elif isinstance(meaning, Refused):
                link.heard_at = time.monotonic()
            raise meaning from None
        finally:
            for call in calls:
                call.cancel()
        link.heard_at = time.monotonic()
        return replies

    def _dial(self) -> _Link:
        if self._credentials is None:
            return _Link(grpc.insecure_channel(self.address, _OPTIONS))
        return _Link(grpc.secure_channel(self.address, self._credentials, _OPTIONS))

    def _redial(self, link: _Link) -> None:
        """Replace a connection that has been silent for long; other calls on it end with ``Unreachable``."""
        with self._lock:
            if self._link is link and not self._closed and time.monotonic() - link.heard_at >= self._redial_s:
                self._link = self._dial()
                link.channel.close()

    def _meaning(self, error: Any) -> FleetError:
        details = error.details() or ""
        refused = wire.refusal(error.trailing_metadata(), details)
        if refused is not None:
            return refused
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Late(f"{self.address}: no answer in time")
        why = explain(details, tls=self._credentials is not None)
        return Unreachable(f"{self.address}: {why + ': ' if why else ''}{error.code().name}: {details}")
