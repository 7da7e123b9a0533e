"""Agents: what clients can name as a model. One engine, and a grammar with its tools for each.

A client that asks for `NAME` gets the first grammar, one that asks for `NAME:GRAMMAR` that one.
Everything that can be missing (a corpus, a sandbox) is found out before the first request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from coa.attempts import choose_grammar, choose_prompt, remembered
from coa.engines.store import OURS, resolve
from coa.errors import CoaError, UsageError
from coa.machine import cores
from coa.protocol import Grammar, PromptKind
from coa.tasks.sets import DEFAULT_SET, KINDS
from coa.tasks.task import Task
from coa.tools.kits import KitSettings, ToolboxOf, open_kit

UNTRAINED = ("mhqa", "web", "code")
"""Grammars of a model that was trained on none."""
ANY = Task("any question")


@dataclass(frozen=True)
class Agent:
    """One entry of /v1/models."""

    name: str
    grammar: Grammar
    prompt: PromptKind
    toolbox_of: ToolboxOf


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
    name: str = "",
    grammars: Sequence[str] = (),
    prompt: str = "auto",
    corpus: str = "atlas",
    note: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[dict[str, Agent]]:
    """The agents of a model by the names that clients use; the first is the default.

    Without `grammars` they are those that the model was trained on, first the one that `coa ask`
    takes; of these, one whose tools this machine cannot open is left out with a line. One that was
    asked for has to work.
    """
    name = name or public_name(model)
    known = remembered("grammar", model) or UNTRAINED
    usual = KINDS[DEFAULT_SET].grammar
    wanted = list(grammars) or sorted(known, key=lambda each: each != usual)
    chosen = choose_prompt(prompt, model)
    agents: dict[str, Agent] = {}
    why = ""
    async with AsyncExitStack() as stack:
        for each in wanted:
            grammar = choose_grammar(each, model)
            try:
                toolbox_of = await stack.enter_async_context(
                    open_kit([ANY] * cores(), KitSettings(corpus=corpus), grammar)
                )
                bound = toolbox_of(ANY).bind(grammar)
            except CoaError as error:
                if grammars:
                    raise
                why = f"{name}:{grammar.name} is not served: {error}"
                note(why)
                continue
            agents.setdefault(name, Agent(name, bound, chosen, toolbox_of))
            full = f"{name}:{grammar.name}"
            if full in agents:
                raise UsageError(f"two grammars are named {grammar.name!r}; rename one.")
            agents[full] = Agent(full, bound, chosen, toolbox_of)
        if not agents:
            raise UsageError(f"{model}: no grammar can be served. {why}")
        yield agents
