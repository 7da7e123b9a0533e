"""What the planner and the coder of the coding team know: which kind of problem a question is, and
how it is programmed. Both work from the words of the question alone.

The problems are listed in `programs.toml`. What stands here are the functions that turn what a
pattern found into literals of Python; one that does not find what it needs raises LookupError, and
then the question only looked like that kind.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import NamedTuple

LONGEST_QUESTION = 4000
"""Characters; what is longer is of no known kind, and patterns take their time over it."""
_MARK = re.compile(r"<(\w+(?: \w+)*)>")


class Form(NamedTuple):
    """What an answer looks like: words that complete 'The output is ...', and a pattern."""

    name: str
    pattern: re.Pattern[str]

    def fits(self, text: str) -> bool:
        return bool(self.pattern.fullmatch(text))


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """How a problem is solved, in words and as a program."""

    kind: str
    """The name of its generator."""
    steps: tuple[str, ...]
    idea: str
    """What the coder thinks before writing the program."""
    program: str
    form: Form

    @property
    def text(self) -> str:
        """The plan as the planner writes it."""
        return "\n".join(f"{number}. {step}" for number, step in enumerate(self.steps, start=1))


@dataclass(frozen=True)
class Problem:
    """One kind of problem: its pattern, and a plan with marks where the literals go."""

    pattern: re.Pattern[str]
    plan: ProgramPlan

    def plan_for(self, question: str) -> ProgramPlan | None:
        match = self.pattern.fullmatch(question)
        if match is None:
            return None

        def literal(mark: re.Match[str]) -> str:
            *function, groups = mark[1].split(" ", 1)
            found = [match[int(each) if each.isdecimal() else each] for each in groups.split()]
            return _FUNCTIONS[function[0]](*found) if function else found[0]

        plan = self.plan
        try:
            *steps, idea, program = (
                _MARK.sub(literal, text) for text in (*plan.steps, plan.idea, plan.program)
            )
        except LookupError:
            return None
        return replace(plan, steps=tuple(steps), idea=idea, program=program)


@cache
def problems() -> tuple[Problem, ...]:
    """All kinds of problems, in the order in which they are tried."""
    held = tomllib.loads(
        resources.files(__package__).joinpath("programs.toml").read_text(encoding="utf-8")
    )
    forms = {key: Form(name, re.compile(form)) for key, (name, form) in held["forms"].items()}
    parts = held["parts"]

    def problem(entry: dict[str, str]) -> Problem:
        pattern = re.sub(r"<([A-Z]+)>", lambda part: parts[part[1]], entry["pattern"])
        plan = ProgramPlan(
            entry["kind"],
            tuple(entry["steps"]),
            entry["idea"],
            entry["program"],
            forms[entry["form"]],
        )
        return Problem(re.compile(pattern, re.DOTALL), plan)

    return tuple(problem(entry) for entry in held["problem"])


def plan_for(question: str) -> ProgramPlan | None:
    """The planner's plan and the coder's program for a question; None when it is of no known
    kind."""
    text = question.strip()
    if len(text) > LONGEST_QUESTION:
        return None
    return next(filter(None, (each.plan_for(text) for each in problems())), None)


_MONTHS = (
    "January February March April May June July August September October November December"
).split()
_WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_NAME = f"(?:{'|'.join([*_MONTHS, *(name[:3] for name in _MONTHS)])})"
_DATES = (
    re.compile(r"(?P<y>\d{4})-(?P<m>\d\d)-(?P<d>\d\d)"),
    re.compile(r"(?P<m>\d\d)/(?P<d>\d\d)/(?P<y>\d{4})"),
    re.compile(rf"(?P<m>{_NAME}) (?P<d>\d\d),? (?P<y>\d{{4}})"),
    re.compile(rf"(?P<d>\d\d) (?P<m>{_NAME}) (?P<y>\d{{4}})"),
)
_LEGS = {
    0: "snake, sea slug, jellyfish, flatworm, leech",
    2: "chicken, bird, human, duck",
    4: "dog, cat, cow, horse, lion, elephant, giraffe, tiger, deer, sheep",
    5: "starfish",
    6: "insect, ant, butterfly, beetle, bee, wasp, grasshopper, cricket, cockroach, "
    "praying mantis, firefly",
    8: "spider, scorpion",
    10: "crab, lobster, shrimp",
    14: "woodlouse",
}
_LEGS_OF = {name: legs for legs, names in _LEGS.items() for name in names.split(", ")}
_EFFECTS = {"Add": "1, {}", "Subtract": "1, -{}", "Multiply": "{}, 0"}
_CHANGES = {
    "Rotate the matrix 90 degrees": "m = [list(r) for r in zip(*m[::-1])]",
    "Rotate the matrix 180 degrees": "m = [r[::-1] for r in m[::-1]]",
    "Rotate the matrix 270 degrees": "m = [list(r) for r in zip(*m)][::-1]",
    "Rotate the matrix 360 degrees": "m = m",
    "Horizontally mirror the matrix": "m = m[::-1]",
    "Vertically mirror the matrix": "m = [r[::-1] for r in m]",
    "Mirror the matrix along the diagonal": "m = [list(r) for r in zip(*m)]",
    "Mirror the matrix along the counterdiagonal": (
        "m = [list(r) for r in zip(*[r[::-1] for r in m[::-1]])]"
    ),
    r"Map each occurrence of (\d+) to (\d+)": (
        "m = [[{1} if x == {0} else x for x in r] for r in m]"
    ),
    r"Set all elements divisible by (\d+) to zero": (
        "m = [[0 if x % {0} == 0 else x for x in r] for r in m]"
    ),
    r"Crop the matrix to rows (\d+)-(\d+) and columns (\d+)-(\d+) \(1-indexed\)": (
        "m = [r[{2} - 1:{3}] for r in m[{0} - 1:{1}]]"
    ),
    r"Remove every (\d+)-\w+ row \(1-indexed\)": "m = [r for i, r in enumerate(m, 1) if i % {0}]",
    r"Remove every (\d+)-\w+ column \(1-indexed\)": (
        "m = [[x for i, x in enumerate(r, 1) if i % {0}] for r in m]"
    ),
}
"""What is done to a matrix -> the line that does it."""


def _matrix(text: str) -> str:
    """Rows of numbers as a list of lists."""
    rows = (", ".join(row.split()) for row in text.split("\n"))
    return "[" + ", ".join(f"[{row}]" for row in rows) + "]"


def _rows(text: str) -> list[str]:
    """Rows of cells as one string each, which is shorter."""
    return [row.replace(" ", "") for row in text.rstrip("\n").split("\n")]


def _changes(text: str) -> str:
    """A line for each operation on a matrix."""
    lines = []
    for operation in text.split("\n- ")[1:]:
        tried = ((re.fullmatch(each, operation), line) for each, line in _CHANGES.items())
        known = [line.format(*match.groups()) for match, line in tried if match]
        lines.append(known[0])
    return "\n".join(lines)


def _animals(text: str) -> str:
    listed = re.findall(r"(\d+) ([a-z ]+)", text)
    legs = [_LEGS_OF.get(name, _LEGS_OF.get(name.removesuffix("s"))) for _, name in listed]
    if None in legs:
        raise LookupError(text)
    rows = zip(listed, legs, strict=True)
    return ", ".join(f'({count}, "{name}", {leg})' for (count, name), leg in rows)


def _buttons(text: str) -> str:
    listed = re.findall(r"(\w): (\w+) (\d+) \(when (\w+)\)", text)
    return ", ".join(
        f'"{name}": ({_EFFECTS[verb].format(value)}, "{when}")'
        for name, verb, value, when in listed
    )


def _month(name: str) -> int:
    if name.isdecimal():
        return int(name)
    return next(n for n, month in enumerate(_MONTHS, start=1) if month.startswith(name))


def _date(year: str, month: str, day: str) -> str:
    """The month is a name or a number."""
    return f"date({int(year)}, {_month(month)}, {int(day)})"


def _written(text: str) -> str:
    """A date in one of the ways in which it is written."""
    found = [match for each in _DATES if (match := each.search(text))]
    return _date(*found[0].group("y", "m", "d"))


def _search(pattern: str, text: str) -> re.Match[str]:
    found = re.search(pattern, text)
    if found is None:
        raise LookupError(pattern)
    return found


def _month_in(text: str) -> str:
    """The year and the month that a text names."""
    name, year = _search(rf"({'|'.join(_MONTHS)}) (\d{{4}})", text).groups()
    return f"{year}, {_month(name)}"


def _going_back(text: str) -> bool:
    return bool(re.search(r"ago|before|backward", text))


_FUNCTIONS: dict[str, Callable[..., str]] = {
    "floored": lambda text: text.replace("/", "//"),
    "joined": lambda text: text.replace(", ", ""),
    "items": lambda text: repr(text.split()),
    "quoted": repr,
    "flat": lambda text: " ".join(text.split()),
    "rows": lambda text: repr(_rows(text)),
    "height": lambda text: str(len(_rows(text))),
    "matrix": _matrix,
    "changes": _changes,
    "pooled": {"max": "max(cells)", "average": "round(sum(cells) / len(cells), 2)"}.__getitem__,
    "decimals": lambda text: re.sub(r"\d+\.\d+|\d+", lambda number: f'D("{number[0]}")', text),
    "extreme": {"largest": "max", "smallest": "min"}.__getitem__,
    "sides": lambda text: ", ".join(re.findall(r"d(\d+)", text)),
    "base": lambda name: {"binary": "2", "hexadecimal": "16"}.get(name, name.removeprefix("base-")),
    "complex": lambda text: re.sub(r"\.0+", "", text).replace("i", "j"),
    "operator": lambda sign: sign.replace("\u00d7", "*").replace("\u00f7", "/"),
    "animals": _animals,
    "reverse": lambda order: ", reverse=True" if order == "descending" else "",
    "kept": lambda verb, size: {
        "Keep larger": ">",
        "Keep smaller": "<",
        "Remove larger": "<=",
        "Remove smaller": ">=",
    }[f"{verb} {size}"],
    "buttons": _buttons,
    "sizes": lambda text: re.sub(r"(\w):", r'"\1": ', text),
    "angles": lambda text: ", ".join(re.findall(r"(\d+)\.0", text)),
    "corners": lambda *points: ", ".join(f"complex({each})" for each in points),
    "date": _date,
    "written": _written,
    "month_in": _month_in,
    "weekday_in": lambda text: _search(rf"(?:many|of|does) ({'|'.join(_WEEKDAYS)})", text)[1],
    "offset": lambda text: _search(r"\b(\d{1,6})[- ]day", text)[1],
    "sign": lambda text: "-" if _going_back(text) else "+",
    "way": lambda text: "back" if _going_back(text) else "forward",
    "column": lambda name: str(_WEEKDAYS.index(name)),
    "index": lambda place: str({"first": 0, "second": 1, "third": 2, "fourth": 3}.get(place, -1)),
}
