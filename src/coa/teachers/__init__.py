"""Teachers: multi-agent systems whose work is recorded as episodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from coa.collect import OnDone, collect
from coa.config import load_object, load_recipe, to_json
from coa.errors import ConfigError, UsageError, boundary
from coa.tasks.task import Task
from coa.teachers.episode import Episode
from coa.tools.base import Toolbox

__all__ = ["Teacher", "load_teacher", "opened", "read_options", "record_all"]


class Teacher(Protocol):
    """Anything that works on a public task with tools and returns the record of it."""

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode: ...


def load_teacher(reference: str, **options: Any) -> Teacher:
    """`experts`, `llm`, or `module:attribute` for one's own: a Teacher, or a class of one."""
    if reference == "experts":
        from coa.teachers.experts import Experts

        return Experts(**options)
    if reference == "llm":
        from coa.teachers.llm import LLMSettings, LLMTeacher

        if not options.get("model"):
            raise ConfigError("the teacher llm needs a model: model=openai:NAME@URL.")
        return LLMTeacher(load_recipe(None, [], LLMSettings, options))
    if ":" not in reference:
        raise ConfigError(
            f"{reference!r} is not a teacher; expected experts, llm or module:attribute."
        )
    if options:
        raise ConfigError(
            f"teacher {reference!r} takes no settings, found {next(iter(options))!r}."
        )
    teacher = load_object(reference, "teacher")
    teacher = teacher() if isinstance(teacher, type) else teacher
    if not hasattr(teacher, "record"):
        raise ConfigError(f"teacher {reference!r} has no method record(task, toolbox, seed).")
    return teacher  # type: ignore[no-any-return]


def read_options(reference: str, given: Sequence[str]) -> dict[str, Any]:
    """Settings of a teacher from `name=value`, checked; those that were not given are left out."""
    if reference == "experts":
        from coa.teachers.experts import ExpertSettings

        settings = to_json(load_recipe(None, given, ExpertSettings))
    elif reference == "llm":
        from coa.teachers.llm import LLMSettings

        settings = to_json(load_recipe(None, given, LLMSettings, {"model": ""}))
    elif given:
        raise ConfigError(f"teacher {reference!r} takes no settings, found {given[0]!r}.")
    else:
        return {}
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


async def record_all(
    tasks: Sequence[Task],
    teacher: Teacher,
    toolbox_of: Callable[[Task], Toolbox],
    path: Path,
    *,
    seed: int = 0,
    concurrency: int = 8,
    on_done: OnDone | None = None,
) -> list[Episode]:
    """Record every task into `path`, continuing what is there. The teacher never sees gold."""

    def work(task: Task) -> Callable[[], Awaitable[Episode]]:
        public = task.public()

        async def record() -> Episode:
            with boundary(UsageError, f"the teacher, on task {task.id},"):
                return await teacher.record(public, toolbox_of(public), seed)

        return record

    return await collect(
        path,
        {task.id: work(task) for task in tasks},
        parse=Episode.from_json,
        key=lambda episode: episode.task_id,
        concurrency=concurrency,
        on_done=on_done,
    )
