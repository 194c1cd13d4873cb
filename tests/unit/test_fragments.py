"""A layout cut into fragments that are merged, aged and stepped one by one (``common/fragments.py``); a site that sends them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from helpers import models
from helpers.fleet import fleet_config
from helpers.one_rank import OneRank, process_group, step, vector
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fleetddp.cloud.rendezvous import polls
from fleetddp.common.clock import SystemClock
from fleetddp.common.codecs import get
from fleetddp.common.config import MergeConfig, parse
from fleetddp.common.errors import ConfigError, Reason
from fleetddp.common.events import Join
from fleetddp.common.fragments import Changes, cut
from fleetddp.common.layout import Layout
from fleetddp.common.merge import plan
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.transport.memory import MemoryFleet, MemoryParent
from fleetddp.common.update import Fragment, Kind, Receipt, Slice, State, Tier, Update, UpdateHeader, UpdateId
from fleetddp.common.version_file import VersionFile

sizes = st.lists(st.integers(1, 3000), min_size=1, max_size=4)


@given(sizes, st.one_of(st.just([]), sizes), st.integers(1, 8))
def test_every_element_is_in_exactly_one_fragment(parameters: list[int], buffers: list[int], count: int) -> None:
    layout = Layout.of([(f"p{i}", (n,)) for i, n in enumerate(parameters)], [(f"b{i}", (n,)) for i, n in enumerate(buffers)])
    blocks = -(-layout.parameters // 512) + -(-layout.buffer_elements // 512)
    if blocks < count:
        with pytest.raises(ConfigError, match=f"only {blocks} blocks"):
            cut(layout, count)
        return
    fragments = cut(layout, count)
    covered = [n for intervals in fragments for start, stop in intervals for n in range(start, stop)]
    due = [*range(layout.parameters), *range(layout.buffer_start, layout.buffer_start + layout.buffer_elements)]
    assert covered == due
    for codec in ("int8", "float32"):  # and so is every byte of what is sent
        geometries = [Geometry(layout, get(codec), within=within) for within in fragments]
        assert sum(geometry.payload_bytes for geometry in geometries) == Geometry(layout, get(codec)).payload_bytes
        for geometry, intervals in zip(geometries, fragments, strict=True):
            assert geometry.required() == intervals
            assert min(i for part in geometry.split(3) for i in part)[0] == intervals[0][0]


def test_staleness_counts_the_changes_of_a_fragment() -> None:
    changes = Changes.at_the_start(2).after(1, [0], kept=4).after(2, [0, 1], kept=4).after(3, [0], kept=4)
    assert changes.last == (3, 2)
    assert [[changes.staleness(base, fragment) for base in range(4)] for fragment in (0, 1)] == [[3, 2, 1, 0], [1, 1, 0, 0]]
    assert [changes.oldest(0, fragment) for fragment in (Fragment(0, 2), Fragment(1, 2), None)] == [3, 1, 3]
    for version in range(4, 9):
        changes = changes.after(version, [0], kept=4)
    assert changes.at == ((5, 6, 7, 8), (0, 2))
    assert changes.staleness(0, 0) == 4  # beyond any bound of less than ``kept``


def update(node: str, fragment: Fragment | None, *, base: int, samples: float, tier: Tier = Tier.SITE) -> Update:
    which: Any = {"update_id": UpdateId(node, 1, 1), "kind": Kind.DELTA, "tier": tier, "base_version": base}
    header = UpdateHeader(codec="float32", layout="x", fragment=fragment, **which)
    return Update(header=header, samples=samples, squared_norm=1.0, payload_bytes=1, slices=())


def test_each_fragment_is_merged_over_the_updates_that_cover_it() -> None:
    """Two sites, each with one fragment, and an edge with all; the shares, and the discount 1 / (1 + s), fragment by fragment."""
    config = MergeConfig.model_validate(
        {"share": {"site": 0.75, "edge": 0.25}, "staleness": {"discount": {"kind": "polynomial", "a": 1.0}}}
    )
    changes = Changes(((0, 1, 3), (0, 2), (0,)))
    updates = [
        update("a", Fragment(0, 3), base=1, samples=10.0),
        update("b", Fragment(1, 3), base=1, samples=30.0),
        update("edge", None, base=0, samples=5.0, tier=Tier.EDGE),
    ]
    terms = {(t.fragment, t.update_id.node): t.coefficient for t in plan(updates, 4, config, changes)}
    assert terms == pytest.approx(
        {
            (0, "a"): 0.75 / 2,  # fragment 0 has changed once since version 1
            (0, "edge"): 0.25 / 3,
            (1, "b"): 0.75 / 2,
            (1, "edge"): 0.25 / 2,
            (2, "edge"): 1.0,  # alone it has all shares; and its base is as good as new
        }
    )


# ---- the coordinator -----------------------------------------------------------------------------------------------------------

LAYOUT = Layout.of([("w", (1500,)), ("v", (548,))], [("mean", (600,))])  # 4 blocks of parameters, 2 of buffers
COUNT = 3  # [0, 1024), [1024, 2048), the buffers


class Root:
    """A coordinator in memory, on a journal in ``folder``, and members that push by hand."""

    def __init__(self, folder: Path, **sections: Any) -> None:
        given = {"site": {"fragments": COUNT, "sync_every": COUNT}, "outer": {"preset": "diloco"}, **sections}
        self.fleet = MemoryFleet(fleet_config(folder, **given), SystemClock())
        self.parent: MemoryParent = self.fleet.parent()
        self.sequence = 0

    def push(self, values: Tensor, fragment: int | None = None, *, base: int = 0, count: int = COUNT, **kind: Any) -> Receipt:
        self.sequence += 1
        of = None if fragment is None else Fragment(fragment, count)
        header = UpdateHeader(
            update_id=UpdateId("site", self.fleet_incarnation, self.sequence),
            tier=Tier.SITE,
            codec="float32",
            layout=LAYOUT.fingerprint,
            fragment=of,
            **{"kind": Kind.DELTA, "base_version": base, **kind},
        )
        intervals: Sequence[Any] = [(0, 2048), (2048, 2648)] if of is None else cut(LAYOUT, count)[of.index]
        payload = torch.cat([values[a:b] for a, b in intervals]).view(torch.uint8)
        slice = Slice(intervals=tuple(intervals), samples=4.0, digest=google_crc32c.value(payload.numpy()))
        return self.parent.push(header, slice, bytes_of(payload))

    fleet_incarnation = 1

    def found(self, weights: Tensor) -> None:
        self.parent.join(Join(node="site", tier=Tier.SITE, incarnation=self.fleet_incarnation))
        kind = {"kind": Kind.INIT, "base_version": -1, "layout_spec": LAYOUT.to_json()}
        assert self.push(weights, **kind).state in (State.ACCEPTED, State.MERGED)
        self.await_version(0)

    def await_version(self, number: int) -> None:
        self.fleet.wait(lambda: self.fleet.driver.version == number)

    def version(self, number: int) -> tuple[VersionFile, Tensor, Tensor]:
        """Its file, all its elements, and the outer momentum."""
        with self.fleet.driver.journal.read_version(number) as reader:
            file = VersionFile(reader)
            elements = torch.zeros(LAYOUT.elements)
            elements[:2048] = file.weights((0, 2048), torch.empty(2048))
            elements[2048:] = file.weights((2048, 2648), torch.empty(600))
            momentum = torch.zeros(2048)
            if file.head.slots == ("momentum_buffer",):
                momentum = file.slot("momentum_buffer", (0, 2048), torch.empty(2048))
            return file, elements, momentum


def test_what_no_update_covers_does_not_move(tmp_path: Path) -> None:
    """Nesterov momentum by hand: m = 0.9 m + g, w = w - 0.7 (g + 0.9 m), for each fragment by itself."""
    root = Root(tmp_path)
    torch.manual_seed(0)
    first = torch.randn(2648)
    root.found(first)
    gradients = torch.randn(4, 2648)
    root.push(gradients[0], 0)
    root.await_version(1)
    root.push(gradients[1], 1, base=1)
    root.await_version(2)
    root.push(gradients[2], 0, base=2)
    root.await_version(3)
    root.push(gradients[3], base=3)  # an edge's would be like this: all of it
    root.await_version(4)
    momentum, weights = torch.zeros(2048), first.clone()
    for number, (gradient, covered) in enumerate(
        zip(gradients, [(0, 1024), (1024, 2048), (0, 1024), (0, 2048)], strict=True), start=1
    ):
        part = slice(*covered)
        momentum[part] = 0.9 * momentum[part] + gradient[part]
        weights[part] -= 0.7 * (gradient[part] + 0.9 * momentum[part])
        if number == 4:
            weights[2048:] = gradient[2048:]
        if number >= 2:  # those kept
            _, found, held = root.version(number)
            torch.testing.assert_close(found, weights, rtol=0, atol=1e-5)
            torch.testing.assert_close(held, momentum, rtol=0, atol=1e-5)
    files = [root.version(number)[0] for number in (2, 3, 4)]
    assert [file.head.changed for file in files] == [(1, 2, 0), (3, 2, 0), (4, 4, 4)]
    found = root.parent.pull(4, [(0, 1)], lambda offset, data: None)
    assert found.changed == (4, 4, 4)
    root.fleet.stop()


def test_a_version_that_changes_one_fragment_leaves_the_others_bytes(tmp_path: Path) -> None:
    root = Root(tmp_path, publish="int8")
    root.found(torch.randn(2648))
    root.push(torch.randn(2648), 1)
    root.await_version(1)
    payloads = []
    for number in (0, 1):
        data = bytearray()
        root.parent.pull(number, (), lambda offset, chunk, data=data: data.extend(chunk))
        payloads.append(bytes(data))
    one, two = 2 * 516, 4 * 516  # bytes of the first fragment, of both
    before, after = payloads
    assert before[:one] == after[:one]
    assert before[one:two] != after[one:two]
    assert before[two:] == after[two:]
    root.fleet.stop()


def test_a_coordinator_with_adam_steps_each_fragment_as_often_as_it_changed(tmp_path: Path) -> None:
    root = Root(tmp_path, outer={"optimizer": "Adam", "options": {"lr": 0.1}})
    root.found(torch.zeros(2648))
    ones = torch.ones(2648)
    for number, fragment in enumerate([0, 0, 1]):
        root.push(ones, fragment, base=number)
        root.await_version(number + 1)
    file, weights, _ = root.version(3)
    assert dict(file.head.scalars) == {"step.0": 2.0, "step.1": 1.0, "step.2": 0.0}
    expected = torch.tensor([-0.2, -0.1]).repeat_interleave(1024)  # each step of Adam under a constant gradient is one of lr
    torch.testing.assert_close(weights[:2048], expected, rtol=0, atol=1e-6)
    root.fleet.stop()


def test_the_changes_survive_a_restart(tmp_path: Path) -> None:
    """Fragment 1 has not changed since version 0: an update of it from there is as good as new; one of fragment 0 is stale."""
    strict = {"merge": {"staleness": {"max_staleness": 1}}}
    root = Root(tmp_path, **strict)
    root.found(torch.randn(2648))
    for number in range(4):
        root.push(torch.randn(2648), 0, base=number)
        root.await_version(number + 1)
    root.fleet.stop()
    again = Root(tmp_path, **strict)
    again.fleet_incarnation = 2
    again.parent.join(Join(node="site", tier=Tier.SITE, incarnation=2))
    assert again.push(torch.randn(2648), 0, base=2).reason == Reason.STALE.value
    assert again.push(torch.randn(2648), base=0).reason == Reason.STALE.value  # all of it: as stale as its stalest fragment
    assert again.push(torch.randn(2648), 1, base=0).state in (State.ACCEPTED, State.MERGED)
    again.await_version(5)
    assert again.version(5)[0].head.changed == (4, 5, 0)
    again.fleet.stop()
    with pytest.raises(ConfigError, match=r"site\.fragments is 2, but this run began with 3"):
        Root(tmp_path, site={"fragments": 2, "sync_every": 2})


def test_what_is_refused(tmp_path: Path) -> None:
    root = Root(tmp_path)
    root.found(torch.randn(2648))
    assert root.push(torch.randn(2648), 0, count=2).reason == Reason.WRONG_INTERVALS.value
    root.fleet.stop()
    small = Root(tmp_path / "small", site={"fragments": 7, "sync_every": 7})
    kind = {"kind": Kind.INIT, "base_version": -1, "layout_spec": LAYOUT.to_json()}
    small.parent.join(Join(node="site", tier=Tier.SITE, incarnation=1))
    refused = small.push(torch.randn(2648), **kind)
    assert (refused.reason, "only 6 blocks" in refused.message) == (Reason.WRONG_LAYOUT.value, True)
    small.fleet.stop()


@pytest.mark.parametrize(
    "given", [{"sync_every": 10, "fragments": 4}, {"fragments": 2, "warmup_sync_steps": 5}, {"fragments": 65}]
)
def test_settings_that_do_not_go_together(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="fragments"):
        parse({"site": given})


# ---- a site --------------------------------------------------------------------------------------------------------------------


class Spy(MemoryParent):
    def __init__(self, fleet: MemoryFleet) -> None:
        super().__init__(fleet, "")
        self.pushed: list[tuple[UpdateHeader, Slice]] = []
        self.pulled: list[tuple[int, int]] = []  # version, bytes

    def push(self, header: UpdateHeader, slice: Slice, payload: memoryview) -> Receipt:
        self.pushed.append((header, slice))
        return super().push(header, slice, payload)

    def pull(self, version: int, ranges: Any, sink: Any) -> Any:
        self.pulled.append((version, sum(stop - start for start, stop in ranges)))
        return super().pull(version, ranges, sink)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made: list[OneRank] = []

    def make(*, sections: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        fragments = {"fragments": kwargs["fragments"], "sync_every": kwargs["sync_every"]}
        made.append(OneRank(tmp_path, **{"site": fragments, **(sections or {})}))
        spy = Spy(made[-1].fleet)
        module = models.wide()
        return made[-1].site(module, coordinator=lambda node: spy, **kwargs), module, spy

    with process_group():
        yield make
        for one in made:
            one.close()


@pytest.mark.parametrize("overlap", ["none", "steps"])
def test_a_site_alone_learns_as_if_nothing_was_exchanged(site: Callable[..., Any], overlap: str) -> None:
    """Plain averaging over one member: each fragment comes back as it was sent, and what came after it is carried on."""
    model, module, spy = site(fragments=5, sync_every=10, overlap=overlap, adopt_every=1)
    alone = copy.deepcopy(module)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, alone))
    torch.manual_seed(3)
    for _ in range(24):
        x = torch.randn(8, 40)
        step(model, ours, x)
        step(alone, theirs, x)  # type: ignore[arg-type]
    torch.testing.assert_close(vector(module), vector(alone), rtol=0, atol=1e-5)
    assert model.boundaries == 12
    for waited_s in polls():  # the last update leaves in the background
        assert waited_s < 20
        if len(spy.pushed) == 13:
            break
    sent = [(h.fragment, h.base_version, h.steps, s.samples) for h, s in spy.pushed if h.kind is Kind.DELTA]
    assert [(f.index, f.count) for f, *_ in sent] == [(number % 5, 5) for number in range(12)]
    assert [steps for _, _, steps, _ in sent] == [2, 4, 6, 8] + [10] * 8  # what was learnt since its last turn
    assert [samples for *_, samples in sent] == [8.0 * steps for _, _, steps, _ in sent]
    assert [base for _, base, *_ in sent] == list(range(12))
    whole, per_fragment = 4 * 2407, {n for _, n in spy.pulled} - {1, 4 * 2407}
    assert max(per_fragment) <= 2048 < whole / 4  # a fragment is one block


def test_what_is_refused_of_one_fragment_is_dropped_of_all(site: Callable[..., Any]) -> None:
    model, module, _ = site(fragments=5, sync_every=10, sections={"limits": {"max_norm": 1.0}})
    model.start()
    founded = vector(module).clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=1000.0)
    for _ in range(2):
        step(model, optimizer)
    assert torch.equal(vector(module), founded)
    assert model.version == 0


def test_a_site_that_cuts_otherwise_than_the_run(site: Callable[..., Any]) -> None:
    model, _, _ = site(fragments=5, sync_every=10, sections={"site": {"fragments": 2, "sync_every": 10}})
    with pytest.raises(Exception, match=r"site\.fragments is 5, run 'test' has 2"):
        model.start()
