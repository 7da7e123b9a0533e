"""The teacher `llm`: a team of language models behind any OpenAI-compatible server.

    teacher = LLMTeacher(LLMSettings("openai:NAME@http://localhost:8000"))
    async with teacher.opened(out):
        episode = await teacher.record(task.public(), toolbox)

Opened beside an episodes file, the teacher keeps a journal of all answers of its model there
(`OUT.calls.jsonl`), so that a run that was stopped, however it was stopped, pays for nothing twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from coa.config import to_json
from coa.engines.store import resolve
from coa.errors import UsageError
from coa.runs import Json
from coa.tasks.task import Task
from coa.teachers.desk import Desk, Rates
from coa.teachers.episode import USER, Episode
from coa.teachers.llm_budget import BudgetSpent, Price, find_price
from coa.teachers.llm_estimate import SAMPLE, Estimate, Understudy, rehearsal_tools, scaled
from coa.teachers.llm_roster import roster_for
from coa.teachers.llm_team import LLMTeam, Talk
from coa.teachers.minds import Journal, LLMSettings, Mind, ServedMind, journal_of
from coa.tools.base import Toolbox

__all__ = ["Estimate", "LLMSettings", "LLMTeacher"]

_NOT_IDENTITY = (
    *("model", "prices", "budget_tokens", "budget_money"),
    *("slots", "timeout_s", "retries", "backoff_s"),
)
"""Settings that may change when a run is continued: how, where and for how much, not what."""


_UNLIMITED = LLMSettings("")
ToolsOf = Callable[[Task], Awaitable[Toolbox]]


class LLMTeacher:
    """Records a team of language models at work; see the module's docstring."""

    name = "llm"

    def __init__(self, settings: LLMSettings, mind: Mind | None = None) -> None:
        """`mind`: one's own instead of the model that the settings name."""
        self.settings = settings
        self._mind = mind

    def identity(self) -> Json:
        """What decides what is recorded, for a manifest."""
        kept = {k: v for k, v in to_json(self.settings).items() if k not in _NOT_IDENTITY}
        name, price = self._model()
        return {"model": name, **kept, "price": to_json(price) if price else None}

    def _model(self) -> tuple[str, Price | None]:
        name = resolve(self.settings.model).model or self.settings.model
        return name, find_price(self.settings.prices, name)

    async def estimate(self, tasks: Sequence[Task], tools_of: ToolsOf) -> Estimate:
        """What recording these tasks will cost; no call is made. See `llm_estimate`."""
        counted = []
        for task in tasks[:: -(-len(tasks) // SAMPLE) or 1]:
            toolbox = rehearsal_tools(await tools_of(task.public()))
            mind = Understudy(roster_for(toolbox))
            episode = await _record(task.public(), toolbox, mind, _UNLIMITED, 0)
            assert episode.answer is not None, episode.error
            tokens = episode.count_tokens(len)
            counted.append((len(episode.calls), tokens.prompt, tokens.sampled))
        return scaled(counted, len(tasks), self._model()[1])

    @asynccontextmanager
    async def opened(self, out: Path) -> AsyncIterator[LLMTeacher]:
        """Keep all answers of the model beside an episodes file, and close the connections."""
        if self._mind is not None:
            raise UsageError("the teacher is open already.")
        journal = Journal(journal_of(out))
        try:
            self._mind = mind = ServedMind(self.settings, journal)
        except BaseException:
            journal.close()
            raise
        try:
            yield self
        except BudgetSpent as spent:
            raise spent.beside(out) from None
        finally:
            self._mind = None
            await mind.close()

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode:
        """Work on one public task; what the team could not do is in `episode.error`."""
        if self._mind is not None:
            return await _record(task.public(), toolbox, self._mind, self.settings, seed)
        mind = ServedMind(self.settings)
        try:
            return await _record(task.public(), toolbox, mind, self.settings, seed)
        finally:
            await mind.close()


async def _record(
    task: Task, toolbox: Toolbox, mind: Mind, settings: LLMSettings, seed: int
) -> Episode:
    started = time.monotonic()
    async with toolbox.opened() as tools:
        roster = roster_for(tools)
        episode = Episode(task.id, task.question, LLMTeacher.name, roster.agents, seed=seed)
        episode.meta.update(task.meta)
        desk = Desk(episode, random.Random(f"{seed}|{task.id}"), tools, Rates(0.0, 0.0, 0.0))
        desk.say(USER, "planner", task.question)
        talk = Talk(mind, settings, task.id, seed)
        await LLMTeam(roster, talk).work(desk)
    episode.seconds = {"total": time.monotonic() - started, **talk.seconds}
    return episode
