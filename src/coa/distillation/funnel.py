"""The funnel: what entered each stage, what left it and why, as a table and as a plot.

A stage is a plain record, as in funnel.json: `stage`, `entered`, `left`, `reasons` (reason -> how
many were dropped or added for it), and, where chains were also repeated, `dropped` and `repeated`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from coa.io.runs import Json

Stages = Sequence[Mapping[str, Any]]
_WIDTH, _LABELS, _NUMBERS = 860, 150, 90
"""Of the plot, of the column with the stages' names, and of the one behind the bars; in pixels."""
_BAR, _LINE, _GAP, _HEAD = 24, 17, 14, 58
_KEPT, _ADDED, _LOST, _INK, _FAINT = "#1f6f8b", "#7a4fa3", "#d8dee4", "#16202a", "#4a5763"
_STYLE = (
    f"text{{font:13px system-ui,sans-serif;fill:{_INK}}}"
    f".faint{{fill:{_FAINT};font-size:12px}}.title{{font-size:16px;font-weight:600}}"
)


def stage_record(stage: str, entered: int, notes: Sequence[Json]) -> Json:
    """The record of a stage, from its notes: those with `copies` repeat, the others drop."""
    repeated = sum(note.get("copies", 0) for note in notes)
    dropped = sum(not note.get("copies") for note in notes)
    reasons: Counter[str] = Counter()
    for note in notes:
        reasons[str(note["reason"])] += note.get("copies", 1)
    return {
        "stage": stage,
        "entered": entered,
        "left": entered - dropped + repeated,
        "dropped": dropped,
        "repeated": repeated,
        "reasons": dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
    }


def table(stages: Stages) -> list[str]:
    """The funnel as lines of plain text, reasons beneath their stage."""
    rows = list(_rows(stages))
    first = max(len(label) for label, _, _ in rows) + 2  # reasons are indented
    return [
        f"{'' if is_stage else '  '}{label}".ljust(first)
        + "".join(f"{cell:>10}" for cell in cells).rstrip()
        for label, cells, is_stage in rows
    ]


def markdown(stages: Stages) -> list[str]:
    """The funnel as a table of a document."""
    head, *rows = _rows(stages)
    lines = [f"| {head[0]} | {' | '.join(head[1])} |", "|---|---:|---:|---:|---:|"]
    for label, cells, is_stage in rows:
        name = label.replace("|", "/")
        lines.append(f"| {f'**{name}**' if is_stage else name} | {' | '.join(cells)} |")
    return lines


def _rows(stages: Stages) -> Iterator[tuple[str, list[str], bool]]:
    """Label, four cells, and whether it is a stage and not one of its reasons."""
    yield "stage", ["entered", "dropped", "repeated", "left"], True
    for each in stages:
        dropped, repeated = _changes(each)
        figures = (each["entered"], dropped, repeated, each["left"])
        yield str(each["stage"]), [f"{figure:,}" for figure in figures], True
        for reason, count in each["reasons"].items():
            cells = ["", "", f"{count:,}", ""] if repeated else ["", f"{count:,}", "", ""]
            yield str(reason), cells, False


def plot(stages: Stages, title: str = "From episodes to training chains") -> str:
    """The funnel as an SVG without scripts, fonts or links; every number is also a text in it."""
    most = max((each["left"] + _changes(each)[0] for each in stages), default=0) or 1
    scale = (_WIDTH - _LABELS - _NUMBERS) / most
    parts: list[str] = []
    top = _HEAD
    for each in stages:
        parts += _bar(each, top, scale)
        top += _BAR + _LINE * len(each["reasons"]) + _GAP
    spoken = "; ".join(
        f"{each['stage']}: {each['entered']:,} entered, {each['left']:,} left" for each in stages
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" '
        f'height="{top}" role="img" aria-labelledby="funnel-title funnel-text">'
    )
    legend = "bar: left after the stage; grey: dropped there; violet: repeated there"
    return "\n".join(
        [
            head,
            f'<title id="funnel-title">{escape(title)}</title>',
            f'<desc id="funnel-text">{escape(spoken)}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>',
            f'<text x="16" y="26" class="title">{escape(title)}</text>',
            f'<text x="16" y="45" class="faint">{legend}</text>',
            *parts,
            "</svg>\n",
        ]
    )


def _changes(stage: Mapping[str, Any]) -> tuple[int, int]:
    """Dropped and repeated; a stage that only drops need not say so."""
    repeated = int(stage.get("repeated", 0))
    return int(stage.get("dropped", stage["entered"] + repeated - stage["left"])), repeated


def _bar(stage: Mapping[str, Any], top: int, scale: float) -> list[str]:
    dropped, repeated = _changes(stage)
    x, parts = float(_LABELS), []
    shown = ((_KEPT, stage["left"] - repeated), (_ADDED, repeated), (_LOST, dropped))
    for colour, count in shown:
        width = round(count * scale, 1)
        if count:
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width}" height="{_BAR}" fill="{colour}"/>'
            )
        x += width
    middle = top + _BAR - 7
    parts.append(
        f'<text x="{_LABELS - 12}" y="{middle}" text-anchor="end">{escape(str(stage["stage"]))}'
        f'</text><text x="{x + 8:.1f}" y="{middle}">{stage["left"]:,}</text>'
    )
    for number, (reason, count) in enumerate(stage["reasons"].items(), start=1):
        y = top + _BAR + _LINE * number - 3
        parts.append(f'<text x="{_LABELS}" y="{y}" class="faint">{count:,} {escape(reason)}</text>')
    return parts
