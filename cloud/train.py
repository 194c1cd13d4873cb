"""Train a ``Task`` as a site: ``torchrun -m fleetddp.cloud.train fleet.yaml``.

The fleet file names the task and the coordinator; ``FLEETDDP_NODE`` names the site, ``FLEETDDP_TRACK`` its track where it is not
``site.track``. Each rank trains on its part of the task's data, each epoch in an order of its own; rank 0 evaluates each version
that the site adopts and reports the metrics. With ``site.checkpoint`` a restarted site goes on where it was, with as many ranks
as there are then: ``site.global_batch`` keeps the batch as it is, ``site.lr_scaling`` fits the learning rate to it. A task may
have a method ``scheduler(optimizer)``: a scheduler of the learning rate, which is told of every step. With ``site.knowledge`` it
teaches and learns in a track of soft labels besides (``distill.py``). Exit codes: 0 the run or the epochs have ended; 1 failed; 2
a setting; 3 no parent was found for ``site.give_up_s``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sized
from contextlib import nullcontext
from functools import reduce
from itertools import islice
from typing import Any

import google_crc32c
import numpy as np
import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from fleetddp.cloud.checkpoint import Checkpoint
from fleetddp.cloud.collective import tell_all
from fleetddp.cloud.ddp import FleetDDP
from fleetddp.cloud.distill import Distillation
from fleetddp.cloud.participant import Connect, dialer, security_from_environment
from fleetddp.cloud.rate import LearningRate, scale
from fleetddp.cloud.roster import own_name
from fleetddp.cloud.sampler import EpochSampler, portion
from fleetddp.common.config import FleetConfig, SecurityConfig, load
from fleetddp.common.errors import ConfigError, FleetError, GaveUp
from fleetddp.common.layout import unwrap
from fleetddp.common.task import Task, samples_in, to_device
from fleetddp.common.task import load as load_task
from fleetddp.common.telemetry import log_to_terminal

PROBE = 64  # samples of each rank that are compared with the other ranks'
SHARED = 0.1  # of them may be found on another rank: real data holds a few samples twice

_log = logging.getLogger("fleetddp.cloud.train")  # under torchrun -m, __name__ is __main__


class Trainer:
    """One rank's training: the model, the data and where they stand."""

    def __init__(self, config: FleetConfig, device: torch.device) -> None:
        self._track = os.environ.get("FLEETDDP_TRACK", config.site.track)
        fleet, config = config, config.for_track(self._track)
        if config.task is None:
            raise ConfigError("task: the fleet file names no task; give task.target: package.module:Class")
        self._config, self._device = config, device
        self._task: Task = load_task(config.task)
        site = config.site
        rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        assert group is not None  # init_process_group was called
        node = os.environ.get("FLEETDDP_NODE") or tell_all(own_name(), group, device)[0]
        torch.manual_seed(config.seed)  # equal first weights, should this site found the run twice
        self.model = self._wrap(self._task.model().to(device), node)
        self._teacher = self._distillation(fleet, node)
        optimizer: Optimizer = self._task.optimizer(self.model.parameters())
        data = self._task.data(node, rank, world)
        sizes = tell_all(_size(data), group, device)
        if min(sizes) == 0:
            raise ConfigError(f"task: rank {sizes.index(0)} of {world} has no training data")
        self._warn_of_shared_samples(data)
        self._portion = portion(site.batch_size, site.global_batch, rank, world)
        self._sampler = self._order_of(data, sizes)
        self._loader: DataLoader[Any] = DataLoader(
            data,
            batch_sampler=self._sampler,
            num_workers=site.workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator().manual_seed(config.seed),  # a resume in mid-epoch draws nothing from the global one
        )
        batch = self._portion.batch
        self._optimizer = optimizer
        self.rate = LearningRate(optimizer, scale(site.lr_scaling, batch, site.lr_reference_batch or batch), site.lr_warmup_steps)
        make_scheduler = getattr(self._task, "scheduler", None)
        self._scheduler: LRScheduler | None = None if make_scheduler is None else make_scheduler(optimizer)
        self._checkpoint: Checkpoint | None = None
        torch.manual_seed(config.seed + 1 + rank)
        if site.checkpoint is not None:
            objects: dict[str, Any] = {"optimizer": optimizer, "rate": self.rate, "sampler": self._sampler}
            if self._scheduler is not None:
                objects["scheduler"] = self._scheduler
            if self._teacher is not None:
                objects["distillation"] = self._teacher
            self._checkpoint = Checkpoint(site.checkpoint, self.model, **objects)
            self._checkpoint.load()
        self._boundaries, self._version = self.model.boundaries, self.model.version

    def _wrap(self, module: torch.nn.Module, node: str) -> FleetDDP:
        config, site = self._config, self._config.site
        return FleetDDP(
            module,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            coordinator=self._coordinator(),
            site=node,
            sync_every=site.sync_every,
            codec=site.codec,
            uplink=site.uplink,
            wait_s=site.wait_s,
            give_up_s=site.give_up_s,
            overlap=site.overlap,
            adopt_every=site.adopt_every,
            fragments=site.fragments,
            warmup_sync_steps=site.warmup_sync_steps,
            buffers=site.buffers,
            hierarchy=site.hierarchy,
            cross_node=site.cross_node,
            track=self._track,
            include=config.include,
            run=config.run,
            security=None if config.security == SecurityConfig() else config.security,
        )

    def _coordinator(self) -> str | Connect:
        """``FLEETDDP_COORDINATOR``, or else one of ``site.parents``, or else the coordinator's address."""
        config, given = self._config, os.environ.get("FLEETDDP_COORDINATOR")
        parents = config.site.parents
        if given or not parents:
            return given or config.coordinator.address
        security = security_from_environment() if config.security == SecurityConfig() else config.security
        return dialer(parents, security, run=config.run, track=self._track, after_s=config.members.lease_s)

    def _distillation(self, fleet: FleetConfig, node: str) -> Distillation | None:
        """Its part in the track of soft labels that ``site.knowledge`` names."""
        track = self._config.site.knowledge
        if not track:
            return None
        return Distillation(
            self.model,
            fleet.for_track(track),
            track=track,
            task=self._task,
            coordinator=os.environ.get("FLEETDDP_COORDINATOR"),
            site=node,
            security=None if fleet.security == SecurityConfig() else fleet.security,
        )

    def _order_of(self, data: Dataset[Any], sizes: list[int]) -> EpochSampler:
        """How this rank goes through its ``data``; every rank makes the same number of steps. ``sizes``: of all ranks' data."""
        site, seed, size = self._config.site, self._config.seed, _size(data)
        if site.global_batch is None:
            return EpochSampler(size, self._portion, seed, steps=-(-min(sizes) // site.batch_size))
        return EpochSampler(size, self._portion, seed, steps=max(1, sum(sizes) // site.global_batch), around=True)

    def run(self) -> None:
        """Train until the fleet's run is finished, or the epochs are over."""
        self.model.start()
        for batches in self._all_steps():
            if self._teacher is not None:
                self._teacher.step(self._optimizer)
            loss = self._step(batches)
            self._sampler.advance()
            if self.model.boundaries != self._boundaries:
                self._after_boundary(loss)
            if self.model.finished:
                break
        if self._teacher is not None:
            self._teacher.close()
        self.model.close()

    def _all_steps(self) -> Iterator[list[Any]]:
        """The batches of step after step."""
        for epoch in range(self._sampler.epoch, self._config.site.epochs):
            if epoch != self._sampler.epoch:
                self._sampler.set_epoch(epoch)
            self.model.train()  # type: ignore[no-untyped-call]
            batches = iter(self._loader)
            while step := list(islice(batches, len(self._portion.pieces))):
                yield [to_device(batch, self._device) for batch in step]

    def _step(self, batches: list[Any]) -> torch.Tensor:
        """One optimizer step; returns the loss, a mean over this rank's samples (or, of a global batch, its part of the mean)."""
        losses, teacher = [], self._teacher
        learns = teacher is not None and teacher.known > 0
        for place, batch in enumerate(batches, start=1):
            samples = samples_in(batch)
            self.model.count_samples(samples)
            with nullcontext() if place == len(batches) and not learns else self.model.no_sync():
                loss = self._task.loss(self.model, batch)
                if self._config.site.global_batch is not None:
                    # DDP takes the mean over ranks, but they may have unlike numbers of samples, in several pieces each.
                    loss = loss * (samples * dist.get_world_size() / self._portion.batch)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if teacher is not None and learns:
            indices = teacher.draw(teacher.batch_items)
            self.model.distillation_loss(teacher.outputs(indices), indices).backward()  # type: ignore[no-untyped-call]
        self.rate.step()
        self._optimizer.zero_grad()
        if self._scheduler is not None:
            self._scheduler.step()
        return torch.stack(losses).sum()

    def _after_boundary(self, loss: torch.Tensor) -> None:
        self._boundaries = self.model.boundaries
        if self.model.version != self._version:
            self._version = self.model.version
            if dist.get_rank() == 0:
                self._evaluate(float(loss))
        if self._checkpoint is not None and self._boundaries % self._config.site.checkpoint_every == 0:
            self._checkpoint.save()

    def _evaluate(self, loss: float) -> None:
        metrics = dict(self._task.evaluate(unwrap(self.model)))
        self.model.train()  # type: ignore[no-untyped-call]
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        _log.info("version %d, epoch %d: loss %.4f%s", self._version, self._sampler.epoch, loss, f", {shown}" if shown else "")
        if metrics:
            self.model.report(metrics)

    def _warn_of_shared_samples(self, data: Dataset[Any]) -> None:
        """Ranks that train on the same samples do each other's work again."""
        mine = {_fingerprint(data[i]) for i in range(min(_size(data), PROBE))}
        everyone = tell_all(mine, self.model.process_group, self._device)
        for rank, theirs in enumerate(everyone[: dist.get_rank()]):
            if len(mine & theirs) > SHARED * len(mine):
                _log.warning(
                    "ranks %d and %d see the same samples (%d of the first %d): Task.data(member, index, count) should return "
                    "part index of count, for instance by fleetddp.common.task.part",
                    rank,
                    dist.get_rank(),
                    len(mine & theirs),
                    len(mine),
                )


def _size(data: Dataset[Any]) -> int:
    if not isinstance(data, Sized):
        raise ConfigError(f"task: data() returned a {type(data).__name__} without a length; a map-style dataset is due")
    return len(data)


def _fingerprint(sample: Any, digest: int = 0) -> int:
    """A checksum of everything in a sample, however it is nested."""
    if isinstance(sample, torch.Tensor):
        sample = sample.detach().cpu().numpy()
    if isinstance(sample, np.ndarray):
        return int(google_crc32c.extend(digest, sample.tobytes()))
    if isinstance(sample, Mapping):
        sample = list(sample.values())
    if isinstance(sample, (list, tuple)):
        return reduce(lambda so_far, part: _fingerprint(part, so_far), sample, digest)
    return int(google_crc32c.extend(digest, repr(sample).encode()))


def _meeting() -> dict[str, Any]:
    """Where the ranks meet, as arguments of ``init_process_group``.

    An agent of torchrun may keep one store over all restarts. There ranks would find the addresses of processes that are gone,
    and wait for them (torch 2.13, Gloo); so each restart has a prefix of its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, world, is_master=False)  # type: ignore[attr-defined]
    prefix = f"fleetddp/restart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return {"store": dist.PrefixStore(prefix, store), "rank": rank, "world_size": world}  # type: ignore[attr-defined]


def main(arguments: list[str]) -> int:
    """Run one rank; returns the exit code."""
    log_to_terminal()
    if len(arguments) != 1:
        print("usage: torchrun [...] -m fleetddp.cloud.train FLEET.YAML", file=sys.stderr)
        return 2
    try:
        config = load(arguments[0])
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if on_gpu else "gloo", **_meeting())
        try:
            Trainer(config, device).run()
        finally:
            dist.destroy_process_group()
    except ConfigError as error:
        _log.error("%s", error)
        return 2
    except FleetError as error:
        _log.error("%s", error)
        return 3 if isinstance(error, GaveUp) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
