"""Small modules, one for each thing a layout must get right. All are made from a seed: equal seeds, equal weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def odd(seed: int = 0) -> nn.Sequential:
    """Odd sizes: 77 + 11 + 33 + 3 = 124 parameters, less than one block."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))


def wide(seed: int = 0) -> nn.Sequential:
    """Several blocks and a short one: 40 * 50 + 50 + 50 * 7 + 7 = 2407 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 7))


def batch_norm(seed: int = 0) -> nn.Sequential:
    """60 + 10 + 10 + 10 + 40 + 4 = 134 parameters, 2 x 10 float buffers, one integer buffer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4))


def convolution(seed: int = 0) -> nn.Sequential:
    """A channels-last weight (its memory is not in the order of its shape): 5 * 3 * 2 * 2 + 5 = 65 parameters."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(3, 5, 2))
    return module.to(memory_format=torch.channels_last)


def bfloat16(seed: int = 0) -> nn.Sequential:
    """``odd`` with its first layer in bfloat16."""
    module = odd(seed)
    module[0].to(torch.bfloat16)
    return module


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, too: 9 * 5 + 9 = 54 parameters."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(9, 5)
        self.output = nn.Linear(5, 9)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens).mean(dim=1))


class Assorted(nn.Module):
    """Parameters and float buffers of any shapes: ``p0``, ``p1``, ... and ``b0``, ``b1``, ..."""

    def __init__(self, parameters: Sequence[Sequence[int]], buffers: Sequence[Sequence[int]] = (), seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for index, shape in enumerate(parameters):
            self.register_parameter(f"p{index}", nn.Parameter(torch.randn(tuple(shape), generator=generator)))
        for index, shape in enumerate(buffers):
            self.register_buffer(f"b{index}", torch.randn(tuple(shape), generator=generator))
