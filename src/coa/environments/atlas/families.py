"""Families of questions over the fact graph, as values.

A family is a shape (a chain of relations, a comparison, a superlative among neighbours ...) and its
relations. The shape says, as values, what is looked up (`looks`) and what follows from the facts
(`conclude`). Whoever works on a question goes through the same two: the maker of tasks takes the
facts from the world, a reader from what it has read. Neither is told the answer.

Held-out families compose relations that trained families use, in a way none of them does. The
shapes here need passages; those in `inquiries` need pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from coa.environments.atlas.reckoning import amount
from coa.environments.atlas.world import RELATIONS, World, values_of

Slots = Mapping[str, str]
Facts = Mapping[tuple[str, str], Sequence[str]]
"""(relation, subject) -> the values that were found."""
CLEAR_MARGIN = 1.1
CLEAR_YEARS = 20
MOST_NEIGHBOURS = 3
"""A superlative looks up each neighbour, so it asks about countries with few."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One lookup: the relation of the subject has these values."""

    relation: str
    subject: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Solution:
    facts: tuple[Fact, ...]
    answer: str
    answer_kind: str
    """Kind of entity of the answer, '' for a plain value."""
    bridges: tuple[tuple[str, str], ...]
    """(kind, name) of every entity that is looked up."""
    also: tuple[str, ...] = ()
    """Other ways in which the answer may rightly be written."""


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
    because: str = ""
    """How the facts combine, in a sentence."""


