"""The desk at which a team of experts works: the episode being written, and the dice.

Agents only ever speak and use tools through it, so whatever an expert knows is in the record. The
dice decide where an expert errs and where a critic looks away; they are keyed by seed and task.
Agents that work at the same time sit at desks of their own (`together`), each with its dice, so
that what comes out does not depend on who was faster.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from coa.errors import ConfigError
from coa.recording.episode import SYSTEM, Episode, Message, ToolUse
from coa.tools.base import Toolbox, ToolCall

T = TypeVar("T")
MAX_TRIES = 3
_OF_WORKERS = ("careless_queries", "wrong_pages", "misreadings", "wrong_programs")
MISTAKES = (*_OF_WORKERS, "wrong_combinations")
CRITICS = ("alarms", "missed_mistakes", "false_alarms")
COUNTED = (*MISTAKES, *CRITICS)
"""What is counted in `Episode.meta`: mistakes, and how those did who look for them."""


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
class EpisodeRecorder:
    episode: Episode
    rng: random.Random
    toolbox: Toolbox
    rates: Rates
    calls: set[str] = field(default_factory=set)
    """Arguments of tool calls so far: a student's runtime would not make a call twice."""
    branch: str = ""

    def say(
        self, agent: str, to: str, text: str, thought: str = "", erred: bool = False, **facts: Any
    ) -> None:
        """A message of an agent; `part` among the facts says what it is."""
        self.add(Message(agent, to, text, thought, facts, erred, self.branch))

    def tell(self, to: str, text: str) -> None:
        """Carry a result to an agent that did not see it."""
        self.say(SYSTEM, to, text)

    def add(self, event: Message | ToolUse) -> None:
        self.episode.events.append(event)

    async def use(
        self, agent: str, tool: str, argument: str, thought: str, erred: bool = False
    ) -> str:
        """An agent decides on a call and makes it; the text that came back."""
        self.say(agent, SYSTEM, argument, thought, erred, part="query")
        self.calls.add(argument)
        seen = await self.toolbox.call(ToolCall(tool, argument))
        self.add(ToolUse(agent, tool, argument, seen.text, seen.failure, erred, self.branch))
        return seen.text

    def count(self, what: str, times: int = 1) -> None:
        if times:
            self.episode.meta[what] = self.episode.meta.get(what, 0) + times

    def happens(self, rate: float) -> bool:
        """Throw the dice."""
        return self.rng.random() < rate

    def fail(self, error: str) -> None:
        self.episode.error = error

    async def together(self, works: Sequence[Callable[[EpisodeRecorder], Awaitable[T]]]) -> list[T]:
        """Work that is done at the same time, each piece in a branch; one piece needs none."""
        if len(works) == 1:
            return [await works[0](self)]
        desks = [self._beside(str(number)) for number in range(1, len(works) + 1)]
        done = await asyncio.gather(*(work(desk) for work, desk in zip(works, desks, strict=True)))
        begun = len(self.episode.events)
        for desk in desks:
            self.episode.events += desk.episode.events[begun:]
            self.calls |= desk.calls
            self.episode.error = self.episode.error or desk.episode.error
            for what, value in desk.episode.meta.items():
                self.count(what, value) if isinstance(value, int) else self._keep(what, value)
        return done

    def _beside(self, branch: str) -> EpisodeRecorder:
        assert not self.branch, f"branch {branch} inside branch {self.branch}"
        episode = replace(self.episode, events=list(self.episode.events), meta={})
        dice = random.Random(f"{self.rng.random()}|{branch}")
        return EpisodeRecorder(episode, dice, self.toolbox, self.rates, set(self.calls), branch)

    def _keep(self, what: str, value: Any) -> None:
        self.episode.meta.setdefault(what, value)


def ratings(conflict: str = "good", tools: str = "good", progress: str = "good") -> str:
    """The three ratings of a reflection, in the form that grammars read."""
    return (
        f"Information Conflict: {conflict}. Tool Effectiveness: {tools}. "
        f"Trajectory Monitoring: {progress}."
    )
