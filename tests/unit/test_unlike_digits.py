"""Digits for unlike models: who holds what."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from fleetddp.common.errors import ConfigError
from fleetddp.edge.tasks.unlike_digits import SEES, UnlikeDigits


def test_every_image_is_in_one_place_and_nobody_has_all_classes() -> None:
    task = UnlikeDigits()
    parts = [task.proxy(), task.test.tensors[0]]
    for member, classes in SEES.items():
        data = task.data(member, 0, 1)
        assert isinstance(data, TensorDataset)
        parts.append(data.tensors[0])
        assert set(data.tensors[1].tolist()) == set(classes) != set(range(10))
    everything = torch.cat(parts)
    assert len(everything) == len(torch.unique(everything, dim=0)) == 1797
    assert set(task.test.tensors[1].tolist()) == set(range(10))


def test_the_edges_model_is_a_tenth_of_the_clouds() -> None:
    edge, cloud = (sum(p.numel() for p in UnlikeDigits(role).model().parameters()) for role in ("edge", "cloud"))
    assert (edge, cloud) == (9_610, 118_186)
    assert edge <= cloud / 10


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="role is cloud or edge"):
        UnlikeDigits("both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no member is called 'attic'"):
        UnlikeDigits().data("attic", 0, 1)
