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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from coa.environments.atlas.catalogues import MHQA, understand
from coa.environments.atlas.families import (
    Catalogue,
    Comparison,
    Conclusion,
    Difference,
    Inquiry,
    Intersection,
    Look,
    LookupChain,
    Slots,
    Superlative,
)
from coa.environments.atlas.inquiries import Choice, Formula, Kin, Tally
from coa.environments.atlas.pages import listing, read
from coa.environments.atlas.reckoning import Side, amount, apart, lettered, weighed
from coa.environments.atlas.world import RELATIONS, WORDS, query_for
from coa.recording.episode import USER
from coa.recording.recorder import MAX_TRIES, EpisodeRecorder, ratings

_COUNTS = ("no", "one look-up", "two look-ups", "three look-ups", "four look-ups")


class Wording(NamedTuple):
    """`need` completes 'I need ...'; `found` is a sentence with subject {s} and value {v}."""

    need: str
    found: str


WORDINGS = {relation: Wording(*texts) for relation, texts in WORDS["experts"].items()}


def wanted(relation: str, subject: str) -> str:
    """What is looked for: 'the capital of Peru'."""
    return WORDINGS[relation].need.format(s=subject)


def sentence_for(relation: str, subject: str, values: Sequence[str]) -> str:
    """What was found: 'The capital of Peru is Lima.'"""
    return WORDINGS[relation].found.format(s=subject, v=", ".join(values))


def wanted_of(relations: Sequence[str], subjects: Sequence[str]) -> str:
    """Several facts of several subjects: 'the area and the capital of Peru and Chile'."""
    *others, last = relations
    nouns = [WORDINGS[name].need.removesuffix(" of {s}") for name in others]
    return listing([*nouns, wanted(last, listing(list(subjects)))])


class Find(NamedTuple):
    """One look-up. The subject may be the result of the step before, `#0`."""

    relation: str
    subject: str


class FindingVerdict(NamedTuple):
    answer: str
    thought: str


@dataclass(frozen=True)
class Plan:
    """The planner's decomposition of a question, which can be carried out and put in words."""

    shape: Inquiry
    slots: Slots
    looks: tuple[Look, ...]

    @property
    def names(self) -> list[str]:
        """The subjects that the question names, in the order of the shape's slots."""
        return [self.slots[slot] for slot in self.shape.slots]

    @property
    def text(self) -> str:
        """The plan as the planner writes it."""
        lines = [self._in_words(look) for look in self.looks]
        end = self._combination()
        lines += [end] if end else []
        return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))

    def _in_words(self, look: Look) -> str:
        names = [self._named(subject) for subject in look.subjects]
        return wanted_of(look.relations, names).replace("the that", "that")

    def _named(self, subject: str) -> str:
        if not subject.startswith("#"):
            return subject
        earlier = self.looks[int(subject[1:])]
        relation = earlier.relations[0]
        if relation == "neighbours":
            return "each neighbour"
        each = "each" if len(earlier.subjects) > 1 else "that"
        return f"{each} {RELATIONS[relation].value}"

    def _combination(self) -> str:
        match self.shape:
            case Intersection():
                return "the common name"
            case Difference():
                return "the difference"
            case Comparison() | Superlative() as shape:
                return f"the {_extreme(shape, len(self.names) == 2)}"
            case Choice() as shape:
                size = "smaller" if shape.smaller else "larger"
                return wanted(shape.ask, f"the one with the {size} {shape.by}")
            case Tally() as shape:
                return f"count the neighbours with {shape.than} {shape.by}"
            case Kin():
                return "the neighbour with the same"
            case Formula() as shape:
                return f"calculate {shape.work.called}"
        return ""


def plan_for(question: str, catalogue: Catalogue = MHQA) -> Plan | None:
    """The planner's decomposition of a question, from its words alone."""
    understood = understand(question, catalogue)
    if understood is None:
        return None
    shape, slots = understood.meaning.shape, understood.slots
    return Plan(shape, slots, shape.looks(slots))


def conclude(plan: Plan, findings: Sequence[Sequence[str]]) -> FindingVerdict | None:
    """The verifier's answer from the reports; None when they do not combine."""
    if not findings or not all(findings):
        return None
    shape = plan.shape
    if isinstance(shape, LookupChain):
        return FindingVerdict(findings[-1][0], "") if len(findings[-1]) == 1 else None
    if isinstance(shape, Intersection):
        return _shared(findings[0], findings[1], plan.names)
    if isinstance(shape, Superlative):
        return _most(list(findings[0]), findings[1:], shape)
    ends = list(findings[len(shape.relations) - 1 :: len(shape.relations)])
    if isinstance(shape, Comparison):
        return _most(list(plan.names), ends, shape)
    ordered = _sides(plan.names, ends)
    if ordered is None:
        return None
    gap, steps = apart(*ordered)
    return FindingVerdict(str(gap), f"{steps}.")


