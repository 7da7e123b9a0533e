"""Episodes and chains as ATIF 1.8, the interchange format of agent trajectories, and back.

Each run of an agent, from a job to its answer, is a trajectory; that of the agent who was asked by
the user is the document, and the others are embedded where they were asked for. What ATIF has a
field for stands in that field, so that any reader sees messages, calls, results and usage. What it
has none for (to whom a message goes, facts, marks of branches and mistakes, the order of events of
agents who worked at once) stands in `extra.coa`, from which `restored` makes the same episode.

A chain is one agent whose messages are its turns as they were sampled, tags and all, with their
token ids: who trains on it trains on what was said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coa.errors import RecordError, UsageError
from coa.grammar import parse
from coa.io.files import first_record, foreign, whole_file
from coa.io.runs import Json, dumps
from coa.recording.episode import (
    SCHEMA,
    SYSTEM,
    USER,
    Episode,
    EpisodeEvent,
    Message,
    ModelCall,
    ToolSpec,
    ToolUse,
    load_episodes,
)
from coa.recording.turns import as_json
from coa.trajectory import Author, Step, Trajectory, load_trajectories

VERSION = "ATIF-v1.8"
OURS = "coa"
"""Under `extra`: what the format has no field for."""
UNKNOWN = "unknown"
"""The version of an agent, which the format demands and nobody noted."""
_SAID = ("facts", "erred", "branch")
_WHOLE = ("task_id", "question", "teacher", "seed", "answer", "error", "meta")
_COUNTS = {
    "prompt_tokens": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "sampled_tokens": "completion_tokens",
    "cost": "cost_usd",
}
"""Fields of a model call -> what the format calls them."""


# -- out -----------------------------------------------------------------------------------------


def atif_of(episode: Episode) -> Json:
    """An episode as one document."""
    return _Writing(episode).document()


@dataclass
class _AgentPart:
    """A trajectory that is being written: one agent at work on one job."""

    agent: str
    asker: str
    id: str
    steps: list[Json] = field(default_factory=list)
    parts: list[_AgentPart] = field(default_factory=list)
    job: Json | None = None
    """The result by which the job was asked for, to be given the answer."""
    said: Json | None = None
    """The last step that the agent itself wrote."""

    def step(self, source: str, message: str, **more: Any) -> Json:
        step = {"step_id": len(self.steps) + 1, "source": source, "message": message, **more}
        self.steps.append(step)
        return step


class _Writing:
    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.names = {agent.name for agent in episode.agents}
        self.systems = {agent.name: agent.system for agent in episode.agents}
        self.open: dict[tuple[str, str], _AgentPart] = {}
        """By agent and branch: who is at work on what."""
        self.begun: dict[str, int] = {}
        self.root: _AgentPart | None = None
        self.asking: _AgentPart | None = None
        """Who said something to the system last, which may pass jobs on."""

    def document(self) -> Json:
        for number, event in enumerate(self.episode.events):
            if isinstance(event, ToolUse):
                self._use(number, event)
            elif event.agent in self.names:
                self._say(number, event)
            else:
                self._told(number, event)
        root = self.root or self._begin(self._first_agent(), USER, "")
        held = self._trajectory(root)
        return {
            **held,
            "session_id": self.episode.task_id,
            **_totals(self.episode),
            "extra": {OURS: self._whole()},
        }

    def _first_agent(self) -> str:
        return self.episode.agents[0].name if self.episode.agents else "agent"

    def _whole(self) -> Json:
        episode = self.episode
        defined = [_definition(tool) for tool in episode.tools]
        others = [
            asdict(tool)
            for tool, made in zip(episode.tools, defined, strict=True)
            if _tool_of(made) != tool
        ]
        return {
            **{name: getattr(episode, name) for name in _WHOLE},
            "events": len(episode.events),
            "agents": [
                {"name": agent.name, "part": agent.part}
                | ({} if agent.name in self.begun else {"system": agent.system})
                for agent in episode.agents
            ],
            **({"tools": others} if others else {}),
        }

    # -- runs --------------------------------------------------------------------------------

    def _begin(self, agent: str, asker: str, branch: str) -> _AgentPart:
        number = self.begun[agent] = self.begun.get(agent, 0) + 1
        part = _AgentPart(agent, asker, f"{agent}/{number}")
        if system := self.systems.get(agent, ""):
            part.step("system", system)
        self.open[agent, branch] = part
        if self.root is None:
            self.root = part
        return part

    def _running(self, agent: str, branch: str) -> _AgentPart | None:
        return self.open.get((agent, branch)) or (self.open.get((agent, "")) if branch else None)

    def _at_work(self, agent: str, branch: str) -> _AgentPart:
        """The run of an agent, which begins of itself where nobody gave it a job."""
        part = self._running(agent, branch)
        if part is None:
            part = self._begin(agent, SYSTEM, branch)
            if part is not self.root:
                assert self.root is not None
                step = self.root.step("system", "")
                self._refer(self.root, part, step, None)
        return part

    def _refer(self, part: _AgentPart, sub: _AgentPart, step: Json, call: str | None) -> None:
        """Let a step of one run point to another run."""
        result: Json = {"subagent_trajectory_ref": [{"trajectory_id": sub.id}]}
        if call is not None:
            result = {"source_call_id": call, **result}
        step.setdefault("observation", {"results": []})["results"].append(result)
        part.parts.append(sub)
        sub.job = result

    # -- events ------------------------------------------------------------------------------

    def _say(self, number: int, event: Message) -> None:
        part = self._at_work(event.agent, event.branch)
        step = _agent_step(part, number, event)
        part.said = step
        if event.to == SYSTEM:
            self.asking = part
        if event.to not in self.names:
            step["message"] = event.text
        elif event.to == part.asker:
            step["message"] = event.text
            receiver = self._running(event.to, event.branch)
            if part.job is not None:  # where the asking agent reads it
                part.job["content"] = event.text
            elif receiver is not None:
                receiver.steps.append(_copy(receiver, number, event.text))
            if part is not self.root:
                self.open = {key: held for key, held in self.open.items() if held is not part}
        elif (receiver := self._running(event.to, event.branch)) is not None:
            step["message"] = event.text
            receiver.steps.append(_copy(receiver, number, event.text))
        else:
            self._hand_on(part, step, number, event)

    def _hand_on(
        self, part: _AgentPart, step: Json, number: int, event: Message, extra: Json | None = None
    ) -> None:
        """A job for an agent who has none: a call that its run answers."""
        name = f"job-{number}"
        call = {"tool_call_id": name, "function_name": event.to, "arguments": {"task": event.text}}
        step.setdefault("tool_calls", []).append(call | ({"extra": {OURS: extra}} if extra else {}))
        sub = self._begin(event.to, event.agent if extra is None else part.agent, event.branch)
        self._refer(part, sub, step, name)
        sub.steps.append(_copy(sub, number, event.text))

    def _told(self, number: int, event: Message) -> None:
        """Somebody who is no agent says something."""
        source = "user" if event.agent == USER else "system"
        marks = {"event": number, "agent": event.agent, "to": event.to, **_marks(event)}
        if event.thought:
            marks["thought"] = event.thought
        if event.to not in self.names:
            part = self.root or self._begin(self._first_agent(), USER, "")
            part.step(source, event.text, extra={OURS: marks})
            return
        part_of = self._running(event.to, event.branch)
        if part_of is None and self.root is not None and self.asking is not None:
            asking, said = self.asking, self.asking.said
            if event.agent == SYSTEM and said is not None and event.to != asking.agent:
                self._hand_on(asking, said, number, event, marks)
                return
        part_of = part_of or self._opened_by(event)
        part_of.step(source, event.text, extra={OURS: marks})

    def _opened_by(self, event: Message) -> _AgentPart:
        if self.root is None:
            return self._begin(event.to, event.agent, event.branch)
        return self._at_work(event.to, event.branch)

    def _use(self, number: int, event: ToolUse) -> None:
        part = self._at_work(event.agent, event.branch)
        step = part.said
        if step is None:
            step = part.said = part.step("agent", "", llm_call_count=0)
        arguments, given = _arguments(event.argument)
        marks: Json = {"event": number, **given, **_marks(event)}
        if event.failure is not None:
            marks["failure"] = event.failure
        name = f"use-{number}"
        call = {"tool_call_id": name, "function_name": event.tool, "arguments": arguments}
        step.setdefault("tool_calls", []).append(call | {"extra": {OURS: marks}})
        results = step.setdefault("observation", {"results": []})["results"]
        results.append({"source_call_id": name, "content": event.result})

    # -- trajectories ------------------------------------------------------------------------

    def _trajectory(self, part: _AgentPart) -> Json:
        agent: Json = {"name": part.agent, "version": UNKNOWN}
        if self.episode.tools and (part is self.root or self.root is None):
            agent["tool_definitions"] = [_definition(tool) for tool in self.episode.tools]
        models = {step["model_name"] for step in part.steps if "model_name" in step}
        if len(models) == 1:
            agent["model_name"] = models.pop()
        held: Json = {"schema_version": VERSION, "trajectory_id": part.id, "agent": agent}
        held["steps"] = part.steps
        if part.parts:
            held["subagent_trajectories"] = [self._trajectory(each) for each in part.parts]
        return held


def _agent_step(part: _AgentPart, number: int, event: Message) -> Json:
    marks: Json = {"event": number, "to": event.to, **_marks(event)}
    step = part.step("agent", "", llm_call_count=1)
    if event.thought:
        step["reasoning_content"] = event.thought
    if event.call is not None:
        step["model_name"] = event.call.model
        metrics = {
            theirs: getattr(event.call, ours)
            for ours, theirs in _COUNTS.items()
            if getattr(event.call, ours) is not None
        }
        if metrics:
            step["metrics"] = metrics
        marks["call"] = {} if event.call.text == event.text else {"text": event.call.text}
        if event.call.given is not None:
            marks["call"]["given"] = [list(each) for each in event.call.given]
        if event.call.kept:
            marks["call"]["kept"] = event.call.kept
    step["extra"] = {OURS: marks}
    return step


def _copy(part: _AgentPart, number: int, text: str) -> Json:
    """What somebody else said to an agent, in its own run."""
    return {
        "step_id": len(part.steps) + 1,
        "source": "user",
        "message": text,
        "extra": {OURS: {"said_in": number}},
    }


def _marks(event: EpisodeEvent) -> Json:
    held = {name: getattr(event, name, None) for name in _SAID}
    return {name: value for name, value in held.items() if value}


def _arguments(argument: str) -> tuple[Json, Json]:
    """The arguments of a call as an object; where they are none, that the object holds the text."""
    try:
        read = json.loads(argument)
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, dict) and as_json(read) == argument:
        return read, {}
    return {"input": argument}, {"argument": "input"}


def _definition(tool: ToolSpec) -> Json:
    """A tool as OpenAI's API declares it."""
    try:
        schema = json.loads(tool.schema) if tool.schema else None
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        text = {"type": "object", "properties": {"input": {"type": "string"}}}
        schema = None if tool.body == "json" else text
    function: Json = {"name": tool.name, "description": tool.about}
    if schema is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


