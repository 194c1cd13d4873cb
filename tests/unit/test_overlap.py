"""``overlap: steps`` and the synchronous start, in one process: a site trains on while its update travels (see exchange.py).

A phone's update completes each window, so that the test decides when a version is made. What the site must arrive at is computed
beside it, in plain torch, from the same batches.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from helpers import models
from helpers.one_rank import OneRank, process_group, step, vector
from torch import Tensor, nn

from fleetddp.cloud import Checkpoint, FleetDDP
from fleetddp.cloud.outgoing import Outgoing
from fleetddp.cloud.rendezvous import polls
from fleetddp.common.codecs import get
from fleetddp.common.errors import ConfigError
from fleetddp.common.events import Join
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.update import Kind, Slice, State, Tier, UpdateHeader, UpdateId

LR = 0.1


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with process_group():
        yield


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., OneRank]]:
    made: list[OneRank] = []

    def make(**sections: Any) -> OneRank:
        made.append(OneRank(tmp_path, **sections))
        return made[-1]

    yield make
    for one in made:
        one.close()


Fleet = Callable[..., OneRank]


def until(condition: Callable[[], bool]) -> None:
    for waited_s in polls():
        if condition():
            return
        assert waited_s < 20


class Overlapping:
    """A site beside a plain copy of it that sees the same batches and exchanges nothing."""

    def __init__(self, one: OneRank, module: nn.Module | None = None, **kwargs: Any) -> None:
        self.one, self.module = one, models.wide() if module is None else module
        self.width = next(self.module.parameters()).shape[1]
        self.model: FleetDDP = one.site(self.module, **{"sync_every": 4, "overlap": "steps", "adopt_every": 1, **kwargs})
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LR)
        self.phones = 0
        torch.manual_seed(1)
        self.model.start()
        self.alone = copy.deepcopy(self.module)

    def steps(self, n: int) -> list[int]:
        """The version after each of ``n`` steps of both."""
        seen = []
        alone = torch.optim.SGD(self.alone.parameters(), lr=LR)
        for _ in range(n):
            x = torch.randn(8, self.width)
            step(self.model, self.optimizer, x)
            step(self.alone, alone, x)  # type: ignore[arg-type]
            seen.append(self.model.version)
        return seen

    def phone(self, values: Tensor, samples: float) -> None:
        """The other update of a window; returns when the site has heard of the version."""
        parent, layout, version = self.one.fleet.parent(), self.model.site.layout, self.one.fleet.driver.version
        parent.join(Join(node="phone", tier=Tier.EDGE, incarnation=1))
        geometry = Geometry(layout, get("float32"))
        payload = torch.cat([geometry.encode(values[a:b], (a, b)) for a, b in geometry.required()])
        self.phones += 1
        header = UpdateHeader(
            update_id=UpdateId("phone", 1, self.phones),
            kind=Kind.DELTA,
            tier=Tier.EDGE,
            base_version=version,
            codec="float32",
            layout=layout.fingerprint,
        )
        cut = Slice(intervals=geometry.required(), samples=samples, digest=google_crc32c.value(payload.numpy()))
        assert parent.push(header, cut, bytes_of(payload)).state in (State.ACCEPTED, State.MERGED)
        session = self.model.site._session
        until(lambda: session is not None and session.version == version + 1)

    def arrived(self, number: int) -> None:
        """Until this rank's slice of the ``number``-th pull is here."""
        until(lambda: self.model.site._rendezvous.tally(f"pulled/{number}") == 1)


PAIRED = {"window": {"quorum": 2}}


def test_local_progress_is_carried_on(fleet: Fleet) -> None:
    """w + (t - a) at a candidate step; the next update is what was learnt since the first one, and that alone."""
    site = Overlapping(fleet(**PAIRED))
    base = vector(site.alone)
    assert site.steps(4) == [0] * 4  # the boundary pushes, and waits for nothing
    sent = vector(site.alone)
    assert site.steps(2) == [0] * 2
    site.phone(torch.full((2407,), 0.5), 32.0)  # as many samples as the site's four batches
    assert site.steps(1) == [0]  # begins to pull
    site.arrived(2)
    assert site.steps(1) == [1]  # the eighth: a boundary, which adopts and then pushes
    version = base - ((base - sent) + 0.5) / 2
    torch.testing.assert_close(vector(site.module), version + (vector(site.alone) - sent), rtol=0, atol=2e-7)
    carried = vector(site.module)
    site.phone(torch.zeros(2407), 32.0)
    assert site.steps(1) == [1]
    site.arrived(3)
    gained = copy.deepcopy(site.module)  # from other weights than the plain copy's, so its next step is another one
    ours = torch.optim.SGD(gained.parameters(), lr=LR)
    x = torch.randn(8, 40)
    before = vector(gained)
    step(gained, ours, x)  # type: ignore[arg-type]
    step(site.model, site.optimizer, x)
    assert site.model.version == 2
    second = version - (version - carried) / 2
    progress = (before - carried) + (vector(gained) - before)
    torch.testing.assert_close(vector(site.module), second + progress, rtol=0, atol=4e-7)


