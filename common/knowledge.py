"""A member's part in a track of soft labels: what it holds of what others say, what it says itself.

A version of the track holds a row for each item (``labels.py``). A member brings the rows that others have renewed, learns from
their consensus (``loss``), and labels the items whose turn it is (``due``, ``say``): soft labels, weighed by how sure it is.
Where the set has room for hard samples (``proxy.open``), row n + s of a set of n items is of the sample in slot s; a member
brings those with the rows, and learns from and labels what it has of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetddp.common import codecs, labels
from fleetddp.common.clock import Clock, SystemClock
from fleetddp.common.config import FleetConfig
from fleetddp.common.distill import certainty, consensus, mixing, soft_loss, soften, to_rows
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.open_items import ItemStore, OpenItem, bring
from fleetddp.common.payload import Geometry, bytes_of, tensor_over
from fleetddp.common.proxy import ProxySet, assigned, runs, shape_of
from fleetddp.common.shelf import ProxySource
from fleetddp.common.shelf import bring as bring_proxy
from fleetddp.common.transport import Parent
from fleetddp.common.update import NO_VERSION, Interval, Kind, Slice, Tier, UpdateHeader, UpdateId

LATE = 1  # versions: a label is mostly merged in the one after its base; so much later it is still noticed


class Saying(NamedTuple):
    """An update of soft labels, ready to be pushed."""

    header: UpdateHeader
    slice: Slice
    payload: memoryview


class Opened(NamedTuple):
    """What a member has of the open items."""

    items: tuple[OpenItem, ...] = ()  # all that there are or were
    held: Mapping[int, Tensor] = {}  # by slot: f32[shape]


class Knowledge:
    """Of one member; used from one thread at a time. ``config`` is the fleet file as the track sees it (``for_track``).

    ``rows`` f32[n, C + 1] is what is held of what those say from whom this member learns, ``version`` up to which it was brought;
    n counts the slots of open items, too. ``store``: where open items are kept; None: in memory. Raises ``ConfigError`` for a set
    that is not the fleet file's.
    """

    def __init__(
        self,
        proxy: ProxySet,
        config: FleetConfig,
        tier: Tier,
        *,
        device: torch.device | str = "cpu",
        store: Path | None = None,
        clock: Clock | None = None,
    ) -> None:
        if config.proxy is None:
            raise ConfigError("proxy: this track is not one of soft labels; name one of kind: logits")
        _check(proxy, config)
        self.proxy, self.config = proxy, config.distill
        self.count = len(proxy) + config.proxy.open_items
        self.layout = labels.layout_of(proxy.name, proxy.digest, self.count, proxy.classes, by_tier=config.proxy.by_tier)
        self.version = NO_VERSION
        self.rows = torch.zeros(self.count, proxy.classes + 1)
        self.bytes_pulled = self.bytes_pushed = 0  # of payloads
        self._tier, self._device = tier, torch.device(device)
        self._published = codecs.get(codec_of(config.publish, proxy.classes))
        self._codec = codecs.get(codec_of(self.config.codec, proxy.classes))
        self._items = proxy.items.to(self._device)
        self._certain = torch.full((len(proxy),), -1)
        self._told_labels: Mapping[str, int] = {}  # of open items, by digest
        self._store: ItemStore | None = None
        self.opened = Opened()
        if config.proxy.open is not None:
            shape_of(proxy, config.proxy.open)
            self._store = ItemStore.open(store, clock or SystemClock())
            self._read_store()
        self._refresh()

    def close(self, *, finished: bool = False) -> None:
        """Release the store's file; ``finished``: the run is over, and nobody's samples stay on this disk."""
        if self._store is not None:
            if finished:
                self._store.erase_all()
            self._store.close()

    # ---- what others say ------------------------------------------------------------------------------------------------------

    @property
    def known(self) -> int:
        """Of how many items somebody's opinion is held."""
        return len(self._known)

    def items(self, indices: Tensor) -> Tensor:
        """Those items, on the member's device; of the open ones those that are held."""
        indices = indices.to(self._device)
        count = len(self.proxy)
        found = self._items[indices.clamp(max=count - 1)]
        for place in torch.nonzero(indices >= count).flatten().tolist():
            found[place] = self.opened.held[int(indices[place]) - count]
        return found

    def draw(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """``count`` item numbers i64, with repetition, of those that somebody has an opinion of; of all where nobody has."""
        pool = self._known if len(self._known) else torch.arange(len(self.proxy))
        return pool[torch.randint(len(pool), (count,), generator=generator)]

    def loss(self, outputs: Tensor, indices: Tensor) -> Tensor:
        """The loss of what the model says f[b, C] (logits, with gradient) of the items ``indices`` i64[b] against the consensus.

        ``mix`` (or less, in the first ``ramp_versions``) times ``soft_loss``. Items of which nobody has an opinion do not count.
        """
        if outputs.shape != (len(indices), self.proxy.classes):
            due = (len(indices), self.proxy.classes)
            raise ConfigError(f"distillation: outputs are logits of shape {due}, one row an index, not {tuple(outputs.shape)}")
        indices = indices.to(self._device)
        known = (self._weights[indices] > 0).float()
        factor = mixing(self.config.mix, self.config.ramp_versions, self.version)
        return factor * soft_loss(outputs, self._labels[indices], self.config.temperature, known)

    def take(self, parent: Parent, version: int) -> None:
        """Bring what others have renewed by ``version``, at most ``pull_items`` rows of it, and the open items there are.

        Raises what ``Parent.pull`` and ``open_items.bring`` do.
        """
        if self._store is not None:
            bring(parent, self._store, version)
            self._read_store()
            self._refresh()  # of what is here now the labels are wanted
        rows = self._renewed(version)
        if rows:
            self._pull(parent, version, rows)
        self.adopt(version, self.rows)

    def expire(self) -> bool:
        """Erase the open items that are too old by now; whether there were any."""
        if self._store is None:
            return False
        self._store.erase_expired()
        gone = self._store.held() != self.opened.held.keys()
        if gone:
            self._read_store()
            self._refresh()
        return gone

    def open(self, opened: Opened) -> None:
        """Have these open items, brought by somebody else (rank 0 of a site)."""
        self.opened = Opened(opened.items, {slot: item.to(self._device) for slot, item in opened.held.items()})
        self._refresh()

    def adopt(self, version: int, rows: Tensor) -> None:
        """Hold these rows f32[n, C + 1] of that version."""
        self.version, self.rows = version, rows
        self._refresh()

    def know(self, classes: Tensor) -> None:
        """Of some items this member knows the class for certain: i64[n], -1 where it does not. It learns from that and says it,
        whatever its model or others think."""
        if classes.shape != (len(self.proxy),) or not bool(((classes >= -1) & (classes < self.proxy.classes)).all()):
            raise ConfigError(f"known classes: {len(self.proxy)} numbers from -1 to {self.proxy.classes - 1} are due")
        self._certain = classes.cpu()
        self._refresh()

    def know_opened(self, classes: Mapping[str, int]) -> None:
        """The same of open items, by their digests, whether they are there already or not."""
        if not all(0 <= label < self.proxy.classes for label in classes.values()):
            raise ConfigError(f"known classes of hard samples: numbers from 0 to {self.proxy.classes - 1} are due")
        self._told_labels = classes
        self._refresh()

    # ---- what this member says ------------------------------------------------------------------------------------------------

    def due(self) -> Tensor:
        """The items i64[b] whose turn it is on the version held, ascending; of the open ones those that are held."""
        asked = torch.cat([torch.arange(start, stop) for start, stop in self._turn(self.version)])
        return asked[self._held[asked]]

    @torch.no_grad()
    def rows_of(self, outputs: Tensor) -> Tensor:
        """Logits f[b, C] to rows f32[b, C + 1] on the CPU: soft labels at the temperature, weighed by their certainty."""
        probabilities = soften(outputs, self.config.temperature)
        sure = certainty(probabilities, power=self.config.entropy_power, floor=self.config.entropy_floor)
        return to_rows(probabilities, sure).cpu()

    def say(self, update_id: UpdateId, rows: Tensor, **work: Any) -> Saying:
        """The update that says this f32[b, C + 1] of the items that are due; ``work``: ``steps``, ``seconds``, ``metrics``.

        ``Refused(NOT_FINITE)`` if the model has diverged.
        """
        due = self.due()
        rows = self._told(rows, due)
        covers = labels.elements(self.layout, self._tier, runs(due.tolist()))
        header = UpdateHeader(
            update_id=update_id,
            kind=Kind.LOGITS,
            tier=self._tier,
            base_version=self.version,
            codec=self._codec.spec,
            layout=self.layout.fingerprint,
            covers=covers,
            **work,
        )
        payload = bytes_of(self._codec.encode(rows.reshape(-1)))
        self.bytes_pushed += len(payload)
        carried = Slice(intervals=covers, samples=float(len(rows)), digest=google_crc32c.value(bytes(payload)))
        return Saying(header, carried, payload)

    # ---- in detail ------------------------------------------------------------------------------------------------------------

    def _turn(self, version: int) -> tuple[Interval, ...]:
        """What all members were asked to label on a version, ascending."""
        opened = [len(self.proxy) + item.slot for item in self.opened.items if item.is_labelled(version)]
        return assigned(version, len(self.proxy), self.config.label_items, opened)

    def _read_store(self) -> None:
        """What the store holds now; what was read before is not read again."""
        assert self._store is not None
        before = {(item.slot, item.digest): self.opened.held.get(item.slot) for item in self.opened.items}
        here, items, held = self._store.held(), self._store.items(), {}
        for item in items:
            if item.slot in here:
                had = before.get((item.slot, item.digest))
                found = self._store.tensor(item.slot) if had is None else had
                if found is not None:  # another process of ours has not erased it meanwhile
                    held[item.slot] = found.to(self._device)
        self.opened = Opened(items, held)

    def _told(self, rows: Tensor, indices: Tensor) -> Tensor:
        """Rows f32[b, C + 1] of these items, with what is known for certain in its place."""
        classes = self._known_classes[indices]
        sure = functional.one_hot(classes.clamp(min=0), self.proxy.classes).float()
        known = to_rows(sure, torch.full((len(indices),), self.config.known_weight))
        return torch.where((classes >= 0).unsqueeze(1), known, rows)

    def _refresh(self) -> None:
        first, opened = len(self.proxy), self.opened
        self._held = torch.zeros(self.count, dtype=torch.bool)
        self._held[:first] = True
        self._held[torch.tensor([first + slot for slot in opened.held], dtype=torch.int64)] = True
        self._known_classes = torch.full((self.count,), -1)
        self._known_classes[:first] = self._certain
        for item in opened.items:
            if item.slot in opened.held:
                self._known_classes[first + item.slot] = self._told_labels.get(item.digest, -1)
        probabilities, weights = consensus(self._told(self.rows, torch.arange(self.count)))
        self._labels, self._weights = probabilities.to(self._device), weights.to(self._device)
        self._known = torch.nonzero((weights > 0) & self._held).squeeze(1)

    def _tiers(self) -> list[Tier]:
        """Whose rows this member learns from: of which tensors."""
        if not labels.space_of(self.layout).by_tier:
            return [Tier.EDGE]  # the one tensor is everyone's
        other = Tier.SITE if self._tier is Tier.EDGE else Tier.EDGE
        return [other] if self.config.learn_from == "others" else [Tier.SITE, Tier.EDGE]

    def _renewed(self, version: int) -> list[Interval]:
        """The items that were labelled on the versions before, newest first, as far as they are wanted; as runs, ascending."""
        count = self.count
        left = count if self.config.pull_items is None else min(count, self.config.pull_items // len(self._tiers()))
        wanted = torch.zeros(count, dtype=torch.bool)
        share = self.config.label_items if count == len(self.proxy) else max(1, self.config.label_items // 2)
        turns = -(-count // share)
        seen = max(NO_VERSION, self.version - LATE - 1, version - 1 - turns)
        for base in range(version - 1, seen, -1):
            for start, stop in sorted(self._turn(base), key=lambda run: run[0] < len(self.proxy)):  # open ones first
                fresh = torch.nonzero(self._held[start:stop] & ~wanted[start:stop]).squeeze(1)[: left - int(wanted.sum())]
                wanted[start + fresh] = True
        return runs(torch.nonzero(wanted).squeeze(1).tolist())

    def _pull(self, parent: Parent, version: int, items: Sequence[Interval]) -> None:
        geometry, count, width = Geometry(self.layout, self._published), self.count, self.proxy.classes + 1
        tiers = self._tiers()
        wanted = sorted(place for tier in tiers for place in labels.elements(self.layout, tier, items))
        if self._published.block != width:  # rows are no blocks of this codec: all of it is brought
            wanted = list(geometry.required())
        ranges = [geometry.byte_range(interval) for interval in wanted]
        pieces, sink = _gather(ranges)
        found = parent.pull(version, ranges, sink)
        if found.layout != self.layout.fingerprint or found.codec != self._published.spec:
            told, mine = f"{found.layout[:12]} in {found.codec}", f"{self.layout.fingerprint[:12]} in {self._published.spec}"
            raise Refused(Reason.WRONG_LAYOUT, f"version {version} has layout {told}, mine is {mine}: are the fleet files alike?")
        self.bytes_pulled += sum(map(len, pieces.values()))
        flat = torch.zeros(self.layout.elements)
        for (first, last), (start, _) in zip(wanted, ranges, strict=True):
            flat[first:last] = geometry.decode(tensor_over(pieces[start]), (first, last))
        held = flat.view(-1, count, width)
        told_by = held[[labels.space_of(self.layout).tensor(tier)[0] // (count * width) for tier in tiers]].sum(0)
        self.rows = self.rows.clone()
        for start, stop in items:
            self.rows[start:stop] = told_by[start:stop]


def proxy_of(config: FleetConfig, task: object, parent: ProxySource, folder: Path) -> ProxySet:
    """The proxy set of a track: the fleet file's file where this machine has it, the task's ``proxy()`` where it has that
    method, else the coordinator's, brought to ``folder``.

    Raises ``ConfigError`` where it is not what the fleet file says, and what ``shelf.bring`` does.
    """
    section = config.proxy
    if section is None:
        raise ConfigError("proxy: this track is not one of soft labels; name one of kind: logits")
    if section.file is not None and section.file.exists():
        return ProxySet.open(section.file, name=section.name, classes=section.classes)
    generate = getattr(task, "proxy", None)
    proxy = generate() if callable(generate) else bring_proxy(parent, folder, classes=section.classes)
    if isinstance(proxy, Tensor):
        proxy = ProxySet(section.name, section.classes, proxy)
    _check(proxy, config)
    return proxy


def outputs_of(task: object, model: nn.Module, items: Tensor) -> Tensor:
    """What a model says of proxy items, logits f[b, C]: by the task's ``logits(model, items)`` if it has that method, else by
    the model's forward."""
    logits = getattr(task, "logits", None)
    outputs: Tensor = logits(model, items) if callable(logits) else model(items)
    return outputs


def codec_of(spec: str, classes: int) -> str:
    """The codec that a fleet file's ``prob16`` or ``probtop:K`` names for a set of so many classes; any other is itself."""
    return f"{spec}:{classes}" if spec.partition(":")[0] in ("prob16", "probtop") else spec


def _check(proxy: ProxySet, config: FleetConfig) -> None:
    section = config.proxy
    assert section is not None
    if section.digest is not None and (section.items, section.digest) != (len(proxy), proxy.digest):
        held = f"items: {len(proxy)}, digest: {proxy.digest}"
        raise ConfigError(f"proxy: the set here is not the fleet file's ({section.items} items, {section.digest}); it is {held}")
    if (section.name, section.classes) != (proxy.name, proxy.classes):
        raise ConfigError(f"proxy: a set {proxy.name!r} of {proxy.classes} classes; due is {section.name!r} of {section.classes}")


def _gather(ranges: Sequence[Interval]) -> tuple[dict[int, bytearray], Callable[[int, memoryview], None]]:
    """Room for byte ranges, by their start, and a sink that fills it."""
    starts = [start for start, _ in ranges]
    pieces = {start: bytearray(stop - start) for start, stop in ranges}

    def sink(offset: int, data: memoryview) -> None:
        start = starts[bisect_right(starts, offset) - 1]
        pieces[start][offset - start : offset - start + len(data)] = data

    return pieces, sink
