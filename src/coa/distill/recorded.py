"""The tools of an episode as its record has them, for episodes whose own tools are not here.

A replay with these proves that the student's runtime accepts the chain; it cannot prove that the
world would answer the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coa.protocol.bound import block_names
from coa.protocol.grammar import Grammar, is_block_name
from coa.teachers.episode import Episode, Use
from coa.tools.base import RunTool, Tool, Toolbox, clean

_ANY_LENGTH = 1 << 30


def as_shown(episode: Episode) -> Episode:
    """The episode with every result as a toolbox shows it: plain line ends, nothing around it."""
    shown = [
        replace(event, result=clean(event.result)) if isinstance(event, Use) else event
        for event in episode.events
    ]
    return replace(episode, events=shown)


def recorded_tools(episode: Episode, grammar: Grammar) -> Toolbox:
    """Tools that answer a call as it was answered then, whatever they are called.

    Under `grammar` a tool without a name of its own that a block can have gets another one.
    """
    answers: dict[str, dict[str, str]] = {}
    for event in episode.events:
        if isinstance(event, Use):
            answers.setdefault(event.tool, {}).setdefault(event.argument.strip(), event.result)
    known = {grammar.by_name[role].tool or role for role in grammar.tool_roles}
    new = sorted(set(answers) - known)
    fit = {name for name in new if is_block_name(name) and name not in grammar.tags}
    blocks = block_names([name for name in new if name not in fit], {*grammar.tags, *fit})
    tools = ((name, _answering(given)) for name, given in sorted(answers.items()))
    return Toolbox(
        Tool(name, run, max_chars=_ANY_LENGTH, block=blocks.get(name, "")) for name, run in tools
    )


def _answering(given: Mapping[str, str]) -> RunTool:
    async def answer(argument: str) -> str:
        return given[argument.strip()]

    return answer
