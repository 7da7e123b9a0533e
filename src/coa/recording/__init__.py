"""Teachers: multi-agent systems whose work is recorded as episodes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from coa.errors import ConfigError, boundary
from coa.io.plugins import load_object
from coa.io.settings import load_recipe, read_pairs, to_json
from coa.recording.episode import Episode
from coa.tasks import Task
from coa.tools.base import Toolbox

__all__ = ["Teacher", "load_teacher", "read_options"]


class Teacher(Protocol):
    """Anything that works on a public task with tools and returns the record of it.

    It may also have `opened(out)`, `identity()` and `estimate(tasks, tools_of)`; see
    docs/teachers.md.
    """

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode: ...


def load_teacher(reference: Any, **options: Any) -> Teacher:
    """`experts`, `llm`, or `module:attribute` for one's own: a Teacher, or a class of one, to which
    options are arguments. A value is taken as such."""
    teacher, name = reference, reference
    if not isinstance(reference, str):
        name = getattr(reference, "__name__", type(reference).__name__)
    elif reference == "llm":
        from coa.recording.llm import LLMSettings, LLMTeacher

        if not options.get("model"):
            raise ConfigError("the teacher llm needs a model: model=openai:NAME@URL.")
        return LLMTeacher(load_recipe(None, [], LLMSettings, options))
    elif reference in _shipped().TEACHERS:
        teacher = _shipped().shipped_teacher(reference)
    elif ":" in reference:
        teacher = load_object(reference, "teacher")
    else:
        expected = "expected experts, llm or module:attribute"
        raise ConfigError(f"{reference!r} is not a teacher; {expected}.")
    if isinstance(teacher, type):
        with boundary(ConfigError, f"making the teacher {name!r}", located=True):
            teacher = teacher(**options)
    elif options:
        expected = "is no class, so it takes no settings"
        raise ConfigError(f"teacher {name!r} {expected}; found {next(iter(options))!r}.")
    if not hasattr(teacher, "record"):
        raise ConfigError(f"teacher {name!r} has no method record(task, toolbox, seed).")
    return teacher  # type: ignore[no-any-return]


def read_options(reference: str, given: Sequence[str]) -> dict[str, Any]:
    """Settings of a teacher from `name=value`, checked; those that were not given are left out."""
    schema: Any
    if reference == "llm":
        from coa.recording.llm import LLMSettings

        schema = LLMSettings
    elif reference in _shipped().TEACHERS:
        schema = _shipped().teacher_settings(reference)
    else:  # what its class makes of them is its own affair
        return read_pairs(given)
    named = {text.partition("=")[0].partition(".")[0].strip() for text in given}
    settings = to_json(load_recipe(None, given, schema))
    return {name: value for name, value in settings.items() if name in named}


def _shipped() -> Any:
    """What is shipped with the environments, loaded when it is asked for."""
    return import_module("coa.environments")
