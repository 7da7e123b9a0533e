"""Agents: what clients can name as a model. One engine, and an environment for each.

A client that asks for `NAME` gets the first environment, one that asks for `NAME:GRAMMAR` that one.
Everything that can be missing (a corpus, a sandbox) is found out before the first request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from coa.environment import Environment, OpenEnvironment, ToolSettings, open_environments
from coa.errors import CoaError, UsageError
from coa.grammar import Grammar, PromptKind
from coa.io.machine import cores
from coa.io.runs import Json
from coa.models.references import OURS, resolve
from coa.rollouts import (
    References,
    choose_prompt,
    default_environments,
    remembered,
    trained_grammar,
)
from coa.tasks import Task

ANY = Task("any question")


@dataclass(frozen=True)
class Agent:
    """One entry of /v1/models."""

    name: str
    grammar: Grammar
    """Bound to the tools of any question."""
    prompt: PromptKind
    environment: OpenEnvironment


def public_name(model: str) -> str:
    """A model reference as strangers see it: no path and no address."""
    source = resolve(model)
    if source.kind == "scripted":
        return "scripted"
    if source.kind == "local" and not model.startswith("hf:"):
        return OURS if model == OURS else source.base
    where = source.model or source.base.removeprefix("hf:")
    return Path(where).resolve().name or "model"


@asynccontextmanager
async def open_agents(
    model: str,
    *,
    env: References = (),
    name: str = "",
    grammars: Sequence[str] = (),
    prompt: str = "auto",
    tools: ToolSettings | None = None,
    settings: Json | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[dict[str, Agent]]:
    """The agents of a model by the names that clients use; the first is the default.

    Without an environment they are the shipped one in `grammars`, or in those that the model was
    trained on, first the one that `coa ask` takes; of these, one whose tools this machine cannot
    open is left out with a line. One that was asked for has to work.
    """
    name = name or public_name(model)
    chosen = choose_prompt(prompt, model)
    agents: dict[str, Agent] = {}
    why = ""
    async with AsyncExitStack() as stack:
        for wanted in _wanted(model, env, grammars, tools, settings, note):
            value = wanted.value()
            try:
                opened = await stack.enter_async_context(
                    open_environments((wanted,), [ANY] * cores(), tools)
                )
                bound = (await opened.toolbox(ANY)).bind(value)
            except CoaError as error:
                if env or grammars:
                    raise
                why = f"{name}:{value.name} is not served: {error}"
                note(why)
                continue
            agents.setdefault(name, Agent(name, bound, chosen, opened))
            full = f"{name}:{value.name}"
            if full in agents:
                raise UsageError(f"two grammars are named {value.name!r}; rename one.")
            agents[full] = Agent(full, bound, chosen, opened)
        if not agents:
            raise UsageError(f"{model}: no grammar can be served. {why}")
        yield agents


def _wanted(
    model: str,
    env: References,
    grammars: Sequence[str],
    tools: ToolSettings | None,
    settings: Json | None,
    note: Callable[[str], None],
) -> list[Environment]:
    how: Any = {"tools": tools, "settings": settings, "note": note, "model": model}
    if env:
        asked = grammars or ["auto"]
        return [made for each in asked for made in default_environments(env, grammar=each, **how)]
    shipped: Any = import_module("coa.environments")
    usual = next(iter(shipped.BY_GRAMMAR))
    known = remembered("grammar", model) or [*shipped.BY_GRAMMAR][:3]
    known = sorted(known, key=lambda each: each != usual)
    wanted: list[str | Grammar] = [*grammars] or [trained_grammar(model, each) for each in known]
    return [made for each in wanted for made in default_environments((), grammar=each, **how)]
