"""Shapes of questions that are worked out from several facts of several pages.

A shape says, as values, what is looked up (`looks`) and what follows from the facts (`conclude`).
Whoever works on a question goes through the same two: the maker of tasks takes the facts from the
world, a reader from what it has read. Neither is told the answer.

The shapes here ask for more than one passage states, so that it pays to open pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from coa.environments.atlas.families import CLEAR_MARGIN, Fact, Slots, Solution
from coa.environments.atlas.reckoning import amount, lettered, side_by_side, weighed
from coa.environments.atlas.world import RELATIONS, World, values_of

Facts = Mapping[tuple[str, str], Sequence[str]]
"""(relation, subject) -> the values that were found."""
MOST_AROUND = 4
"""Neighbours that one question may take in: each is a page to open."""


class Look(NamedTuple):
    """One step: these relations of these subjects, found on the subjects' pages.

    A subject is a name, or `#0` for all that the first relation of step 0 gave.
    """

    relations: tuple[str, ...]
    subjects: tuple[str, ...]


class Conclusion(NamedTuple):
    answer: str
    kind: str
    """Kind of entity of the answer, '' for a plain value."""
    because: str
    """How the facts combine, in a sentence."""


class Inquiry(Protocol):
    """A shape that says what is looked up and what follows."""

    @property
    def kind(self) -> str: ...
    @property
    def slots(self) -> Mapping[str, str]: ...
    @property
    def relations(self) -> tuple[str, ...]: ...
    def looks(self, slots: Slots) -> tuple[Look, ...]: ...
    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        """What follows from the facts; None when they give no single clear answer."""
        ...

    def solve(self, world: World, slots: Slots) -> Solution | None: ...


def subjects_of(looks: Sequence[Look], step: int, facts: Facts) -> list[str]:
    """The names whose pages step number `step` looks at, once the steps before it are done."""
    names: list[str] = []
    for subject in looks[step].subjects:
        if not subject.startswith("#"):
            names.append(subject)
            continue
        earlier = int(subject[1:])
        relation = looks[earlier].relations[0]
        for name in subjects_of(looks, earlier, facts):
            names += facts[relation, name]
    return list(dict.fromkeys(names))


def worked_out(shape: Inquiry, world: World, slots: Slots) -> Solution | None:
    """The solution in a world: every fact of every step, and what follows."""
    facts: dict[tuple[str, str], tuple[str, ...]] = {}
    bridges: list[tuple[str, str]] = []
    looks = shape.looks(slots)
    for step, look in enumerate(looks):
        kind = _kind_looked_at(shape, looks, step)
        for subject in subjects_of(looks, step, facts):
            bridges.append((kind, subject))
            for relation in look.relations:
                facts[relation, subject] = values_of(world, relation, subject)
                if not facts[relation, subject]:
                    return None
    end = shape.conclude(slots, facts)
    if end is None:
        return None
    found = tuple(Fact(relation, subject, values) for (relation, subject), values in facts.items())
    return Solution(found, end.answer, end.kind, tuple(dict.fromkeys(bridges)))


def _kind_looked_at(shape: Inquiry, looks: Sequence[Look], step: int) -> str:
    first = looks[step].subjects[0]
    if first.startswith("#"):
        return RELATIONS[looks[int(first[1:])].relations[0]].value
    return next(iter(shape.slots.values()))


def only_amount(values: Sequence[str]) -> int | None:
    """The number that these values are; None if there are several, or it is no number."""
    return amount(values[0]) if len(values) == 1 else None


def _amounts(facts: Facts, relation: str, names: Sequence[str]) -> list[int] | None:
    numbers = [only_amount(facts.get((relation, name), ())) for name in names]
    known = [number for number in numbers if number is not None]
    return known if known and len(known) == len(numbers) else None


def _follow(relations: Sequence[str], start: str) -> tuple[Look, ...]:
    """The steps of a chain, one relation each."""
    subjects = [start, *(f"#{step}" for step in range(len(relations) - 1))]
    return tuple(
        Look((name,), (subject,)) for name, subject in zip(relations, subjects, strict=True)
    )


@dataclass(frozen=True)
class Choice:
    """A fact of the one of two countries that has more (or less) of something."""

    by: str
    ask: str
    smaller: bool = False
    kind: str = "choice"

    @property
    def slots(self) -> Mapping[str, str]:
        return {"first": "country", "second": "country"}

    @property
    def relations(self) -> tuple[str, ...]:
        return (self.by, self.ask)

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        return (Look(self.relations, (slots["first"], slots["second"])),)

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        names = [slots["first"], slots["second"]]
        numbers = _amounts(facts, self.by, names)
        if numbers is None or max(numbers) < CLEAR_MARGIN * min(numbers):
            return None
        sides = lettered((name, f"{n:,}", n) for name, n in zip(names, numbers, strict=True))
        chosen, steps = weighed(*sides, smaller=self.smaller)
        asked = facts.get((self.ask, chosen.name), ())
        if len(asked) != 1:
            return None
        because = f"{steps}, which has {asked[0]}."
        return Conclusion(asked[0], RELATIONS[self.ask].value, because)

    def solve(self, world: World, slots: Slots) -> Solution | None:
        return worked_out(self, world, slots)


@dataclass(frozen=True)
class Tally:
    """How many neighbours have more (less, the same) of something than the country itself."""

    by: str
    than: str = "more"
    """more, less or same."""
    capital: bool = False
    """The country is named by its capital."""
    kind: str = "tally"

    @property
    def slots(self) -> Mapping[str, str]:
        kind = "city" if self.capital else "country"
        return {kind: kind}

    @property
    def relations(self) -> tuple[str, ...]:
        return (*(("capital_of",) if self.capital else ()), "neighbours", self.by)

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        if not self.capital:
            home = Look(("neighbours", self.by), (slots["country"],))
            return (home, Look((self.by,), ("#0",)))
        found = Look(("capital_of",), (slots["city"],))
        return (found, Look(("neighbours", self.by), ("#0",)), Look((self.by,), ("#1",)))

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        looks = self.looks(slots)
        (home,) = subjects_of(looks, len(looks) - 2, facts)[:1] or ("",)
        around = list(facts.get(("neighbours", home), ()))
        if not 2 <= len(around) <= MOST_AROUND:
            return None
        sides = [facts.get((self.by, name), ()) for name in (home, *around)]
        if self.than == "same":
            if not all(sides):
                return None
            holds = [side == sides[0] for side in sides[1:]]
            return self._counted(sides, around, holds) if any(holds) else None
        numbers = _amounts(facts, self.by, [home, *around])
        if numbers is None:
            return None
        mine, *others = numbers
        if any(max(mine, n) < CLEAR_MARGIN * min(mine, n) for n in others):
            return None
        holds = [(n > mine) == (self.than == "more") for n in others]
        asked = "larger" if self.than == "more" else "smaller"
        steps = [
            f": {side_by_side(n, mine)}. The {asked} is {'A' if n_holds else 'B'}"
            for n, n_holds in zip(others, holds, strict=True)
        ]
        return self._counted(sides, around, holds, steps)

    def _counted(
        self,
        sides: Sequence[Sequence[str]],
        around: Sequence[str],
        holds: Sequence[bool],
        steps: Sequence[str] = (),
    ) -> Conclusion:
        """With a count that goes on from name to name: at the end a small model would guess it."""
        own, *theirs = (", ".join(side) for side in sides)
        said = steps or [""] * len(theirs)
        counts = accumulate(map(int, holds))
        compared = "; ".join(
            f"{name} {value}{how}: {'yes' if yes else 'no'}, {count}"
            for name, value, how, yes, count in zip(
                around, theirs, said, holds, counts, strict=True
            )
        )
        return Conclusion(str(sum(holds)), "", f"Against {own}: {compared}. That is {sum(holds)}.")

    def solve(self, world: World, slots: Slots) -> Solution | None:
        return worked_out(self, world, slots)


@dataclass(frozen=True)
class Kin:
    """The one neighbour that has the country's own value of something."""

    by: str
    kind: str = "kin"

    @property
    def slots(self) -> Mapping[str, str]:
        return {"country": "country"}

    @property
    def relations(self) -> tuple[str, ...]:
        return ("neighbours", self.by)

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        home = Look(("neighbours", self.by), (slots["country"],))
        return (home, Look((self.by,), ("#0",)))

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        home = slots["country"]
        own, around = facts[self.by, home], facts["neighbours", home]
        if len(own) != 1 or not 2 <= len(around) <= MOST_AROUND:
            return None
        theirs = {name: facts.get((self.by, name), ()) for name in around}
        kept = [name for name, values in theirs.items() if own[0] in values]
        if len(kept) != 1:
            return None
        compared = "; ".join(
            f"{name} {', '.join(values)}: {'yes' if own[0] in values else 'no'}"
            for name, values in theirs.items()
        )
        return Conclusion(kept[0], "country", f"Against {own[0]}: {compared}. That is {kept[0]}.")

    def solve(self, world: World, slots: Slots) -> Solution | None:
        return worked_out(self, world, slots)


@dataclass(frozen=True)
class Trail:
    """Follow relations from page to page: city -> country -> highest point."""

    start: str
    relations: tuple[str, ...]
    kind: str = "chain"

    @property
    def slots(self) -> Mapping[str, str]:
        return {self.start: self.start}

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        return _follow(self.relations, slots[self.start])

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        subject = slots[self.start]
        for relation in self.relations:
            values = facts.get((relation, subject), ())
            if len(values) != 1:
                return None
            subject = values[0]
        end = RELATIONS[self.relations[-1]].value
        return Conclusion(subject, end, f"The last report gives {subject}.")

    def solve(self, world: World, slots: Slots) -> Solution | None:
        return worked_out(self, world, slots)
