"""What the planner of a web or code team knows: which pages and facts a question needs.

An outline is made from the words of the question alone. Its steps are carried out one after the
other, because a later step may be about what an earlier one found.
"""

from __future__ import annotations

from dataclasses import dataclass

from coa.corpus.relations import RELATIONS
from coa.tasks.atlas_families import Catalogue, Slots
from coa.tasks.atlas_formulas import Formula
from coa.tasks.atlas_inquiries import Choice, Inquiry, Kin, Look, Tally, Trail
from coa.tasks.atlas_understanding import understand
from coa.teachers.desk import Desk
from coa.teachers.episode import USER
from coa.teachers.wording import wanted, wanted_of

_COUNTS = ("no", "one step", "two steps", "three steps")


@dataclass(frozen=True)
class Outline:
    """The planner's decomposition of a question."""

    shape: Inquiry
    slots: Slots
    looks: tuple[Look, ...]

    @property
    def text(self) -> str:
        """The plan as the planner writes it."""
        lines = [self._in_words(look) for look in self.looks]
        end = self._combination()
        lines += [end] if end else []
        return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, start=1))

    @property
    def thought(self) -> str:
        return f"This takes {_COUNTS[len(self.looks)]} of reading."

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
        shape = self.shape
        if isinstance(shape, Choice):
            size = "smaller" if shape.smaller else "larger"
            return f"{wanted(shape.ask, f'the one with the {size} {shape.by}')}"
        if isinstance(shape, Tally):
            return f"count the neighbours with {shape.than} {shape.by}"
        if isinstance(shape, Kin):
            return "the neighbour with the same"
        if isinstance(shape, Formula):
            return f"calculate {shape.work.called}"
        return ""


def planned(desk: Desk, catalogue: Catalogue) -> Outline | None:
    """The planner decomposes the question and tells the searcher; None when it cannot."""
    understood = understand(desk.episode.question, catalogue)
    if understood is None:
        text = "I do not know which pages or numbers this question needs."
        desk.say("planner", USER, text, part="failure")
        desk.fail("the planner could not plan")
        return None
    shape = understood.meaning.shape
    assert isinstance(shape, Choice | Tally | Kin | Trail | Formula), shape
    outline = Outline(shape, understood.slots, shape.looks(understood.slots))
    steps = [[list(look.relations), list(look.subjects)] for look in outline.looks]
    desk.say("planner", "searcher", outline.text, outline.thought, part="plan", steps=steps)
    return outline
