"""What a file of episodes holds: agents, tools, gaps, forms of a tool, questions asked twice.

An `Aspect` counts one thing, an episode after another, and then says what it found and what to do
about it. Files of strangers have ever new names in places that should have few; of these the first
`NAMES` are told apart, so that what is kept does not grow with the file.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from coa.distillation.contamination import words_of
from coa.distillation.filters import FilterSettings, near_duplicates
from coa.errors import RecordError
from coa.evaluation.team import AnswerVerdict, is_cut
from coa.io.runs import Json
from coa.io.workers import shortened
from coa.recording.episode import Episode, ToolSpec, ToolUse
from coa.rewards import normalise

COMPARED = 20_000
"""Different questions that are compared with each other word by word."""
NAMES = 1_000
"""Names of agents, of tools and of gaps, and forms of one tool, that are told apart."""
SHOWN = 12
"""Lines for agents, and for tools."""
Mark = Literal["ok", "--", "!!"]


class Remark(NamedTuple):
    """One thing that was found, and what to do about it."""

    mark: Mark
    """ok; -- is not known; !! wants something done."""
    name: str
    found: str
    advice: str = ""


fine = partial(Remark, "ok")
unknown = partial(Remark, "--")
amiss = partial(Remark, "!!")


class Aspect(Protocol):
    """Something that is looked at, one episode after another."""

    name: str

    def add(self, episode: Episode, verdict: AnswerVerdict) -> None: ...

    def findings(self) -> Iterator[Remark]: ...

    def to_json(self) -> Json: ...


class NameTally(Counter[str]):
    """Counts by name; of a stranger's file that has ever new ones the first `NAMES` are kept."""

    def note(self, name: str, times: int = 1) -> None:
        known = name in self or len(self) < NAMES
        self[name if known else "(others)"] += times

    def told(self, most: int = 5) -> str:
        """The most frequent, as a list."""
        listed = ", ".join(f"{count:,} {name}" for name, count in self.most_common(most))
        return f"{listed}, and {len(self) - most} other kinds" if len(self) > most else listed


