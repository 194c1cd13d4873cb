"""The gRPC face of a model in service (protos/inference.proto): calls in, batches out, all on one event loop.

The loop moves messages and decides (``Batcher``); one thread computes. What is in service may change at any time: a batch ends
with the model it began with.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio
import torch

from fleetddp.common import security
from fleetddp.common.batching import Batcher, Waiting
from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import REASONS, ConfigError, Reason, Refused
from fleetddp.common.inference_config import ServeConfig
from fleetddp.common.predictor import Prediction, Served
from fleetddp.common.transport import limits, tensors, wire
from fleetddp.protos import inference_pb2 as pb

T = TypeVar("T")
Call = Callable[[Any, Any], Awaitable[Any]]

SERVICE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
GRACE_S = 5.0  # for the calls that are open at a stop

_OPTIONS = [
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]

_log = logging.getLogger(__name__)


class Batching:
    """Answers requests in batches. Lives on the event loop it is made in."""

    def __init__(self, served: Served, config: ServeConfig) -> None:
        self._served = served
        self._batcher = Batcher(max_batch=config.max_batch, max_wait_s=config.max_wait_s, max_queue=config.max_queue)
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "fleet-inference")
        self._answers: dict[Waiting, asyncio.Future[Prediction]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.samples = self.batches = self.shed = 0

    async def predict(self, inputs: torch.Tensor, deadline: float = math.inf) -> Prediction:
        """Answers for f32[n, ...]; ``deadline`` in the loop's time. Raises ``Refused(OVERLOADED)``, and what the model raises."""
        answer: asyncio.Future[Prediction] = self._loop.create_future()
        waiting = Waiting(inputs, deadline, gone=answer.done)
        try:
            self._batcher.add(waiting, self._loop.time())
        except Refused:
            self.shed += 1
            raise
        self._answers[waiting] = answer
        self._pump()
        try:
            return await answer
        finally:
            del self._answers[waiting]

    @property
    def waiting(self) -> int:
        """Samples that wait to be computed."""
        return self._batcher.queued

    async def close(self) -> None:
        """Finish the batch in hand."""
        if self._timer is not None:
            self._timer.cancel()
        await self._loop.run_in_executor(None, self._thread.shutdown)

    def _pump(self) -> None:
        """Compute what is due, or look again when something will be."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        batch = self._batcher.take(now)
        if batch:
            computing = self._loop.run_in_executor(self._thread, _compute, self._served, [w.inputs for w in batch])
            computing.add_done_callback(lambda done: self._computed(batch, done, now))
        elif (due := self._batcher.due_at()) < math.inf:
            self._timer = self._loop.call_at(due, self._pump)

    def _computed(self, batch: Sequence[Waiting], done: asyncio.Future[list[Prediction | Exception]], begun: float) -> None:
        self._batcher.computed(self._loop.time() - begun)
        self.batches += 1
        for waiting, outcome in zip(batch, done.result(), strict=True):
            answer = self._answers.get(waiting)
            if answer is None or answer.done():  # the caller is gone
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                self.samples += waiting.rows
                answer.set_result(outcome)
        self._pump()


def _compute(served: Served, requests: list[torch.Tensor]) -> list[Prediction | Exception]:
    """An outcome for each request. Where a batch fails its requests are tried one by one: a bad one spoils no other."""
    try:
        answers = served.predict(torch.cat(requests) if len(requests) > 1 else requests[0])
    except Exception as error:
        return [error] if len(requests) == 1 else [_compute(served, [request])[0] for request in requests]
    outcomes: list[Prediction | Exception] = []
    start = 0
    for request in requests:
        stop = start + len(request)
        outcomes.append(Prediction(answers.outputs[start:stop], answers.versions[start:stop]))
        start = stop
    return outcomes


class InferenceServer:
    """Serves ``served`` where ``config`` says. Made, started and stopped on its event loop."""

    def __init__(self, served: Served, config: ServeConfig, security: SecurityConfig, *, allow: Sequence[str] = ("*",)) -> None:
        self._served, self._config, self._security, self._allow = served, config, security, tuple(allow)
        self.batching = Batching(served, config)
        self._server = grpc.aio.server(options=_OPTIONS)
        calls: dict[str, tuple[Call, Any]] = {
            "Infer": (self._infer, pb.InferRequest),
            "Serving": (self._serving, pb.ServingRequest),
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(self._with_status(call), request.FromString, _serialize)
            for name, (call, request) in calls.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))

    async def start(self) -> int:
        """Listen; returns the port. Raises ``ConfigError`` when the address cannot be had, or plaintext would be seen."""
        address = self._config.listen or self._config.address
        security.check_plaintext(address, self._security)
        credentials = security.server_credentials(self._security)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}") from error
        await self._server.start()
        return int(port)

    async def stop(self, grace: float = GRACE_S) -> None:
        """Take no new calls; those open are answered, within ``grace`` seconds."""
        await self._server.stop(grace)
        await self.batching.close()

    async def _infer(self, request: Any, context: Any) -> Any:
        self._admit(request.node, context)
        inputs = tensors.unpack(request.inputs)
        left = context.time_remaining()
        deadline = math.inf if left is None else asyncio.get_running_loop().time() + left
        answers = await self.batching.predict(inputs, deadline)
        return pb.InferReply(outputs=tensors.pack(answers.outputs), version=answers.versions[0])

    async def _serving(self, request: Any, context: Any) -> Any:
        self._admit(request.node, context)
        served, batching = self._served, self.batching
        return pb.ServingReply(
            version=served.version,
            refused_version=served.refused_version,
            samples=batching.samples,
            batches=batching.batches,
            shed=batching.shed,
            waiting=batching.waiting,
        )

    def _admit(self, node: str, context: Any) -> None:
        """W2: the certificate names the node that asks, and the fleet file allows it."""
        limits.node(node)
        proven = security.node_id(context.auth_context())
        if proven is not None and proven != node:
            raise Refused(Reason.WRONG_IDENTITY, f"the certificate is of {proven!r}; the call claims to be {node!r}")
        if not any(fnmatch.fnmatchcase(node, pattern) for pattern in self._allow):
            raise Refused(Reason.WRONG_IDENTITY, f"{node!r} matches no pattern of members.allow")

    def _with_status(self, call: Call) -> Call:
        """Turn what a call raises into its status."""

        async def with_status(request: Any, context: Any) -> Any:
            try:
                return await call(request, context)
            except Refused as refusal:
                status = getattr(grpc.StatusCode, REASONS[refusal.reason].status)
                reason = ((wire.REASON_KEY, refusal.reason.value),)
                return await context.abort(status, limits.text(refusal.message), reason)
            except Exception as error:
                _log.exception("%s failed", call.__name__)
                return await context.abort(grpc.StatusCode.INTERNAL, limits.text(f"the model failed on this: {error!r}"))

        return with_status


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class ServerThread:
    """An ``InferenceServer`` on an event loop in a thread of its own: for a device's own service, or two stages on two nodes.

    with ServerThread(served, config.serve, config.security, allow=config.members.allow) as server: ...  # server.port
    """

    def __init__(self, served: Served, config: ServeConfig, security: SecurityConfig, *, allow: Sequence[str] = ("*",)) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleetddp-inference", daemon=True)
        self._thread.start()

        async def begin() -> tuple[InferenceServer, int]:
            server = InferenceServer(served, config, security, allow=allow)
            try:
                return server, await server.start()
            except BaseException:
                await server.stop(0.0)
                raise

        try:
            self.server, self.port = self._run(begin())
        except BaseException:
            self._end()
            raise

    def stop(self, grace: float = GRACE_S) -> None:
        """Answer what is open, then end."""
        if self._thread.is_alive():
            self._run(self.server.stop(grace))
            self._end()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> ServerThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
