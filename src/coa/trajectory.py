"""Trajectory: everything that was said for one task, in order, with its author. The unit on disk.

A trajectory is a list of segments. A segment is a run of text by one author: the prompt, the model
or the environment. What the model sampled keeps its token ids and logprobs from birth; masks,
costs and text are derived from segments and never stored, so they cannot disagree with them.

    prompt | model: <think>..</think><wiki_search>..</wiki_search> | env: <observation>.. | model ..

Wall-clock figures (`Trajectory.seconds`) are kept out of `to_json`: results are the same whenever a
recipe is run, timings are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.grammar.grammar import Block, Fault, Grammar, Kind, parse_score
from coa.grammar.load import GrammarBook
from coa.grammar.parse import check, parse
from coa.io.runs import Json, read_records, write_jsonl

SCHEMA = 1


class Author(StrEnum):
    """Who wrote a segment. Only what the model wrote can ever be trained on."""

    PROMPT = "prompt"
    MODEL = "model"
    ENV = "env"


class StopReason(StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"
    """The model closed an answer block."""
    RELEASED = "released"
    """A budget ended the run and the last suggested answer was released."""
    TURNS = "turns"
    TOKENS = "tokens"
    CONTEXT = "context"
    TIME = "time"
    MALFORMED = "malformed"
    """The model broke the grammar more often than allowed."""
    TOOL_FAILED = "tool_failed"
    TOOL_TIMEOUT = "tool_timeout"
    ENGINE_FAILED = "engine_failed"
    CANCELLED = "cancelled"

    @property
    def truncated(self) -> bool:
        """A budget cut the run; the model did not err."""
        return self in _TRUNCATED

    @property
    def outside(self) -> bool:
        """Something outside (a tool, the engine, the caller), not the model, ended the run."""
        return self in _OUTSIDE


_TRUNCATED = {StopReason.TURNS, StopReason.TOKENS, StopReason.CONTEXT, StopReason.TIME}
_TRUNCATED |= {StopReason.RELEASED}
_OUTSIDE = {StopReason.TOOL_FAILED, StopReason.TOOL_TIMEOUT, StopReason.ENGINE_FAILED}
_OUTSIDE |= {StopReason.CANCELLED}


@dataclass(slots=True)
class Segment:
    """A run of text by one author."""

    author: Author
    text: str
    ids: list[int] | None = None
    """Token ids: as sampled for the model's text, as fed to the engine for the rest."""
    logprobs: list[float] | None = None
    """One per id, of the distribution sampled from; only on sampled segments."""
    errs: list[tuple[int, int]] = field(default_factory=list)
    """Character spans that hold a mistake and must not be imitated (weight 0 in training)."""
    allowed: list[float] | None = None
    """Under a constraint, one per id: log of the probability that the allowed tokens had together
    before it was applied. The logprobs are over the allowed tokens."""

    def to_json(self) -> Json:
        record: Json = {"author": self.author.value, "text": self.text}
        if self.ids is not None:
            record["ids"] = self.ids
        if self.logprobs is not None:
            record["logprobs"] = [round(value, 6) for value in self.logprobs]
        if self.allowed is not None:
            record["allowed"] = [round(value, 6) for value in self.allowed]
        if self.errs:
            record["errs"] = [list(span) for span in self.errs]
        return record

    @classmethod
    def from_json(cls, record: Json) -> Segment:
        for start, end in record.get("errs", ()):
            if not 0 <= start <= end <= len(record["text"]):
                raise RecordError(f"a mistake is marked at {start} to {end}, outside of its text.")
        return cls(
            author=Author(record["author"]),
            text=record["text"],
            ids=record.get("ids"),
            logprobs=record.get("logprobs"),
            errs=[(start, end) for start, end in record.get("errs", ())],
            allowed=record.get("allowed"),
        )