def count_of(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def share_of(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "none"


class Episodes:
    """How many there are, how they ended, and which lines are none."""

    name = "episodes"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = self.answered = self.cut = self.strangers = 0
        self.stranger = ""
        self.errors, self.sources = NameTally(), NameTally()

    def refuse(self, line: int, wrong: RecordError) -> None:
        """A line that is no episode."""
        self.strangers += 1
        self.stranger = self.stranger or f"Line {line}: {wrong}"

    def add(self, episode: Episode, verdict: AnswerVerdict) -> None:
        self.count += 1
        self.answered += episode.answer is not None
        self.sources.note(str(episode.meta.get("source") or episode.teacher))
        if is_cut(episode):
            self.cut += 1
        elif episode.answer is None:
            self.errors.note(shortened(episode.error or "it ended without an answer", 60))

    def findings(self) -> Iterator[Remark]:
        found = f"{self.count:,} in {self.path}, {self.answered:,} with an answer"
        yield fine("episodes", f"{found}; recorded by {self.sources.told(3)}")
        if self.strangers:
            lines = count_of(self.strangers, "line is no episode", "lines are no episodes")
            yield amiss(
                "", f"{lines}. {self.stranger}", "coa distill leaves them out and counts them"
            )
        if self.cut:
            yield amiss(
                "",
                f"{count_of(self.cut, 'episode was', 'episodes were')} cut before the end",
                "record them again: with tasks the same `coa record` does it",
            )
        if self.errors:
            yield amiss(
                "",
                f"{self.errors.total():,} without an answer: {self.errors.told(3)}",
                "they count as not solved and do not become chains; mend the team and record them "
                "again",
            )

    def to_json(self) -> Json:
        return {
            "n": self.count,
            "answered": self.answered,
            "cut": self.cut,
            "errors": dict(self.errors.most_common()),
            "sources": dict(self.sources.most_common()),
            "not_episodes": self.strangers,
        }


@dataclass
class Busy:
    """How much an agent, or a tool, has to do."""

    calls: int = 0
    """Model calls of an agent, uses of a tool."""
    uses: int = 0
    """Tool uses of an agent."""
    failures: NameTally = field(default_factory=NameTally)
    episodes: int = 0
    """In which it does anything."""

    def to_json(self, agent: bool) -> Json:
        made = {"model_calls": self.calls, "tool_calls": self.uses} if agent else {}
        made = made or {"calls": self.calls}
        return {**made, "episodes": self.episodes, "failures": dict(self.failures)}


class TeamTally:
    """How often each agent and each tool is at work, and fails."""

    name = "team"

    def __init__(self) -> None:
        self.episodes = 0
        self.agents: dict[str, Busy] = {}
        self.tools: dict[str, Busy] = {}
        self.offered: set[str] = set()

    def add(self, episode: Episode, verdict: AnswerVerdict) -> None:
        self.episodes += 1
        for spec in episode.tools:
            if len(self.offered) < NAMES:
                self.offered.add(spec.name)
        for name in dict.fromkeys(event.agent for _, event in episode.model_calls()):
            self._busy(self.agents, name).episodes += 1
        for _, said in episode.model_calls():
            self._busy(self.agents, said.agent).calls += 1
        uses = [event for event in episode.events if isinstance(event, ToolUse)]
        for name in dict.fromkeys(event.tool for event in uses):
            self._busy(self.tools, name).episodes += 1
        for event in uses:
            agent, tool = self._busy(self.agents, event.agent), self._busy(self.tools, event.tool)
            agent.uses += 1
            tool.calls += 1
            if event.failure:
                agent.failures.note(event.failure)
                tool.failures.note(event.failure)

    def _busy(self, known: dict[str, Busy], name: str) -> Busy:
        if name not in known and len(known) >= NAMES:
            name = "(others)"
        return known.setdefault(name, Busy())

    def findings(self) -> Iterator[Remark]:
        for kind, known in (("agent", self.agents), ("tool", self.tools)):
            ordered = sorted(known.items(), key=lambda each: -each[1].calls)
            for name, busy in ordered[:SHOWN]:
                yield self._finding(kind, name, busy)
            if (left := len(ordered) - SHOWN) > 0:
                yield fine("", f"and {count_of(left, f'{kind} more', f'{kind}s more')}")
        if unused := sorted(self.offered - self.tools.keys()):
            listed = ", ".join(unused[:SHOWN])
            yield unknown(
                "tools",
                f"offered and never called: {listed}",
                "a student cannot learn when to call them; leave them out, or record tasks that "
                "need them",
            )

    def _finding(self, kind: str, name: str, busy: Busy) -> Remark:
        share = f"in {share_of(busy.episodes, self.episodes)} of the episodes"
        if kind == "agent":
            found = f"{name}: {count_of(busy.calls, 'model call')} and "
            found += f"{count_of(busy.uses, 'tool call')}, {share}"
        else:
            found = f"{name}: {count_of(busy.calls, 'call')}, {share}"
        if not busy.failures:
            return fine(kind, found)
        found += f"; failed: {busy.failures.told()}"
        outside = busy.failures["failed"] + busy.failures["timeout"]
        if kind == "agent" or not outside:
            return fine(kind, found)
        advice = "`failed` and `timeout` are the world's fault: such an episode becomes no chain"
        return amiss(kind, found, advice)

    def to_json(self) -> Json:
        return {
            "agents": {name: busy.to_json(True) for name, busy in self.agents.items()},
            "tools": {name: busy.to_json(False) for name, busy in self.tools.items()},
            "never_called": sorted(self.offered - self.tools.keys()),
        }


# -- what is missing, what changed, what is there twice ----------------------------------------


_RECORD_TOOLS = "record with --otel, which sees tools, or let the program send their results"
_READ_THEM = "look at some: coa view EPISODES --html PAGE"
GAPS = {
    "usage_unknown": "",
    "reply_cut": "a reply that was cut becomes a cut text in a chain: raise the program's "
    "max_tokens, and look for connections that break",
    "reply_unread": "the server answered in a way that is not known here; that call is missing",
    "call_failed": "the model server refused or broke off; retries count once. Record those "
    "episodes again that ended by it",
    "result_missing": f"no result of a tool came back, so the chain would show none: "
    f"{_RECORD_TOOLS}",
    "results_joined": f"results of several calls came back as one text: {_RECORD_TOOLS}",
    "choice_unknown": "the server wrote several replies to one request, and no later call shows "
    "which was used; the first is kept",
    "program_unread": "an agent writes programs that are no plain calls: let it call tools "
    "(smolagents: ToolCallingAgent), or such steps are not in the chain",
    "text_not_captured": "the program's telemetry leaves out what was said: set "
    "OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental and "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY, and record again",
    "history_missing": "a call goes on from a reply that was not recorded: record from the first "
    "call on",
    "answer_not_found": "--answer found nothing in what the program printed: look at the pattern",
    "not_text": "images and files are left out, and so is what they said",
    "parts_not_text": "images and files are left out, and so is what they said",
    "sub_agent_missing": "the file refers to an agent's work that is not in it: import that, too",
    "agent_runs_missing": "the file does not hold all work of an agent: import that, too",
    "parent_missing": "spans lack the ones above them: export the whole trace",
    "span_unended": "spans did not end: let the program shut its tracing down before it exits",
    "tool_redefined": "see schemas",
    "tool_schemas_differ": "see schemas",
}
"""What a gap means and what to do; what no server counted is said with the cost."""


class Gaps:
    """What the recorder could not know, as `meta["gaps"]` of each episode counts it."""

    name = "gaps"

    def __init__(self) -> None:
        self.times, self.episodes = NameTally(), NameTally()

    def add(self, episode: Episode, verdict: AnswerVerdict) -> None:
        gaps = episode.meta.get("gaps")
        for name, times in gaps.items() if isinstance(gaps, dict) else ():
            counted = times if isinstance(times, int) and not isinstance(times, bool) else 1
            if counted > 0:
                self.times.note(shortened(str(name), 60), counted)
                self.episodes.note(shortened(str(name), 60))

    def findings(self) -> Iterator[Remark]:
        for name, times in self.times.most_common():
            where = f"{times:,} in {count_of(self.episodes[name], 'episode')}"
            if advice := GAPS.get(name, _READ_THEM):
                yield amiss("gaps", f"{name.replace('_', ' ')}: {where}", advice)
        if not self.times:
            yield fine("gaps", "none that the recorder noted")

    def to_json(self) -> Json:
        return {
            name: {"times": times, "episodes": self.episodes[name]}
            for name, times in self.times.most_common()
        }


class Forms:
    """The forms that one tool has over the episodes."""

    def __init__(self) -> None:
        self.counts = NameTally()
        self.first: dict[str, ToolSpec] = {}
        """Two of them, to show in what they differ."""

    def add(self, spec: ToolSpec) -> None:
        schema = _canonical(spec.schema)
        digest = digest_of(json.dumps([spec.about, spec.body, schema]))
        self.counts.note(digest)
        if len(self.first) < 2:
            self.first.setdefault(digest, spec)

    def difference(self) -> str:
        """The first difference between two of them."""
        one, other = self.first.values()
        if one.about != other.about:
            return "description: " + " and ".join(_apart(one.about, other.about))
        if one.body != other.body:
            return f"body: {one.body!r} and {other.body!r}"
        return "schema: " + _differ(_parsed(one.schema), _parsed(other.schema))


class Drift:
    """Tools that are not the same in all episodes."""

    name = "schemas"

    def __init__(self) -> None:
        self.tools: dict[str, Forms] = {}
        self.unnoted = 0

    def add(self, episode: Episode, verdict: AnswerVerdict) -> None:
        self.unnoted += not episode.tools and any(isinstance(e, ToolUse) for e in episode.events)
        for spec in episode.tools:
            if spec.name in self.tools or len(self.tools) < NAMES:
                self.tools.setdefault(spec.name, Forms()).add(spec)

    @property
    def drifted(self) -> dict[str, Forms]:
        return {name: forms for name, forms in self.tools.items() if len(forms.counts) > 1}

    def findings(self) -> Iterator[Remark]:
        for name, forms in list(self.drifted.items())[:SHOWN]:
            times = [count for _, count in forms.counts.most_common()]
            listed = " and ".join(f"{count:,}" for count in times[:5])
            listed += " and so on" if len(times) > 5 else ""
            yield amiss(
                "schemas",
                f"{name} has {len(times)} forms (in {listed} episodes). {forms.difference()}",
                "one name must mean one tool: record again with one version, or distil each by "
                "itself",
            )
        if not self.drifted and self.tools:
            yield fine("schemas", f"{count_of(len(self.tools), 'tool')}, the same throughout")
        if self.unnoted:
            yield amiss(
                "schemas",
                "which tools there were is not noted in "
                f"{count_of(self.unnoted, 'episode')} that used some",
                "name the tools with --env; of a tool that is only known by its calls a prompt "
                "can say nothing",
            )

    def to_json(self) -> Json:
        return {
            "tools": len(self.tools),
            "without_tools": self.unnoted,
            "drifted": {
                name: {
                    "forms": [count for _, count in forms.counts.most_common()],
                    "difference": forms.difference(),
                }
                for name, forms in self.drifted.items()
            },
        }


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError):
        return schema


def _canonical(schema: str) -> str:
    """Without what means nothing: the order of keys, spaces."""
    found = _parsed(schema)
    return found if isinstance(found, str) else json.dumps(found, sort_keys=True)


def _apart(one: str, other: str) -> tuple[str, str]:
    """Two texts from where they begin to differ."""
    same = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    start = max(0, same - 20)
    lead = "..." if start else ""
    return repr(lead + shortened(one[start:], 60)), repr(lead + shortened(other[start:], 60))


def _differ(one: Any, other: Any, where: str = "") -> str:
    """The first place at which two JSON values differ, and what stands there."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            at = f"{where}.{name}" if where else str(name)
            if name not in one or name not in other:
                held = one.get(name, other.get(name))
                return f"only one has {at} ({shortened(json.dumps(held), 60)})"
            if one[name] != other[name]:
                return _differ(one[name], other[name], at)
    shown = (shortened(json.dumps(each), 60) for each in (one, other))
    return f"{where or 'all of it'}: {' and '.join(shown)}"


class Repeats:
    """Questions that are asked more than once, in the same words or nearly so."""

    name = "duplicates"

    def __init__(self) -> None:
        self.seen: dict[bytes, bytes] = {}
        """Digest of a question -> digest of its first answer."""
        self.again = self.other_answer = 0
        self.questions: list[str] = []

    def add(self, episode: Episode, verdict: AnswerVerdict) -> None:
        text = " ".join(words_of(episode.question)) or episode.question
        key = bytes.fromhex(digest_of(text))
        answer = bytes.fromhex(digest_of(normalise(episode.answer or "")))
        if key in self.seen:
            self.again += 1
            self.other_answer += self.seen[key] != answer
            return
        self.seen[key] = answer
        if len(self.questions) < COMPARED:
            self.questions.append(text)

    @cached_property
    def near(self) -> list[tuple[str, str]]:
        """Questions that are nearly an earlier one, with that one; asked when all are there."""
        usual, asked = FilterSettings(), self.questions
        twins = near_duplicates(asked, usual.duplicate_similarity, usual.duplicate_shingle)
        return [(asked[at], asked[twin.first]) for at, twin in twins.items()]

    def findings(self) -> Iterator[Remark]:
        different = count_of(len(self.seen), "different question")
        if not self.again and not self.near:
            yield fine("duplicates", f"none: {different}")
            return
        if self.again:
            answers = f"{self.other_answer:,} of them answered in another way"
            asked = count_of(self.again, "episode asks", "episodes ask")
            yield amiss(
                "duplicates",
                f"{asked} what an earlier one asked, {answers}; {different}",
                "several attempts at a task are fine to train on; evaluate on other questions: "
                "coa distill --against TASKS",
            )
        if near := self.near:
            of_first = f" of the first {COMPARED:,}" if len(self.seen) > COMPARED else ""
            pair = " and ".join(repr(shortened(each, 100)) for each in near[0])
            yield amiss(
                "duplicates",
                f"{count_of(len(near), 'question')}{of_first} almost as another asks: {pair}",
                "filter.duplicate_similarity of coa distill decides when a chain is a copy",
            )

    def to_json(self) -> Json:
        return {
            "questions": len(self.seen),
            "asked_again": self.again,
            "answered_differently": self.other_answer,
            "nearly_the_same": len(self.near),
            "compared": len(self.questions),
        }
