"""The tools of an episode as its record has them, for episodes whose own tools are not here.

A replay with these proves that the student's runtime accepts the chain; it cannot prove that the
world would answer the same again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from coa.protocol.bound import block_names
from coa.protocol.grammar import Grammar, is_block_name
from coa.teachers.episode import Episode, ToolSpec, Use
from coa.tools.base import RunTool, Tool, Toolbox, clean

_ANY_LENGTH = 1 << 30


def as_shown(episode: Episode) -> Episode:
    """The episode with every result as a toolbox shows it: plain line ends, nothing around it."""
    shown = [
        replace(event, result=clean(event.result)) if isinstance(event, Use) else event
        for event in episode.events
    ]
    return replace(episode, events=shown)


def offered_tools(episodes: Sequence[Episode]) -> list[ToolSpec]:
    """The tools that the team had, over all its episodes: those that were noted, and those that
    were used. A prompt that offered only those that its own episode used would give it away."""
    found: dict[str, ToolSpec] = {}
    for episode in episodes:
        for spec in episode.tools:
            found[spec.name] = spec
    for episode in episodes:
        for event in episode.events:
            if isinstance(event, Use):
                found.setdefault(event.tool, ToolSpec(event.tool))
    return [found[name] for name in sorted(found)]


def recorded_tools(episode: Episode, grammar: Grammar, offered: Sequence[ToolSpec] = ()) -> Toolbox:
    """Tools that answer a call as it was answered then, whatever they are called.

    `offered` are all tools that the team had. Under `grammar` a tool without a name of its own that
    a block can have gets another one.
    """
    answers: dict[str, dict[str, str]] = {}
    for event in episode.events:
        if isinstance(event, Use):
            answers.setdefault(event.tool, {}).setdefault(event.argument.strip(), event.result)
    specs = {spec.name: spec for spec in offered_tools([episode])} | {s.name: s for s in offered}
    known = {grammar.by_name[role].tool or role for role in grammar.tool_roles}
    new = sorted(set(specs) - known)
    fit = {name for name in new if is_block_name(name) and name not in grammar.tags}
    blocks = block_names([name for name in new if name not in fit], {*grammar.tags, *fit})
    return Toolbox(
        Tool(
            name,
            _answering(answers.get(name, {})),
            about=spec.about,
            max_chars=_ANY_LENGTH,
            block=blocks.get(name, ""),
        )
        for name, spec in sorted(specs.items())
    )


def _answering(given: Mapping[str, str]) -> RunTool:
    async def answer(argument: str) -> str:
        return given[argument.strip()]

    return answer
