"""A region between its members and its parent, all in memory."""

from __future__ import annotations

import torch
from helpers.trees import Tree, decoded

from fleetddp.common.layout import Layout
from fleetddp.common.update import Kind, State

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


def test_a_tree_of_three_levels() -> None:
    """root <- north <- (west <- w0 w1), n; each partial from below is added to its parent's."""
    tree = Tree(LAYOUT, window={"preset": "fedbuff", "quorum": 4})
    tree.region("north", window={"preset": "sync"})
    tree.region("west", "north", window={"preset": "sync"})
    leaves = [tree.leaf("w0", "west"), tree.leaf("w1", "west"), tree.leaf("n", "north"), tree.leaf("r")]
    tree.settle()
    ids = [leaf.send(draw(i), samples=1.0 + i) for i, leaf in enumerate(leaves)]
    tree.settle()
    assert [leaf.state(i).version for leaf, i in zip(leaves, ids, strict=True)] == [1] * 4
    (sent,) = tree.regions["north"].pushed
    assert sent.header.leaf_ids == (ids[2], ids[0], ids[1])
    found = decoded(tree.weights(1, "west")[1], LAYOUT, "float32")
    mean = sum((1.0 + i) * draw(i).double() for i in range(4)) / 10.0
    assert torch.allclose(found[:1507].double(), -mean[:1507], rtol=2**-23, atol=1e-12)


def test_an_overlap_three_levels_up_comes_down_to_whoever_sealed_it() -> None:
    tree = Tree(LAYOUT, window={"preset": "fedbuff", "quorum": 3})
    tree.region("north", window={"preset": "sync", "deadline_s": 30.0})
    tree.region("west", "north", window={"preset": "sync"})
    first, second = tree.leaf("w0", "west"), tree.leaf("w1", "west")
    tree.settle()
    for region in tree.regions.values():
        region.above.down = True
    twice, once = first.send(draw(0)), second.send(draw(1))  # sealed by west, which cannot deliver
    first.move(tree.root)
    assert first.again(twice).state is State.ACCEPTED
    for region in tree.regions.values():
        region.above.down = False
    tree.advance(60.0)
    assert [update.header.leaf_ids for update in tree.regions["west"].pushed[-2:]] == [(twice, once), (once,)]
    assert second.state(once).state is State.ACCEPTED
    other = tree.leaf("r")
    third = other.send(draw(2))
    tree.advance(60.0)
    assert [(leaf.state(i).state, leaf.state(i).version) for leaf, i in ((first, twice), (second, once), (other, third))] == [
        (State.MERGED, 1)
    ] * 3
    assert tree.weights(1)[0].updates == 3
    status = tree.regions["west"].parent().status()["parent"]
    assert (status["partials"], status["asked"]) == (0, 0)


def test_a_region_whose_parent_is_away_gathers_seals_and_delivers_afterwards() -> None:
    tree = Tree(LAYOUT, window={"preset": "fedbuff", "quorum": 6})
    west = tree.region("west", window={"preset": "fedbuff", "quorum": 2})
    leaves = [tree.leaf(f"w{i}", "west") for i in range(2)]
    tree.settle()
    west.above.down = True
    ids = [leaf.send(draw(10 * n + k)) for n in range(3) for k, leaf in enumerate(leaves)]
    tree.advance(100.0)
    assert tree.regions["west"].parent().status()["parent"]["partials"] == 3
    assert tree.root.parent().status()["version"] == 0
    west.above.down = False
    tree.advance(100.0)
    assert [len(update.header.leaf_ids) for update in west.pushed] == [2, 2, 2]
    assert {leaves[0].state(i).version for i in ids[::2]} == {1}


