"""Formula: a question that ends in a calculation with numbers that are looked up.

The result is worked out in exact fractions and rounded as the question says. A result so near to a
tie that it would depend on how a program rounds is no clear answer, and is not asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from coa.environments.atlas.families import CLEAR_MARGIN, Slots, Solution
from coa.environments.atlas.inquiries import (
    MOST_AROUND,
    Conclusion,
    Facts,
    Look,
    only_amount,
    subjects_of,
    worked_out,
)
from coa.environments.atlas.world import World

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
class Formula:
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
        solution = worked_out(self, world, slots)
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
