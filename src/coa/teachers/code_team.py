"""The team for questions that end in a calculation: librarians, a coder, and a critic of both.

The coder writes a short program with the numbers of the reports in it; the reflector compares it
with the reports and looks at what it printed. What the program prints is suggested as the answer.
"""

from __future__ import annotations

from coa.corpus.reading import read
from coa.tasks.atlas_catalogues import CODE
from coa.tasks.atlas_formulas import Formula
from coa.tasks.atlas_inquiries import Conclusion, subjects_of
from coa.teachers.closing import close
from coa.teachers.desk import MAX_TRIES, Desk
from coa.teachers.episode import Say, Use
from coa.teachers.librarians import Librarians, plain
from coa.teachers.outlines import Outline, planned
from coa.teachers.plans import Find
from coa.teachers.wording import ratings, sentence_for, wanted

TOOL = "code"
Fact = tuple[str, str]


class CodeTeam:
    """Answers `atlas-code` questions with `wiki_search` and `code`."""

    def __init__(self) -> None:
        self.librarians = Librarians(rated=True)

    async def work(self, desk: Desk) -> None:
        outline = planned(desk, CODE)
        if outline is None:
            return
        facts = await self._look_up(desk, outline)
        if facts is None:
            return
        assert isinstance(outline.shape, Formula), outline.shape
        numbers = outline.shape.numbers(outline.slots, facts)
        if not numbers:
            desk.fail("a report is not a number")
            return
        for agent in ("coder", "reflector"):
            desk.tell(agent, f"{desk.episode.question}\n{outline.text}")
        names = ", ".join(wanted(relation, subject) for relation, subject, _ in numbers)
        printed = await self._calculate(desk, outline.shape, [n for *_, n in numbers], names)
        if printed is None:
            desk.fail("no program gave a result")
            return
        desk.tell("verifier", f"{desk.episode.question}\n{outline.text}\nThe program: {printed}")
        close(desk, Conclusion(printed, "", f"The program gives {printed}."))

    async def _look_up(self, desk: Desk, outline: Outline) -> dict[Fact, list[str]] | None:
        """Every fact of every step, each from a search or from passages that are known already."""
        facts: dict[Fact, list[str]] = {}
        for step, look in enumerate(outline.looks):
            for subject in subjects_of(outline.looks, step, facts):
                for relation in look.relations:
                    find = Find(relation, subject)
                    values = self._known(desk, find) or await self.librarians.look_up(desk, find)
                    if values is None:
                        desk.fail("a look-up brought no report")
                        desk.episode.meta["failed_look_up"] = wanted(*find)
                        return None
                    facts[relation, subject] = values
                    desk.tell("coder", sentence_for(*find, values))
        return facts

    def _known(self, desk: Desk, find: Find) -> list[str] | None:
        """A value that stands in passages which came back before: the reader only reports it.

        After an objection it is looked up anew, since a reflection follows a call.
        """
        events = desk.episode.events
        uses = [place for place, event in enumerate(events) if isinstance(event, Use)]
        passages = plain("\n".join(e.result for e in events if isinstance(e, Use)))
        if not uses or not read(*find, passages):
            return None
        since = [e.facts.get("part") for e in events[uses[-1] :] if isinstance(e, Say)]
        return None if "alarm" in since else self.librarians.report(desk, find, passages)

    # -- the program -------------------------------------------------------------------------

    async def _calculate(
        self, desk: Desk, formula: Formula, numbers: list[int], names: str
    ) -> str | None:
        """Write and run a program until the critic is content; what it printed."""
        for attempt in range(MAX_TRIES):
            right = program(numbers, formula.work.expression, again=attempt > 0)
            slip = self._slip(desk, formula, numbers) if attempt == 0 else ""
            text = f"```py\n{slip or right}\n```"
            if text in desk.calls:
                return None
            thought = f"I calculate {formula.work.called} of {names}."
            output = await desk.use("coder", TOOL, text, thought, bool(slip))
            desk.count("wrong_programs", bool(slip))
            desk.tell("reflector", f"{thought}\n{text}\n{output}")
            objection = self._judge(desk, slip or right, right, output, attempt)
            missed = bool(slip) and not objection
            desk.count("missed_mistakes", missed)
            desk.count("false_alarms", bool(objection) and not slip and _is_number(output))
            if not objection:
                said = f"{ratings()} The program has the numbers of the reports."
                desk.say("reflector", "verifier", said, part="approval", rated=True)
                return output.strip()
            desk.count("alarms")
            desk.say("reflector", "coder", objection, part="alarm")
        return None

    def _judge(self, desk: Desk, source: str, right: str, output: str, attempt: int) -> str:
        """What the critic has to say against a program; it knows the reports, not the slip."""
        if not _is_number(output):
            return f"{ratings(tools='average')} The program printed no number. Correct it."
        attentive = not desk.happens(desk.rates.miss)
        if attentive and source != right:
            said = "The program does not do what the plan says with these numbers."
            return f"{ratings(conflict='average')} {said} Write it again."
        if attempt == 0 and desk.happens(desk.rates.false_alarm):
            said = "I am not sure of the numbers in the program."
            return f"{ratings(conflict='average')} {said} Write it again."
        return ""

    def _slip(self, desk: Desk, formula: Formula, numbers: list[int]) -> str:
        """A program with a mistake: a lost digit, no rounding or a misspelt word; else empty."""
        if not desk.happens(desk.rates.error):
            return ""
        expression = formula.work.expression
        at = desk.rng.randrange(len(numbers))
        short = [n // 10 if i == at else n for i, n in enumerate(numbers)]
        slips = [program(short, expression), program(numbers, expression).replace("print", "pint")]
        if formula.work.places is not None:
            slips.append(program(numbers, formula.work.source))
        return desk.rng.choice(slips)


def program(numbers: list[int], expression: str, again: bool = False) -> str:
    """A program that prints an expression over numbers `n`; written another way the next time."""
    listed = ", ".join(map(str, numbers))
    return f"n = {f'({listed})' if again else f'[{listed}]'}\nprint({expression})"


def _is_number(output: str) -> bool:
    try:
        float(output.strip())
    except ValueError:
        return False
    return True
