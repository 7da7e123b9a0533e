"""What the planner and the coder know: how a kind of problem is recognised and programmed.

A recogniser is a pattern over the whole question and a function that turns what it found into a
Plan. Programs are short and hold the question's literals, so that there is nothing to parse, and
they print the answer in the form that the question asks for. Both work from the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Form(NamedTuple):
    """What an answer looks like: a pattern, and words that complete 'The output is ...'."""

    pattern: re.Pattern[str]
    name: str

    def fits(self, text: str) -> bool:
        return bool(self.pattern.fullmatch(text))


def _form(name: str, pattern: str) -> Form:
    return Form(re.compile(pattern), name)


WHOLE = _form("one whole number", r"-?\d+")
NUMBER = _form("one number", r"-?[\d,]+(?:\.\d+)?(?:[eE][-+]?\d+)?")
HEXADECIMAL = _form("one hexadecimal number", r"-?0x[0-9a-f]+")
DIGITS = _form("one number in the new base", r"[0-9a-f]+")
FRACTION = _form("one fraction", r"\d+/\d+")
FACTORS = _form("a product of numbers", r"\d+(?: \u00d7 \d+)*")
COMPLEX = _form("one complex number", r"-?\d+[-+]\d+i")
ANGLE = _form("an angle in degrees", r"\d+\.\d+\u00b0")
POINT = _form("a point", r"\(-?\d+\.\d+, -?\d+\.\d+\)")
DAYS = _form("a number of days", r"\d+ days")
WEEKDAY = _form("the name of a weekday", r"[A-Z][a-z]+day")
YES_NO = _form("Yes or No", r"Yes|No")
TRUE_FALSE = _form("True or False", r"True|False")
WORD = _form("one word", r"\w+")
WORDS = _form("a list of words", r"\w+(?:, \w+)*")
SENTENCE = _form("a line of words", r"\S+(?: \S+)*")
LIST = _form("a list in brackets", r"\[.*\]")
BUTTONS = _form("a sequence of buttons", r"[A-Z](?: \u2192 [A-Z])*")
BOARD = _form("a board", r"[Q_](?: [Q_])*(?:\n[Q_](?: [Q_])*)*")
ROWS = _form("rows of numbers", r"[-\d. ]+(?:\n[-\d. ]+)*")


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """How a problem is solved, in words and as a program."""

    steps: tuple[str, ...]
    idea: str
    """What the coder thinks before writing the program."""
    program: str
    form: Form
    kind: str = ""
    """Of the problem; that of the recogniser which found it."""

    @property
    def text(self) -> str:
        """The plan as the planner writes it."""
        return "\n".join(f"{number}. {step}" for number, step in enumerate(self.steps, start=1))


Build = Callable[[re.Match[str]], ProgramPlan | None]
"""None: it looked like the kind and is not."""


@dataclass(frozen=True)
class Recogniser:
    """One kind of problem, by the name of its generator."""

    kind: str
    pattern: re.Pattern[str]
    build: Build


class Recognisers(list[Recogniser]):
    """Recognisers of one theme; a module of programs fills one of these."""

    def add(self, kind: str, pattern: str) -> Callable[[Build], Build]:
        """Register a function as what to do with questions that `pattern` matches as a whole."""

        def register(build: Build) -> Build:
            self.append(Recogniser(kind, re.compile(pattern, re.DOTALL), build))
            return build

        return register
