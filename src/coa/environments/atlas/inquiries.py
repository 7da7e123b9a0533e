"""Shapes of questions that are worked out from several facts of several pages.

They ask for more than one passage states, so that it pays to open pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from coa.environments.atlas.families import (
    CLEAR_MARGIN,
    AmongNeighbours,
    Conclusion,
    Facts,
    Inquiry,
    Look,
    Slots,
    Solution,
    subjects_of,
)
from coa.environments.atlas.reckoning import amount, lettered, side_by_side, weighed
from coa.environments.atlas.world import RELATIONS, World

MOST_AROUND = 4
"""Neighbours that one question may take in: each is a page to open."""


def only_amount(values: Sequence[str]) -> int | None:
    """The number that these values are; None if there are several, or it is no number."""
    return amount(values[0]) if len(values) == 1 else None


def _amounts(facts: Facts, relation: str, names: Sequence[str]) -> list[int] | None:
    numbers = [only_amount(facts.get((relation, name), ())) for name in names]
    known = [number for number in numbers if number is not None]
    return known if known and len(known) == len(numbers) else None


@dataclass(frozen=True)
class Choice(Inquiry):
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


@dataclass(frozen=True)
class Tally(Inquiry):
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


@dataclass(frozen=True)
class Kin(AmongNeighbours):
    """The one neighbour that has the country's own value of something."""

    kind: str = "kin"

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


# Questions that end in a calculation with numbers that are looked up. The result is worked out in
# exact fractions and rounded as the question says. A result so near to a tie that it would depend
# on how a program rounds is no clear answer, and is not asked for.

_DECIMALS = ("", "one decimal", "two decimals")
_ORDINALS = ("first", "second", "third", "fourth", "fifth")
_NEAR_TIE = Fraction(1, 1000)


@dataclass(frozen=True, eq=False)
class Work:
    """A calculation over numbers `n`: in words, as Python source, and exactly."""

    called: str
    source: str
    exact: Callable[[Sequence[Fraction]], Fraction]
    places: int | None = None
    """Decimals to round to; None when the result is a whole number by itself."""
    ordered: bool = False
    """Whether the first number has to be clearly larger ('how many times larger')."""

    @property
    def expression(self) -> str:
        """The source with the rounding that the question asks for."""
        if self.places is None:
            return self.source
        return f"round({self.source}{f', {self.places}' if self.places else ''})"

    @property
    def form(self) -> str:
        """What the result looks like, in words that complete 'it is ...'."""
        return f"rounded to {_DECIMALS[self.places]}" if self.places else "a whole number"

    def fits(self, text: str) -> bool:
        """Whether a text has the form of a result."""
        decimals = rf"\.\d{{1,{self.places}}}" if self.places else ""
        return bool(re.fullmatch(rf"-?\d+{decimals}", text))

    def result(self, numbers: Sequence[int]) -> str | None:
        """The answer as the program prints it; None when it is not clear how to round it."""
        if self.ordered and numbers[0] < CLEAR_MARGIN * numbers[1]:
            return None
        value = self.exact([Fraction(number) for number in numbers])
        scaled = value * 10 ** (self.places or 0)
        rest = scaled - scaled.__floor__()
        if abs(rest - Fraction(1, 2)) < _NEAR_TIE:
            return None
        whole = round(scaled)
        if not self.places:
            return str(whole)
        return str(float(Fraction(whole, 10**self.places)))


TEN_MILLION = 10_000_000
TOTAL = Work("the sum", "sum(n)", lambda n: sum(n, Fraction()))
GAP = Work("the difference", "abs(n[0] - n[1])", lambda n: abs(n[0] - n[1]))
SPAN = Work("the highest minus the lowest", "max(n) - min(n)", lambda n: max(n) - min(n))
TIMES = Work("the ratio", "n[0] / n[1]", lambda n: n[0] / n[1], places=2, ordered=True)
MEAN = Work("the average", "sum(n) / len(n)", lambda n: sum(n, Fraction()) / len(n), places=0)
DENSITY = Work("people for each unit of area", "n[0] / n[1]", lambda n: n[0] / n[1], places=1)


