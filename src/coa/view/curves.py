"""Learning curves of an RL run: metrics.jsonl in, one SVG out, without scripts, fonts or links.

Six small panels over the same updates: reward, pass rate and evaluation on one scale, so that they
can be compared; entropy, length and sampler gap each on its own. Faint is each update, bold the
mean of the last `WINDOW`; evaluations are points with their 95% intervals. Scales begin at 0,
unless there is something below. The same records give the same bytes.

Parts are drawn with classes, not colours: the figure brings a style of its own, and a page that
holds single panels (`drawn`) has one that follows light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from coa.errors import RecordError
from coa.io.runs import read_jsonl

Record = Mapping[str, Any]
Point = tuple[float, float]

WINDOW = 8
EVALUATION = "eval_accuracy"
_WIDTH, _HEAD, _COLUMNS = 860, 62, 3
CELL_WIDTH, CELL_HEIGHT = 280, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 24, 28
"""Of the plot; of a cell; of what surrounds the curve in a cell. In pixels."""
_LINE, _FAINT_LINE, _GRID, _INK, _FAINT = "#1f6f8b", "#b7cfd8", "#e3e8ec", "#16202a", "#4a5763"
_STYLE = (
    f"text{{font:13px system-ui,sans-serif;fill:{_INK}}}"
    f".faint{{fill:{_FAINT};font-size:11px}}.title{{font-size:16px;font-weight:600}}"
    f".name{{font-weight:600}}polyline,path{{fill:none}}"
    f".grid{{stroke:{_GRID}}}.each{{stroke:{_FAINT_LINE}}}.line{{stroke:{_LINE};stroke-width:2}}"
    f".range{{stroke:{_LINE};stroke-width:1.5}}.dot{{fill:{_LINE}}}"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """One curve of the figure."""

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


def curve(path: Path, title: str = "") -> str:
    """The learning curves of a metrics.jsonl, also of a run that is still going on."""
    records = [record for _, record in read_jsonl(path, growing=True)]
    if not any(points(records, panel.key) for panel in PANELS):
        raise RecordError(f"{path}: holds no figure of RL. Expected the metrics.jsonl of `coa rl`.")
    return plot(records, title or f"Learning curves of {path.parent.name or path.name}")


class DrawnCurve(NamedTuple):
    """One panel of the figure: what it says and what it is made of."""

    panel: Panel
    summary: str
    parts: list[str]


def drawn(
    records: Sequence[Record],
    panels: Sequence[Panel] = PANELS,
    place: Callable[[int], tuple[int, int]] = lambda at: (0, 0),
) -> list[DrawnCurve]:
    """The panels, each with its corner at `place` of its number; shared scales are of all."""
    found = {panel.key: points(records, panel.key) for panel in panels}
    intervals = _intervals(records) if EVALUATION in found else {}
    last = max((x for curve in found.values() for x, _ in curve), default=0.0) or 1.0
    together = [y for panel in panels if panel.shared for _, y in found[panel.key]]
    together += [y for low, high in intervals.values() for y in (low, high)]
    made = []
    for at, panel in enumerate(panels):
        values = together if panel.shared else [y for _, y in found[panel.key]]
        cell = Cell(*place(at), last, scale(values))
        summary = _summary(found[panel.key], panel)
        parts = cell.frame(panel, summary)
        if panel.key == EVALUATION:
            parts += cell.evaluations(found[panel.key], intervals)
        else:
            parts += cell.curve(found[panel.key])
        made.append(DrawnCurve(panel, summary, parts))
    return made


def plot(records: Sequence[Record], title: str) -> str:
    """The figure; every panel's first and last figure is also a text in it."""

    def place(at: int) -> tuple[int, int]:
        row, column = divmod(at, _COLUMNS)
        return CELL_WIDTH * column + 8, _HEAD + CELL_HEIGHT * row

    panels = drawn(records, PANELS, place)
    spoken = [f"{each.panel.name}: {each.summary}" for each in panels]
    height = _HEAD + CELL_HEIGHT * math.ceil(len(PANELS) / _COLUMNS) + 6
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img" '
            'aria-labelledby="curves-title curves-text">',
            f'<title id="curves-title">{escape(title)}</title>',
            f'<desc id="curves-text">{escape("; ".join(spoken))}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<text x="16" y="26" class="title">{escape(title)}</text>',
            f'<text x="16" y="45" class="faint">over updates; faint: each update; bold: mean of '
            f"the last {WINDOW}; points: evaluations with 95% intervals</text>",
            *(part for each in panels for part in each.parts),
            "</svg>\n",
        ]
    )


