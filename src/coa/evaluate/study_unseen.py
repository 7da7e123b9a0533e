"""`coa study unseen-tool`: can a trained model use a tool that it was never trained with?

Nothing is trained here. Each task offers one tool that occurs in no training set, with arguments in
JSON; the untrained base and a trained model (AFM-135M by default) get the same tasks, each with and
without constrained decoding. A model that never saw the tool must be told of it: in the full prompt
of the grammar, or, for a trained model whose own prompt is the compact one, in the question.

The stages of success are counted apart: a call at all, one whose arguments the tool accepts (after
the repairs that it always makes), one that asks the right thing, and the right answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from coa.engines import rollouts_at_once
from coa.engines.base import Engine
from coa.engines.store import BASE, identity
from coa.environment import Environment
from coa.errors import ConfigError, ToolMistake
from coa.evaluate.run import SCORES, SUMMARY
from coa.evaluate.spending import calls_of
from coa.evaluate.study_arms import (
    Measurement,
    MeasurePart,
    Note,
    Piece,
    measure_all,
)
from coa.evaluate.study_pooled import Tables, lines
from coa.evaluate.study_unseen_tools import declaration, make_tasks, same_arguments, tool_of
from coa.protocol import PromptKind, load_grammar
from coa.rewards import exact
from coa.rollouts import roll_out_all
from coa.runs import Json, Run, read_jsonl, write_atomic, write_jsonl
from coa.runtime import Decoding
from coa.tasks.task import Task, TaskSet
from coa.tools.arguments import read_arguments
from coa.trajectory import Trajectory

QUESTION = "can a trained model use a JSON tool that it never saw, and does a grammar help?"
STAGES = ("called", "valid", "right", "solved")
AGAINST = "base"
PREAMBLE = """You answer a question with the help of a tool. You work as a team of agents that \
share one memory: you think, plan, call the tool, reflect on what it returned, and answer."""
"""Of the full prompt, instead of the grammar's own, which speaks of an encyclopedia."""


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
    in_question: bool = False
    """Whether the tool is declared in the question."""


def arms(settings: UnseenStudy) -> dict[str, Arm]:
    """The base, the trained model, and it again in the prompt that it was trained on."""
    made: dict[str, Arm] = {}
    for constrain in (False, True):
        more = ", constrained" if constrain else ""
        made[f"base{more}"] = Arm(settings.base, "full", constrain)
        made[f"trained{more}"] = Arm(settings.model, "full", constrain)
        made[f"trained, own prompt{more}"] = Arm(settings.model, "compact", constrain, True)
    return made


def plan(settings: UnseenStudy) -> list[Piece]:
    n, seeds = settings.eval.n, len(settings.seeds)
    return [
        Piece(f"{n} tasks, base", seeds, n * 0.5),
        Piece(f"{n} tasks, trained", 2 * seeds, n * 0.4),
        Piece(f"{n} tasks, base, constrained", seeds, n * 1.6),
        Piece(f"{n} tasks, trained, constrained", 2 * seeds, n * 0.6),
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
    part, grammar = settings.eval, load_grammar(settings.grammar)
    if arm.prompt == "full":
        grammar = replace(grammar, preamble=PREAMBLE)
    offered = TaskSet(tuple(map(with_declaration, tasks)), tasks.name) if arm.in_question else tasks
    recipe: Json = {**arm._asdict(), "grammar": grammar.name, "turns": part.turns}
    recipe |= {"turn_tokens": part.turn_tokens, "context": part.context}
    recipe |= {"malformed": part.malformed, "deterministic": part.deterministic}
    inputs = {"tasks": offered.fingerprint(), "grammar": grammar.fingerprint()}
    inputs |= identity(arm.model)
    decoding = Decoding(seed=part.seed, prompt=arm.prompt, constrain=arm.constrain)
    with Run.open(out, "unseen-tool", recipe, inputs, part.seed):
        env = Environment("unseen-tool", tools=lambda task: [tool_of(task)], grammar=grammar)
        async with env.open() as opened:
            trajectories = await roll_out_all(
                offered,
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


def with_declaration(task: Task) -> Task:
    """The task with its tool declared in the question, under the same id."""
    question = f"{task.question}\nTool: {declaration(tool_of(task))}"
    return replace(task, question=question)


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
        for tool, shares in by_tool.items():
            told = "  ".join(f"{shares[stage]:6.1%}" for stage in STAGES)
            yield f"  {name + ', ' + tool:<52}{told}   n = {shares['n']}"
