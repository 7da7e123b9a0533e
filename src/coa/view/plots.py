"""Markup and plots: elements that escape what they hold, tables, and every SVG that we draw.

A plot has classes and no colours. On a page the page's style gives colours for light and dark; a
plot that is a file of its own (learning curves, the funnel of a distillation) brings a style with
it, and no scripts, fonts or links. Every plot says in words what it shows, and the same numbers
give the same bytes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from coa.errors import RecordError
from coa.io.runs import read_jsonl
from coa.statistics import Estimate
from coa.view.terminal import harmless

Child: TypeAlias = "str | Iterable[Child] | None"
Attribute = str | int | float | bool | None
Record = Mapping[str, Any]
Point = tuple[float, float]
_EMPTY = frozenset({"br", "col", "line", "rect", "circle", "path", "polyline"})
"""Elements that hold nothing."""


# -- markup ---------------------------------------------------------------------------------


class Markup(str):
    """A text that is markup and must not be escaped again."""

    __slots__ = ()


def el(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element; attributes that are None or False are left out."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        named = key.rstrip("_").replace("_", "-")
        parts.append(f" {named}" if value is True else f' {named}="{_attribute(value)}"')
    if name in _EMPTY:
        return Markup("".join(parts) + "/>")
    return Markup(f"{''.join(parts)}>{inner(*children)}</{name}>")


def inner(*children: Child) -> Markup:
    """Return what stands inside an element."""
    return Markup("".join(map(_text, children)))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return html.escape(harmless(child), quote=False)
    return "".join(map(_text, child))


def _attribute(value: Attribute) -> str:
    return html.escape(harmless(f"{value:.6g}" if isinstance(value, float) else str(value)))


def strange(text: str) -> Markup:
    """Return a text that a stranger chose; its direction does not reach what is around it."""
    return el("bdi", text)


def ascii_only(markup: str) -> str:
    """Return the same page in ASCII: no byte of a text can be taken for something else."""
    return markup.encode("ascii", "xmlcharrefreplace").decode()


class Column(NamedTuple):
    """A column of a table: its head, and the cell of a row."""

    head: Child
    """None: the head of the column before spans this one, too."""
    cell: Callable[[Any], Child]
    look: str = "number"
    """A class of the style; `row` is the head of the row."""


def table(
    rows: Iterable[Any], columns: Sequence[Column], *, caption: Child = None, class_: str = ""
) -> Markup:
    """Return a table in a box that scrolls when it is too wide."""
    heads: list[Markup] = []
    for at, (head, _, look) in enumerate(columns):
        if head is not None:
            spans = at + 1 < len(columns) and columns[at + 1].head is None
            plain = spans or look not in ("number", "plot")
            heads.append(
                el("th", head, class_=None if plain else look, colspan=2 if spans else None)
            )
    whole = el(
        "table",
        el("caption", caption) if caption else None,
        el("thead", el("tr", heads)),
        el("tbody", (el("tr", (_cell(each, row) for each in columns)) for row in rows)),
        class_=class_ or None,
    )
    return el("div", whole, class_="wide", tabindex=0, role="group")


def _cell(column: Column, row: Any) -> Markup:
    if column.look == "row":
        return el("th", column.cell(row), scope="row")
    return el("td", column.cell(row), class_=column.look)


# -- in the cells of tables -----------------------------------------------------------------

_EDGE = 2.0
"""Percent of a cell that is left free on both sides, so that a dot at 0% or 100% is whole."""


def interval(found: Estimate, said: str, low: float = 0.0, high: float = 1.0) -> Markup:
    """Draw a value with its 95% interval on the scale from `low` to `high`; 0 has a mark."""

    def place(value: float) -> str:
        part = (min(max(value, low), high) - low) / ((high - low) or 1.0)
        return f"{_EDGE + (100 - 2 * _EDGE) * part:.2f}%"

    def line(start: float, end: float, look: str, reach: int = 50) -> Markup:
        ends = {"y1": f"{reach}%", "y2": f"{100 - reach}%"}
        return el("line", x1=place(start), x2=place(end), **ends, class_=look)

    parts = [
        line(low, high, "grid"),
        line(0.0, 0.0, "zero", 10) if low < 0 < high else None,
        line(found.low, found.high, "range"),
        el("circle", cx=place(found.value), cy="50%", r=3.5, class_="dot"),
    ]
    return el("svg", parts, class_="interval", role="img", aria_label=said)


def bar(parts: Iterable[tuple[float, str]], said: str) -> Markup:
    """Draw a bar of parts, each a share of the whole width with its class."""
    drawn, x = [], 0.0
    for share, look in parts:
        width = 100 * min(max(share, 0.0), 1.0)
        if width:
            place = {"x": f"{x:.2f}%", "width": f"{width:.2f}%"}
            drawn.append(el("rect", **place, y="15%", height="70%", class_=look))
        x += width
    return el("svg", drawn, class_="bar", role="img", aria_label=said)


# -- axes -----------------------------------------------------------------------------------


def as_number(value: object) -> float:
    """Return a number of a record, or NaN for anything else and for what cannot be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= 1e300 else math.nan