def _shared(
    first: Sequence[str], second: Sequence[str], asked: Sequence[str]
) -> FindingVerdict | None:
    """Names are gone through up to the one that both lists have, so that it is the last one said:
    after the whole list a small model takes a name that is nearer. Where the two border each other,
    that is said, too: a name that is all over the chain looks like one that both have."""
    common = [name for name in first if name in second]
    if len(common) != 1:
        return None
    others = first[: first.index(common[0])]
    said = [f"{name} {'itself' if name in asked else 'no'}" for name in others]
    return FindingVerdict(
        common[0], f"{'; '.join([*said, f'{common[0]} yes'])}. Both have {common[0]}."
    )


def _sides(names: Sequence[str], values: Sequence[Sequence[str]]) -> list[Side] | None:
    """What is compared, when there is a number for each name."""
    sides = lettered(
        (name, value[0], number)
        for name, value in zip(names, values, strict=False)
        if (number := amount(value[0])) is not None
    )
    return sides if sides and len(sides) == len(names) == len(values) else None


def _most(
    names: list[str], values: Sequence[Sequence[str]], shape: Comparison | Superlative
) -> FindingVerdict | None:
    """One is held against the next, and the better of the two against the one after it."""
    rows = _sides(names, values)
    if rows is None:
        return None
    said: list[str] = []
    best, *others = rows
    for other in others:
        best, steps = weighed(best, other, smaller=shape.smaller)
        said.append(f"{steps}.")
    return FindingVerdict(best.name, " ".join(said))


def _extreme(shape: Comparison | Superlative, pair: bool) -> str:
    if shape.smaller:
        return "smaller" if pair else "smallest"
    return "larger" if pair else "largest"


TOOL = "wiki_search"
_NUMBERED = re.compile(r"^\[\d+\] ", re.MULTILINE)


