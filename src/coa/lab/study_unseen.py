"""`coa study unseen-tool`: can a trained model use a tool that it was never trained with?

Nothing is trained here. Each task offers one tool that occurs in no training set, with arguments in
JSON; the untrained base and a trained model (AFM-135M by default) get the same tasks, each with and
without constrained decoding. A model that never saw the tool is told of it in the full prompt of
the grammar, or, a trained model, in the compact one, which has a line for it.

The stages of success are counted apart: a call at all, one whose arguments the tool accepts (after
the repairs that it always makes), one that asks the right thing, and the right answer.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from coa.engines import rollouts_at_once
from coa.engines.base import Engine
from coa.environment import BRIEF, Environment
from coa.errors import ConfigError, ToolMistake
from coa.evaluation.compare import SCORES, SUMMARY
from coa.evaluation.spending import calls_of
from coa.grammar import PromptKind, load_grammar
from coa.io.runs import Json, Run, read_jsonl, write_atomic, write_jsonl
from coa.lab.study_arms import (
    Measurement,
    MeasurePart,
    Note,
    Study,
    StudyPiece,
    Tables,
    lines,
    measure_all,
    reader,
)
from coa.loop import Decoding
from coa.models.bases import BASE
from coa.models.references import identity
from coa.rewards import exact
from coa.rollouts import roll_out_all
from coa.tasks import Task, TaskSet
from coa.tools.arguments import read_arguments
from coa.tools.base import Tool
from coa.tools.functions import tool
from coa.trajectory import Trajectory

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
_PARTS = tuple("ta ro mi len vor ka shu bel no dri fa quin os per".split())
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


@cache
def _tool(name: str, seed: int) -> Tool:
    known: dict[str, Callable[..., str]]
    known = {each.__name__: each for each in (convert, calculate, days_between)}
    made: Tool = tool(known.get(name) or _register(seed))
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

    def plain(value: Any) -> Any:
        return value.strip().casefold() if isinstance(value, str) else value

    return {k: plain(v) for k, v in found.items()} == {k: plain(v) for k, v in wanted.items()}


STAGES = ("called", "valid", "right", "solved")
AGAINST = "base"
PREAMBLE = """You answer a question with the help of a tool. You work as a team of agents that \
share one memory: you think, plan, call the tool, reflect on what it returned, and answer."""
"""Of the prompt, instead of the grammar's own words, which speak of an encyclopedia."""


@dataclass(frozen=True)
class UnseenStudy:
    model: str = "afm-135m"
    base: str = BASE
    grammar: str = "mhqa"
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the tasks: nothing is trained, so there are no other ones."""
    eval: MeasurePart = field(
        default_factory=lambda: MeasurePart(turns=4, turn_tokens=256, malformed=2)
    )
    """A turn has room for all that the constraint lets a model say before its call; with less, the
    budget would end the turns of one that talks, and the constraint could not help it."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds: found {list(self.seeds)}, expected different numbers.")


class Arm(NamedTuple):
    model: str
    prompt: PromptKind
    constrain: bool


def arms(settings: UnseenStudy) -> dict[str, Arm]:
    """The base, the trained model, and it again in the prompt that it was trained on."""
    made: dict[str, Arm] = {}
    for constrain in (False, True):
        more = ", constrained" if constrain else ""
        made[f"base{more}"] = Arm(settings.base, "full", constrain)
        made[f"trained{more}"] = Arm(settings.model, "full", constrain)
        made[f"trained, own prompt{more}"] = Arm(settings.model, "compact", constrain)
    return made


def plan(settings: UnseenStudy) -> list[StudyPiece]:
    n, seeds = settings.eval.n, len(settings.seeds)
    return [
        StudyPiece(f"{n} tasks, base", seeds, n * 0.5),
        StudyPiece(f"{n} tasks, trained", 2 * seeds, n * 0.4),
        StudyPiece(f"{n} tasks, base, constrained", seeds, n * 1.6),
        StudyPiece(f"{n} tasks, trained, constrained", 2 * seeds, n * 0.6),
    ]


def run(settings: UnseenStudy, root: Path, note: Note) -> Json:
    tables, chosen = Tables(), arms(settings)
    tasks = {seed: make_tasks(settings.eval.n, seed) for seed in settings.seeds}
    for model in dict.fromkeys((settings.base, settings.model)):
        note(f"== {model}")
        wanted = [
            _measurement(settings, arm, tasks[seed], _folder(root, name, seed))
            for name, arm in chosen.items()
            for seed in settings.seeds
            if arm.model == model
        ]
        measure_all(model, wanted, settings.eval)
    for stage in STAGES:
        for name in chosen:
            for seed in settings.seeds:
                records = read_jsonl(_folder(root, name, seed) / SCORES)
                found = {str(r["task_id"]): float(r[stage]) for _, r in records}
                tables.put(stage, name, seed, found)
    return {
        "model": settings.model,
        "base": settings.base,
        "measures": tables.compared(AGAINST, rerun=False),
        "constraint": _constraint(tables, chosen),
        "by_tool": _by_tool(root, tasks, chosen),
    }


