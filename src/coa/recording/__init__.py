"""Teachers: multi-agent systems whose work is recorded as episodes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from inspect import isawaitable
from pathlib import Path
from typing import Any, Protocol

from coa.errors import ConfigError, RecordError, UsageError, boundary
from coa.io.settings import load_object, load_recipe, read_pairs, to_json
from coa.io.workers import shortened
from coa.recording.episode import Episode
from coa.tasks import Task
from coa.tools.base import Toolbox

__all__ = ["Teacher", "load_teacher", "opened", "read_options", "recorded"]


class Teacher(Protocol):
    """Anything that works on a public task with tools and returns the record of it."""

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode: ...


def _shipped() -> Any:
    """What is shipped with the environments, loaded when it is asked for."""
    return import_module("coa.environments")


def load_teacher(reference: Any, **options: Any) -> Teacher:
    """`experts`, `llm`, or `module:attribute` for one's own: a Teacher, or a class of one, to which
    options are arguments. A value is taken as such."""
    if not isinstance(reference, str):
        return _own(reference, getattr(reference, "__name__", type(reference).__name__), options)
    if reference in _shipped().TEACHERS:
        teacher: Teacher = _shipped().shipped_teacher(reference)(**options)
        return teacher
    if reference == "llm":
        from coa.recording.llm import LLMSettings, LLMTeacher

        if not options.get("model"):
            raise ConfigError("the teacher llm needs a model: model=openai:NAME@URL.")
        return LLMTeacher(load_recipe(None, [], LLMSettings, options))
    if ":" not in reference:
        raise ConfigError(
            f"{reference!r} is not a teacher; expected experts, llm or module:attribute."
        )
    return _own(load_object(reference, "teacher"), reference, options)


def _own(teacher: Any, reference: str, options: dict[str, Any]) -> Teacher:
    if isinstance(teacher, type):
        with boundary(ConfigError, f"making the teacher {reference!r}", located=True):
            teacher = teacher(**options)
    elif options:
        raise ConfigError(
            f"teacher {reference!r} is no class, so it takes no settings; found "
            f"{next(iter(options))!r}."
        )
    if not hasattr(teacher, "record"):
        raise ConfigError(f"teacher {reference!r} has no method record(task, toolbox, seed).")
    return teacher  # type: ignore[no-any-return]


def read_options(reference: str, given: Sequence[str]) -> dict[str, Any]:
    """Settings of a teacher from `name=value`, checked; those that were not given are left out."""
    if reference in _shipped().TEACHERS:
        settings = to_json(load_recipe(None, given, _shipped().teacher_settings(reference)))
    elif reference == "llm":
        from coa.recording.llm import LLMSettings

        settings = to_json(load_recipe(None, given, LLMSettings, {"model": ""}))
    else:  # what its class makes of them is its own affair
        return read_pairs(given)
    named = {text.partition("=")[0].partition(".")[0].strip() for text in given}
    return {name: value for name, value in settings.items() if name in named}


@asynccontextmanager
async def opened(teacher: Teacher, out: Path | None) -> AsyncIterator[Teacher]:
    """The teacher, opened beside the file it records into where it wants that."""
    if out is None or not hasattr(teacher, "opened"):
        yield teacher
        return
    async with teacher.opened(out) as ready:
        yield ready


async def recorded(teacher: Teacher, task: Task, toolbox: Toolbox, seed: int) -> Episode:
    """One episode, checked as a file of them will be: what `coa distill` could not read is found
    at the first task, and not after all of them."""
    who = f"the teacher, on task {task.id},"
    with boundary(UsageError, who, located=True):
        made: Any = teacher.record(task, toolbox, seed)
        episode = await made if isawaitable(made) else made
    if not isinstance(episode, Episode):
        raise UsageError(f"{who} returned a {type(episode).__name__}, expected its Episode.")
    if episode.task_id != task.id:
        other = f"the episode of task {episode.task_id!r}"
        raise UsageError(f"{who} returned {other}, expected its Episode.")
    try:
        Episode.from_json(json.loads(json.dumps(episode.to_json())))
    except (RecordError, TypeError, ValueError) as wrong:
        raise UsageError(f"{who} returned an Episode that cannot be read back: {wrong}") from None
    if not task.is_asked_by(episode.question):
        raise UsageError(
            f"{who} returned an Episode about {shortened(episode.question)!r}, expected its "
            f"question, {shortened(task.question)!r}."
        )
    return episode