def _tool_of(definition: Json) -> ToolSpec:
    function = definition["function"]
    schema = function.get("parameters")
    text = "" if schema is None else json.dumps(schema, sort_keys=True)
    return ToolSpec(function["name"], function["description"], "json", text)


def _totals(episode: Episode) -> Json:
    """What all calls came to, where all of them were counted."""
    calls: list[ModelCall | None] = [said.call for _, said in episode.model_calls()]
    if not calls or None in calls:
        return {}
    totals: Json = {}
    for ours, theirs in _COUNTS.items():
        counts = [getattr(call, ours) for call in calls]
        if None not in counts:
            totals[f"total_{theirs}"] = sum(counts)
    return {"final_metrics": totals} if totals else {}


# -- and back ------------------------------------------------------------------------------------


def restored(document: Mapping[str, Any]) -> Episode | None:
    """The episode that `atif_of` made a document of; None: it is of somebody else, or was changed
    so that it is no longer one."""
    whole = _ours(document)
    if not isinstance(whole.get("events"), int):
        return None
    try:
        return _restored(document, whole)
    except (RecordError, KeyError, TypeError, AttributeError, ValueError, RecursionError):
        return None


def _ours(held: Mapping[str, Any]) -> Json:
    extra = held.get("extra")
    ours = extra.get(OURS) if isinstance(extra, dict) else None
    return ours if isinstance(ours, dict) else {}


