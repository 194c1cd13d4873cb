"""One coordinator, several tracks: their members, what a stranger is told, soft labels and proxy sets over the network."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import torch
import yaml
from helpers.fleet import RunningCoordinator, RunningService, fleet_config, free_port, running
from helpers.one_rank import process_group
from helpers.preloaded import Preloaded
from helpers.processes import eventually
from helpers.tasks import LineTask

from fleetddp.cloud import FleetDDP
from fleetddp.cloud.status import show
from fleetddp.common import codecs, labels
from fleetddp.common.config import SecurityConfig
from fleetddp.common.errors import ConfigError, LayoutMismatch, Reason, Refused
from fleetddp.common.events import Join
from fleetddp.common.layout import Layout
from fleetddp.common.proxy import ProxySet
from fleetddp.common.publish import save_init
from fleetddp.common.shelf import bring
from fleetddp.common.transport.uplink import Patience, Uplink
from fleetddp.common.transport.weights import fetch
from fleetddp.common.update import Interval, Kind, ProxyInfo, Slice, State, Tier, UpdateHeader, UpdateId
from fleetddp.edge import EdgeNode
from fleetddp.edge.node import run_node
from fleetddp.edge.region import Region

CLASSES = 3
PATIENCE = Patience(stall_s=5.0, give_up_s=5.0)


def items(n: int = 100_000) -> torch.Tensor:
    """Some chunks of them: 1.6 MB."""
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1))


def tracks(folder: Path) -> dict[str, Any]:
    """Two models and what they know of each other."""
    save_init(LineTask().model(), folder / "narrow.safetensors")
    save_init(LineTask(wide=5).model(), folder / "wide.safetensors")
    ProxySet("points", CLASSES, items()).save(folder / "points.safetensors")
    return {
        "narrow": {
            "start": {"bootstrap": "file", "file": str(folder / "narrow.safetensors")},
            "task": {"target": "helpers.tasks:LineTask", "args": {"lr": 0.01}},
            "until": {"versions": 3},
        },
        "wide": {
            "start": {"bootstrap": "file", "file": str(folder / "wide.safetensors")},
            "task": {"target": "helpers.tasks:LineTask", "args": {"lr": 0.01, "wide": 5}},
            "until": {"versions": 6},
        },
        "knowledge": {
            "kind": "logits",
            "proxy": {"name": "points", "classes": CLASSES, "file": str(folder / "points.safetensors")},
            "until": {"versions": 1},
        },
    }


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[RunningCoordinator]:
    with running(fleet_config(tmp_path, tracks=tracks(tmp_path))) as coordinator:
        yield coordinator


@pytest.fixture
def dial(fleet: RunningCoordinator) -> Iterator[Any]:
    uplinks: list[Uplink] = []

    def start(track: str, node: str = "pi") -> Uplink:
        uplinks.append(Uplink(fleet.address, SecurityConfig(), node=node, track=track, patience=PATIENCE))
        return uplinks[-1]

    yield start
    for uplink in uplinks:
        uplink.close()


def join(uplink: Uplink, node: str = "pi", layout: str = "") -> Any:
    return uplink.join(Join(node=node, tier=Tier.EDGE, incarnation=1, layout=layout))


@pytest.fixture
def preloaded() -> Iterator[Preloaded]:
    server = Preloaded()
    yield server
    server.close()


# ---- processes --------------------------------------------------------------------------------------------------------------


def test_members_of_two_tracks_train_until_both_are_finished(
    tmp_path: Path, preloaded: Preloaded, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator is killed when one of its tracks has ended."""
    address = f"127.0.0.1:{free_port()}"
    both = {name: section for name, section in tracks(tmp_path).items() if name != "knowledge"}
    config = fleet_config(
        tmp_path,
        tracks=both,
        coordinator={"address": address},
        edge={"track": "narrow", "steps": 2, "batch_size": 8, "state": str(tmp_path / "edges")},
    )
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    root = preloaded.start("coordinator", tmp_path / "root.log", config=str(path))
    root.wait_for("listening")
    narrow = preloaded.start("edge", tmp_path / "narrow.log", config=str(path), name="pi")
    assert narrow.end() == 0
    assert "the run is finished: version 3 is published" in (tmp_path / "narrow.log").read_text()
    assert root.code is None  # the other track goes on
    root.kill()
    root = preloaded.start("coordinator", tmp_path / "root.log", config=str(path))
    root.wait_for("listening")
    show(address, SecurityConfig(), as_json=True, watch=False)
    found = json.loads(capsys.readouterr().out)["tracks"]
    assert {name: (s["version"], bool(s["finished"])) for name, s in found.items()} == {"narrow": (3, True), "wide": (0, False)}
    show(address, SecurityConfig(), as_json=False, watch=False)
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("run ")] == [
        "run test   track narrow (weights)   version 3   finished: version 3 is published",
        "run test   track wide (weights)   version 0",
    ]
    with pytest.raises(ConfigError, match="there is no track 'thin'; there are: narrow, wide"):
        run_node(config, name="stranger", track="thin")
    wider = preloaded.start("edge", tmp_path / "wide.log", config=str(path), name="pi", track="wide")  # the same device in both
    assert wider.end() == 0
    assert root.end() == 0
    assert sorted(p.name for p in (tmp_path / "journal").iterdir()) == ["narrow", "wide"]
    assert (tmp_path / "edges" / "narrow" / "pi").is_dir()
    assert (tmp_path / "edges" / "wide" / "pi").is_dir()


