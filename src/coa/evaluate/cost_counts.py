"""What one task cost a team of agents and the chain made from it, in tokens of one tokenizer.

Both sides are counted by the same rule: every model call pays for its whole context and for what it
writes. A team's call pays for the system prompt of its agent and all that the agent has seen so far
(`Episode.count_tokens`); a chain's turn pays for its prompt and the whole chain so far, exactly as
`runtime.Rollout` fills `Trajectory.usage`. What a cache saves is one of three cases:

    none   nothing: every call is paid in full
    task   a call pays only for what was not in an earlier call of the same agent for this task
    warm   as task, and system prompts are in the cache from earlier tasks already

The markup of a chat template is counted for the chain (`encode_prompt`) and not for the team.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal, get_args

from coa.engines.base import TextCodec
from coa.errors import ConfigError, RecordError
from coa.protocol import system_prompt
from coa.protocol.bound import load_bound
from coa.protocol.prompt import PromptKind
from coa.teachers.episode import AgentSpec, Episode, Say, Tokens
from coa.teachers.llm_budget import Price
from coa.trajectory import Author, Segment, Trajectory

Caching = Literal["none", "task", "warm"]
CACHINGS: tuple[Caching, ...] = get_args(Caching)
PROMPTS: tuple[PromptKind, ...] = ("compact", "full")
LengthOf = Callable[[AgentSpec], int]
"""How many tokens the system prompt of an agent has."""


EXAMPLE_PRICE = Price(input=1.0, cached=0.1, output=5.0)
"""An example and nobody's offer: a cached token at a tenth, a written one at five times."""


def parse_price(text: str) -> Price:
    """Three numbers joined by commas, as an option has them."""
    try:
        fresh, cached, written = map(float, text.split(","))
    except ValueError:
        raise ConfigError(
            f"prices {text!r}: expected three numbers joined by commas, for a million tokens "
            "read, read from a cache and written, as 1,0.1,5."
        ) from None
    return Price(input=fresh, cached=cached, output=written)


def with_caching(tokens: Tokens, caching: Caching, opening: int) -> Tokens:
    """The same calls under another cache; `opening` are the tokens of system prompts, each once."""
    if caching == "none":
        return tokens._replace(cached=0)
    return tokens if caching == "task" else tokens._replace(cached=tokens.cached + opening)


class Counter:
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
            if isinstance(event, Say) and event.call
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
    bound = load_bound(grammar, tools)
    return {kind: system_prompt(bound, kind) for kind in PROMPTS}