def _restored(document: Mapping[str, Any], whole: Json) -> Episode | None:
    events: dict[int, Json] = {}
    systems: dict[str, str] = {}
    parts: list[Any] = [document]
    while parts:
        part = parts.pop(0)
        parts += part.get("subagent_trajectories", ())
        _collect(part, events, systems)
    if sorted(events) != list(range(whole["events"])):
        return None
    tools = [_tool_of(each) for each in document["agent"].get("tool_definitions", ())]
    own = {each["name"]: ToolSpec(**each) for each in whole.get("tools", ())}
    return Episode.from_json(
        {
            "schema": SCHEMA,
            **{name: whole[name] for name in _WHOLE},
            "agents": [
                {"system": systems.get(each["name"], ""), **each} for each in whole["agents"]
            ],
            "tools": [asdict(own.get(tool.name, tool)) for tool in tools],
            "events": [events[number] for number in range(whole["events"])],
        }
    )


def _collect(part: Json, events: dict[int, Json], systems: dict[str, str]) -> None:
    agent = part["agent"]["name"]
    for number, step in enumerate(part["steps"]):
        marks = dict(_ours(step))
        if not marks and step["source"] == "system" and number == 0:
            systems.setdefault(agent, step["message"])
        results = step.get("observation", {"results": []})["results"]
        by_call = {each.get("source_call_id"): each for each in results}
        if "event" in marks:
            _put(events, marks.pop("event"), _message(step, agent, marks))
        for call in step.get("tool_calls", ()):
            _call(call, agent, by_call, events)


