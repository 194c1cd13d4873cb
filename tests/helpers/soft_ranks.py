"""What the ranks of a torchrun job do for ``test_distillation.py``: two ranks, Gloo.

    torchrun --nproc-per-node 2 tests/helpers/soft_ranks.py OUT

Rank 0 runs a real coordinator of a track of soft labels and an edge node of it. Each rank writes what it saw to OUT/<rank>.json.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fleetddp.cloud import Distillation
from fleetddp.common.config import SecurityConfig
from fleetddp.common.distill import consensus, soft_loss
from fleetddp.common.events import Join, Share
from fleetddp.common.knowledge import Knowledge
from fleetddp.common.open_items import bytes_of_sample, digest_of
from fleetddp.common.transport.uplink import Uplink
from fleetddp.common.update import Tier
from fleetddp.edge.distilled import DistilledNode
from helpers.fleet import RunningCoordinator
from helpers.one_rank import vector
from helpers.soft_tasks import Corners, cloud, proxy_set, soft_config

TASK = Corners({"e1": (0, 1, 2, 3)})
PROXY = proxy_set(TASK)


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = soft_config(
        out,
        PROXY,
        window={"preset": "async"},
        merge={"staleness": {"discount": {"kind": "constant"}}},
        site={"sync_every": 1},
        edge={"steps": 20, "state": str(out / "edge")},
        distill={"label_items": 7, "learn_from": "others"},
    )
    coordinator = node = uplink = None
    if rank == 0:
        coordinator = RunningCoordinator(config)
        uplink = Uplink(coordinator.address, SecurityConfig(), node="e1")
        node = DistilledNode(config, TASK, uplink, name="e1", proxy=PROXY)
        threading.Thread(target=node.run, daemon=True).start()
    box = [coordinator.address if coordinator else ""]
    dist.broadcast_object_list(box, 0)
    model = DistributedDataParallel(Corners({}, width=9).model())
    teacher = Distillation(model, config, proxy=PROXY, coordinator=box[0], site="lab", task=TASK)
    weights = vector(model.module)
    seen: dict[str, Any] = {}
    deadline = time.monotonic() + 60
    while not (teacher.step() and teacher.known >= 14):
        assert time.monotonic() < deadline
    seen["version"], seen["rows"] = teacher.version, teacher.knowledge.rows.tolist()
    seen["indices"] = teacher.draw(5).tolist()
    indices = torch.tensor(seen["indices"])
    loss = teacher.loss(teacher.outputs(indices), indices)
    loss.backward()  # type: ignore[no-untyped-call]
    seen["gradient"] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).tolist()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, seen["indices"])
    seen["due_gradient"] = mean_gradient(teacher, everyone)
    if coordinator is not None:
        seen["said"], seen["meant"] = said_and_meant(box[0], config, teacher, model.module)
    seen["unchanged"] = torch.equal(vector(model.module), weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    before = float(loss.detach())
    teacher.ensemble(optimizer, 30)
    seen["learnt"] = float(teacher.loss(teacher.outputs(indices), indices).detach()) < before / 2
    seen["weights"] = vector(model.module).tolist()
    dist.barrier()
    teacher.close()
    if coordinator is not None and node is not None:
        node.stop()
        coordinator.stop()
    seen["opened"] = opened(out)
    (out / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def opened(out: Path) -> dict[str, Any]:
    """Of a track with room for samples: what this rank has of those that a device has shared, and what the site said of them."""
    room = {"items": 5, "retention_hours": 1.0, "shape": [2]}
    sections: dict[str, Any] = {"window": {"preset": "async"}, "site": {"sync_every": 1}, "distill": {"label_items": 8}}
    config = soft_config(out / "open", PROXY, source={"open": room}, **sections)
    coordinator = uplink = None
    samples = {digest_of(point): point for point in cloud(3, 9)[0]}
    box = [""]
    if dist.get_rank() == 0:
        coordinator = RunningCoordinator(config)
        box = [coordinator.address]
        uplink = Uplink(coordinator.address, SecurityConfig(), node="e1", run="test")
        uplink.join(Join(node="e1", tier=Tier.EDGE, incarnation=1))
        offer = Share(node="e1", incarnation=1, of="e1", shape=(2,), digests=tuple(samples))
        uplink.share(offer, lambda digest: bytes_of_sample(samples[digest]))
    dist.broadcast_object_list(box, 0)
    model = DistributedDataParallel(Corners({}, width=9).model())
    teacher = Distillation(model, config, proxy=PROXY, coordinator=box[0], site="lab", task=TASK, folder=out / "proxy")
    deadline = time.monotonic() + 60
    while int((teacher.knowledge.rows[40:, -1] > 0).sum()) < 3:
        teacher.step()
        assert time.monotonic() < deadline
    held = teacher.knowledge.opened.held
    with torch.no_grad():
        meant = teacher.knowledge.rows_of(model.module(torch.stack([held[slot] for slot in range(3)])))
    found = {
        "held": {str(slot): digest_of(item) for slot, item in held.items()},
        "rows": teacher.knowledge.rows[40:43].tolist(),
        "meant": meant.tolist(),
        "shared": sorted(samples),
    }
    dist.barrier()
    teacher.close()
    if coordinator is not None and uplink is not None:
        uplink.close()
        coordinator.stop()
    return found


def mean_gradient(teacher: Distillation, drawn: list[list[int]]) -> list[float]:
    """The gradient of the mean of both ranks' losses, without DDP."""
    alone = Corners({}, width=9).model()
    labels, weights = consensus(teacher.knowledge.rows)
    losses = []
    for indices in drawn:
        known = (weights[indices] > 0).float()
        losses.append(soft_loss(alone(PROXY.items[indices]), labels[indices], 2.0, known))
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in alone.parameters() if p.grad is not None]).tolist()


def said_and_meant(address: str, config: Any, teacher: Distillation, module: torch.nn.Module) -> tuple[Any, Any]:
    """The rows that the coordinator holds of what the site has said, and what its model says of these items."""
    uplink = Uplink(address, SecurityConfig(), node="observer")
    observer = Knowledge(PROXY, config, Tier.EDGE)  # learns from sites
    deadline = time.monotonic() + 60
    while not (observer.rows[teacher.knowledge.due(), -1] > 0).all():
        assert time.monotonic() < deadline
        observer.version = -1
        observer.take(uplink, int(uplink.status()["version"]))
    uplink.close()
    with torch.no_grad():
        meant = teacher.knowledge.rows_of(module(PROXY.items))
    known = observer.rows[:, -1] > 0
    return observer.rows[known].tolist(), meant[known].tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
