"""``FleetDDP`` in one process: what it counts, when it joins and leaves, and what it refuses. The contract is in integration."""

from __future__ import annotations

import copy
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from helpers import models
from helpers.fleet import fleet_config, running
from helpers.one_rank import OneRank, process_group, step, vector
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from fleetddp.cloud import FleetDDP
from fleetddp.common.codecs import get
from fleetddp.common.errors import ConfigError, Reason, Refused
from fleetddp.common.events import Join
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.transport.memory import MemoryParent
from fleetddp.common.update import Kind, Receipt, Slice, State, Tier, UpdateHeader, UpdateId


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


def pushed_by_another(parent: MemoryParent, layout: Any, values: torch.Tensor, base: int, *, node: str = "phone") -> Receipt:
    """An edge node with one sample's worth of update."""
    parent.join(Join(node=node, tier=Tier.EDGE, incarnation=1))
    geometry = Geometry(layout, get("float32"))
    payload = torch.cat([geometry.encode(values[a:b], (a, b)) for a, b in geometry.required()])
    header = UpdateHeader(
        update_id=UpdateId(node, 1, base + 1),
        kind=Kind.DELTA,
        tier=Tier.EDGE,
        base_version=base,
        codec="float32",
        layout=layout.fingerprint,
    )
    cut = Slice(intervals=geometry.required(), samples=8.0, digest=google_crc32c.value(payload.numpy()))
    return parent.push(header, cut, bytes_of(payload))


# ---- joining and leaving --------------------------------------------------------------------------------------------------


def test_joins_at_the_first_training_forward(fleet: Fleet) -> None:
    one = fleet()
    model = one.site(models.wide())
    model.eval()
    model(torch.randn(3, 40))
    model.train()
    with torch.no_grad():
        model(torch.randn(3, 40))
    assert (model.version, one.parents) == (-1, [])
    model(torch.randn(3, 40))
    assert (model.version, model.boundaries, model.finished) == (0, 0, "")
    assert one.live() == ["lab"]


def test_the_founded_version_is_the_module_and_later_sites_take_it_up(fleet: Fleet) -> None:
    one = fleet()
    founder, follower = models.wide(0), models.wide(1)
    before = vector(founder).clone()
    one.site(founder).start()
    one.site(follower, site="other").start()
    assert torch.equal(vector(founder), before)
    assert torch.equal(vector(follower), before)


def test_published_in_less_precision_the_founder_takes_up_what_was_published(fleet: Fleet) -> None:
    one = fleet(publish="bfloat16")
    founder = models.wide()
    before = vector(founder).clone()
    one.site(founder).start()
    assert torch.equal(vector(founder), before.bfloat16().float())


def test_two_founders_at_once(fleet: Fleet) -> None:
    """The second one was told to found the run too, and is refused: it takes up the first one's weights."""

    class Late(MemoryParent):
        def join(self, request: Join) -> Any:
            joined = super().join(request)
            return type(joined)(**{f: getattr(joined, f) for f in joined.__slots__} | {"wants_init": True})

    one = fleet()
    first, second = models.wide(0), models.wide(1)
    one.site(first).start()
    model = one.site(second, site="late", coordinator=lambda node: Late(one.fleet, ""))
    model.start()
    assert one.status()["counters"]["refused"] == {"INIT_TAKEN": 1}
    assert torch.equal(vector(first), vector(second))


