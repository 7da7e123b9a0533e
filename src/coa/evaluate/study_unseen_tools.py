"""Tools that no training set of this package has, and tasks that need them.

Each takes a JSON object, which no trained role does either. A tool is declared by name, description
and parameters, as any tool server would; nothing else is known of it to a model. The entries of the
register are drawn by a seed, so nobody can have learnt them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from functools import cache
from typing import Any, Literal

from coa.runs import Json
from coa.tasks.task import Task, TaskSet
from coa.tools.base import Tool, ToolMistake
from coa.tools.functions import tool

UNITS: dict[str, tuple[str, float]] = {
    "kilometres": ("length", 1000.0),
    "metres": ("length", 1.0),
    "miles": ("length", 1609.344),
    "feet": ("length", 0.3048),
    "kilograms": ("mass", 1.0),
    "pounds": ("mass", 0.45359237),
    "ounces": ("mass", 0.028349523125),
    "litres": ("volume", 1.0),
    "gallons": ("volume", 3.785411784),
}
Unit = Literal[
    "kilometres", "metres", "miles", "feet", "kilograms", "pounds", "ounces", "litres", "gallons"
]
Operation = Literal["add", "subtract", "multiply", "divide"]
COLUMNS = ("captain", "cargo", "berth", "fee")
Column = Literal["captain", "cargo", "berth", "fee"]
_SIGNS = {"add": "plus", "subtract": "minus", "multiply": "times", "divide": "divided by"}
_PARTS = (
    "ta",
    "ro",
    "mi",
    "len",
    "vor",
    "ka",
    "shu",
    "bel",
    "no",
    "dri",
    "fa",
    "quin",
    "os",
    "per",
)
_CARGOES = ("tin", "salt", "cedar", "wool", "olives", "slate", "amber", "rice", "copper", "tea")


def make_tasks(n: int, seed: int) -> TaskSet:
    """So many tasks, a quarter for each tool; the same arguments give the same tasks."""
    makers: tuple[Callable[[random.Random, int], Task], ...]
    makers = (_conversion, _calculation, _span, _entry)
    rng = random.Random(f"unseen tools|{seed}")
    made: dict[str, Task] = {}
    while len(made) < n:
        task = makers[len(made) % len(makers)](rng, seed)
        made.setdefault(task.question, task)
    return TaskSet(tuple(made.values()), f"unseen-{seed}")


def tool_of(task: Task) -> Tool:
    """The one tool that a task is offered."""
    return _tool(str(task.meta["tool"]), int(task.meta["seed"]))


def declaration(offered: Tool) -> str:
    """The tool as JSON: name, description, parameters."""
    parameters = json.loads(offered.schema)
    about = offered.about.partition(";")[0]
    return json.dumps({"name": offered.name, "description": about, "parameters": parameters})


@cache
def _tool(name: str, seed: int) -> Tool:
    made: Tool
    if name == "convert":
        made = tool(convert)
    elif name == "calculate":
        made = tool(calculate)
    elif name == "days_between":
        made = tool(days_between)
    else:
        made = tool(_register(seed), name="ship_register")
    return made


# -- the tools -------------------------------------------------------------------------------


def convert(amount: float, source: Unit, target: Unit) -> str:
    """Convert an amount from a source unit to a target unit, with two decimals."""
    (kind, factor), (other, divisor) = UNITS[source], UNITS[target]
    if kind != other:
        raise ToolMistake(f"{source} are a {kind}, {target} a {other}; choose units of one kind.")
    return f"{amount * factor / divisor:.2f}"


def calculate(left: float, operation: Operation, right: float) -> str:
    """Calculate with two numbers."""
    if operation == "divide" and not right:
        raise ToolMistake("right is 0; expected another number to divide by.")
    results = {"add": left + right, "subtract": left - right, "multiply": left * right}
    value = results[operation] if operation in results else left / right
    return _number(value)


def days_between(start: str, end: str) -> str:
    """Count the days from a start date to an end date, both written YYYY-MM-DD."""
    try:
        first, last = date.fromisoformat(start), date.fromisoformat(end)
    except ValueError as wrong:
        raise ToolMistake(f"{wrong}; expected dates as 2024-05-31.") from wrong
    return str((last - first).days)


def _register(seed: int) -> Callable[..., str]:
    entries = _entries(seed)

    def ship_register(ship: str, column: Column) -> str:
        """Look up a column of a ship's entry in the register of the harbour."""
        entry = entries.get(ship.strip().title())
        if entry is None:
            raise ToolMistake(f"the register has no ship {ship!r}.")
        return entry[column]

    return ship_register


