"""The set `atlas-wide`: more compositions of relations than `atlas-mhqa` has, to train on.

A model that knows two dozen kinds of questions learns the kinds; one that knows many learns to put
look-ups together. Goals are crossed with ways to reach a country, so this set has the compositions
that `atlas-mhqa` leaves out, except those that it and `atlas-web` hold out: these occur nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from coa.environments.atlas.families import Comparison, Difference, Family, LookupChain, Superlative
from coa.environments.atlas.phrasings import filled

_GOALS = {
    "currency": ("currency",),
    "language": ("languages",),
    "population": ("population",),
    "area": ("area",),
    "calling_code": ("calling_code",),
    "domain": ("domain",),
    "summit": ("summit",),
    "neighbour_count": ("neighbour_count",),
    "currency_code": ("currency", "currency_code"),
    "language_family": ("languages", "language_family"),
}
_CALLED = {
    "currency": "currency",
    "language": "official language",
    "population": "population",
    "area": "area in square kilometres",
    "calling_code": "calling code",
    "domain": "internet domain",
    "summit": "highest point",
    "neighbour_count": "number of land neighbours",
    "currency_code": "ISO code of the currency",
    "language_family": "family of the official language",
    "number": "atomic number",
    "year": "year of discovery",
}
_STARTS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "country": (
        "country",
        (),
        ("language", "population", "area", "calling_code", "domain", "summit"),
    ),
    "city": (
        "city",
        ("country",),
        ("population", "area", "calling_code", "domain", "summit", "neighbour_count"),
    ),
    "seat": (
        "city",
        ("capital_of",),
        ("language", "population", "summit", "currency_code", "language_family"),
    ),
    "element": (
        "element",
        ("place",),
        (
            "currency",
            "language",
            "population",
            "area",
            "calling_code",
            "neighbour_count",
            "currency_code",
            "language_family",
        ),
    ),
}
"""The entity that a question names, how its country is reached, and the goals from there. A seat
is a city that is named as the capital."""

_NAMED = {"country": "{country}", "city": "the city of {city}", "element": "{element}"}
_DIRECT = (
    "What is the GOAL of SUBJECT?",
    "Name the GOAL of SUBJECT.",
    "Tell me the GOAL of SUBJECT.",
    "Find the GOAL of SUBJECT.",
    "Which GOAL does SUBJECT have?",
    "I would like to know the GOAL of SUBJECT.",
    "SUBJECT has which GOAL?",
    "Look up SUBJECT: what is the GOAL?",
)
_FRAMES: Mapping[str, tuple[str, ...]] = {
    "country": _DIRECT,
    "city": (
        "What is the GOAL of the country where {city} is located?",
        "Name the GOAL of the country in which the city of {city} lies.",
        "The city of {city} belongs to a country. What is the GOAL of that country?",
        "Find the GOAL of the country that the city of {city} is part of.",
        "Give the GOAL of the country that {city} belongs to.",
        "The city of {city} is in a country with which GOAL?",
        "I would like to know the GOAL of the country of the city of {city}.",
        "For the city of {city}, look up its country: what is the GOAL?",
    ),
    "seat": (
        "What is the GOAL of the country whose capital is {city}?",
        "Name the GOAL of the country with the capital {city}.",
        "{city} is the capital of a country. What is the GOAL of that country?",
        "Find the GOAL of the country that is governed from {city}.",
        "Give the GOAL of the country that has {city} as its capital.",
        "The capital of a country is {city}. Which GOAL does that country have?",
        "I would like to know the GOAL of the country with {city} as its capital.",
        "Of which country is {city} the capital, and what is its GOAL?",
    ),
    "element": (
        "What is the GOAL of the country where the element {element} was discovered?",
        "Name the GOAL of the country in which {element} was discovered.",
        "The element {element} was discovered in a country. Which GOAL does that country have?",
        "Find the GOAL of the country where {element} was first found.",
        "Give the GOAL of the country where chemists discovered {element}.",
        "The country of the discovery of {element} has which GOAL?",
        "I would like to know the GOAL of the country of the discovery of {element}.",
        "Where was {element} discovered? Give the GOAL of that country.",
    ),
}
_PAIR = (
    "Which KIND MOST, {first} or {second}?",
    "Of the KINDS {first} and {second}, which one MOST?",
    "Compare {first} with {second}: which KIND MOST?",
    "Take {first} and {second}. Which of the two KINDS MOST?",
    "Between {first} and {second}, which KIND MOST?",
    "Find out which of the KINDS {first} and {second} MOST.",
    "Look at {first} and {second}: the KIND that MOST is which one?",
    "Say which KIND MOST: {first} or {second}.",
)
_COMPARED: Mapping[str, tuple[Comparison, str]] = {
    "less_populous_country": (
        Comparison("country", ("population",), smaller=True),
        "has fewer people",
    ),
    "smaller_country": (Comparison("country", ("area",), smaller=True), "has the smaller area"),
    "country_with_more_neighbours": (
        Comparison("country", ("neighbour_count",)),
        "has more land neighbours",
    ),
    "country_with_fewer_neighbours": (
        Comparison("country", ("neighbour_count",), smaller=True),
        "has fewer land neighbours",
    ),
    "higher_country": (Comparison("country", ("elevation",)), "has the higher highest point"),
    "later_element": (Comparison("element", ("year",)), "was discovered later"),
    "element_of_higher_number": (
        Comparison("element", ("number",)),
        "has the higher atomic number",
    ),
    "city_of_more_people": (Comparison("city", ("population",)), "has more people"),
    "city_of_fewer_people": (
        Comparison("city", ("population",), smaller=True),
        "has fewer people",
    ),
    "city_in_more_populous_country": (
        Comparison("city", ("country", "population")),
        "lies in the country with more people",
    ),
    "city_in_larger_country": (
        Comparison("city", ("country", "area")),
        "lies in the country with the larger area",
    ),
}
_KINDS = {"country": "countries", "element": "elements", "city": "cities"}
_LARGEST_OF_THREE = (
    "Which of these countries has the largest area: {first}, {second} or {third}?",
    "Which country is the largest in area: {first}, {second} or {third}?",
    "Of {first}, {second} and {third}, which country has the largest area?",
    "Which takes up the most space on the map: {first}, {second} or {third}?",
    "Among {first}, {second} and {third}, which country covers the most land?",
    "Name the largest of {first}, {second} and {third} by area.",
    "Which covers the most square kilometres: {first}, {second} or {third}?",
    "Rank {first}, {second} and {third} by area. Which country comes first?",
)
_NEIGHBOURS = (
    "Which land neighbour of {country} has the MOST?",
    "Which of {country}'s land neighbours has the MOST?",
    "Of all the land neighbours of {country}, which has the MOST?",
    "Compare the land neighbours of {country}: which has the MOST?",
    "Among the land neighbours of {country}, which one has the MOST?",
    "Which country that borders {country} by land has the MOST?",
    "Name the land neighbour of {country} with the MOST.",
    "Across the land borders of {country}, which neighbour has the MOST?",
)
_YEARS = (
    "How many years lie between the discovery of {first} and that of {second}?",
    "What is the difference between the years of discovery of {first} and {second}?",
    "By how many years do the discoveries of {first} and {second} differ?",
    "How many years passed between the discoveries of {first} and {second}?",
    "Take the years in which {first} and {second} were discovered: what is their difference?",
    "Find the difference in years between the discoveries of {first} and {second}.",
    "How far apart in years are the discoveries of {first} and {second}?",
    "Subtract the earlier from the later year of discovery of {first} and {second}.",
)
_LIGHT = 15
"""Small numbers, of which any two elements have few."""
_LIGHT_GAP = (
    "How many places in the periodic table is it from {first} to {second}, two light elements?",
    "What is the difference between the atomic numbers of the light elements {first} and {second}?",
    "By how much do the atomic numbers of two light elements, {first} and {second}, differ?",
    "How far apart in atomic number are the light elements {first} and {second}?",
    "Take two light elements, {first} and {second}: what is the difference of atomic numbers?",
    "Find the difference in atomic number between two light elements, {first} and {second}.",
    "How many protons more has one of the light elements {first} and {second} than the other?",
    "Subtract the smaller from the larger atomic number of two light elements, {first} and "
    "{second}.",
)


def _families() -> dict[str, tuple[Family, tuple[str, ...]]]:
    made: dict[str, tuple[Family, tuple[str, ...]]] = {}
    for start, (entity, way, goals) in _STARTS.items():
        for goal in goals:
            name = f"{start}_{goal}"
            frames = filled(_FRAMES[start], GOAL=_CALLED[goal], SUBJECT=_NAMED[entity])
            made[name] = Family(name, LookupChain(entity, (*way, *_GOALS[goal]))), frames
    for entity, relation in (("city", "population"), ("element", "number"), ("element", "year")):
        name = f"{entity}_own_{relation}"
        frames = filled(_DIRECT, GOAL=_CALLED[relation], SUBJECT=_NAMED[entity])
        made[name] = Family(name, LookupChain(entity, (relation,))), frames
    for name, (shape, most) in _COMPARED.items():
        frames = filled(_PAIR, KINDS=_KINDS[shape.entity], KIND=shape.entity, MOST=most)
        made[name] = Family(name, shape), frames
    three = Comparison("country", ("area",), names=("first", "second", "third"))
    made["largest_of_three"] = Family("largest_of_three", three), _LARGEST_OF_THREE
    for name, beside, most in (
        ("largest_neighbour", Superlative("area"), "largest area"),
        ("least_populous_neighbour", Superlative("population", smaller=True), "fewest people"),
    ):
        made[name] = Family(name, beside), filled(_NEIGHBOURS, MOST=most)
    light = Difference("element", "number", below=_LIGHT)
    made["light_element_gap"] = Family("light_element_gap", light), _LIGHT_GAP
    made["discovery_gap"] = Family("discovery_gap", Difference("element", "year")), _YEARS
    return made


_ALL = _families()
WIDE_FAMILIES: Mapping[str, Family] = {name: family for name, (family, _) in _ALL.items()}
WIDE_PHRASINGS: Mapping[str, tuple[str, ...]] = {name: frames for name, (_, frames) in _ALL.items()}
