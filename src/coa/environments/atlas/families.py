"""Families of questions over the fact graph, as values.

A family is a shape (a chain of relations, a comparison, a superlative among neighbours ...) and its
relations. The shape knows how a question is worked out: which facts are looked up, in order, and
what follows from them. Held-out families compose relations that trained families use, in a way none
of them does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from coa.environments.atlas.reckoning import amount
from coa.environments.atlas.world import RELATIONS, World, values_of

Slots = Mapping[str, str]
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


class FamilyShape(Protocol):
    """How a family's questions are worked out."""

    @property
    def kind(self) -> str: ...
    @property
    def slots(self) -> Mapping[str, str]:
        """Slot name to the kind of entity that fills it."""
        ...

    @property
    def relations(self) -> tuple[str, ...]: ...

    def solve(self, world: World, slots: Slots) -> Solution | None:
        """Work the question out; None when it has no single clear answer."""
        ...


@dataclass(frozen=True)
class LookupChain:
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

    def solve(self, world: World, slots: Slots) -> Solution | None:
        facts, subject, kind = [], slots[self.start], self.start
        for relation in self.relations:
            values = values_of(world, relation, subject)
            if len(values) != 1:
                return None
            facts.append((kind, Fact(relation, subject, values)))
            subject, kind = values[0], RELATIONS[relation].value
        if subject == slots[self.start]:
            return None
        bridges = tuple((kind, fact.subject) for kind, fact in facts)
        return Solution(tuple(fact for _, fact in facts), subject, kind, bridges)


def _follow(world: World, relations: tuple[str, ...], kind: str, subject: str) -> Solution | None:
    return LookupChain(kind, relations).solve(world, {kind: subject})


def _amount(text: str) -> int:
    """A number of the world itself, where it always is one."""
    number = amount(text)
    assert number is not None, text
    return number


@dataclass(frozen=True)
class Comparison:
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

    def solve(self, world: World, slots: Slots) -> Solution | None:
        sides = []
        for slot in self.names:
            side = _follow(world, self.relations, self.entity, slots[slot])
            if side is None:
                return None
            sides.append((_amount(side.answer), slots[slot], side))
        sides.sort(key=lambda row: row[0], reverse=not self.smaller)
        if not _clearly_apart(self.relations[-1], sides[0][0], sides[1][0]):
            return None
        given = sorted(sides, key=lambda row: list(slots.values()).index(row[1]))
        return Solution(
            tuple(fact for _, _, side in given for fact in side.facts),
            sides[0][1],
            self.entity,
            tuple(bridge for _, _, side in given for bridge in side.bridges),
        )


def _clearly_apart(relation: str, one: int, other: int) -> bool:
    low, high = sorted((one, other))
    if relation == "year":
        return high - low >= CLEAR_YEARS
    return high > low and high >= CLEAR_MARGIN * low  # none is as few as none


@dataclass(frozen=True)
class Superlative:
    """The neighbour with the largest (or smallest) number."""

    by: str
    smaller: bool = False
    kind: str = "superlative"

    @property
    def slots(self) -> Mapping[str, str]:
        return {"country": "country"}

    @property
    def relations(self) -> tuple[str, ...]:
        return ("neighbours", self.by)

    def solve(self, world: World, slots: Slots) -> Solution | None:
        names = values_of(world, "neighbours", slots["country"])
        if not 2 <= len(names) <= MOST_NEIGHBOURS:
            return None
        facts = [Fact(self.by, name, values_of(world, self.by, name)) for name in names]
        ranked = sorted(facts, key=lambda f: _amount(f.values[0]), reverse=not self.smaller)
        best, next_best = (_amount(fact.values[0]) for fact in ranked[:2])
        if not _clearly_apart(self.by, best, next_best):
            return None
        bridges = tuple(("country", name) for name in (slots["country"], *names))
        lookup = Fact("neighbours", slots["country"], names)
        return Solution((lookup, *facts), ranked[0].subject, "country", bridges)


@dataclass(frozen=True)
class Intersection:
    """The one neighbour that two countries have in common."""

    kind: str = "intersection"
    relations: tuple[str, ...] = ("neighbours",)

    @property
    def slots(self) -> Mapping[str, str]:
        return {"first": "country", "second": "country"}

    def solve(self, world: World, slots: Slots) -> Solution | None:
        facts = [
            Fact("neighbours", slots[s], values_of(world, "neighbours", slots[s])) for s in slots
        ]
        common = set(facts[0].values) & set(facts[1].values)
        if len(common) != 1:
            return None
        bridges = tuple(("country", fact.subject) for fact in facts)
        return Solution(tuple(facts), common.pop(), "country", bridges)


@dataclass(frozen=True)
class Difference:
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

    def solve(self, world: World, slots: Slots) -> Solution | None:
        facts = [Fact(self.by, slots[s], values_of(world, self.by, slots[s])) for s in self.slots]
        if not all(fact.values for fact in facts):
            return None
        numbers = [_amount(fact.values[0]) for fact in facts]
        gap = abs(numbers[0] - numbers[1])
        if gap == 0 or 0 < self.below <= max(numbers):
            return None
        bridges = tuple((self.entity, fact.subject) for fact in facts)
        return Solution(tuple(facts), str(gap), "", bridges)


@dataclass(frozen=True)
class Family:
    name: str
    shape: FamilyShape
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
