"""Attempts: tasks rolled out k times each through the one loop, into a file, resumable.

Evaluation, the selection of tasks and the groups of RL are all this. Trajectories are appended as
they finish, so what is killed continues where it was; when all are there they are put in the order
of the tasks, so that the file does not depend on who finished first.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from coa.collect import OnDone, collect
from coa.engines.base import Engine
from coa.engines.store import trained_on
from coa.errors import ConfigError
from coa.protocol import Grammar, PromptKind, load_grammar
from coa.runs import Appender
from coa.runtime import Budget, Decoding, run
from coa.tasks.sets import grammar_for
from coa.tasks.task import Task
from coa.tools.base import Toolbox
from coa.trajectory import StopReason, Trajectory

ToolboxOf = Callable[[Task], Toolbox]


async def attempt_all(
    tasks: Sequence[Task],
    engine: Engine,
    grammar: Grammar,
    toolbox_of: ToolboxOf,
    directory: Path,
    *,
    k: int = 1,
    budget: Budget | None = None,
    decoding: Decoding | None = None,
    concurrency: int = 32,
    on_done: OnDone | None = None,
) -> list[Trajectory]:
    """Roll out every task k times into `directory/trajectories.jsonl`, resuming what is there."""
    with Appender(directory / "timings.jsonl") as timings:

        def note_seconds(trajectory: Trajectory) -> None:
            seconds = {name: round(value, 3) for name, value in trajectory.seconds.items()}
            timings.write({"task_id": trajectory.task_id, "sample": trajectory.sample, **seconds})

        return await attempt(
            ((task, sample) for task in tasks for sample in range(k)),
            engine,
            grammar,
            toolbox_of,
            directory / "trajectories.jsonl",
            budget=budget,
            decoding=decoding,
            concurrency=concurrency,
            on_record=note_seconds,
            on_done=on_done,
        )


async def attempt(
    pairs: Iterable[tuple[Task, int]],
    engine: Engine,
    grammar: Grammar,
    toolbox_of: ToolboxOf,
    path: Path,
    *,
    budget: Budget | None = None,
    decoding: Decoding | None = None,
    concurrency: int = 32,
    again: Callable[[Trajectory], bool] = lambda trajectory: False,
    on_record: Callable[[Trajectory], None] | None = None,
    on_done: OnDone | None = None,
) -> list[Trajectory]:
    """Roll out each task with its sample index into a file; `again` says which of those that are
    there already do not count."""
    decoding = decoding or Decoding()

    def one(task: Task, sample: int) -> Callable[[], Awaitable[Trajectory]]:
        public, chosen = task.public(), replace(decoding, sample=sample)
        return lambda: run(
            public, engine, grammar, toolbox_of(public), budget=budget, decoding=chosen
        )

    def to_repeat(trajectory: Trajectory) -> bool:
        """An interrupted rollout is not a result; every other ending is."""
        return trajectory.stop in (None, StopReason.CANCELLED) or again(trajectory)

    return await collect(
        path,
        {(task.id, sample): one(task, sample) for task, sample in pairs},
        parse=Trajectory.from_json,
        key=lambda trajectory: (trajectory.task_id, trajectory.sample),
        redo=to_repeat,
        concurrency=concurrency,
        on_record=on_record,
        on_done=on_done,
    )


def choose_grammar(grammar: str, model: str, tasks: Sequence[Task] = ()) -> Grammar:
    """The grammar that was asked for; `auto` is the one that the model's adapter was trained on,
    and without an adapter the one that the tasks are made for."""
    known = "+" in model or grammar != "auto"
    return load_grammar(
        _fitting("grammar", grammar, model, "mhqa" if known else grammar_for(tasks))
    )


def choose_prompt(prompt: str, model: str) -> PromptKind:
    """The prompt that was asked for; `auto` is the one that the model's adapter was trained on, and
    the full one for a model without an adapter, which was never trained on the protocol."""
    scripted = "compact" if model.startswith("scripted:") else "full"
    prompt = _fitting("prompt", prompt, model, scripted)
    if prompt not in ("full", "compact"):
        raise ConfigError(f"prompt {prompt!r}: expected full, compact or auto.")
    return "full" if prompt == "full" else "compact"


def _fitting(what: str, asked: str, model: str, otherwise: str) -> str:
    """What was asked for, or for `auto` what the adapter remembers of its training."""
    known = (trained_on(model) if "+" in model else {}).get(what)
    if asked != "auto":
        if known and asked not in ([known] if isinstance(known, str) else known):
            note = f"{model} was trained on {what} {known}, not {asked}: expect malformed turns"
            print(note, file=sys.stderr)
        return asked
    remembered = known or otherwise
    if not isinstance(remembered, str):
        choices = ", ".join(remembered)
        raise ConfigError(f"{model} was trained on several: {choices}. Choose one with --{what}.")
    return remembered
