"""The digits task: who holds what, and that it can be learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fleetddp.common.errors import ConfigError
from fleetddp.edge.tasks.digits import Digits

EDGES = tuple(f"edge-{number}" for number in range(1, 7))


def held(task: Digits, member: str) -> TensorDataset:
    data = task.data(member, 0, 1)
    assert isinstance(data, TensorDataset)
    return data


def test_every_image_is_in_one_place() -> None:
    task = Digits(edges=EDGES)
    everywhere = torch.cat([task.test.tensors[0], *(held(task, name).tensors[0] for name in ("site", *EDGES))])
    assert len(everywhere) == 1797
    assert len(torch.unique(everywhere, dim=0)) == 1797
    assert torch.equal(torch.unique(task.test.tensors[1]), torch.arange(10))


def test_the_site_lacks_classes_that_the_edges_have() -> None:
    task = Digits(edges=EDGES)
    assert sorted(set(held(task, "site").tensors[1].tolist())) == [0, 1, 2, 3, 4, 5, 6]
    at_edges = {label for name in EDGES for label in held(task, name).tensors[1].tolist()}
    assert at_edges == set(range(10))


def test_same_seed_same_partition() -> None:
    def rows(seed: int) -> list[Any]:
        return [held(Digits(edges=EDGES, seed=seed), name).tensors[0].tolist() for name in EDGES]

    assert rows(3) == rows(3)
    assert rows(3) != rows(4)


def test_the_edges_are_unlike() -> None:
    task = Digits(edges=EDGES, alpha=1.0)
    shares = torch.stack([torch.bincount(held(task, name).tensors[1], minlength=10) for name in EDGES]).double()
    shares /= shares.sum(1, keepdim=True)
    assert (shares.max(1).values > 0.2).all()  # each has a class that is at least twice as frequent as if drawn evenly


def test_the_same_model_for_every_member_and_nothing_drawn_from_the_global_generator() -> None:
    torch.manual_seed(1)
    first = Digits().model()
    drawn = torch.rand(1)
    second = Digits().model()
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), drawn)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_site_alone_cannot_know_what_it_never_saw() -> None:
    task = Digits(edges=EDGES)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    torch.manual_seed(0)
    for _ in range(8):
        for batch in DataLoader(task.data("site", 0, 1), 32, shuffle=True):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()
    metrics = task.evaluate(model)
    assert metrics["accuracy_8"] == 0.0
    assert metrics["accuracy_0"] > 0.85
    assert 0.6 < metrics["accuracy"] < 0.71


def test_wrong_members_are_named() -> None:
    with pytest.raises(ConfigError, match="no member is called 'pi'; there are site, a, b"):
        Digits(edges=("a", "b")).data("pi", 0, 1)
    with pytest.raises(ConfigError, match="no name twice"):
        Digits(sites=("a",), edges=("a", "b"))