def _message(step: Json, agent: str, marks: Json) -> Json:
    text = step["message"]
    jobs = [each for each in step.get("tool_calls", ()) if not _ours(each)]
    if jobs:
        text = jobs[0]["arguments"]["task"]
    made: Json = {"kind": "say", "agent": agent, "text": text, **marks}
    if "reasoning_content" in step:
        made["thought"] = step["reasoning_content"]
    if "call" in made:
        metrics = step.get("metrics", {})
        counts = {ours: metrics[theirs] for ours, theirs in _COUNTS.items() if theirs in metrics}
        made["call"] = {"model": step["model_name"], "text": text, **counts, **made["call"]}
    return made


def _call(call: Json, agent: str, by_call: Json, events: dict[int, Json]) -> None:
    marks = dict(_ours(call))
    if "event" not in marks:
        return  # a job that stands in the message of its step
    number = marks.pop("event")
    if "to" in marks:  # a job that the system passed on
        _put(events, number, {"kind": "say", "text": call["arguments"]["task"], **marks})
        return
    given = call["arguments"]
    argument = given["input"] if marks.pop("argument", "") else as_json(given)
    made = {"kind": "use", "agent": agent, "tool": call["function_name"], "argument": argument}
    result = by_call[call["tool_call_id"]]["content"]
    _put(events, number, {**made, "result": result, **marks})


def _put(events: dict[int, Json], number: int, event: Json) -> None:
    if number in events:
        raise RecordError(f"event {number} is there twice.")
    events[number] = event


# -- chains --------------------------------------------------------------------------------------