class LookupAgents:
    """Three agents that find one fact."""

    def __init__(self, rated: bool = False) -> None:
        self.rated = rated

    async def look_up(self, recorder: EpisodeRecorder, find: Find) -> list[str] | None:
        """Search, read and reflect until a report stands; None after too many tries."""
        for attempt in range(MAX_TRIES):
            careless = attempt == 0 and recorder.happens(recorder.rates.error)
            passages = await self._search(recorder, find, attempt, careless)
            values = self.report(recorder, find, passages)
            if values is not None:
                return values
        return None

    async def _search(
        self, recorder: EpisodeRecorder, find: Find, attempt: int, careless: bool
    ) -> str:
        query = self._query(recorder, find, attempt, careless)
        careless = careless and query != query_for(find.relation, find.subject)
        recorder.count("careless_queries", careless)
        text = await recorder.use("searcher", TOOL, query, f"I need {wanted(*find)}.", careless)
        for agent in ("reader", "reflector"):
            recorder.tell(agent, f"Look-up: {wanted(*find)}.\n{text}")
        return plain(text)

    def _query(self, recorder: EpisodeRecorder, find: Find, attempt: int, careless: bool) -> str:
        """A query that was not made before in this episode."""
        good = query_for(find.relation, find.subject)
        kind = RELATIONS[find.relation].subject
        forms = [good, f"{find.subject} {kind} {find.relation}", find.subject, f"{kind} {good}"]
        forms = forms[attempt:] + forms[:attempt]
        if self.rated:  # the best that was not tried yet
            forms = [good, f"{kind} {good}", f"{find.subject} {kind}", find.subject]
        if careless:
            forms.insert(0, recorder.rng.choice(careless_queries(find.relation, find.subject)))
        return next((form for form in forms if form not in recorder.calls), good)

    def report(self, recorder: EpisodeRecorder, find: Find, passages: str) -> list[str] | None:
        """The reader reports, the reflector judges; None sends the searcher out again."""
        for careful in (False, True):
            reported = read(find.relation, find.subject, passages)
            misread = [] if careful or not reported else self._misread(recorder, find, passages)
            self._read_aloud(recorder, find, misread or reported, erred=bool(misread))
            objection, todo = self._judge(recorder, find, passages, misread or reported, careful)
            recorder.count("misreadings", bool(misread))
            recorder.count("missed_mistakes", bool(misread) and not objection)
            recorder.count("false_alarms", bool(objection and reported and not misread))
            if not objection:
                said, erred = "The report agrees with the passages.", self.rated and bool(misread)
                recorder.say("reflector", "verifier", said, erred=erred, part="approval")
                return misread or reported
            self._object(recorder, find, objection, todo, reported, sound=not misread)
            if todo == "search":
                return None
        return None

    def _judge(
        self, recorder: EpisodeRecorder, find: Find, passages: str, reported: list[str], again: bool
    ) -> tuple[str, Literal["", "read", "search"]]:
        """The reflector's objection and what to do again, from the report and its own reading.

        It reads well when it is attentive; it does not know whether the reader erred. `again`: it
        has objected to these passages before, and does not doubt them a second time.
        """
        if not reported:
            return "The search missed. Search again with other words.", "search"
        attentive = not recorder.happens(recorder.rates.miss)
        if attentive and reported != read(find.relation, find.subject, passages):
            return f"The passages give another value for {wanted(*find)}. Read again.", "read"
        if not again and recorder.happens(recorder.rates.false_alarm):
            return f"I am not sure about {wanted(*find)}. Search again.", "search"
        return "", ""

    def _misread(self, recorder: EpisodeRecorder, find: Find, passages: str) -> list[str]:
        """Another fact of the same subject, taken by mistake; empty when the reader is careful."""
        if not recorder.happens(recorder.rates.error / 2):
            return []
        kind = RELATIONS[find.relation].subject
        others = [name for name, rel in RELATIONS.items() if rel.subject == kind]
        others = [name for name in others if name != find.relation]
        recorder.rng.shuffle(others)
        right = read(find.relation, find.subject, passages)
        for name in others:
            values = read(name, find.subject, passages)
            if values and values != right and (not self.rated or alike(values, right)):
                return values
        return []

    def _read_aloud(
        self, recorder: EpisodeRecorder, find: Find, values: list[str], erred: bool = False
    ) -> None:
        found = sentence_for(*find, values) if values else ""
        found = found or f"The passages do not give {wanted(*find)}."
        said = found[0].upper() + found[1:]
        recorder.say("reader", "reflector", said, erred=erred, part="finding", values=values)

    def _object(
        self,
        recorder: EpisodeRecorder,
        find: Find,
        text: str,
        todo: str,
        reported: list[str],
        sound: bool,
    ) -> None:
        """Tell whoever has to act on it; `sound`: the report was not a mistake."""
        recorder.count("alarms")
        if not self.rated:
            recorder.say("reflector", "searcher", text, part="alarm")
        elif reported:
            worker = "reader" if todo == "read" else "searcher"
            average = f"{ratings(conflict='average')} {text}"
            recorder.say("reflector", worker, average, erred=sound, part="alarm")
        else:
            poor = f"{ratings(tools='poor', progress='average')} {text}"
            recorder.say("reflector", "planner", poor, part="alarm")
            again = f"Search for {wanted(*find)} with other words."
            recorder.say("planner", "searcher", again, "The search missed.", part="plan")


class WikiTeam:
    """Answers the questions of `atlas-mhqa`, or of a set like it, with `wiki_search`.

    Look-ups that need nothing of each other (two countries that are compared, each neighbour of
    one) are made at the same time.
    """

    def __init__(self, catalogue: Catalogue = MHQA) -> None:
        self.catalogue = catalogue
        self.lookups = LookupAgents()

    async def work(self, recorder: EpisodeRecorder) -> None:
        plan = plan_for(recorder.episode.question, self.catalogue)
        if plan is None:
            text = "I do not know how to break this question into look-ups."
            recorder.say("planner", USER, text, part="failure")
            recorder.fail("the planner could not plan")
            return
        finds = [Find(look.relations[0], look.subjects[0]) for look in plan.looks]
        around = isinstance(plan.shape, Superlative)
        steps = [list(find) for find in finds]
        steps[-1][1] += "*" if around else ""  # it is about each that was found
        count = len(finds)
        words = _COUNTS[count] if count < len(_COUNTS) else f"{count} look-ups"
        thought = "I must look at each neighbour." if around else f"This takes {words}."
        recorder.say("planner", "searcher", plan.text, thought, part="plan", steps=steps)
        findings: list[list[str]] = []
        lanes: list[list[Find]] = []
        if around:  # each neighbour is a lane
            findings += await self._follow(recorder, finds[:1]) or []
            lanes += [[Find(finds[1].relation, name)] for name in (findings or [[]])[0]]
        else:
            for find in finds:
                if find.subject.startswith("#"):
                    lanes[-1].append(find)
                else:
                    lanes.append([find])
        works = [partial(self._follow, steps=lane) for lane in lanes]
        for values in await recorder.together(works) if works else []:
            findings += values or []
        if recorder.episode.error is None:
            self._verify(recorder, plan, findings)

    async def _follow(self, recorder: EpisodeRecorder, steps: list[Find]) -> list[list[str]] | None:
        """Look-ups one after the other, each about what the one before found."""
        findings: list[list[str]] = []
        for find in steps:
            if find.subject.startswith("#"):
                find = Find(find.relation, findings[-1][0])
            values = await self.lookups.look_up(recorder, find)
            if values is None:
                recorder.fail("a look-up brought no report")
                recorder.episode.meta["failed_look_up"] = wanted(*find)
                return None
            findings.append(values)
        return findings

    def _verify(self, recorder: EpisodeRecorder, plan: Plan, findings: list[list[str]]) -> None:
        reports = "\n".join(", ".join(values) for values in findings)
        recorder.tell("verifier", f"{recorder.episode.question}\n{plan.text}\n{reports}")
        verdict = conclude(plan, findings)
        if verdict is None:
            recorder.fail("the reports do not combine to an answer")
            return
        recorder.say("verifier", USER, verdict.answer, verdict.thought, part="verdict", score=4)
        recorder.episode.answer = verdict.answer


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


