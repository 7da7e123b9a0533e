"""Scripted model files: what the experts would have said, as the turns of one model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from coa.distill.convert import convert
from coa.protocol import load_grammar
from coa.tasks.task import Task
from coa.teachers.episode import Episode
from coa.teachers.experts import Experts
from coa.tools.kits import toolbox_for

TOOLBOX_OF = toolbox_for()


def episodes_of(tasks: Iterable[Task], teacher: Experts | None = None) -> list[Episode]:
    """What the experts record, without mistakes unless another team is given."""
    team = teacher or Experts(error_rate=0.0, false_alarm_rate=0.0)

    async def record() -> list[Episode]:
        return [await team.record(task.public(), TOOLBOX_OF(task)) for task in tasks]

    return asyncio.run(record())


def texts_of(episode: Episode, place: int) -> list[str]:
    """The texts that the model call at a place was given."""
    return [message.text for message in episode.messages_of(place)]


def turns_of(tasks: Iterable[Task], grammar: str = "mhqa") -> dict[str, list[str]]:
    """Question -> the turns that answer it."""
    bound = TOOLBOX_OF(Task("any")).bind(load_grammar(grammar))
    chains = [convert(episode, bound) for episode in episodes_of(tasks)]
    return {chain.question: [step.model.text for step in chain.steps] for chain in chains}


def write_script(path: Path, tasks: Sequence[Task], grammar: str = "mhqa") -> Path:
    """A file for `--model scripted:FILE` that answers every task as the experts do."""
    lines = [{"question": q, "turns": turns} for q, turns in turns_of(tasks, grammar).items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
