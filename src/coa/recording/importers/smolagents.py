"""Memory of smolagents: `agent.memory.get_full_steps()`, `get_succinct_steps()`, or a `RunResult`.

Each action and each plan is a model call. Full steps hold what it was given; for succinct ones it
is put together from the steps before as smolagents does it, but without the system prompt, which
they do not have. So that a session of memory is like one of the proxy, messages are joined and
roles changed as smolagents does before it sends them.

A list of steps is one agent. For a team an object holds them:

    {"name": "manager", "system_prompt": "...", "tools": [...], "steps": [...],
     "managed_agents": {"researcher": {"steps": [...]}, ...}}

A managed agent's memory has only its last run: it is emptied at each call. What the runs before did
is not known; their jobs and their reports are, from the manager's memory.

A memory does not say its version. Steps are known as they have been since 1.8: in time they got a
number and a time of their own, and plans lost the list of facts before them. A field that none of
these versions has is counted: what it says may stand nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from coa.io.runs import Json
from coa.recording.calls import LoggedCall, LoggedSession
from coa.recording.episode import ToolSpec
from coa.recording.importers.reading import SECONDS, Fields, Notes, documents_of, opening
from coa.recording.importers.team import declared_tool, smolagents_call
from coa.recording.importers.work import joined, led, made_tool, text_of
from coa.recording.programs import PYTHON
from coa.recording.wire import FunctionCall, WireExchange, WireMessage, WireRole, WireUsage

_ACTION = frozenset({"step_number", "tool_calls", "observations", "model_output", "action_output"})
_FIELDS = _ACTION | {
    *("timing", "start_time", "end_time", "duration", "step", "token_usage", "error"),
    *("model_input_messages", "model_output_message", "observations_images", "code_action"),
    *("is_final_answer", "plan", "facts", "task", "task_images", "system_prompt", "output"),
    *("model_output_message_facts", "model_output_message_plan"),
}
"""Of all kinds of steps, in the versions that are known."""
_ROLES: dict[str, WireRole] = {
    **{"system": "system", "user": "user", "assistant": "assistant"},
    **{"tool-call": "assistant", "tool-response": "user"},
}
_PROCEED = "Now proceed and carry out this plan."
_RETRY = (
    "\nNow let's retry: take care not to repeat previous errors! If you have retried several times,"
    " try a completely different approach.\n"
)
_REPORT = re.compile(r"^Here is the final answer from your managed agent '([^'\n]+)':", re.M)


def detect(head: bytes, path: Path) -> bool:
    first = opening(head)
    steps = first.get("steps") if isinstance(first, dict) else first
    if isinstance(steps, list) and steps and isinstance(steps[0], list):
        steps = steps[0]
    if isinstance(first, dict) and isinstance(first.get("memory"), dict | list):
        return True
    return isinstance(steps, list) and any(map(_is_step, steps[:3]))


def _is_step(value: Any) -> bool:
    if not isinstance(value, dict) or "step_type" in value or "source" in value:
        return False
    if "task" in value:
        return not (value.keys() - {"task", "task_images"})
    if "plan" in value:
        return bool(value.keys() & {"model_output_message", "timing"})
    return len(value.keys() & _ACTION) >= 3 or "system_prompt" in value.keys() & {"system_prompt"}


def read(files: Sequence[Path], notes: Notes) -> Iterator[LoggedSession]:
    for _path, where, value in documents_of(files, notes):
        for number, memory in enumerate(_memories(value)):
            place = f"{where}#{number + 1}" if number else where
            if memory is None:
                notes.add("values without steps left out", place)
                continue
            session = _session(Fields(memory, place, notes))
            if session is not None:
                yield session


def _memories(value: Any) -> Iterator[Json | None]:
    """The memory of each agent or team in a value."""
    if isinstance(value, dict) and isinstance(value.get("memory"), dict | list):
        held = value["memory"]
        value = {**value, **(held if isinstance(held, dict) else {"steps": held})}
    if isinstance(value, dict):
        yield value if isinstance(value.get("steps"), list) else None
        return
    held = value if isinstance(value, list) else []
    if any(isinstance(e, list) or (isinstance(e, dict) and "steps" in e) for e in held):
        for each in held:
            yield from _memories(each)
    else:
        yield {"steps": held} if held else None


# -- steps of one agent ----------------------------------------------------------------------------


@dataclass(eq=False)
class _Made:
    """One model call of a memory."""

    agent: str
    exchange: WireExchange
    begun: float | None
    ended: float | None
    calls: tuple[FunctionCall, ...]
    fields: Fields


@dataclass
class _Memory:
    """What one agent's memory says of one run or of several."""

    name: str
    system: str
    tools: tuple[ToolSpec, ...]
    made: list[_Made] = field(default_factory=list)
    results: list[tuple[str, WireMessage]] = field(default_factory=list)
    task: str = ""
    ended: bool = False
    answer: str | None = None
    stopped: str = ""
    managed: list[str] = field(default_factory=list)
    """Agents that it asked, as their reports say."""


