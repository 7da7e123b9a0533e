"""format: whether a chain keeps to its grammar, and its programs to their fences.

Binary, as the paper multiplies it: the whole text is legal, no turn was malformed, it ends with an
answer, and every program stands in one ```py fence, followed by nothing but one ```sh fence with
its input. Graded: the share of turns that keep to all this, of which the answer counts as one more
when it is missing. What a budget cut has no answer, so it is not well formed either.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from coa.grammar import Block, Fault, Grammar, GrammarState, check, parse
from coa.rewards.scored import Checker, Part
from coa.tasks import Task
from coa.trajectory import Trajectory

_FENCED = re.compile(
    r"\s*```(?:py|python)[ \t]*\n(?:(?!```).)*?\n[ \t]*```"
    r"(?:\s*```sh[ \t]*\n(?:(?!```).)*?\n?[ \t]*```)?\s*",
    re.S,
)
NOT_FENCED = "a program is not in a ```py fence, with at most a ```sh fence after it"


@dataclass(frozen=True)
class FormatSettings:
    """What counts as well formed; see docs/rewards.md."""

    graded: bool = False
    """The share of turns that are well formed; otherwise 1 or 0."""
    fences: bool = True
    """Programs must stand in fences."""


@asynccontextmanager
async def open_format(settings: FormatSettings) -> AsyncIterator[Checker]:
    async def judge(task: Task, trajectory: Trajectory) -> Part:
        return check_format(trajectory, settings)

    yield judge


def check_format(trajectory: Trajectory, settings: FormatSettings | None = None) -> Part:
    """How well formed a trajectory is."""
    settings = settings or FormatSettings()
    if not trajectory.steps:  # what has ended so has no answer either
        return Part(None if trajectory.stop is None else 0.0, "the model wrote nothing")
    bound = trajectory.protocol
    if settings.graded:
        return _graded(trajectory, bound, settings.fences)
    parsed = parse(bound, trajectory.text, env=True)
    fault = check(bound, parsed)
    if fault is not None:
        return Part(0.0, fault.message)
    if trajectory.usage.malformed:
        return Part(0.0, f"{trajectory.usage.malformed} malformed turns")
    if settings.fences and not all(_is_fenced(bound, block) for block in parsed.blocks):
        return Part(0.0, NOT_FENCED)
    return Part(1.0)


def _graded(trajectory: Trajectory, grammar: Grammar, fences: bool) -> Part:
    faults = list(_faults(trajectory, grammar, fences))
    first = next((f"turn {n}: {fault}" for n, fault in enumerate(faults, 1) if fault), "")
    return Part(1.0 - sum(map(bool, faults)) / len(faults), first)


def _faults(trajectory: Trajectory, grammar: Grammar, fences: bool) -> Iterator[str]:
    """What is wrong with each turn, empty where nothing is; one more when no turn answers."""
    state = GrammarState()
    for step in trajectory.steps:
        parsed = parse(grammar, step.model.text)
        fault = parsed.faults[0] if parsed.faults else None
        for block in parsed.blocks:
            if fault is not None and fault.at < block.end:
                break
            moved = grammar.advance(state, block)
            if isinstance(moved, Fault):
                fault = moved
                break
            state = moved
        wrong = fault.message if fault else ""
        if not wrong and not (state.awaiting or state.done):
            wrong = "it ends without a call or an answer"
        if not wrong and fences and not all(_is_fenced(grammar, b) for b in parsed.blocks):
            wrong = NOT_FENCED
        yield wrong
        if step.observation is not None:
            moved = grammar.advance(state, Block(grammar.observation, ""))
            assert isinstance(moved, GrammarState), moved
            state = moved
    if not state.done:
        yield "the answer is missing"


def _is_fenced(grammar: Grammar, block: Block) -> bool:
    role = grammar.by_name.get(block.role)
    return role is None or role.body != "code" or bool(_FENCED.fullmatch(block.body))