@cache
def _entries(seed: int) -> dict[str, dict[str, str]]:
    rng = random.Random(f"register|{seed}")
    entries: dict[str, dict[str, str]] = {}
    while len(entries) < 400:
        values = (
            _name(rng),
            rng.choice(_CARGOES),
            str(rng.randint(1, 400)),
            str(rng.randint(20, 999)),
        )
        entries.setdefault(_name(rng), dict(zip(COLUMNS, values, strict=True)))
    return entries


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(_PARTS, k=rng.randint(2, 3))).title()


def _number(value: float) -> str:
    return str(round(value)) if abs(value - round(value)) < 1e-9 else f"{value:.2f}"


# -- the tasks -------------------------------------------------------------------------------


def _task(name: str, seed: int, question: str, answers: tuple[str, ...], arguments: Json) -> Task:
    meta = {"tool": name, "seed": seed, "family": name}
    return Task(question, answers, id="", meta=meta, gold={"arguments": arguments})


def _conversion(rng: random.Random, seed: int) -> Task:
    source = rng.choice(sorted(UNITS))
    kind = UNITS[source][0]
    target = rng.choice([u for u, (other, _) in UNITS.items() if other == kind and u != source])
    amount = round(rng.uniform(2, 400), 1)
    value = convert(amount, source, target)  # type: ignore[arg-type]
    question = f"How many {target} are {amount} {source}? Give two decimals."
    arguments = {"amount": amount, "source": source, "target": target}
    return _task("convert", seed, question, (value, f"{value} {target}"), arguments)


def _calculation(rng: random.Random, seed: int) -> Task:
    operation = rng.choice(sorted(_SIGNS))
    left, right = rng.randint(120, 9999), rng.randint(12, 999)
    if operation == "divide":
        left *= right
    value = calculate(left, operation, right)  # type: ignore[arg-type]
    arguments = {"left": left, "operation": operation, "right": right}
    return _task(
        "calculate", seed, f"What is {left} {_SIGNS[operation]} {right}?", (value,), arguments
    )


def _span(rng: random.Random, seed: int) -> Task:
    start = date(1990, 1, 1) + timedelta(days=rng.randint(0, 12000))
    end = start + timedelta(days=rng.randint(20, 900))
    value = str((end - start).days)
    question = f"How many days are there from {start} to {end}?"
    arguments = {"start": str(start), "end": str(end)}
    return _task("days_between", seed, question, (value, f"{value} days"), arguments)


def _entry(rng: random.Random, seed: int) -> Task:
    entries = _entries(seed)
    ship, column = rng.choice(sorted(entries)), rng.choice(COLUMNS)
    question = f"In the register of the harbour, what is the {column} of the ship {ship}?"
    arguments = {"ship": ship, "column": column}
    return _task("ship_register", seed, question, (entries[ship][column],), arguments)


def same_arguments(found: Json, wanted: Json) -> bool:
    """Whether a call asks what the task needs; letters may be small or capital, 3 is 3.0."""

    def plain(arguments: Json) -> dict[str, Any]:
        return dict(_plain(arguments))

    return plain(found) == plain(wanted)


def _plain(arguments: Json) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        yield name, value.strip().casefold() if isinstance(value, str) else value
