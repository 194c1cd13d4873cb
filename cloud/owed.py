"""What a site owes the fleet: the work behind its next update, and what its ranks tell each other of it at a boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist


@dataclass(slots=True)
class Owed:
    """What is behind the next update of a fragment, on one rank."""

    steps: int = 0  # counted
    samples: float = 0.0
    seconds: float = 0.0  # spent on them


class Told(NamedTuple):
    """What one rank tells the others."""

    samples: float
    seconds: float  # spent on them
    finite: bool


def tell(owed: Owed, *, finite: bool, group: dist.ProcessGroup, device: torch.device) -> list[Told]:
    """What all ranks tell, by rank: the one collective before the network."""
    row = torch.tensor(Told(owed.samples, owed.seconds, finite), dtype=torch.float64, device=device)
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    return [Told(samples, seconds, bool(flag)) for samples, seconds, flag in torch.stack(rows).tolist()]


def samples_of_stream(told: Sequence[Told], pushers: Sequence[int], rank: int) -> float:
    """A rank's samples; those of ranks without a slice (not in ``pushers``) go with the first stream."""
    others = sum(t.samples for r, t in enumerate(told) if r not in pushers) if rank == pushers[0] else 0.0
    return told[rank].samples + others
