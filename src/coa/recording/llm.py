"""The teacher `llm`: a team of language models behind any OpenAI-compatible server.

    teacher = LLMTeacher(LLMSettings("openai:NAME@http://localhost:8000"))
    async with teacher.opened(out):
        episode = await teacher.record(task.public(), toolbox)

The planner writes steps and says which of them need each other; steps that do not are done at the
same time. For each step a worker decides on a call, a reader reports what came back and a critic
judges it; an objection has it read again, makes another call, or sends the step to the planner. The
verifier suggests an answer and scores it; a score of 2 or less goes back to the planner.

Every agent is given exactly what `Episode.context_of` says that it has seen. A reply that cannot be
read is kept as a message with the part `malformed` (it was paid for), and its agent is told why and
asked again. Opened beside an episodes file, the teacher keeps a journal of all answers of its model
there (`OUT.calls.jsonl`), so that a run that was stopped, however it was stopped, pays for nothing
twice.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from coa.errors import UsageError
from coa.grammar.prompt import conversation
from coa.io.runs import Json
from coa.io.settings import to_json
from coa.models.references import resolve
from coa.recording.agents import CODE, Roster, roster_for
from coa.recording.budget import MILLION, Price, Purse, find_price
from coa.recording.chat import (
    ChatClient,
    EpisodeOver,
    LLMSettings,
    Paid,
    Request,
    count_tokens,
    journal_of,
)
from coa.recording.episode import SYSTEM, USER, Episode, ModelCall
from coa.recording.recorder import CRITERIA, EpisodeRecorder
from coa.recording.replies import (
    Called,
    Malformed,
    Planned,
    PlannedStep,
    Report,
    Todo,
    read_answer,
    read_call,
    read_check,
    read_judgement,
    read_plan,
    read_report,
)
from coa.tasks import Task
from coa.tools.base import Tool, Toolbox

__all__ = ["CostEstimate", "LLMSettings", "LLMTeacher"]

T = TypeVar("T")
ToolsOf = Callable[[Task], Awaitable[Toolbox]]
Answer = Callable[[Request, Purse], Awaitable[Paid]]
"""Whatever answers for the agents: `ChatClient.answer`."""
PASSED = 3
"""A check with this score or more releases the answer."""


class LLMTeam:
    """Works on the question of one episode until it has an answer or an error.

    Its methods are given the recorder of the branch that they work in.
    """

    def __init__(self, roster: Roster, answer: Answer, settings: LLMSettings) -> None:
        self.roster, self.answer, self.settings = roster, answer, settings
        self.plan = self.refused = ""
        self.reports: list[str] = []
        self._purses = {"": Purse(settings.task_tokens, settings.task_money)}
        """What each branch may spend."""

    async def work(self, recorder: EpisodeRecorder) -> None:
        try:
            planned = await self._plan(recorder, first=True)
            for attempt in range(self.settings.replans + 1):
                self.plan = planned.text
                await self._carry_out(recorder, planned.steps)
                if await self._verified(recorder):
                    return
                if attempt < self.settings.replans:
                    reports = "\n".join(self.reports)
                    told = f"The answer was: {self.refused}\nReports so far:\n{reports}"
                    recorder.tell("planner", f"{told}\nWrite only what changes.")
                    planned = await self._plan(recorder)
            raise EpisodeOver(f"no answer passed the check in {self.settings.replans + 1} tries")
        except EpisodeOver as over:
            recorder.fail(str(over))

    # -- asking an agent -----------------------------------------------------------------------

    async def _ask(
        self, recorder: EpisodeRecorder, agent: str, read: Callable[[str], T]
    ) -> tuple[T, ModelCall]:
        """An agent's reply as `read` understands it, and the call that it came from."""
        for _ in range(self.settings.attempts):
            paid = await self._call(recorder, agent)
            call = paid.call
            try:
                found = read(call.text)
                if paid.cut and not _ends_early(call.text, read, found):
                    raise Malformed("Write a shorter one.")
                return found, call
            except Malformed as wrong:
                cut = "Your reply was cut because it is too long. " if paid.cut else ""
                complaint = f"{cut}{wrong}"
            facts = {"part": "malformed", "complaint": complaint}
            recorder.say(agent, SYSTEM, call.text, erred=True, call=call, **facts)
            recorder.count("malformed_replies")
            recorder.tell(agent, complaint)
        times = self.settings.attempts
        raise EpisodeOver(f"the {agent}'s reply could not be read {times} times: {complaint}")

    async def _call(self, recorder: EpisodeRecorder, agent: str) -> Paid:
        episode, branch = recorder.episode, recorder.branch
        messages = episode.context_of(agent, branch, episode.events)
        request = Request(episode.task_id, agent, messages, episode.seed, branch)
        with recorder.timed("model"):
            paid = await self.answer(request, self._purses[branch])
        recorder.count("estimated_calls", paid.estimated)
        return paid

    async def _act(self, recorder: EpisodeRecorder, agent: str) -> tuple[Called, str]:
        """An agent decides on a tool call and makes it; the call and what came back."""
        read = partial(read_call, tools=self.roster.tools[agent], made=recorder.calls)
        called, call = await self._ask(recorder, agent, read)
        return called, await recorder.use(agent, *called, call=call)

    def _tell(self, recorder: EpisodeRecorder, agent: str, text: str) -> None:
        """Carry something to an agent; the first time with the question."""
        episode = recorder.episode
        seen = episode.context_of(agent, recorder.branch, episode.events)
        if not any(episode.question in message.text for message in seen[1:]):
            text = f"Question: {_asked(episode)}\n{text}"
        recorder.tell(agent, text)

    # -- the plan and its steps ----------------------------------------------------------------

    async def _plan(self, recorder: EpisodeRecorder, first: bool = False, to: str = "") -> Planned:
        """The planner plans, for whoever has the first step unless it is said who."""
        read = partial(read_plan, workers=self.roster.workers, first=first)
        planned, call = await self._ask(recorder, "planner", read)
        if planned.impossible:
            recorder.say("planner", USER, planned.impossible, call=call, part="failure")
            raise EpisodeOver("the planner could not plan")
        to = to or planned.steps[0].agent
        steps = [[step.agent, step.text, sorted(step.after)] for step in planned.steps]
        text = planned.text if first or len(steps) > 1 else planned.steps[0].text
        facts: dict[str, Any] = {"part": "plan", "steps": steps}
        recorder.say("planner", to, text, planned.thought, call=call, **facts)
        return planned

    async def _replan(self, recorder: EpisodeRecorder, worker: str, wanted: str) -> None:
        """The planner says what changes in a step that does not work."""
        recorder.tell("planner", f"This was about: {wanted}\nWrite only what changes in it.")
        await self._plan(recorder, to=worker)

    async def _carry_out(self, recorder: EpisodeRecorder, steps: Sequence[PlannedStep]) -> None:
        """Do the steps in waves: those whose results others need come first."""
        todo = {at: step for at, step in enumerate(steps, 1) if step.agent != "verifier"}
        done = set(range(1, len(steps) + 1)) - todo.keys()
        while todo:
            ready = [at for at in todo if todo[at].after <= done]
            wave = [at for at in ready if todo[at].agent != "coder"]
            if wave:
                await self._look_up(recorder, [(at, todo[at]) for at in wave])
            else:  # one program for all of the coder's steps that can follow each other at once
                known = set(done)
                for at, step in todo.items():
                    if step.agent == "coder" and step.after <= known:
                        known.add(at)
                        wave.append(at)
                texts = [todo[at].text for at in wave]
                self.reports.append(await self._compute(recorder, "\n".join(texts)))
            done.update(wave)
            for at in wave:
                del todo[at]

    async def _look_up(
        self, recorder: EpisodeRecorder, steps: Sequence[tuple[int, PlannedStep]]
    ) -> None:
        """Do steps that do not need each other at the same time, each within an equal share."""
        shares = self._purses[""].shares(len(steps)) if len(steps) > 1 else []
        self._purses |= {str(at): share for at, share in enumerate(shares, 1)}
        works = [partial(self._guarded, number=number, step=step) for number, step in steps]
        found = await recorder.together(works)
        for share in shares:
            self._purses[""].spent += share.spent
        if recorder.episode.error:
            raise EpisodeOver(recorder.episode.error)
        new = [report for report in found if report]
        self.reports += new
        # Said by nobody in particular, so that what comes next is in nobody's branch.
        recorder.tell(steps[0][1].agent, "Reports:\n" + "\n".join(new))

    async def _guarded(self, recorder: EpisodeRecorder, number: int, step: PlannedStep) -> str:
        """A step in a branch: its trouble must not take the record of the others with it."""
        try:
            return await self._step(recorder, number, step)
        except EpisodeOver as over:
            recorder.fail(str(over))
            return ""

    async def _step(self, recorder: EpisodeRecorder, number: int, step: PlannedStep) -> str:
        """Call, read and judge until a report is approved."""
        wanted = f"Step {number}: {step.text}"
        self._tell(recorder, step.agent, wanted)
        for _ in range(self.settings.rounds):
            _, result = await self._act(recorder, step.agent)
            for agent in ("reader", self.roster.critic):
                self._tell(recorder, agent, f"{wanted}\n{result}")
            report, todo = await self._reported(recorder)
            if not todo:
                return f"- {report.text}"
            if todo == "plan":
                await self._replan(recorder, step.agent, wanted)
        raise EpisodeOver(f"step {number} brought no report that was approved")

    async def _reported(self, recorder: EpisodeRecorder) -> tuple[Report, Todo]:
        """The reader reports and the critic judges; once more when it only has to be read again."""
        for again in (False, True):
            report, call = await self._read(recorder)
            facts: dict[str, Any] = {"part": "finding", "found": report.found}
            recorder.say("reader", self.roster.critic, report.text, call=call, **facts)
            todo = await self._judge(recorder, "reader", self.roster.workers[0], again)
            if todo != "read":
                break
        return report, todo

    async def _read(self, recorder: EpisodeRecorder) -> tuple[Report, ModelCall]:
        """What the reader reports, after it has opened what it wants to."""
        tools = self.roster.tools.get("reader", [])
        for _ in range(self.settings.rounds + 1):
            read = partial(read_report, tools=tools, made=recorder.calls)
            said, call = await self._ask(recorder, "reader", read)
            if isinstance(said, Report):
                return said, call
            recorder.tell(self.roster.critic, await recorder.use("reader", *said, call=call))
        raise EpisodeOver("the reader opened one thing after the other and reported nothing")

    async def _compute(self, recorder: EpisodeRecorder, wanted: str) -> str:
        """The coder writes a program and the critic judges it, until it is approved."""
        known = "\n".join(self.reports)
        known = f"Reports:\n{known}\n" if known else ""
        for agent in ("coder", self.roster.critic):
            self._tell(recorder, agent, f"Plan:\n{self.plan}\n{known}To do: {wanted}")
        for _ in range(self.settings.rounds):
            called, result = await self._act(recorder, "coder")
            recorder.tell(self.roster.critic, f"Program:\n{called.argument}\nOutput:\n{result}")
            todo = await self._judge(recorder, "coder", "coder")
            if not todo:
                return f"- The program printed: {result}"
            if todo == "plan":
                await self._replan(recorder, "coder", wanted)
        raise EpisodeOver("no program was approved")

    async def _judge(
        self, recorder: EpisodeRecorder, reader: str, worker: str, again: bool = False
    ) -> Todo:
        """The critic judges; what `reader` or `worker` is to do about it.

        The second time around, what should be read again is called for again. One call is rated
        once: a second consent to it goes without ratings.
        """
        read = partial(read_judgement, rated=self.roster.rated)
        judged, call = await self._ask(recorder, self.roster.critic, read)
        todo: Todo = "call" if again and judged.todo == "read" else judged.todo
        recorder.count("alarms", bool(todo))
        facts: dict[str, Any] = {"part": "alarm" if todo else "approval"}
        if not todo and self.roster.rated and not again:
            facts["rated"] = True
        to = {"": "verifier", "read": reader, "plan": "planner"}.get(todo, worker)
        text = judged.reason if again and not todo else judged.text
        recorder.say(self.roster.critic, to, text, judged.thought, call=call, **facts)
        return todo

    async def _verified(self, recorder: EpisodeRecorder) -> bool:
        """Suggest an answer and check it; whether it stands."""
        reports = "\n".join(self.reports)
        told = f"Plan:\n{self.plan}\nReports:\n{reports}\nGive the answer."
        self._tell(recorder, "verifier", told)
        (thought, answer), call = await self._ask(recorder, "verifier", read_answer)
        recorder.say("verifier", "verifier", answer, thought, call=call, part="suggestion")
        recorder.tell("verifier", "Check this answer as if somebody else had given it.")
        (thought, reason, score), call = await self._ask(recorder, "verifier", read_check)
        stands = score >= PASSED
        to = "verifier" if stands else "planner"
        facts: dict[str, Any] = {"part": "check", "score": score}
        recorder.say("verifier", to, reason, thought, call=call, **facts)
        if stands:
            recorder.say(SYSTEM, USER, answer, "The check passed.", **{**facts, "part": "verdict"})
            recorder.episode.answer = answer
        else:
            self.refused = answer
        return stands


