"""The uplink and a real coordinator: identities under mutual TLS, several streams of one update, a restart."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
from helpers.certificates import make_ca, security
from helpers.fleet import fleet_config, on_port, running
from helpers.models import wide

from fleetddp.common import codecs
from fleetddp.common.config import FleetConfig, SecurityConfig
from fleetddp.common.errors import ConfigError, Reason, Refused, Unreachable
from fleetddp.common.events import Heartbeat, Join
from fleetddp.common.layout import Layout
from fleetddp.common.payload import Geometry, bytes_of
from fleetddp.common.transport.session import Session
from fleetddp.common.transport.uplink import Patience, Uplink
from fleetddp.common.update import Kind, Receipt, Slice, State, Tier, UpdateHeader, UpdateId

WAIT_S = 20.0
MODULE = wide()
LAYOUT = Layout.from_module(MODULE)
GEOMETRY = Geometry(LAYOUT, codecs.get("float32"))


def fleet(directory: Path, **sections: Any) -> FleetConfig:
    return fleet_config(directory, window={"preset": "async"}, **sections)


@pytest.fixture
def dial() -> Iterator[Callable[..., Uplink]]:
    uplinks: list[Uplink] = []

    def start(address: str, node: str, files: SecurityConfig | None = None) -> Uplink:
        patience = Patience(give_up_s=WAIT_S, retry_s=0.02)
        uplinks.append(Uplink(address, files or SecurityConfig(), node=node, patience=patience, rng=random.Random(0)))
        return uplinks[-1]

    yield start
    for uplink in uplinks:
        uplink.close()


def update(node: str, sequence: int, kind: Kind, base_version: int = -1) -> UpdateHeader:
    return UpdateHeader(
        update_id=UpdateId(node, 1, sequence),
        kind=kind,
        tier=Tier.SITE,
        base_version=base_version,
        codec="float32",
        layout=LAYOUT.fingerprint,
        layout_spec=LAYOUT.to_json() if kind is Kind.INIT else b"",
    )


def part(vector: torch.Tensor, intervals: tuple[tuple[int, int], ...], samples: float) -> tuple[Slice, memoryview]:
    """One stream of an update that carries ``vector``."""
    payload = memoryview(bytes(bytes_of(torch.cat([GEOMETRY.encode(vector[a:b], (a, b)) for a, b in intervals]))))
    return Slice(intervals=intervals, samples=samples, digest=google_crc32c.value(bytes(payload))), payload


def pulled(uplink: Uplink, version: int) -> torch.Tensor:
    """A version's weights, one row of float32."""
    data = bytearray(GEOMETRY.payload_bytes)

    def sink(offset: int, chunk: memoryview) -> None:
        data[offset : offset + len(chunk)] = chunk

    assert uplink.pull(version, (), sink).number == version
    return torch.frombuffer(data, dtype=torch.float32)


def join(node: str) -> Join:
    return Join(node=node, tier=Tier.SITE, incarnation=1)


def found(uplink: Uplink, node: str) -> Receipt:
    """Bring the first weights, and wait until they are version 0."""
    slice, payload = part(LAYOUT.read(MODULE), GEOMETRY.required(), 1.0)
    return uplink.push(update(node, 0, Kind.INIT), slice, payload)


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ca(tmp_path_factory.mktemp("certs"), "site-a", "site-b")


def test_every_call_is_held_to_the_certificate(tmp_path: Path, ca: Path, dial: Callable[..., Uplink]) -> None:
    with running(fleet(tmp_path, security=security(ca, "coordinator").model_dump())) as coordinator:
        uplink = dial(coordinator.address, "site-a", security(ca, "site-a"))
        assert uplink.join(join("site-a")).wants_init
        impostor = dial(coordinator.address, "site-a", security(ca, "site-b"))
        slice, payload = part(LAYOUT.read(MODULE), GEOMETRY.required(), 1.0)
        calls: list[Callable[[], Any]] = [
            lambda: impostor.join(join("site-a")),
            lambda: impostor.heartbeat(Heartbeat(node="site-a", incarnation=1)),
            lambda: impostor.leave("site-a", 1),
            lambda: next(impostor.watch("site-a", 1, -1)),
            lambda: impostor.pull(-1, (), lambda offset, data: None),
            lambda: impostor.push(update("site-a", 0, Kind.INIT), slice, payload),
        ]
        for call in calls:
            with pytest.raises(Refused, match=r"the certificate is of 'site-b'; the call claims to be 'site-a'") as raised:
                call()
            assert raised.value.reason is Reason.WRONG_IDENTITY
        assert found(uplink, "site-a").state in (State.ACCEPTED, State.MERGED)  # the owner of the name is served all the same
        stranger = dial(coordinator.address, "site-a")
        with pytest.raises(Unreachable):
            stranger.status()


