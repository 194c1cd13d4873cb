"""Local-then-global averaging of gradients inside a site: a communication hook of ``DistributedDataParallel``.

    register_hierarchy(model, cross_node="int8")    # any DistributedDataParallel, before its first backward; all ranks call it

Each bucket is reduce-scattered inside the node, all-reduced over the nodes (each local rank its shard, ``cross_node.py``), and
all-gathered inside the node. The result is DDP's, within rounding. With L ranks on each of M nodes a node sends 2 (M - 1) / M of
the model over the slow network, where a ring over all ranks sends 2 (L M - 1) / (L M). Buckets are padded to a multiple of L.

On NCCL the legs are issued in the hook, on a stream of their own. On Gloo one worker thread issues them, bucket after bucket:
legs chained by ``Future.then`` would be issued in another order on another rank, and meet the wrong partners. What goes wrong
there is raised by ``backward``, on the other ranks, too: they look in the c10d store for word of it while they wait.

``join(divide_by_initial_world_size=False)`` is not followed: as with any hook, the divisor is the number of ranks.
"""
# No `from __future__ import annotations`: DDP looks at the annotations of the hook and knows no strings.

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from fleetddp.cloud.collective import tell_all
from fleetddp.cloud.cross_node import Compressed, CrossNode, Plain, gather_single, reduce_scatter_single
from fleetddp.cloud.rendezvous import Rendezvous
from fleetddp.common.errors import ConfigError

LOOK_S = 1.0  # between two looks for word of a failure

When: TypeAlias = Literal["auto", "on", "off"]
Legs: TypeAlias = Callable[[], Tensor]


def register_hierarchy(model: DistributedDataParallel, *, when: When = "on", cross_node: CrossNode = "float32") -> bool:
    """Register the hook on all ranks of ``model``; whether it was. A collective, before the first backward.

    It is not registered where it has nothing to save (one node; one rank a node, unless ``cross_node`` is a compression). Where
    it is of no use because the nodes have unlike numbers of ranks, another hook is registered, gradients are sparse or complex,
    or torchrun has not told (``LOCAL_WORLD_SIZE``), "auto" does nothing and "on" raises ``ConfigError``, on all ranks.
    """
    if when == "off":
        return False
    cards = tell_all(_Card.of(model, when, cross_node), model.process_group, model.device)
    local = cards[0].local
    obstacle = next((card.obstacle for card in cards if card.obstacle), "") or _unlike(cards)
    if obstacle:
        if when == "on":
            raise ConfigError(f"hierarchy: on: {obstacle}")
        return False
    nodes = len(cards) // local
    if nodes == 1 or (local == 1 and cross_node == "float32"):
        return False
    word = Rendezvous.of(model.process_group, f"fleetddp/hierarchy/{cards[0].stamp}")
    state = Hierarchy(_mesh(model, nodes, local), cross_node, word)
    model.register_comm_hook(state, _average)
    return True


