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
from dataclasses import dataclass, replace
from pathlib import Path

from coa.errors import UsageError
from coa.io.runs import Json
from coa.io.settings import to_json
from coa.models.references import resolve
from coa.recording.budget import MILLION, Amount, BudgetSpent, Price, find_price
from coa.recording.chat import (
    Journal,
    LLMSettings,
    Mind,
    Paid,
    Request,
    ServedMind,
    count_tokens,
    journal_of,
)
from coa.recording.contracts import (
    CRITERIA,
)
from coa.recording.episode import USER, Episode, ModelCall
from coa.recording.llm_team import LLMTeam, Talk
from coa.recording.recorder import EpisodeRecorder, Rates
from coa.recording.roster import CODE, Roster, roster_for
from coa.tasks import Task
from coa.tools.base import Tool, Toolbox

# ------------------------------------------------------------------------------------------------
# What recording will cost, without a single call: the team's own flow, rehearsed.
#
# The agents' prompts, the questions and the flow are the real ones; what models and tools would
# say is filled in at an assumed length (`ASSUMED`). A rehearsal goes well at the first attempt,
# so what is estimated is the cost of a team that never has to correct itself.
# ------------------------------------------------------------------------------------------------


STEPS, REPLY_TOKENS, RESULT_TOKENS = 3, 60, 500
ASSUMED = (
    f"{STEPS} look-ups a task, replies of {REPLY_TOKENS} tokens, tool results of {RESULT_TOKENS}, "
    "nothing corrected, no prompt cache, 4 bytes a token"
)
SAMPLE = 100
"""Tasks that are rehearsed; the others are taken to be like them."""
_WORDS = "words " * (REPLY_TOKENS * 4 // 6)


@dataclass(frozen=True)
class CostEstimate:
    """Of a whole run; divide by `tasks` for one."""

    tasks: int
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    money: float | None
    """None: no price is known."""
    assumed: str = ASSUMED

    def to_json(self) -> Json:
        return dict(vars(self))

    def lines(self) -> list[str]:
        """For a dry run."""
        each, tokens = max(1, self.tasks), self.prompt_tokens + self.sampled_tokens
        money = "" if self.money is None else f", {self.money:.2f} in money"
        return [
            f"{self.tasks} tasks: about {self.calls} model calls and {tokens / MILLION:.2f} "
            f"million tokens{money}",
            f"a task: {self.calls / each:.0f} calls, {tokens / each:.0f} tokens",
            f"assumed: {self.assumed}",
        ]


class Understudy:
    """A mind that says what fits, at the assumed length."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._said = 0

    def price(self, prompt: int, sampled: int) -> Amount:
        return Amount(prompt + sampled)

    async def answer(self, request: Request) -> Paid:
        self._said += 1
        text = self._reply(request)
        return Paid(ModelCall("", text, request.prompt_tokens, 0, count_tokens(text)))

    def _reply(self, request: Request) -> str:
        agent, roster = request.agent, self._roster
        if agent == "planner":
            lookers = [name for name in roster.workers if name != "coder"][:1] * STEPS
            agents = [*lookers, *(["coder"] if "coder" in roster.tools else []), "verifier"]
            each = _WORDS[: len(_WORDS) // len(agents)].strip()
            lines = [f"{number}. {name}: {each}" for number, name in enumerate(agents, 1)]
            return "\n".join(lines)
        if agent == "coder":
            return f"THOUGHT: so\nINPUT:\n```py\n{_WORDS}{self._said}\n```"
        if agent in roster.workers:
            name = roster.tools[agent][0].name
            return f"THOUGHT: so\nTOOL: {name}\nINPUT: {_WORDS}{self._said}"
        if agent == "reader":
            return f"REPORT: {_WORDS}"
        if agent == roster.critic:
            rated = "\n".join(f"{name}: good" for name in CRITERIA)
            return f"{rated if roster.rated else 'VERDICT: approve'}\nREASON: {_WORDS}"
        if request.messages[-1].text.endswith("Give the answer."):
            return f"THOUGHT: {_WORDS}\nANSWER: so"
        return f"THOUGHT: so\nREASON: {_WORDS}\nSCORE: 4"


def rehearsal_tools(box: Toolbox) -> Toolbox:
    """Tools by the names of a task's own, which return text of the assumed length."""

    async def run(argument: str) -> str:
        return "words " * (RESULT_TOKENS * 4 // 6)

    def standing_in(tool: Tool) -> Tool:
        if tool.schema:
            # As text: the schema is in the prompt all the same, and these words are no JSON.
            return replace(tool, run=run, body="text", session=None, with_state=None)
        return Tool(tool.name, run, about=_WORDS[:80], body="code" if tool.name == CODE else "text")

    return Toolbox(map(standing_in, box.values()))


def scaled(
    counted: Sequence[tuple[int, int, int]], tasks: int, price: Price | None
) -> CostEstimate:
    """An estimate for all tasks from (calls, prompt tokens, sampled tokens) of some."""
    calls, prompt, sampled = (
        round(sum(each[at] for each in counted) * tasks / max(1, len(counted))) for at in range(3)
    )
    money = None if price is None else price.of(prompt, 0, sampled)
    return CostEstimate(tasks, calls, prompt, sampled, money)


__all__ = ["CostEstimate", "LLMSettings", "LLMTeacher"]

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

    async def estimate(self, tasks: Sequence[Task], tools_of: ToolsOf) -> CostEstimate:
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
        desk = EpisodeRecorder(
            episode, random.Random(f"{seed}|{task.id}"), tools, Rates(0.0, 0.0, 0.0)
        )
        desk.say(USER, "planner", task.question)
        talk = Talk(mind, settings, task.id, seed)
        await LLMTeam(roster, talk).work(desk)
    episode.seconds = {"total": time.monotonic() - started, **talk.seconds}
    return episode
