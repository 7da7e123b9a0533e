"""Document: what a reader makes of one file, before it is cut into passages.

A document is flat: headings and definitions open a scope, and everything after one belongs to it
until a scope of the same or a lower level opens, or its level is closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["heading", "term", "close", "text"]
TERM_LEVEL = 7
"""Headings have levels 1 to 6; definitions lie within them, and within each other."""


@dataclass(frozen=True, slots=True)
class Block:
    kind: Kind
    text: str = ""
    level: int = 0
    anchors: tuple[str, ...] = ()
    """Fragments that lead here, the one to show last."""


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    blocks: tuple[Block, ...]
    links: tuple[str, ...] = ()
    """As they are written in the file."""
    remark: str = ""
    """What was odd about the file, though it could be read."""