def test_a_plaintext_coordinator_listens_on_loopback_only(tmp_path: Path) -> None:
    config = fleet(tmp_path)
    open_to_all = config.model_copy(update={"coordinator": config.coordinator.model_copy(update={"listen": "0.0.0.0:0"})})
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:0 is not on this machine"), running(open_to_all):
        pass


def test_ranks_push_their_slices_and_everyone_pulls_the_same(tmp_path: Path, dial: Callable[..., Uplink]) -> None:
    with running(fleet(tmp_path)) as coordinator, ThreadPoolExecutor(3) as ranks:
        uplinks = [dial(coordinator.address, "site-a") for _ in range(3)]
        uplinks[0].join(join("site-a"))
        news = uplinks[0].watch("site-a", 1, -1)
        weights = LAYOUT.read(MODULE)

        def push(vector: torch.Tensor, header: UpdateHeader) -> list[Future[Receipt]]:
            shares = zip(uplinks, GEOMETRY.split(3), strict=True)
            return [ranks.submit(u.push, header, *part(vector, intervals, 8.0)) for u, intervals in shares]

        for pushed in push(weights, update("site-a", 0, Kind.INIT)):
            assert pushed.result(WAIT_S).state in (State.ACCEPTED, State.MERGED)
        while next(news).version != 0:
            pass
        assert torch.equal(pulled(uplinks[1], 0), weights)
        delta = torch.linspace(-1.0, 1.0, LAYOUT.elements)
        for pushed in push(delta, update("site-a", 1, Kind.DELTA, 0)):
            assert pushed.result(WAIT_S).state in (State.ACCEPTED, State.MERGED)
        while next(news).version != 1:
            pass
        assert torch.equal(pulled(uplinks[2], 1), weights - delta)
        header = update("site-a", 1, Kind.DELTA, 0)
        again = uplinks[0].push(header, *part(delta, GEOMETRY.split(3)[0], 8.0))
        assert (again.state, again.duplicate) == (State.MERGED, True)


def test_a_bad_update_is_refused_by_receipt(tmp_path: Path, dial: Callable[..., Uplink]) -> None:
    with running(fleet(tmp_path)) as coordinator:
        uplink = dial(coordinator.address, "site-a")
        uplink.join(join("site-a"))
        found(uplink, "site-a")
        news = uplink.watch("site-a", 1, -1)
        assert next(news).version == 0
        vector = torch.zeros(LAYOUT.elements)
        slice, payload = part(vector, GEOMETRY.required(), 1.0)
        damaged = bytearray(payload)
        damaged[4:8] = b"\x00\x00\xc0\x7f"  # NaN
        slice = Slice(intervals=slice.intervals, samples=1.0, digest=google_crc32c.value(bytes(damaged)))
        receipt = uplink.push(update("site-a", 1, Kind.DELTA, 0), slice, memoryview(damaged))
        assert (receipt.state, receipt.reason) == (State.REFUSED, "NOT_FINITE")


def test_a_member_is_back_by_itself_after_a_restart(tmp_path: Path, dial: Callable[..., Uplink]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = on_port(fleet(tmp_path), port)
    receipts: dict[UpdateId, Receipt] = {}
    uplink = dial(f"127.0.0.1:{port}", "site-a")
    header = update("site-a", 1, Kind.DELTA, 0)
    with running(config):
        session = Session(
            uplink,
            join("site-a"),
            open_updates=lambda: (header.update_id,),
            on_receipt=lambda r: receipts.update({r.update_id: r}),
            rng=random.Random(0),
        )
        session.start()
        answer = session.joined(WAIT_S)
        assert answer is not None
        assert answer.wants_init
        found(uplink, "site-a")
        assert session.wait_version(-1, WAIT_S) == 0
    slice, payload = part(torch.ones(LAYOUT.elements), GEOMETRY.required(), 4.0)
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(uplink.push, header, slice, payload)  # to nobody; goes on by itself
        with running(config):
            assert session.wait_version(0, timeout_s=5.0) == 1
            assert receipts[header.update_id].version == 1  # the receipt comes no later than the version
            assert pushed.result(WAIT_S).state in (State.ACCEPTED, State.MERGED)
            assert torch.equal(pulled(uplink, 1), LAYOUT.read(MODULE) - 1.0)
            session.stop(leave=True)