class _StepReader:
    """Reads the steps of one agent, and keeps the messages that they become."""

    def __init__(self, held: Fields, name: str, notes: Notes) -> None:
        self.held, self.notes = held, notes
        system = held.value("system_prompt")
        if isinstance(system, dict):
            system = system.get("system_prompt")
        self.memory = _Memory(name, system if isinstance(system, str) else "", _tools(held))
        self.sent: list[WireMessage] = []
        self.model = held.text("model_id", "model_name")

    def read(self) -> _Memory:
        for step in self.held.objects("steps"):
            kept = step.held
            strange = [name for name in kept.keys() - _FIELDS if name in step]
            if strange and kept.keys() & _FIELDS:
                self.notes.add("steps with fields of a version that is not known", step.where)
            if "step_number" in kept or len(kept.keys() & _ACTION) >= 3:
                self._action(step)
            elif "plan" in kept:
                self._plan(step)
            elif "system_prompt" in kept:
                self.memory.system = self.memory.system or step.text("system_prompt")
            elif "task" in kept:
                self._task(step)
            elif "output" in kept:
                self.memory.answer = text_of(step.value("output"))
            else:
                self.notes.add("steps of an unknown kind left out", step.where)
        return self.memory

    def _task(self, step: Fields) -> None:
        if step.items("task_images"):
            self.notes.add("images left out", step.where)
        text = step.text("task")
        self.memory.task = self.memory.task or text
        self.memory.ended = False
        self.sent.append(WireMessage("user", f"New task:\n{text}"))

    def _plan(self, step: Fields) -> None:
        if "facts" in step:
            self._older_plan(step)
            return
        said = step.object("model_output_message")
        text = _text(said, "content") or step.text("plan")
        given = self._given(step)
        if given is None:  # a template of smolagents that the steps do not have
            given = [*self.sent]
            self.notes.add("plans whose prompt is not known", step.where)
        self._add(step, given, WireMessage("assistant", text), ())
        self.sent.append(WireMessage("assistant", step.text("plan").strip()))
        self.sent.append(WireMessage("user", _PROCEED))

    def _older_plan(self, step: Fields) -> None:
        """Before 1.12: a call for what is known, of which it is said what it was given, and one for
        the plan."""
        given = self._given(step)
        for name, title in (("facts", "FACTS LIST"), ("plan", "PLAN")):
            said = step.object(f"model_output_message_{name}")
            if given is None:
                self.notes.add("plans whose prompt is not known", step.where)
                given = [*self.sent]
            text = _text(said, "content") or step.text(name)
            self._add(step, given, WireMessage("assistant", text), ())
            self.sent.append(WireMessage("assistant", f"[{title}]:\n{step.text(name).strip()}"))
            given = None

    def _action(self, step: Fields) -> None:
        said = step.object("model_output_message")
        text = step.value("model_output")
        text = text if isinstance(text, str) else _text(step, "model_output")
        calls = tuple(smolagents_call(each) for each in step.objects("tool_calls"))
        native = said.objects("tool_calls")
        program = len(calls) == 1 and calls[0].name == PYTHON
        error = step.object("error")
        if not (text or native or calls):
            self._no_output(step, error)
            return
        own = tuple(smolagents_call(each) for each in native) or (() if program else calls)
        given = self._given(step)
        if given is None:
            given = [*self.sent]
        self._add(step, given, WireMessage("assistant", text, calls=own), own)
        self._seen(step, text, calls, error)
        self.memory.ended = step.flag("is_final_answer") or any(
            call.name == "final_answer" for call in calls
        )
        if self.memory.ended:
            self.memory.answer = text_of(step.value("action_output"))

    def _no_output(self, step: Fields, error: Fields) -> None:
        """A step in which the model gave nothing, or the last answer after the last step."""
        if step.value("action_output") is not None:
            text = text_of(step.value("action_output"))
            self.notes.add("last answers whose prompt is not known", step.where)
            self._add(step, [*self.sent], WireMessage("assistant", text), ())
            self.memory.ended, self.memory.answer = True, text
        else:
            self.notes.add("steps in which the model said nothing left out", step.where)
        if error.text("type") == "AgentMaxStepsError":
            self.memory.stopped = "the steps of the agent ran out"
        elif error.held:
            self._error(error, ())

    def _seen(self, step: Fields, text: str, calls: Sequence[FunctionCall], error: Fields) -> None:
        """What the step adds to what the next one is given."""
        if text:
            self.sent.append(WireMessage("assistant", text.strip()))
        if calls:
            listed = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
            self.sent.append(WireMessage("assistant", f"Calling tools:\n{listed}"))
        if step.value("observations_images"):
            self.notes.add("images left out", step.where)
        observed = step.value("observations")
        if observed is not None:
            shown = text_of(observed)
            self.memory.managed += _REPORT.findall(shown)
            self.sent.append(WireMessage("user", f"Observation:\n{shown}"))
            self._results(calls, shown, bool(error.held))
        if error.held:
            self._error(error, calls)

    def _error(self, error: Fields, calls: Sequence[FunctionCall]) -> None:
        said = error.text("message")
        named = f"Call id: {calls[0].id}\n" if calls else ""
        self.sent.append(WireMessage("user", f"{named}Error:\n{said}{_RETRY}"))
        if len(calls) == 1:
            failed = WireMessage("tool", said, answers=calls[0].id, failed=True)
            self.memory.results.append((calls[0].id, failed))

    def _results(self, calls: Sequence[FunctionCall], shown: str, failed: bool) -> None:
        """Results as they were shown: several stand in one text, and can be told apart only where
        each is one line."""
        lines = shown.split("\n")
        if failed or not calls or calls[0].name == PYTHON:
            return
        if len(calls) == 1:
            lines = [shown]
        if len(lines) == len(calls):
            ordered = sorted(calls, key=lambda call: call.id)  # as smolagents joins them
            for call, line in zip(ordered, lines, strict=True):
                self.memory.results.append((call.id, WireMessage("tool", line, answers=call.id)))

    def _given(self, step: Fields) -> list[WireMessage] | None:
        """What the call was given, where the steps are full ones."""
        if step.value("model_input_messages") is None:
            return None
        return list(_sent(step.objects("model_input_messages"), self.notes))

    def _add(
        self,
        step: Fields,
        given: Sequence[WireMessage],
        reply: WireMessage,
        calls: tuple[FunctionCall, ...],
    ) -> None:
        # Messages of one role that follow each other are one when they are sent.
        system, rest = led("", joined(given, ("system", "user", "assistant")))
        full = step.value("model_input_messages") is not None
        self.memory.system = self.memory.system or system
        counted = step.object("token_usage")
        usage = WireUsage(counted.count("input_tokens"), None, counted.count("output_tokens"))
        exchange = WireExchange(
            self.model,
            system if full else self.memory.system,
            self.memory.tools,
            rest,
            reply,
            usage,
        )
        timing = step.object("timing") if "timing" in step else step  # before 1.17
        begun, ended = timing.number("start_time"), timing.number("end_time")
        made = _Made(self.memory.name, exchange, begun, ended, calls, step)
        self.memory.made.append(made)


