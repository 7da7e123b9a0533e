"""The teacher `llm`: a team of language models behind any OpenAI-compatible server.

    teacher = LLMTeacher(LLMSettings("openai:NAME@http://localhost:8000"))
    async with teacher.opened(out):
        episode = await teacher.record(task.public(), toolbox)

The planner writes steps and says which of them need each other; steps that do not are done at the
same time. For each step a worker decides on a call, a reader reports what came back and a critic
judges it; an objection has it read again, makes another call, or sends the step to the planner. The
verifier suggests an answer and scores it; a score of 2 or less goes back to the planner.

Every agent is given exactly what `Episode.context_of` says that it has seen, and replies with JSON
by a schema, which a server that can is made to follow. A reply that cannot be read or breaks a rule
(a search that was made before, a report that only repeats the query, an answer that stands in no
passage) is kept as a message with the part `malformed` (it was paid for); its agent is told why and
asked again, hotter. Opened beside an episodes file, the teacher keeps a journal of all answers of
its model there (`OUT.calls.jsonl`), so that a run that was stopped, however it was stopped, pays
for nothing twice.
"""

from __future__ import annotations

import json
import re
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
from coa.recording.alone import record_alone
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
from coa.recording.episode import SYSTEM, USER, Episode, ModelCall, ToolUse
from coa.recording.recorder import CRITERIA, EpisodeRecorder
from coa.recording.replies import (
    Called,
    Malformed,
    Planned,
    PlannedStep,
    ReplyForm,
    Report,
    Todo,
    answer_form,
    call_form,
    check_form,
    judge_form,
    plan_form,
    report_form,
)
from coa.tasks import Task
from coa.tools.base import Tool, Toolbox

__all__ = ["CostEstimate", "LLMSettings", "LLMTeacher"]

T = TypeVar("T")
ToolsOf = Callable[[Task], Awaitable[Toolbox]]
Answer = Callable[[Request, Purse], Awaitable[Paid]]
"""Whatever answers for the agents: `ChatClient.answer`."""
SHOWN, MOST_PARTS = 6, 50
_LISTED = re.compile(r"[,;|\n]|\band\b")
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
        self,
        recorder: EpisodeRecorder,
        agent: str,
        form: ReplyForm[T],
        check: Callable[[T], str] = lambda found: "",
    ) -> tuple[T, ModelCall]:
        """An agent's reply, read by its form, and the call that it came from. `check` says which
        rule it breaks, if it does."""
        for attempt in range(self.settings.attempts):
            paid = await self._call(recorder, agent, form.schema, attempt)
            call = paid.call
            try:
                found = form.read(call.text, paid.cut)
                if wrong := check(found):
                    raise Malformed(wrong)
                return found, call
            except Malformed as problem:
                complaint = str(problem)
            facts = {"part": "malformed", "complaint": complaint}
            recorder.say(agent, SYSTEM, call.text, erred=True, call=call, **facts)
            recorder.count("malformed_replies")
            recorder.tell(agent, complaint)
        times = self.settings.attempts
        raise EpisodeOver(f"the {agent}'s reply could not be read {times} times: {complaint}")

    async def _call(
        self, recorder: EpisodeRecorder, agent: str, schema: Json, attempt: int
    ) -> Paid:
        episode, branch = recorder.episode, recorder.branch
        messages = episode.context_of(agent, branch, episode.events)
        request = Request(episode.task_id, agent, messages, episode.seed, branch, schema, attempt)
        with recorder.timed("model"):
            paid = await self.answer(request, self._purses[branch])
        recorder.count("estimated_calls", paid.estimated)
        return paid

    async def _act(self, recorder: EpisodeRecorder, agent: str) -> tuple[Called, str]:
        """An agent decides on a tool call and makes it; the call and what came back."""
        form, check = call_form(self.roster.tools[agent]), partial(_repeats, recorder)
        called, call = await self._ask(recorder, agent, form, check)
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
        form = plan_form(self.roster.workers, not to, first)
        planned, call = await self._ask(recorder, "planner", form)
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
            called, result = await self._act(recorder, step.agent)
            self._tell(recorder, "reader", f"{wanted}\n{result}")
            searched = f"{wanted}\nSearched for: {called.argument}\n{result}"
            self._tell(recorder, self.roster.critic, searched)
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
            check = partial(_says_nothing, recorder)
            said, call = await self._ask(recorder, "reader", report_form(tools), check)
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
        form = judge_form(self.roster.rated, self.roster.coding)
        judged, call = await self._ask(recorder, self.roster.critic, form)
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
        check = partial(_stands_nowhere, recorder, counted=len(self.reports) > 1)
        (thought, answer), call = await self._ask(recorder, "verifier", answer_form(), check)
        recorder.say("verifier", "verifier", answer, thought, call=call, part="suggestion")
        asked = "Check this answer as if somebody else had given it."
        if _terms(answer) in map(_terms, recorder.calls):
            asked += " It is word for word what was searched for: does a report state it?"
        recorder.tell("verifier", asked)
        (reason, score), call = await self._ask(recorder, "verifier", check_form())
        stands = score >= PASSED
        to = "verifier" if stands else "planner"
        facts: dict[str, Any] = {"part": "check", "score": score}
        recorder.say("verifier", to, reason, call=call, **facts)
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