def _folder(root: Path, arm: str, seed: int) -> Path:
    return root / f"seed-{seed}" / arm.replace(", ", "-").replace(" ", "-")


def _constraint(tables: Tables, chosen: dict[str, Arm]) -> Json:
    """Each arm under the constraint against itself without."""
    pairs = [name for name, arm in chosen.items() if not arm.constrain]
    return {
        name: tables.only([name, f"{name}, constrained"]).compared(name, rerun=False)
        for name in pairs
    }


def _by_tool(root: Path, tasks: dict[int, TaskSet], chosen: dict[str, Arm]) -> Json:
    """Shares of every stage, by arm and tool."""
    tool_by_id = {task.id: str(task.meta["tool"]) for each in tasks.values() for task in each}
    found: Json = {}
    for name in chosen:
        by_tool: dict[str, list[Json]] = {}
        for seed in tasks:
            for _, record in read_jsonl(_folder(root, name, seed) / SCORES):
                by_tool.setdefault(tool_by_id[record["task_id"]], []).append(record)
        found[name] = {
            tool: {stage: round(sum(r[stage] for r in rs) / len(rs), 4) for stage in STAGES}
            | {"n": len(rs)}
            for tool, rs in sorted(by_tool.items())
        }
    return found


# -- one arm ---------------------------------------------------------------------------------


def _measurement(settings: UnseenStudy, arm: Arm, tasks: TaskSet, out: Path) -> Measurement:
    return Measurement(out, lambda engine: asyncio.run(_measure(settings, arm, tasks, out, engine)))


async def _measure(
    settings: UnseenStudy, arm: Arm, tasks: TaskSet, out: Path, engine: Engine
) -> None:
    part = settings.eval
    grammar = replace(load_grammar(settings.grammar), brief=BRIEF, preamble=PREAMBLE)
    recipe: Json = {**arm._asdict(), "grammar": grammar.name, "turns": part.turns}
    recipe |= {"turn_tokens": part.turn_tokens, "context": part.context}
    recipe |= {"malformed": part.malformed, "deterministic": part.deterministic}
    inputs = {"tasks": tasks.fingerprint(), "grammar": grammar.fingerprint()}
    inputs |= identity(arm.model)
    decoding = Decoding(seed=part.seed, prompt=arm.prompt, constrain=arm.constrain)
    with Run.open(out, "unseen-tool", recipe, inputs, part.seed):
        env = Environment("unseen-tool", tools=lambda task: [tool_of(task)], grammar=grammar)
        async with env.open() as opened:
            trajectories = await roll_out_all(
                tasks,
                engine,
                opened,
                out,
                budget=part.budget(),
                decoding=decoding,
                concurrency=rollouts_at_once(engine, part.concurrency),
            )
        records = [judged(task, t) for task, t in zip(tasks, trajectories, strict=True)]
        write_jsonl(out / SCORES, records)
        shares = {stage: sum(r[stage] for r in records) / len(records) for stage in STAGES}
        write_atomic(out / SUMMARY, json.dumps({"n": len(records), **shares}, indent=2) + "\n")


def judged(task: Task, trajectory: Trajectory) -> Json:
    """How far a rollout came. What the grammar refused never reached the tool: it is no call."""
    assert task.id == trajectory.task_id, (task.id, trajectory.task_id)
    offered = tool_of(task)
    schema = json.loads(offered.schema)
    calls, valid = calls_of(trajectory), list[Json]()
    for call in calls:
        with suppress(ToolMistake):
            valid.append(read_arguments(call.body.strip(), schema))
    right = any(same_arguments(found, task.gold["arguments"]) for found in valid)
    return {
        "task_id": task.id,
        "called": bool(calls),
        "valid": bool(valid),
        "right": right,
        "solved": exact(task, trajectory) == 1.0,
        "stop": trajectory.stop,
        "answer": trajectory.answer,
    }


TITLES = {
    "called": "called the tool",
    "valid": "... with arguments that it accepts",
    "right": "... and asked what the task needs",
    "solved": "solved",
}


def show(result: Json) -> Iterable[str]:
    yield f"trained: {result['model']}; base: {result['base']}"
    for stage, found in result["measures"].items():
        yield ""
        yield from lines(TITLES[stage], found)
    for name, measures in result["constraint"].items():
        yield ""
        yield f"what the constraint changes, {name}:"
        for stage, found in measures.items():
            shown = next(iter(found["differences"].values()))
            low, high = shown["ci95"]
            yield f"  {TITLES[stage]:<40}{shown['value']:>+8.1%}  [{low:+.1%}, {high:+.1%}]"
    yield ""
    yield "by tool: called, valid, right, solved"
    for name, by_tool in result["by_tool"].items():
        for named, shares in by_tool.items():
            told = "  ".join(f"{shares[stage]:6.1%}" for stage in STAGES)
            yield f"  {name + ', ' + named:<52}{told}   n = {shares['n']}"


UNSEEN_TOOL = Study(
    "can a trained model use a JSON tool that it never saw, and does a grammar help?",
    reader(UnseenStudy),
    plan,
    run,
    show,
)
