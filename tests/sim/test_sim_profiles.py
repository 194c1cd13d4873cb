"""Profiles: figures against their sources, draws against the distributions, and no duration that is zero."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetddp.common.errors import ConfigError
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.profiles import MBIT, POPULATIONS, Lognormal, Profile, sample

PROFILE = Profile(
    samples_per_s=10.0,
    memory_mib=1024.0,
    down_bytes_per_s=1e6,
    up_bytes_per_s=1e5,
    latency_s=0.02,
    compute_jitter=0.0,
    link_jitter=0.0,
)
DRAWN = ["samples_per_s", "memory_mib", "down_bytes_per_s", "up_bytes_per_s", "latency_s"]


@pytest.mark.parametrize("name", POPULATIONS)
def test_draws_have_the_population_s_median_and_sigma(name: str) -> None:
    population = POPULATIONS[name]()
    devices = [sample(population, Draws(1), f"{name}-{k}") for k in range(2000)]
    for figure in DRAWN:
        logs = [math.log(getattr(device, figure)) for device in devices]
        stated: Lognormal = getattr(population, figure)
        assert statistics.mean(logs) == pytest.approx(math.log(stated.median), abs=4 * stated.sigma / 2000**0.5 + 1e-9)
        assert statistics.stdev(logs) == pytest.approx(stated.sigma, rel=0.08)
    assert {(device.compute_jitter, device.link_jitter) for device in devices} == {
        (population.compute_jitter, population.link_jitter)
    }


def test_a_device_depends_on_seed_and_name_alone() -> None:
    phones = POPULATIONS["phones"]()
    draws = Draws(1)
    first = sample(phones, draws, "phone-1")
    for k in range(50):
        sample(phones, draws, f"phone-{k}")
    assert sample(phones, draws, "phone-1") == first
    assert sample(phones, draws, "phone-2") != first
    assert sample(phones, Draws(2), "phone-1") != first
    slower = replace(phones, samples_per_s=Lognormal(0.1, 0.0))  # another distribution of one figure moves no other
    changed = asdict(sample(phones, draws, "phone-1")) | {"samples_per_s": 0.1}
    assert asdict(sample(slower, draws, "phone-1")) == changed


def test_figures_that_follow_from_a_source_by_arithmetic() -> None:
    """So that a typing error in a median is noticed: each is computed from the numbers that the sources give."""
    phones, jetsons, gateways, datacenter = (POPULATIONS[name]() for name in ("phones", "jetsons", "gateways", "datacenter"))
    pi5 = 20 * 16 / 322.258574
    assert phones.samples_per_s.median == pytest.approx(pi5, rel=0.01)
    assert gateways.samples_per_s.median == pytest.approx(math.sqrt(pi5 * pi5 / 2), rel=0.01)
    assert gateways.samples_per_s.sigma == pytest.approx(math.log(2) / 2 / statistics.NormalDist().inv_cdf(0.75), abs=0.01)
    assert jetsons.samples_per_s.median == pytest.approx(824.02 / 2 / (3382 / 1200) / 2, rel=0.02)
    dense_tops = [32, 40 / 2, 100 / 2, 275 / 2]
    assert jetsons.samples_per_s.sigma == pytest.approx(statistics.stdev(map(math.log, dense_tops)), abs=0.03)
    assert datacenter.samples_per_s.median == pytest.approx(math.sqrt(8322 * 16621), rel=0.001)
    assert datacenter.samples_per_s.sigma == pytest.approx(math.log(16621 / 8322) / 2, abs=0.01)
    down = jetsons.down_bytes_per_s
    assert down.median * math.exp(down.sigma**2 / 2) == pytest.approx(85.73 * MBIT)


def test_training_takes_samples_times_work_over_speed() -> None:
    stream = Draws(1).stream("training")
    assert PROFILE.train_s(50, stream) == 5.0
    assert PROFILE.train_s(50, stream, work=0.5) == 2.5


def test_jitter_of_training_has_median_one() -> None:
    stream = Draws(1).stream("training")
    device = replace(PROFILE, compute_jitter=0.3)
    seconds = sorted(device.train_s(10, stream) for _ in range(2001))
    assert seconds[1000] == pytest.approx(1.0, rel=0.03)
    assert math.log(seconds[1682] / seconds[318]) / 2 == pytest.approx(0.3, rel=0.1)


@given(
    st.sampled_from(sorted(POPULATIONS)),
    st.integers(0, 10_000),
    st.floats(1, 1e9),
    st.floats(1e-9, 1e6),
)
def test_no_duration_is_zero(name: str, seed: int, samples: float, work: float) -> None:
    """The fault of other simulators: a device without a stated speed trains in no time."""
    device = sample(POPULATIONS[name](), Draws(seed), "device")
    assert device.train_s(samples, Draws(seed).stream("training"), work=work) > 0
    assert device.latency_s > 0


def test_no_figure_has_a_default() -> None:
    with pytest.raises(TypeError, match="missing 7 required positional arguments"):
        Profile()  # type: ignore[call-arg]


@pytest.mark.parametrize("figure", [field.name for field in fields(Profile)])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_impossible_devices_are_refused(figure: str, value: float) -> None:
    if figure.endswith("jitter") and value == 0.0:
        assert getattr(replace(PROFILE, **{figure: value}), figure) == 0.0
        return
    with pytest.raises(ConfigError, match=figure):
        replace(PROFILE, **{figure: value})


@pytest.mark.parametrize(("samples", "work"), [(0, 1.0), (-1, 1.0), (math.nan, 1.0), (1, 0.0), (1, math.inf)])
def test_training_on_nothing_is_refused(samples: float, work: float) -> None:
    with pytest.raises(ValueError, match="positive number of samples"):
        PROFILE.train_s(samples, Draws(1).stream("training"), work=work)


@pytest.mark.parametrize(("median", "sigma"), [(0.0, 1.0), (math.inf, 1.0), (1.0, -0.1), (1.0, math.nan)])
def test_wrong_distributions_are_refused(median: float, sigma: float) -> None:
    with pytest.raises(ConfigError, match="a lognormal needs"):
        Lognormal(median, sigma)
