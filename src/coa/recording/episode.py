"""Episode: what a multi-agent system did for one task, before conversion.

An episode lists the agents, the tools that they had, and the events in order: a `Message` is one
model call of an agent that writes to another, a `ToolUse` is one tool call and its result. Every
agent has a context of its own: it sees what was said to it, what it said, and what its tools
returned. So what a model call was given follows from the events before it (`messages_of`), and
cost can be counted with any tokenizer, with or without a prompt cache. A record of another
framework may state what a call was given instead (`ModelCall.given`).

Agents that work at the same time are in branches. The events of a branch are in order; those of
several branches may be mixed, as they happened. An event of no branch ends the branches before it:
a branch that comes later sees all of them, also where it has the name of one.

`erred` marks a mistake for later study (one that was injected, or that of a critic who let one pass
or objected to sound work); no agent ever sees it. Wall-clock figures (`Episode.seconds`) are not
part of the record, so that the same work gives the same file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from coa.errors import RecordError, did_you_mean
from coa.grammar import ChatMessage
from coa.io.runs import Json, read_jsonl, read_records
from coa.tasks import Task, history_json, read_history
from coa.tools.base import Failure

SCHEMA = 4
READABLE = (1, 2, 3, 4)
"""Schema 1 had neither branches nor model calls, schema 2 did not say which tools there were; all
of these have defaults, so old files read as they are. Up to schema 3 a number of tokens that is not
stated is 0, from schema 4 it is unknown."""
_PLAIN = ("task_id", "question", "teacher", "seed", "answer", "error", "meta")
_FIELDS = (*_PLAIN, "agents", "events")
"""Of an episode on disk: each must be there, though it may be null where it has a default."""
USER = "user"
SYSTEM = "system"
"""Not an agent: the code that carries results from one agent to another."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One agent of the system: its name, the part it plays and its system prompt."""

    name: str
    part: str
    """planner, searcher, reader, coder, reflector, verifier ..."""
    system: str


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the team had: what a prompt says of it."""

    name: str
    about: str = ""
    body: str = "text"
    schema: str = ""
    """JSON schema of the argument as JSON text, for a body of JSON."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What a language model was given and wrote for a message, and what that cost."""

    model: str
    text: str
    """As it was sampled, before anybody read a message in it."""
    prompt_tokens: int | None = None
    """As the server counted them, like the next two; None: it did not say."""
    cached_tokens: int | None = None
    sampled_tokens: int | None = None
    cost: float | None = None
    """In the currency of the price table; None: no price is known."""
    given: list[ChatMessage] | None = None
    """The messages it was given, where they do not follow from the events before it."""
    kept: int = 0
    """So many messages of the agent's call before this one, its reply among them, stand before
    those of `given`: a conversation that grows is written once."""


@dataclass(frozen=True, slots=True)
class Message:
    """One model call: an agent thinks and says something to another."""

    agent: str
    to: str
    text: str
    thought: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Machine-readable content of the message; its `part` says what the message is: a plan, a
    query, a finding, an alarm, an approval, a suggestion, a check, a verdict."""
    erred: bool = False
    branch: str = ""
    """Which of several agents at work at the same time; empty: it worked alone."""
    call: ModelCall | None = None

    @property
    def written(self) -> str:
        """What the agent's model wrote."""
        return self.call.text if self.call else f"{self.thought} {self.text}".strip()


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One tool call of an agent and what came back."""

    agent: str
    tool: str
    argument: str
    result: str
    failure: str | None = None
    erred: bool = False
    branch: str = ""


Number = TypeVar("Number", int, float)
EpisodeEvent = Message | ToolUse
_KINDS: Mapping[Any, type[Any]] = {"say": Message, "use": ToolUse}
"""By what an event's `kind` says in a file."""


class Tokens(NamedTuple):
    """Tokens of an episode: those that went in, those of them in a cache, those that came out."""

    prompt: int
    cached: int
    sampled: int

    @property
    def total(self) -> int:
        return self.prompt + self.sampled

    @property
    def total_cached(self) -> int:
        """With a perfect prompt cache."""
        return self.prompt - self.cached + self.sampled


class EpisodeUsage(NamedTuple):
    """What servers counted for all model calls of an episode; None: one of them did not say."""

    prompt: int | None
    cached: int | None
    sampled: int | None
    cost: float | None


