"""Transfers: hand-computed times, and none of them zero."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetddp.common.errors import ConfigError
from fleetddp.edge.sim.draws import Draws
from fleetddp.edge.sim.network import Cuts, Path, SharedLink


def path(**changed: Any) -> Path:
    figures: dict[str, Any] = {"down_bytes_per_s": 1000.0, "up_bytes_per_s": 100.0, "latency_s": 0.5, "jitter": 0.0}
    return Path(**{**figures, "stream": Draws(1).stream("path"), **changed})


def test_a_transfer_takes_size_over_rate_and_one_latency() -> None:
    assert path().download(10.0, 4000) == 14.5
    assert path().upload(10.0, 4000) == 50.5
    assert path().message(10.0) == 10.5


def test_a_shared_link_is_a_queue_and_no_faster_than_the_slowest_part() -> None:
    backhaul = SharedLink(200.0)
    slow, fast = path(up=[backhaul]), path(up=[backhaul], up_bytes_per_s=1e6)
    assert slow.upload(0.0, 1000) == 10.5  # its own link: 10 s; the backhaul is free again at 5 s
    assert fast.upload(1.0, 1000) == 10.5  # queued: 5 s to 10 s
    assert fast.upload(20.0, 1000) == 25.5  # idle again
    assert backhaul.carried == 3000
    assert fast.download(20.0, 1000) == 21.5  # not on the way down


def test_two_shared_links_in_a_row() -> None:
    site, region = SharedLink(100.0), SharedLink(50.0)
    assert path(up_bytes_per_s=1e9, up=[site, region]).upload(0.0, 100) == pytest.approx(2.5)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000)), min_size=1, max_size=20), st.floats(10, 1e6))
def test_a_shared_link_conserves_work(sends: list[tuple[float, int]], rate: float) -> None:
    """First come, first served; never faster than its rate; busy while there is something to send."""
    link, sends = SharedLink(rate), sorted(sends)
    ends = [link.send(now, size) for now, size in sends]
    assert ends == sorted(ends)
    free = -math.inf
    for (now, size), end in zip(sends, ends, strict=True):
        assert end == max(now, free) + size / rate
        free = end
    assert ends[-1] >= sum(size for _, size in sends) / rate * (1 - 1e-9)


@given(st.floats(1, 1e12), st.floats(1, 1e12), st.floats(1e-6, 10), st.floats(0, 2), st.integers(0, 2**40), st.integers(0, 9))
def test_nothing_is_instant(down: float, up: float, latency: float, jitter: float, size: int, seed: int) -> None:
    """The fault of other simulators: transfers without a stated speed take no time at all."""
    link = Path(down_bytes_per_s=down, up_bytes_per_s=up, latency_s=latency, jitter=jitter, stream=Draws(seed).stream("path"))
    assert link.message(0.0) > 0
    assert link.download(0.0, size) >= latency
    assert link.upload(0.0, size) >= latency


@pytest.mark.parametrize("missing", ["down_bytes_per_s", "up_bytes_per_s", "latency_s", "jitter"])
def test_no_figure_has_a_default(missing: str) -> None:
    figures: dict[str, Any] = {"down_bytes_per_s": 1.0, "up_bytes_per_s": 1.0, "latency_s": 1.0, "jitter": 0.0}
    del figures[missing]
    with pytest.raises(TypeError, match=missing):
        Path(**figures, stream=Draws(1).stream("path"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"down_bytes_per_s": 0.0},
        {"up_bytes_per_s": math.inf},
        {"latency_s": 0.0},
        {"latency_s": math.nan},
        {"jitter": -0.1},
    ],
)
def test_wrong_figures_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="a path needs"):
        path(**wrong)
    with pytest.raises(ConfigError, match="a shared link needs"):
        SharedLink(wrong.get("down_bytes_per_s", math.nan))


def test_jitter_has_median_one_and_its_own_stream() -> None:
    link = path(jitter=0.5)
    seconds = sorted(link.download(0.0, 1000) - 0.5 for _ in range(2001))
    assert seconds[1000] == pytest.approx(1.0, rel=0.05)  # deviation of the median: 0.014
    assert math.log(seconds[1682] / seconds[318]) / 2 == pytest.approx(0.5, rel=0.1)  # at one sigma to each side
    again = path(jitter=0.5)
    assert sorted(again.download(0.0, 1000) - 0.5 for _ in range(2001)) == seconds


def test_a_cut_stops_a_transfer_which_then_goes_on() -> None:
    cuts = Cuts([(12.0, 20.0), (22.0, 23.0), (19.0, 21.0)])  # overlapping ones are joined: 12 to 21
    assert [cuts.open_at(t) for t in (11.9, 12.0, 20.5, 21.0, 22.5, 23.0)] == [True, False, False, True, False, True]
    link = path(cuts=cuts)
    assert link.download(5.0, 4000) == 9.5  # over before it
    assert link.download(10.0, 1500) == 12.0  # just in time
    assert link.download(10.0, 2000) == 21.5  # 2 s, then 0.5 s after the cut
    assert link.download(10.0, 3000) == 23.5  # 2 s, 1 s from 21, 0.5 s from 23
    assert link.message(15.0) == 21.5  # begun during a cut
    assert not link.is_open(15.0)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=8), st.integers(0, 120), st.integers(0, 50))
def test_the_open_time_of_a_transfer_is_what_it_needs(cuts: list[tuple[int, int]], start: int, seconds: int) -> None:
    """Against counting the open seconds one by one."""
    cut = Cuts([(float(a), float(a + n)) for a, n in cuts])
    end = cut.finish(float(start), float(seconds))
    counted, t = 0, start
    while counted < seconds or not (cut.open_at(t) or seconds):
        counted += cut.open_at(t)
        t += 1
    assert end == t


@pytest.mark.parametrize("wrong", [(2.0, 1.0), (1.0, 1.0), (-math.inf, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_wrong_cuts_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="a cut needs"):
        Cuts([wrong])
