"""The flow of a team of language models: plan, act, reflect, plan again, verify, answer.

The planner writes steps and says which of them need each other; steps that do not are done at the
same time. For each step a worker decides on a call, a reader reports what came back and a critic
judges it; an objection has it read again, makes another call, or sends the step to the planner. The
verifier suggests an answer and scores it; a score of 2 or less goes back to the planner.

Every agent is given exactly what `Episode.context_of` says that it has seen. A reply that cannot be
read is kept as a message with the part `malformed` (it was paid for), and its agent is told why and
asked again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from coa.recording.budget import Allowance
from coa.recording.chat import EpisodeOver, LLMSettings, Mind, Request, amount_of
from coa.recording.contracts import Malformed
from coa.recording.episode import SYSTEM, USER, ChatMessage, Message, ModelCall, ToolUse
from coa.recording.llm_replies import (
    Called,
    Judgement,
    Planned,
    PlannedStep,
    Report,
    read_call,
    read_check,
    read_judgement,
    read_plan,
    read_report_or_call,
    read_suggestion,
)
from coa.recording.recorder import EpisodeRecorder
from coa.recording.roster import Roster
from coa.tools.base import ToolCall

# ------------------------------------------------------------------------------------------------
# Labelled text: what stands after the labels of an agent's reply.
#
# Labels may be in any case and marked up, have a wide colon, or be the keys of a JSON object, as
# models write them that were trained to call tools.
# ------------------------------------------------------------------------------------------------


T = TypeVar("T")
PASSED = 3
"""A check with this score or more releases the answer."""


class Talk:
    """Asks the agents of one episode, within what its task may spend."""

    def __init__(self, mind: Mind, settings: LLMSettings, task_id: str, seed: int) -> None:
        self.mind, self.settings, self.task_id, self.seed = mind, settings, task_id, seed
        self.allowances = {"": Allowance(settings.task_limit)}
        self.seconds = {"model": 0.0, "tools": 0.0}
        self._asked: Counter[tuple[str, str, tuple[ChatMessage, ...]]] = Counter()

    async def ask(
        self, desk: EpisodeRecorder, agent: str, read: Callable[[str], T]
    ) -> tuple[T, ModelCall]:
        """An agent's reply as `read` understands it, and the call that it came from."""
        for _ in range(self.settings.attempts):
            call, cut = await self._call(desk, agent)
            try:
                found = read(call.text)
                if cut and not _ends_early(call.text, read, found):
                    raise Malformed("Write a shorter one.")
                return found, call
            except Malformed as wrong:
                complaint = str(wrong)
            if cut:
                complaint = f"Your reply was cut because it is too long. {complaint}"
            facts = {"part": "malformed", "complaint": complaint}
            desk.add(Message(agent, SYSTEM, call.text, "", facts, True, desk.branch, call))
            desk.count("malformed_replies")
            desk.tell(agent, complaint)
        times = self.settings.attempts
        raise EpisodeOver(f"the {agent}'s reply could not be read {times} times: {complaint}")

    async def _call(self, desk: EpisodeRecorder, agent: str) -> tuple[ModelCall, bool]:
        messages = desk.episode.context_of(agent, desk.branch, desk.episode.events)
        same = (agent, desk.branch, tuple(messages))
        request = Request(
            self.task_id, agent, messages, self.seed, desk.branch, ordinal=self._asked[same]
        )
        self._asked[same] += 1
        allowance = self.allowances[desk.branch]
        most = self.mind.price(request.prompt_tokens, self.settings.longest)
        if allowance.lacks(most):
            raise EpisodeOver(f"over the task's budget of {self.settings.task_limit}")
        started = time.monotonic()
        paid = await self.mind.answer(request)
        self.seconds["model"] += time.monotonic() - started
        allowance.spent = allowance.spent.plus(amount_of(paid.call))
        desk.count("estimated_calls", paid.estimated)
        return paid.call, paid.cut

    def share(self, count: int) -> None:
        """Give each of `count` branches its part of what is left."""
        for number, share in enumerate(self.allowances[""].shares(count), start=1):
            self.allowances[str(number)] = share

    def gather(self, count: int) -> None:
        """Add up what the branches have spent."""
        for number in range(1, count + 1):
            whole, part = self.allowances[""], self.allowances[str(number)]
            whole.spent = whole.spent.plus(part.spent)

    async def use(self, desk: EpisodeRecorder, agent: str, called: Called, call: ModelCall) -> str:
        """An agent makes the call that it has decided on."""
        say(desk, agent, SYSTEM, called.argument, call, called.thought, part="query")
        desk.calls.add(called.argument)
        started = time.monotonic()
        seen = await desk.toolbox.call(ToolCall(called.tool, called.argument))
        self.seconds["tools"] += time.monotonic() - started
        desk.add(
            ToolUse(
                agent, called.tool, called.argument, seen.text, seen.failure, branch=desk.branch
            )
        )
        return seen.text


def say(
    desk: EpisodeRecorder,
    agent: str,
    to: str,
    text: str,
    call: ModelCall,
    thought: str = "",
    **facts: Any,
) -> None:
    desk.add(Message(agent, to, text, thought, facts, False, desk.branch, call))


