"""Scripted model files: what the experts would have said, as the turns of one model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from coa.distillation.convert import convert
from coa.distillation.dataset import Distilled, Distilling, run_distillation
from coa.environments.atlas.pages import any_corpus
from coa.environments.experts import Experts
from coa.errors import UsageError
from coa.grammar import load_grammar
from coa.io.runs import dumps, read_jsonl
from coa.recording.episode import Episode, load_episodes
from coa.recording.record import Recording, run_recording
from coa.tasks import Task, TaskSet
from coa.tools.base import Toolbox
from coa.tools.web import CorpusSource, crawl_page, web_search, wiki_search


def TOOLBOX_OF(task: Task) -> Toolbox:
    """What the set of a task searches the Atlas of its world with: pages, or passages."""
    held = any_corpus(f"atlas:{task.meta.get('world', 0)}")
    if task.meta.get("set") == "atlas-web":
        source = CorpusSource(held)
        return Toolbox([web_search(source), crawl_page(source, focus=task.question)])
    return Toolbox([wiki_search(held)])


def episodes_of(tasks: Iterable[Task], teacher: Experts | None = None) -> list[Episode]:
    """What the experts record, without mistakes unless another team is given."""
    team = teacher or Experts(error_rate=0.0, false_alarm_rate=0.0)

    async def record() -> list[Episode]:
        return [await team.record(task.public(), TOOLBOX_OF(task)) for task in tasks]

    return asyncio.run(record())


def record_into(path: Path, tasks: Iterable[Task], **how: Any) -> list[Episode]:
    """What `coa record` writes of tasks, by way of a file of them beside it."""
    file = path.with_name(f"{path.name}.tasks")
    TaskSet(tuple(tasks)).save(file)
    run_recording(Recording(tasks=file, workers=1, **how), path)
    return load_episodes(path)


def distil(
    folder: Path, episodes: Iterable[Episode], tasks: Iterable[Task] | None = None, **how: Any
) -> Distilled:
    """What `coa distill` makes of episodes, by way of files in a new folder; without tasks nothing
    is judged. That nothing is kept is a result here, too."""
    folder.mkdir(parents=True)
    given, out = folder / "episodes.jsonl", folder / "dataset"
    given.write_text("".join(dumps(episode.to_json()) + "\n" for episode in episodes))
    gold = None
    if tasks is not None:
        gold = folder / "tasks.jsonl"
        TaskSet(tuple(tasks)).save(gold)
    try:
        return run_distillation(Distilling(given, gold, workers=1, **how), out)
    except UsageError as error:
        if not str(error).startswith("no episode was kept"):
            raise
    rejected = [record for _, record in read_jsonl(out / "rejected.jsonl")]
    return Distilled([], rejected, json.loads((out / "funnel.json").read_text()))


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
