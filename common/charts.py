"""Charts as inline SVG, and the page around them: one HTML file that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle, islice
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 300, 64, 16, 26, 34
COLOURS = ("#1f6feb", "#d1741f", "#2a9d60", "#b03a8c", "#7a5cd0", "#8a8a2c")
TICKS = 8  # about so many on an axis
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 800px; padding: 0 1rem }
body { color: #1c1c1c; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 9px; text-align: right; border: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } svg { width: 100%; height: auto } svg text { font-size: 12px; fill: #444 }
.big { font-size: 1.2rem }
"""

Points = Sequence[tuple[float, float]]


class Line(NamedTuple):
    """A polyline of (x, y)."""

    colour: str
    points: Points


class Bars(NamedTuple):
    """The bars of one colour: a value for each group."""

    colour: str
    values: Sequence[float]


def colours(names: Iterable[str]) -> dict[str, str]:
    """One for each name, in order."""
    return dict(zip(names, cycle(COLOURS), strict=False))


class Axis:
    """A linear axis from 0 to ``most``, labelled at round numbers."""

    def __init__(self, most: float, *, percent: bool = False) -> None:
        self.most = 1.0 if percent else (most if most > 0 else 1.0)
        self.step = 0.2 if percent else _round_step(self.most / TICKS)
        self._percent = percent

    def ticks(self) -> list[float]:
        """Where it is labelled."""
        return [k * self.step for k in range(int(self.most / self.step + 1e-9) + 1)]

    def label(self, value: float) -> str:
        """A number as people read it."""
        if self._percent:
            return f"{value:.0%}"
        return f"{value:,.0f}" if self.step >= 1 else f"{value:.4g}"

    def x(self, value: float) -> float:
        """From the left of the drawing."""
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.most

    def y(self, value: float) -> float:
        """From the top of the drawing."""
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / self.most


def lines(series: Mapping[str, Line], *, x: str = "", percent: bool = True) -> str:
    """Values over a common horizontal axis, which is called ``x``; ``percent``: they are shares of 1."""
    across = Axis(max((point[0] for line in series.values() for point in line.points), default=0.0))
    upwards = Axis(max((point[1] for line in series.values() for point in line.points), default=0.0), percent=percent)
    marks = [_grid(upwards)]
    marks += [_text(across.x(tick), HEIGHT - BOTTOM + 16, across.label(tick), "middle") for tick in across.ticks()]
    marks.append(_text(WIDTH - RIGHT, HEIGHT - 4, x, "end"))
    for row, (name, line) in enumerate(series.items()):
        path = " ".join(f"{across.x(a):.1f},{upwards.y(b):.1f}" for a, b in line.points)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"/>')
        marks.append(_legend(row, name, line.colour))
    return _svg(marks)


def bars(groups: Sequence[str], series: Mapping[str, Bars], *, x: str = "", percent: bool = True) -> str:
    """For each group a bar of each series."""
    upwards = Axis(max((value for one in series.values() for value in one.values), default=0.0), percent=percent)
    marks = [_grid(upwards), _text(WIDTH - RIGHT, HEIGHT - 4, x, "end")]
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    width = 0.7 / max(1, len(series))
    for row, (name, one) in enumerate(series.items()):
        for place, (group, value) in enumerate(zip(groups, one.values, strict=True)):
            left, top = LEFT + slot * (place + 0.15 + width * row), upwards.y(value)
            title = f"<title>{escape(name)}, {escape(group)}: {f'{value:.1%}' if percent else f'{value:.4g}'}</title>"
            size = f'width="{0.95 * width * slot:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
            marks.append(f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{one.colour}">{title}</rect>')
        marks.append(_legend(row, name, one.colour))
    every = max(1, math.ceil(len(groups) / (2 * TICKS)))
    for place, group in islice(enumerate(groups), 0, None, every):
        marks.append(_text(LEFT + slot * (place + 0.5), HEIGHT - BOTTOM + 16, group, "middle"))
    return _svg(marks)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text in rows; no head if all its cells are empty."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{'<tr>' + cells + '</tr>' if any(head) else ''}{body}</table>"


def document(title: str, parts: Sequence[str]) -> str:
    """The whole page."""
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{' '.join(parts)}</body></html>\n"


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(k * power for k in (1, 2, 5, 10) if k * power >= rough * (1 - 1e-9))


def _grid(axis: Axis) -> str:
    drawn = []
    for tick in axis.ticks():
        y = axis.y(tick)
        drawn.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        drawn.append(_text(LEFT - 8, y + 4, axis.label(tick), "end"))
    return "".join(drawn)


def _legend(row: int, name: str, colour: str) -> str:
    x = LEFT + 10 + 110 * row
    return f'<rect x="{x}" y="4" width="12" height="12" fill="{colour}"/>' + _text(x + 18, 14, name, "start")


def _text(x: float, y: float, what: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>'


def _svg(marks: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}</svg>'
