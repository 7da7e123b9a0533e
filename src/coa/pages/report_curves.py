"""Learning curves of a report: the panels of `coa.train.curves`, each a plot of its own."""

from __future__ import annotations

from collections.abc import Sequence

from coa.pages.markup import Markup, el, inner, number, number_head, strange, table
from coa.pages.plots import panel
from coa.pages.report_parts import Parts, Training
from coa.pages.report_sections import section
from coa.train.curves import PANELS, WINDOW, Panel, drawn, points

SFT_PANELS = (
    Panel("loss", "loss (nats)", ".3g"),
    Panel("grad_norm", "gradient norm", ".2g"),
    Panel("lr", "learning rate", ".2g"),
)
MOST_ROWS = 16
"""Updates in the table behind the curves."""


def curves(parts: Parts) -> Markup | None:
    """The curves of every training."""
    if not parts.trainings:
        return None
    note = (
        f"Over updates. Faint: each update; bold: the mean of the last {WINDOW}; dots: evaluations "
        "with their 95% intervals."
    )
    return section("training", "Training", note, map(_training, parts.trainings))


def _training(found: Training) -> Markup:
    known = SFT_PANELS if found.stage == "sft" else PANELS
    panels = [each for each in known if points(found.records, each.key)]
    updates = int(
        max((x for each in panels for x, _ in points(found.records, each.key)), default=0)
    )
    said = f"{found.stage}, {updates:,} updates" + ("" if found.finished else ", not finished")
    return el(
        "article",
        el("h3", strange(found.name), el("small", said)),
        el("p", strange(found.about), class_="note") if found.about else None,
        el("div", map(panel, drawn(found.records, panels)), class_="panels"),
        _numbers(found, panels),
    )


def _numbers(found: Training, panels: Sequence[Panel]) -> Markup:
    """The table behind the plots: a few updates, each figure as it was written."""
    figures = {each.key: dict(points(found.records, each.key)) for each in panels}
    updates = sorted({update for each in figures.values() for update in each})
    step = -(-len(updates) // MOST_ROWS) or 1
    some = sorted({*updates[::step], *updates[-1:], *figures.get("eval_accuracy", {})})
    rows = [
        [number(f"{update:,.0f}")]
        + [
            number(
                format(figures[each.key][update], each.spec) if update in figures[each.key] else ""
            )
            for each in panels
        ]
        for update in some
    ]
    head = [number_head(name) for name in ("update", *(each.name for each in panels))]
    left = len(updates) - len(some)
    note = f"The numbers of {len(some):,} updates" + (f" ({left:,} left out)" if left > 0 else "")
    return el("details", el("summary", inner(note)), table(head, rows))