def _ends_early(text: str, read: Callable[[str], T], found: T) -> bool:
    """Whether what was read does not reach into the last line, so that a cut there is no loss."""
    try:
        return read(text.rstrip().rpartition("\n")[0]) == found
    except Malformed:
        return False


class LLMTeam:
    """Works on the question of one episode until it has an answer or an error."""

    def __init__(self, roster: Roster, talk: Talk) -> None:
        self.roster, self.talk, self.settings = roster, talk, talk.settings
        self.plan = self.refused = ""
        self.reports: list[str] = []

    async def work(self, desk: EpisodeRecorder) -> None:
        try:
            planned = await self._plan(desk, first=True)
            for attempt in range(self.settings.replans + 1):
                self.plan = planned.text
                await self._carry_out(desk, planned.steps)
                if await self._verified(desk):
                    return
                if attempt < self.settings.replans:
                    reports = "\n".join(self.reports)
                    told = f"The answer was: {self.refused}\nReports so far:\n{reports}"
                    desk.tell("planner", f"{told}\nWrite only what changes.")
                    planned = await self._plan(desk)
            raise EpisodeOver(f"no answer passed the check in {self.settings.replans + 1} tries")
        except EpisodeOver as over:
            desk.fail(str(over))

    async def _plan(self, desk: EpisodeRecorder, first: bool = False, to: str = "") -> Planned:
        """The planner plans, for whoever has the first step unless it is said who."""
        read = partial(read_plan, workers=self.roster.workers, first=first)
        planned, call = await self.talk.ask(desk, "planner", read)
        if planned.impossible:
            say(desk, "planner", USER, planned.impossible, call, part="failure")
            raise EpisodeOver("the planner could not plan")
        to = to or planned.steps[0].agent
        steps = [[step.agent, step.text, sorted(step.after)] for step in planned.steps]
        text = planned.text if first or len(steps) > 1 else planned.steps[0].text
        say(desk, "planner", to, text, call, planned.thought, part="plan", steps=steps)
        return planned

    # -- the steps -----------------------------------------------------------------------------

    async def _carry_out(self, desk: EpisodeRecorder, steps: Sequence[PlannedStep]) -> None:
        """Steps in waves: those whose results others need come first."""
        todo = {at: step for at, step in enumerate(steps, 1) if step.agent != "verifier"}
        done = {at for at, step in enumerate(steps, 1) if step.agent == "verifier"}
        while todo:
            ready = [at for at in todo if todo[at].after <= done]
            programs = [at for at in ready if todo[at].agent == "coder"]
            if programs == ready:  # one program for all of them, and for those that follow at once
                wave = self._programs(todo, done)
                texts = [todo[at].text for at in wave]
                self.reports.append(await self._compute(desk, "\n".join(texts)))
            else:
                wave = [at for at in ready if at not in programs]
                await self._look_up(desk, [(at, todo[at]) for at in wave])
            done.update(wave)
            for at in wave:
                del todo[at]

    def _programs(self, todo: dict[int, PlannedStep], done: set[int]) -> list[int]:
        """The coder's steps that can be done now, one after the other."""
        known, found = set(done), list[int]()
        for at, step in todo.items():
            if step.agent == "coder" and step.after <= known:
                known.add(at)
                found.append(at)
        return found

    async def _look_up(
        self, desk: EpisodeRecorder, steps: Sequence[tuple[int, PlannedStep]]
    ) -> None:
        """Steps that do not need each other, at the same time."""
        works = [partial(self._guarded, number=number, step=step) for number, step in steps]
        if len(works) > 1:
            self.talk.share(len(works))
        found = await desk.together(works)
        if len(works) > 1:
            self.talk.gather(len(works))
        if desk.episode.error:
            raise EpisodeOver(desk.episode.error)
        new = [report for report in found if report]
        self.reports += new
        # Said by nobody in particular, so that what comes next is in nobody's branch.
        desk.tell(steps[0][1].agent, "Reports:\n" + "\n".join(new))

    async def _guarded(self, desk: EpisodeRecorder, number: int, step: PlannedStep) -> str:
        """A step in a branch: its trouble must not take the record of the others with it."""
        try:
            return await self._step(desk, number, step)
        except EpisodeOver as over:
            desk.fail(str(over))
            return ""

    async def _step(self, desk: EpisodeRecorder, number: int, step: PlannedStep) -> str:
        """Call, read and judge until a report is approved."""
        wanted = f"Step {number}: {step.text}"
        self._tell(desk, step.agent, wanted)
        for _ in range(self.settings.rounds):
            tools = self.roster.tools[step.agent]
            read = partial(read_call, tools=tools, made=desk.calls)
            called, call = await self.talk.ask(desk, step.agent, read)
            result = await self.talk.use(desk, step.agent, called, call)
            for agent in ("reader", self.roster.critic):
                self._tell(desk, agent, f"{wanted}\n{result}")
            report, todo = await self._reported(desk)
            if not todo:
                return f"- {report.text}"
            if todo == "plan":
                await self._change(desk, step.agent, wanted)
        raise EpisodeOver(f"step {number} brought no report that was approved")

    async def _reported(self, desk: EpisodeRecorder) -> tuple[Report, str]:
        """The reader reports and the critic judges; once more when it only has to be read again."""
        for again in (False, True):
            report, call = await self._read(desk)
            critic, found = self.roster.critic, report.found
            say(desk, "reader", critic, report.text, call, part="finding", found=found)
            judged, call = await self._judge(desk)
            todo = "call" if again and judged.todo == "read" else judged.todo
            to = {"": "verifier", "read": "reader", "plan": "planner"}.get(todo, "")
            self._pronounce(desk, judged, call, to or self.roster.workers[0], again)
            if todo != "read":
                break
        return report, todo

    async def _read(self, desk: EpisodeRecorder) -> tuple[Report, ModelCall]:
        """What the reader reports, after it has opened what it wants to."""
        tools = self.roster.tools.get("reader", [])
        for _ in range(self.settings.rounds + 1):
            read = partial(read_report_or_call, tools=tools, made=desk.calls)
            said, call = await self.talk.ask(desk, "reader", read)
            if isinstance(said, Report):
                return said, call
            result = await self.talk.use(desk, "reader", said, call)
            desk.tell(self.roster.critic, result)
        raise EpisodeOver("the reader opened one thing after the other and reported nothing")

    async def _compute(self, desk: EpisodeRecorder, wanted: str) -> str:
        """The coder writes a program and the critic judges it, until it is approved."""
        known = "\n".join(self.reports)
        known = f"Reports:\n{known}\n" if known else ""
        for agent in ("coder", self.roster.critic):
            self._tell(desk, agent, f"Plan:\n{self.plan}\n{known}To do: {wanted}")
        for _ in range(self.settings.rounds):
            read = partial(read_call, tools=self.roster.tools["coder"], made=desk.calls)
            called, call = await self.talk.ask(desk, "coder", read)
            result = await self.talk.use(desk, "coder", called, call)
            desk.tell(self.roster.critic, f"Program:\n{called.argument}\nOutput:\n{result}")
            judged, call = await self._judge(desk)
            to = {"": "verifier", "plan": "planner"}.get(judged.todo, "coder")
            self._pronounce(desk, judged, call, to)
            if not judged.todo:
                return f"- The program printed: {result}"
            if judged.todo == "plan":
                await self._change(desk, "coder", wanted)
        raise EpisodeOver("no program was approved")

    async def _judge(self, desk: EpisodeRecorder) -> tuple[Judgement, ModelCall]:
        read = partial(read_judgement, rated=self.roster.rated)
        return await self.talk.ask(desk, self.roster.critic, read)

    def _pronounce(
        self,
        desk: EpisodeRecorder,
        judged: Judgement,
        call: ModelCall,
        to: str,
        again: bool = False,
    ) -> None:
        """Say a judgement. One call is rated once: a second consent to it goes without ratings."""
        desk.count("alarms", bool(judged.todo))
        facts: dict[str, Any] = {"part": "alarm" if judged.todo else "approval"}
        text = judged.text
        if not judged.todo and self.roster.rated:
            facts |= {} if again else {"rated": True}
            text = judged.reason if again else text
        say(desk, self.roster.critic, to, text, call, judged.thought, **facts)

    async def _change(self, desk: EpisodeRecorder, worker: str, wanted: str) -> None:
        """The planner says what changes in a step that does not work."""
        desk.tell("planner", f"This was about: {wanted}\nWrite only what changes in it.")
        await self._plan(desk, to=worker)

    # -- the end -------------------------------------------------------------------------------

    async def _verified(self, desk: EpisodeRecorder) -> bool:
        """Suggest an answer and check it; whether it stands."""
        reports = "\n".join(self.reports)
        told = f"Plan:\n{self.plan}\nReports:\n{reports}\nGive the answer."
        self._tell(desk, "verifier", told)
        suggested, call = await self.talk.ask(desk, "verifier", read_suggestion)
        answer = suggested.answer
        say(desk, "verifier", "verifier", answer, call, suggested.thought, part="suggestion")
        desk.tell("verifier", "Check this answer as if somebody else had given it.")
        check, call = await self.talk.ask(desk, "verifier", read_check)
        stands = check.score >= PASSED
        to = "verifier" if stands else "planner"
        facts: dict[str, Any] = {"part": "check", "score": check.score}
        say(desk, "verifier", to, check.text, call, check.thought, **facts)
        if stands:
            facts = {**facts, "part": "verdict"}
            desk.add(Message(SYSTEM, USER, answer, "The check passed.", facts))
            desk.episode.answer = answer
        else:
            self.refused = answer
        return stands

    def _tell(self, desk: EpisodeRecorder, agent: str, text: str) -> None:
        """Carry something to an agent; the first time with the question."""
        seen = desk.episode.context_of(agent, desk.branch, desk.episode.events)
        if not any(desk.episode.question in message.text for message in seen[1:]):
            text = f"Question: {desk.episode.question}\n{text}"
        desk.tell(agent, text)