def finite(value: object) -> float:
    """Return a number as a file must have it, or raise."""
    if math.isnan(number := as_number(value)):
        raise ValueError(f"found {value!r}, expected a number")
    return number


def scale(values: Sequence[float]) -> list[float]:
    """Return the ticks of an axis: two to six round numbers around all values and 0."""
    low, high = min([0.0, *values]), max([0.0, *values])
    if not 1e-12 < high - low < 1e300:
        return [0.0, 1.0]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [at * step for at in range(first, last + 1)]


class Axes(NamedTuple):
    """A box in a drawing with the ticks of its two scales."""

    left: float
    top: float
    right: float
    bottom: float
    across: Sequence[float]
    up: Sequence[float]
    logarithmic: bool = False
    """Of the scale across."""

    def x(self, value: float) -> float:
        low, high = self.across[0], self.across[-1]
        value = min(max(value, low), high)
        if self.logarithmic:
            part = math.log(value / low) / math.log(high / low)
        else:
            part = (value - low) / (high - low)
        return round(self.left + (self.right - self.left) * part, 1)

    def y(self, value: float) -> float:
        low, high = self.up[0], self.up[-1]
        part = (min(max(value, low), high) - low) / (high - low)
        return round(self.bottom - (self.bottom - self.top) * part, 1)

    def grid(self, spec: str) -> list[Markup]:
        """Draw a line with its number for each tick upwards."""
        parts = []
        for tick in self.up:
            parts.append(self.line((self.across[0], tick), (self.across[-1], tick), "grid"))
            parts.append(label(format(tick, spec), self.left - 6, self.y(tick) + 4, anchor="end"))
        return parts

    def line(self, start: Point, end: Point, look: str) -> Markup:
        (x1, y1), (x2, y2) = ((self.x(x), self.y(y)) for x, y in (start, end))
        return el("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=look)

    def dot(self, x: float, y: float, radius: float) -> Markup:
        return el("circle", cx=self.x(x), cy=self.y(y), r=radius, class_="dot")

    def polyline(self, curve: Sequence[Point], look: str) -> Markup:
        if len(curve) == 1:
            return self.dot(*curve[0], 1.5)
        line = " ".join(f"{self.x(x):g},{self.y(y):g}" for x, y in curve)
        return el("polyline", points=line, class_=look)

    def estimates(self, curve: Sequence[Point], ends: Mapping[float, Point]) -> list[Markup]:
        """Draw points, joined, with the intervals that are known of them."""
        parts = [self.polyline(curve, "each")] if curve else []
        for x, y in curve:
            if x in ends:
                low, high = ends[x]
                parts.append(self.line((x, low), (x, high), "range"))
            parts.append(self.dot(x, y, 3.5))
        return parts


def _drawing(look: str, width: int, height: int, said: str, parts: Child) -> Markup:
    """Return a drawing for a page; `said` is what it shows in words."""
    box = f"0 0 {width} {height}"
    return el("svg", el("title", said), parts, viewBox=box, class_=look, role="img")


def label(text: str, x: float, y: float, look: str = "faint", anchor: str = "start") -> Markup:
    """Write a text into a drawing."""
    return el("text", text, x=x, y=y, text_anchor=anchor, class_=look or None)


# -- panels: learning curves, pass@k --------------------------------------------------------

WINDOW = 8
EVALUATION = "eval_accuracy"
CELL_WIDTH, CELL_HEIGHT = 280, 190


class Panel(NamedTuple):
    """One curve of a training."""

    key: str
    name: str
    spec: str
    shared: bool = False
    """On the scale that reward, pass rate and evaluation have in common."""


PANELS = (
    Panel("reward", "mean reward", ".2f", shared=True),
    Panel("pass_rate", "pass rate", ".0%", shared=True),
    Panel(EVALUATION, "evaluation", ".1%", shared=True),
    Panel("entropy", "entropy (nats)", ".2f"),
    Panel("length_mean", "tokens a rollout", ".0f"),
    Panel("sampler_gap", "sampler gap", ".2g"),
)


class DrawnPanel(NamedTuple):
    """A panel as it is drawn, and what it says in words."""

    said: str
    parts: list[Markup]

    def framed(self) -> Markup:
        """Return the panel as a drawing of its own, for a page."""
        return _drawing("panel", CELL_WIDTH, CELL_HEIGHT, self.said, self.parts)


def _axes(last: float, ticks: Sequence[float]) -> Axes:
    """Return the axes of a panel, from 0 to the last update."""
    return Axes(48, 24, CELL_WIDTH - 10, CELL_HEIGHT - 28, (0.0, last), ticks)


def _panel(axes: Axes, name: str, summary: str, parts: Sequence[Markup]) -> DrawnPanel:
    """Draw a panel: its name, its summary, a grid, and where the scale across begins and ends."""
    frame = [
        label(name, axes.left, axes.top - 9, "name"),
        label(summary, axes.right, axes.top - 9, anchor="end"),
        *axes.grid(".3g"),
        label("0", axes.left, axes.bottom + 16),
        label(f"{axes.across[-1]:g}", axes.right, axes.bottom + 16, anchor="end"),
    ]
    return DrawnPanel(f"{name}: {summary}", [*frame, *parts])


def panels(records: Sequence[Record], shown: Sequence[Panel] = PANELS) -> list[DrawnPanel]:
    """Draw curves of a metrics.jsonl.

    A faint line is each update, a bold one the mean of the last `WINDOW`; evaluations are points
    with their 95% intervals. Scales begin at 0, unless there is something below.
    """
    found = {panel.key: points(records, panel.key) for panel in shown}
    low, high = (dict(points(records, key)) for key in ("eval_low", "eval_high"))
    ends = {x: (low[x], high[x]) for x in low if x in high and EVALUATION in found}
    last = max((x for curve in found.values() for x, _ in curve), default=0.0) or 1.0
    together = [y for panel in shown if panel.shared for _, y in found[panel.key]]
    together += [y for each in ends.values() for y in each]
    made = []
    for panel in shown:
        curve = found[panel.key]
        values = together if panel.shared else [y for _, y in curve]
        axes = _axes(last, scale(values))
        mean = [] if panel.key == EVALUATION else trailing_mean(curve)
        if panel.key == EVALUATION:
            parts = axes.estimates(curve, ends)
        else:
            parts = [axes.polyline(piece, "each" if mean else "line") for piece in _pieces(curve)]
            parts += [axes.polyline(mean, "line")] if mean else []
        made.append(_panel(axes, panel.name, _course(mean or curve, panel.spec), parts))
    return made


def ladder(name: str, found: Sequence[tuple[int, Estimate]]) -> Markup:
    """Draw points with intervals over k, on the scale from 0 to 1."""
    axes = _axes(float(found[-1][0]), [0.0, 0.25, 0.5, 0.75, 1.0])
    curve: list[Point] = [(float(k), each.value) for k, each in found]
    ends = {float(k): (each.low, each.high) for k, each in found}
    return _panel(axes, name, _course(curve, ".1%"), axes.estimates(curve, ends)).framed()


def points(records: Iterable[Record], key: str) -> list[Point]:
    """Return (update, figure) of the records that have it as a finite number."""
    pairs = ((as_number(record.get("update")), as_number(record.get(key))) for record in records)
    return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def trailing_mean(curve: Sequence[Point], window: int = WINDOW) -> list[Point]:
    """Return, at each update, the mean of the last `window` figures; none while there are fewer."""
    return [
        (curve[end - 1][0], sum(y for _, y in curve[end - window : end]) / window)
        for end in range(window, len(curve) + 1)
    ]


def _course(curve: Sequence[Point], spec: str) -> str:
    """Say from where to where a curve goes."""
    ends = [format(y, spec) for _, y in (*curve[:1], *curve[1:][-1:])]
    return " to ".join(ends) or "none"


def _pieces(curve: Sequence[Point]) -> list[list[Point]]:
    """Split a curve where an update is missing."""
    numbered = enumerate(curve)
    return [
        [point for _, point in part]
        for _, part in groupby(numbered, key=lambda item: item[1][0] - item[0])
    ]


# -- cost against accuracy ------------------------------------------------------------------

_WIDTH, _HEIGHT = 520, 330
_APART = 19.0
"""Pixels between the lines of two labels."""
_TICKS_APART = 60
_SPREAD = 12.0
"""From so many times the smallest cost on, the scale of costs is logarithmic."""


class Spot(NamedTuple):
    """A run in the plot of cost against accuracy."""

    label: str
    cost: Estimate
    accuracy: Estimate
    look: str = ""
    """A class: team for the teacher."""


def cost_ticks(spots: Sequence[Spot]) -> tuple[list[float], bool]:
    """Return the ticks of the scale of costs, and whether it is logarithmic."""
    most = max(spot.cost.high for spot in spots)
    least = min(max(spot.cost.low, spot.cost.value / 10) for spot in spots)
    if least <= 0 or most / least < _SPREAD:
        return scale([most]), False
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    steps = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    first = max(step for step in steps if step <= least * 1.0001)
    last = min((step for step in steps if step >= most * 0.9999), default=steps[-1])
    return [step for step in steps if first <= step <= last], True


def cost_plot(spots: Sequence[Spot], unit: str, said: str) -> Markup:
    """Draw each run as a cross of its two intervals, with its label; better is up and left."""
    ticks, logarithmic = cost_ticks(spots)
    axes = Axes(50, 16, _WIDTH - 18, _HEIGHT - 54, ticks, [0, 0.25, 0.5, 0.75, 1], logarithmic)
    parts = axes.grid(".0%")
    labelled = math.inf
    for tick in reversed(ticks):
        x, y = axes.x(tick), axes.bottom
        parts.append(el("line", x1=x, x2=x, y1=y, y2=y + 4, class_="grid"))
        if labelled - x >= _TICKS_APART:
            labelled = x
            parts.append(label(f"{tick:,.10g}", x, y + 22, anchor="middle"))
    kind = ", logarithmic" if logarithmic else ""
    parts.append(label(f"{unit}{kind}", axes.right, _HEIGHT - 5, "", "end"))
    parts += [_cross(spot, axes) for spot in spots]
    return _drawing("cost", _WIDTH, _HEIGHT, said, [*parts, *_labels(spots, axes)])


def _cross(spot: Spot, axes: Axes) -> Markup:
    (x, left, right, _), (y, low, high, _) = spot.cost, spot.accuracy
    across = axes.line((left, y), (right, y), "range") if left < right else None
    upwards = axes.line((x, low), (x, high), "range")
    return el("g", across, upwards, axes.dot(x, y, 4.5), class_=spot.look or None)


def _labels(spots: Sequence[Spot], axes: Axes) -> Iterable[Markup]:
    """Write labels beside their points, pushed apart where they would cover each other."""
    ordered = sorted(spots, key=lambda each: -each.accuracy.value)
    lines = _apart([axes.y(spot.accuracy.value) - 7 for spot in ordered], axes.bottom - 7)
    for spot, line in zip(ordered, lines, strict=True):
        x, look = axes.x(spot.cost.value), f"label {spot.look}".strip()
        aside, anchor = (-9, "end") if x > 0.62 * _WIDTH else (9, "start")
        yield label(spot.label, x + aside, line, look, anchor)


def _apart(lines: Sequence[float], floor: float) -> list[float]:
    """Move lines of text, from top to bottom, down until none covers the one above it, and then
    up from the floor: what stands below it would cover the scale."""
    placed: list[float] = []
    for line in lines:
        placed.append(max(line, placed[-1] + _APART) if placed else line)
    for at in reversed(range(len(placed))):
        placed[at] = min(placed[at], floor)
        floor = placed[at] - _APART
    return placed


# -- plots that are files of their own ------------------------------------------------------

_FILE_WIDTH, _COLUMNS, _HEAD = 860, 3, 62
_LABELS, _NUMBERS, _BAR, _LINE, _GAP = 150, 90, 24, 17, 14
"""Of a plot of bars, in pixels: the columns before and behind the bars, a bar, a line of text
beneath it, and what is free after that."""
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#16202a}.faint{fill:#4a5763;font-size:11px}"
    ".title{font-size:16px;font-weight:600}.name{font-weight:600}polyline{fill:none}"
    ".grid{stroke:#e3e8ec}.each{stroke:#b7cfd8}.line{stroke:#1f6f8b;stroke-width:2}"
    ".range{stroke:#1f6f8b;stroke-width:1.5}.dot,.left{fill:#1f6f8b}"
    ".repeated{fill:#7a4fa3}.dropped{fill:#d8dee4}"
)