class Inquiry(ABC):
    """How the questions of a family are worked out: what is looked up and what follows."""

    if TYPE_CHECKING:  # a shape has them as a field or as a property

        @property
        def kind(self) -> str: ...
        @property
        def relations(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def slots(self) -> Mapping[str, str]:
        """Slot name to the kind of entity that fills it."""

    @abstractmethod
    def looks(self, slots: Slots) -> tuple[Look, ...]: ...
    @abstractmethod
    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        """What follows from the facts; None when they give no single clear answer."""

    def solve(self, world: World, slots: Slots) -> Solution | None:
        """The solution in a world: every fact of every step, and what follows."""
        facts: dict[tuple[str, str], tuple[str, ...]] = {}
        bridges: list[tuple[str, str]] = []
        looks = self.looks(slots)
        for step, look in enumerate(looks):
            kind, first = next(iter(self.slots.values())), look.subjects[0]
            if first.startswith("#"):
                kind = RELATIONS[looks[int(first[1:])].relations[0]].value
            for subject in subjects_of(looks, step, facts):
                bridges.append((kind, subject))
                for relation in look.relations:
                    facts[relation, subject] = values_of(world, relation, subject)
                    if not facts[relation, subject]:
                        return None
        end = self.conclude(slots, facts)
        if end is None or list(slots.values()) == [end.answer]:  # the question names it
            return None
        found = tuple(Fact(*known, values) for known, values in facts.items())
        return Solution(found, end.answer, end.kind, tuple(dict.fromkeys(bridges)))


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


def _in_chains(relations: tuple[str, ...], starts: Sequence[str]) -> tuple[Look, ...]:
    """Relations followed from each of the names, one name after the other."""
    looks: list[Look] = []
    for start in starts:
        for place, relation in enumerate(relations):
            looks.append(Look((relation,), (f"#{len(looks) - 1}" if place else start,)))
    return tuple(looks)


def _end_of(relations: tuple[str, ...], start: str, facts: Facts) -> str | None:
    """Where a chain of single values ends."""
    for relation in relations:
        values = facts.get((relation, start), ())
        if len(values) != 1:
            return None
        start = values[0]
    return start


@dataclass(frozen=True)
class LookupChain(Inquiry):
    """Follow relations from one entity: city -> country -> currency."""

    start: str
    relations: tuple[str, ...]

    @property
    def kind(self) -> str:
        if self.relations[-1] == "neighbour_count":
            return "counting"
        return "lookup" if len(self.relations) == 1 else "chain"

    @property
    def slots(self) -> Mapping[str, str]:
        return {self.start: self.start}

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        return _in_chains(self.relations, [slots[self.start]])

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        end = _end_of(self.relations, slots[self.start], facts)
        if end is None:
            return None
        return Conclusion(end, RELATIONS[self.relations[-1]].value, f"The last report gives {end}.")


def _extreme(
    by: str, names: Sequence[str], values: Sequence[str], smaller: bool, kind: str
) -> Conclusion | None:
    """The name with the largest (or smallest) number, where it is clearly that."""
    rows = [(_amount(value), name) for value, name in zip(values, names, strict=True)]
    rows.sort(key=lambda row: row[0], reverse=not smaller)
    return Conclusion(rows[0][1], kind) if _clearly_apart(by, rows[0][0], rows[1][0]) else None


def _amount(text: str) -> int:
    """A number of the world itself, where it always is one."""
    number = amount(text)
    assert number is not None, text
    return number


def _clearly_apart(relation: str, one: int, other: int) -> bool:
    low, high = sorted((one, other))
    if relation == "year":
        return high - low >= CLEAR_YEARS
    return high > low and high >= CLEAR_MARGIN * low  # none is as few as none


@dataclass(frozen=True)
class Comparison(Inquiry):
    """Which of the named entities has the largest (or smallest) number at the end of a chain."""

    entity: str
    relations: tuple[str, ...]
    smaller: bool = False
    names: tuple[str, ...] = ("first", "second")

    @property
    def kind(self) -> str:
        return "comparison" if len(self.names) == 2 else "superlative"

    @property
    def slots(self) -> Mapping[str, str]:
        return dict.fromkeys(self.names, self.entity)

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        return _in_chains(self.relations, [slots[slot] for slot in self.names])

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        names = [slots[slot] for slot in self.names]
        ends = [_end_of(self.relations, name, facts) for name in names]
        known = [end for end in ends if end is not None]
        if len(known) < len(ends):
            return None
        return _extreme(self.relations[-1], names, known, self.smaller, self.entity)


@dataclass(frozen=True)
class AmongNeighbours(Inquiry):
    """One neighbour of a country, by something that all of them have."""

    by: str

    @property
    def slots(self) -> Mapping[str, str]:
        return {"country": "country"}

    @property
    def relations(self) -> tuple[str, ...]:
        return ("neighbours", self.by)


@dataclass(frozen=True)
class Superlative(AmongNeighbours):
    """The neighbour with the largest (or smallest) number."""

    smaller: bool = False
    kind: str = "superlative"

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        return _in_chains(self.relations, [slots["country"]])

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        names = facts["neighbours", slots["country"]]
        if not 2 <= len(names) <= MOST_NEIGHBOURS:
            return None
        values = [facts[self.by, name][0] for name in names]
        return _extreme(self.by, names, values, self.smaller, "country")


@dataclass(frozen=True)
class Intersection(Inquiry):
    """The one neighbour that two countries have in common."""

    kind: str = "intersection"
    relations: tuple[str, ...] = ("neighbours",)

    @property
    def slots(self) -> Mapping[str, str]:
        return {"first": "country", "second": "country"}

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        return _in_chains(self.relations, [slots[slot] for slot in self.slots])

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        first, second = (set(facts["neighbours", slots[slot]]) for slot in self.slots)
        common = first & second
        return Conclusion(common.pop(), "country") if len(common) == 1 else None


@dataclass(frozen=True)
class Difference(Inquiry):
    """How far apart the numbers of two entities are."""

    entity: str
    by: str
    kind: str = "arithmetic"
    below: int = 0
    """Larger numbers are not asked for; 0: any are."""

    @property
    def slots(self) -> Mapping[str, str]:
        return {"first": self.entity, "second": self.entity}

    @property
    def relations(self) -> tuple[str, ...]:
        return (self.by,)

    def looks(self, slots: Slots) -> tuple[Look, ...]:
        return _in_chains(self.relations, [slots[slot] for slot in self.slots])

    def conclude(self, slots: Slots, facts: Facts) -> Conclusion | None:
        one, other = (_amount(facts[self.by, slots[slot]][0]) for slot in self.slots)
        if one == other or 0 < self.below <= max(one, other):
            return None
        return Conclusion(str(abs(one - other)), "")


@dataclass(frozen=True)
class Family:
    name: str
    shape: Inquiry
    held_out: bool = False

    @property
    def kind(self) -> str:
        return self.shape.kind


@dataclass(frozen=True, eq=False)
class Catalogue:
    """The families of one task set, and the ways in which each may be put."""

    name: str
    families: Mapping[str, Family]
    phrasings: Mapping[str, tuple[str, ...]]
    most: int = 1000
    """Slot fillings kept for one family: pairs are many, and more would only cost time."""


_ALL = (
    Family("country_capital", LookupChain("country", ("capital",))),
    Family("country_currency", LookupChain("country", ("currency",))),
    Family("city_country", LookupChain("city", ("country",))),
    Family("element_symbol", LookupChain("element", ("symbol",))),
    Family("element_place", LookupChain("element", ("place",))),
    Family("neighbour_count", LookupChain("country", ("neighbour_count",))),
    Family("city_currency", LookupChain("city", ("country", "currency"))),
    Family("capital_currency", LookupChain("city", ("capital_of", "currency"))),
    Family("city_capital", LookupChain("city", ("country", "capital"))),
    Family("city_language", LookupChain("city", ("country", "languages"))),
    Family("capital_population", LookupChain("country", ("capital", "population"))),
    Family("country_language_family", LookupChain("country", ("languages", "language_family"))),
    Family("country_currency_code", LookupChain("country", ("currency", "currency_code"))),
    Family("capital_calling_code", LookupChain("city", ("capital_of", "calling_code"))),
    Family("capital_neighbour_count", LookupChain("city", ("capital_of", "neighbour_count"))),
    Family(
        "city_language_family", LookupChain("city", ("country", "languages", "language_family"))
    ),
    Family("more_populous_country", Comparison("country", ("population",))),
    Family("larger_country", Comparison("country", ("area",))),
    Family("earlier_element", Comparison("element", ("year",), smaller=True)),
    Family(
        "most_populous_of_three",
        Comparison("country", ("population",), names=("first", "second", "third")),
    ),
    Family("most_populous_neighbour", Superlative("population")),
    Family("common_neighbour", Intersection()),
    Family("atomic_number_gap", Difference("element", "number")),
    Family(
        "city_currency_code", LookupChain("city", ("country", "currency", "currency_code")), True
    ),
    Family("element_capital", LookupChain("element", ("place", "capital")), True),
    Family("capital_area", LookupChain("city", ("capital_of", "area")), True),
    Family("larger_capital", Comparison("country", ("capital", "population")), True),
    Family("smallest_neighbour", Superlative("area", smaller=True), True),
    Family("neighbour_count_gap", Difference("country", "neighbour_count"), True),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
