"""What the ranks of a torchrun job do for ``test_hierarchy.py``: two simulated nodes of two ranks, Gloo.

    torchrun --nproc-per-node 4 tests/helpers/hierarchy_rows.py OUT

Each rank writes what it saw to OUT/<rank>.json; the assertions are the tests'.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from fleetddp.cloud import FleetDDP, register_hierarchy
from fleetddp.cloud.cross_node import Compressed
from fleetddp.common.errors import ConfigError
from helpers.fleet import RunningCoordinator, fleet_config

LOCAL = 2
TIMEOUT_S = 60.0  # of the process group
BUCKET_MB = 0.002  # several buckets, of odd sizes

ROWS: dict[str, Callable[[], dict[str, Any]]] = {}


def row(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    ROWS[function.__name__] = function
    return function


class Forked(nn.Module):
    """Odd sizes everywhere; ``left`` decides which of two branches a step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(13, 37)
        self.branches = nn.ModuleList([nn.Linear(37, 41), nn.Linear(37, 41)])
        self.last = nn.Linear(41, 7)

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        return self.last(torch.tanh(self.branches[0 if left else 1](torch.tanh(self.first(x)))))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 41), nn.Tanh(), nn.Linear(41, 7))


def data(turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + dist.get_rank())
    return torch.randn(5, 13, generator=generator)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.detach().double().flatten() for p in model.parameters() if p.grad is not None])


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def apart(mine: Tensor) -> float:
    """The largest difference between two ranks."""
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return float((high - low).max())


# ---- equal to DDP ----------------------------------------------------------------------------------------------------------


def beside_ddp(
    module: nn.Module, step: Callable[[nn.Module, int], None], cross_node: Any = "float32", **options: Any
) -> dict[str, Any]:
    """Five SGD steps of the same model and data, with the hook and without."""
    settings = {"bucket_cap_mb": BUCKET_MB, **options}
    plain = DistributedDataParallel(copy.deepcopy(module), **settings)
    hooked = DistributedDataParallel(module, **settings)
    registered = register_hierarchy(hooked, cross_node=cross_node)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, hooked)]
    worst, size = 0.0, 0.0
    for turn in range(5):
        for model, optimizer in zip((plain, hooked), optimizers, strict=True):
            optimizer.zero_grad()
            step(model, turn)
        worst = max(worst, float((gradient(plain) - gradient(hooked)).abs().max()))
        size = max(size, float(gradient(plain).abs().max()))
        for optimizer in optimizers:
            optimizer.step()
    return {"registered": registered, "error": worst / size, "apart": apart(vector(hooked)), "alone": apart(data(0).double()) > 0}


def plain_step(model: nn.Module, turn: int) -> None:
    model(data(turn)).square().mean().backward()


@row
def several_odd_buckets() -> dict[str, Any]:
    return beside_ddp(net(), plain_step)


@row
def one_bucket() -> dict[str, Any]:
    return beside_ddp(net(), plain_step, bucket_cap_mb=25)


@row
def half_the_bits() -> dict[str, Any]:
    return beside_ddp(net(), plain_step, "bfloat16")


@row
def a_quarter_of_the_bits() -> dict[str, Any]:
    return beside_ddp(net(), plain_step, "int8")


@row
def double_precision() -> dict[str, Any]:
    return beside_ddp(net().double(), lambda model, turn: model(data(turn).double()).square().mean().backward())


@row
def unused_parameters() -> dict[str, Any]:
    """A branch is unused on all ranks in a step, or on some of them."""
    uses = [(True, True), (False, False), (True, False), (False, True), (True, True)]

    def step(model: nn.Module, turn: int) -> None:
        model(data(turn), left=uses[turn][dist.get_rank() % 2]).square().mean().backward()

    return beside_ddp(Forked(), step, find_unused_parameters=True)


@row
def static_graph() -> dict[str, Any]:
    return beside_ddp(Forked(), plain_step, static_graph=True)


@row
def gradient_as_bucket_view() -> dict[str, Any]:
    return beside_ddp(net(), plain_step, gradient_as_bucket_view=True)


@row
def accumulation() -> dict[str, Any]:
    def step(model: nn.Module, turn: int) -> None:
        with model.no_sync():
            plain_step(model, 2 * turn)
        plain_step(model, 2 * turn + 1)

    return beside_ddp(net(), step)


