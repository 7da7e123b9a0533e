"""TeamWriter: an episode of what a program wrote about a team, by the rules of recorded episodes.

For formats that say themselves who is an agent, whose job a call gave and what came of it; formats
that only have model calls become sessions, which `coa.recording.graph` reads.

A reply that only uses tools is said to the system, one that hands one job to one agent to that
agent, and one that does several of these to the system, which passes the jobs on. A run is one
agent at work on one job. An agent that is called again begins anew in nearly all frameworks, so
that what it was given then does not follow from the events before, and is stated.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from coa.grammar import ChatMessage
from coa.io.runs import Json
from coa.recording.episode import (
    SYSTEM,
    USER,
    AgentSpec,
    Episode,
    EpisodeEvent,
    Message,
    ModelCall,
    ToolSpec,
    ToolUse,
)
from coa.recording.importers.reading import Fields
from coa.recording.importers.work import text_of
from coa.recording.programs import PYTHON
from coa.recording.turns import as_json
from coa.recording.wire import FunctionCall, WireUsage, arguments_of
from coa.tools.base import Failure

FINAL = ("final_answer", "finish", "submit", "submit_answer", "final_result", "attempt_completion")
"""Tools by which an agent of well-known frameworks gives its answer instead of writing it."""
_ANSWERS = ("answer", "final_answer", "result", "message", "output", "content", "text")


class Use(NamedTuple):
    """A call of a tool, and what came back."""

    call: FunctionCall
    result: str | None
    """None: it is not known."""
    failure: Failure | None = None


class Job(NamedTuple):
    """A call of an agent."""

    agent: str
    text: str
    play: Callable[[], bool]
    """Writes what the agent did; returns whether it answered."""
    report: str | None
    """What the asking agent was given back, where that is known."""


@dataclass
class AgentRun:
    """One agent at work on one job."""

    name: str
    asker: str
    begun_anew: bool = False
    """What it was given does not follow from the events before it."""
    given: list[ChatMessage] = field(default_factory=list)
    stated: int = 0
    """How many of these the calls so far state."""


class TeamWriter:
    """Writes the events of one episode, and collects its agents, its tools and its gaps."""

    def __init__(self) -> None:
        self.events: list[EpisodeEvent] = []
        self.agents: dict[str, AgentSpec] = {}
        self.tools: dict[str, ToolSpec] = {}
        self.gaps: Counter[str] = Counter()
        self.answer: str | None = None
        self._begun: Counter[str] = Counter()

    # -- who there is --------------------------------------------------------------------------

    def agent(self, name: str, system: str = "", above: Collection[str] = ()) -> str:
        """Make an agent known and return what it is called here.

        `above` are those who wait for it, none of whom it is; one that is asked again is the same.
        """
        name = name.strip() or "agent"
        chosen, number = name, 1
        while chosen in (USER, SYSTEM, *above):
            number += 1
            chosen = f"{name}-{number}"
        known = self.agents.setdefault(chosen, AgentSpec(chosen, "", system))
        if not known.system and system:
            self.agents[chosen] = replace(known, system=system)
        elif system and known.system != system:
            self.gaps["system_prompts_differ"] += 1
        return chosen

    def run(self, name: str, asker: str) -> AgentRun:
        """An agent begins to work on a job."""
        self._begun[name] += 1
        opening = [ChatMessage("system", self.agents[name].system)]
        return AgentRun(name, asker, self._begun[name] > 1, opening)

    def tool(self, spec: ToolSpec) -> None:
        """Make a tool known; the first definition of a name stays."""
        if not spec.name:
            return
        known = self.tools.setdefault(spec.name, spec)
        if not (known.about or known.schema):
            self.tools[spec.name] = spec
        elif known != spec and (spec.about or spec.schema):
            self.gaps["tool_redefined"] += 1

    # -- what they did -------------------------------------------------------------------------

    def tell(self, run: AgentRun, text: str, by: str = SYSTEM) -> None:
        """Somebody who is no agent says something to one."""
        self.events.append(Message(by, run.name, text))
        self.heard(run, text)

    def heard(self, run: AgentRun, text: str) -> None:
        if text:
            run.given.append(ChatMessage("user", text))

    def say(self, run: AgentRun, to: str, text: str, call: ModelCall | None, **more: Any) -> None:
        """An agent says something: one model call."""
        assert run.name in self.agents, run.name
        if call is not None and run.begun_anew:
            call = replace(call, given=run.given[run.stated :], kept=run.stated)
        if call is None or None in (call.prompt_tokens, call.sampled_tokens):
            self.gaps["usage_unknown"] += 1
        message = Message(run.name, to, text, call=call, **more)
        self.events.append(message)
        if message.written:
            run.given.append(ChatMessage("assistant", message.written))
        run.stated = len(run.given)

    def report(self, run: AgentRun, text: str, call: ModelCall | None, thought: str = "") -> None:
        """An agent says what came of its job to whoever asked."""
        self.say(run, run.asker, text, call, thought=thought)
        if run.asker == USER:
            self.answer = text if text.strip() else None

    def act(
        self, run: AgentRun, thought: str, call: ModelCall | None, done: Sequence[Use | Job]
    ) -> None:
        """A reply that uses tools, hands out jobs, or both; `call` None: no model was asked."""
        jobs = [each for each in done if isinstance(each, Job)]
        alone = len(jobs) == len(done) == 1 and call is not None
        if alone:
            self.say(run, jobs[0].agent, jobs[0].text, call, thought=thought)
        elif call is not None:
            self.say(run, SYSTEM, "", call, thought=thought)
        for each in done:
            if isinstance(each, Use):
                self._use(run, each)
                continue
            if not alone:
                self.events.append(Message(SYSTEM, each.agent, each.text))
            if not each.play():
                self.gaps["result_missing"] += each.report is None
                self.events.append(Message(SYSTEM, run.name, each.report or ""))
            self.heard(run, each.report or self._last_word(each.agent, run.name))

    def _use(self, run: AgentRun, use: Use) -> None:
        name = use.call.name or "tool"
        self.tool(ToolSpec(name, body="json"))
        self.gaps["result_missing"] += use.result is None
        argument = as_json(use.call.arguments)
        self.events.append(ToolUse(run.name, name, argument, use.result or "", use.failure))
        self.heard(run, use.result or "")

    def _last_word(self, agent: str, to: str) -> str:
        said = (e for e in reversed(self.events) if isinstance(e, Message))
        return next((e.text for e in said if e.agent == agent and e.to == to), "")

    # -- the episode ---------------------------------------------------------------------------

    def episode(
        self, task_id: str, question: str, source: str, error: str | None, meta: Json
    ) -> Episode:
        gaps = {name: count for name, count in sorted(self.gaps.items()) if count}
        named = {event.agent for event in self.events}
        named |= {event.to for event in self.events if isinstance(event, Message)}
        agents = [each for each in self.agents.values() if each.name in named or each.system]
        return Episode(
            task_id=task_id,
            question=question,
            teacher=source,
            agents=agents,
            events=self.events,
            answer=self.answer,
            error=error,
            meta={**meta, "source": source, **({"gaps": gaps} if gaps else {})},
            tools=[tool for tool in self.tools.values() if tool.name not in self.agents],
        )


def hand_out(episode: Episode, agents: Sequence[str]) -> None:
    """Make jobs of the calls of agents whose own work a source does not have.

    They are known to be agents, so a call of one is no use of a tool: it is a job, and what came
    back is told by the system.
    """
    agents = [name for name in agents if name not in (USER, SYSTEM)]
    events: list[EpisodeEvent] = []
    unseen = 0
    for event in episode.events:
        if not (isinstance(event, ToolUse) and event.tool in agents):
            events.append(event)
            continue
        unseen += 1
        call = FunctionCall("", event.tool, arguments_of(event.argument))
        events.append(Message(SYSTEM, event.tool, job_in(call), branch=event.branch))
        events.append(Message(SYSTEM, event.agent, event.result, branch=event.branch))
    if not unseen:
        return
    episode.events = events
    known = {agent.name for agent in episode.agents}
    named = {event.to for event in events if isinstance(event, Message)}
    episode.agents += [AgentSpec(name, "", "") for name in agents if name in named - known]
    episode.tools = [tool for tool in episode.tools if tool.name not in agents]
    episode.meta["gaps"] = {**(episode.meta.get("gaps") or {}), "agent_runs_missing": unseen}


def smolagents_call(held: Fields) -> FunctionCall:
    """A call as smolagents writes it; what its interpreter is given is a program, whatever it looks
    like."""
    inner = held.object("function") if "function" in held else held
    given, name = inner.value("arguments"), inner.text("name")
    program = isinstance(given, str) and name == PYTHON
    return FunctionCall(held.text("id"), name, given if program else arguments_of(given))


def model_call(model: str, said: str, calls: Sequence[FunctionCall], usage: WireUsage) -> ModelCall:
    """A model call of what a source says about it; what it does not say is unknown."""
    text = sampled_text(said, calls)
    return ModelCall(model, text, usage.prompt, usage.cached, usage.sampled, usage.cost)


def declared_tool(given: Fields) -> ToolSpec:
    """A tool as OpenAI's API declares it, or its function alone."""
    spec = given.object("function") if "function" in given else given
    schema = next((spec.value(n) for n in ("parameters", "input_schema") if n in spec), None)
    text = json.dumps(schema, sort_keys=True) if isinstance(schema, dict) else ""
    return ToolSpec(spec.text("name"), spec.text("description").strip(), "json", text)