def _asked(episode: Episode) -> str:
    """The question, with what was said before it."""
    if not episode.history:
        return episode.question
    return f"{episode.question}\nEarlier messages:\n{conversation(episode.history)}"


def _ends_early(text: str, read: Callable[[str], T], found: T) -> bool:
    """Whether what was read does not reach into the last line, so that a cut there is no loss."""
    try:
        return read(text.rstrip().rpartition("\n")[0]) == found
    except Malformed:
        return False


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


def _stand_in(roster: Roster) -> Answer:
    """Answers in the place of a model: what fits, at the assumed length."""
    said = count(1)

    async def answer(request: Request, purse: Purse) -> Paid:
        text = _reply(roster, request, next(said))
        return Paid(ModelCall("", text, request.prompt_tokens, 0, count_tokens(text)))

    return answer


def _reply(roster: Roster, request: Request, number: int) -> str:
    agent = request.agent
    if agent == "planner":
        lookers = [name for name in roster.workers if name != "coder"][:1] * STEPS
        agents = [*lookers, *(["coder"] if "coder" in roster.tools else []), "verifier"]
        each = _WORDS[: len(_WORDS) // len(agents)].strip()
        return "\n".join(f"{number}. {name}: {each}" for number, name in enumerate(agents, 1))
    if agent == "coder":
        return f"THOUGHT: so\nINPUT:\n```py\n{_WORDS}{number}\n```"
    if agent in roster.workers:
        return f"THOUGHT: so\nTOOL: {roster.tools[agent][0].name}\nINPUT: {_WORDS}{number}"
    if agent == "reader":
        return f"REPORT: {_WORDS}"
    if agent == roster.critic:
        rated = "\n".join(f"{name}: good" for name in CRITERIA)
        return f"{rated if roster.rated else 'VERDICT: approve'}\nREASON: {_WORDS}"
    if request.messages[-1].text.endswith("Give the answer."):
        return f"THOUGHT: {_WORDS}\nANSWER: so"
    return f"THOUGHT: so\nREASON: {_WORDS}\nSCORE: 4"


def _stand_in_tool(tool: Tool) -> Tool:
    """A tool by the name of a task's own, which returns text of the assumed length."""

    async def run(argument: str) -> str:
        return "words " * (RESULT_TOKENS * 4 // 6)

    if tool.schema:
        # As text: the schema is in the prompt all the same, and these words are no JSON.
        return replace(tool, run=run, body="text", session=None, with_state=None)
    return Tool(tool.name, run, about=_WORDS[:80], body="code" if tool.name == CODE else "text")


# -- the teacher -----------------------------------------------------------------------------

_NOT_IDENTITY = (
    *("model", "prices", "budget_tokens", "budget_money"),
    *("slots", "timeout_s", "retries", "backoff_s"),
)
"""Settings that may change when a run is continued: how, where and for how much, not what."""


class LLMTeacher:
    """Records a team of language models at work; see the module's docstring."""

    name = "llm"

    def __init__(self, settings: LLMSettings) -> None:
        self.settings = settings
        self._client: ChatClient | None = None

    def identity(self) -> Json:
        """What decides what is recorded, for a manifest."""
        kept = {k: v for k, v in to_json(self.settings).items() if k not in _NOT_IDENTITY}
        name, price = self._model()
        return {"model": name, **kept, "price": to_json(price) if price else None}

    def _model(self) -> tuple[str, Price | None]:
        name = resolve(self.settings.model).model or self.settings.model
        return name, find_price(self.settings.prices, name)

    async def estimate(self, tasks: Sequence[Task], tools_of: ToolsOf) -> CostEstimate:
        """What recording these tasks will cost; no call is made."""
        calls = prompt = sampled = 0
        rehearsed = tasks[:: -(-len(tasks) // SAMPLE) or 1]
        for task in rehearsed:
            tools = await tools_of(task.public())
            toolbox = Toolbox(map(_stand_in_tool, tools.values()))
            answer = _stand_in(roster_for(toolbox))
            episode = await _record(task.public(), toolbox, answer, LLMSettings(), 0)
            assert episode.answer is not None, episode.error
            tokens = episode.count_tokens(len)
            calls += len(episode.calls)
            prompt, sampled = prompt + tokens.prompt, sampled + tokens.sampled
        scale = len(tasks) / max(1, len(rehearsed))
        calls, prompt, sampled = (round(each * scale) for each in (calls, prompt, sampled))
        price = self._model()[1]
        money = None if price is None else price.of(prompt, 0, sampled)
        return CostEstimate(len(tasks), calls, prompt, sampled, money)

    @asynccontextmanager
    async def opened(self, out: Path) -> AsyncIterator[LLMTeacher]:
        """Keep all answers of the model beside an episodes file, and close the connections."""
        if self._client is not None:
            raise UsageError("the teacher is open already.")
        client = self._client = ChatClient(self.settings, journal_of(out))
        try:
            yield self
        finally:
            self._client = None
            await client.close()

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode:
        """Work on one public task; what the team could not do is in `episode.error`."""
        own = None if self._client else ChatClient(self.settings)
        client = self._client or own
        assert client is not None
        try:
            return await _record(task.public(), toolbox, client.answer, self.settings, seed)
        finally:
            if own is not None:
                await own.close()


async def _record(
    task: Task, toolbox: Toolbox, answer: Answer, settings: LLMSettings, seed: int
) -> Episode:
    started = time.monotonic()
    async with toolbox.opened() as tools:
        roster = roster_for(tools)
        episode = Episode(task.id, task.question, LLMTeacher.name, roster.agents, seed=seed)
        episode.meta.update(task.meta)
        episode.history = task.history
        recorder = EpisodeRecorder(episode, tools)
        recorder.say(USER, "planner", _asked(episode))
        await LLMTeam(roster, answer, settings).work(recorder)
    episode.seconds["total"] = time.monotonic() - started
    return episode
