"""Tokens of a team's episode and of its chain, counted with one tokenizer: for the cost study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal, get_args

from coa.engines.base import TextCodec
from coa.errors import RecordError
from coa.grammar import system_prompt
from coa.grammar.load import bound_to, load_grammar
from coa.grammar.prompt import PromptKind
from coa.recording.budget import Price
from coa.recording.episode import AgentSpec, Episode, Message, Tokens
from coa.trajectory import Author, Segment, Trajectory

Caching = Literal["none", "task", "warm"]
CACHINGS: tuple[Caching, ...] = get_args(Caching)
PROMPTS: tuple[PromptKind, ...] = ("compact", "full")
LengthOf = Callable[[AgentSpec], int]
"""How many tokens the system prompt of an agent has."""


EXAMPLE_PRICE = Price(input=1.0, cached=0.1, output=5.0)
"""An example and nobody's offer: a cached token at a tenth, a written one at five times."""


def with_caching(tokens: Tokens, caching: Caching, opening: int) -> Tokens:
    """The same calls under another cache; `opening` are the tokens of system prompts, each once."""
    if caching == "none":
        return tokens._replace(cached=0)
    return tokens if caching == "task" else tokens._replace(cached=tokens.cached + opening)


class TokenCounter:
    """Counts texts with one codec; a text that comes again is not encoded again."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._known: dict[str, int] = {}

    def count(self, text: str) -> int:
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = len(self._codec.encode(text))
        return found

    def prompt_of(self, agent: AgentSpec) -> int:
        return self.count(agent.system)

    def team(self, episode: Episode, length_of: LengthOf | None = None) -> Tokens:
        """All model calls of an episode; `length_of` gives system prompts another length.

        What a server counted is not used: it has another tokenizer than the chain.
        """
        systems = {agent.system: length_of(agent) for agent in episode.agents} if length_of else {}
        events = [
            replace(event, call=replace(event.call, sampled_tokens=0))
            if isinstance(event, Message) and event.call
            else event
            for event in episode.events
        ]

        def length(text: str) -> int:
            return systems[text] if text in systems else self.count(text)

        return replace(episode, events=events).count_tokens(length)

    def bare(self, episode: Episode) -> Tokens:
        """The same as if the agents had no system prompts."""
        return self.team(episode, lambda agent: 0)

    def chain(self, trajectory: Trajectory, system: str) -> Tokens:
        """All turns of a chain that opens with this system prompt."""
        length = len(self._codec.encode_prompt(system, trajectory.question))
        prompt = cached = sampled = seen = 0
        for step in trajectory.steps:
            written = self._length(step.model)
            prompt += length
            cached += seen
            sampled += written
            seen = length = length + written
            if step.observation is not None:
                length += self._length(step.observation)
        return Tokens(prompt, cached, sampled)

    def _length(self, segment: Segment) -> int:
        return len(segment.ids) if segment.ids is not None else self.count(segment.text)


def opening_prompts(trajectory: Trajectory, grammar: str = "") -> dict[PromptKind, str]:
    """The prompts that a chain may open with; its own must be among them."""
    prompts = _prompts(grammar or trajectory.grammar, tuple(trajectory.tools))
    first = trajectory.segments[0] if trajectory.segments else None
    found = first.text if first and first.author is Author.PROMPT else None
    if found not in prompts.values():
        raise RecordError(
            f"task {trajectory.task_id!r}: its chain does not open with a prompt of the grammar "
            f"{grammar or trajectory.grammar!r}. Distil the episodes again with this version."
        )
    return prompts


@cache
def _prompts(grammar: str, tools: tuple[str, ...]) -> dict[PromptKind, str]:
    bound = bound_to(load_grammar(grammar), tools)
    return {kind: system_prompt(bound, kind) for kind in PROMPTS}
