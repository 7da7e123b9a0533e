"""`coa init` and `coa check`: a small environment that runs, and what an environment amounts to.

A check finds before hours of rollouts what would otherwise be found after them: it loads the tasks,
opens the tools, writes one whole prompt, and asks the reward about a trajectory without an answer
and about one with the gold answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from coa.environment import (
    SPLITS,
    Environment,
    OpenEnvironment,
    ToolSettings,
    open_environments,
    remarks,
)
from coa.grammar import system_prompt
from coa.io.files import new_folder
from coa.io.runs import Json
from coa.rewards import RewardSettings
from coa.tasks import Task, TaskSet
from coa.trajectory import StopReason, Trajectory

_ENDING = ".txt"
"""Of the starter's files inside the package, where they are content and no modules."""


def write_starter(folder: Path) -> list[Path]:
    """Write a small environment that runs into a new or empty folder."""
    new_folder(folder)
    made = []
    for each in sorted(resources.files("coa").joinpath("starter").iterdir(), key=lambda e: e.name):
        if each.name.endswith(_ENDING):
            path = folder / each.name.removesuffix(_ENDING)
            path.write_text(each.read_text(encoding="utf-8"), encoding="utf-8")
            made.append(path)
    return made


@dataclass(frozen=True)
class Checked:
    """What an environment amounts to."""

    name: str
    reference: str
    grammar: str
    fingerprints: dict[str, str]
    tasks: dict[str, int]
    """By split."""
    unanswerable: int
    """Tasks that have neither an answer nor other gold."""
    tools: list[Json]
    prompt: str
    """The whole prompt of a question, as a model that was never trained on the grammar gets it."""
    question: str
    reward: str
    unanswered: float | None
    """What the reward says of a trajectory that has no answer."""
    gold: float | None
    """What it says of one with the gold answer and no work; None: there is none, or it cannot."""
    state: str
    """The type of what `setup` makes; empty: there is no setup."""
    remarks: list[str]
    """What somebody should know before its tasks are worked on."""

    def to_json(self) -> Json:
        return dict(vars(self))

    def lines(self) -> Iterator[str]:
        yield f"environment  {self.name}" + (f" ({self.reference})" if self.reference else "")
        counts = ", ".join(f"{count} {split}" for split, count in self.tasks.items())
        yield f"tasks        {counts or 'none of its own'}"
        if self.unanswerable:
            yield (
                f"             {self.unanswerable} of them have neither an answer nor other gold: "
                "only a reward of your own that needs none can judge them"
            )
        yield f"grammar      {self.grammar}"
        for tool in self.tools:
            yield f"tool         {tool['name']}: {tool['about']}"
        if self.state:
            yield f"state        {self.state}, made anew for each rollout"
        said = f"{_shown(self.unanswered)} without an answer"
        said += f", {_shown(self.gold)} for the gold answer alone" if self.question else ""
        yield f"reward       {self.reward}: {said}"
        yield from (f"note         {line}" for line in self.remarks)
        prints = ", ".join(f"{name} {value[:12]}" for name, value in self.fingerprints.items())
        yield f"fingerprints {prints}"
        yield "prompt"
        yield from (f"  | {line}" for line in self.prompt.splitlines())
        if self.question:
            yield f"  question: {self.question}"


def _shown(score: float | None) -> str:
    return "not judged" if score is None else f"{score:g}"


def check_environment(env: Environment) -> Checked:
    """Load, open and try an environment; what is wrong with it is a CoaError."""
    return asyncio.run(_check(env))


async def _check(env: Environment) -> Checked:
    tasks: dict[str, TaskSet] = {}
    if env.tasks is not None:
        named = [
            split for split in SPLITS if not isinstance(env.tasks, Mapping) or split in env.tasks
        ]
        tasks = {split: env.load_tasks(split) for split in named}
    every = [task for own in tasks.values() for task in own]
    task = every[0] if every else Task("What would you like to know?")
    some = [each for own in tasks.values() for each in own[:20]] or [task]
    async with open_environments((env,), some) as opened:
        await opened.open_rewards(RewardSettings(), every)
        bound = await opened.bound(task.public())
        box = await opened.toolbox(task.public())
        async with opened.session(task.public()) as session:
            state = session.state
            unanswered = await _score(opened, task, None, state)
            gold = await _score(opened, task, task.answers[0], state) if task.answers else None
        inputs = opened.inputs()
        return Checked(
            name=env.name,
            reference=env.reference,
            grammar=env.value().name,
            fingerprints={
                "grammar": inputs["grammar"],
                "binding": inputs["binding"],
                **({"code": code} if (code := env.code()) else {}),
            },
            tasks={split: len(own) for split, own in tasks.items()},
            unanswerable=sum(not (each.answers or each.gold) for each in every),
            tools=[
                {
                    "name": each.name,
                    "about": each.about,
                    "body": each.body,
                    "schema": json.loads(each.schema) if each.schema else None,
                }
                for each in box.values()
            ],
            prompt=system_prompt(bound, "full"),
            question=task.question if tasks else "",
            reward=opened.reward_name,
            unanswered=unanswered,
            gold=gold,
            state=type(state).__name__ if env.setup is not None else "",
            remarks=list(remarks((env,), every, ToolSettings())),
        )


async def _score(
    opened: OpenEnvironment, task: Task, answer: str | None, state: Any
) -> float | None:
    """What the reward says of a trajectory that is an answer and nothing else, or not even that."""
    made = Trajectory(
        task.id,
        task.question,
        opened.of(task).value().name,
        answer=answer,
        stop=StopReason.ANSWERED if answer else StopReason.TURNS,
        book=opened.grammars,
    )
    return (await opened.reward_of(task).score(task, made, state)).score
