"""A region between its members and its parent, all in memory."""

from __future__ import annotations

import torch
from helpers.trees import Tree, decoded

from fleetddp.common.layout import Layout
from fleetddp.common.update import State

LAYOUT = Layout.of([("w", (3, 500)), ("b", (7,))], [("mean", (9,))])


def draw(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.elements, generator=torch.Generator().manual_seed(seed))


def test_a_region_seals_what_its_members_send_and_tells_them_what_became_of_it() -> None:
    tree = Tree(LAYOUT, window={"preset": "fedbuff", "quorum": 4})
    tree.region("west", window={"preset": "sync"})
    west = [tree.leaf(f"w{i}", "west") for i in range(3)]
    east = tree.leaf("e")
    tree.settle()
    ids = [leaf.send(draw(i), samples=1.0 + i) for i, leaf in enumerate(west)]
    assert [leaf.state(i).state for leaf, i in zip(west, ids, strict=True)] == [State.ACCEPTED] * 3
    ids.append(east.send(draw(3), samples=4.0))
    tree.settle()
    for leaf, update_id in zip([*west, east], ids, strict=True):
        receipt = leaf.state(update_id)
        assert (receipt.state, receipt.version) == (State.MERGED, 1), receipt
    assert len(tree.regions["west"].pushed) == 1
    version, payload = tree.weights(1)
    assert tree.weights(1, "west") == (version, payload)
    assert version.updates == 4
    mean = sum((1.0 + i) * draw(i).double() for i in range(4)) / 10.0
    found = decoded(payload, LAYOUT, "float32")
    assert torch.allclose(found[:1507].double(), -mean[:1507], rtol=2**-23, atol=1e-12)
    assert torch.allclose(found[1536:].double(), mean[1536:], rtol=2**-23, atol=1e-12)