class _Card(NamedTuple):
    """What a rank knows of its place."""

    local: int  # ranks on its node
    local_rank: int
    when: str
    cross_node: str
    obstacle: str
    stamp: int  # tells this registration from others; rank 0's counts

    @classmethod
    def of(cls, model: DistributedDataParallel, when: str, cross_node: str) -> "_Card":
        local, rank = (int(os.environ.get(name, "-1")) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"))
        return cls(local, rank, when, cross_node, _obstacle(model, told=local > 0 <= rank), time.time_ns())


def _obstacle(model: DistributedDataParallel, *, told: bool) -> str:
    """Why this rank cannot take part; empty if it can."""
    group = model.process_group
    if not told:
        return "LOCAL_WORLD_SIZE and LOCAL_RANK are not set, so the nodes are not known; torchrun sets them"
    if group.size() != dist.get_world_size():
        return f"the model's process group has {group.size()} of the job's {dist.get_world_size()} ranks; it needs all of them"
    if model._comm_hooks:
        return f"a communication hook is registered already ({model._comm_hooks[0][0].__qualname__}); a model has one"
    for name, module in model.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{name!r} has sparse gradients, which cannot be scattered"
    for name, parameter in model.module.named_parameters():
        if parameter.is_complex():
            return f"{name!r} is complex; only real gradients are scattered"
    backend, kind = dist.get_backend(group), model.device.type
    if (backend, kind) not in (("nccl", "cuda"), ("gloo", "cpu")):
        return f"it runs on NCCL with GPUs and on Gloo with CPUs, not on {backend} with {kind}"
    return ""


def _unlike(cards: list[_Card]) -> str:
    """Where the ranks contradict each other."""
    first = cards[0]
    for rank, card in enumerate(cards):
        if (card.when, card.cross_node) != (first.when, first.cross_node):
            return f"the ranks have unlike settings; rank 0: {first[2:4]}, rank {rank}: {card[2:4]}"
        if card.local != first.local:
            return f"the nodes have unlike numbers of ranks: rank 0's has {first.local}, rank {rank}'s {card.local}"
    for rank, card in enumerate(cards):
        if len(cards) % card.local or card.local_rank != rank % card.local:
            return f"rank {rank} of {len(cards)} is local rank {card.local_rank} of {card.local}: nodes are no runs of ranks"
    return ""


def _mesh(model: DistributedDataParallel, nodes: int, local: int) -> DeviceMesh:
    """Node by local rank, over groups of its own, with the time-out of the model's."""
    ranks = torch.arange(nodes * local).view(nodes, local)
    backend: Any = model.process_group._get_backend(model.device)
    timeout: timedelta = backend.options._timeout
    mine = []
    for lines in (ranks.T, ranks):
        groups = [dist.new_group(line.tolist(), timeout=timeout) for line in lines]  # all ranks take part in making each
        mine.append(next(group for group in groups if isinstance(group, dist.ProcessGroup)))
    return DeviceMesh.from_group(mine, model.device.type, ranks, mesh_dim_names=("node", "local"))


class Hierarchy:
    """The state of the hook on one rank. ``mesh``: the dimensions "node" and "local". ``word``: where ranks tell of failures."""

    def __init__(self, mesh: DeviceMesh, cross_node: CrossNode, word: Rendezvous) -> None:
        self._local, across = mesh.get_group("local"), mesh.get_group("node")
        self._ranks = mesh.size()
        self._issuer = _Stream() if mesh.device_type == "cuda" else _Worker(word, mesh.get_rank())
        finish = self._finish = self._issuer.finish
        self._across = Plain(across, finish) if cross_node == "float32" else Compressed(across, finish, cross_node)
        weakref.finalize(self, self._issuer.close)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model has no hook registered: this is None there."""
        return type(None), ()

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Begin to average a bucket over all ranks, in place; the future's value is its buffer."""
        buffer, index = bucket.buffer(), bucket.index()
        parameters = tuple(id(p) for p in bucket.parameters())
        return self._issuer.issue(buffer, lambda: self._average(buffer, index, parameters))

    @torch.no_grad()
    def _average(self, buffer: Tensor, index: int, parameters: tuple[int, ...]) -> Tensor:
        buffer.div_(self._ranks)  # first, as DDP does: a sum of half-precision gradients might overflow
        local = self._local.size()
        spare = -buffer.numel() % (local * self._across.multiple)
        padded = torch.cat([buffer, buffer.new_zeros(spare)]) if spare else buffer
        shard = self._across.all_reduce(self._reduce_scatter(padded) if local > 1 else padded, index, parameters)
        if local > 1:
            self._finish(gather_single(_octets(padded), _octets(shard), group=self._local, async_op=True))
            shard = padded
        return buffer if shard is buffer else buffer.copy_(shard[: buffer.numel()])

    def _reduce_scatter(self, padded: Tensor) -> Tensor:
        """This rank's shard of the node's sum."""
        shard = padded.new_empty(padded.numel() // self._local.size())
        if padded.is_cuda:
            self._finish(reduce_scatter_single(shard, padded, group=self._local, async_op=True))
            return shard
        parts = torch.empty_like(padded)  # Gloo's own sends everything to everyone
        self._finish(dist.all_to_all_single(_octets(parts), _octets(padded), group=self._local, async_op=True))
        return torch.sum(parts.view(self._local.size(), -1), dim=0, out=shard)


def _average(state: Hierarchy, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """The hook."""
    return state.average(bucket)


def _octets(tensor: Tensor) -> Tensor:
    """What is only moved is moved as bytes: not every backend knows every dtype."""
    return tensor.view(torch.uint8)


class _Stream:
    """Issues legs on a stream of its own, in the thread that asks: the GPU puts them in order."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def issue(self, buffer: Tensor, legs: Legs) -> Future[Tensor]:
        """Begin; whoever waits for the future has their current stream wait."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        future: Future[Tensor] = Future(devices=[buffer.device])
        with torch.cuda.stream(self._stream):
            buffer.record_stream(self._stream)
            future.set_result(legs())
        return future

    def finish(self, work: Any) -> None:
        """Have the stream wait."""
        work.wait()

    def close(self) -> None:
        """Nothing to end."""


class _Worker:
    """Issues legs in a thread, one bucket after another. Once some have failed, on any rank, all do."""

    def __init__(self, word: Rendezvous, rank: int) -> None:
        self._word, self._rank = word, rank
        self._jobs: SimpleQueue[tuple[Legs, Future[Tensor]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name="fleetddp-hierarchy", daemon=True).start()

    def issue(self, buffer: Tensor, legs: Legs) -> Future[Tensor]:
        """Hand over; legs that fail make the future raise ``RuntimeError``."""
        future: Future[Tensor] = Future()
        self._jobs.put((legs, future))
        return future.then(lambda done: done.wait())  # so that DDP's reducer, in C++, sees an error

    def finish(self, work: Any) -> None:
        """Wait, unless word comes that a rank has failed and will never take part."""
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():  # it has failed by itself, and not run out of this wait's time
                    raise
            failure = self._word.failure()
            if failure is not None:
                raise RuntimeError(failure[1])

    def close(self) -> None:
        """End the thread, after what it was given."""
        self._jobs.put(None)

    def _work(self) -> None:
        failure: RuntimeError | None = None
        while (job := self._jobs.get()) is not None:
            legs, future = job
            if failure is None:
                try:
                    result = legs()
                except Exception as error:
                    failure = RuntimeError(f"averaging gradients node by node has failed: {type(error).__name__}: {error}")
                    with contextlib.suppress(RuntimeError):  # without its store the job has ended
                        self._word.fail("", f"rank {self._rank} failed: {type(error).__name__}: {error}")
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)  # type: ignore[arg-type]
            del job, legs, future  # a wait for the next one must not keep this one's buffer
