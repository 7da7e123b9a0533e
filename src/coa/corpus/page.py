"""Page and Passage: what a corpus consists of, whoever wrote it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import quote

_FRAGMENT_SAFE = "!$&'()*+,;=:@/?"


@dataclass(frozen=True, slots=True)
class Passage:
    """A few sentences on one topic: the unit that is searched and shown."""

    title: str
    """Of its page."""
    url: str
    """Of its page, with the fragment of its section where there is one."""
    text: str
    section: str = ""
    """The headings above it within the page, joined by ' > '."""
    names: tuple[str, ...] = ()
    """What it defines, such as a function: a query that holds the name should find it."""
    anchors: tuple[str, ...] = ()
    """The fragments of the page that it belongs to, its own last."""

    @property
    def heading(self) -> str:
        return f"{self.title} > {self.section}" if self.section else self.title


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    url: str
    passages: tuple[Passage, ...]
    links: tuple[str, ...] = ()
    """Addresses of the pages this one mentions."""

    @property
    def text(self) -> str:
        """The passages, each section under a line with its headings."""
        parts, section = [], ""
        for passage in self.passages:
            if passage.section != section:
                section = passage.section
                parts += [f"## {section}"] if section else []
            parts.append(passage.text)
        return "\n\n".join(parts)

    def part(self, anchor: str) -> Page | None:
        """The section or definition that a fragment of the address names, as a page of its own."""
        inside = tuple(passage for passage in self.passages if anchor in passage.anchors)
        if not inside:
            return None
        url = with_fragment(self.url, anchor)
        return replace(self, url=url, passages=inside, links=(self.url, *self.links))


def with_fragment(url: str, anchor: str) -> str:
    return f"{url}#{quote(anchor, safe=_FRAGMENT_SAFE)}"


# ------------------------------------------------------------------------------------------------
# Document: what a reader makes of one file, before it is cut into passages.
#
# A document is flat: headings and definitions open a scope, and everything after one belongs to
# it until a scope of the same or a lower level opens, or its level is closed.
# ------------------------------------------------------------------------------------------------


Kind = Literal["heading", "term", "close", "text"]
TERM_LEVEL = 7
"""Headings have levels 1 to 6; definitions lie within them, and within each other."""


@dataclass(frozen=True, slots=True)
class DocumentBlock:
    kind: Kind
    text: str = ""
    level: int = 0
    anchors: tuple[str, ...] = ()
    """Fragments that lead here, the one to show last."""


@dataclass(frozen=True, slots=True)
class Document:
    title: str
    blocks: tuple[DocumentBlock, ...]
    links: tuple[str, ...] = ()
    """As they are written in the file."""
    remark: str = ""
    """What was odd about the file, though it could be read."""


# ------------------------------------------------------------------------------------------------
# Cut a Document into passages: at the borders of headings, definitions and paragraphs.
#
# A passage never mixes two sections or two definitions. What is too long for one passage becomes
# several of about equal length, cut between paragraphs, else lines, else sentences, else words.
# Every later part of a definition begins with its signature again, because a part that says "New
# in version 3.9" without saying of what answers nothing.
# ------------------------------------------------------------------------------------------------


LEAD_CHARS = 160
NAME_CHARS = 200
"""Titles, headings, names and anchors that are longer come from a page that means harm, and every
passage below them would repeat them."""
_MAX_NAME_WORDS = 6
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.\w+)+")
_CALL = re.compile(r"([\w.]+)\s*\(")
_SENTENCE_END = re.compile(r"[.!?;:][\"')\]]?\s")


@dataclass(frozen=True, slots=True)
class _Scope:
    """A heading or a definition that is open."""

    level: int
    heading: str = ""
    lead: str = ""
    names: tuple[str, ...] = ()
    anchors: tuple[str, ...] = ()


@dataclass(slots=True)
class _Run:
    """Text between two borders, and the scopes it lies in."""

    scopes: tuple[_Scope, ...]
    texts: list[str] = field(default_factory=list)
    continues: bool = False
    """The definition it belongs to began in an earlier run."""


def passages_of(document: Document, url: str, max_chars: int) -> tuple[Passage, ...]:
    """The passages of a document, in its order; none is longer than `max_chars`."""
    made = []
    title = document.title[:NAME_CHARS]
    for run in _runs(document.blocks):
        innermost = run.scopes[-1] if run.scopes else _Scope(0)
        anchors = tuple(anchor for scope in run.scopes for anchor in scope.anchors)
        section = " > ".join(scope.heading for scope in run.scopes if scope.heading)
        address = with_fragment(url, anchors[-1]) if anchors else url
        for text in _fill(run, innermost.lead, max_chars):
            made.append(Passage(title, address, text, section, innermost.names, anchors))
    return tuple(made)


def _runs(blocks: Sequence[DocumentBlock]) -> Iterator[_Run]:
    scopes: list[_Scope] = []
    run = _Run(())
    for block in blocks:
        if block.kind == "text":
            run.texts.append(block.text)
            continue
        if run.texts:
            yield run
        while scopes and scopes[-1].level >= block.level:
            scopes.pop()
        anchors = tuple(anchor for anchor in block.anchors if len(anchor) <= NAME_CHARS)
        if block.kind == "heading":
            scopes.append(_Scope(block.level, block.text[:NAME_CHARS], anchors=anchors))
        elif block.kind == "term":
            lead, names = _lead(block.text), _names(block.text, anchors)
            scopes.append(_Scope(block.level, "", lead, names, anchors))
        opened = [block.text] if block.kind == "term" else []
        run = _Run(tuple(scopes), opened, continues=block.kind == "close")
    if run.texts:
        yield run


def _fill(run: _Run, lead: str, max_chars: int) -> Iterator[str]:
    """The texts of a run as passages of about equal length."""
    lead = next(split(lead, max_chars // 3), "")
    room = max_chars - (len(lead) + 1 if lead else 0)
    parts = [part for text in run.texts for part in split(text, room)]
    total = sum(len(part) + 1 for part in parts)
    target = total / max(1, math.ceil(total / room))
    again = [lead] if lead else []
    held: list[str] = again if run.continues else []
    length = 0
    for part in parts:
        if length and (length + len(part) > room or length >= target):
            yield "\n".join(held)
            held, length = again, 0
        held = [*held, part]
        length += len(part) + 1
    if length:
        yield "\n".join(held)


def split(text: str, room: int) -> Iterator[str]:
    """Pieces of at most `room` characters, cut at the best border in the later half of each."""
    while len(text) > room:
        window = text[: room + 1]
        line = window.rfind("\n", room // 2)
        if line > 0:
            piece, text = text[:line], text[line + 1 :]  # the next line keeps its indentation
        else:
            cut = _border(window, room)
            piece, text = text[:cut], text[cut:].lstrip()
        if piece := piece.rstrip():
            yield piece
    if text.strip():
        yield text.rstrip()


def _border(window: str, room: int) -> int:
    """Where to cut: after a sentence, else between words; a word longer than a passage breaks."""
    ends = [found.end() - 1 for found in _SENTENCE_END.finditer(window, room // 2)]
    if ends:
        return ends[-1]
    if window[-1].isspace():
        return room
    words = window.rsplit(None, 1)
    return len(words[0]) if len(words) > 1 else room


def _lead(term: str) -> str:
    """The first line of a definition, short enough to be repeated."""
    line = term.partition("\n")[0]
    short = next(split(line, LEAD_CHARS), "")
    return short if short == line else f"{short} ..."


def _names(term: str, anchors: Sequence[str]) -> tuple[str, ...]:
    """What a definition defines: `json.dumps` of `json.dumps(obj, *, ...)`, or the term itself."""
    names: dict[str, None] = {}
    dotted = [anchor for anchor in reversed(anchors) if _DOTTED.fullmatch(anchor)]
    for line in term.splitlines():
        called = _CALL.search(line)
        if called and ("." in called[1] or not dotted):  # `close` alone names too many things
            names[called[1].strip(".")] = None
        elif not called and not dotted and 1 < len(line.split()) <= _MAX_NAME_WORDS:
            names[line] = None  # one plain word alone would rank above what is about it
    names |= dict.fromkeys(dotted)
    return tuple(name for name in names if 0 < len(name) <= NAME_CHARS)