_HOW_MANY = ("no", "one step", "two steps", "three steps")


def planned(recorder: EpisodeRecorder, catalogue: Catalogue) -> Plan | None:
    """The planner of a web or code team decomposes the question and tells the searcher; None when
    it cannot. Steps follow one another: a later one may be about what an earlier one found."""
    plan = plan_for(recorder.episode.question, catalogue)
    if plan is None:
        text = "I do not know which pages or numbers this question needs."
        recorder.say("planner", USER, text, part="failure")
        recorder.fail("the planner could not plan")
        return None
    steps = [[list(look.relations), list(look.subjects)] for look in plan.looks]
    thought = f"This takes {_HOW_MANY[len(plan.looks)]} of reading."
    recorder.say("planner", "searcher", plan.text, thought, part="plan", steps=steps)
    return plan


# ------------------------------------------------------------------------------------------------
# How a team ends its work: an answer is suggested, checked, and given or taken back.
#
# The verifier suggests an answer and checks it as if somebody else had suggested it, which may be
# done without attention, or with too much of it. A score of 2 or less sends the team back to the
# planner.
# ------------------------------------------------------------------------------------------------


RIGHT, DOUBTFUL = 4, 2


class Review(NamedTuple):
    """How an answer is checked, and who works on it once more when the check fails."""

    thought: str
    worker: str
    again: str


REPORTS = Review("I combine them again.", "verifier", "Combine the reports once more, one by one.")
PROGRAM = Review(
    "I look at the form of the number.",
    "coder",
    "Calculate once more, and round as the question says.",
)


def close(recorder: EpisodeRecorder, right: Conclusion, slip: Conclusion | None = None) -> None:
    """Combine the reports, suggest and check, until an answer stands.

    `slip` is what a wrong combination would give; the verifier errs once at most.
    """
    for careful in (False, True):
        erring = slip is not None and not careful and recorder.happens(recorder.rates.error / 2)
        suggested = slip if erring and slip is not None else right
        recorder.count("wrong_combinations", erring)
        answer, because = suggested.answer, suggested.because
        recorder.say("verifier", "verifier", answer, because, erring, part="suggestion")
        objection = "The reports give another answer." if suggested != right else ""
        found = f"The reports give {answer}."
        if stands(recorder, REPORTS, answer, found, objection, wary=not careful):
            return
    raise AssertionError("the second check of a careful suggestion always passes")


def stands(
    recorder: EpisodeRecorder,
    review: Review,
    answer: str,
    found: str,
    objection: str,
    wary: bool = True,
) -> bool:
    """Check a suggestion; the user gets an answer that passes, and the planner is told otherwise.

    `objection` is what an attentive verifier has against it, empty for a sound one. `wary`: the
    verifier may also doubt it without a reason.
    """
    noticed = not recorder.happens(recorder.rates.miss) and bool(objection)
    doubted = wary and not noticed and recorder.happens(recorder.rates.false_alarm)
    recorder.count("missed_mistakes", bool(objection) and not (noticed or doubted))
    recorder.count("false_alarms", doubted and not objection)
    if not noticed and not doubted:
        said, wrong = f"{found} Score: {RIGHT}", bool(objection)
        recorder.say("verifier", "verifier", said, review.thought, wrong, part="check", score=RIGHT)
        recorder.say("verifier", USER, answer, "The check passed.", part="verdict", score=RIGHT)
        recorder.episode.answer = answer
        return True
    recorder.count("alarms")
    reason, wrong = objection if noticed else "I am not sure of it.", not objection
    said = f"{reason} Score: {DOUBTFUL}"
    recorder.say("verifier", "planner", said, review.thought, wrong, part="check", score=DOUBTFUL)
    recorder.say("planner", review.worker, review.again, "The check failed.", part="plan")
    return False