def test_where_nothing_was_learnt_meanwhile_the_weights_are_the_versions_to_the_bit(fleet: Fleet) -> None:
    site = Overlapping(fleet(**PAIRED), sync_every=1)
    site.steps(1)
    site.phone(torch.full((2407,), 0.3), 8.0)
    with torch.no_grad():
        for parameter in site.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
    site.model.site.samples = 8.0
    site.optimizer.step()
    one, module = site.one, models.wide(5)
    one.site(module, site="reader").start()  # takes up the version as it was published
    assert site.model.version == 1
    assert torch.equal(vector(site.module), vector(module))


def test_versions_are_adopted_at_candidate_steps_only(fleet: Fleet) -> None:
    site = Overlapping(fleet(**PAIRED), sync_every=8, adopt_every=3)
    site.steps(8)
    site.phone(torch.zeros(2407), 64.0)
    assert site.steps(3) == [0] * 3  # the third asks for it
    site.arrived(2)
    assert site.steps(3) == [0, 0, 1]


def test_the_next_boundary_waits_for_what_is_not_there_yet(fleet: Fleet) -> None:
    site = Overlapping(fleet(**PAIRED), sync_every=2)
    site.steps(3)
    completes = threading.Timer(0.3, site.phone, (torch.zeros(2407), 16.0))
    completes.start()
    assert site.steps(1) == [1]
    completes.join()


def test_buffers_are_the_versions(fleet: Fleet) -> None:
    """A running variance plus a difference may be negative."""
    site = Overlapping(fleet(), models.batch_norm(), sync_every=2)
    site.steps(2)
    sent = [b.clone() for b in site.module.buffers() if b.is_floating_point()]
    until(lambda: site.one.fleet.driver.version == 1)
    assert site.steps(2)[-1] == 1
    assert all(torch.equal(a, b) for a, b in zip(sent, [b for b in site.module.buffers() if b.is_floating_point()], strict=True))


def test_a_refused_update_takes_what_was_learnt_on_it_along(fleet: Fleet) -> None:
    site = Overlapping(fleet(limits={"max_norm": 1.0}), sync_every=2)
    founded = vector(site.module)
    for group in site.optimizer.param_groups:
        group["lr"] = 1000.0
    site.steps(2)
    until(lambda: site.model.site._rendezvous.tally("answered/2") == 1)
    for group in site.optimizer.param_groups:
        group["lr"] = LR
    site.steps(1)
    site.arrived(2)
    assert site.steps(1) == [0]
    assert torch.equal(vector(site.module), founded)
    assert site.model.site.samples == 0.0
    assert site.one.status()["counters"]["refused"] == {"NORM_BOUND": 1}


def test_at_the_end_of_the_run_the_weights_are_the_last_versions(fleet: Fleet) -> None:
    site = Overlapping(fleet(**PAIRED, until={"versions": 1}), sync_every=4)
    base = vector(site.module)
    site.steps(4)
    sent = vector(site.alone)
    site.phone(torch.zeros(2407), 32.0)
    session = site.model.site._session
    until(lambda: session is not None and bool(session.finished))
    assert site.steps(1) == [1]
    assert site.model.finished
    torch.testing.assert_close(vector(site.module), base - (base - sent) / 2, rtol=0, atol=1e-7)


# ---- the synchronous start ---------------------------------------------------------------------------------------------------


def test_a_run_starts_synchronously(fleet: Fleet) -> None:
    """Three versions, one a step; then every fourth step is a boundary, and a late site does not start it anew."""
    one = fleet()
    site = Overlapping(one, warmup_sync_steps=3, overlap="none")
    assert site.steps(11) == [1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5]
    late = one.site(models.wide(), site="late", sync_every=4, warmup_sync_steps=3)
    optimizer = torch.optim.SGD(late.parameters(), lr=LR)
    for _ in range(4):
        step(late, optimizer)
    assert late.boundaries == 1


