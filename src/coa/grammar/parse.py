"""From text to blocks: one splitter, fed whole or in pieces.

`parse(grammar, text)` is `Splitter` fed once, so streaming and whole parsing cannot differ. Nothing
here raises on any text: what is wrong is a `Fault` beside the blocks that are right.

Where the grammar has one tag for all calls, its body is JSON and the block is that of the tool it
names. Where it has a role for free text, text outside of any block is a block of that role.

A tag counts only when it is exactly `<name>` or `</name>` of the grammar. Inside `code` every other
tag is just text, and the closing tag counts when the fences are balanced or when it opens a line,
so that a string in the program may hold `</code>`. Inside any other block a tag of the grammar is a
mistake (nested or crossing): the block it breaks is dropped. Unknown tags inside a block are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from coa.grammar.grammar import Block, Fault, FaultKind, Grammar, GrammarState, Role

_TAG_SHAPED = re.compile(r"</?[A-Za-z][^<>]*>")


class Event(NamedTuple):
    """What a stream shows: text as it appears in a block (or outside any, role None)."""

    kind: Literal["open", "text", "close", "fault"]
    role: str | None
    text: str


@dataclass
class Parsed:
    """The blocks that are right and the faults beside them, in order of position."""

    blocks: list[Block] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    open_role: str | None = None
    """The role whose block was still open at the end of the text."""


class Splitter:
    """An incremental parser: feed text in any pieces, then `finish()`."""

    def __init__(self, grammar: Grammar, *, env: bool = False, events: bool = False) -> None:
        """`env`: the text holds observations written by the runtime; otherwise an observation
        is something a model forged."""
        self.grammar = grammar
        self.parsed = Parsed()
        self._env = env
        self._events: list[Event] | None = [] if events else None
        self._longest = max(map(len, grammar.tags)) + 3
        self._text = ""
        self._scan = 0
        """Everything before this position has been searched for tags."""
        self._mark = 0
        """Start of the text not yet accounted for: the open body, or what stands outside."""
        self._opened = 0
        self._role: Role | None = None
        self._observing = False
        self._shown = 0

    def feed(self, text: str) -> list[Event]:
        """Take more text; return what it shows if events were asked for."""
        self._text = self._text + text if self._text else text
        self._advance()
        if self._events is None:
            return []
        self._show(len(self._text) - self._held_back())
        events, self._events = self._events, []
        return events

    def finish(self) -> Parsed:
        """No more text: what is still open is unclosed."""
        self._show(len(self._text))
        if self._role is not None or self._observing:
            name = self._role.name if self._role else self.grammar.observation
            self.parsed.open_role = name
            self._fault(FaultKind.UNCLOSED, self._opened, f"<{name}> was never closed.")
        else:
            self._outside(len(self._text))
        return self.parsed

    def take_events(self) -> list[Event]:
        """Events that `finish` added."""
        events, self._events = self._events or [], []
        return events

    # -- scanning ---------------------------------------------------------------------------

    def _advance(self) -> None:
        text, search = self._text, self.grammar.tag_pattern.search
        observation, tagged = self.grammar.observation, self.grammar.tagged
        position = self._scan
        while (match := search(text, position)) is not None:
            position = match.end()
            closing, name = match.group(1), match.group(2)
            if self._observing:
                if closing and name == observation:
                    self._close(match.start(), position)
                continue
            role = self._role
            if role is None:
                self._at_top(closing == "/", name, match.start(), position)
            elif closing and name == role.name:
                if role.body != "code" or self._code_closes(match.start()):
                    self._close(match.start(), position)
            elif role.body != "code":
                self._break(closing == "/", name, match.start(), position)
                if not closing and (name in tagged or name == observation):
                    self._at_top(False, name, match.start(), position)
        self._scan = max(position, len(text) - self._longest)

    def _at_top(self, closing: bool, name: str, start: int, end: int) -> None:
        self._show(start)
        self._outside(start)
        self._mark = end
        if closing:
            self._fault(FaultKind.UNOPENED, start, f"</{name}> closes nothing.")
        elif name == self.grammar.observation:
            if not self._env:
                message = f"Only the environment writes <{name}>; call a tool and wait for it."
                self._fault(FaultKind.FORGED, start, message)
            self._observing = True
            self._opened = start
        else:
            self._role, self._opened = self.grammar.tagged[name], start
        if self._events is not None:
            self._shown = end
            if not closing:
                self._events.append(Event("open", name, ""))

    def _close(self, body_end: int, end: int) -> None:
        name = self.grammar.observation if self._observing else self._open_name()
        self._show(body_end)
        if not self._observing or self._env:
            body = self._text[self._mark : body_end]
            if self._observing or name != self.grammar.call:
                self._add(Block(name, body, self._opened, end))
            elif isinstance(call := self.grammar.read_call(body, self._opened, end), Block):
                self._add(call)
            else:
                self._fault(call.kind, call.at, call.message)
        if self._events is not None:
            self._events.append(Event("close", name, ""))
        self._role, self._observing = None, False
        self._mark = self._shown = end

    def _add(self, block: Block) -> None:
        """Add a block. Free text beside a thought is a part of it."""
        free, blocks = self.grammar.free, self.parsed.blocks
        if free and blocks and blocks[-1].role == block.role == free:
            before = blocks.pop()
            body = f"{before.body.strip()}\n{block.body.strip()}"
            block = Block(free, body, before.start, block.end)
        blocks.append(block)

    def _break(self, closing: bool, name: str, start: int, end: int) -> None:
        """A tag of the grammar inside an open block: the block is dropped."""
        inside = self._open_name()
        kind = FaultKind.CROSSING if closing else FaultKind.NESTED
        slash = "/" if closing else ""
        self._show(start)
        self._fault(kind, start, f"<{slash}{name}> stands inside <{inside}>; close it first.")
        self._role = None
        self._mark = end if closing else start
        self._shown = self._mark

    def _open_name(self) -> str:
        assert self._role is not None
        return self._role.name

    def _code_closes(self, at: int) -> bool:
        body = self._text[self._mark : at]
        fences = body.count("```")
        if fences % 2 == 0 or (fences > 1 and body.endswith("```")):
            return True
        return body.rpartition("\n")[2].strip() == "" and "\n" in body

    def _outside(self, end: int) -> None:
        """Text between blocks must be blank, where the grammar has no role for it."""
        text = self._text[self._mark : end]
        if not text or text.isspace():
            return
        at = self._mark + len(text) - len(text.lstrip())
        if self.grammar.free:
            self._add(Block(self.grammar.free, text.strip(), at, at + len(text.strip())))
            return
        tag = _TAG_SHAPED.match(text.lstrip())
        if tag:
            known = ", ".join(self.grammar.tagged)
            message = f"{tag.group(0)[:40]!r} is not a block of this protocol; known: {known}."
            self._fault(FaultKind.UNKNOWN, at, message)
        else:
            shown = text.strip()[:40]
            self._fault(FaultKind.STRAY, at, f"{shown!r} stands outside any block.")

    def _fault(self, kind: FaultKind, at: int, message: str) -> None:
        self.parsed.faults.append(Fault(kind, at, message))
        if self._events is not None:
            self._events.append(Event("fault", None, message))

    # -- showing ----------------------------------------------------------------------------

    def _held_back(self) -> int:
        """Length of a tail that could still become a tag."""
        tail = self._text[-self._longest :]
        cut = tail.rfind("<")
        return len(tail) - cut if cut >= 0 and ">" not in tail[cut:] else 0

    def _show(self, end: int) -> None:
        if self._events is not None and end > self._shown:
            name = self.grammar.observation if self._observing else None
            role = self._role.name if self._role else name
            self._events.append(Event("text", role, self._text[self._shown : end]))
            self._shown = end


def parse(grammar: Grammar, text: str, *, env: bool = False) -> Parsed:
    """Parse a whole text; see `Splitter` for `env`."""
    splitter = Splitter(grammar, env=env)
    splitter.feed(text)
    return splitter.finish()


def check(grammar: Grammar, parsed: Parsed) -> Fault | None:
    """The first thing wrong with a whole trajectory text: shape first, then succession."""
    if parsed.faults:
        return parsed.faults[0]
    state = GrammarState()
    for block in parsed.blocks:
        moved = grammar.advance(state, block)
        if isinstance(moved, Fault):
            return moved
        state = moved
    if not state.done:
        return Fault(FaultKind.UNCLOSED, 0, "The text ends before an answer.")
    return None


class Code(NamedTuple):
    """A program and what to feed it."""

    source: str
    stdin: str


_FENCE = re.compile(
    r"```[ \t]*([\w+-]*)[ \t]*\n(.*?)(?:\n[ \t]*```(?!\w)|[ \t]*```[ \t]*(?=\n|\Z)|\Z)", re.S
)
"""A fence closes at the start or at the end of a line: backticks in a string are the program's."""
_SHELL = {"sh", "bash", "shell", "stdin", "input", "text"}


def parse_code(body: str) -> Code:
    """The program in a code block: fenced or bare; a second fence (sh) is its standard input.

    Line breaks of Windows become plain ones, as for Python itself.
    """
    body = body.replace("\r\n", "\n")
    sources: list[str] = []
    inputs: list[str] = []
    for language, text in _FENCE.findall(body):
        (inputs if language.lower() in _SHELL and sources else sources).append(text)
    if not sources:
        return Code(body.strip("\n"), "")
    return Code("\n".join(sources), "\n".join(inputs))


def alternatives(answer: str) -> tuple[str, ...]:
    """The answers joined by `|` in an answer block, blanks dropped."""
    return tuple(part.strip() for part in answer.split("|") if part.strip())
