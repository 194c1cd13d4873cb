"""Only named parts of a model are exchanged: adapters and a head; the rest is nobody else's business."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.fleet import fleet_config
from helpers.one_rank import OneRank, process_group, step
from torch import Tensor, nn

from fleetddp.common.clock import SystemClock
from fleetddp.common.errors import ConfigError
from fleetddp.common.layout import Layout
from fleetddp.common.publish import save_init
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.common.transport.weights import fetch
from fleetddp.edge import EdgeNode
from fleetddp.edge.tasks.adapters import Adapted, AdaptedDigits

INCLUDE = ("adapter.*", "head.*")


@pytest.fixture(scope="module", autouse=True)
def gloo() -> Iterator[None]:
    with process_group():
        yield


def adapted(seed: int) -> Adapted:
    torch.manual_seed(seed)
    model = Adapted(rank=4)
    for parameter in model.adapter.parameters():
        nn.init.normal_(parameter)
    return model


def parts(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Copies of what is exchanged, and of what is not."""
    shared, local = {}, {}
    for name, parameter in module.named_parameters():
        (shared if name.startswith(("adapter.", "head.")) else local)[name] = parameter.detach().clone()
    return shared, local


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- the layout -------------------------------------------------------------------------------------------------------------


def test_a_layout_holds_what_the_patterns_name_in_the_models_order() -> None:
    names = [t.name for t in Layout.from_module(adapted(0), include=("head.*", "adapter.*")).tensors]
    assert names == [
        "adapter.0.0.weight",
        "adapter.0.1.weight",
        "adapter.1.0.weight",
        "adapter.1.1.weight",
        "head.weight",
        "head.bias",
    ]


def test_buffers_are_named_like_parameters() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    layout = Layout.from_module(module, include=("1.*", "2.w*"))
    assert [(t.name, t.role) for t in layout.tensors] == [
        ("1.weight", "parameter"),
        ("1.bias", "parameter"),
        ("2.weight", "parameter"),
        ("1.running_mean", "buffer"),
        ("1.running_var", "buffer"),
    ]
    layout.check(module, include=("1.*", "2.w*"))


@pytest.mark.parametrize("pattern", ["hed.*", "backbone.*", "Head.*"])
def test_a_pattern_that_matches_nothing_is_an_error_that_names_what_there_is(pattern: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Layout.from_module(adapted(0), include=("head.*", pattern))
    assert str(caught.value).startswith(f"include: {pattern!r} matches nothing that can be exchanged; there are: norm.weight, ")
    assert "head.bias" in str(caught.value)
    assert "backbone.0" not in str(caught.value)  # it is frozen


# ---- members ----------------------------------------------------------------------------------------------------------------


def test_a_site_takes_up_the_named_parts_and_nothing_else(tmp_path: Path) -> None:
    one = OneRank(tmp_path)
    founder, follower = adapted(0), adapted(1)
    shared, local = parts(founder)
    _, own = parts(follower)
    one.site(founder, include=INCLUDE).start()
    wrapped = one.site(follower, site="other", include=INCLUDE)
    wrapped.start()
    assert same(parts(follower)[0], shared)
    assert same(parts(follower)[1], own)
    optimizer = torch.optim.SGD([p for p in follower.parameters() if p.requires_grad], lr=0.1)
    step(wrapped, optimizer, torch.randn(8, 64))  # a boundary: its update, and the version made of it
    assert wrapped.version == 1
    _, now = parts(follower)
    moved = {name for name in own if not torch.equal(now[name], own[name])}
    assert moved == {"norm.weight", "norm.bias"}  # trained, and kept
    assert same(parts(founder)[1], local)
    one.close()


def test_edge_nodes_share_adapters_and_head(tmp_path: Path) -> None:
    task = AdaptedDigits(sites=[], edges=["a", "b"], rank=4)
    save_init(task.model(), tmp_path / "init.safetensors", include=INCLUDE)
    config = fleet_config(
        tmp_path,
        include=list(INCLUDE),
        start={"bootstrap": "file", "file": str(tmp_path / "init.safetensors")},
        window={"preset": "sync"},
        edge={"steps": 5, "batch_size": 8, "state": str(tmp_path / "edges")},
        until={"versions": 3},
    )
    fleet = MemoryFleet(config, SystemClock())
    nodes = [EdgeNode(config, task, fleet.parent(), name=name) for name in ("a", "b")]
    threads = [threading.Thread(target=node.run) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    first, observer = task.model(), fleet.parent()
    layout = Layout.from_module(first, include=INCLUDE)
    assert observer.layout() == layout
    assert not torch.equal(fetch(observer, 3, layout), layout.read(first))
    frozen = {name: p for name, p in first.named_parameters() if name.startswith("backbone.")}
    models = [node._trainer.model for node in nodes]
    for model in models:
        assert same({name: p for name, p in model.named_parameters() if name in frozen}, frozen)
    norms = [parts(model)[1]["norm.weight"] for model in models]
    assert not torch.equal(norms[0], norms[1])
    fleet.stop()
