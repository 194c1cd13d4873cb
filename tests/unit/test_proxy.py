"""Proxy sets: what they are is their content; whose turn an item is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fleetddp.common.errors import ConfigError
from fleetddp.common.proxy import ProxySet, assigned


def test_a_saved_set_is_the_same_set(tmp_path: Path) -> None:
    proxy = ProxySet("letters", 3, torch.randn(5, 2, 2)[:, :, 0])  # not contiguous
    proxy.save(tmp_path / "letters.safetensors")
    found = ProxySet.open(tmp_path / "letters.safetensors", name="letters", classes=3)
    assert torch.equal(found.items, proxy.items)
    assert found.digest == proxy.digest
    assert len(found) == 5
    assert torch.equal(found[torch.tensor([4, 0])], proxy.items[[4, 0]])


def test_the_digest_tells_contents_shapes_and_types_apart() -> None:
    items = torch.arange(6, dtype=torch.int32)
    others = [items.view(2, 3), items.view(3, 2), items.flip(0).view(2, 3), items.view(torch.float32).view(2, 3)]
    assert len({ProxySet("letters", 3, other).digest for other in others}) == 4
    assert ProxySet("digits", 9, items).digest == ProxySet("letters", 3, items).digest


def test_what_is_no_proxy_set(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(ConfigError, match="holds no tensor 'items'"):
        ProxySet.open(path, name="x", classes=2)
    save_file({"others": torch.zeros(2)}, path)
    with pytest.raises(ConfigError, match="holds no tensor 'items'"):
        ProxySet.open(path, name="x", classes=2)
    save_file({"items": torch.zeros(0, 4)}, path)
    with pytest.raises(ConfigError, match="there is no item"):
        ProxySet.open(path, name="x", classes=2)


def test_the_run_walks_round_the_set() -> None:
    assert [assigned(v, 10, 4) for v in range(4)] == [((0, 4),), ((4, 8),), ((0, 2), (8, 10)), ((2, 6),)]
    assert assigned(-1, 10, 4) == assigned(0, 10, 4)
    assert assigned(7, 10, 10) == assigned(7, 10, 99) == ((0, 10),)


@pytest.mark.parametrize(("items", "count"), [(10, 3), (400, 100), (7, 5), (5, 1)])
def test_everything_has_its_turn(items: int, count: int) -> None:
    turns = -(-items // count)
    for first in range(items):
        labelled = {
            i for v in range(first, first + turns) for start, stop in assigned(v, items, count) for i in range(start, stop)
        }
        assert labelled == set(range(items))
        assert sum(stop - start for start, stop in assigned(first, items, count)) == count
