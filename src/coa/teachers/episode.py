"""Episode: what a multi-agent system did for one task, before conversion.

Agents have a system prompt and a context of their own: an agent sees only what was said to it, what
it said, and what its tools returned. Each `Say` is one model call of its agent; what that call was
given is derived from the events before it (`context_of`), so cost can be counted with any tokenizer
and with or without a prompt cache. `erred` marks a mistake for later study (an injected one, or a
critic's who let it pass or objected to sound work); no agent ever sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from coa.errors import RecordError
from coa.runs import Json, read_records

SCHEMA = 1
USER = "user"


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One agent of the system: its name, the part it plays and its system prompt."""

    name: str
    part: str
    """planner, searcher, reader, coder, reflector, verifier ..."""
    system: str


@dataclass(frozen=True, slots=True)
class Say:
    """One model call: an agent thinks and says something to another."""

    agent: str
    to: str
    text: str
    thought: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """Machine-readable content of the message (steps of a plan, a finding, a verdict)."""
    erred: bool = False


@dataclass(frozen=True, slots=True)
class Use:
    """One tool call of an agent and what came back."""

    agent: str
    tool: str
    argument: str
    result: str
    failure: str | None = None
    erred: bool = False


Happening = Say | Use


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


@dataclass(slots=True)
class Episode:
    """The record of one task: who said what to whom, which tools were used, and the answer."""

    task_id: str
    question: str
    teacher: str
    agents: list[AgentSpec]
    events: list[Happening] = field(default_factory=list)
    answer: str | None = None
    error: str | None = None
    seed: int = 0
    meta: dict[str, Any] = field(default_factory=dict)

    def context_of(self, index: int) -> list[str]:
        """The texts that the model call at `index` was given, its system prompt first."""
        call = self.events[index]
        assert isinstance(call, Say), call
        system = next(agent.system for agent in self.agents if agent.name == call.agent)
        return [
            system,
            *(text for text in map(self._seen_by(call.agent), self.events[:index]) if text),
        ]

    @staticmethod
    def _seen_by(agent: str) -> Callable[[Happening], str]:
        def seen(event: Happening) -> str:
            if isinstance(event, Use):
                return event.result if event.agent == agent else ""
            if event.agent == agent:
                return f"{event.thought} {event.text}".strip()
            return event.text if event.to == agent else ""

        return seen

    def count_tokens(self, count: Callable[[str], int]) -> Tokens:
        """Cost of every model call, counted with `count`."""
        prompt = cached = sampled = 0
        names = {agent.name for agent in self.agents}
        sent: dict[str, int] = {}
        for index, event in enumerate(self.events):
            if not isinstance(event, Say) or event.agent not in names:
                continue  # the user and the code between agents call no model
            given = sum(map(count, self.context_of(index)))
            written = count(f"{event.thought} {event.text}".strip())
            prompt += given
            cached += sent.get(event.agent, 0)
            sampled += written
            sent[event.agent] = given + written  # what it wrote opens its next prompt, too
        return Tokens(prompt, cached, sampled)

    def to_json(self) -> Json:
        return {
            "schema": SCHEMA,
            "task_id": self.task_id,
            "question": self.question,
            "teacher": self.teacher,
            "seed": self.seed,
            "answer": self.answer,
            "error": self.error,
            "meta": self.meta,
            "agents": [asdict(agent) for agent in self.agents],
            "events": [
                {"kind": "say" if isinstance(event, Say) else "use", **asdict(event)}
                for event in self.events
            ],
        }

    @classmethod
    def from_json(cls, record: Json) -> Episode:
        if record.get("schema") != SCHEMA:
            raise RecordError(
                f"found episode schema {record.get('schema')!r}, expected {SCHEMA}. "
                "Is this an episodes.jsonl from `coa record`?"
            )
        events: list[Happening] = []
        for event in record["events"]:
            fields = {key: value for key, value in event.items() if key != "kind"}
            events.append(Say(**fields) if event["kind"] == "say" else Use(**fields))
        return cls(
            task_id=record["task_id"],
            question=record["question"],
            teacher=record["teacher"],
            seed=record["seed"],
            answer=record["answer"],
            error=record["error"],
            meta=record["meta"],
            agents=[AgentSpec(**agent) for agent in record["agents"]],
            events=events,
        )


def load_episodes(path: Path) -> list[Episode]:
    return read_records(path, Episode.from_json)
