"""Asking a model in service: ``RemotePredictor`` is a predictor whose model is elsewhere (the cloud's, another node's)."""

from __future__ import annotations

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


class RemotePredictor:
    """The model in service at ``address`` (HOST:PORT or ``unix:PATH``), as asked by ``node``; safe to use from several threads.

    ``timeout_s`` is how long a call waits that names no time of its own. No call is tried again: who asks has a deadline.
    Raises ``Late`` (no answer by then), ``Unreachable``, ``Refused`` (``OVERLOADED``, ``NO_VERSION``, ...).
    """

    def __init__(self, address: str, security: SecurityConfig, *, node: str, timeout_s: float = 1.0) -> None:
        fork.warn_once()
        check_plaintext(address, security)
        credentials = channel_credentials(security)
        self.address = address
        self._tls, self._node, self._timeout_s = credentials is not None, node, timeout_s
        if credentials is None:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        self._stub: Any = InferenceStub(self._channel)  # type: ignore[no-untyped-call]

    def __call__(self, inputs: Tensor) -> Tensor:
        """f32[n, ...] to f32[n, classes]."""
        return self.predict(inputs, self._timeout_s).outputs

    def predict(self, inputs: Tensor, timeout_s: float) -> Prediction:
        """Answers for f32[n, ...] within ``timeout_s``; what does not fit one request goes in several at once."""
        parts = torch.split(inputs, tensors.rows_at_once(inputs))
        requests = [pb.InferRequest(node=self._node, inputs=tensors.pack(part)) for part in parts]
        calls: list[Any] = []
        try:
            calls += [self._stub.Infer.future(request, timeout=timeout_s) for request in requests]
            replies = [call.result() for call in calls]
        except (grpc.FutureCancelledError, ValueError):
            raise Unreachable(f"{self.address}: the connection was closed") from None
        except grpc.RpcError as error:
            raise self._meaning(error) from None
        finally:
            for call in calls:
                call.cancel()
        outputs = [tensors.unpack(reply.outputs) for reply in replies]
        for part, output in zip(parts, outputs, strict=True):
            if len(output) != len(part) or output.shape[1:] != outputs[0].shape[1:]:
                raise Refused(Reason.MALFORMED, f"{self.address} answered {len(part)} samples with {tuple(output.shape)}")
        versions = [reply.version for reply, part in zip(replies, parts, strict=True) for _ in range(len(part))]
        return Prediction(torch.cat(outputs) if len(outputs) > 1 else outputs[0], tuple(versions))

    def serving(self) -> dict[str, int]:
        """What is in service and what it does, as in ``ServingReply`` (protos/inference.proto)."""
        try:
            reply = self._stub.Serving(pb.ServingRequest(node=self._node), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise self._meaning(error) from None
        return {field.name: getattr(reply, field.name) for field in pb.ServingReply.DESCRIPTOR.fields}

    def close(self) -> None:
        """Drop the connection; calls in flight end with ``Unreachable``."""
        self._channel.close()

    def _meaning(self, error: Any) -> FleetError:
        details = error.details() or ""
        refused = wire.refusal(error.trailing_metadata(), details)
        if refused is not None:
            return refused
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Late(f"{self.address}: no answer in time")
        why = explain(details, tls=self._tls)
        return Unreachable(f"{self.address}: {why + ': ' if why else ''}{error.code().name}: {details}")