def test_a_site_takes_part_in_two_tracks(fleet: RunningCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by its argument, one by the environment; each model takes up the weights of its own track."""
    monkeypatch.setenv("FLEETDDP_TRACK", "wide")
    with process_group():
        modules = {None: LineTask(wide=5).model(), "narrow": LineTask().model()}
        given = {track: module.state_dict() for track, module in modules.items()}
        models = {
            track: FleetDDP(module, coordinator=fleet.address, site="lab", sync_every=1, track=track, codec="int8")
            for track, module in modules.items()
        }
        for track, module in modules.items():
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(9.0)
            models[track].start()
            assert all(torch.equal(value, given[track][name]) for name, value in module.state_dict().items())
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            models[track](torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            assert models[track].version == 1
        for model in models.values():
            model.close()
    for name in ("narrow", "wide"):
        status = fleet.call(fleet.coordinator.drivers[name].status)
        assert [(m["node"], m["live"]) for m in status["members"]] == [("lab", False)]
        assert (status["version"], status["counters"]["merged"]) == (1, 1)


def below(fleet: RunningCoordinator, folder: Path, track: str) -> RunningService:
    """A region of one track, started."""
    own = {"track": track, "address": "127.0.0.1:0", "journal": folder / "region"}
    changes = {
        "region": fleet.config.region.model_validate(own),
        "coordinator": fleet.config.coordinator.model_copy(update={"address": fleet.address}),
    }
    config = fleet.config.model_copy(update=changes)
    if track == "knowledge":  # the file is not on this machine
        section = config.tracks[track]
        assert section.proxy is not None
        proxy = section.proxy.model_copy(update={"file": folder / "elsewhere.safetensors"})
        config = config.model_copy(update={"tracks": {**config.tracks, track: section.model_copy(update={"proxy": proxy})}})
    return RunningService(Region(config, "west"))


def test_a_region_serves_the_members_of_its_track(fleet: RunningCoordinator, tmp_path: Path, dial: Any) -> None:
    region = below(fleet, tmp_path, "wide")
    try:
        uplinks = {t: Uplink(region.address, SecurityConfig(), node="pi", track=t, patience=PATIENCE) for t in ("wide", "narrow")}
        eventually(lambda: region.service.driver.version == 0, "it has the version of its track")
        layout = Layout.from_module(LineTask(wide=5).model())
        assert join(uplinks["wide"]).layout == layout.fingerprint
        assert torch.equal(fetch(uplinks["wide"], 0, layout), fetch(dial("wide"), 0, layout))
        with pytest.raises(Refused, match="WRONG_TRACK"):
            join(uplinks["narrow"])
        status = fleet.call(fleet.coordinator.drivers["wide"].status)
        assert [(member["node"], member["tier"]) for member in status["members"]] == [("west", "region")]
        for uplink in uplinks.values():
            uplink.close()
    finally:
        region.stop()


def test_a_region_hands_out_the_proxy_set_of_its_parent(fleet: RunningCoordinator, tmp_path: Path) -> None:
    region = below(fleet, tmp_path, "knowledge")
    try:
        uplink = Uplink(region.address, SecurityConfig(), node="pi", patience=PATIENCE)
        eventually(lambda: region.service.driver.shelf is not None, "it has brought it")
        found = bring(uplink, tmp_path / "brought", classes=CLASSES)
        assert torch.equal(found.items, items())
        uplink.close()
    finally:
        region.stop()


def test_a_restarted_coordinator_goes_on_with_all_its_tracks(tmp_path: Path) -> None:
    config = fleet_config(tmp_path, tracks=tracks(tmp_path))
    layout = Layout.from_module(LineTask(wide=5).model())
    with running(config) as first:
        uplink = Uplink(first.address, SecurityConfig(), node="pi", track="wide", patience=PATIENCE)
        join(uplink)
        payload = memoryview(bytes(4 * layout.elements))
        header = UpdateHeader(
            update_id=UpdateId("pi", 1, 1),
            kind=Kind.DELTA,
            tier=Tier.EDGE,
            base_version=0,
            codec="float32",
            layout=layout.fingerprint,
        )
        part = Slice(intervals=((0, layout.elements),), samples=1.0, digest=google_crc32c.value(bytes(payload)))
        assert uplink.push(header, part, payload).state in (State.ACCEPTED, State.MERGED)
        eventually(lambda: first.coordinator.drivers["wide"].version == 1, "it is merged")
        uplink.close()
    with running(config) as second:
        assert {name: driver.version for name, driver in second.coordinator.drivers.items()} == {
            "narrow": 0,
            "wide": 1,
            "knowledge": 0,
        }


def test_prometheus_tells_the_tracks_apart(tmp_path: Path) -> None:
    port = free_port()
    config = fleet_config(tmp_path, tracks=tracks(tmp_path), coordinator={"metrics_port": port})
    with running(config), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    assert 'fleetddp_version{track="knowledge"} 0.0' in lines
    assert 'fleetddp_received_bytes_total{track="wide"} 0.0' in lines


# ---- who is told what -------------------------------------------------------------------------------------------------------


def test_each_track_has_its_own_layout_versions_and_members(fleet: RunningCoordinator, dial: Any) -> None:
    narrow, wider = dial("narrow"), dial("wide")
    layouts = [Layout.from_module(LineTask().model()), Layout.from_module(LineTask(wide=5).model())]
    assert [join(uplink).layout for uplink in (narrow, wider)] == [layout.fingerprint for layout in layouts]
    assert [fetch(u, 0, layout).numel() for u, layout in zip((narrow, wider), layouts, strict=True)] == [
        layout.elements for layout in layouts
    ]
    status = narrow.status()
    assert status["track"] == "narrow"
    assert [member["node"] for member in status["members"]] == ["pi"]
    assert status["tracks"]["knowledge"] == {"kind": "logits", "version": 0, "finished": ""}
    assert dial("").status()["track"] == "narrow"  # the first


@pytest.mark.parametrize("track", ["", "thin"])
def test_a_call_without_a_track_of_the_run_is_told_which_there_are(track: str, dial: Any) -> None:
    with pytest.raises(Refused) as refused:
        join(dial(track))
    assert refused.value.reason is Reason.WRONG_TRACK
    for name in ("narrow", "wide", "knowledge"):
        assert f"{name} (layout " in refused.value.message
    uplink = dial(track)
    for call in (uplink.layout, lambda: uplink.leave("pi", 1), lambda: uplink.pull(0, (), lambda offset, data: None)):
        with pytest.raises(Refused, match="WRONG_TRACK"):
            call()


def test_an_update_for_a_track_that_is_not_there_is_not_lost(dial: Any) -> None:
    layout = Layout.from_module(LineTask().model())
    header = UpdateHeader(
        update_id=UpdateId("pi", 1, 1),
        kind=Kind.DELTA,
        tier=Tier.EDGE,
        base_version=0,
        codec="float32",
        layout=layout.fingerprint,
    )
    uplink = dial("thin")
    uplink._layout = layout  # as one that has pushed before
    payload = bytes(4 * layout.elements)
    part = Slice(intervals=((0, layout.elements),), samples=1.0, digest=google_crc32c.value(payload))
    with pytest.raises(Refused, match="WRONG_TRACK"):  # raised, not returned as the update's end
        uplink.push(header, part, memoryview(payload))


def test_a_track_is_a_name(dial: Any) -> None:
    with pytest.raises(Refused, match=r"MALFORMED: track is '\.\./wide'"):
        join(dial("../wide"))


def test_a_member_with_another_model_is_told_which_tracks_there_are(fleet: RunningCoordinator, tmp_path: Path, dial: Any) -> None:
    mine = Layout.from_module(LineTask(wide=5).model()).fingerprint
    with pytest.raises(Refused) as refused:
        join(dial("narrow"), layout=mine)
    assert refused.value.reason is Reason.WRONG_LAYOUT
    assert f"wide (layout {mine[:12]})" in refused.value.message
    config = fleet.config.for_track("narrow").model_copy(
        update={"edge": fleet.config.edge.model_copy(update={"state": tmp_path})}
    )
    node = EdgeNode(config, LineTask(wide=5), dial("narrow"), name="pi")
    with pytest.raises(LayoutMismatch, match=rf"wide \(layout {mine[:12]}\)"):
        node.run()


def test_a_track_decides_who_may_take_part(tmp_path: Path) -> None:
    sections = tracks(tmp_path)
    sections["wide"]["members"] = {"allow": ["lab-*"]}
    with running(fleet_config(tmp_path, tracks=sections)) as coordinator:
        uplinks = [
            Uplink(coordinator.address, SecurityConfig(), node="pi", track=t, patience=PATIENCE) for t in ("narrow", "wide")
        ]
        assert join(uplinks[0]).run == "test"
        with pytest.raises(Refused, match="WRONG_IDENTITY"):
            join(uplinks[1])
        for uplink in uplinks:
            uplink.close()


# ---- soft labels and proxy sets ---------------------------------------------------------------------------------------------


def test_soft_labels_over_the_network(fleet: RunningCoordinator, dial: Any) -> None:
    uplink = dial("knowledge")
    joined = join(uplink)
    assert joined.codecs == ("prob16", "probtop", "prob64")
    layout = uplink.layout()
    codec = codecs.get(f"prob16:{CLASSES}")
    which: tuple[Interval, ...] = ((5, 7), (99_999, 100_000))
    covers = labels.elements(layout, Tier.EDGE, which)
    said = torch.tensor([[0.5, 0.25, 0.25, 1.0], [0.5, 0.5, 1.0, 2.0], [0.0, 0.0, 3.0, 3.0]])
    payload = codec.encode(said.flatten()).numpy().tobytes()
    header = UpdateHeader(
        update_id=UpdateId("pi", 1, 1),
        kind=Kind.LOGITS,
        tier=Tier.EDGE,
        base_version=0,
        codec=codec.spec,
        layout=layout.fingerprint,
        covers=covers,
    )
    receipt = uplink.push(header, Slice(intervals=covers, samples=3.0, digest=google_crc32c.value(payload)), memoryview(payload))
    assert receipt.state in (State.ACCEPTED, State.MERGED)
    eventually(lambda: uplink.status()["version"] == 1, "it is merged")
    row = codec.block_bytes
    ranges = [(start * row, stop * row) for start, stop in which]  # only what is of interest
    got = bytearray()
    version = uplink.pull(1, ranges, lambda offset, data: got.extend(data))
    assert (version.codec, version.payload_bytes) == (codec.spec, 100_000 * row)
    assert torch.equal(codec.decode(torch.frombuffer(got, dtype=torch.uint8), 12).view(3, 4), said)
    assert uplink.status()["tracks"]["knowledge"]["finished"]


def test_a_proxy_set_is_brought_in_chunks_and_resumed(tmp_path: Path, dial: Any) -> None:
    uplink, folder = dial("knowledge"), tmp_path / "brought"
    seen: list[Interval] = []

    class Breaking:
        """Is killed after one chunk, the first time."""

        def pull_proxy(self, ranges: Any, sink: Any) -> ProxyInfo:
            def one(offset: int, data: memoryview) -> None:
                if len(seen) == 1:
                    seen.append((offset, offset))
                    raise KeyboardInterrupt
                seen.append((offset, offset + len(data)))
                sink(offset, data)

            info: ProxyInfo = uplink.pull_proxy(ranges, one)
            return info

    with pytest.raises(KeyboardInterrupt):
        bring(Breaking(), folder, classes=CLASSES)
    found = bring(Breaking(), folder, classes=CLASSES)
    assert torch.equal(found.items, items())
    carried = [piece for piece in seen if piece[0] < piece[1]]
    size = (tmp_path / "points.safetensors").stat().st_size
    assert carried[0][0] == 0
    assert [a[1] for a in carried[:-1]] == [b[0] for b in carried[1:]]  # nothing came twice
    assert carried[-1][1] == size
    assert [p.name for p in folder.iterdir()] == [f"{found.digest}.safetensors"]
    before = len(seen)
    assert bring(Breaking(), folder, classes=CLASSES).digest == found.digest
    assert len(seen) == before  # it is here


@pytest.mark.parametrize("damaged", [False, True])
def test_a_proxy_set_that_is_not_what_it_was_said_to_be_is_not_taken(damaged: bool, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    ProxySet("points", CLASSES, items(10)).save(other)
    data = other.read_bytes()[:100] if damaged else other.read_bytes()

    class Lying:
        def pull_proxy(self, ranges: Any, sink: Any) -> ProxyInfo:
            for start, stop in ranges:
                sink(start, memoryview(data)[start:stop])
            return ProxyInfo("points", "ab" * 32, len(data))

    with pytest.raises(Refused, match="BAD_CHECKSUM"):
        bring(Lying(), tmp_path / "brought", classes=CLASSES)
    assert list((tmp_path / "brought").iterdir()) == []


def test_where_there_is_no_file_there_is_nothing_to_bring(tmp_path: Path, dial: Any) -> None:
    with pytest.raises(Refused, match="NO_PROXY"):
        bring(dial("narrow"), tmp_path / "brought", classes=CLASSES)


def test_threads_of_two_tracks_do_not_wait_for_each_other(fleet: RunningCoordinator, dial: Any) -> None:
    """While one track's journal is busy the other answers."""
    begun, go = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        go.wait(30)

    driver = fleet.coordinator.drivers["narrow"]
    try:
        fleet.call(lambda: driver._write("nothing", busy))
        assert begun.wait(30)
        uplink = dial("knowledge")
        join(uplink)
        layout = uplink.layout()
        covers = labels.elements(layout, Tier.EDGE, [(0, 1)])
        payload = codecs.get("prob16:3").encode(torch.tensor([0.5, 0.25, 0.25, 1.0])).numpy().tobytes()
        header = UpdateHeader(
            update_id=UpdateId("pi", 1, 1),
            kind=Kind.LOGITS,
            tier=Tier.EDGE,
            base_version=0,
            codec="prob16:3",
            layout=layout.fingerprint,
            covers=covers,
        )
        part = Slice(intervals=covers, samples=1.0, digest=google_crc32c.value(payload))
        assert uplink.push(header, part, memoryview(payload)).state in (State.ACCEPTED, State.MERGED)
    finally:
        go.set()


def test_a_run_that_began_with_another_proxy_set_does_not_go_on_with_this_one(tmp_path: Path) -> None:
    config = fleet_config(tmp_path, tracks=tracks(tmp_path))
    with running(config):
        pass
    ProxySet("points", CLASSES, items(7)).save(tmp_path / "points.safetensors")
    with pytest.raises(Exception, match=r"tracks\.knowledge: proxy: this run began with another proxy set"):
        RunningCoordinator(config)