@dataclass(slots=True)
class Episode:
    """The record of one task: who said what to whom, which tools were used, and the answer."""

    task_id: str
    question: str
    teacher: str
    agents: list[AgentSpec]
    events: list[EpisodeEvent] = field(default_factory=list)
    answer: str | None = None
    error: str | None = None
    seed: int = 0
    meta: dict[str, Any] = field(default_factory=dict)
    tools: list[ToolSpec] = field(default_factory=list)
    """The tools that the team had, used or not; empty: nobody noted them."""
    history: tuple[ChatMessage, ...] = ()
    """What was said before the question, as the task has it."""
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Wall-clock figures: total, model, tools. Not part of the record."""

    @property
    def task(self) -> Task:
        """The public task that it is of."""
        return Task(self.question, id=self.task_id, meta=self.meta, history=self.history)

    def model_calls(self) -> Iterator[tuple[int, Message]]:
        """(place, message) of each model call; the user and the code between agents call none."""
        names = {agent.name for agent in self.agents}
        for place, event in enumerate(self.events):
            if isinstance(event, Message) and event.agent in names:
                yield place, event

    @property
    def calls(self) -> list[int]:
        """Places of the model calls among the events."""
        return [place for place, _ in self.model_calls()]

    @property
    def cost(self) -> float | None:
        """Money of all model calls; None when the price of one is not known."""
        return self.usage.cost

    @property
    def usage(self) -> EpisodeUsage:
        """What servers counted; unlike `count_tokens` it counts nothing itself."""
        calls = [said.call or ModelCall("", "") for _, said in self.model_calls()]
        return EpisodeUsage(
            total([call.prompt_tokens for call in calls]),
            total([call.cached_tokens for call in calls]),
            total([call.sampled_tokens for call in calls]),
            total([call.cost for call in calls]),
        )

    def messages_of(self, place: int) -> list[ChatMessage]:
        """What the model call at `place` was given, its system prompt first."""
        agent = self.events[place].agent
        own = [
            (at, said, said.call or ModelCall("", ""))
            for at, said in enumerate(self.events[: place + 1])
            if isinstance(said, Message) and said.agent == agent
        ]
        assert own and own[-1][0] == place, self.events[place]
        since = max((at for at, (_, _, call) in enumerate(own) if not call.kept), default=0)
        messages: list[ChatMessage] = []
        for at, said, call in own[since:]:
            if call.given is None:
                given = self.context_of(agent, said.branch, self.events[:at])
            else:
                given = [*messages[: call.kept], *call.given]
            messages = [*given, *_seen_by(agent, said)]
        return given

    def context_of(
        self, agent: str, branch: str, events: Sequence[EpisodeEvent]
    ) -> list[ChatMessage]:
        """What an agent has seen of `events` and would be given next.

        Inside a branch it does not see what happens at the same time in another one.
        """
        system = next((each.system for each in self.agents if each.name == agent), "")
        seen = [ChatMessage("system", system)]
        alone = (place for place in reversed(range(len(events))) if not events[place].branch)
        ended = next(alone, -1)
        for place, event in enumerate(events):
            if not branch or place <= ended or event.branch == branch:
                seen += _seen_by(agent, event)
        return seen

    def count_tokens(self, count: Callable[[str], int]) -> Tokens:
        """Cost of every model call, counted with `count`, or as its server counted it.

        With a cache an agent pays again only for what it was not given, and did not write, before.
        A server that does not say what was in its cache is taken to have none.
        """
        prompt = cached = sampled = 0
        sent: dict[str, list[list[ChatMessage]]] = {}
        for place, said in self.model_calls():
            if said.call and said.call.sampled_tokens and said.call.prompt_tokens is not None:
                prompt += said.call.prompt_tokens
                cached += said.call.cached_tokens or 0
                sampled += said.call.sampled_tokens
                continue
            given = self.messages_of(place)
            earlier = sent.setdefault(said.agent, [])
            shared = max((common(given, before) for before in earlier), default=0)
            lengths = [count(message.text) for message in given]
            prompt += sum(lengths)
            cached += sum(lengths[:shared])
            sampled += count(said.written)
            earlier.append([*given, ChatMessage("assistant", said.written)])
        return Tokens(prompt, cached, sampled)

    def to_json(self) -> Json:
        kinds = {kind: name for name, kind in _KINDS.items()}
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in _PLAIN},
            "agents": [_plain(agent) for agent in self.agents],
            "tools": [_plain(each) for each in self.tools],
            "events": [{"kind": kinds[type(each)], **_plain(each)} for each in self.events],
            **history_json(self.history),
        }

    @classmethod
    def from_json(cls, record: Json) -> Episode:
        if record.get("schema") not in READABLE:
            raise RecordError(
                f"found episode schema {record.get('schema')!r}, expected {SCHEMA}. "
                "Is this an episodes.jsonl from `coa record`?"
            )
        if missing := [name for name in _FIELDS if name not in record]:
            raise RecordError(f"the episode has no field {missing[0]!r}.")
        given = {name: record.get(name) for name in (*_FIELDS, "tools", "history")}
        if isinstance(given["task_id"], int | float):  # a task file may have numbers as ids, too
            given["task_id"] = str(given["task_id"])
        given = _checked(cls, given, "the episode")
        if not given["question"].strip():
            raise RecordError("the question is empty.")
        given["agents"] = [AgentSpec(**_checked(AgentSpec, a, "agents")) for a in given["agents"]]
        given["history"] = read_history(given.get("history", []))
        tools = given.get("tools", [])
        given["tools"] = [ToolSpec(**_checked(ToolSpec, each, "tools")) for each in tools]
        names = [agent.name for agent in given["agents"]]
        for name in names:  # they tell the agents apart, also from those who are none
            if name in (USER, SYSTEM):
                expected = "which is no agent; expected another name"
                raise RecordError(f"agents: found {name!r}, {expected}.")
            if names.count(name) > 1:
                raise RecordError(f"agents: found {name!r} twice, expected each agent once.")
        events = enumerate(given.get("events", []), 1)
        uncounted = 0 if record["schema"] < 4 else None
        given["events"] = [_event(f"event {at}", each, names, uncounted) for at, each in events]
        return cls(**given)


def _seen_by(agent: str, event: EpisodeEvent) -> list[ChatMessage]:
    if isinstance(event, ToolUse):
        return [ChatMessage("user", event.result)] if event.agent == agent and event.result else []
    if event.agent == agent:
        return [ChatMessage("assistant", event.written)] if event.written else []
    return [ChatMessage("user", event.text)] if event.to == agent and event.text else []


def total(counted: Sequence[Number | None]) -> Number | None:
    """The sum where all are known, and there are any."""
    known = [each for each in counted if each is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(counted) else None


def common(one: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> int:
    """How many messages both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _plain(record: AgentSpec | ToolSpec | EpisodeEvent | ModelCall) -> Json:
    """Fields that are not what they are anyway."""
    found: Json = {}
    for each in fields(record):
        value = getattr(record, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if value != default:
            found[each.name] = _plain(value) if isinstance(value, ModelCall) else value
    return found


_EXPECTED: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "a text"),
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "dict": (dict, "an object"),
    "list": (list, "a list"),
    "tuple": (list, "a list"),
    "ModelCall": (dict, "an object"),
}
"""What a record holds for a field, by the first word of the field's type."""


