"""What the ranks of a torchrun job do for ``test_site_contract.py``: row after row of the boundary contract.

    torchrun --nproc-per-node 3 tests/helpers/site_rows.py OUT

Rank 0 runs a real coordinator for each row. Each rank writes what it saw to OUT/<rank>.json; the assertions are the tests'.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from fleetddp.cloud import Checkpoint, FleetDDP
from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import FleetError
from fleetddp.common.transport.uplink import Patience, Uplink
from fleetddp.common.update import Receipt, Slice, UpdateHeader
from fleetddp.common.version_file import VersionFile
from helpers import models
from helpers.fleet import RunningCoordinator, fleet_config, on_port
from helpers.proxy import Proxy

TIMEOUT_S = 1.5  # of the process group that the network is awaited off


class Spy(Uplink):
    """An uplink that remembers what this rank pushed."""

    def __init__(self, address: str, node: str, patience: Patience) -> None:
        super().__init__(address, SecurityConfig(), node=node, patience=patience)
        self.pushed: list[tuple[UpdateHeader, Slice, int]] = []
        self.receipts: list[Receipt] = []

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        self.pushed.append((header, slice, len(payload)))
        receipt = super().push(header, slice, payload)
        self.receipts.append(receipt)
        return receipt


@dataclass
class Row:
    """One row's surroundings, as one rank sees them."""

    folder: Path
    rank: int
    world: int
    address: str = ""
    coordinator: RunningCoordinator | None = None  # rank 0's
    patience: Patience = field(default_factory=Patience)
    spies: list[Spy] = field(default_factory=list)
    sites: list[FleetDDP] = field(default_factory=list)

    def wrap(self, module: nn.Module, *, sync_every: int = 2, **kwargs: Any) -> FleetDDP:
        def connect(node: str) -> Spy:
            self.spies.append(Spy(self.address, node, self.patience))
            return self.spies[-1]

        self.sites.append(FleetDDP(module, coordinator=connect, sync_every=sync_every, **{"site": "lab", **kwargs}))
        return self.sites[-1]

    def seed(self) -> None:
        """Data of its own for each rank."""
        torch.manual_seed(100 + self.rank)

    def status(self) -> dict[str, Any]:
        """The coordinator's, on all ranks."""
        return self.from_rank0(lambda: self.coordinator.status() if self.coordinator else {})

    def from_rank0(self, make: Callable[[], Any]) -> Any:
        box = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(box, 0)
        return box[0]


ROWS: dict[str, tuple[Callable[[Row], dict[str, Any]], dict[str, Any]]] = {}


def row(**sections: Any) -> Callable[[Callable[[Row], dict[str, Any]]], Callable[[Row], dict[str, Any]]]:
    """A row and what its fleet file adds."""

    def register(function: Callable[[Row], dict[str, Any]]) -> Callable[[Row], dict[str, Any]]:
        ROWS[function.__name__] = (function, sections)
        return function

    return register


