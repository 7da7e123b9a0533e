"""The team for questions that end in a calculation: lookup agents, a coder, and a critic of both.

The coder writes a short program with the numbers of the reports in it; the reflector compares it
with the reports and looks at what it printed. What the program prints is suggested as the answer;
the verifier checks that it has the form that the question asks for, and otherwise the coder
calculates once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from coa.environments.atlas.catalogues import CODE
from coa.environments.atlas.families import subjects_of
from coa.environments.atlas.inquiries import Formula, Work
from coa.environments.atlas.pages import read
from coa.environments.atlas.team import (
    PROGRAM,
    Find,
    LookupAgents,
    Plan,
    plain,
    planned,
    sentence_for,
    stands,
    wanted,
)
from coa.recording.episode import Message, ToolUse
from coa.recording.recorder import MAX_TRIES, EpisodeRecorder, ratings

TOOL = "code"
FORMS = ("[{}]", "({})", "{}")
"""Ways to write the numbers: a program that is run once more is written another way."""
Fact = tuple[str, str]


@dataclass(frozen=True)
class _Sums:
    """What is to be calculated."""

    work: Work
    numbers: list[int]
    names: str
    """What the numbers are, in words."""


class CodeTeam:
    """Answers `atlas-code` questions with `wiki_search` and `code`."""

    def __init__(self) -> None:
        self.lookups = LookupAgents(rated=True)

    async def work(self, recorder: EpisodeRecorder) -> None:
        plan = planned(recorder, CODE)
        if plan is None:
            return
        facts = await self._look_up(recorder, plan)
        if facts is None:
            return
        assert isinstance(plan.shape, Formula), plan.shape
        numbers = plan.shape.numbers(plan.slots, facts)
        if not numbers:
            recorder.fail("a report is not a number")
            return
        for agent in ("coder", "reflector"):
            recorder.tell(agent, f"{recorder.episode.question}\n{plan.text}")
        names = ", ".join(wanted(relation, subject) for relation, subject, _ in numbers)
        sums = _Sums(plan.shape.work, [n for *_, n in numbers], names)
        if not await self._close(recorder, plan, sums):
            recorder.fail("no program gave a result")

    async def _close(self, recorder: EpisodeRecorder, plan: Plan, sums: _Sums) -> bool:
        """Calculate, suggest and check, twice at most; whether an answer stands."""
        for again in (False, True):
            printed = await self._calculate(recorder, sums, again)
            if printed is None:
                return False
            told = f"{recorder.episode.question}\n{plan.text}\nThe program: {printed}"
            recorder.tell("verifier", told)
            gives = f"The program gives {printed}."
            recorder.say("verifier", "verifier", printed, gives, part="suggestion")
            form = sums.work.form
            objection = "" if sums.work.fits(printed) else f"The number is not {form}."
            found = f"The program gives {printed}. It is {form}."
            if stands(recorder, PROGRAM, printed, found, objection, wary=not again):
                return True
        return False

    async def _look_up(self, recorder: EpisodeRecorder, plan: Plan) -> dict[Fact, list[str]] | None:
        """Every fact of every step, each from a search or from passages that are known already."""
        facts: dict[Fact, list[str]] = {}
        for step, look in enumerate(plan.looks):
            for subject in subjects_of(plan.looks, step, facts):
                for relation in look.relations:
                    find = Find(relation, subject)
                    values = self._known(recorder, find) or await self.lookups.look_up(
                        recorder, find
                    )
                    if values is None:
                        recorder.fail("a look-up brought no report")
                        recorder.episode.meta["failed_look_up"] = wanted(*find)
                        return None
                    facts[relation, subject] = values
                    recorder.tell("coder", sentence_for(*find, values))
        return facts

    def _known(self, recorder: EpisodeRecorder, find: Find) -> list[str] | None:
        """A value that stands in passages which came back before: the reader only reports it.

        After an objection it is looked up anew, since a reflection follows a call.
        """
        events = recorder.episode.events
        uses = [place for place, event in enumerate(events) if isinstance(event, ToolUse)]
        passages = plain("\n".join(e.result for e in events if isinstance(e, ToolUse)))
        if not uses or not read(*find, passages):
            return None
        since = [e.facts.get("part") for e in events[uses[-1] :] if isinstance(e, Message)]
        return None if "alarm" in since else self.lookups.report(recorder, find, passages)

    # -- the program -------------------------------------------------------------------------

    async def _calculate(self, recorder: EpisodeRecorder, sums: _Sums, again: bool) -> str | None:
        """Write and run a program until the critic is content; what it printed.

        `again`: the planner has asked for it, so everybody is careful.
        """
        for attempt in range(MAX_TRIES):
            first = attempt == 0 and not again
            forms = [program(sums.numbers, sums.work.expression, form) for form in FORMS]
            right = next((each for each in forms if _fenced(each) not in recorder.calls), "")
            if not right:
                return None
            slip = self._slip(recorder, sums) if first else ""
            text = _fenced(slip or right)
            thought = f"I calculate {sums.work.called} of {sums.names}."
            output = await recorder.use("coder", TOOL, text, thought, bool(slip))
            recorder.count("wrong_programs", bool(slip))
            recorder.tell("reflector", f"{thought}\n{text}\n{output}")
            objection = self._judge(recorder, slip or right, right, output, wary=first)
            false_alarm = bool(objection) and not slip and _is_number(output)
            recorder.count("missed_mistakes", bool(slip) and not objection)
            recorder.count("false_alarms", false_alarm)
            if not objection:
                said = f"{ratings()} The program has the numbers of the reports."
                wrong = bool(slip)
                recorder.say("reflector", "verifier", said, "", wrong, part="approval", rated=True)
                return output.strip()
            recorder.count("alarms")
            recorder.say("reflector", "coder", objection, erred=false_alarm, part="alarm")
        return None

    def _judge(
        self, recorder: EpisodeRecorder, source: str, right: str, output: str, wary: bool
    ) -> str:
        """What the critic has to say against a program; it knows the reports, not the slip."""
        if not _is_number(output):
            return f"{ratings(tools='average')} The program printed no number. Correct it."
        attentive = not recorder.happens(recorder.rates.miss)
        if attentive and source != right:
            said = "The program does not do what the plan says with these numbers."
            return f"{ratings(conflict='average')} {said} Write it again."
        if wary and recorder.happens(recorder.rates.false_alarm):
            said = "I am not sure of the numbers in the program."
            return f"{ratings(conflict='average')} {said} Write it again."
        return ""

    def _slip(self, recorder: EpisodeRecorder, sums: _Sums) -> str:
        """A program with a mistake: a lost digit, no rounding or a misspelt word; else empty."""
        if not recorder.happens(recorder.rates.error):
            return ""
        work, numbers = sums.work, sums.numbers
        at = recorder.rng.randrange(len(numbers))
        short = [n // 10 if i == at else n for i, n in enumerate(numbers)]
        misspelt = program(numbers, work.expression).replace("print", "pint")
        slips = [program(short, work.expression), misspelt]
        if work.places is not None:
            slips.append(program(numbers, work.source))
        return recorder.rng.choice(slips)


def program(numbers: list[int], expression: str, form: str = FORMS[0]) -> str:
    """A program that prints an expression over numbers `n`."""
    return f"n = {form.format(', '.join(map(str, numbers)))}\nprint({expression})"


def _fenced(source: str) -> str:
    return f"```py\n{source}\n```"


def _is_number(output: str) -> bool:
    try:
        float(output.strip())
    except ValueError:
        return False
    return True