def _checked(kind: type[Any], record: Any, where: str) -> Json:
    """The fields of an episode or of a part of it; one that is null has its default."""
    if not isinstance(record, dict):
        raise RecordError(f"{where}: found {str(record)[:60]!r}, expected an object.")
    known = {each.name: each for each in fields(kind)}
    given = {name: value for name, value in record.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise RecordError(f"{where}: {name!r} is not a field of a {kind.__name__}.{hint}")
        fitting, expected = _EXPECTED[re.split(r"\W", str(known[name].type))[0]]
        if not isinstance(value, fitting):
            raise RecordError(f"{where}: {name}: found {repr(value)[:60]}, expected {expected}.")
    for each in known.values():
        if each.default is each.default_factory is MISSING and each.name not in given:
            raise RecordError(f"{where}: has no {each.name}.")
    return given


def _event(
    where: str, record: Any, names: Sequence[str], uncounted: int | None = None
) -> EpisodeEvent:
    """One event of a team with these names; `uncounted`: tokens that a call does not state."""
    kind = record.get("kind") if isinstance(record, dict) else None
    if kind not in list(_KINDS):  # a list, since what stands there may not be hashable
        raise RecordError(f"{where} has the kind {kind!r}, expected say or use.")
    given = {name: value for name, value in record.items() if name != "kind"}
    given = _checked(_KINDS[kind], given, where)
    known = [*names, USER, SYSTEM]
    for end in ("agent", "to"):
        if end in given and given[end] not in known:
            hint = did_you_mean(given[end], known)
            expected = f"expected a name from agents.{hint}"
            raise RecordError(f"{where}: {end}: found {given[end]!r}, {expected}")
    failure = given.get("failure")
    if failure is not None and failure not in get_args(Failure):
        expected = ", ".join(get_args(Failure))
        raise RecordError(
            f"{where}: failure: found {failure!r}, expected null or one of {expected}."
        )
    if "call" in given:
        given["call"] = _model_call(given["call"], f"{where}: call", uncounted)
    event: EpisodeEvent = _KINDS[kind](**given)
    return event


_COUNTED = ("prompt_tokens", "cached_tokens", "sampled_tokens")


def _model_call(record: Json, where: str, uncounted: int | None) -> ModelCall:
    given = {**dict.fromkeys(_COUNTED, uncounted), **_checked(ModelCall, record, where)}
    for message in given.get("given", []):
        if not isinstance(message, list) or list(map(type, message)) != [str, str]:
            found = str(message)[:60]
            raise RecordError(f"{where}: given: found {found!r}, expected a role and a text.")
    if "given" in given:
        given["given"] = [ChatMessage(*message) for message in given["given"]]
    return ModelCall(**given)


def load_episodes(path: Path) -> list[Episode]:
    """Read an episodes file; the first line that is no episode raises an error that names it."""
    return read_records(path, Episode.from_json)


def read_episodes(path: Path) -> Iterator[tuple[int, Episode | RecordError]]:
    """(line, episode), or what is wrong with the line: one bad record does not spoil a file."""
    for number, record in read_jsonl(path):
        try:
            yield number, Episode.from_json(record)
        except RecordError as wrong:
            yield number, wrong
