"""The desk at which a team of experts works: the episode being written, and the dice.

Agents only ever speak and use tools through it, so whatever an expert knows is in the record. The
dice decide where an expert errs and where a critic looks away; they are keyed by seed and task.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from coa.errors import ConfigError
from coa.teachers.episode import Episode, Say, Use
from coa.tools.base import Toolbox, ToolCall

SYSTEM = "system"
"""Not an agent: the code that carries results from one agent to another."""
MAX_TRIES = 3


@dataclass(frozen=True)
class Rates:
    """How often experts err, how often a critic misses it, how often it objects to sound work.

    Searchers and coders err at the rate itself; readers, those who open pages, and verifiers at
    half of it.
    """

    error: float = 0.1
    miss: float = 0.2
    false_alarm: float = 0.01

    def __post_init__(self) -> None:
        for rate in (self.error, self.miss, self.false_alarm):
            if not 0 <= rate <= 1:
                raise ConfigError(f"a rate of the experts is {rate!r}, expected 0 to 1.")


@dataclass
class Desk:
    episode: Episode
    rng: random.Random
    toolbox: Toolbox
    rates: Rates
    calls: set[str] = field(default_factory=set)
    """Arguments of tool calls so far: a student's runtime would not make a call twice."""

    def say(
        self, agent: str, to: str, text: str, thought: str = "", erred: bool = False, **facts: Any
    ) -> None:
        """A message of an agent; `part` among the facts says what it is."""
        self.add(Say(agent, to, text, thought, facts, erred=erred))

    def tell(self, to: str, text: str) -> None:
        """Carry a result to an agent that did not see it."""
        self.say(SYSTEM, to, text)

    def add(self, event: Say | Use) -> None:
        self.episode.events.append(event)

    async def use(
        self, agent: str, tool: str, argument: str, thought: str, erred: bool = False
    ) -> str:
        """An agent decides on a call and makes it; the text that came back."""
        self.say(agent, SYSTEM, argument, thought, erred, part="query")
        self.calls.add(argument)
        seen = await self.toolbox.call(ToolCall(tool, argument))
        self.add(Use(agent, tool, argument, seen.text, seen.failure, erred=erred))
        return seen.text

    def count(self, what: str, times: int = 1) -> None:
        if times:
            self.episode.meta[what] = self.episode.meta.get(what, 0) + times

    def happens(self, rate: float) -> bool:
        """Throw the dice."""
        return self.rng.random() < rate

    def fail(self, error: str) -> None:
        self.episode.error = error