@dataclass(slots=True)
class Usage:
    """What a trajectory cost, counted so that it does not depend on the machine."""

    prompt_tokens: int = 0
    """Tokens sent to the engine, summed over turns: what an API without a cache would bill."""
    cached_tokens: int = 0
    """The part of `prompt_tokens` that was already part of this rollout's previous turn."""
    sampled_tokens: int = 0
    observation_tokens: int = 0
    turns: int = 0
    tool_calls: int = 0
    malformed: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt, sampled and observation tokens with a perfect cache: each counted once."""
        return self.prompt_tokens - self.cached_tokens + self.sampled_tokens

    def since(self, before: Usage) -> Usage:
        """What was added to an earlier count."""
        now, then = asdict(self), asdict(before)
        return Usage(**{name: now[name] - then[name] for name in now})


@dataclass(slots=True)
class Step:
    """A model turn and the observation after it, if any."""

    model: Segment
    observation: Segment | None = None


@dataclass(slots=True)
class Trajectory:
    """All segments for one task, why they ended, and what they cost."""

    task_id: str
    question: str
    grammar: str
    segments: list[Segment] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    """The tool roles it had: a grammar's name does not say which were bound to it."""
    grammar_id: str = ""
    """Fingerprint of the grammar without its tools; empty in files from before there was one."""
    prompt: str = "compact"
    """Which of the grammar's prompts opened it: full or compact."""
    stop: StopReason | None = None
    """None while the trajectory is still growing."""
    answer: str | None = None
    error: str | None = None
    """What was wrong, in words, when it ended without an answer."""
    usage: Usage = field(default_factory=Usage)
    weights: str = ""
    """The version of the weights that sampled it."""
    seed: int = 0
    sample: int = 0
    """Index within its group."""
    meta: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Wall-clock figures: total, engine, tools. Not part of the record."""
    scored: Json | None = None
    """What a reward that judges with the state of the rollout said before the state was gone."""
    book: GrammarBook | None = field(default=None, compare=False, repr=False)
    """Where its grammar is found; presets are found without one."""

    @property
    def failed_outside(self) -> bool:
        """Whether something outside, not the model, ended it."""
        return self.stop is not None and self.stop.outside

    @property
    def ended_outside(self) -> bool:
        """Whether training must not take its end for the model's doing: something outside failed,
        or the clock ran out, also where a suggested answer was released then. How long tools, a
        server and the machine take is not up to the model."""
        cut_by = self.meta.get("cut_by") if self.stop is StopReason.RELEASED else self.stop
        return self.failed_outside or cut_by == StopReason.TIME

    @property
    def truncated(self) -> bool:
        """Whether a budget ended it."""
        return self.stop is not None and self.stop.truncated

    @property
    def steps(self) -> list[Step]:
        """Model turns, each with the observation that followed."""
        steps: list[Step] = []
        for segment in self.segments:
            if segment.author is Author.MODEL:
                steps.append(Step(segment))
            elif segment.author is Author.ENV and steps:
                steps[-1].observation = segment
        return steps

    @property
    def text(self) -> str:
        """The assistant turn: model text and observations, without the prompt."""
        return "".join(s.text for s in self.segments if s.author is not Author.PROMPT)

    @property
    def ids(self) -> list[int]:
        """All token ids in order; every segment must have them."""
        ids: list[int] = []
        for segment in self.segments:
            assert segment.ids is not None, f"{self.task_id}: a {segment.author} segment has no ids"
            ids += segment.ids
        return ids

    @property
    def protocol(self) -> Grammar:
        """The grammar it was written in, with the tools that it had."""
        return (self.book or _PRESETS).bound(self.grammar, self.grammar_id, self.tools)

    def to_json(self) -> Json:
        record: Json = {"schema": SCHEMA} | {name: getattr(self, name) for name in _STORED}
        record["stop"] = self.stop.value if self.stop else None
        record["usage"] = asdict(self.usage)
        record["segments"] = [segment.to_json() for segment in self.segments]
        if self.grammar_id:
            record["grammar_id"] = self.grammar_id
        if self.scored is not None:
            record["scored"] = self.scored
        return record

    @classmethod
    def from_json(cls, record: Json, book: GrammarBook | None = None) -> Trajectory:
        """Read a trajectory; `book` has the grammars that are stored beside it."""
        schema = record.get("schema")
        if "events" in record and "segments" not in record:
            raise RecordError(
                "this is an episode, expected a trajectory. `coa distill` makes trajectories of "
                "episodes; `coa view FILE --html PAGE` shows episodes."
            )
        if "answers" in record and "segments" not in record:
            raise RecordError("this is a task, expected a trajectory. `coa eval` makes some of it.")
        if schema != SCHEMA:
            raise RecordError(
                f"found trajectory schema {schema!r}, expected {SCHEMA}. "
                "Is this a trajectories.jsonl? A newer one needs a newer chain-of-agents."
            )
        stored = {name: record[name] for name in _STORED if name in record or name != "tools"}
        stored["stop"] = StopReason(record["stop"]) if record["stop"] else None
        stored["usage"] = Usage(**record["usage"])
        return cls(
            **stored,
            segments=[Segment.from_json(s) for s in record["segments"]],
            grammar_id=record.get("grammar_id", ""),
            scored=record.get("scored"),
            book=book,
        )


_STORED = (
    *("task_id", "question", "grammar", "tools", "prompt", "stop", "answer", "error", "usage"),
    *("weights", "seed", "sample", "meta"),
)
"""Fields of a record in their order on disk; old files have no `tools`."""
_PRESETS = GrammarBook()
"""For trajectories that nothing was stored beside."""


def save_trajectories(
    path: Path, trajectories: Iterable[Trajectory], *, private: bool = False
) -> None:
    write_jsonl(path, (trajectory.to_json() for trajectory in trajectories), private=private)


def load_trajectories(path: Path) -> list[Trajectory]:
    """Read a trajectories file, or the one in a directory; a damaged line is named."""
    path = path / "trajectories.jsonl" if path.is_dir() else path
    book = GrammarBook.beside(path)
    return read_records(path, lambda record: Trajectory.from_json(record, book))


CHAT_MARKER = re.compile(r"<[|\uff5c][^<>\s]*[|\uff5c]>|<(?:start|end)_of_\w+>|</?s>|\[/?INST\]")
"""What chat formats mark turns with: a tokenizer may take it for the end of the model's turn."""