@row
def join() -> dict[str, Any]:
    """Rank r has 2 + r batches."""
    models = [DistributedDataParallel(net(), bucket_cap_mb=BUCKET_MB) for _ in range(2)]
    register_hierarchy(models[1])
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for turn in range(2 + dist.get_rank()):
                optimizer.zero_grad()
                plain_step(model, turn)
                optimizer.step()
    return {"error": float((vector(models[0]) - vector(models[1])).abs().max()), "apart": apart(vector(models[1]))}


@row
def overflow() -> dict[str, Any]:
    """Rank 3's loss overflows in the second of four steps: all ranks skip it, and none keeps a residual that is not finite."""
    seen: dict[str, Any] = {}
    for cross_node in ("float32", "bfloat16", "int8"):
        model = DistributedDataParallel(net(), bucket_cap_mb=BUCKET_MB)
        register_hierarchy(model, cross_node=cross_node)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        moved = []
        for turn in range(4):
            before = vector(model)
            loss = model(data(turn)).square().mean()
            if turn == 1 and dist.get_rank() == 3:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(not torch.equal(before, vector(model)))
        seen[cross_node] = [moved, scaler.get_scale(), apart(vector(model)), bool(torch.isfinite(vector(model)).all())]
    return seen


# ---- error feedback ----------------------------------------------------------------------------------------------------------


@row
def error_feedback() -> dict[str, Any]:
    """Four nodes: what came out and what is left is what was put in."""
    seen: dict[str, Any] = {}
    for codec in ("bfloat16", "int8"):
        leg = Compressed(dist.group.WORLD, lambda work: work.wait(), codec)
        generator = torch.Generator().manual_seed(dist.get_rank())
        put_in = came_out = torch.zeros(2 * leg.multiple, dtype=torch.float64)
        for turn in range(5):
            shard = torch.randn(2 * leg.multiple, generator=generator) * (1e-6 if turn == 1 else 1.0)
            put_in = put_in + shard
            out = leg.all_reduce(shard, 0, (1, 2))
            came_out = came_out + out
        spread = apart(out.double())
        _, sent, owned = leg._residuals[0]
        left = sent.double()
        left.view(dist.get_world_size(), -1)[dist.get_rank()] += owned
        dist.all_reduce(put_in)
        dist.all_reduce(left)
        seen[codec] = {
            "error": float((came_out + left - put_in).abs().max()),
            "left": float(left.abs().max()),
            "apart": spread,
            "forgets": leg._residuals_of(shard, 0, (2, 1))[0].abs().max().item(),
        }
    return seen


@row
def exact_numbers() -> dict[str, Any]:
    """Integers up to 127, one of which is 127 in every block: int8 and bfloat16 round none of them, nor their sums' multiples."""
    seen: dict[str, Any] = {}
    for codec in ("bfloat16", "int8"):
        leg = Compressed(dist.group.WORLD, lambda work: work.wait(), codec)
        shard = (torch.arange(leg.multiple) % 128).float() * (1.0 if dist.get_rank() == 0 else 0.0)
        out = leg.all_reduce(shard.clone(), 0, ())
        dist.broadcast(shard, 0)
        seen[codec] = bool(torch.equal(out, shard))
    return seen


# ---- when it is used ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    yield
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def outcome(model: DistributedDataParallel, **options: Any) -> Any:
    try:
        return register_hierarchy(model, **options)
    except ConfigError as error:
        return str(error)


