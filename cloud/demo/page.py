"""The demo's page: one HTML file with its plots inside, as SVG; it loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from fleetddp.common.charts import COLOURS, Bars, Line, bars, document, lines, table
from fleetddp.edge.tasks.digits import CLASSES

Curve = Sequence[float]  # accuracies of 0 to 1

FLEET, ALONE = COLOURS[:2]


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


FACTS = {  # of the summary: its name for people
    "fleet_accuracy": "best accuracy of the fleet",
    "best_version": "reached by version",
    "site_alone_accuracy": "accuracy of the site alone",
    "versions": "versions published",
    "updates_accepted": "updates accepted",
    "updates_refused": "updates refused",
    "site_steps": "steps of the site",
    "seconds": "seconds",
    "seed": "seed",
}
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {  # of a member's status: its name for people, and how it is shown
    "node": ("member", _shown),
    "tier": ("tier", _shown),
    "updates": ("updates accepted", _shown),
    "refused": ("updates refused", _shown),
    "staleness": ("versions behind", _shown),
    "bytes": ("MiB sent", lambda size: _shown(size / 2**20)),
}


def page(
    *,
    fleet: Curve,
    alone: Curve,
    by_class: Mapping[str, Sequence[float]],
    holdings: Mapping[str, Sequence[int]],
    members: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
) -> str:
    """The whole page. ``by_class`` holds ten accuracies for "fleet" and for "site alone", ``holdings`` images by class.

    ``members`` are as a status has them, ``facts`` as the summary has them.
    """
    reached, without = f'<b style="color:{FLEET}">{max(fleet):.1%}</b>', f'<b style="color:{ALONE}">{alone[-1]:.1%}</b>'
    parts = [
        f"<h1>One model, one site and {len(holdings) - 1} edge nodes</h1>",
        f'<p class="big">The fleet reached {reached} on held-out handwriting of all ten classes;',
        f"the site alone, with the same number of steps, {without}.</p>",
        table(["", ""], [[name, _shown(facts[key])] for key, name in FACTS.items() if key in facts]),
        "<h2>Accuracy of each published version</h2>",
        curves({"fleet": (FLEET, fleet), "site alone": (ALONE, alone)}),
        "<p>The fleet by version; the site alone at each boundary at which it would have met the fleet.</p>",
        "<h2>Accuracy by class</h2>",
        class_bars(by_class),
        "<h2>Who holds what</h2>",
        "<p>Images by class. The site has never seen some of the classes.</p>",
        _holdings(holdings),
        "<h2>Members at the end</h2>",
        table(
            [name for name, _ in COLUMNS.values()],
            [[show(member[key]) for key, (_, show) in COLUMNS.items()] for member in members],
        ),
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
