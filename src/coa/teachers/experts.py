"""The rule-based multi-agent teacher: five experts with their own contexts and messages.

Planner, searcher, reader, reflector and verifier enact the agents of `agents.py`. Each works only
from what was said to it: the planner from the question, the searcher from a step, the reader from
passages, the reflector from passages and a report, the verifier from reports. No expert ever sees
a gold answer.

Experts err at a set rate: a searcher writes a careless query, a reader reports another fact of the
subject. The reflector is not told; it judges by its own reading, which misses some mistakes and
now and then objects to a sound report. Mistakes, alarms, misses and false alarms are counted in
`episode.meta`, so the teacher's quality can be reported.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Literal

from coa.corpus.reading import read
from coa.corpus.relations import RELATIONS, query_for
from coa.errors import ConfigError
from coa.tasks.task import Task
from coa.teachers.agents import team
from coa.teachers.episode import USER, Episode, Say, Use
from coa.teachers.plans import Find, Plan, conclude, plan_for
from coa.teachers.wording import WORDINGS
from coa.tools.base import Toolbox, ToolCall

SYSTEM = "system"
"""Not an agent: the code that carries results from one agent to another."""
TOOL = "wiki_search"
MAX_TRIES = 3
_NUMBERED = re.compile(r"^\[\d+\] ", re.MULTILINE)


@dataclass
class _Desk:
    """The episode being written, with the dice that decide about mistakes."""

    episode: Episode
    rng: random.Random
    toolbox: Toolbox
    queries: set[str] = field(default_factory=set)

    def say(self, event: Say) -> None:
        self.episode.events.append(event)

    def count(self, what: str, times: int = 1) -> None:
        if times:
            self.episode.meta[what] = self.episode.meta.get(what, 0) + times


class Experts:
    """The teacher `experts`; see the module's docstring."""

    name = "experts"

    def __init__(
        self, error_rate: float = 0.1, miss_rate: float = 0.2, false_alarm_rate: float = 0.01
    ) -> None:
        for rate in (error_rate, miss_rate, false_alarm_rate):
            if not 0 <= rate <= 1:
                raise ConfigError(f"a rate of the experts is {rate!r}, expected 0 to 1.")
        self.error_rate = error_rate
        self.miss_rate = miss_rate
        self.false_alarm_rate = false_alarm_rate

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode:
        """Work on one public task; what the team could not do is in `episode.error`."""
        episode = Episode(task.id, task.question, self.name, team(), seed=seed)
        episode.meta.update(task.meta)
        desk = _Desk(episode, random.Random(f"{seed}|{task.id}"), toolbox)
        desk.say(Say(USER, "planner", task.question))
        plan = plan_for(task.question)
        if plan is None:
            text = "I do not know how to break this question into look-ups."
            desk.say(Say("planner", USER, text, facts={"part": "failure"}))
            episode.error = "the planner could not plan"
            return episode
        steps = {"part": "plan", "steps": [[find.relation, find.subject] for find in plan.steps]}
        desk.say(Say("planner", "searcher", plan.text, plan.thought, steps))
        findings: list[list[str]] = []
        for find in plan.resolved(findings):
            values = await self._look_up(desk, find)
            if values is None:
                episode.error = "a look-up brought no report"
                episode.meta["failed_look_up"] = _need(find)
                return episode
            findings.append(values)
        self._verify(desk, plan, findings)
        return episode

    async def _look_up(self, desk: _Desk, find: Find) -> list[str] | None:
        """Search, read and reflect until a report stands; None after too many tries."""
        for attempt in range(MAX_TRIES):
            careless = attempt == 0 and desk.rng.random() < self.error_rate
            passages = await self._search(desk, find, attempt, careless)
            values = self._report(desk, find, passages)
            if values is not None:
                return values
        return None

    async def _search(self, desk: _Desk, find: Find, attempt: int, careless: bool) -> str:
        query = self._query(desk, find, attempt, careless)
        careless = careless and query != query_for(find.relation, find.subject)
        if careless:
            desk.count("careless_queries")
        thought = f"I need {_need(find)}."
        facts = {"part": "query"}
        desk.say(Say("searcher", SYSTEM, query, thought, facts, erred=careless))
        desk.queries.add(query)
        seen = await desk.toolbox.call(ToolCall(TOOL, query))
        used = Use("searcher", TOOL, query, seen.text, seen.failure, erred=careless)
        desk.episode.events.append(used)
        desk.say(Say(SYSTEM, "reader", f"Look-up: {_need(find)}.\n{seen.text}"))
        desk.say(Say(SYSTEM, "reflector", f"Look-up: {_need(find)}.\n{seen.text}"))
        return _NUMBERED.sub("", seen.text)

    def _query(self, desk: _Desk, find: Find, attempt: int, careless: bool) -> str:
        """A query that was not made before in this episode."""
        good = query_for(find.relation, find.subject)
        kind = RELATIONS[find.relation].subject
        forms = [good, f"{find.subject} {kind} {find.relation}", find.subject, f"{kind} {good}"]
        forms = forms[attempt:] + forms[:attempt]
        if careless:
            words = good.replace(find.subject, "").split()
            vague = f"{kind} {' '.join(w for w in words if w not in ('of', 'the'))}"
            misspelt = good.replace(find.subject, find.subject[:-2] or find.subject)
            forms.insert(0, desk.rng.choice([vague, misspelt]))
        return next((form for form in forms if form not in desk.queries), good)

    def _report(self, desk: _Desk, find: Find, passages: str) -> list[str] | None:
        """The reader reports, the reflector judges; None sends the searcher out again."""
        for careful in (False, True):
            reported = read(find.relation, find.subject, passages)
            misread = [] if careful or not reported else self._misread(desk, find, passages)
            self._read_aloud(desk, find, misread or reported, erred=bool(misread))
            objection, todo = self._judge(desk, find, passages, misread or reported, careful)
            desk.count("misreadings", bool(misread))
            desk.count("missed_mistakes", bool(misread) and not objection)
            desk.count("false_alarms", bool(objection and reported and not misread))
            if not objection:
                self._approve(desk)
                return misread or reported
            self._object(desk, objection)
            if todo == "search":
                return None
        return None

    def _judge(
        self, desk: _Desk, find: Find, passages: str, reported: list[str], again: bool
    ) -> tuple[str, Literal["", "read", "search"]]:
        """The reflector's objection and what to do again, from the report and its own reading.

        It reads well when it is attentive; it does not know whether the reader erred. `again`: it
        has objected to these passages before, and does not doubt them a second time.
        """
        if not reported:
            return "The search missed. Search again with other words.", "search"
        attentive = desk.rng.random() >= self.miss_rate
        if attentive and reported != read(find.relation, find.subject, passages):
            return f"The passages give another value for {_need(find)}. Read again.", "read"
        if not again and desk.rng.random() < self.false_alarm_rate:
            return f"I am not sure about {_need(find)}. Search again.", "search"
        return "", ""

    def _misread(self, desk: _Desk, find: Find, passages: str) -> list[str]:
        """Another fact of the same subject, taken by mistake; empty when the reader is careful."""
        if desk.rng.random() >= self.error_rate / 2:
            return []
        kind = RELATIONS[find.relation].subject
        others = [name for name, rel in RELATIONS.items() if rel.subject == kind]
        others = [name for name in others if name != find.relation]
        desk.rng.shuffle(others)
        right = read(find.relation, find.subject, passages)
        for name in others:
            values = read(name, find.subject, passages)
            if values and values != right:
                return values
        return []

    def _read_aloud(self, desk: _Desk, find: Find, values: list[str], erred: bool = False) -> None:
        found = f"The passages do not give {_need(find)}."
        if values:
            found = WORDINGS[find.relation].found.format(s=find.subject, v=", ".join(values))
        facts = {"part": "finding", "values": values}
        desk.say(Say("reader", "reflector", found[0].upper() + found[1:], "", facts, erred=erred))

    def _approve(self, desk: _Desk) -> None:
        facts = {"part": "approval"}
        desk.say(Say("reflector", "verifier", "The report agrees with the passages.", "", facts))

    def _object(self, desk: _Desk, text: str) -> None:
        desk.count("alarms")
        desk.say(Say("reflector", "searcher", text, "", {"part": "alarm"}))

    def _verify(self, desk: _Desk, plan: Plan, findings: list[list[str]]) -> None:
        reports = "\n".join(", ".join(values) for values in findings)
        question = f"{desk.episode.question}\n{plan.text}\n{reports}"
        desk.say(Say(SYSTEM, "verifier", question))
        verdict = conclude(plan, findings)
        if verdict is None:
            desk.episode.error = "the reports do not combine to an answer"
            return
        facts = {"part": "verdict", "score": 4}
        desk.say(Say("verifier", USER, verdict.answer, verdict.thought, facts))
        desk.episode.answer = verdict.answer


def _need(find: Find) -> str:
    return WORDINGS[find.relation].need.format(s=find.subject)