def atif_of_chain(chain: Trajectory) -> Json:
    """A chain as one document: its turns as they were sampled, with the calls that they make."""
    steps: list[Json] = []
    for segment in chain.segments:
        if segment.author is Author.PROMPT:
            steps.append({"source": "system", "message": segment.text})
    steps.append({"source": "user", "message": chain.question})
    steps += [_chain_step(chain, step, number) for number, step in enumerate(chain.steps, start=1)]
    for number, each in enumerate(steps, start=1):
        each["step_id"] = number
    agent = {"name": chain.weights or "chain-of-agents", "version": UNKNOWN}
    usage = chain.usage
    totals = {
        "total_prompt_tokens": usage.prompt_tokens,
        "total_completion_tokens": usage.sampled_tokens,
        "total_cached_tokens": usage.cached_tokens,
    }
    held: Json = {"schema_version": VERSION, "session_id": chain.task_id}
    held |= {"trajectory_id": f"{chain.task_id}/{chain.sample}", "agent": agent, "steps": steps}
    if usage.sampled_tokens:
        held["final_metrics"] = totals
    about: Json = {"grammar": chain.grammar, "grammar_id": chain.grammar_id, "answer": chain.answer}
    about |= {"stop": chain.stop.value if chain.stop else None, "meta": chain.meta}
    return held | {"extra": {"chain": about}}


def _chain_step(chain: Trajectory, step: Step, number: int) -> Json:
    grammar, model = chain.protocol, step.model
    made: Json = {"source": "agent", "message": model.text, "llm_call_count": 1}
    metrics: Json = {}
    if model.ids is not None:
        metrics["completion_token_ids"] = model.ids
        metrics["completion_tokens"] = len(model.ids)
    if model.logprobs is not None:
        metrics["logprobs"] = model.logprobs
    if metrics:
        made["metrics"] = metrics
    if model.errs:
        made["extra"] = {"mistakes": [list(span) for span in model.errs]}
    calls: Sequence[Json] = ()
    if step.observation is not None:
        blocks = parse(grammar, model.text).blocks
        used = [block for block in blocks if block.role in grammar.tool_roles][-1:]
        calls = [
            {
                "tool_call_id": f"call-{number}",
                "function_name": grammar.by_name[block.role].tool or block.role,
                "arguments": _arguments(block.body.strip())[0],
            }
            for block in used
        ]
        result: Json = {"content": step.observation.text}
        if calls:
            made["tool_calls"] = calls
            result["source_call_id"] = calls[0]["tool_call_id"]
        made["observation"] = {"results": [result]}
    return made


# -- the command ---------------------------------------------------------------------------------

FILE = "atif.jsonl"


def export_atif(
    source: Path, out: Path | None = None, grammar: str = "", note: Callable[[str], None] = print
) -> Json:
    """`coa export --to atif`: an episodes file, a dataset or a run as documents, one a line.

    By default into `exports/atif` beside it. Chains that ended without an answer are exported,
    too: how they ended stands in `extra`. Only its owner may read the file, as with recordings.
    """
    path = source / "trajectories.jsonl" if source.is_dir() else source
    first = first_record(path) if path.is_file() else None
    held: list[Episode] | list[Trajectory]
    if first is not None and "events" in first:
        if grammar:
            note("--grammar is ignored: episodes have none.")
        held = load_episodes(path)
    else:
        held = [t for t in load_trajectories(path) if not grammar or t.grammar == grammar]
    if not held:
        raise UsageError(f"{path}: there is nothing to export.")
    folder = out or (source if source.is_dir() else source.parent) / "exports" / "atif"
    target = folder / FILE
    if target.is_file():
        made = first_record(target)
        if made is None or not str(made.get("schema_version", "")).startswith("ATIF"):
            raise foreign(target, "a new file, or what an earlier export wrote")
    with whole_file(target, private=True) as file:
        for each in held:
            document = atif_of(each) if isinstance(each, Episode) else atif_of_chain(each)
            file.write(dumps(document).encode() + b"\n")
    rows = {"rows": len(held), "rl_rows": 0, "left_out": {}, "files": [FILE]}
    return {"to": "atif", "grammar": grammar, **rows, "out": str(folder)}
