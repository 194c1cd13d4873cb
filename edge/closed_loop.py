"""The loop closes: hard samples that devices kept become a proxy set, and those that somebody labelled training data.

A layout never changes within a run, so that a new proxy set is a new track of soft labels (``proxy.file``); members take their
models along. ``proxy_from`` makes the set, ``with_labelled`` the task of a node that trains in that track.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from fleetddp.common.errors import ConfigError
from fleetddp.common.proxy import ProxySet
from fleetddp.common.task import Task, part
from fleetddp.edge.reservoir import HardSamples, digest_of


def proxy_from(kept: Iterable[HardSamples], *, name: str, classes: int) -> ProxySet:
    """The samples of several nodes' reservoirs, each once, by digest: the same set wherever it is made.

    Raises ``ConfigError`` where there is none, or they have different shapes.
    """
    found = {item.digest: item.inputs for samples in kept for item in samples.items}
    if not found:
        raise ConfigError("no hard samples were kept: there is nothing to make a proxy set of")
    shapes = {tuple(inputs.shape) for inputs in found.values()}
    if len(shapes) > 1:
        raise ConfigError(f"the nodes' hard samples have different shapes: {sorted(shapes)}")
    return ProxySet(name, classes, torch.stack([found[digest] for digest in sorted(found)]))


def with_labelled(task: Task, kept: HardSamples) -> Task:
    """The task, with the labelled ones of a node's hard samples, (inputs, label) each, added to what it holds; those that are in
    the proxy set, the node says the label of."""
    return cast(Task, _WithLabelled(task, kept))


class _WithLabelled:
    """Delegates to a task what it does not add to."""

    def __init__(self, task: Task, kept: HardSamples) -> None:
        self._task = task
        self._labelled = [item for item in kept.items if item.label is not None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        """What the task's member holds, and its part of the labelled ones."""
        own = self._task.data(member, index, count)
        if not self._labelled:
            return own
        inputs = torch.stack([item.inputs for item in self._labelled])
        labels = torch.tensor([item.label for item in self._labelled])
        return ConcatDataset([own, part(TensorDataset(inputs, labels), index, count)])

    def known_classes(self, proxy: ProxySet) -> Tensor:
        """Of which items of the set somebody has said the class: i64[n], else -1."""
        labels = {item.digest: item.label for item in self._labelled}
        return torch.tensor([labels.get(digest_of(item), -1) for item in proxy.items])