def _tools(held: Fields) -> tuple[ToolSpec, ...]:
    """Tools that an object states, as OpenAI's API or as smolagents declares them."""
    found = []
    for each in held.objects("tools") if isinstance(held.held.get("tools"), list) else []:
        inputs = each.held.get("inputs")
        if isinstance(inputs, dict):
            found.append(made_tool(each.text("name"), each.text("description"), inputs))
        else:
            found.append(declared_tool(each))
    return tuple(each for each in found if each.name)


def _text(held: Fields, name: str) -> str:
    """A content that is a text or a list of parts."""
    value = held.value(name)
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        parts = [each.get("text") for each in value if isinstance(each, dict)]
        if len(parts) == len(value) and all(isinstance(part, str) for part in parts):
            return "\n".join(str(part) for part in parts)
        held.notes.add("parts that are no text left out", held.where)
        return "\n".join(part for part in parts if isinstance(part, str))
    return text_of(value)  # smolagents reads what looks like JSON when it dumps a message


def _sent(messages: Sequence[Fields], notes: Notes) -> Iterator[WireMessage]:
    for each in messages:
        role = each.value("role")
        role = role.get("value") if isinstance(role, dict) else role
        if not isinstance(role, str) or role not in _ROLES:
            notes.add("messages of an unknown role left out", each.where)
            continue
        yield WireMessage(_ROLES[role], _text(each, "content"))


# -- a team --------------------------------------------------------------------------------------


