"""What the ranks of a torchrun job do for ``test_attach.py``: two ranks, Gloo, ``fully_shard`` beside ``FleetDDP``.

    torchrun --nproc-per-node 2 tests/helpers/attach_rows.py OUT

Rank 0 runs a real coordinator for each arm. Each rank writes what it saw to OUT/<rank>.json; the assertions are the tests'.
"""

from __future__ import annotations

import contextlib
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fleetddp.cloud import Checkpoint, FleetDDP, attach
from fleetddp.cloud.attached import Attached
from fleetddp.common.errors import ConfigError
from fleetddp.common.transport.uplink import Patience
from helpers import models
from helpers.fleet import RunningCoordinator, fleet_config
from helpers.site_rows import Spy

OUT = Path(sys.argv[1]) if __name__ == "__main__" else Path()
STEPS, SYNC_EVERY = 6, 2

ROWS: dict[str, Callable[[], dict[str, Any]]] = {}


def row(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    ROWS[function.__name__] = function
    return function


@contextlib.contextmanager
def fleet() -> Iterator[tuple[Callable[[str], Spy], list[Spy]]]:
    """A coordinator; the way to it, and the uplinks that this rank has made."""
    coordinator = None
    if dist.get_rank() == 0:
        folder = OUT / f"fleet-{time.monotonic_ns()}"
        folder.mkdir()
        coordinator = RunningCoordinator(fleet_config(folder))
    box = [coordinator.address if coordinator else ""]
    dist.broadcast_object_list(box, 0)
    spies: list[Spy] = []

    def connect(node: str) -> Spy:
        spies.append(Spy(box[0], node, Patience()))
        return spies[-1]

    yield connect, spies
    dist.barrier()
    if coordinator is not None:
        coordinator.stop()


def data(turn: int, width: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * turn + dist.get_rank())
    return torch.randn(8, width, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 40) -> None:
    for turn in range(STEPS):
        x, y = data(turn, width)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def vector(module: nn.Module) -> Tensor:
    """All weights and float buffers, whole. A collective where they are sharded."""
    tensors = [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return torch.cat([t.detach().double().flatten() for t in whole])


def apart(mine: Tensor) -> float:
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return float((high - low).max())


def both(
    make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], width: int = 40, **settings: Any
) -> dict[str, Any]:
    """The same training by ``FleetDDP`` and by ``attach``, each with a fleet of its own."""
    options = {"site": "lab", "sync_every": SYNC_EVERY, **settings}
    with fleet() as (connect, _):
        model = FleetDDP(make(), coordinator=connect, **options)
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), width)
        expected = vector(model.module)
        model.close()
    with fleet() as (connect, spies):
        module = wrap(make())
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        member = attach(module, optimizer, coordinator=connect, **options)
        train(module, optimizer, width)
        found = vector(module)
        pushed = [(h.kind.value, s.intervals, s.samples) for spy in spies for h, s, _ in spy.pushed]
        member.close()
    return {
        "error": float((found - expected).abs().max()),
        "apart": apart(found),
        "version": member.version,
        "intervals": [intervals for _, intervals, _ in pushed[:1]],
        "pushes": [kind for kind, _, _ in pushed],
        "samples": [samples for kind, _, samples in pushed if kind == "delta"],
        "alone": apart(data(0)[0].double()) > 0,
    }


def layer_by_layer(module: nn.Sequential) -> nn.Module:
    for layer in module:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(module)


@row
def fully_sharded() -> dict[str, Any]:
    return both(models.wide, fully_shard)


@row
def each_layer() -> dict[str, Any]:
    return both(models.wide, layer_by_layer)


@row
def kept_gathered() -> dict[str, Any]:
    """Parameters stay gathered from the forward to the backward pass."""
    return both(models.wide, lambda module: fully_shard(module, reshard_after_forward=False))


@row
def in_eight_bits() -> dict[str, Any]:
    return both(models.wide, fully_shard, codec="int8")


@row
def one_way_out() -> dict[str, Any]:
    return both(models.wide, fully_shard, uplink="rank0")


@row
def with_buffers() -> dict[str, Any]:
    return both(models.batch_norm, fully_shard, width=6)


@row
def fewer_rows_than_ranks() -> dict[str, Any]:
    """A weight of one row: rank 1 has nothing of it."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(40, 1), nn.Linear(1, 700), nn.Linear(700, 3))

    return both(make, fully_shard)


@row
def overlapped() -> dict[str, Any]:
    return both(models.wide, fully_shard, overlap="steps", adopt_every=1)


@row
def wrapped_by_other_means() -> dict[str, Any]:
    return both(models.wide, DistributedDataParallel)


@row
def half_precision() -> dict[str, Any]:
    """Weights in bfloat16: what the fleet holds is not moved by their rounding, so a site that learns nothing sends zeros."""
    with fleet() as (connect, spies):
        module = fully_shard(models.wide().to(torch.bfloat16))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        member = attach(module, optimizer, coordinator=connect, site="lab", sync_every=2)
        for _ in range(2):
            module(torch.randn(4, 40, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
        norms = [float(torch.cat(member.site._exchange.snapshot()._pieces).abs().max())]
        member.close()
    return {"norms": norms, "version": member.version, "spies": len(spies)}


@row
def checkpoints() -> dict[str, Any]:
    """A site that was closed goes on from its checkpoint; of a sharded model there is none."""
    with fleet() as (connect, _):

        def site() -> tuple[nn.Module, Attached, torch.optim.Optimizer, Checkpoint]:
            model = DistributedDataParallel(models.wide())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            member = attach(model, optimizer, coordinator=connect, site="lab", sync_every=2, codec="int8")
            return model, member, optimizer, Checkpoint(OUT / "checkpoints", member, optimizer=optimizer)

        model, member, optimizer, checkpoint = site()
        train(model, optimizer)
        checkpoint.save()
        saved, residual = vector(model), member.site._exchange.residual
        member.close()
        model, member, optimizer, checkpoint = site()
        loaded = checkpoint.load()
        member.start()
        again = member.site._exchange.residual
        seen = {
            "loaded": loaded,
            "moved": float((vector(model) - saved).abs().max()),
            "residual": all(torch.equal(a, b) for a, b in zip(residual, again, strict=True)),
            "version": member.version,
        }
        member.close()
        try:
            Checkpoint(OUT / "sharded", attach(fully_shard(models.wide()), coordinator=connect, site="lab"))
        except ConfigError as error:
            seen["sharded"] = str(error)
    return seen


@row
def refused() -> dict[str, Any]:
    def outcome(module: nn.Module, **options: Any) -> str:
        try:
            attach(module, coordinator="127.0.0.1:9", site="lab", **options)
        except ConfigError as error:
            return str(error)
        return ""

    partly = models.wide()
    fully_shard(partly[0])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return {
        "partly": outcome(partly),
        "two_dimensions": outcome(fully_shard(models.wide(), mesh=mesh)),
        "columns": outcome(fully_shard(models.wide(), shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)),
        "another_group": outcome(fully_shard(models.wide()), group=alone),
        "setting": outcome(models.wide(), epochs=3),
        "value": outcome(models.wide(), sync_every=0),
    }


def main() -> None:
    warnings.simplefilter("error")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    only = os.environ.get("ROWS", "").split()
    results: dict[str, Any] = {}
    for name, function in ROWS.items():
        if only and name not in only:
            continue
        begun = time.monotonic()
        results[name] = function()
        print(dist.get_rank(), name, f"{time.monotonic() - begun:.2f} s", file=sys.stderr)
    (OUT / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