@dataclass(frozen=True)
class Chain:
    """A trajectory read once under its grammar, for whoever filters or counts its blocks."""

    trajectory: Trajectory
    grammar: Grammar
    blocks: list[Block]
    """Observations are not among them. Positions are those in `trajectory.text`."""
    fault: Fault | None
    """The first thing about it that is illegal."""
    observed: Mapping[int, str]
    """Start of a tool call -> what came back; a call that the chain ends with has nothing."""

    @classmethod
    def read(cls, trajectory: Trajectory) -> Chain:
        grammar = trajectory.protocol
        parsed = parse(grammar, trajectory.text, env=True)
        own = [block for block in parsed.blocks if block.role != grammar.observation]
        observed = {
            block.start: after.body
            for block, after in pairwise(parsed.blocks)
            if after.role == grammar.observation != block.role
        }
        return cls(trajectory, grammar, own, check(grammar, parsed), observed)

    def kind(self, block: Block) -> Kind:
        return self.grammar.by_name[block.role].kind

    def of_kind(self, kind: Kind) -> list[Block]:
        return [block for block in self.blocks if self.kind(block) == kind]

    @cached_property
    def interactions(self) -> list[Block]:
        """Blocks other than thoughts: each is an agent that was called."""
        return [block for block in self.blocks if self.kind(block) != "think"]

    @cached_property
    def check_scores(self) -> list[int]:
        """What the checks gave, in order."""
        return [score for block in self.of_kind("check") if (score := parse_score(block.body))]

    def is_marked(self, block: Block) -> bool:
        """Whether a mistake is marked in a block."""
        return any(block.start < end and begin < block.end for begin, end in self._marks)

    @cached_property
    def _marks(self) -> list[tuple[int, int]]:
        """Spans of marked mistakes in the text of the whole trajectory."""
        start, marks = 0, []
        for segment in self.trajectory.segments:
            if segment.author is not Author.PROMPT:
                marks += [(start + begin, start + end) for begin, end in segment.errs]
                start += len(segment.text)
        return marks

    def turning_point(self, low_check: int) -> str:
        """Where the work was found wrong and went on: in words, or nothing.

        Checks say so by their score, all but the last: after that nothing was put right. Where the
        grammar has none, a marked mistake that a reflection answered does, or a reflection that led
        to a new plan, unless that was a false alarm.
        """
        if self.grammar.of_kind("check"):
            low = any(score <= low_check for score in self.check_scores[:-1])
            return "a low check was put right" if low else ""
        if self._mistake_was_answered():
            return "a marked mistake was put right"
        for block, following in pairwise(self.interactions):
            kinds = self.kind(block), self.kind(following)
            if kinds == ("reflection", "plan") and not self.is_marked(block):
                return "an objection led to a new plan"
        return ""

    def _mistake_was_answered(self) -> bool:
        """A critic's own mistake (a false alarm, a miss) is no mistake of the work."""
        critics = ("reflection", "check")
        marked = [b for b in self.blocks if self.kind(b) not in critics and self.is_marked(b)]
        # Without critics in the grammar it is enough that the work went on.
        answer = "reflection" if self.grammar.of_kind("reflection") else "tool"
        return bool(marked) and any(
            block.start >= marked[0].end
            and self.kind(block) == answer
            and not self.is_marked(block)
            for block in self.interactions
        )
