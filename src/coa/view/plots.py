"""Plots as inline SVG: intervals and bars in the cells of tables, panels, cost against accuracy.

A plot has classes, never colours or styles of its own: the style of the page gives both for light
and dark, and its policy forbids any other. Bars and intervals use percentages, so they are as wide
as their cell without being distorted. Every plot says in words what it shows.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from coa.statistics import Estimate
from coa.view.curves import CELL_HEIGHT, CELL_WIDTH, Cell, DrawnCurve, Panel, Point, scale
from coa.view.terminal import harmless

Child: TypeAlias = "str | Iterable[Child] | None"
Attribute = str | int | float | bool | None
_EMPTY = frozenset({"br", "col", "line", "rect", "circle", "path", "polyline"})
"""Elements that hold nothing."""


class Markup(str):
    """A text that is markup and must not be escaped again."""

    __slots__ = ()


def el(name: str, *children: Child, **attributes: Attribute) -> Markup:
    """An element; attributes that are None or False are left out."""
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
    """What stands inside an element."""
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
    """A text that a stranger chose, as a name: its direction does not reach what is around it."""
    return el("bdi", text)


def ascii_only(markup: str) -> str:
    """The same page in ASCII: no byte of a text can be taken for something else."""
    return markup.encode("ascii", "xmlcharrefreplace").decode()


def table(
    head: Iterable[Child],
    rows: Iterable[Iterable[Markup]],
    *,
    caption: Child = None,
    class_: str = "",
) -> Markup:
    """A table of cells that are elements already, in a box that scrolls when it is too wide."""
    heads = el("tr", (each if isinstance(each, Markup) else el("th", each) for each in head))
    whole = el(
        "table",
        el("caption", caption) if caption else None,
        el("thead", heads),
        el("tbody", (el("tr", cells) for cells in rows)),
        class_=class_ or None,
    )
    return el("div", whole, class_="wide", tabindex=0, role="group")


def number(text: Child, **attributes: Attribute) -> Markup:
    """A cell with a figure: aligned to the right."""
    return el("td", text, class_="number", **attributes)


def number_head(text: Child) -> Markup:
    """The head of a column of figures."""
    return el("th", text, class_="number")


_EDGE = 2.0
"""Percent of a cell that is left free on both sides, so that a dot at 0% or 100% is whole."""


def interval(found: Estimate, said: str, low: float = 0.0, high: float = 1.0) -> Markup:
    """A value with its 95% interval on the scale from `low` to `high`; 0 has a mark."""

    def place(value: float) -> str:
        part = (min(max(value, low), high) - low) / ((high - low) or 1.0)
        return f"{_EDGE + (100 - 2 * _EDGE) * part:.2f}%"

    middle, left, right = (place(each) for each in (found.value, found.low, found.high))
    zero = place(0.0) if low < 0 < high else None
    return el(
        "svg",
        el("line", x1=place(low), x2=place(high), y1="50%", y2="50%", class_="grid"),
        el("line", x1=zero, x2=zero, y1="10%", y2="90%", class_="zero") if zero else None,
        el("line", x1=left, x2=right, y1="50%", y2="50%", class_="range"),
        el("circle", cx=middle, cy="50%", r=3.5, class_="dot"),
        class_="interval",
        role="img",
        aria_label=said,
    )


def bar(parts: Iterable[tuple[float, str]], said: str) -> Markup:
    """A bar of parts, each a share of the whole width with its class."""
    drawn, x = [], 0.0
    for share, look in parts:
        width = 100 * min(max(share, 0.0), 1.0)
        if width:
            drawn.append(
                el("rect", x=f"{x:.2f}%", y="15%", width=f"{width:.2f}%", height="70%", class_=look)
            )
        x += width
    return el("svg", drawn, class_="bar", role="img", aria_label=said)


def panel(drawn: DrawnCurve) -> Markup:
    """One panel of learning curves."""
    return framed(drawn.parts, f"{drawn.panel.name}: {drawn.summary}")


def ladder(name: str, found: Sequence[tuple[int, Estimate]]) -> Markup:
    """Points with intervals over k, on the scale from 0 to 1."""
    cell = Cell(0, 0, float(found[-1][0]), [0.0, 0.25, 0.5, 0.75, 1.0])
    curve: list[Point] = [(float(k), each.value) for k, each in found]
    ends = {float(k): (each.low, each.high) for k, each in found}
    summary = f"{found[0][1].value:.1%} to {found[-1][1].value:.1%}"
    parts = cell.frame(Panel("pass_at", name, ".1%"), summary) + cell.evaluations(curve, ends)
    return framed(parts, f"{name}: {summary}")


def framed(parts: Sequence[str], said: str) -> Markup:
    """An SVG of the size of a panel."""
    return el(
        "svg",
        el("title", said),
        Markup("".join(parts)),
        viewBox=f"0 0 {CELL_WIDTH} {CELL_HEIGHT}",
        class_="panel",
        role="img",
    )


# -- cost against accuracy ------------------------------------------------------------------

_WIDTH, _HEIGHT = 520, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 18, 16, 54
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


@dataclass(frozen=True)
class Costs:
    """The scale of costs: from 0, or logarithmic when they are far apart."""

    ticks: Sequence[float]
    logarithmic: bool

    @classmethod
    def of(cls, spots: Sequence[Spot]) -> Costs:
        most = max(spot.cost.high for spot in spots)
        least = min(max(spot.cost.low, spot.cost.value / 10) for spot in spots)
        if least <= 0 or most / least < _SPREAD:
            return cls(scale([most]), False)
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        steps = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        first = max(step for step in steps if step <= least * 1.0001)
        last = min((step for step in steps if step >= most * 0.9999), default=steps[-1])
        return cls([step for step in steps if first <= step <= last], True)

    def across(self, cost: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        cost = min(max(cost, low), high)
        part = math.log(cost / low) / math.log(high / low) if self.logarithmic else cost / high
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * part


def _up(accuracy: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(max(accuracy, 0.0), 1.0)


def cost_plot(spots: Sequence[Spot], unit: str, said: str) -> Markup:
    """Each run as a cross of its two intervals, with its label; better is up and to the left."""
    costs = Costs.of(spots)
    return el(
        "svg",
        el("title", said),
        _grid(costs, unit),
        (_cross(spot, costs) for spot in spots),
        _labels(spots, costs),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        class_="cost",
        role="img",
    )


def _grid(costs: Costs, unit: str) -> list[Markup]:
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for step in range(5):
        y = _up(step / 4)
        parts.append(el("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid"))
        label = f"{25 * step}%"
        parts.append(el("text", label, x=_LEFT - 7, y=y + 4, class_="faint", text_anchor="end"))
    labelled = math.inf
    for tick in reversed(costs.ticks):
        x = costs.across(tick)
        parts.append(el("line", x1=x, x2=x, y1=floor, y2=floor + 4, class_="grid"))
        if labelled - x >= _TICKS_APART:
            label, labelled = f"{tick:,.10g}", x
            place = el("text", label, x=x, y=floor + 22, class_="faint", text_anchor="middle")
            parts.append(place)
    kind = ", logarithmic" if costs.logarithmic else ""
    parts.append(el("text", f"{unit}{kind}", x=right, y=_HEIGHT - 5, text_anchor="end"))
    return parts


def _cross(spot: Spot, costs: Costs) -> Markup:
    x, y = costs.across(spot.cost.value), _up(spot.accuracy.value)
    left, right = costs.across(spot.cost.low), costs.across(spot.cost.high)
    return el(
        "g",
        el("line", x1=left, x2=right, y1=y, y2=y, class_="range") if left < right else None,
        el(
            "line",
            x1=x,
            x2=x,
            y1=_up(spot.accuracy.low),
            y2=_up(spot.accuracy.high),
            class_="range",
        ),
        el("circle", cx=x, cy=y, r=4.5, class_="dot"),
        class_=spot.look or None,
    )


def _labels(spots: Sequence[Spot], costs: Costs) -> Iterable[Markup]:
    """Beside their points, pushed apart where they would cover each other."""
    ordered = sorted(spots, key=lambda each: -each.accuracy.value)
    lines = _apart([_up(spot.accuracy.value) - 7 for spot in ordered], _HEIGHT - _BOTTOM - 7)
    for spot, line in zip(ordered, lines, strict=True):
        x = costs.across(spot.cost.value)
        leftward = x > 0.62 * _WIDTH
        yield el(
            "text",
            spot.label,
            x=x - 9 if leftward else x + 9,
            y=line,
            text_anchor="end" if leftward else "start",
            class_=f"label {spot.look}".strip(),
        )


def _apart(lines: Sequence[float], floor: float) -> list[float]:
    """Lines of text from top to bottom, moved down until none covers the one above it, and then
    up from the floor: what stands below it would cover the scale."""
    placed: list[float] = []
    for line in lines:
        placed.append(max(line, placed[-1] + _APART) if placed else line)
    for at in reversed(range(len(placed))):
        placed[at] = min(placed[at], floor)
        floor = placed[at] - _APART
    return placed
