"""The shipped model at work before anything is trained: a held-out question of each kind.

One engine answers all; the chains are shown as they are written, the right answer after each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from coa.asking import answer
from coa.display import LABEL, console, harmless
from coa.engines import load_engine
from coa.engines.store import OURS, trained_on
from coa.environment import load_environment, open_environments
from coa.errors import MissingExtra
from coa.models.card import listed
from coa.rollouts import choose_environments, choose_prompt
from coa.runtime import Budget, Decoding
from coa.tasks import make_tasks
from coa.tasks.sets import ATLAS_WEB, DEFAULT_SET, GYM
from coa.tasks.task import Task, TaskSet
from coa.tools.sandbox import SandboxError
from coa.trajectory import Trajectory

ASKED = ((DEFAULT_SET, "heldout_entity"), (ATLAS_WEB, "heldout_entity"), (GYM, "heldout_seed"))
SEED = 12
"""Decides which questions; chosen before any answer to them was looked at."""
CONTEXT = 3072
BUDGET = Budget(turns=10, turn_tokens=512, context=CONTEXT)


def answer_questions(
    note: Callable[[str], None],
    model: str = OURS,
    tasks: Sequence[Task] = (),
    budget: Budget = BUDGET,
) -> list[Trajectory]:
    """Answer tasks on the terminal, by default one of each kind that the model knows and this
    machine can run."""
    chosen = tasks or list(_one_of_each_kind(note, model))
    try:
        return asyncio.run(_answer_all(chosen, model, budget))
    except SandboxError as reason:  # it is opened before the first question
        note(f"no question for programs: {reason}")
        without = [task for task in chosen if task.meta.get("set") != GYM]
        return asyncio.run(_answer_all(without, model, budget))


def _one_of_each_kind(note: Callable[[str], None], model: str) -> Iterator[Task]:
    known = listed(trained_on(model).get("grammar"))
    for name, split in ASKED:
        if load_environment(name).value().name not in known:
            continue
        try:
            yield make_tasks(name, split, 1, SEED)[0]
        except MissingExtra as reason:
            note(f"no question of {name}: {reason}")


async def _answer_all(tasks: Sequence[Task], model: str, budget: Budget) -> list[Trajectory]:
    if not tasks:
        return []
    answered, out = [], console()
    environments, known = choose_environments((), TaskSet(tuple(tasks)), model=model)
    decoding = Decoding(prompt=choose_prompt("auto", model))
    async with open_environments(environments, known) as opened:
        engine = load_engine(model, slots=1, context=CONTEXT)
        try:
            for task in known:
                out.print(f"{'question':>{LABEL}}  {harmless(task.question)}", style="bold")
                answered.append(await answer(task, engine, opened, decoding, budget, out))
                right = harmless(" | ".join(task.answers))  # which nobody knew until this line
                out.print(f"{'right is':>{LABEL}}  {right}\n", style="bold")
        finally:
            await engine.close()
    return answered
