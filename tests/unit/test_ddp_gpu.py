"""A site of one GPU over NCCL: slices encoded on the device, pinned memory, SyncBatchNorm. Skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.one_rank import OneRank, step, vector
from torch import nn

from fleetddp.cloud import Checkpoint

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and dist.is_nccl_available()), reason="no GPU with NCCL")


@pytest.fixture
def one(tmp_path: Path) -> Iterator[OneRank]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    fleet = OneRank(tmp_path / "fleet")
    yield fleet
    fleet.close()
    dist.destroy_process_group()


def module() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 7))
    return nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()


@pytest.mark.parametrize("codec", ["float32", "int8", "topk:0.1"])
def test_a_site_on_a_gpu(one: OneRank, tmp_path: Path, codec: str) -> None:
    model = one.site(module(), sync_every=2, codec=codec, device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for overflow in (False, True, False, False, False):  # the skipped step does not count
        with torch.autocast("cuda"):
            loss = model(torch.randn(8, 40, device="cuda")).square().mean()
        scaler.scale(loss * float("inf") if overflow else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (model.boundaries, model.version) == (2, 2)
    assert all(p.is_cuda for p in model.parameters())
    checkpoint = Checkpoint(tmp_path / "checkpoint", model, optimizer=optimizer, scaler=scaler)
    checkpoint.save()
    draw = torch.randn(3, device="cuda")
    weights = vector(model.module).clone()
    model.close()

    again = one.site(module(), sync_every=1, codec=codec, device_ids=[0])
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.01, fused=True)
    assert Checkpoint(tmp_path / "checkpoint", again, optimizer=optimizer, scaler=scaler).load()
    assert torch.equal(torch.randn(3, device="cuda"), draw)
    assert torch.equal(vector(again.module), weights)
    step(again, optimizer, torch.randn(8, 40, device="cuda"))
    assert again.version == 3