DENSITY_GAP = Work(
    "the difference of the densities",
    "abs(n[0] / n[1] - n[2] / n[3])",
    lambda n: abs(n[0] / n[1] - n[2] / n[3]),
    places=1,
)
SHARE = Work("the share in percent", "100 * n[0] / n[1]", lambda n: 100 * n[0] / n[1], places=1)
ABOVE = Work(
    "how many are above ten million",
    f"sum(x > {TEN_MILLION} for x in n)",
    lambda n: Fraction(sum(x > TEN_MILLION for x in n)),
)


@dataclass(frozen=True, eq=False)
class Formula(Inquiry):
    """A calculation with numbers that are looked up.

    `steps` and `terms` name subjects by slot, `{first}`, or by step, `#0`; a term is a relation of
    such a subject, and the terms in order are the numbers `n` of the work.
    """

    entity: str
    count: int
    steps: tuple[Look, ...]
    terms: tuple[tuple[str, str], ...]
    work: Work
    kind: str = "arithmetic"

    @property
    def slots(self) -> Mapping[str, str]:
        names = (self.entity,) if self.count == 1 else _ORDINALS[: self.count]
        return dict.fromkeys(names, self.entity)

    @property
    def relations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for look in self.steps for name in look.relations))

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        return tuple(
            Look(look.relations, tuple(subject.format(**slots) for subject in look.subjects))
            for look in self.steps
        )

    def numbers(self, slots: Slots, facts: Facts) -> list[tuple[str, str, int]] | None:
        """(relation, subject, number) of every term; None when a fact is no number."""
        found = []
        for relation, subject in self._terms(slots, facts):
            number = only_amount(facts.get((relation, subject), ()))
            if number is None:
                return None
            found.append((relation, subject, number))
        return found

    def _terms(self, slots: Slots, facts: Facts) -> Iterator[tuple[str, str]]:
        looks = self.looks(slots)
        for relation, where in self.terms:
            if not where.startswith("#"):
                yield relation, where.format(**slots)
                continue
            end = (*looks, Look((relation,), (where,)))
            yield from ((relation, name) for name in subjects_of(end, len(looks), facts))

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        around = facts.get(("neighbours", slots.get(self.entity, "")))
        if around is not None and not 2 <= len(around) <= MOST_AROUND:
            return None
        numbers = self.numbers(slots, facts)
        result = self.work.result([n for _, _, n in numbers]) if numbers else None
        return None if result is None else Conclusion(result, "", f"The result is {result}.")

    def solve(self, world: World, slots: Slots) -> Solution | None:
        solution = super().solve(world, slots)
        if solution is None or not self.work.places:
            return solution
        padded = f"{float(solution.answer):.{self.work.places}f}"  # 3.1 may be written 3.10
        return replace(solution, also=(padded,) if padded != solution.answer else ())


def of_each(entity: str, count: int, relations: tuple[str, ...], work: Work) -> Formula:
    """A calculation over numbers of the entities that the question names."""
    names = (entity,) if count == 1 else _ORDINALS[:count]
    subjects = tuple(f"{{{name}}}" for name in names)
    terms = tuple((relation, subject) for subject in subjects for relation in relations)
    return Formula(entity, count, (Look(relations, subjects),), terms, work)


def of_neighbours(by: str, work: Work) -> Formula:
    """A calculation over a number of every neighbour."""
    steps = (Look(("neighbours",), ("{country}",)), Look((by,), ("#0",)))
    return Formula("country", 1, steps, ((by, "#0"),), work)


def of_capitals(count: int, work: Work, home: bool = False) -> Formula:
    """A calculation over the populations of capitals, and of their country if `home`."""
    names = ("country",) if count == 1 else _ORDINALS[:count]
    subjects = tuple(f"{{{name}}}" for name in names)
    own = ("population",) if home else ()
    steps = (Look(("capital", *own), subjects), Look(("population",), ("#0",)))
    terms = (("population", "#0"), *(("population", subject) for subject in subjects if home))
    return Formula("country", count, steps, terms, work)