def points(records: Iterable[Record], key: str) -> list[Point]:
    """(update, figure) of the records that have it as a finite number."""
    pairs = ((_number(record.get("update")), _number(record.get(key))) for record in records)
    return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def trailing_mean(curve: Sequence[Point], window: int = WINDOW) -> list[Point]:
    """At each update the mean of the last `window` figures; none before there are so many."""
    return [
        (curve[end - 1][0], sum(y for _, y in curve[end - window : end]) / window)
        for end in range(window, len(curve) + 1)
    ]


def _intervals(records: Iterable[Record]) -> dict[float, Point]:
    """Update -> the interval of its evaluation."""
    found = {}
    for record in records:
        update = _number(record.get("update"))
        low, high = _number(record.get("eval_low")), _number(record.get("eval_high"))
        if math.isfinite(update + low + high):
            found[update] = (low, high)
    return found


def _summary(curve: Sequence[Point], panel: Panel) -> str:
    """From where to where; of a curve that is noisy the means at its ends."""
    if not curve:
        return "none"
    course = curve if panel.key == EVALUATION else trailing_mean(curve) or curve
    first, last = format(course[0][1], panel.spec), format(course[-1][1], panel.spec)
    return f"{first} to {last}" if len(course) > 1 else first


def scale(values: Sequence[float]) -> list[float]:
    """The ticks of an axis: round numbers, two to six of them, around all values and 0."""
    low, high = min([0.0, *values]), max([0.0, *values])
    if not 1e-12 < high - low < 1e300:
        return [0.0, 1.0]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [at * step for at in range(first, last + 1)]


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) <= 1e300 else math.nan


class Cell:
    """The place of one panel in the figure, with its scales."""

    def __init__(self, x: int, y: int, last: float, ticks: list[float]) -> None:
        self._left, self._right = x + _LEFT, x + CELL_WIDTH - _RIGHT
        self._top, self._bottom = y + _TOP, y + CELL_HEIGHT - _BOTTOM
        self._last, self._ticks = last, ticks

    def _place(self, x: float, y: float) -> str:
        return f"{self._across(x):.1f},{self._up(y):.1f}"

    def _across(self, x: float) -> float:
        return self._left + (self._right - self._left) * min(max(x / self._last, 0.0), 1.0)

    def _up(self, y: float) -> float:
        low, high = self._ticks[0], self._ticks[-1]
        return self._bottom - (self._bottom - self._top) * (y - low) / (high - low)

    def frame(self, panel: Panel, summary: str) -> list[str]:
        """Name, first and last figure, and the grid."""
        title = self._top - 9
        parts = [
            f'<text x="{self._left}" y="{title}" class="name">{escape(panel.name)}</text>',
            f'<text x="{self._right}" y="{title}" text-anchor="end" class="faint">'
            f"{escape(summary)}</text>",
        ]
        for tick in self._ticks:
            y = self._up(tick)
            parts.append(
                f'<path d="M{self._left} {y:.1f}H{self._right}" class="grid"/>'
                f'<text x="{self._left - 6}" y="{y + 4:.1f}" text-anchor="end" class="faint">'
                f"{tick:.3g}</text>"
            )
        for x, anchor in ((0.0, "start"), (self._last, "end")):
            parts.append(
                f'<text x="{self._across(x):.1f}" y="{self._bottom + 16}" text-anchor="{anchor}" '
                f'class="faint">{x:g}</text>'
            )
        return parts

    def curve(self, curve: Sequence[Point]) -> list[str]:
        """Each update, broken where updates are missing, and the mean over it."""
        mean = trailing_mean(curve)
        look = "each" if mean else "line"
        parts = [self._polyline(piece, look) for piece in _pieces(curve)]
        return [*parts, self._polyline(mean, "line")] if mean else parts

    def evaluations(self, curve: Sequence[Point], intervals: Mapping[float, Point]) -> list[str]:
        parts = [self._polyline(curve, "each")] if curve else []
        for x, y in curve:
            if x in intervals:
                low, high = (f"{self._up(end):.1f}" for end in intervals[x])
                parts.append(f'<path d="M{self._across(x):.1f} {low}V{high}" class="range"/>')
            parts.append(self._dot(x, y, 3.5))
        return parts

    def _dot(self, x: float, y: float, radius: float) -> str:
        return (
            f'<circle cx="{self._across(x):.1f}" cy="{self._up(y):.1f}" r="{radius}" class="dot"/>'
        )

    def _polyline(self, curve: Sequence[Point], look: str) -> str:
        if len(curve) == 1:
            return self._dot(*curve[0], 1.5)
        line = " ".join(self._place(x, y) for x, y in curve)
        return f'<polyline points="{line}" class="{look}"/>'


def _pieces(curve: Sequence[Point]) -> list[list[Point]]:
    """The curve in parts without a missing update."""
    numbered = enumerate(curve)
    return [
        [point for _, point in part]
        for _, part in groupby(numbered, key=lambda item: item[1][0] - item[0])
    ]
