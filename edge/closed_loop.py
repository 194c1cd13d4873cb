"""The loop closes: what a device found hard becomes proxy data of its fleet, and what somebody labelled training data.

A node of a track of soft labels learns from the labelled ones of its reservoir like from data of its own. Where the fleet file
permits it (``cascade.hard_samples.share``), it offers all of them as open items of the track's proxy set: the next versions are
labelled on them, by everybody, and the node says the labels that it knows. What is removed from the reservoir, or shared no
longer because the permission or the consent was withdrawn, is taken back.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Dataset, IterableDataset

from fleetddp.common.config import FleetConfig
from fleetddp.common.errors import Refused
from fleetddp.common.events import Share
from fleetddp.common.knowledge import Knowledge
from fleetddp.common.open_items import bytes_of_sample
from fleetddp.common.task import Task
from fleetddp.common.transport import MEMBER_REASONS, Parent
from fleetddp.common.transport.limits import MAX_OFFERED
from fleetddp.edge.reservoir import HardSample, LabelSource, Reservoir, all_taken_back, folder_of, was_shared

_log = logging.getLogger(__name__)


class ClosedLoop:
    """Of one node. ``reservoir``: its hard samples; None: it keeps none (any more). ``label_source``: whom to ask about some."""

    def __init__(
        self, config: FleetConfig, node: str, *, reservoir: Reservoir | None, label_source: LabelSource | None = None
    ) -> None:
        self._config, self._node = config, node
        self._reservoir, self._label_source = reservoir, label_source
        self._labelled: list[HardSample] = []
        kept = config.cascade.hard_samples
        self._folder: Path = folder_of(kept, node) if reservoir is None else reservoir.folder
        self._permitted = kept.share
        self._room = config.proxy is not None and config.proxy.open is not None
        self._offers = kept.share and self._room and reservoir is not None
        if kept.share and not self._offers:
            why = "the node was given no reservoir" if self._room else "proxy.open gives this track no room for them"
            _log.warning("%s: hard samples are not shared, though the fleet file permits it: %s", node, why)

    # ---- what the node learns from --------------------------------------------------------------------------------------------

    def task(self, task: Task) -> Task:
        """The task, whose data have the labelled samples, (inputs, label) each, among them as they come.

        An ``IterableDataset`` stays as it is: then they are learnt by their labels in the proxy set alone.
        """
        return task if self._reservoir is None else cast(Task, _Widened(task, self._labelled))

    def learn(self, knowledge: Knowledge) -> None:
        """Ask the label source, and take up the labels that there are."""
        if self._reservoir is None:
            return
        if self._label_source is not None:
            self._reservoir.ask(self._label_source)
        self._labelled[:] = self._reservoir.labelled().items
        if self._permitted:
            knowledge.know_opened({item.digest: item.label for item in self._labelled if item.label is not None})

    # ---- what others get ------------------------------------------------------------------------------------------------------

    def exchange(self, parent: Parent, incarnation: int, run: str, *, offers: bool = True) -> None:
        """Take back what is to be taken back, and offer the next samples if it ``offers`` now.

        ``run`` names the run and the layout. Raises ``Unreachable`` and the refusals that a retry can mend; any other ends the
        sharing.
        """
        if not self._room:
            return
        if not self._permitted:
            if was_shared(self._folder):
                erased = parent.withdraw(self._share(incarnation, takes_back=True))
                all_taken_back(self._folder)
                _log.info("%s: hard samples are shared no longer; %d were taken back", self._node, erased)
        elif self._reservoir is not None:
            removed = tuple(self._reservoir.to_take_back(run, MAX_OFFERED))
            if removed:
                parent.withdraw(self._share(incarnation, digests=removed, takes_back=True))
                self._reservoir.taken_back(run, removed)
            if self._offers and offers:
                self._offer_or_end(self._reservoir, parent, incarnation, run)

    def _offer_or_end(self, reservoir: Reservoir, parent: Parent, incarnation: int, run: str) -> None:
        try:
            self._offer(reservoir, parent, incarnation, run)
        except Refused as refusal:
            if refusal.retry or refusal.reason in MEMBER_REASONS:
                raise
            self._end(str(refusal))

    def _offer(self, reservoir: Reservoir, parent: Parent, incarnation: int, run: str) -> None:
        samples = {item.digest: item.inputs for item in reservoir.unshared(run, MAX_OFFERED)}
        if not samples:
            return
        reservoir.note_sharing(run, tuple(samples))
        shape = tuple(next(iter(samples.values())).shape)
        offer = self._share(incarnation, shape=shape, digests=tuple(samples))
        shared = parent.share(offer, lambda digest: bytes_of_sample(samples[digest]))
        reservoir.known_there(run, shared.known)
        _log.info("%s: %d hard samples are open items now, %d more have room", self._node, len(shared.known), shared.room)
        if not shared.room:
            self._end("there is no more room for them")

    def _end(self, why: str) -> None:
        self._offers = False
        _log.warning("%s: no more hard samples are shared: %s", self._node, why)

    def _share(self, incarnation: int, **fields: Any) -> Share:
        return Share(node=self._node, incarnation=incarnation, of=self._node, run=self._config.run, **fields)


class _Widened:
    """Delegates to a task what it does not add to."""

    def __init__(self, task: Task, labelled: list[HardSample]) -> None:
        self._task, self._labelled = task, labelled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def data(self, member: str, index: int, count: int) -> Dataset[Any]:
        """What the task's member holds, and the labelled samples that there are when a sample is taken."""
        own = self._task.data(member, index, count)
        return own if isinstance(own, IterableDataset) else _And(own, self._labelled)


class _And(Dataset[Any]):
    """A dataset, and samples that come while it is in use."""

    def __init__(self, own: Dataset[Any], samples: list[HardSample]) -> None:
        self._own, self._samples = own, samples
        self._size = len(own)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._size + len(self._samples)

    def __getitem__(self, index: int) -> Any:
        if index < self._size:
            return self._own[index]
        if not self._samples:  # there may be fewer than when the epoch began
            return self._own[index % self._size]
        item = self._samples[(index - self._size) % len(self._samples)]
        return item.inputs, torch.tensor(item.label)
