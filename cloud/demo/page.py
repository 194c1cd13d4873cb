"""The demo's page: one HTML file with its plots inside, as SVG; it loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fleetddp.edge.tasks.digits import CLASSES

Curve = Sequence[float]  # accuracies of 0 to 1

WIDTH, HEIGHT, LEFT, BOTTOM = 760, 300, 46, 34
FLEET, ALONE = "#1f6feb", "#d1741f"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 800px; padding: 0 1rem }
body { color: #1c1c1c; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 9px; text-align: right; border: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } svg { width: 100%; height: auto } svg text { font-size: 12px; fill: #444 }
.big { font-size: 1.2rem }
"""


def page(
    *,
    fleet: Curve,
    alone: Curve,
    by_class: Mapping[str, Sequence[float]],
    holdings: Mapping[str, Sequence[int]],
    members: Sequence[Mapping[str, str]],
    facts: Mapping[str, str],
) -> str:
    """The whole page. ``by_class`` holds ten accuracies for "fleet" and for "site alone", ``holdings`` images by class."""
    reached, without = f'<b style="color:{FLEET}">{max(fleet):.1%}</b>', f'<b style="color:{ALONE}">{alone[-1]:.1%}</b>'
    parts = [
        f"<h1>One model, one site and {len(holdings) - 1} edge nodes</h1>",
        f'<p class="big">The fleet reached {reached} on held-out handwriting of all ten classes;',
        f"the site alone, with the same number of steps, {without}.</p>",
        _table(["", ""], [[name, value] for name, value in facts.items()]),
        "<h2>Accuracy of each published version</h2>",
        curves({"fleet": (FLEET, fleet), "site alone": (ALONE, alone)}),
        "<p>The fleet by version; the site alone at each boundary at which it would have met the fleet.</p>",
        "<h2>Accuracy by class</h2>",
        class_bars(by_class),
        "<h2>Who holds what</h2>",
        "<p>Images by class. The site has never seen some of the classes.</p>",
        _holdings(holdings),
        "<h2>Members at the end</h2>",
        _table(list(members[0]), [list(member.values()) for member in members]) if members else "",
    ]
    head = f"<meta charset=utf-8><title>FleetDDP demo</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{' '.join(parts)}</body></html>\n"


def curves(lines: Mapping[str, tuple[str, Curve]]) -> str:
    """Accuracy lines over their index, with a legend."""
    longest = max(len(values) for _, values in lines.values())
    marks = [_axes()]
    for index in range(0, longest, max(1, longest // 10)):
        marks.append(_text(_x(index, longest), HEIGHT - BOTTOM + 18, str(index), "middle"))
    for row, (name, (colour, values)) in enumerate(lines.items()):
        path = " ".join(f"{_x(index, longest):.1f},{_y(value):.1f}" for index, value in enumerate(values))
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        marks.append(_legend(row, name, colour))
    return _svg(marks)


def class_bars(by_class: Mapping[str, Sequence[float]]) -> str:
    """Two bars for each class."""
    marks = [_axes()]
    slot = (WIDTH - LEFT) / CLASSES
    for row, (name, values) in enumerate(by_class.items()):
        colour = (FLEET, ALONE)[row]
        for digit, value in enumerate(values):
            left, top = LEFT + slot * digit + slot * (0.15 + 0.35 * row), _y(value)
            title = f"<title>{escape(name)}, class {digit}: {value:.1%}</title>"
            size = f'width="{0.33 * slot:.1f}" height="{HEIGHT - BOTTOM - top:.1f}"'
            marks.append(f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{colour}">{title}</rect>')
        marks.append(_legend(row, name, colour))
    marks += [_text(LEFT + slot * (digit + 0.5), HEIGHT - BOTTOM + 18, str(digit), "middle") for digit in range(CLASSES)]
    return _svg(marks)


def _axes() -> str:
    lines = []
    for percent in range(0, 101, 20):
        y = _y(percent / 100)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        lines.append(_text(LEFT - 8, y + 4, f"{percent}%", "end"))
    return "".join(lines)


def _legend(row: int, name: str, colour: str) -> str:
    x = LEFT + 10 + 110 * row
    return f'<rect x="{x}" y="4" width="12" height="12" fill="{colour}"/>' + _text(x + 18, 14, name, "start")


def _text(x: float, y: float, what: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(what)}</text>'


def _x(index: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - 8) * index / max(1, count - 1)


def _y(value: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 26) * value


def _svg(marks: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}</svg>'


def _holdings(holdings: Mapping[str, Sequence[int]]) -> str:
    most = max(max(counts) for counts in holdings.values())
    rows = []
    for name, counts in holdings.items():
        cells = "".join(f'<td style="background:rgba(31,111,235,{0.6 * count / most:.2f})">{count}</td>' for count in counts)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}<td>{sum(counts)}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in ("", *range(CLASSES), "all"))
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{'<tr>' + cells + '</tr>' if any(head) else ''}{body}</table>"
