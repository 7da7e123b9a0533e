"""Attempts: tasks rolled out k times each through the one loop, into a file, resumable.

Evaluation, the selection of tasks and the groups of RL are all this. Trajectories are appended as
they finish, so what is killed continues where it was; when all are there they are put in the order
of the tasks, so that the file does not depend on who finished first.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coa.collect import OnDone, collect
from coa.engines.base import Engine
from coa.engines.store import trained_on
from coa.errors import ConfigError, ModelError
from coa.protocol import Grammar, PromptKind, load_grammar
from coa.runs import Appender
from coa.runtime import Budget, Decoding, run
from coa.tasks.sets import DEFAULT_SET, KINDS, grammar_of
from coa.tasks.task import Task
from coa.tools.base import Toolbox
from coa.trajectory import StopReason, Trajectory

ToolboxOf = Callable[[Task], Toolbox]


@dataclass(frozen=True, slots=True)
class Grammars:
    """The grammar that each task is answered in: one for all, or that of the task's set."""

    known: tuple[Grammar, ...]
    references: tuple[str, ...] = ()
    """What tasks call them, where there are several: a preset's name, or a file."""

    def of(self, task: Task) -> Grammar:
        return self.single or self.known[self.references.index(grammar_of(task))]

    @property
    def single(self) -> Grammar | None:
        return self.known[0] if len(self.known) == 1 else None

    def named(self, name: str) -> Grammar:
        """The grammar that a trajectory says it was written in."""
        return self.single or next(found for found in self.known if found.name == name)

    @property
    def names(self) -> str | list[str]:
        """For manifests: one name, or a list of several."""
        found = [grammar.name for grammar in self.known]
        return found[0] if len(found) == 1 else found

    def fingerprint(self) -> str:
        return "+".join(grammar.fingerprint() for grammar in self.known)


async def attempt_all(
    tasks: Sequence[Task],
    engine: Engine,
    grammars: Grammars,
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
            grammars,
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
    grammars: Grammars,
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
            public, engine, grammars.of(task), toolbox_of(public), budget=budget, decoding=chosen
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


def choose_grammars(asked: str, model: str, tasks: Iterable[Task]) -> Grammars:
    """The grammar that was asked for, for all tasks. `auto` is the one that the model's adapter was
    trained on; a model that knows several, or none yet, gets those that the tasks are made for."""
    suited = sorted({grammar_of(task) for task in tasks}) or [KINDS[DEFAULT_SET].grammar]
    known = remembered("grammar", model)
    if asked != "auto":
        _warn("grammar", asked, model, known)
        return Grammars((load_grammar(asked),))
    if len(known) == 1:
        return Grammars((load_grammar(known[0]),))
    if unknown := [name for name in suited if known and name not in known]:
        raise ConfigError(
            f"{model} was trained on the grammars {', '.join(known)}, and the tasks are made for "
            f"{unknown[0]}. Choose one with --grammar."
        )
    loaded = tuple(map(load_grammar, suited))
    for name, count in Counter(grammar.name for grammar in loaded).items():
        if count > 1:  # trajectories say theirs by its name
            raise ConfigError(
                f"the tasks are made for {count} grammars that are called {name}. "
                "Rename one in its file, or choose one for all with --grammar."
            )
    return Grammars(loaded, tuple(suited))


def choose_grammar(asked: str, model: str) -> Grammar:
    """The grammar for a single question, which belongs to no set."""
    known = remembered("grammar", model)
    if asked == "auto" and len(known) > 1 and KINDS[DEFAULT_SET].grammar not in known:
        choices = ", ".join(known)
        raise ConfigError(f"{model} was trained on several: {choices}. Choose one with --grammar.")
    return choose_grammars(asked, model, ()).known[0]


def choose_prompt(asked: str, model: str) -> PromptKind:
    """The prompt that was asked for; `auto` is the one that the model's adapter was trained on, and
    the full one for a model without an adapter, which was never trained on the protocol."""
    known = remembered("prompt", model)
    if asked != "auto":
        _warn("prompt", asked, model, known)
    elif len(known) > 1:
        choices = ", ".join(known)
        raise ConfigError(f"{model} was trained on several: {choices}. Choose one with --prompt.")
    else:
        scripted = "compact" if model.startswith("scripted:") else "full"
        asked = known[0] if known else scripted
    if asked not in ("full", "compact"):
        raise ConfigError(f"prompt {asked!r}: expected full, compact or auto.")
    return "full" if asked == "full" else "compact"


def remembered(what: str, model: str) -> list[str]:
    """What the model's adapter remembers of its training; nothing when there is none."""
    try:
        known = trained_on(model).get(what) or []
    except ModelError:  # loading it reports what is wrong, and a caller may have an engine
        return []
    return [known] if isinstance(known, str) else list(known)


def _warn(what: str, asked: str, model: str, known: list[str]) -> None:
    if known and asked not in known:
        listed = ", ".join(known)
        note = f"{model} was trained on {what} {listed}, not {asked}: expect malformed turns"
        print(note, file=sys.stderr)
