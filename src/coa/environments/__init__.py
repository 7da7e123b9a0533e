"""The environments that are shipped: content, which only `load_environment` and the command line
reach, and only when it is asked for.

Each is made by a function of its settings, in a module of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from coa.environment import Environment, environment_name, load_environment
from coa.errors import ConfigError, UsageError, did_you_mean
from coa.tasks import Task, TaskSet

SEARCH = "search"
DEFAULT_SET = "atlas-mhqa"
ATLAS_REWORDED, ATLAS_WIDE = "atlas-reworded", "atlas-wide"
ATLAS_WEB, ATLAS_CODE, GYM = "atlas-web", "atlas-code", "gym-code"
TOOLBOX, BFCL = "toolbox", "bfcl"
_ATLAS = (DEFAULT_SET, ATLAS_REWORDED, ATLAS_WIDE, ATLAS_WEB, ATLAS_CODE)
_MODULES = {
    SEARCH: ("search", "search"),
    **dict.fromkeys(_ATLAS, ("atlas.environment", "atlas")),
    GYM: ("gym", "gym"),
    TOOLBOX: ("toolbox", "toolbox"),
    BFCL: ("published.environment", "bfcl"),
}
NAMES = tuple(_MODULES)
SETS = tuple(name for name in NAMES if name not in (SEARCH, BFCL))
"""Those that make tasks."""
BY_GRAMMAR = {"mhqa": "atlas-mhqa", "web": "atlas-web", "code": "gym-code", "afm": "atlas-code"}
"""Where a model that was trained on a grammar is at home."""


TEACHERS = ("experts",)


def shipped_teacher(name: str) -> Callable[..., Any]:
    """The class of a shipped teacher."""
    from coa.environments.experts import Experts

    return {"experts": Experts}[name]


teacher_settings = shipped_teacher
"""The settings of a shipped teacher are its fields."""


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
    if name not in SETS:
        raise UsageError(f"{name!r} is not a task set.{did_you_mean(name, SETS)}")
    if name in (GYM, TOOLBOX):
        if world_seed:
            raise UsageError(f"{name} has no worlds. Leave --world-seed out.")
        package = "gym" if name == GYM else "toolbox"
        made: TaskSet = import_module(f"{__name__}.{package}.tasks").make_tasks(
            split, n, seed, families
        )
        return made
    from coa.environments.atlas import tasks as atlas
    from coa.environments.atlas.catalogues import CATALOGUES

    return atlas.make_tasks(split, n, seed, world_seed, families, CATALOGUES[name])


def chosen_names(
    what: str, names: Sequence[str] | None, known: Sequence[str], every: Collection[str], split: str
) -> list[str]:
    """The families (generators) that are named, each once, or all that the split knows; `every`
    are those of other splits, too."""
    if names is not None and not names:
        plural = "families" if what == "family" else f"{what}s"
        raise UsageError(f"{plural}: the list is empty. Leave it out to use all of them.")
    for name in names or ():
        if name not in every:
            raise UsageError(f"unknown {what} {name!r}.{did_you_mean(name, known)}")
        if name not in known:
            raise UsageError(
                f"{what} {name!r} does not belong to split {split!r}.{did_you_mean('', known)}"
            )
    return list(dict.fromkeys(names or known))


def home_of(task: Task) -> tuple[str, dict[str, str]]:
    """The shipped environment that a task of a file belongs to, and its settings.

    A task of a set names it. Others, a table of one's own or a benchmark's, are questions for
    `search`. A task that names a grammar is answered in it.
    """
    name = str(task.meta.get("set", SETS[0] if "world" in task.meta else SEARCH))
    grammar = str(task.meta.get("grammar") or "")
    home = name if name in (*SETS, BFCL) else SEARCH
    return home, {"grammar": grammar} if grammar else {}


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
            made[key] = env.called(key.replace(" ", ":"))
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


def takes(name: str, setting: str) -> bool:
    """Whether a shipped environment has a setting of that name."""
    return setting in inspect.signature(maker(name)).parameters