# -- rules that a reply may break: a sentence for its agent, or nothing ------------------------


def _terms(text: str) -> tuple[str, ...]:
    """The words of a text, whatever their case and the signs between them."""
    return tuple(re.findall(r"\w+", re.sub(r"(?<=\d),(?=\d{3})", "", text).casefold()))


def _repeats(recorder: EpisodeRecorder, called: Called) -> str:
    """A call that was made before; searches that differ in the order of their words bring the
    same."""
    made, argument = recorder.calls, called.argument
    program = "```" in argument or argument.startswith("{")
    alike = set() if program else {tuple(sorted(_terms(each))) for each in made}
    if argument not in made and tuple(sorted(_terms(argument))) not in alike:
        return ""
    before = "" if program or len(made) > SHOWN else f" Made so far: {'; '.join(sorted(made))}."
    return f"This call was made before and brings the same again. Make another one.{before}"


def _says_nothing(recorder: EpisodeRecorder, said: Report | Called) -> str:
    if isinstance(said, Called):
        return _repeats(recorder, said)
    if said.found and _terms(said.text) in map(_terms, recorder.calls):
        return "Your report only repeats what was searched for. Report what a passage states."
    return ""


def _stands_nowhere(recorder: EpisodeRecorder, found: tuple[str, str], *, counted: bool) -> str:
    """An answer stands in what tools returned, all parts of a list somewhere; yes and no need not,
    and neither does a number that is counted or comes of several reports."""
    answer, question = found[1], " ".join(_terms(recorder.episode.question))
    counted = counted or "how many" in question or "number of" in question
    used = (e for e in recorder.episode.events if isinstance(e, ToolUse) and not e.failure)
    results = [use.result for use in used]
    seen = [f" {' '.join(_terms(result))} " for result in results]

    def stands(part: str) -> bool:
        words = _terms(part)
        if words in (("yes",), ("no",)) or (counted and words and all(map(str.isdecimal, words))):
            return True
        if not words:
            return any(part.strip() in result for result in results)
        return any(f" {' '.join(words)} " in text for text in seen)

    parts = [part for part in _LISTED.split(answer)[:MOST_PARTS] if part.strip()]
    if stands(answer) or all(map(stands, parts)):
        return ""
    return (
        f"{answer[:100]!r} stands in nothing that a tool returned. Copy the answer from there, "
        "word for word."
    )


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
    return json.dumps({"thought": "so", **_said(roster, request, number)})


def _said(roster: Roster, request: Request, number: int) -> Json:
    agent = request.agent
    if agent == "planner":
        lookers = [name for name in roster.workers if name != "coder"][:1] * STEPS
        agents = [*lookers, *(["coder"] if "coder" in roster.tools else [])]
        each = _WORDS[: len(_WORDS) // (len(agents) + 1)].strip()
        one = len(roster.workers) == 1
        steps = [
            {**({} if one else {"agent": name}), "task": each, "after": [*range(1, at)]}
            for at, name in enumerate(agents, 1)
        ]
        return {"steps": steps, "combine": each}
    if agent in roster.workers:
        tools, words = roster.tools[agent], f"{_WORDS}{number}"
        given = {"program" if tools[0].body == "code" else "input": words}
        return given if len(tools) == 1 else {"call": {"tool": tools[0].name, **given}}
    if agent == "reader":
        opens = {"open": ""} if roster.tools.get("reader") else {}
        return {**opens, "found": True, "report": _WORDS}
    if agent == roster.critic:
        rated = dict.fromkeys(CRITERIA, "good")
        return {**(rated if roster.rated else {"verdict": "approve"}), "reason": _WORDS}
    if request.messages[-1].text.endswith("Give the answer."):
        return {"thought": _WORDS, "answer": "words"}
    return {"reason": _WORDS, "score": 4}


async def _stand_in_alone(request: Request, purse: Purse) -> Paid:
    """In the place of a model that works alone: it makes its calls and answers."""
    assert request.body is not None
    made = sum(each["role"] == "tool" for each in request.body["messages"])
    message: Json = {"role": "assistant", "content": _WORDS}
    if made < STEPS:
        declared = request.body["tools"][0]["function"]
        names = declared["parameters"].get("properties", {})
        given = json.dumps(dict.fromkeys(names, f"{_WORDS}{made}"))
        function = {"name": declared["name"], "arguments": given}
        message["tool_calls"] = [{"id": str(made), "type": "function", "function": function}]
    text = json.dumps(message)
    prompt = request.prompt_tokens + count_tokens(json.dumps(request.body["tools"]))
    call = ModelCall("", text, prompt, 0, REPLY_TOKENS)
    return Paid(call, response={"choices": [{"message": message, "finish_reason": "stop"}]})


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
            alone = self.settings.dialect == "tools"
            answer = _stand_in_alone if alone else _stand_in(roster_for(toolbox))
            # The model is never asked, but has to be one on a server.
            settings = LLMSettings(self.settings.model, dialect=self.settings.dialect)
            episode = await _record(task.public(), toolbox, answer, settings, 0)
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
    if settings.dialect == "tools":
        return await record_alone(task, toolbox, answer, settings, seed, LLMTeacher.name)
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
