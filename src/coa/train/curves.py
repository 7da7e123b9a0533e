"""Learning curves of an RL run: metrics.jsonl in, one SVG out, without scripts, fonts or links.

Six small panels over the same updates: reward, pass rate and evaluation on one scale, so that they
can be compared; entropy, length and sampler gap each on its own. Faint is each update, bold the
mean of the last `WINDOW`; evaluations are points with their 95% intervals. Scales begin at 0,
unless there is something below. The same records give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.runs import read_jsonl

Record = Mapping[str, Any]
Point = tuple[float, float]

WINDOW = 8
_WIDTH, _HEAD, _COLUMNS = 860, 62, 3
_CELL_WIDTH, _CELL_HEIGHT = 280, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 10, 24, 28
"""Of the plot; of a cell; of what surrounds the curve in a cell. In pixels."""
_LINE, _FAINT_LINE, _GRID, _INK, _FAINT = "#1f6f8b", "#b7cfd8", "#e3e8ec", "#16202a", "#4a5763"
_STYLE = (
    f"text{{font:13px system-ui,sans-serif;fill:{_INK}}}"
    f".faint{{fill:{_FAINT};font-size:11px}}.title{{font-size:16px;font-weight:600}}"
    f".name{{font-weight:600}}polyline,path{{fill:none}}"
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
    Panel("eval_accuracy", "evaluation", ".1%", shared=True),
    Panel("entropy", "entropy (nats)", ".2f"),
    Panel("length_mean", "tokens a rollout", ".0f"),
    Panel("sampler_gap", "sampler gap (nats)", ".2g"),
)


def curve(path: Path, title: str = "") -> str:
    """The learning curves of a metrics.jsonl, also of a run that is still going on."""
    records = [record for _, record in read_jsonl(path, growing=True)]
    if not any(points(records, panel.key) for panel in PANELS):
        raise RecordError(f"{path}: holds no figure of RL. Expected the metrics.jsonl of `coa rl`.")
    return plot(records, title or f"Learning curves of {path.parent.name or path.name}")


def plot(records: Sequence[Record], title: str) -> str:
    """The figure; every panel's first and last figure is also a text in it."""
    found = {panel.key: points(records, panel.key) for panel in PANELS}
    intervals = _intervals(records)
    last = max((x for curve in found.values() for x, _ in curve), default=0.0) or 1.0
    together = [y for panel in PANELS if panel.shared for _, y in found[panel.key]]
    together += [y for low, high in intervals.values() for y in (low, high)]
    parts, spoken = [], []
    for at, panel in enumerate(PANELS):
        row, column = divmod(at, _COLUMNS)
        values = together if panel.shared else [y for _, y in found[panel.key]]
        cell = _Cell(_CELL_WIDTH * column + 8, _HEAD + _CELL_HEIGHT * row, last, _scale(values))
        summary = _summary(found[panel.key], panel)
        spoken.append(f"{panel.name}: {summary}")
        parts += cell.frame(panel, summary)
        if panel.key == "eval_accuracy":
            parts += cell.evaluations(found[panel.key], intervals)
        else:
            parts += cell.curve(found[panel.key])
    height = _HEAD + _CELL_HEIGHT * math.ceil(len(PANELS) / _COLUMNS) + 6
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
            *parts,
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
    course = curve if panel.key == "eval_accuracy" else trailing_mean(curve) or curve
    first, last = format(course[0][1], panel.spec), format(course[-1][1], panel.spec)
    return f"{first} to {last}" if len(course) > 1 else first


def _scale(values: Sequence[float]) -> list[float]:
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


class _Cell:
    """The place of one panel in the figure, with its scales."""

    def __init__(self, x: int, y: int, last: float, ticks: list[float]) -> None:
        self._left, self._right = x + _LEFT, x + _CELL_WIDTH - _RIGHT
        self._top, self._bottom = y + _TOP, y + _CELL_HEIGHT - _BOTTOM
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
                f'<path d="M{self._left} {y:.1f}H{self._right}" stroke="{_GRID}"/>'
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
        faint = _FAINT_LINE if mean else _LINE
        parts = [self._polyline(piece, faint, 1) for piece in _pieces(curve)]
        return [*parts, self._polyline(mean, _LINE, 2)] if mean else parts

    def evaluations(self, curve: Sequence[Point], intervals: Mapping[float, Point]) -> list[str]:
        parts = [self._polyline(curve, _FAINT_LINE, 1)] if curve else []
        for x, y in curve:
            if x in intervals:
                low, high = (f"{self._up(end):.1f}" for end in intervals[x])
                parts.append(
                    f'<path d="M{self._across(x):.1f} {low}V{high}" stroke="{_LINE}" '
                    'stroke-width="1.5"/>'
                )
            parts.append(self._dot(x, y, 3.5))
        return parts

    def _dot(self, x: float, y: float, radius: float) -> str:
        return (
            f'<circle cx="{self._across(x):.1f}" cy="{self._up(y):.1f}" r="{radius}" '
            f'fill="{_LINE}"/>'
        )

    def _polyline(self, curve: Sequence[Point], colour: str, width: int) -> str:
        if len(curve) == 1:
            return self._dot(*curve[0], 1.5)
        line = " ".join(self._place(x, y) for x, y in curve)
        return f'<polyline points="{line}" stroke="{colour}" stroke-width="{width}"/>'


def _pieces(curve: Sequence[Point]) -> list[list[Point]]:
    """The curve in parts without a missing update."""
    numbered = enumerate(curve)
    return [
        [point for _, point in part]
        for _, part in groupby(numbered, key=lambda item: item[1][0] - item[0])
    ]
