"""Hard samples on their way from devices to everybody's proxy set, over real gRPC: regions, kills, devices that keep theirs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from helpers.fleet import RunningService, fleet_config, free_port, on_port, running, write
from helpers.processes import commands, eventually
from helpers.soft_tasks import Corners, Knowing, cloud, proxy_set, soft_config
from torch import Tensor

from fleetddp.common.config import FleetConfig, SecurityConfig
from fleetddp.common.errors import Reason, Refused
from fleetddp.common.events import Join, Share
from fleetddp.common.knowledge import Knowledge
from fleetddp.common.open_items import bytes_of_sample, digest_of
from fleetddp.common.transport import chunks, items, wire
from fleetddp.common.transport.uplink import Patience, Uplink
from fleetddp.common.update import State, Tier, UpdateId
from fleetddp.edge.region import Region
from fleetddp.edge.reservoir import Reservoir
from fleetddp.protos import fleet_pb2 as pb

PROXY = proxy_set(Corners({}))  # 40 items of two values, of four classes
POINTS, _ = cloud(30, 5)
MEMBERS = {"e1": Tier.EDGE, "e2": Tier.EDGE, "lab": Tier.SITE}
QUICK = Patience(give_up_s=2.0, retry_s=0.05, retry_cap_s=0.2)


def config_of(folder: Path, *, room: dict[str, Any] | None = None, **sections: Any) -> FleetConfig:
    """A track of soft labels with room for samples; a version is made of one update of each member."""
    opened = {"items": 20, "retention_hours": 1.0, "shape": [2], **(room or {})}
    window = {"preset": "fedbuff", "quorum": len(MEMBERS), "min_updates": len(MEMBERS)}
    members = {"heartbeat_s": 0.2, "lease_s": 60.0, **sections.pop("members", {})}
    return soft_config(folder, PROXY, source={"open": opened}, **{"window": window, "members": members, **sections})


class Member:
    """A member that says what a seed makes it say, and shares what it is told to."""

    def __init__(self, name: str, config: FleetConfig, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        self.parent = Uplink(address, SecurityConfig(), node=name, run="test", patience=QUICK)
        self.knowledge = Knowledge(PROXY, config, MEMBERS[name], store=folder / f"{name}.db")
        self.sequence = 0
        self.join()

    def join(self) -> None:
        layout = self.knowledge.layout.fingerprint
        self.parent.join(Join(node=self.name, tier=MEMBERS[self.name], incarnation=1, layout=layout))

    @property
    def version(self) -> int:
        return int(self.parent.status()["version"])

    def take(self, version: int) -> None:
        eventually(lambda: self.version >= version, f"{self.name} hears of version {version}")
        self.knowledge.take(self.parent, version)

    def say(self) -> None:
        self.sequence += 1
        generator = torch.Generator().manual_seed(1000 * self.sequence + sum(map(ord, self.name)))
        outputs = 3 * torch.randn(len(self.knowledge.due()), 4, generator=generator)
        update = self.knowledge.say(UpdateId(self.name, 1, self.sequence), self.knowledge.rows_of(outputs), steps=1)
        assert self.parent.push(*update).state in (State.ACCEPTED, State.MERGED)

    def share(self, samples: Tensor, **fields: Any) -> Any:
        found = {digest_of(item): item for item in samples}
        shape = tuple(samples.shape[1:])
        given = {"node": self.name, "incarnation": 1, "of": self.name, "shape": shape, "digests": tuple(found), **fields}
        return self.parent.share(Share(**given), lambda digest: bytes_of_sample(found[digest]))

    def withdraw(self) -> int:
        return self.parent.withdraw(Share(node=self.name, incarnation=1, of=self.name, takes_back=True))

    @property
    def held(self) -> list[list[float]]:
        """The open items it has, by slot."""
        return [item.tolist() for _, item in sorted(self.knowledge.opened.held.items())]

    def close(self) -> None:
        self.parent.close()
        self.knowledge.close()


@contextlib.contextmanager
def fleet(folder: Path, config: FleetConfig, *, region: bool) -> Iterator[tuple[Any, RunningService | None, dict[str, Member]]]:
    """A coordinator and the members; ``region``: the edges are behind one."""
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(running(config))
        west, address = None, coordinator.address
        if region:
            own = {"address": "127.0.0.1:0", "parents": [coordinator.address], "journal": str(folder / "west")}
            west = RunningService(Region(config.model_validate({**config.model_dump(exclude_unset=True), "region": own}), "west"))
            stack.callback(west.stop)
            address = west.address
            eventually(lambda: west.status()["version"] == 0, "the region has version 0")
        members = {}
        for name, tier in MEMBERS.items():
            members[name] = Member(name, config, address if tier is Tier.EDGE else coordinator.address, folder)
            stack.callback(members[name].close)
        yield coordinator, west, members


def turn(members: dict[str, Member], version: int) -> None:
    """All say something on a version."""
    for member in members.values():
        member.take(version)
        member.say()


def payload(member: Member, version: int) -> bytes:
    found = bytearray()
    eventually(lambda: member.version >= version, f"version {version}")
    member.parent.pull(version, (), lambda offset, data: found.extend(data))
    return bytes(found)


@pytest.mark.parametrize("by_tier", [True, False])
def test_a_consensus_through_a_region_is_the_flat_one_bit_for_bit(tmp_path: Path, by_tier: bool) -> None:
    """Five versions; between the second and the third an edge shares samples, which all label from then on."""
    made: dict[bool, list[bytes]] = {}
    for region in (False, True):
        folder = tmp_path / str(region)
        config = config_of(folder)
        assert config.proxy is not None
        config = config.model_copy(update={"proxy": config.proxy.model_copy(update={"by_tier": by_tier})})
        with fleet(folder, config, region=region) as (_, _, members):
            for version in range(5):
                if version == 2:
                    members["e1"].share(POINTS[:3])
                turn(members, version)
            made[region] = [payload(members["lab"], version) for version in range(3, 6)]
            assert len(set(made[region])) == 3
            for member in members.values():
                member.take(5)
                assert member.held == POINTS[:3].tolist()
                assert int((member.knowledge.rows[40:, -1] > 0).sum()) == 3
            assert len({tuple(map(tuple, member.held)) for member in members.values()}) == 1
    assert made[True] == made[False]


def test_what_one_device_shares_all_members_get_and_label(tmp_path: Path) -> None:
    with fleet(tmp_path, config_of(tmp_path), region=False) as (coordinator, _, members):
        shared = members["e1"].share(POINTS[:5])
        assert (len(shared.known), shared.room) == (5, 15)
        again = members["e2"].share(POINTS[3:6])
        assert (len(again.known), again.room) == (3, 14)
        assert coordinator.status()["open_items"] == {"filled": 6, "held": 6}
        turn(members, 0)
        for member in members.values():
            assert member.held == []
            member.take(1)
            assert sorted(member.held) == sorted(POINTS[:6].tolist())
            assert member.knowledge.due().tolist() == [*range(5, 10), 40, 41, 42, 43, 45]
            member.say()
        for member in members.values():
            member.take(2)
            assert int((member.knowledge.rows[40:, -1] > 0).sum()) == 5


def test_a_region_hands_on_what_is_shared_and_taken_back(tmp_path: Path) -> None:
    config = config_of(tmp_path, room={"allow": ["e*"], "per_node": 6})
    with fleet(tmp_path, config, region=True) as (coordinator, west, members):
        with pytest.raises(Refused) as caught:  # nothing is known there before a version with open items was brought
            members["e1"].share(torch.zeros(2, 3))
        assert caught.value.reason is Reason.WRONG_SHAPE
        shared = members["e1"].share(POINTS[:4])
        assert (len(shared.known), shared.room) == (4, 2)
        with pytest.raises(Refused) as caught:
            members["lab"].share(POINTS[9:10])
        assert caught.value.reason is Reason.NOT_PERMITTED
        turn(members, 0)
        for member in members.values():
            member.take(1)
            assert sorted(member.held) == sorted(POINTS[:4].tolist())
        assert west is not None
        assert west.status()["open_items"] == {"filled": 4, "held": 4}
        before = coordinator.status()["counters"]["bytes_in"]
        shared = members["e2"].share(POINTS[2:4])  # here already: nothing is sent, but it is the other's, too
        assert (len(shared.known), shared.room) == (2, 4)
        assert coordinator.status()["counters"]["bytes_in"] == before
        assert members["e1"].withdraw() == 2
        for service in (coordinator, west):
            assert service.status()["open_items"] == {"filled": 4, "held": 2}
        turn(members, 1)
        for member in members.values():
            member.take(2)
            assert sorted(member.held) == sorted(POINTS[2:4].tolist())
        refused = members["e1"].share(POINTS[10:19])
        assert (len(refused.known), refused.room) == (6, 0)
        with pytest.raises(Refused) as caught:
            members["e1"].share(POINTS[20:21])
        assert caught.value.reason is Reason.ITEMS_FULL


def test_a_region_that_has_lost_its_parent_says_so_and_goes_on_handing_out(tmp_path: Path) -> None:
    config = on_port(config_of(tmp_path), free_port())
    with contextlib.ExitStack() as stack:
        with running(config) as root:
            own = {"address": "127.0.0.1:0", "parents": [root.address], "journal": str(tmp_path / "west")}
            file = config.model_validate({**config.model_dump(exclude_unset=True), "region": own})
            west = RunningService(Region(file, "west"))
            stack.callback(west.stop)
            eventually(lambda: west.status()["version"] == 0, "the region has version 0")
            members = {}
            for name, tier in MEMBERS.items():
                members[name] = Member(name, config, west.address if tier is Tier.EDGE else root.address, tmp_path)
                stack.callback(members[name].close)
            members["e1"].share(POINTS[:4])
            turn(members, 0)
            eventually(lambda: west.status()["version"] == 1, "the region has version 1")
        members["e1"].take(1)
        assert len(members["e1"].held) == 4
        with pytest.raises(Refused) as caught:
            members["e1"].share(POINTS[4:6])
        assert caught.value.reason is Reason.NO_PARENT
        with pytest.raises(Refused) as caught:
            members["e1"].withdraw()
        assert caught.value.reason is Reason.NO_PARENT
        late = Knowledge(PROXY, config, Tier.EDGE)
        late.take(members["e2"].parent, 1)
        assert len(late.opened.held) == 4


def test_killed_between_offer_and_use_the_coordinator_asks_for_what_it_promised(tmp_path: Path) -> None:
    config = on_port(config_of(tmp_path), free_port())
    with commands() as start, contextlib.ExitStack() as stack:
        first = start("coordinator", write(config, tmp_path))
        first.wait_for("listens on port")
        members = {name: Member(name, config, config.coordinator.address, tmp_path) for name in MEMBERS}
        for member in members.values():
            stack.callback(member.close)
        assert len(members["e1"].share(POINTS[:5]).known) == 5
        first.process.kill()
        first.end()
        second = start("coordinator", write(config, tmp_path))
        second.wait_for("listens on port")
        for member in members.values():
            member.join()
        assert members["e1"].share(POINTS[:5]).room == 15  # nothing twice
        turn(members, 0)
        members["e2"].take(1)
        assert sorted(members["e2"].held) == sorted(POINTS[:5].tolist())
        second.process.kill()  # between the version and the labels on it
        second.end()
        third = start("coordinator", write(config, tmp_path))
        third.wait_for("listens on port")
        for member in members.values():
            member.join()
        turn(members, 1)
        for member in members.values():
            member.take(2)
            assert sorted(member.held) == sorted(POINTS[:5].tolist())
            assert int((member.knowledge.rows[40:, -1] > 0).sum()) == 5
        assert third.end(signal.SIGTERM) == 0


BAD: dict[str, tuple[dict[str, Any], Tensor, Reason]] = {
    "of another shape": ({}, torch.zeros(1, 3), Reason.WRONG_SHAPE),
    "not finite": ({}, torch.tensor([[torch.nan, 0.0]]), Reason.NOT_FINITE),
    "not what was announced": ({"digests": ("ab" * 32,)}, torch.zeros(1, 2), Reason.WRONG_DIGEST),
    "not as long as its shape": ({"digests": ("cd" * 32,)}, torch.zeros(1, 3), Reason.WRONG_SIZE),
    "shorter than its shape": ({"digests": ("cd" * 32,)}, torch.zeros(1, 1), Reason.TRUNCATED),
    "of an older process": ({"incarnation": 0}, torch.zeros(1, 2), Reason.SUPERSEDED),
    "somebody else's": ({"of": "e2"}, torch.zeros(1, 2), Reason.WRONG_IDENTITY),
}


def test_bad_offers_are_refused_each_in_its_own_way_and_the_rest_goes_on(tmp_path: Path) -> None:
    with fleet(tmp_path, config_of(tmp_path), region=False) as (coordinator, _, members):
        one = members["e1"]
        for name, (fields, samples, reason) in BAD.items():
            digests = fields.get("digests", tuple(digest_of(item) for item in samples))
            shape = (2,) if "digests" in fields else tuple(samples.shape[1:])
            share = Share(**{"node": "e1", "incarnation": 1, "of": "e1", "shape": shape, **fields, "digests": digests})
            with pytest.raises(Refused) as caught:
                one.parent.share(share, lambda digest, samples=samples: bytes_of_sample(samples[0]))
            assert caught.value.reason is reason, name
        assert coordinator.status()["open_items"] == {"filled": 0, "held": 0}
        assert one.share(POINTS[:1]).room == 19
        assert coordinator.status()["counters"]["failed"] == 0


def test_an_offer_that_breaks_a_rule_of_the_stream_is_ended_with_a_word(tmp_path: Path) -> None:
    """One that says nothing after its header; one of which another is arriving; chunks that are not those due."""
    with fleet(tmp_path, config_of(tmp_path, members={"stall_s": 0.5}), region=False) as (coordinator, _, members):
        stub = chunks.stub(members["e1"].parent._current().channel)
        share = Share(node="e1", incarnation=1, of="e1", shape=(2,), digests=(digest_of(POINTS[0]),))
        header = pb.ShareRequest(header=items.pack_share(share))
        wanted, data = threading.Event(), bytes_of_sample(POINTS[0])

        def call(*requests: Any, ready: threading.Event | None = None) -> Reason:
            over = threading.Event()

            def stream() -> Iterator[Any]:
                yield header
                if requests:
                    assert wanted.wait(30)
                    yield from requests
                else:
                    over.wait(30)

            answers = stub.Share(stream())
            try:
                for _ in answers:
                    wanted.set()
                    if ready is not None:
                        ready.set()
                raise AssertionError("it was taken")
            except grpc.RpcError as error:
                refusal = wire.refusal(error.trailing_metadata(), error.details())  # type: ignore[attr-defined]
                assert refusal is not None
                return refusal.reason
            finally:
                over.set()
                wanted.clear()

        assert call(chunks.pack(4, data)) is Reason.OUT_OF_ORDER
        assert call(chunks.pack(0, data + data)) is Reason.WRONG_SIZE
        assert call(chunks.pack(0, data[:4])) is Reason.TRUNCATED
        assert call(header) is Reason.MALFORMED
        damaged = bytearray(chunks.pack(0, data))
        damaged[-1] ^= 1
        assert call(bytes(damaged)) is Reason.BAD_CHECKSUM
        found: list[Reason] = []
        ready = threading.Event()
        first = threading.Thread(target=lambda: found.append(call(ready=ready)))
        first.start()
        assert ready.wait(30)
        assert call() is Reason.TOO_MANY
        first.join(30)
        assert found == [Reason.STALLED]
        assert coordinator.status()["open_items"] == {"filled": 0, "held": 0}
        assert members["e1"].share(POINTS[:1]).room == 19


def test_a_large_sample_comes_in_chunks(tmp_path: Path) -> None:
    """Of 1.6 MB: one at a time, four chunks each; members bring it whole."""
    shape = (400, 1000)
    large = torch.randn(4, *shape)
    named = {"name": "large", "classes": 4, "items": 4, "digest": "0" * 64}
    room = {"items": 3, "retention_hours": 1.0, "shape": list(shape)}
    config = fleet_config(tmp_path, kind="logits", publish="prob16", proxy={**named, "open": room})
    with running(config) as coordinator:
        parent = Uplink(coordinator.address, SecurityConfig(), node="a", run="test")
        parent.join(Join(node="a", tier=Tier.EDGE, incarnation=1))
        found = {digest_of(item): item for item in large}
        for place in range(4):
            offer = Share(node="a", incarnation=1, of="a", shape=shape, digests=tuple(found))
            shared = parent.share(offer, lambda digest: bytes_of_sample(found[digest]))
            assert (len(shared.known), shared.room) == (min(place + 1, 3), max(2 - place, 0))
        store = coordinator.coordinator.driver.items
        coordinator.call(lambda: store.fix(0))  # type: ignore[union-attr]
        got = bytearray()
        catalogue = parent.pull_items(0, -1, (), lambda offset, data: None)
        size = 4 * 400 * 1000
        parent.pull_items(catalogue.pool, 0, ((size, 3 * size),), lambda offset, data: got.extend(data))
        assert bytes(got[:size]) == bytes_of_sample(found[catalogue.items[1].digest])
        assert bytes(got[size:]) == bytes_of_sample(found[catalogue.items[2].digest])
        parent.close()


def test_edge_nodes_as_processes_share_by_permission_and_labels_come_late(tmp_path: Path) -> None:
    """One permits sharing: what another process of the device finds hard meanwhile goes to everybody. One only keeps."""
    sees = {"e1": [0, 1], "e2": [2, 3], "lab": [0, 1, 2, 3]}
    task = {"target": "helpers.soft_tasks:Knowing", "args": {"sees": sees}}
    window = {"preset": "semi_sync", "quorum": 2, "require": [], "min_updates": 2, "deadline_s": 60.0}
    config = on_port(config_of(tmp_path, window=window, task=task, until={"versions": 400}), free_port())
    kept = {"consent": True, "retention_hours": 1.0, "label_share": 1.0, "state": str(tmp_path / "hard")}
    shares = {"e1": {"share": True}, "e2": {}}
    files = {}
    for name, permitted in shares.items():
        (tmp_path / name).mkdir()
        edge = {"steps": 2, "batch_size": 16, "state": str(tmp_path / name)}
        sections = {"edge": edge, "cascade": {"hard_samples": {**kept, **permitted}}}
        files[name] = config.model_validate({**config.model_dump(exclude_unset=True), **sections})
    with running(config) as coordinator, commands() as start:
        nodes = {name: start("edge", write(file, tmp_path / name), "--name", name) for name, file in files.items()}
        eventually(lambda: coordinator.status()["version"] >= 2, "both take part")
        for name, points in (("e1", POINTS[:4]), ("e2", POINTS[4:8])):
            with Reservoir(tmp_path / "hard" / name, files[name].cascade.hard_samples) as answering:
                answering.add(points, torch.ones(len(points)))
        eventually(lambda: coordinator.status()["open_items"]["held"] == 4, "the samples came")
        begun = coordinator.status()["version"]
        eventually(lambda: coordinator.status()["version"] >= begun + 4, "the next versions are made on them")
        looker = Uplink(coordinator.address, SecurityConfig(), node="looker", run="test")
        edge = Knowledge(PROXY, config, Tier.SITE)
        edge.take(looker, int(looker.status()["version"]))
        looker.close()
        assert sorted(item.tolist() for item in edge.opened.held.values()) == sorted(POINTS[:4].tolist())
        rows = edge.rows[40:44]
        right = [Knowing({}).label_source(item) for _, item in sorted(edge.opened.held.items())]
        assert rows[:, :4].argmax(1).tolist() == right  # e1 says the labels that it was told, of a class it has never seen
        assert bool((rows[:, -1] > 10).all())
        # the permission is withdrawn
        assert nodes["e1"].end(signal.SIGTERM) == 0
        without = {**files["e1"].model_dump(exclude_unset=True), "cascade": {"hard_samples": {"state": str(tmp_path / "hard")}}}
        again = start("edge", write(config.model_validate(without), tmp_path / "e1"), "--name", "e1")
        eventually(lambda: coordinator.status()["open_items"]["held"] == 0, "they are taken back")
        assert not (tmp_path / "hard" / "e1").exists()
        assert again.end(signal.SIGTERM) == 0
        assert nodes["e2"].end(signal.SIGTERM) == 0