def test_the_synchronous_start_does_not_overlap(fleet: Fleet) -> None:
    site = Overlapping(fleet(), warmup_sync_steps=2)
    assert site.steps(6)[:5] == [1, 2, 2, 2, 2]
    assert site.model.boundaries == 3


# ---- checkpoints in mid-flight -------------------------------------------------------------------------------------------------


def test_a_checkpoint_taken_while_an_update_travels(fleet: Fleet, tmp_path: Path) -> None:
    """The version that holds the update is adopted after the restart; what was learnt after the update is carried on."""
    site = Overlapping(fleet(**PAIRED))
    base = vector(site.alone)
    site.steps(4)
    sent = vector(site.alone)
    site.steps(2)
    Checkpoint(tmp_path / "kept", site.model).save()
    saved = vector(site.module)
    site.steps(1)  # lost
    site.model.close()
    module = models.wide(7)
    again = site.one.site(module, sync_every=4, overlap="steps", adopt_every=1)
    assert Checkpoint(tmp_path / "kept", again).load()
    site.model = again
    again.start()
    assert again.version == 0
    assert torch.equal(vector(module), saved)
    site.module, site.optimizer = module, torch.optim.SGD(module.parameters(), lr=0.0)
    site.phone(torch.zeros(2407), 32.0)
    step(again, site.optimizer)  # the seventh
    site.arrived(1)
    step(again, site.optimizer)  # the eighth: a boundary
    version = base - (base - sent) / 2
    assert again.version == 1
    torch.testing.assert_close(vector(module), version + (saved - sent), rtol=0, atol=2e-7)
    assert again.site.samples == 0.0


def test_a_newer_version_at_the_restart_takes_the_progress_on(fleet: Fleet, tmp_path: Path) -> None:
    site = Overlapping(fleet(**PAIRED), codec="int8")
    base = vector(site.alone)
    site.steps(4)
    site.steps(2)
    Checkpoint(tmp_path / "kept", site.model).save()
    saved, (anchor,) = vector(site.module), [a.clone() for a in site.model.site._exchange.anchor]
    residual = site.model.site._exchange.residual
    site.phone(torch.zeros(2407), 32.0)
    site.model.close()
    module = models.wide(7)
    again = site.one.site(module, sync_every=4, overlap="steps", codec="int8")
    assert Checkpoint(tmp_path / "kept", again).load()
    again.start()
    assert (again.version, again.site.samples) == (1, 16.0)
    (version,) = again.site._exchange.anchor
    assert not torch.equal(version, base)
    torch.testing.assert_close(vector(module), version + (saved - anchor), rtol=0, atol=2e-7)
    assert all(torch.equal(a, b) for a, b in zip(residual, again.site._exchange.residual, strict=True))


# ---- the slice on its way ------------------------------------------------------------------------------------------------------


def test_a_slice_is_encoded_once_by_whoever_asks_first() -> None:
    codec, calls = get("int8"), []

    def encode(index: int, values: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        calls.append(threading.current_thread().name)
        return codec.encode_with_feedback(values, before)

    values, before = torch.randn(700), torch.randn(700) / 100
    outgoing = Outgoing([values], [before], encode, torch.device("cpu"))
    encoder = threading.Thread(target=outgoing.payload, name="courier")
    encoder.start()
    (residual,) = outgoing.residual()
    encoder.join()
    payload, expected = codec.encode_with_feedback(values, before)
    assert bytes(outgoing.payload()) == bytes(payload.numpy())
    assert len(calls) == 1
    assert residual is not None
    assert torch.equal(residual, expected)


@pytest.mark.parametrize(("value", "finite"), [(1e18, True), (2e18, False), (float("nan"), False), (float("-inf"), False)])
def test_what_no_coordinator_would_take_is_not_finite(value: float, finite: bool) -> None:
    values = torch.zeros(600)
    values[555] = value
    outgoing = Outgoing([torch.zeros(0), values], [None, None], lambda *piece: (values, None), torch.device("cpu"))
    assert outgoing.finite() is finite


@pytest.mark.parametrize("given", [{"overlap": "always"}, {"adopt_every": 0}, {"warmup_sync_steps": -1}])
def test_settings_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        FleetDDP(models.wide(), coordinator="127.0.0.1:1", **given)
