"""Tracks in the fleet file: what each one's coordinator and members see of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetddp.common.clock import SystemClock
from fleetddp.common.config import ONLY_TRACK, FleetConfig, parse
from fleetddp.common.errors import ConfigError
from fleetddp.common.transport.memory import MemoryFleet
from fleetddp.edge.region import Region

PROXY = {"name": "set", "classes": 10, "items": 5, "digest": "0" * 64}
TRACKS: dict[str, Any] = {
    "cloud": {"window": {"preset": "sync"}, "outer": {"preset": "diloco"}, "members": {"sites": ["lab"]}},
    "edge": {"include": ["head.*"], "until": {"versions": 5}, "site": {"sync_every": 7}},
    "knowledge": {"kind": "logits", "proxy": PROXY},
}
FLEET: dict[str, Any] = {
    "coordinator": {"address": "10.0.0.1:7070", "journal": "/var/j"},
    "window": {"preset": "fedbuff", "quorum": 9},
    "merge": {"share": {"site": 0.7, "edge": 0.3}, "gradient_lr": 0.5},
    "outer": {"optimizer": "SGD", "options": {"lr": 0.3}},
    "site": {"track": "cloud", "fragments": 4},
    "region": {"codec": "int8"},
    "edge": {"track": "edge", "state": "/var/s"},
    "until": {"versions": 100},
}


def test_a_section_of_a_track_is_its_own_and_all_else_is_the_fleets() -> None:
    config = parse({**FLEET, "tracks": TRACKS})
    cloud, edge = config.for_track("cloud"), config.for_track("edge")
    assert (cloud.window.preset, cloud.window.quorum) == ("sync", None)  # the whole section
    assert (edge.window.preset, edge.window.quorum) == ("fedbuff", 9)
    assert (cloud.outer.preset, edge.outer.options) == ("diloco", {"lr": 0.3})
    assert (cloud.members.sites, edge.members.sites) == (("lab",), ())
    assert (cloud.until.versions, edge.until.versions) == (100, 5)
    assert (cloud.include, edge.include) == ((), ("head.*",))
    assert (cloud.site.fragments, edge.site.fragments, edge.site.sync_every) == (4, 1, 7)
    assert cloud.coordinator.address == "10.0.0.1:7070"
    assert [c.coordinator.journal for c in (cloud, edge)] == [Path("/var/j/cloud"), Path("/var/j/edge")]
    assert [c.edge.state for c in (cloud, edge)] == [Path("/var/s/cloud"), Path("/var/s/edge")]
    assert not cloud.tracks


def test_of_soft_labels_what_is_for_weights_is_left_out() -> None:
    knowledge = parse({**FLEET, "tracks": TRACKS}).for_track("knowledge")
    assert (knowledge.kind, knowledge.publish, knowledge.merge.share) == ("logits", "prob16", "samples")
    assert knowledge.merge.gradient_lr == 0.5
    assert (knowledge.outer.options, knowledge.site.fragments, knowledge.region.codec) == ({}, 1, "float64")
    assert (knowledge.window.preset, knowledge.until.versions) == ("fedbuff", 100)


def test_without_tracks_nothing_changes() -> None:
    config = parse(FLEET | {"site": {}, "edge": {}})
    assert config.for_track("") is config
    assert config.for_track(ONLY_TRACK) is config


def test_the_only_track_need_not_be_named_and_of_several_one_must() -> None:
    one = parse({"tracks": {"a": {"until": {"versions": 3}}}})
    assert one.for_track("").until.versions == 3
    several = parse({"tracks": {"a": {}, "b": {}}})
    with pytest.raises(ConfigError, match=r"several tracks, and none is named; there are: a, b"):
        several.for_track("")
    with pytest.raises(ConfigError, match=r"there is no track 'c'; there are: a, b"):
        several.for_track("c")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tracks": {"a": {}}, "site": {"track": "b"}}, "site.track: there is no track 'b'; there are: a"),
        ({"edge": {"track": "b"}}, "edge.track: there is no track 'b'; there are: main"),
        ({"tracks": {"a": {"kind": "logits"}}}, "tracks.a: a track of kind logits has a proxy set"),
        ({"tracks": {"a": {"proxy": PROXY}}}, "tracks.a: a track of kind logits has a proxy set, and no other"),
        ({"tracks": {"a": {"kind": "logits", "proxy": {"name": "p", "classes": 3}}}}, "give either file, or items and digest"),
        ({"tracks": {"a": {"publish": "prob16"}}}, "prob16 is for soft labels"),
        ({"tracks": {"a": {"kind": "logits", "proxy": PROXY, "publish": "int8"}}}, "int8 is for weights"),
        ({"tracks": {"a": {"kind": "logits", "proxy": PROXY, "outer": {"preset": "diloco"}}}}, "takes no outer step"),
        ({"tracks": {"a": {"kind": "logits", "proxy": PROXY, "merge": FLEET["merge"]}}}, "proxy.by_tier keeps the tiers apart"),
        ({"kind": "logits", "proxy": PROXY, "region": {"codec": "int8"}}, "sums of soft labels travel in float64"),
        ({"kind": "logits", "proxy": PROXY, "site": {"fragments": 2}}, "site.fragments is for weights"),
        ({"tracks": {f"t{n}": {} for n in range(65)}}, "at most 64 items"),
        ({"tracks": {"a/b": {}}}, "tracks.a/b"),
        ({"tracks": {"a": {"windo": {}}}}, "tracks.a.windo: unknown key; allowed here: "),
        ({"tracks": {"a": {"edge": {"update": "gradient"}}}, "work": {"steps": "adaptive"}}, "tracks.a: work.steps"),
    ],
)
def test_a_track_that_does_not_fit_is_refused_by_name(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(sections)
    assert message in str(caught.value)


def test_of_several_tracks_whoever_is_of_one_must_be_told_which(tmp_path: Path) -> None:
    config = parse({"tracks": {"a": {}, "b": {}}, "coordinator": {"journal": str(tmp_path)}})
    with pytest.raises(ConfigError, match="there are: a, b"):
        MemoryFleet(config, SystemClock())
    with pytest.raises(ConfigError, match="there are: a, b"):
        Region(config, "west")


def test_a_config_made_in_python_is_the_same_as_one_read() -> None:
    made = FleetConfig.model_validate({"tracks": {"a": {"until": {"versions": 3}}}}).model_copy(update={"seed": 4})
    assert made.for_track("a").seed == 4