def sampled_text(said: str, calls: Sequence[FunctionCall]) -> str:
    """A reply as one text: what it says, then a line for each call."""
    lines = (f"{call.name}({as_json(call.arguments)})" for call in calls)
    return "\n".join(each for each in (said, *lines) if each)


def answer_in(call: FunctionCall) -> str:
    """The answer that is the argument of a tool such as final_answer."""
    if isinstance(call.arguments, str):
        return call.arguments
    found = next((call.arguments[name] for name in _ANSWERS if name in call.arguments), None)
    if found is None and len(call.arguments) == 1:
        found = next(iter(call.arguments.values()))
    return text_of(call.arguments if found is None else found)


def job_in(call: FunctionCall, told: str = "") -> str:
    """The job that is the argument of a call of an agent; `told`: what the agent was given.

    That is often a frame around the job, and then the job alone says more.
    """
    if isinstance(call.arguments, str):
        return call.arguments or told
    texts = [each for each in call.arguments.values() if isinstance(each, str) and each.strip()]
    inside = [each for each in texts if each in told]
    if inside:
        return max(inside, key=len)
    if told:
        return told
    named = [call.arguments.get(name) for name in _JOBS]
    found = next((each for each in named if isinstance(each, str) and each.strip()), None)
    return found or (texts[0] if len(texts) == 1 else as_json(call.arguments))


_JOBS = ("task", "prompt", "request", "query", "question", "instructions", "message", "input")
