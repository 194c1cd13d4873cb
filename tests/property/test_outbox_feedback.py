"""Whatever happens to updates: what was said and not refused, plus what is owed, is what was meant."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetddp.common import codecs
from fleetddp.common.payload import tensor_over
from fleetddp.common.update import Kind, Receipt, State
from fleetddp.edge.outbox import Entry, Nature, Outbox
from fleetddp.edge.trainer import Encoded, Work

N = 7
CODEC = codecs.get("topk:0.3")
NATURE = Nature("phone", "run", "f" * 64, Kind.DELTA, CODEC.spec, ((0, N),))
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["train", "offer", "merged", "refused", "adopt", "restart"]), st.integers(0, 9)), max_size=14
)


@settings(max_examples=25, deadline=None)
@given(OPERATIONS)
def test_nothing_meant_is_lost_and_nothing_refused_comes_back(operations: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        box = Outbox(Path(folder), NATURE)
        box.adopt(0, torch.zeros(N), max_staleness=1000)
        version, local, start = 0, torch.zeros(N), torch.zeros(N)
        offered: dict[int, Entry] = {}  # by sequence
        meant_of: dict[int, Tensor] = {}
        said = torch.zeros(N)
        generator = torch.Generator().manual_seed(1)
        for operation, choice in operations:
            if operation == "train":
                local = local - torch.randint(-8, 9, (N,), generator=generator).float()
                at, end = start, local

                def encode(began: Tensor, residual: Tensor | None, at: Tensor = at, end: Tensor = end) -> Encoded:
                    assert torch.equal(began, at)
                    return Encoded(*CODEC.encode_with_feedback(began - end, residual))

                meant_of[box.put(Work(1, 1, 0.0, 0.0), encode, end).sequence] = start - end
            elif operation == "offer":
                entry = box.offer()
                if entry is not None:
                    if entry.header.update_id.sequence not in offered and entry.header.base_version == version:
                        start = local
                    offered[entry.header.update_id.sequence] = entry
                    box.record(Receipt(update_id=entry.header.update_id, state=State.ACCEPTED))
            elif operation == "adopt":
                version, local, start = version + 1, torch.zeros(N), torch.zeros(N)
                box.adopt(version, local, max_staleness=1000)
            elif operation == "restart":
                pending = [i for i in meant_of if i not in offered]
                box.close()
                box = Outbox(Path(folder), NATURE)
                assert torch.equal(box.local(), local)
                assert len(box) == len(pending) + len(box.open())
            elif box.open():
                update_id = box.open()[choice % len(box.open())]
                box.record(Receipt(update_id=update_id, state=State(operation)))
                if operation == "merged":
                    said += CODEC.decode(tensor_over(offered[update_id.sequence].payload), N)
                else:
                    del meant_of[update_id.sequence]
        # Send what is left, then a last update that means nothing: what it is given to carry is what is owed.
        owed = torch.zeros(N)

        def reveal(began: Tensor, residual: Tensor | None) -> Encoded:
            owed.copy_(torch.zeros(N) if residual is None else residual)
            return Encoded(*CODEC.encode_with_feedback(torch.zeros(N), residual))

        while (entry := box.offer()) is not None:
            box.record(Receipt(update_id=entry.header.update_id, state=State.ACCEPTED))
            offered[entry.header.update_id.sequence] = entry
        for update_id in box.open():
            said += CODEC.decode(tensor_over(offered[update_id.sequence].payload), N)
        box.put(Work(1, 1, 0.0, 0.0), reveal, local)
        box.close()
        assert torch.equal(said + owed, sum(meant_of.values(), torch.zeros(N)))  # small integers: float32 is exact
