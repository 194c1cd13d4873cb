"""The fleet file: errors name the key and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetddp.common.config import Hinge, load, parse
from fleetddp.common.errors import ConfigError
from fleetddp.common.update import Tier


def lines(data: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(data, source="f.yaml")
    return str(caught.value).splitlines()


def test_everything_has_a_default() -> None:
    config = parse({})
    assert config.window.preset == "semi_sync"
    assert config.outer.optimizer == "SGD"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"window": {"qourum": 1}},
            "window.qourum: unknown key; allowed here: deadline_s, grace_s, min_updates, preset, quorum, require",
        ),
        ({"merge": {"share": "sample"}}, "merge.share: Input should be 'samples'; or: Input should be a valid dictionary"),
        (
            {"merge": {"staleness": {"discount": {"kind": "polynomial", "b": 1}}}},
            "merge.staleness.discount.b: unknown key; allowed here: a, kind",
        ),
        (
            {"merge": {"tiers": {"edge": {"bound": 1}}}},
            "merge.tiers.edge.bound: unknown key; allowed here: discount, max_staleness",
        ),
        ({"security": {"ca": "a"}}, "security: mutual TLS needs ca, cert and key together; only ca given"),
        ({"members": {"lease_s": 1}}, "members: lease_s (1.0) must be greater than heartbeat_s (5.0)"),
        ({"coordinator": {"address": "nowhere"}}, "coordinator.address: 'nowhere' is not HOST:PORT"),
        (
            {"start": {"bootstrap": "file"}},
            "start: start.bootstrap: file needs start.file, and start.file needs bootstrap: file",
        ),
        ({"until": {"metric": "accuracy"}}, "until: until.metric and until.at_least go together"),
        ({"task": {"target": "nocolon"}}, "task.target: 'nocolon' is not package.module:Class"),
    ],
)
def test_a_wrong_key_gets_one_line(data: object, line: str) -> None:
    assert lines(data) == [f"f.yaml: {line}"]


def test_every_wrong_key_is_named_at_once() -> None:
    assert [line.split(": ")[1] for line in lines({"run": "a b", "window": {"deadline_s": -1}, "nonsense": 1})] == [
        "run",
        "window.deadline_s",
        "nonsense",
    ]


def test_a_quorum_of_one_is_a_count_and_of_one_point_zero_everyone() -> None:
    assert parse({"window": {"quorum": 1}}).window.quorum == 1
    assert type(parse({"window": {"quorum": 1}}).window.quorum) is int
    assert type(parse({"window": {"quorum": 1.0}}).window.quorum) is float


def test_a_tier_may_have_its_own_staleness() -> None:
    merge = parse({"merge": {"tiers": {"edge": {"max_staleness": 3, "discount": {"kind": "hinge"}}}}}).merge
    assert merge.for_tier(Tier.EDGE).max_staleness == 3
    assert merge.for_tier(Tier.EDGE).discount == Hinge()
    assert merge.for_tier(Tier.SITE).max_staleness == 10


def test_a_file_that_is_missing_or_no_yaml_or_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the fleet file"):
        load(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(bad)
    bad.write_text("- a")
    with pytest.raises(ConfigError, match="mapping of sections, not list"):
        load(bad)
    bad.write_text("")
    assert load(bad) == parse({})


def test_distillation_fits_its_proxy_set() -> None:
    proxy = {"name": "p", "classes": 3, "items": 8, "digest": "0" * 64}
    assert (
        parse({"kind": "logits", "publish": "prob16", "proxy": proxy, "distill": {"codec": "probtop:2"}}).distill.codec
        == "probtop:2"
    )
    for distill, said in (({"codec": "probtop:3"}, "fewer than all are due"), ({"learn_from": "others"}, "needs proxy")):
        with pytest.raises(ConfigError, match=said):
            parse({"kind": "logits", "publish": "prob16", "proxy": proxy, "distill": distill})
    with pytest.raises(ConfigError, match=r"distill\.codec"):
        parse({"distill": {"codec": "int8"}})


def test_a_site_teaches_in_a_track_of_soft_labels() -> None:
    knowledge = {"kind": "logits", "publish": "prob16", "proxy": {"name": "p", "classes": 3, "items": 8, "digest": "0" * 64}}
    tracks = {"cloud": {}, "knowledge": knowledge}
    assert parse({"tracks": tracks, "site": {"knowledge": "knowledge"}}).site.knowledge == "knowledge"
    for wrong in ("cloud", "wisdom"):
        with pytest.raises(ConfigError, match=f"'{wrong}' is no track of kind: logits"):
            parse({"tracks": tracks, "site": {"knowledge": wrong}})
