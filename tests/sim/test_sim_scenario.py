"""The scenario file: what is read, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fleetddp.common.errors import ConfigError
from fleetddp.common.update import Tier
from fleetddp.edge.sim.scenario import Nights, load, parse

PHONES = {"count": 2, "profile": "phones"}


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(
        """
        seed: 3
        horizon_s: 3600
        fleet: {window: {preset: sync}, until: {versions: 7}}
        regions: {eu: {up_bytes_per_s: 1.0e+6, cuts: [[10, 20]], outages: {daily: 0.5, mean_s: 60}}}
        populations:
          phones: {count: 2, profile: phones, region: eu, availability: {kind: nights, utc_offsets_h: [1, 2]}}
          site: {count: 1, profile: datacenter, tier: site}
        """
    )
    scenario = load(path)
    assert [name for name, _, _ in scenario.devices] == ["phones-0", "phones-1", "site-0"]
    assert scenario.fleet.until.versions == 7
    assert scenario.populations["site"].tier is Tier.SITE
    assert scenario.populations["phones"].availability == Nights(kind="nights", utc_offsets_h=(1.0, 2.0))
    assert scenario.regions["eu"].cuts == ((10.0, 20.0),)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"horizon": 3}, "scenario: horizon: unknown key"),
        ({"horizon_s": 0}, "scenario: horizon_s: Input should be greater than 0"),
        ({"populations": {}}, "scenario: populations: Dictionary should have at least 1 item"),
        ({"populations": {"p": {**PHONES, "profile": "toasters"}}}, "populations.p.profile: Input should be 'phones', 'jetsons'"),
        ({"populations": {"p": {**PHONES, "tier": "region"}}}, "populations.p.tier: Input should be"),
        ({"populations": {"p": {**PHONES, "region": "eu"}}}, "populations.p.region is 'eu'; there are no regions"),
        ({"populations": {"a/b": PHONES}}, "populations.a/b"),
        ({"fleet": {"window": {"preset": "psychic"}}}, "fleet.window.preset: Input should be 'sync'"),
        ({"root": {"disk_s": 0}}, "root.disk_s: Input should be greater than 0"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"horizon_s": 10, "populations": {"phones": PHONES}, **changes})
    assert says in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the scenario"):
        load(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        load(tmp_path / "bad.yaml")


def test_a_scenario_is_read_before_torch_is_imported() -> None:
    """So that ``fleetddp simulate`` can have its workers' torch imported while it imports its own."""
    program = "import sys, fleetddp.edge.sim.scenario, fleetddp.edge.sim.preload; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
