"""The planner of the coding team: which kind of problem a question is, from its words alone."""

from __future__ import annotations

from dataclasses import replace

from coa.environments.gym.dates import DATES, GEOMETRY
from coa.environments.gym.grids import GRIDS
from coa.environments.gym.numbers import NUMBERS
from coa.environments.gym.plans import ProgramPlan, Recogniser
from coa.environments.gym.puzzles import PUZZLES
from coa.environments.gym.texts import TEXTS

LONGEST_QUESTION = 4000
"""Characters; what is longer is not one of ours, and patterns take their time over it."""
RECOGNISERS: tuple[Recogniser, ...] = (*NUMBERS, *GEOMETRY, *DATES, *TEXTS, *GRIDS, *PUZZLES)
KINDS: tuple[str, ...] = tuple(dict.fromkeys(each.kind for each in RECOGNISERS))
"""Generators whose problems the team solves."""


def plan_for(question: str) -> ProgramPlan | None:
    """The planner's plan and the coder's program for a question; None when it is of no known
    kind."""
    text = question.strip()
    if len(text) > LONGEST_QUESTION:
        return None
    for recogniser in RECOGNISERS:
        match = recogniser.pattern.fullmatch(text)
        plan = recogniser.build(match) if match else None
        if plan is not None:
            return replace(plan, kind=recogniser.kind)
    return None