def _document(title: str, note: str, said: str, height: int, parts: Iterable[Markup]) -> str:
    """Return an SVG that is a file of its own."""
    whole = [
        el("title", title, id="plot-title"),
        el("desc", said, id="plot-text"),
        el("style", _STYLE),
        el("rect", width=_FILE_WIDTH, height=height, fill="#ffffff"),
        label(title, 16, 26, "title"),
        label(note, 16, 45),
        *parts,
    ]
    made = el(
        "svg",
        Markup("\n" + "\n".join(whole) + "\n"),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_FILE_WIDTH} {height}",
        width=_FILE_WIDTH,
        height=height,
        role="img",
        aria_labelledby="plot-title plot-text",
    )
    return made + "\n"


def curve(path: Path, title: str = "") -> str:
    """Return the learning curves of a metrics.jsonl, also of a run that is still going on."""
    records = [record for _, record in read_jsonl(path, growing=True)]
    if not any(points(records, panel.key) for panel in PANELS):
        raise RecordError(f"{path}: holds no figure of RL. Expected the metrics.jsonl of `coa rl`.")
    return learning_curves(records, title or f"Learning curves of {path.parent.name or path.name}")


def learning_curves(records: Sequence[Record], title: str) -> str:
    """Return the six panels of an RL run in one figure."""
    drawn, placed = panels(records), []
    for at, each in enumerate(drawn):
        row, column = divmod(at, _COLUMNS)
        x, y = CELL_WIDTH * column + 8, _HEAD + CELL_HEIGHT * row
        placed.append(el("g", each.parts, transform=f"translate({x} {y})"))
    note = (
        f"over updates; faint: each update; bold: mean of the last {WINDOW}; points: evaluations "
        "with 95% intervals"
    )
    height = _HEAD + CELL_HEIGHT * math.ceil(len(PANELS) / _COLUMNS) + 6
    said = "; ".join(each.said for each in drawn)
    return _document(title, note, said, height, placed)


class Bar(NamedTuple):
    """A bar of a plot of bars: counts by their class, what stands behind it and beneath it."""

    name: str
    counts: Mapping[str, int]
    figure: str
    remarks: Sequence[str]


def bars_plot(bars: Sequence[Bar], title: str, note: str, said: str) -> str:
    """Return bars on one scale, with their names before and remarks beneath them."""
    most = max((sum(each.counts.values()) for each in bars), default=0) or 1
    unit = (_FILE_WIDTH - _LABELS - _NUMBERS) / most
    parts: list[Markup] = []
    top = _HEAD - 4
    for name, counts, figure, remarks in bars:
        x, middle = float(_LABELS), top + _BAR - 7
        for look, count in counts.items():
            width = round(count * unit, 1)
            if count:
                parts.append(el("rect", x=x, y=top, width=width, height=_BAR, class_=look))
            x += width
        parts.append(label(name, _LABELS - 12, middle, "", "end"))
        parts.append(label(figure, x + 8, middle, ""))
        for number, remark in enumerate(remarks, start=1):
            parts.append(label(remark, _LABELS, top + _BAR + _LINE * number - 3))
        top += _BAR + _LINE * len(remarks) + _GAP
    return _document(title, note, said, top, parts)
