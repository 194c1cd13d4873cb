"""The demo's page: one HTML file with its plots inside, as SVG; it loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fleetddp.common.charts import COLOURS, Bars, Line, bars, document, lines, table
from fleetddp.edge.tasks.digits import CLASSES

Curve = Sequence[float]  # accuracies of 0 to 1

FLEET, ALONE = COLOURS[:2]


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
        table(["", ""], [[name, value] for name, value in facts.items()]),
        "<h2>Accuracy of each published version</h2>",
        curves({"fleet": (FLEET, fleet), "site alone": (ALONE, alone)}),
        "<p>The fleet by version; the site alone at each boundary at which it would have met the fleet.</p>",
        "<h2>Accuracy by class</h2>",
        class_bars(by_class),
        "<h2>Who holds what</h2>",
        "<p>Images by class. The site has never seen some of the classes.</p>",
        _holdings(holdings),
        "<h2>Members at the end</h2>",
        table(list(members[0]), [list(member.values()) for member in members]) if members else "",
    ]
    return document("FleetDDP demo", parts)


def curves(by_name: Mapping[str, tuple[str, Curve]]) -> str:
    """Accuracy lines over their index, with a legend."""
    return lines({name: Line(colour, [*enumerate(values)]) for name, (colour, values) in by_name.items()})


def class_bars(by_class: Mapping[str, Sequence[float]]) -> str:
    """Two bars for each class."""
    named = zip(by_class.items(), (FLEET, ALONE), strict=True)
    return bars([str(k) for k in range(CLASSES)], {name: Bars(colour, values) for (name, values), colour in named})


def _holdings(holdings: Mapping[str, Sequence[int]]) -> str:
    most = max(max(counts) for counts in holdings.values())
    rows = []
    for name, counts in holdings.items():
        cells = "".join(f'<td style="background:rgba(31,111,235,{0.6 * count / most:.2f})">{count}</td>' for count in counts)
        rows.append(f"<tr><td>{escape(name)}</td>{cells}<td>{sum(counts)}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in ("", *range(CLASSES), "all"))
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