def test_a_region_that_is_started_again_goes_on_with_other_partials_under_new_ids() -> None:
    tree = Tree(LAYOUT, window={"preset": "fedbuff", "quorum": 4})
    own = {"window": {"preset": "fedbuff", "quorum": 2}}
    west = tree.region("west", **own)
    leaf = tree.leaf("w", "west")
    tree.settle()
    west.above.down = True
    ids = [leaf.send(draw(n)) for n in range(3)]  # one partial, and one update in the open window
    sealed = west.driver.journal.enter("west").sealings
    west.stop()
    tree.region("west", **own)
    again = tree.leaf("w", "west")
    again.sequence, again.sent = leaf.sequence, leaf.sent
    tree.settle()
    (before,) = tree.regions["west"].pushed
    assert before == sealed[0][1], "the same partial"
    ids.append(again.send(draw(3)))
    tree.advance(10.0)
    assert [again.state(i).version for i in ids] == [1] * 4
    after = tree.regions["west"].pushed[-1]
    assert after.update_id.incarnation > before.update_id.incarnation
    assert after.update_id.sequence == 2


def test_what_was_settled_before_a_crash_of_the_root_does_not_hide_what_comes_late() -> None:
    """w's update 1 waits in a region that is cut off, 2 goes to the root itself and is merged; then the root is started again."""
    tree = Tree(LAYOUT, window={"preset": "async"}, merge={"staleness": {"max_staleness": 5}})
    west = tree.region("west", window={"preset": "async"})
    leaf = tree.leaf("w", "west")
    tree.settle()
    west.above.down = True
    first = leaf.send(draw(1))
    direct = tree.leaf("w")
    direct.sequence = 1
    second = direct.send(draw(2))
    assert direct.state(second).version == 1
    tree.restart_root()
    west.above.down = False
    tree.settle()
    tree.advance(10.0)
    receipt = leaf.state(first)
    assert (receipt.state, receipt.version) == (State.MERGED, 2)
    assert tree.weights(2)[0].updates == 1


def test_a_member_that_comes_from_another_region_is_answered_by_what_the_root_knows() -> None:
    tree = Tree(LAYOUT, window={"preset": "fedbuff", "quorum": 2})
    west = tree.region("west", window={"preset": "async"})
    tree.region("east", window={"preset": "async"})
    leaf = tree.leaf("w", "west")
    tree.settle()
    known = leaf.send(draw(1))
    west.above.down = True
    lost = leaf.send(draw(2))
    asked = leaf.move(tree.regions["east"])
    assert [receipt.state for receipt in asked] == [State.STAGED, State.STAGED]
    tree.settle()
    assert leaf.state(known).state is State.ACCEPTED
    assert leaf.state(lost).state is State.UNKNOWN
    assert leaf.again(lost).state is State.ACCEPTED
    tree.settle()
    assert [leaf.state(i).version for i in (known, lost)] == [1, 1]
    west.above.down = False
    tree.advance(100.0)
    assert tree.root.parent().status()["version"] == 1, "nothing twice"
    status = west.parent().status()["parent"]
    assert (status["partials"], status["asked"]) == (0, 0)


def test_buffers_and_gradients_and_two_bases_in_one_partial_with_a_lossy_codec() -> None:
    tree = Tree(LAYOUT, window={"preset": "fedbuff", "quorum": 3}, merge={"gradient_lr": 0.5})
    tree.region("west", window={"preset": "fedbuff", "quorum": 3}, codec="int8")
    leaves = [tree.leaf(f"w{i}", "west") for i in range(3)]
    tree.settle()
    for n, leaf in enumerate(leaves):
        leaf.send(draw(n))
    tree.settle()
    one = decoded(tree.weights(1)[1], LAYOUT, "float32")
    leaves[0].send(draw(5), base=1)
    leaves[1].send(draw(6), base=1, kind=Kind.GRADIENT)
    leaves[2].send(draw(7), base=0)
    tree.settle()
    two = decoded(tree.weights(2)[1], LAYOUT, "float32")
    discount = 2**-0.5
    step = (draw(5) + 0.5 * draw(6) + discount * draw(7))[:1507] / 3
    assert float((one[:1507] - two[:1507] - step).abs().max()) < 0.05  # int8, and the residual of version 1
    mean = (draw(5)[1536:] + discount * draw(7)[1536:]) / (1 + discount)
    assert torch.allclose(two[1536:], mean, atol=1e-6), "never through the lossy codec"