def batch(rows: int = 8, width: int = 40) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randint(0, 3, (rows,))


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, data: tuple[Tensor, Tensor] | None = None) -> None:
    x, y = batch() if data is None else data
    F.cross_entropy(model(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def vector(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])


def apart(module: nn.Module) -> float:
    """The largest difference of any weight or float buffer between two ranks."""
    state = [b.double().flatten() for b in module.buffers() if b.is_floating_point()]
    mine = torch.cat([vector(module), *state])
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return float((high - low).max())


# ---- equals DDP ------------------------------------------------------------------------------------------------------------


def _beside_ddp(row: Row, module: nn.Module, optimizer: str, steps: int, width: int) -> dict[str, Any]:
    plain = DistributedDataParallel(copy.deepcopy(module))
    model = row.wrap(module, sync_every=1)
    make = getattr(torch.optim, optimizer)
    ours, theirs = make(model.parameters(), lr=0.05), make(plain.parameters(), lr=0.05)
    row.seed()
    for _ in range(steps):
        data = batch(width=width)
        step(model, ours, data=data)
        step(plain, theirs, data=data)
    result = {
        "difference": float((vector(module) - vector(plain.module)).abs().max()),
        "version": model.version,
        "apart": apart(model),
        "slices": [s.intervals for _, s, _ in row.spies[0].pushed[-1:]],
    }
    model.close()
    return result


@row()
def equals_ddp_sgd(row: Row) -> dict[str, Any]:
    return _beside_ddp(row, models.wide(), "SGD", 50, 40)


@row()
def equals_ddp_adamw(row: Row) -> dict[str, Any]:
    return _beside_ddp(row, models.wide(), "AdamW", 50, 40)


@row()
def smaller_than_the_world(row: Row) -> dict[str, Any]:
    """124 parameters are one block: two of three ranks have nothing to carry."""
    result = _beside_ddp(row, models.odd(), "SGD", 3, 7)
    return {**result, "pushes": len(row.spies[0].pushed)}


# ---- what moves ------------------------------------------------------------------------------------------------------------


@row()
def what_goes_out(row: Row) -> dict[str, Any]:
    """Unequal batches; a model of buffers and parameters over several slices."""
    module = nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.Linear(60, 3))
    model = row.wrap(module, sync_every=2, codec="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    for _ in range(2):
        step(model, optimizer, data=batch(rows=4 + row.rank))
    pushed = [(h, s) for h, s, _ in row.spies[0].pushed if h.kind.value == "delta"]
    header, cut = pushed[0]
    headers = [None] * row.world
    dist.all_gather_object(headers, repr(header))
    return {
        "kind": header.kind.value,
        "base": header.base_version,
        "steps": header.steps,
        "headers_alike": len(set(headers)) == 1,
        "intervals": cut.intervals,
        "samples": cut.samples,
        "parameters": model.site.layout.parameters,
        "buffer_start": model.site.layout.buffer_start,
        "elements": model.site.layout.elements,
        "version": model.version,
        "apart": apart(model),
        "residual": [None if r is None else float(r.abs().max()) for r in model.site._exchange.residual],
    }


@row()
def buffers_are_rank_0s(row: Row) -> dict[str, Any]:
    module = models.batch_norm()
    model = row.wrap(module, sync_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    x = torch.randn(8, 6) + row.rank
    step(model, optimizer, data=(x, torch.randint(0, 3, (8,))))
    expected = row.from_rank0(lambda: (0.1 * F.linear(x, *_first(models.batch_norm())).mean(0)).tolist())
    found = module[1].running_mean
    return {"difference": float((found - torch.tensor(expected)).abs().max()), "apart": apart(model)}


def _first(module: nn.Sequential) -> tuple[Tensor, Tensor]:
    return module[0].weight.detach(), module[0].bias.detach()


@row()
def rank0_carries_all(row: Row) -> dict[str, Any]:
    model = row.wrap(models.wide(), uplink="rank0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    for _ in range(2):
        step(model, optimizer)
    pushed = [s for spy in row.spies for h, s, _ in spy.pushed if h.kind.value == "delta"]
    return {
        "uplinks": len(row.spies),
        "intervals": [s.intervals for s in pushed],
        "samples": [s.samples for s in pushed],
        "version": model.version,
        "apart": apart(model),
    }


@row()
def one_carrier_a_machine(row: Row) -> dict[str, Any]:
    """Ranks 0 and 1 are on one machine, rank 2 on another."""
    os.environ["GROUP_RANK"] = str(row.rank // 2)
    model = row.wrap(models.wide(), uplink="per_node")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    for _ in range(2):
        step(model, optimizer)
    return {"uplinks": len(row.spies), "version": model.version, "apart": apart(model)}


# ---- which steps count -----------------------------------------------------------------------------------------------------


class _Unbiased(nn.Linear):
    """Its bias is there, and unused."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@row()
def options_of_ddp(row: Row) -> dict[str, Any]:
    """Each option in turn, as a site that comes back: every time the weights of all ranks move as one."""
    options: list[dict[str, Any]] = [
        {"find_unused_parameters": True, "unused": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1},
    ]
    versions, spread = [], []
    row.seed()
    for option in options:
        module = models.wide()
        if option.pop("unused", False):
            module[2].__class__ = _Unbiased if row.rank == 1 else nn.Linear
        model = row.wrap(module, sync_every=2, **option)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, optimizer)
        versions.append(model.version)
        spread.append(apart(model))
        model.close()
    return {"versions": versions, "apart": max(spread), "keys": sorted(model.state_dict())}


@row()
def accumulation(row: Row) -> dict[str, Any]:
    """Three micro-batches a step under ``no_sync``: steps count, backwards do not, samples all do."""
    model = row.wrap(models.wide(), sync_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    boundaries = []
    for micro in range(12):
        with model.no_sync() if micro % 3 < 2 else contextlib.nullcontext():
            x, y = batch(rows=4)
            F.cross_entropy(model(x), y).backward()
        if micro % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        boundaries.append(model.boundaries)
    samples = [s.samples for h, s, _ in row.spies[0].pushed if h.kind.value == "delta"]
    return {"boundaries": boundaries, "samples": samples, "apart": apart(model)}


@row()
def several_optimizers(row: Row) -> dict[str, Any]:
    """A boundary falls after both have stepped."""
    module = models.wide()
    model = row.wrap(module, sync_every=2)
    first = torch.optim.SGD(module[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(module[2].parameters(), lr=0.01)
    row.seed()
    between = []
    for _ in range(4):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        first.step()
        between.append(model.boundaries)
        second.step()
        between.append(model.boundaries)
        first.zero_grad()
        second.zero_grad()
    return {"boundaries": between, "apart": apart(model)}


@row()
def grad_scaler(row: Row) -> dict[str, Any]:
    """The second of four steps overflows on rank 1, so all skip it: the boundary comes a step later."""
    model = row.wrap(models.wide(), sync_every=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    row.seed()
    boundaries = []
    for i in range(4):
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        if i == 1 and row.rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        boundaries.append(model.boundaries)
    return {"boundaries": boundaries, "lr": optimizer.param_groups[0]["lr"], "scale": scaler.get_scale(), "apart": apart(model)}


@row()
def join(row: Row) -> dict[str, Any]:
    """Rank r has 3 + r batches: the boundaries due within are put off to the end."""
    model = row.wrap(models.wide(), sync_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    within = []
    with model.join():
        for _ in range(3 + row.rank):
            step(model, optimizer)
            within.append(model.boundaries)
    after = model.boundaries
    spread = apart(model)
    for _ in range(2):  # and the loop after it is an ordinary one
        step(model, optimizer)
    steps = [h.steps for h, _, _ in row.spies[0].pushed if h.kind.value == "delta"]
    samples = [s.samples for h, s, _ in row.spies[0].pushed if h.kind.value == "delta"]
    return {
        "within": within,
        "after": after,
        "apart": spread,
        "later": model.boundaries,
        "steps": steps,
        "samples": samples,
        "version": model.version,
    }


@row()
def join_with_early_termination(row: Row) -> dict[str, Any]:
    """All ranks end with the shortest: boundaries fall within as ever."""
    model = row.wrap(models.wide(), sync_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    error = ""
    try:
        with model.join(throw_on_early_termination=True):
            for _ in range(4 + row.rank):
                step(model, optimizer)
    except RuntimeError as raised:
        error = str(raised)
    return {"boundaries": model.boundaries, "error": error, "apart": apart(model)}


# ---- waiting ---------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _outage(row: Row, until: Callable[[], bool]) -> Iterator[None]:
    """The coordinator is gone from here on; another takes its place on the same port and journal once ``until`` holds."""
    back = None
    if row.coordinator is not None:
        gone, port = row.coordinator, row.coordinator.coordinator.port
        gone.stop()

        def restart() -> None:
            poll = threading.Event()
            while not until():
                poll.wait(0.02)
            row.coordinator = RunningCoordinator(on_port(gone.config, port))

        back = threading.Thread(target=restart)
        back.start()
    yield
    if back is not None:
        back.join()


@row()
def waits_off_the_process_group(row: Row) -> dict[str, Any]:
    """No coordinator for three times the process group's timeout: the ranks wait, and go on."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    model = row.wrap(models.wide(), sync_every=2, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    step(model, optimizer)
    begun = time.monotonic()
    with _outage(row, lambda: time.monotonic() - begun > 3 * TIMEOUT_S):
        step(model, optimizer)
        waited = time.monotonic() - begun
    step(model, optimizer)
    return {"waited": waited, "version": model.version, "apart": apart(model)}


@row()
def trains_on_without_the_network(row: Row) -> dict[str, Any]:
    """``wait_s=0`` and no coordinator: one update on its way, the rest in the next."""
    model = row.wrap(models.wide(), sync_every=2, wait_s=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    data = [batch(rows=4) for _ in range(10)]
    resume = threading.Event()
    step(model, optimizer, data=batch(rows=4))
    versions, start = [], vector(model)
    with _outage(row, resume.is_set):
        for x, y in data:
            step(model, optimizer, data=(x, y))
            versions.append(model.version)
        moved = float((vector(model) - start).abs().max())
        resume.set()
    for _ in range(100000):  # until the news of it has reached a boundary
        step(model, optimizer, data=batch(rows=4))
        if model.version > 0:
            break
    pushed = [(h.update_id.sequence, h.base_version, h.steps, s.samples) for h, s, _ in row.spies[0].pushed]
    return {
        "versions": versions,
        "moved": moved,
        "version": model.version,
        "deltas": [p for p in pushed if p[1] == 0][:2],
        "apart": apart(model),
        "status": row.status()["counters"],
    }


@row()
def overlap(row: Row) -> dict[str, Any]:
    """No coordinator from the first boundary on until the seventh step: the eighth is a boundary, and waits for the version."""
    module = models.wide()
    model = row.wrap(module, sync_every=4, overlap="steps", adopt_every=2, codec="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = DistributedDataParallel(copy.deepcopy(module))
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    row.seed()
    resume = threading.Event()
    versions, spread = [], []

    def steps(n: int) -> None:
        for _ in range(n):
            data = batch(rows=4)
            step(model, optimizer, data=data)
            step(plain, alone, data=data)
            versions.append(model.version)
            spread.append(apart(model))

    steps(3)
    with _outage(row, resume.is_set):
        steps(1)
        sent = vector(plain.module)
        steps(3)
        resume.set()
        steps(1)
    carried = vector(module)
    progress = vector(plain.module) - sent
    anchors = [a.double() for a in model.site._exchange.anchor]  # those of the next update: the weights as they are
    adopted_at = []
    for number in range(9, 2009):
        steps(1)
        if model.version > 1:
            adopted_at.append(number)
            break
    pushed = [(h.update_id.sequence, h.base_version, h.steps, s.samples) for h, s, _ in row.spies[0].pushed]
    return {
        "versions": versions[:8],
        "apart": max(spread),
        "base_to_carried": float((carried - progress - row.from_rank0(lambda: _published(row, 1))).abs().max()),
        "anchored": max(
            float((a - carried[i[0] : i[1]]).abs().max()) for a, i in zip(anchors, model.site._exchange.intervals, strict=True)
        ),
        "adopted_at": adopted_at,
        "deltas": [p for p in pushed if p[2] > 1 or p[1] >= 0][:2],
    }


def _published(row: Row, number: int) -> Tensor:
    """A version's parameters."""
    assert row.coordinator is not None
    with row.coordinator.coordinator.driver.journal.read_version(number) as reader:
        file = VersionFile(reader)
        layout = file.head.layout
        return file.weights((0, layout.parameters), torch.empty(layout.parameters)).double()


@row(site={"fragments": 4, "sync_every": 8})
def fragments(row: Row) -> dict[str, Any]:
    """One site alone, plain averaging: a rank's slice is a part of each fragment; all learn as under DDP."""
    module = models.wide()
    plain = DistributedDataParallel(copy.deepcopy(module))
    model = row.wrap(module, sync_every=8, fragments=4, overlap="steps", adopt_every=1)
    optimizer, alone = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain))
    row.seed()
    spread = []
    for _ in range(20):
        data = batch()
        step(model, optimizer, data=data)
        step(plain, alone, data=data)
        spread.append(apart(model))
    deltas = [(h.fragment.index, s.intervals) for h, s, _ in row.spies[0].pushed if h.fragment is not None]
    return {
        "difference": float((vector(module) - vector(plain.module)).abs().max()),
        "apart": max(spread),
        "turns": [index for index, _ in deltas],
        "elements": {str(index): intervals for index, intervals in deltas},
        "boundaries": model.boundaries,
    }


@row()
def synchronous_start(row: Row) -> dict[str, Any]:
    model = row.wrap(models.wide(), sync_every=3, warmup_sync_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    versions = []
    for _ in range(8):
        step(model, optimizer)
        versions.append(model.version)
    return {"versions": versions, "apart": apart(model)}


@row()
def forked_workers_while_a_transfer_runs(row: Row) -> dict[str, Any]:
    """The network falls silent under open calls: two workers are forked, each epoch anew, while the push hangs in the middle."""
    row.patience = Patience(call_s=2.0, stall_s=2.0)
    proxy = Proxy(row.coordinator.coordinator.port) if row.coordinator else None
    row.address = row.from_rank0(lambda: proxy.address if proxy else "")
    model = row.wrap(models.wide(), sync_every=2, wait_s=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    loader = DataLoader(TensorDataset(*batch(rows=16)), batch_size=4, num_workers=2, multiprocessing_context="fork")
    step(model, optimizer)
    if proxy is not None:
        proxy.freeze()
    dist.barrier()
    step(model, optimizer)  # begins to push
    batches, under_way = 0, []
    for _ in range(2):
        for x, y in loader:
            step(model, optimizer, data=(x, y))
            batches += 1
        under_way.append(len(row.spies[0].pushed) - len(row.spies[0].receipts))
    for _ in range(100000):  # until the push was given up, dialled anew and answered
        step(model, optimizer)
        if model.version > 0:
            break
    if proxy is not None:
        proxy.close()
    return {"batches": batches, "under_way": under_way, "version": model.version, "apart": apart(model)}


# ---- refusals and ends -----------------------------------------------------------------------------------------------------


@row(limits={"max_norm": 1.0})
def refused(row: Row) -> dict[str, Any]:
    """A learning rate far too high: the update is refused; the weights are the version's again, the residual is none."""
    module = models.wide()
    model = row.wrap(module, sync_every=1, codec="int8")
    model.start()
    founded = vector(module)
    row.seed()
    step(model, torch.optim.SGD(module.parameters(), lr=1000.0))
    back = float((vector(module) - founded).abs().max())
    residual = [r is None for r in model.site._exchange.residual]
    version = model.version
    step(model, torch.optim.SGD(module.parameters(), lr=0.01))
    return {
        "back": back,
        "residual": residual,
        "version": version,
        "later": model.version,
        "apart": apart(model),
        "counters": row.status()["counters"],
    }


@row()
def not_finite(row: Row) -> dict[str, Any]:
    """One weight of one rank's slice is NaN: nobody sends, all go back to the version."""
    module = models.wide()
    model = row.wrap(module, sync_every=1)
    model.start()
    founded = vector(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with torch.no_grad():
        if row.rank == 2:
            module[2].bias[-1] = float("nan")
    optimizer.step()
    deltas = [h for h, _, _ in row.spies[0].pushed if h.kind.value == "delta"]
    return {"deltas": len(deltas), "back": float((vector(module) - founded).abs().max()), "version": model.version}


@row()
def unlike_settings(row: Row) -> dict[str, Any]:
    model = row.wrap(models.wide(), sync_every=3 if row.rank == 1 else 2)
    try:
        model.start()
    except FleetError as error:
        return {"error": str(error)}
    return {"error": ""}


@row()
def another_model(row: Row) -> dict[str, Any]:
    founder = row.wrap(models.wide())
    founder.start()
    founder.close()
    stranger = row.wrap(nn.Sequential(nn.Linear(40, 51), nn.ReLU(), nn.Linear(51, 7)))
    try:
        stranger.start()
    except FleetError as error:
        return {"error": str(error), "finished": stranger.finished}
    return {"error": ""}


@row()
def one_rank_fails(row: Row) -> dict[str, Any]:
    """Something of its own befalls one rank while the others wait in polls: first rank 1, then the one that leads."""
    errors = []
    for failing in (1, 0):
        model = row.wrap(models.wide(), sync_every=1)
        model.start()
        if row.rank == failing:
            model.site._push = lambda *parcel: [][0]
        errors.append(_error_of_a_step(model))
    return {"errors": errors}


@row()
def one_rank_closes(row: Row) -> dict[str, Any]:
    errors = []
    for closing in (1, 0):
        model = row.wrap(models.wide(), sync_every=1)
        model.start()
        if row.rank == closing:
            model.close()
        errors.append(_error_of_a_step(model))
    return {"errors": errors}


def _error_of_a_step(model: FleetDDP) -> str:
    try:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except (FleetError, IndexError) as error:
        return str(error)
    return ""


@row(until={"versions": 2})
def end_of_the_run(row: Row) -> dict[str, Any]:
    module = models.wide()
    model = row.wrap(module, sync_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    row.seed()
    seen = []
    for _ in range(4):
        step(model, optimizer)
        seen.append((model.version, bool(model.finished)))
    alone = vector(module)
    step(model, optimizer)
    members = row.status()["members"]
    return {
        "seen": seen,
        "reason": model.finished,
        "trains_on": float((vector(module) - alone).abs().max()) > 0,
        "live": [m["node"] for m in members if m.get("live", True)],
        "boundaries": model.boundaries,
    }


@row(window={"require": []})
def edge_tier(row: Row) -> dict[str, Any]:
    """A group of gateway devices is one edge member; it does not found a run."""
    site = row.wrap(models.wide(), sync_every=1)
    site.start()
    site.close()
    devices = row.wrap(models.wide(1), sync_every=1, tier="edge", site="gateway")
    row.seed()
    step(devices, torch.optim.SGD(devices.parameters(), lr=0.1))
    tiers = {m["node"]: m["tier"] for m in row.status()["members"]}
    return {
        "tiers": tiers,
        "version": devices.version,
        "kinds": [h.kind.value for h, _, _ in row.spies[1].pushed],
        "apart": apart(devices),
    }


# ---- checkpoints -----------------------------------------------------------------------------------------------------------


@row()
def checkpoint_moves(row: Row) -> dict[str, Any]:
    """Each rank has a directory of its own, and at the restart rank 0 is where rank 1 was: what it needs is sent to it."""

    def site(directory: int) -> tuple[FleetDDP, torch.optim.Optimizer, Checkpoint]:
        model = row.wrap(models.wide(), sync_every=2, codec="int8")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, Checkpoint(row.folder / f"disk{directory}", model, optimizer=optimizer)

    model, optimizer, checkpoint = site(row.rank)
    row.seed()
    for _ in range(2):
        step(model, optimizer)
    checkpoint.save()
    draw = torch.randn(3)  # the first draw after the checkpoint
    weights, residual = vector(model), model.site._exchange.residual
    version, boundaries = model.version, model.boundaries
    model.close()
    torch.manual_seed(999)
    model, optimizer, checkpoint = site((row.rank + 1) % row.world)
    loaded = checkpoint.load()
    same_draw = bool(torch.equal(torch.randn(3), draw))
    model.start()
    again = model.site._exchange.residual
    return {
        "loaded": loaded,
        "same_draw": same_draw,
        "weights": float((vector(model) - weights).abs().max()),
        "residual": all(torch.equal(a, b) for a, b in zip(residual, again, strict=True)),
        "step": int(optimizer.state_dict()["state"][0]["step"]),
        "versions": [version, model.version],
        "boundaries": [boundaries, model.boundaries],
    }


def main(out: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    only = os.environ.get("ROWS", "").split()
    results: dict[str, Any] = {}
    for name, (function, sections) in ROWS.items():
        if only and name not in only:
            continue
        surroundings = Row(out / name, rank, world)
        if rank == 0:
            surroundings.folder.mkdir()
            surroundings.coordinator = RunningCoordinator(fleet_config(surroundings.folder, **sections))
        surroundings.address = surroundings.from_rank0(lambda row=surroundings: row.coordinator.address)
        begun = time.monotonic()
        try:
            results[name] = function(surroundings)
        except Exception:
            results[name] = {"traceback": traceback.format_exc()}
        results[name]["seconds"] = time.monotonic() - begun
        (out / f"{rank}.json").write_text(json.dumps(results))
        if "traceback" in results[name]:
            raise SystemExit(f"rank {rank}, row {name}:\n{results[name]['traceback']}")
        os.environ.pop("GROUP_RANK", None)
        dist.barrier()
        for site in surroundings.sites:
            site.close()
        dist.barrier()
        if surroundings.coordinator is not None:
            surroundings.coordinator.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
