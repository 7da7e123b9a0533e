"""Markup made in Python: what is not markup already is escaped, so no text can become an element.

    el("td", name, class_="run") -> <td class="run">...</td>

Attributes are written in Python: `class_` is class, and `_` inside a name is a hyphen; the names of
SVG that are in camel case stay as they are.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

from coa.display import harmless

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
