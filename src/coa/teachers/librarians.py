"""Searcher, reader and reflector over an encyclopedia: one fact at a time.

The searcher writes a query, the reader reports the value that the passages state, the reflector
judges the report by a reading of its own, which now and then is careless. Mistakes are counted in
`episode.meta`.

In a team whose reflections are rated (`rated`) an objection holds its ratings and goes to whoever
has to act on it: a search that missed makes the planner speak again. Such a team also tries its
best query first, takes only numbers for numbers, and its critic's mistakes are marked; the first
team keeps its habits, since published recipes record it again.
"""

from __future__ import annotations

import re
from typing import Literal

from coa.corpus.reading import read
from coa.corpus.relations import RELATIONS, query_for
from coa.teachers.desk import MAX_TRIES, Desk
from coa.teachers.plans import Find
from coa.teachers.wording import ratings, sentence_for, wanted

TOOL = "wiki_search"
_NUMBERED = re.compile(r"^\[\d+\] ", re.MULTILINE)


class Librarians:
    """Three agents that find one fact."""

    def __init__(self, rated: bool = False) -> None:
        self.rated = rated

    async def look_up(self, desk: Desk, find: Find) -> list[str] | None:
        """Search, read and reflect until a report stands; None after too many tries."""
        for attempt in range(MAX_TRIES):
            careless = attempt == 0 and desk.happens(desk.rates.error)
            passages = await self._search(desk, find, attempt, careless)
            values = self.report(desk, find, passages)
            if values is not None:
                return values
        return None

    async def _search(self, desk: Desk, find: Find, attempt: int, careless: bool) -> str:
        query = self._query(desk, find, attempt, careless)
        careless = careless and query != query_for(find.relation, find.subject)
        desk.count("careless_queries", careless)
        text = await desk.use("searcher", TOOL, query, f"I need {wanted(*find)}.", careless)
        for agent in ("reader", "reflector"):
            desk.tell(agent, f"Look-up: {wanted(*find)}.\n{text}")
        return plain(text)

    def _query(self, desk: Desk, find: Find, attempt: int, careless: bool) -> str:
        """A query that was not made before in this episode."""
        good = query_for(find.relation, find.subject)
        kind = RELATIONS[find.relation].subject
        forms = [good, f"{find.subject} {kind} {find.relation}", find.subject, f"{kind} {good}"]
        forms = forms[attempt:] + forms[:attempt]
        if self.rated:  # the best that was not tried yet
            forms = [good, f"{kind} {good}", f"{find.subject} {kind}", find.subject]
        if careless:
            forms.insert(0, desk.rng.choice(careless_queries(find.relation, find.subject)))
        return next((form for form in forms if form not in desk.calls), good)

    def report(self, desk: Desk, find: Find, passages: str) -> list[str] | None:
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
                said, erred = "The report agrees with the passages.", self.rated and bool(misread)
                desk.say("reflector", "verifier", said, erred=erred, part="approval")
                return misread or reported
            self._object(desk, find, objection, todo, reported, sound=not misread)
            if todo == "search":
                return None
        return None

    def _judge(
        self, desk: Desk, find: Find, passages: str, reported: list[str], again: bool
    ) -> tuple[str, Literal["", "read", "search"]]:
        """The reflector's objection and what to do again, from the report and its own reading.

        It reads well when it is attentive; it does not know whether the reader erred. `again`: it
        has objected to these passages before, and does not doubt them a second time.
        """
        if not reported:
            return "The search missed. Search again with other words.", "search"
        attentive = not desk.happens(desk.rates.miss)
        if attentive and reported != read(find.relation, find.subject, passages):
            return f"The passages give another value for {wanted(*find)}. Read again.", "read"
        if not again and desk.happens(desk.rates.false_alarm):
            return f"I am not sure about {wanted(*find)}. Search again.", "search"
        return "", ""

    def _misread(self, desk: Desk, find: Find, passages: str) -> list[str]:
        """Another fact of the same subject, taken by mistake; empty when the reader is careful."""
        if not desk.happens(desk.rates.error / 2):
            return []
        kind = RELATIONS[find.relation].subject
        others = [name for name, rel in RELATIONS.items() if rel.subject == kind]
        others = [name for name in others if name != find.relation]
        desk.rng.shuffle(others)
        right = read(find.relation, find.subject, passages)
        for name in others:
            values = read(name, find.subject, passages)
            if values and values != right and (not self.rated or alike(values, right)):
                return values
        return []

    def _read_aloud(self, desk: Desk, find: Find, values: list[str], erred: bool = False) -> None:
        found = sentence_for(*find, values) if values else ""
        found = found or f"The passages do not give {wanted(*find)}."
        said = found[0].upper() + found[1:]
        desk.say("reader", "reflector", said, erred=erred, part="finding", values=values)

    def _object(
        self, desk: Desk, find: Find, text: str, todo: str, reported: list[str], sound: bool
    ) -> None:
        """Tell whoever has to act on it; `sound`: the report was not a mistake."""
        desk.count("alarms")
        if not self.rated:
            desk.say("reflector", "searcher", text, part="alarm")
        elif reported:
            worker = "reader" if todo == "read" else "searcher"
            average = f"{ratings(conflict='average')} {text}"
            desk.say("reflector", worker, average, erred=sound, part="alarm")
        else:
            poor = f"{ratings(tools='poor', progress='average')} {text}"
            desk.say("reflector", "planner", poor, part="alarm")
            again = f"Search for {wanted(*find)} with other words."
            desk.say("planner", "searcher", again, "The search missed.", part="plan")


def plain(results: str) -> str:
    """Passages without the numbers that a search puts before them."""
    return _NUMBERED.sub("", results)


def careless_queries(relation: str, subject: str) -> list[str]:
    """What a searcher in a hurry types: a query without its subject, or with a misspelt one."""
    good = query_for(relation, subject)
    words = good.replace(subject, "").split()
    kind = RELATIONS[relation].subject
    vague = f"{kind} {' '.join(w for w in words if w not in ('of', 'the'))}"
    return [vague, good.replace(subject, subject[:-2] or subject)]


def alike(values: list[str], others: list[str]) -> bool:
    """Both are numbers, or neither is: only such values are taken for each other."""
    return values[0][:1].isdigit() == others[0][:1].isdigit()
