"""The environments that are shipped: content, which only `load_environment` and the command line
reach, and only when it is asked for.

Each is made by a function of its settings, in a module of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from coa.environment import Environment, ToolSettings, environment_name, load_environment
from coa.errors import ConfigError
from coa.tasks.task import Task, TaskSet
from coa.tools.sources import CorpusTools

SEARCH = "search"
_MODULES = {
    SEARCH: ("search", "search"),
    "atlas-mhqa": ("atlas", "atlas"),
    "atlas-reworded": ("atlas", "atlas"),
    "atlas-wide": ("atlas", "atlas"),
    "atlas-web": ("atlas", "atlas"),
    "atlas-code": ("atlas", "atlas"),
    "gym-code": ("gym", "gym"),
}
NAMES = tuple(_MODULES)
SETS = tuple(name for name in NAMES if name != SEARCH)
"""Those that make tasks."""
BY_GRAMMAR = {"mhqa": "atlas-mhqa", "web": "atlas-web", "code": "gym-code", "afm": "atlas-code"}
"""Where a model that was trained on a grammar is at home."""


def maker(name: str) -> Callable[..., Environment]:
    """The function of settings that makes a shipped environment."""
    module, function = _MODULES[name]
    made = getattr(import_module(f"{__name__}.{module}"), function)
    return made if name == SEARCH else partial(made, name)


def make_tasks(
    name: str,
    split: str,
    n: int,
    seed: int,
    *,
    world_seed: int = 0,
    families: Sequence[str] | None = None,
) -> TaskSet:
    """Make `n` tasks of a set; the same arguments give the same tasks."""
    from coa.tasks import make_tasks as make

    return make(name, split, n, seed, world_seed=world_seed, families=families)


def home_of(task: Task) -> tuple[str, dict[str, str]]:
    """The shipped environment that a task of a file belongs to, and its settings.

    A task of a set names it. Others, a table of one's own or a benchmark's, are questions for
    `search`. A task that names a grammar is answered in it.
    """
    name = str(task.meta.get("set", SETS[0] if "world" in task.meta else SEARCH))
    grammar = str(task.meta.get("grammar") or "")
    return name if name in SETS else SEARCH, {"grammar": grammar} if grammar else {}


def at_home(tasks: TaskSet, **settings: Any) -> tuple[tuple[Environment, ...], TaskSet]:
    """The shipped environments of tasks that a file holds, and the tasks, each of which names its
    own where there are several. A `grammar` among the settings stands in for what tasks name."""
    homes = {task.id: home_of(task) for task in tasks}
    if settings.get("grammar"):
        homes = {known: (name, {}) for known, (name, _) in homes.items()}
    alone = len({name for name, _ in homes.values()}) == 1
    made: dict[str, Environment] = {}
    named: list[Task] = []
    for task in tasks:
        name, own = homes[task.id]
        key = f"{name} {own.get('grammar', '')}".strip()
        if key not in made:
            given = {k: v for k, v in settings.items() if alone or takes(name, k)}
            env = load_environment(name, **{**own, **given})
            made[key] = replace(env, name=key.replace(" ", ":"))
        env = made[key]
        known = environment_name(task) == env.name
        named.append(task if known else replace(task, meta={**task.meta, "environment": env.name}))
    if not made:
        made[SEARCH] = load_environment(SEARCH, **settings)
    if len(made) == 1:
        return tuple(made.values()), tasks
    for name in settings:
        if not any(takes(each.partition(" ")[0], name) for each in made):
            raise ConfigError(f"none of {', '.join(made)} has a setting {name!r}.")
    return tuple(made.values()), TaskSet(tuple(named), tasks.name)


def atlas_by_default(
    tasks: Iterable[Task], environments: Sequence[Environment], tools: ToolSettings
) -> str:
    """A line on tasks of other sets, a benchmark's for instance, whose tools look into the Atlas
    because nobody named a corpus; empty where there are none."""
    if tools.mode == "replay" or tools.observations != "real":
        return ""
    by_name = {env.name: env for env in environments}
    found: dict[tuple[str, str], bool] = {}
    for task in tasks:
        env = by_name.get(environment_name(task), environments[0])
        key = (str(task.meta.get("set", SETS[0])), env.name)
        if key in found or env.reference != SEARCH or "tools" in task.meta:
            continue
        reads = any(isinstance(each, CorpusTools) for each in env.tools_of(task.public()))
        found[key] = reads and key[0] not in NAMES and not env.settings.get("corpus")
    listed = ", ".join(sorted({name for (name, _), said in found.items() if said}))
    return f"{listed}: without --corpus the tools of these tasks search the Atlas" if listed else ""


def takes(name: str, setting: str) -> bool:
    """Whether a shipped environment has a setting of that name."""
    return setting in inspect.signature(maker(name)).parameters