@row
def when_it_is_used() -> dict[str, Any]:
    rank = dist.get_rank()
    seen: dict[str, Any] = {}

    def both(name: str, make: Callable[[], DistributedDataParallel] = lambda: DistributedDataParallel(net())) -> None:
        seen[name] = [outcome(make(), when="auto"), outcome(make(), when="on")]

    both("two_nodes_of_two")
    with environment(LOCAL_WORLD_SIZE="4", LOCAL_RANK=str(rank)):
        both("one_node")
    with environment(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0"):
        both("one_rank_a_node")
        seen["one_rank_a_node, int8"] = outcome(DistributedDataParallel(net()), cross_node="int8")
    with environment(LOCAL_WORLD_SIZE="1" if rank == 3 else "3", LOCAL_RANK=str(rank % 3)):
        both("unlike_nodes")
    with environment(LOCAL_WORLD_SIZE=None):
        both("not_told")
    with environment(LOCAL_RANK=str(rank // 2)):
        both("ranks_dealt_out")
    both("sparse", lambda: DistributedDataParallel(nn.Sequential(nn.Embedding(5, 3, sparse=True))))
    both("complex", lambda: DistributedDataParallel(nn.Linear(3, 3, dtype=torch.complex64)))
    seen["unlike_settings"] = outcome(DistributedDataParallel(net()), cross_node="int8" if rank == 2 else "float32")
    seen["off"] = outcome(DistributedDataParallel(net()), when="off")

    def hooked() -> DistributedDataParallel:
        model = DistributedDataParallel(net())
        model.register_comm_hook(None, allreduce_hook)
        return model

    both("a_hook_of_the_users", hooked)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    both("part_of_the_job", lambda: DistributedDataParallel(net(), process_group=pairs[rank // 2]))
    copied = DistributedDataParallel(net())
    register_hierarchy(copied)
    again = copy.deepcopy(copied)
    seen["a_copy_has_none"] = again._comm_hooks[0][1] is None
    return seen


@row
def fleet() -> dict[str, Any]:
    """FleetDDP registers it at the first forward, unless there is a hook; its site exchanges as ever."""
    rank = dist.get_rank()
    folder = Path(sys.argv[1]) / "fleet"
    coordinator = None
    if rank == 0:
        folder.mkdir()
        coordinator = RunningCoordinator(fleet_config(folder))
    box = [coordinator.address if coordinator else ""]
    dist.broadcast_object_list(box, 0)
    seen: dict[str, Any] = {}

    def site(name: str, **options: Any) -> FleetDDP:
        return FleetDDP(net(), coordinator=box[0], site=name, sync_every=2, **options)

    model = site("lab", hierarchy="on", cross_node="bfloat16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(4):
        plain_step(model, turn)
        optimizer.step()
        optimizer.zero_grad()
    seen["hooks"] = [type(state).__name__ for _, state in model._comm_hooks]
    seen["version"], seen["apart"] = model.version, apart(vector(model))
    model.close()
    model = site("plain", hierarchy="off")
    model.start()
    seen["off"] = len(model._comm_hooks)
    model.close()
    for setting in ("auto", "on"):
        model = site("hooked", hierarchy=setting)
        model.register_comm_hook(None, allreduce_hook)
        try:
            model.start()
            seen[setting] = [hook.__name__ for hook, _ in model._comm_hooks]
        except ConfigError as error:
            seen[setting] = str(error)
        model.close()
    dist.barrier()
    if coordinator is not None:
        coordinator.stop()
    return seen


# ---- failure: last, for it breaks the groups -------------------------------------------------------------------------------


@row
def one_rank_fails() -> dict[str, Any]:
    """Rank 1's second bucket fails. Every rank's backward raises, long before the time-out, and so does the next one."""
    model = DistributedDataParallel(net(), bucket_cap_mb=BUCKET_MB)
    register_hierarchy(model)
    plain_step(model, 0)
    plain_step(model, 1)  # the buckets are final now
    state = model._comm_hooks[0][1]
    calls = 0
    scatter = state._reduce_scatter

    def failing(padded: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError("no room")
        return scatter(padded)

    if dist.get_rank() == 1:
        state._reduce_scatter = failing
    begun, errors = time.monotonic(), []
    try:
        plain_step(model, 2)
    except RuntimeError as error:
        errors.append(str(error))
    return {"errors": errors, "seconds": time.monotonic() - begun, "calls": calls}


def main(out: Path) -> None:
    warnings.simplefilter("error")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    os.environ.update(LOCAL_WORLD_SIZE=str(LOCAL), LOCAL_RANK=str(rank % LOCAL))
    only = os.environ.get("ROWS", "").split()
    results: dict[str, Any] = {}
    for name, function in ROWS.items():
        if only and name not in only:
            continue
        begun = time.monotonic()
        results[name] = function()
        print(rank, name, f"{time.monotonic() - begun:.2f} s", file=sys.stderr)
    (out / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # groups that were given up in the middle of a collective cannot be closed in order


if __name__ == "__main__":
    main(Path(sys.argv[1]))
