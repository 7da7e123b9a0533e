"""The team for questions over a web site: it searches, opens pages, reads and checks.

A step is about one or more pages. The searcher looks for their addresses; the reader reports what
the hits state already, and otherwise opens the pages; the reflector rates the step. A poor rating
(a search or a page brought nothing) makes the planner say what changes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coa.environments.atlas.catalogues import WEB
from coa.environments.atlas.families import Conclusion, Facts, Look, subjects_of
from coa.environments.atlas.inquiries import Choice, Tally
from coa.environments.atlas.pages import listing, read
from coa.environments.atlas.team import (
    Plan,
    alike,
    careless_queries,
    close,
    planned,
    sentence_for,
    wanted_of,
)
from coa.environments.atlas.world import RELATIONS, query_for
from coa.recording.recorder import MAX_TRIES, EpisodeRecorder, ratings

SEARCH, CRAWL = "web_search", "crawl_page"
PAGES_AT_ONCE = 3
"""More would not be shown whole."""
Fact = tuple[str, str]
_HIT = re.compile(r"^\[\d+\] (?P<title>.+) - (?P<address>https?://\S+)$", re.MULTILINE)


@dataclass
class _Visit:
    """One step at work: what it needs, and what the reader has seen so far."""

    look: Look
    subjects: list[str]
    read: str
    """All text that the reader has in its context."""
    hits: dict[str, str] = field(default_factory=dict)
    """Title -> address, of every hit so far."""

    @property
    def facts(self) -> list[Fact]:
        return [(name, subject) for subject in self.subjects for name in self.look.relations]

    @property
    def need(self) -> str:
        return wanted_of(self.look.relations, self.subjects)

    def unread(self) -> list[str]:
        """Subjects of which a fact has not been read yet."""
        lacking = [subject for name, subject in self.facts if not read(name, subject, self.read)]
        return list(dict.fromkeys(lacking))

    def address(self, subject: str) -> str:
        """The address of the page about a subject, by the titles of the hits; '' when unknown."""
        names = (subject.casefold(), f"{subject} language".casefold())
        found = (address for title, address in self.hits.items() if title.casefold() in names)
        return next(found, "")


class WebTeam:
    """Answers `atlas-web` questions with `web_search` and `crawl_page`."""

    async def work(self, recorder: EpisodeRecorder) -> None:
        plan = planned(recorder, WEB)
        if plan is None:
            return
        facts: dict[Fact, list[str]] = {}
        seen, hits = "", dict[str, str]()
        for step, look in enumerate(plan.looks):
            visit = _Visit(look, subjects_of(plan.looks, step, facts), seen, hits)
            if step:
                recorder.tell("searcher", f"Next: {visit.need}.")
            found = await self._visit(recorder, visit)
            if found is None:
                recorder.fail("a step brought no report")
                recorder.episode.meta["failed_step"] = visit.need
                return
            facts |= found
            seen = visit.read
        self._close(recorder, plan, facts)

    async def _visit(
        self, recorder: EpisodeRecorder, visit: _Visit
    ) -> dict[Fact, list[str]] | None:
        """Search and open pages until everything is read; None after too many tries."""
        if not visit.unread():
            return self._recall(recorder, visit)
        for attempt in range(MAX_TRIES + len(visit.subjects) + 1):
            lacking = visit.unread()
            if not lacking:
                return self._report(recorder, visit)
            lost = [subject for subject in lacking if not visit.address(subject)]
            if lost:
                await self._search(recorder, visit, lost, attempt)
                if visit.unread() and all(not visit.address(subject) for subject in lost):
                    self._missed(recorder, visit, lost)
                continue
            if not await self._open(recorder, visit, lacking[:PAGES_AT_ONCE], attempt):
                return None
            if visit.unread() == lacking:
                self._missed(recorder, visit, lacking)
        return None

    # -- searching and opening ---------------------------------------------------------------

    async def _search(
        self, recorder: EpisodeRecorder, visit: _Visit, lost: list[str], attempt: int
    ) -> None:
        careless = attempt == 0 and recorder.happens(recorder.rates.error)
        query = self._query(recorder, visit, lost, attempt, careless)
        careless = careless and query != self._forms(visit, lost)[0]
        recorder.count("careless_queries", careless)
        need = wanted_of(visit.look.relations, lost)
        text = await recorder.use("searcher", SEARCH, query, f"I need {need}.", careless)
        for agent in ("reader", "reflector"):
            recorder.tell(agent, f"Look-up: {need}.\n{text}")
        visit.hits.update({hit["title"]: hit["address"] for hit in _HIT.finditer(text)})
        visit.read += f"\n{text}"

    def _forms(self, visit: _Visit, lost: Sequence[str]) -> list[str]:
        """Good queries, best first: for one fact it and its subject, for more the subjects."""
        relation, subject = visit.look.relations[0], lost[0]
        kind = RELATIONS[relation].subject
        if len(lost) > 1:
            return [listing(list(lost)), f"{listing(list(lost))} {kind}", f"{subject} {kind}"]
        fact = query_for(relation, subject)
        names = [f"{subject} {kind}", subject, f"{kind} {subject}", f"{kind} {fact}"]
        return [fact, *names] if len(visit.look.relations) == 1 else [*names, fact]

    def _query(
        self,
        recorder: EpisodeRecorder,
        visit: _Visit,
        lost: list[str],
        attempt: int,
        careless: bool,
    ) -> str:
        """A query that was not made before in this episode."""
        forms = self._forms(visit, lost)
        forms = forms[attempt % len(forms) :] + forms[: attempt % len(forms)]
        if careless and len(lost) > 1:
            forms.insert(0, listing(lost[:-1]))
        elif careless:
            hurried = careless_queries(visit.look.relations[0], lost[0])
            forms.insert(0, recorder.rng.choice(hurried))
        return next((form for form in forms if form not in recorder.calls), forms[0])

    async def _open(
        self, recorder: EpisodeRecorder, visit: _Visit, subjects: list[str], attempt: int
    ) -> bool:
        """Open the pages of the subjects; False when they have been opened before."""
        addresses = {subject: visit.address(subject) for subject in subjects}
        others = [url for url in visit.hits.values() if url not in addresses.values()]
        wrong = attempt < 2 and bool(others) and recorder.happens(recorder.rates.error / 2)
        if wrong:
            addresses[recorder.rng.choice(subjects)] = recorder.rng.choice(others)
        argument = "|".join(dict.fromkeys(addresses.values()))
        if argument in recorder.calls:
            return False
        recorder.count("wrong_pages", wrong)
        pages = "page" if len(subjects) == 1 else "pages"
        thought = f"I open the {pages} of {listing(subjects)}."
        text = await recorder.use("reader", CRAWL, argument, thought, wrong)
        recorder.tell("reflector", text)
        visit.read += f"\n{text}"
        return True

    def _missed(self, recorder: EpisodeRecorder, visit: _Visit, subjects: list[str]) -> None:
        """The reader has nothing to report; the reflector says so, the planner what changes."""
        need = wanted_of(visit.look.relations, subjects)
        recorder.say("reader", "reflector", f"I cannot find {need}.", part="finding", values=[])
        recorder.count("alarms")
        names, poor = listing(subjects), ratings(tools="poor", progress="average")
        said = f"{poor} This was not the page of {names}."
        recorder.say("reflector", "planner", said, part="alarm")
        again = f"Look for the page of {names} itself."
        recorder.say("planner", "searcher", again, "The last call brought nothing.", part="plan")

    # -- reading -----------------------------------------------------------------------------

    def _recall(self, recorder: EpisodeRecorder, visit: _Visit) -> dict[Fact, list[str]]:
        """The reader has seen everything already: there is no call to rate."""
        found = {fact: read(*fact, visit.read) for fact in visit.facts}
        self._read_aloud(recorder, found, erred=False)
        self._approve(recorder, rated=False)
        return found

    def _report(self, recorder: EpisodeRecorder, visit: _Visit) -> dict[Fact, list[str]]:
        """The reader reports, the reflector judges, the reader reads again if it must."""
        right = {fact: read(*fact, visit.read) for fact in visit.facts}
        for careful in (False, True):
            misread = None if careful else self._misread(recorder, visit, right)
            reported = misread or right
            self._read_aloud(recorder, reported, erred=bool(misread))
            attentive = not recorder.happens(recorder.rates.miss)
            noticed = attentive and reported != right
            doubted = not careful and not noticed and recorder.happens(recorder.rates.false_alarm)
            recorder.count("misreadings", bool(misread))
            recorder.count("missed_mistakes", bool(misread) and not (noticed or doubted))
            recorder.count("false_alarms", doubted and not misread)
            if not noticed and not doubted:
                self._approve(recorder, rated=not careful, erred=bool(misread))
                return reported
            recorder.count("alarms")
            reason = "The text gives another value." if noticed else "I am not sure of a value."
            average = f"{ratings(conflict='average')} {reason} Read again."
            recorder.say("reflector", "reader", average, erred=not misread, part="alarm")
        raise AssertionError("the second reading is careful and not doubted")

    def _approve(self, recorder: EpisodeRecorder, rated: bool, erred: bool = False) -> None:
        """After an objection the reflector does not rate the same step a second time."""
        text = "The report agrees with the text."
        facts = {"part": "approval", "rated": True} if rated else {"part": "approval"}
        text = f"{ratings()} {text}" if rated else text
        recorder.say("reflector", "verifier", text, "", erred, **facts)

    def _misread(
        self, recorder: EpisodeRecorder, visit: _Visit, right: dict[Fact, list[str]]
    ) -> dict[Fact, list[str]] | None:
        """One value taken from another page, or from another fact; None for a careful reader."""
        if not recorder.happens(recorder.rates.error / 2):
            return None
        for relation, subject in recorder.rng.sample(list(right), len(right)):
            true = right[relation, subject]
            if relation == "neighbours":
                others = [true[:-1]] if len(true) > 2 else []
            else:
                kind = RELATIONS[relation].subject
                names = [n for n, r in RELATIONS.items() if r.subject == kind and n != relation]
                others = [right[relation, name] for name in visit.subjects if name != subject]
                others += [read(name, subject, visit.read) for name in names]
            others = [values for values in others if values and values != true]
            others = [values for values in others if alike(values, true)]
            if others:
                return {**right, (relation, subject): recorder.rng.choice(others)}
        return None

    def _read_aloud(
        self, recorder: EpisodeRecorder, reported: dict[Fact, list[str]], erred: bool
    ) -> None:
        text = " ".join(sentence_for(*fact, values) for fact, values in reported.items())
        said = [[*fact, *values] for fact, values in reported.items()]
        recorder.say("reader", "reflector", text, erred=erred, part="finding", values=said)

    # -- the end -----------------------------------------------------------------------------

    def _close(self, recorder: EpisodeRecorder, plan: Plan, facts: Facts) -> None:
        reports = " ".join(sentence_for(*fact, values) for fact, values in facts.items())
        recorder.tell("verifier", f"{recorder.episode.question}\n{plan.text}\n{reports}")
        right = plan.shape.conclude(plan.slots, facts)
        if right is None:
            recorder.fail("the reports do not combine to an answer")
            return
        close(recorder, right, _slip(plan, facts, right))


def _slip(plan: Plan, facts: Facts, right: Conclusion) -> Conclusion | None:
    """What a verifier says who takes the smaller for the larger; None without a comparison."""
    shape, turned = plan.shape, None
    if isinstance(shape, Choice):
        turned = replace(shape, smaller=not shape.smaller).conclude(plan.slots, facts)
    elif isinstance(shape, Tally) and shape.than in ("more", "less"):
        other = "less" if shape.than == "more" else "more"
        turned = replace(shape, than=other).conclude(plan.slots, facts)
    return turned if turned and turned.answer != right.answer else None