def _session(held: Fields) -> LoggedSession | None:
    notes = held.notes
    leader = _StepReader(held, held.text("name") or "agent", notes).read()
    managed = list(_managed(held, notes))
    team = [leader, *(memory for _, memory in managed if memory is not None)]
    named = [name for name, _ in managed] + [name for each in team for name in each.managed]
    agents = list(dict.fromkeys(named))
    made = [each for memory in team for each in memory.made]
    if not leader.made or not leader.task:
        notes.add("memories without a task or a step left out", held.where)
        return None
    name = held.text("task_id", "id") or held.where
    about: Json = {"task_id": name, "question": leader.task.strip(), "source": "smolagents"}
    about["agents"] = agents
    # The time of a step is also that of its tools.
    about[SECONDS] = [] if any(each.begun is None for each in made) else ["total"]
    session = LoggedSession(name, about)
    taken: dict[str, WireMessage] = {}
    twice: set[str] = set()
    for memory in team:
        for call, result in memory.results:
            if call and taken.setdefault(call, result) != result:
                twice.add(call)
    session.results = {call: result for call, result in taken.items() if call not in twice}
    if twice:
        notes.add("results of calls that share their id left out", held.where, len(twice))
    session.calls = _in_order(made, leader, agents, name, notes)
    if leader.ended or "output" in held:
        stated = held.value("output") if "output" in held else leader.answer
        session.end = {"answer": text_of(stated)}
    elif leader.stopped:
        session.end = {"error": leader.stopped}
    if held.value("state") == "max_steps_error":
        session.end = {**(session.end or {}), "error": "the steps of the agent ran out"}
    return session


def _managed(held: Fields, notes: Notes) -> Iterator[tuple[str, _Memory | None]]:
    """(name, memory of one run) of the managed agents, and of those that they manage."""
    stated = held.value("managed_agents")
    if isinstance(stated, list):
        stated = {
            str(each["name"]): each for each in stated if isinstance(each, dict) and "name" in each
        }
    if not isinstance(stated, dict):
        if stated is not None:
            held.wrong("managed_agents", "an object")
        return
    for name, given in stated.items():
        runs = given if isinstance(given, list) and not any(map(_is_step, given)) else [given]
        known = False
        for number, run in enumerate(runs, start=1):
            where = f"{held.where}: {name} {number}" if len(runs) > 1 else f"{held.where}: {name}"
            value = {"steps": run} if isinstance(run, list) else run
            if not isinstance(value, dict):
                continue  # only its class is stated
            inner = Fields(value, where, notes)
            if "memory" in inner and isinstance(inner.value("memory"), dict):
                inner = Fields({**value, **value["memory"]}, where, notes)
            memory = _StepReader(inner, name, notes).read()
            if memory.made:
                known = True
                yield name, memory
            yield from _managed(inner, notes)
        if not known:
            yield name, None


def _in_order(
    made: list[_Made], leader: _Memory, agents: Sequence[str], session: str, notes: Notes
) -> list[LoggedCall]:
    """The calls of all memories as they were answered.

    The time of a step ends when its tools are done: a step that asked an agent ended its own call
    before that agent's first one began.
    """
    if any(each.begun is None for each in made):
        if len({each.agent for each in made}) > 1:
            notes.add("teams whose steps have no time, put in the order of their jobs", session)
            made = _nested(leader, made, agents)
        for number, each in enumerate(made):
            each.begun, each.ended = float(number), number + 0.5
    else:
        stated = [each.begun for each in made if each.agent == leader.name]
        if any(a is not None and b is not None and a > b for a, b in pairwise(stated)):
            notes.add("memories whose steps are out of order, sorted by time", session)
    calls = []
    for each in made:
        begun = each.begun or 0.0
        ended = begun if each.ended is None else max(begun, each.ended)
        if each.calls or not each.exchange.reply or not each.exchange.reply.calls:
            inside = (
                other.begun
                for other in made
                if other.agent != each.agent
                and other.begun is not None
                and begun < other.begun <= ended
            )
            ended = min([ended, *inside])
        calls.append(
            LoggedCall(session, "smolagents", each.exchange, begun, ended, agent=each.agent)
        )
    return sorted(calls, key=lambda call: (call.ended, call.begun))


def _nested(leader: _Memory, made: list[_Made], agents: Sequence[str]) -> list[_Made]:
    """The steps of managed agents put after the last step that asked for them."""
    ordered = [each for each in made if each.agent == leader.name]
    for agent in agents:
        own = [each for each in made if each.agent == agent]
        asked = [at for at, each in enumerate(ordered) if _asks(each, agent)]
        at = asked[-1] + 1 if asked else len(ordered)
        ordered[at:at] = own
    return ordered


def _asks(made: _Made, agent: str) -> bool:
    if any(call.name == agent for call in made.calls):
        return True
    reply = made.exchange.reply
    return reply is not None and f"{agent}(" in reply.text
