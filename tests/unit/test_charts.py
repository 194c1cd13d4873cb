"""Charts: what is drawn stands where its numbers are."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from fleetddp.common.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Bars, Line, bars, colours, lines, table


def points(svg: ET.Element) -> list[list[tuple[float, float]]]:
    found = [line.attrib["points"].split() for line in svg.iter("polyline")]
    return [[(float(x), float(y)) for x, _, y in (p.partition(",") for p in line)] for line in found]


def test_lines_share_their_axes() -> None:
    svg = ET.fromstring(lines({"a": Line("red", [(0, 0), (50, 1)]), "b<": Line("blue", [(100, 0.5)])}, x="seconds"))
    (first, second) = points(svg)
    assert first == [(LEFT, HEIGHT - BOTTOM), (pytest.approx(LEFT + (WIDTH - LEFT - RIGHT) / 2, abs=0.06), TOP)]
    assert second == [(WIDTH - RIGHT, pytest.approx(TOP + (HEIGHT - BOTTOM - TOP) / 2))]
    words = [text.text for text in svg.iter("text")]
    assert {"0%", "20%", "100%", "seconds", "a", "b<", "0", "20", "100"} <= set(words)


def test_bars_are_as_tall_as_their_values() -> None:
    svg = ET.fromstring(bars(["x", "y"], {"one": Bars("red", [1.0, 4.0]), "two": Bars("blue", [0.0, 2.0])}, percent=False))
    drawn = [rect for rect in svg.iter("rect") if rect.find("title") is not None]
    heights = [float(rect.attrib["height"]) for rect in drawn]
    full = HEIGHT - BOTTOM - TOP
    assert heights == [pytest.approx(full / 4, abs=0.06), pytest.approx(full), 0.0, pytest.approx(full / 2, abs=0.06)]
    lefts = [float(rect.attrib["x"]) for rect in drawn]
    ends = [left + float(rect.attrib["width"]) for left, rect in zip(lefts, drawn, strict=True)]
    order = [lefts[0], ends[0], lefts[2], ends[2], lefts[1], ends[1], lefts[3], ends[3]]
    assert order == sorted(order), "the bars of a group stand side by side and do not overlap"


@pytest.mark.parametrize(
    ("most", "labels"),
    [
        (0.0, "0 0.2 0.4 0.6 0.8 1"),
        (7.0, "0 1 2 3 4 5 6 7"),
        (9.0, "0 2 4 6 8"),
        (3600.0, "0 500 1,000 1,500 2,000 2,500 3,000 3,500"),
    ],
)
def test_an_axis_is_labelled_at_round_numbers(most: float, labels: str) -> None:
    axis = Axis(most)
    assert [axis.label(tick) for tick in axis.ticks()] == labels.split()


def test_colours_repeat_only_when_they_run_out() -> None:
    few = colours("abcdef")
    assert list(few) == list("abcdef")
    assert len(set(few.values())) == 6
    assert len(colours(map(str, range(20)))) == 20


def test_a_table_escapes_and_may_have_no_head() -> None:
    assert table(["", ""], [["a", "<b>"]]) == "<table><tr><td>a</td><td>&lt;b&gt;</td></tr></table>"
    assert table(["h"], []).startswith("<table><tr><th>h</th></tr>")
