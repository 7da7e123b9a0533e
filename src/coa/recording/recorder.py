"""EpisodeRecorder: what the agents of a team speak and act through, so that all of it is recorded.

A recorder appends events to its episode. Agents that work at the same time have recorders of their
own (`together`), each with its own random numbers, so that what is recorded does not depend on who
was faster. `Rates` and the random numbers are for rule-based experts, who err on purpose.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from coa.errors import ConfigError
from coa.recording.episode import SYSTEM, Episode, Message, ModelCall, ToolUse
from coa.tools.base import Toolbox, ToolCall

T = TypeVar("T")
MAX_TRIES = 3
_OF_WORKERS = ("careless_queries", "wrong_pages", "misreadings", "wrong_programs")
MISTAKES = (*_OF_WORKERS, "wrong_combinations")
CRITICS = ("alarms", "missed_mistakes", "false_alarms")
COUNTED = (*MISTAKES, *CRITICS)
"""What is counted in `Episode.meta`: mistakes, and how those did who look for them."""
CRITERIA = ("Information Conflict", "Tool Effectiveness", "Trajectory Monitoring")
"""What a reflection rates."""


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
    """Appends to an episode what agents say and what their tools return."""

    episode: Episode
    toolbox: Toolbox
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    rates: Rates = field(default_factory=Rates)
    calls: set[str] = field(default_factory=set)
    """Arguments of tool calls so far: a student's runtime would not make a call twice."""
    branch: str = ""

    def say(
        self,
        agent: str,
        to: str,
        text: str,
        thought: str = "",
        erred: bool = False,
        *,
        call: ModelCall | None = None,
        **facts: Any,
    ) -> None:
        """Record a message of an agent; `part` among the facts says what it is."""
        self.episode.events.append(
            Message(agent, to, text, thought, facts, erred, self.branch, call)
        )

    def tell(self, to: str, text: str) -> None:
        """Carry a result to an agent that did not see it."""
        self.say(SYSTEM, to, text)

    async def use(
        self,
        agent: str,
        tool: str,
        argument: str,
        thought: str,
        erred: bool = False,
        *,
        call: ModelCall | None = None,
    ) -> str:
        """Record an agent's decision to call a tool, make the call, and return its text."""
        self.say(agent, SYSTEM, argument, thought, erred, call=call, part="query")
        self.calls.add(argument)
        with self.timed("tools"):
            seen = await self.toolbox.call(ToolCall(tool, argument))
        self.episode.events.append(
            ToolUse(agent, tool, argument, seen.text, seen.failure, erred, self.branch)
        )
        return seen.text

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the seconds that the block takes to the episode's wall-clock figures."""
        started = time.monotonic()
        try:
            yield
        finally:
            spent = self.episode.seconds.get(what, 0.0) + time.monotonic() - started
            self.episode.seconds[what] = spent

    def count(self, what: str, times: int = 1) -> None:
        """Add to a figure in the episode's meta."""
        if times:
            self.episode.meta[what] = self.episode.meta.get(what, 0) + times

    def happens(self, rate: float) -> bool:
        """Draw whether something with this probability happens."""
        return self.rng.random() < rate

    def fail(self, error: str) -> None:
        """Say why the episode has no answer."""
        self.episode.error = error

    async def together(self, works: Sequence[Callable[[EpisodeRecorder], Awaitable[T]]]) -> list[T]:
        """Do several pieces of work at the same time, each in a branch; one alone needs none."""
        if len(works) == 1:
            return [await works[0](self)]
        own = [self._in_branch(str(number)) for number in range(1, len(works) + 1)]
        done = await asyncio.gather(*(work(each) for work, each in zip(works, own, strict=True)))
        begun = len(self.episode.events)
        for each in own:
            self.episode.events += each.episode.events[begun:]
            self.calls |= each.calls
            self.episode.error = self.episode.error or each.episode.error
            for what, value in each.episode.meta.items():
                if isinstance(value, int):
                    self.count(what, value)
                else:
                    self.episode.meta.setdefault(what, value)
        return done

    def _in_branch(self, branch: str) -> EpisodeRecorder:
        assert not self.branch, f"branch {branch} inside branch {self.branch}"
        episode = replace(self.episode, events=list(self.episode.events), meta={})
        rng = random.Random(f"{self.rng.random()}|{branch}")
        return replace(self, episode=episode, rng=rng, calls=set(self.calls), branch=branch)


def ratings(conflict: str = "good", tools: str = "good", progress: str = "good") -> str:
    """The three ratings of a reflection, in the form that grammars read."""
    rated = zip(CRITERIA, (conflict, tools, progress), strict=True)
    return " ".join(f"{name}: {word}." for name, word in rated)