def test_close_leaves(fleet: Fleet) -> None:
    one = fleet()
    module = models.wide()
    model = one.site(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step(model, optimizer)
    model.close()
    assert one.live() == []
    before = vector(module)
    step(model, optimizer)
    assert (model.boundaries, model.finished) == (1, "closed")
    assert not torch.equal(vector(module), before)


def test_a_model_that_is_dropped_leaves(fleet: Fleet) -> None:
    one = fleet()
    gc.collect()  # what earlier tests have left
    hooks = len(_global_optimizer_post_hooks)
    model: FleetDDP | None = FleetDDP(models.wide(), coordinator=one.connect, site="lab")
    assert len(_global_optimizer_post_hooks) == hooks + 1
    model.start()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert one.live() == []
    assert len(_global_optimizer_post_hooks) == hooks


def test_a_forked_child_does_not_leave_for_the_site(fleet: Fleet) -> None:
    one = fleet()
    model = one.site(models.wide())
    model.start()
    child = os.fork()
    if child == 0:  # no lock of ours is taken here: it would hang where a thread held it at the fork
        signal.alarm(20)
        model.close()
        os._exit(0 if model.finished == "" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert one.live() == ["lab"]


def test_a_copy_is_no_member(fleet: Fleet) -> None:
    one = fleet()
    model = one.site(models.wide())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    average = copy.deepcopy(model)
    assert torch.equal(vector(average.module), vector(model.module))
    step(average, torch.optim.SGD(average.parameters(), lr=0.1))
    assert model.boundaries == 1
    with pytest.raises(ConfigError, match="no member"):
        average.report({})


def test_over_a_socket_with_settings_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(fleet_config(tmp_path)) as coordinator:
        monkeypatch.setenv("FLEETDDP_COORDINATOR", coordinator.address)
        monkeypatch.setenv("FLEETDDP_NODE", "from-the-environment")
        model = FleetDDP(models.wide(), sync_every=1)
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert [m["node"] for m in coordinator.status()["members"]] == ["from-the-environment"]
        assert model.version == 1
        model.close()


# ---- what a boundary does ---------------------------------------------------------------------------------------------------


def test_outer_step_by_hand(fleet: Fleet) -> None:
    """Outer SGD of rate 0.5: half the way from the base to the local weights."""
    one = fleet(outer={"optimizer": "SGD", "options": {"lr": 0.5}})
    module = models.wide()
    model = one.site(module, sync_every=3)
    local = models.wide()
    base = vector(local).clone()
    ours, theirs = torch.optim.SGD(module.parameters(), lr=0.1), torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(8, 40)
        step(model, ours, x)
        step(local, theirs, x)  # type: ignore[arg-type]
    assert model.version == 1
    torch.testing.assert_close(vector(module), (base + vector(local)) / 2, rtol=0, atol=1e-7)


def test_what_another_member_sent_is_adopted(fleet: Fleet) -> None:
    """The site's update and a phone's, eight samples each: the window waits for both."""
    one = fleet(window={"quorum": 2})
    module = models.wide()
    model = one.site(module)
    model.start()
    base = vector(module).clone()
    local = models.wide()
    x = torch.randn(8, 40)
    step(local, torch.optim.SGD(local.parameters(), lr=0.1), x)  # type: ignore[arg-type]
    phones = torch.full((2407,), 0.25)
    receipt = pushed_by_another(one.fleet.parent(), model.site.layout, phones, 0)
    assert receipt.state is State.ACCEPTED
    step(model, torch.optim.SGD(module.parameters(), lr=0.1), x)
    expected = base - ((base - vector(local)) + phones) / 2
    torch.testing.assert_close(vector(module), expected, rtol=0, atol=1e-7)


def test_error_feedback_over_boundaries(fleet: Fleet) -> None:
    """What was published plus the residual is what was meant, twice over."""
    one = fleet()
    module = models.wide()
    model = one.site(module, codec="topk:0.1")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model.start()
    base, meant = vector(module).double(), torch.zeros(2407, dtype=torch.float64)
    for _ in range(2):
        begun = vector(module).double()
        local = copy.deepcopy(module)
        x = torch.randn(8, 40)
        step(local, torch.optim.SGD(local.parameters(), lr=0.1), x)  # type: ignore[arg-type]
        meant += begun - vector(local).double()
        step(model, optimizer, x)
    (residual,) = model.site._exchange.residual
    assert residual is not None
    assert float(residual.abs().max()) > 1e-4
    torch.testing.assert_close(base - vector(module).double() + residual.double(), meant, rtol=0, atol=1e-6)


def test_metrics_reach_the_coordinator(fleet: Fleet) -> None:
    one = fleet()
    model = one.site(models.wide())
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.report({"accuracy": 0.75})
    one.fleet.wait(lambda: "1" in one.fleet.driver.status()["scores"])
    assert one.status()["scores"]["1"] == {"accuracy": 0.75}


# ---- samples ------------------------------------------------------------------------------------------------------------------


class Echo(nn.Module):
    """Takes anything; one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.weight * 2


@pytest.mark.parametrize(
    ("args", "kwargs", "samples"),
    [
        ((torch.zeros(5, 2), torch.zeros(3)), {}, 5),
        ((), {"ids": torch.zeros(7, 2)}, 7),
        (("text", {"ids": [torch.zeros(4)]}), {}, 4),
        ((torch.zeros(()),), {}, 1),
    ],
)
def test_the_batch_size_counts(fleet: Fleet, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> None:
    model = fleet().site(Echo(), sync_every=9)
    for _ in range(2):
        model(*args, **kwargs)
    assert model.site.samples == 2 * samples


def test_counting_by_hand_replaces_the_batch_size(fleet: Fleet) -> None:
    model = fleet().site(Echo(), sync_every=9)
    for tokens in (100, 20):
        model(torch.zeros(5))
        model.count_samples(tokens)
    assert model.site.samples == 120


def test_a_boundary_without_samples_is_an_error(fleet: Fleet) -> None:
    model = fleet().site(Echo())
    model("no tensor").backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"call model.count_samples\(n\)"):
        optimizer.step()


# ---- settings -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"coordinator": None}, "give its HOST:PORT, or set FLEETDDP_COORDINATOR"),
        ({"coordinator": "nowhere"}, "'nowhere' is not HOST:PORT"),
        ({"sync_every": 0}, "site.sync_every"),
        ({"uplink": "all"}, "site.uplink"),
        ({"wait_s": -1.0}, "site.wait_s"),
        ({"tier": "region"}, "tier: 'region'; allowed are site and edge"),
        ({"site": "a/b"}, "'a/b' is no node name"),
    ],
)
def test_wrong_settings(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        FleetDDP(models.wide(), **{"coordinator": "127.0.0.1:1", **setting})


def test_an_unknown_codec() -> None:
    with pytest.raises(Refused) as caught:
        FleetDDP(models.wide(), coordinator="127.0.0.1:1", codec="gzip")
    assert caught.value.reason is Reason.UNKNOWN_CODEC


def test_half_a_set_of_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEETDDP_CA", "ca.crt")
    with pytest.raises(ConfigError, match="needs ca, cert and key together; only ca given"):
        FleetDDP(models.wide(), coordinator="127.0.0.1:1")


def test_another_run_is_refused(fleet: Fleet) -> None:
    one = fleet()
    model = one.site(models.wide(), run="another")
    with pytest.raises(Refused) as caught:
        model.start()
    assert caught.value.reason is Reason.WRONG_RUN
