"""The set `atlas-code`: questions that need two to five look-ups and then a calculation.

How to round is said in the question. As in `atlas_web.py`, a frame is a way to put any question of
its kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from coa.environments.atlas.families import Family
from coa.environments.atlas.formulas import (
    ABOVE,
    DENSITY,
    DENSITY_GAP,
    GAP,
    MEAN,
    SHARE,
    SPAN,
    TIMES,
    TOTAL,
    Formula,
    of_capitals,
    of_each,
    of_neighbours,
)

_LISTS = (
    "",
    "{country}",
    "{first} and {second}",
    "{first}, {second}, and {third}",
    "{first}, {second}, {third}, and {fourth}",
    "{first}, {second}, {third}, {fourth}, and {fifth}",
)
_TOTAL = (
    "What is the sum of the NUMBERS of ALL?",
    "Add up the NUMBERS of ALL.",
    "What do the NUMBERS of ALL add up to?",
    "Taken together, the NUMBERS of ALL make how many?",
    "Take the NUMBERS of ALL: what is their sum?",
    "Calculate the total of the NUMBERS of ALL.",
    "How much do the NUMBERS of ALL make together?",
    "I add the NUMBERS of ALL. What is the result?",
)
_GAP = (
    "What is the difference between the NUMBERS of ALL?",
    "By how much do the NUMBERS of ALL differ?",
    "How far apart are the NUMBERS of ALL?",
    "Subtract the smaller from the larger of the NUMBERS of ALL.",
    "Take the NUMBERS of ALL: what is their difference?",
    "Calculate the difference of the NUMBERS of ALL.",
    "How large is the gap between the NUMBERS of ALL?",
    "I compare the NUMBERS of ALL. What lies between them?",
)
_TIMES = (
    "How many times the NUMBER of {second} is the NUMBER of {first}? Round to two decimals.",
    "Divide the NUMBER of {first} by the NUMBER of {second}, rounded to two decimals.",
    "What is the ratio of the NUMBER of {first} to the NUMBER of {second}, to two decimals?",
    "By what factor does the NUMBER of {first} exceed that of {second}? Give two decimals.",
    "How many times larger is the NUMBER of {first} than that of {second}, to two decimals?",
    "To two decimals, how often does the NUMBER of {second} go into the NUMBER of {first}?",
    "Give the NUMBER of {first} as a multiple of that of {second}, rounded to two decimals.",
    "The NUMBER of {first} is how many times that of {second}? Round to two decimals.",
)
_MEAN = (
    "What is the average of the NUMBERS of ALL, rounded to a whole number?",
    "Find the mean of the NUMBERS of ALL, rounded to a whole number.",
    "Rounded to a whole number, what is the average of the NUMBERS of ALL?",
    "On average, how high are the NUMBERS of ALL? Round to a whole number.",
    "Calculate the average of the NUMBERS of ALL and round it to a whole number.",
    "Take the NUMBERS of ALL: what is their mean? Round to a whole number.",
    "Average the NUMBERS of ALL. Give a whole number.",
    "The NUMBERS of ALL have which mean, to the nearest whole number?",
)
_SPAN = (
    "How far apart are the lowest and the highest of the NUMBERS of ALL?",
    "What is the range of the NUMBERS of ALL, from the lowest to the highest?",
    "Subtract the lowest from the highest of the NUMBERS of ALL.",
    "Between the lowest and the highest of the NUMBERS of ALL, what is the difference?",
    "Over what range do the NUMBERS of ALL spread? Give highest minus lowest.",
    "Take the NUMBERS of ALL: what is the highest minus the lowest?",
    "Calculate the highest minus the lowest of the NUMBERS of ALL.",
    "What lies between the lowest and the highest of the NUMBERS of ALL?",
)
_DENSITY = (
    "What is the population density of {country} in people per square kilometre, to one decimal?",
    "How many people live on a square kilometre of {country} on average? Round to one decimal.",
    "Divide the population of {country} by its area in square kilometres, to one decimal.",
    "How densely populated is {country}, in people per square kilometre, to one decimal?",
    "Calculate the population density of {country} per square kilometre, rounded to one decimal.",
    "Per square kilometre, how many inhabitants does {country} have? Give one decimal.",
    "Find the number of people per square kilometre in {country}, rounded to one decimal.",
    "On one square kilometre of {country} there are how many people, to one decimal?",
)
_DENSITY_GAP = (
    "By how much do the population densities of {first} and {second} differ, in people per "
    "square kilometre, to one decimal?",
    "What is the difference between the population densities of {first} and {second} per square "
    "kilometre, rounded to one decimal?",
    "Work out the people per square kilometre of {first} and of {second}. What is the difference, "
    "to one decimal?",
    "How far apart are the population densities of {first} and {second}, per square kilometre, "
    "to one decimal?",
    "Subtract the lower from the higher population density of {first} and {second}, per square "
    "kilometre, to one decimal.",
    "Compare how many people live on a square kilometre of {first} and of {second}: what is the "
    "difference, to one decimal?",
    "Calculate the gap between the population densities of {first} and {second} per square "
    "kilometre, to one decimal.",
    "Per square kilometre, how many people more live in one of {first} and {second} than in the "
    "other, to one decimal?",
)
_SHARE = (
    "What percentage of the population of {country} lives in its capital? Round to one decimal.",
    "How many percent of the people of {country} live in the capital, to one decimal?",
    "What share of the population of {country} does its capital hold, in percent, to one decimal?",
    "In percent and to one decimal, how much of {country}'s population is in its capital?",
    "Give the population of the capital of {country} as a percentage of the country's, to one "
    "decimal.",
    "Calculate the capital's share of the population of {country} in percent, to one decimal.",
    "Of all people in {country}, what percentage lives in the capital? Give one decimal.",
    "The capital of {country} is home to what percentage of its people, to one decimal?",
)
_AROUND = "land neighbours of {country}"
_ABOVE = (
    "How many of ALL have more than ten million inhabitants?",
    "Count how many of the countries ALL have a population above ten million.",
    "Of ALL, how many have a population of more than ten million?",
    "In how many of the countries ALL do more than ten million people live?",
    "How many of the countries ALL are home to more than ten million people?",
    "Look at the populations of ALL: how many are above ten million?",
    "Tell me how many of ALL have over ten million people.",
    "Among ALL, how many countries exceed ten million inhabitants?",
)


_NOUNS = {
    "population": ("population", "populations"),
    "area": ("area in square kilometres", "areas in square kilometres"),
    "neighbour_count": ("number of land neighbours", "numbers of land neighbours"),
    "elevation": ("height of the highest point", "heights of the highest points in metres"),
    "number": ("atomic number", "atomic numbers"),
    "year": ("year of discovery", "years of discovery"),
}
"""What a relation's numbers are called: one of them, and several."""


def _put(frames: tuple[str, ...], relation: str, everything: str) -> tuple[str, ...]:
    one, several = _NOUNS[relation]
    return tuple(
        frame.replace("NUMBERS", several).replace("NUMBER", one).replace("ALL", everything)
        for frame in frames
    )


def _of_each(
    frames: tuple[str, ...], formula: Formula, kind: str = ""
) -> tuple[Formula, tuple[str, ...]]:
    """A family about named entities; `kind` stands before the list ('the elements')."""
    listed = f"{kind} {_LISTS[formula.count]}".strip()
    return formula, _put(frames, formula.terms[0][0], listed)


_TRAINED: Mapping[str, tuple[Formula, tuple[str, ...]]] = {
    "population_total": _of_each(_TOTAL, of_each("country", 2, ("population",), TOTAL)),
    "area_total_of_three": _of_each(_TOTAL, of_each("country", 3, ("area",), TOTAL)),
    "atomic_number_total": _of_each(
        _TOTAL, of_each("element", 4, ("number",), TOTAL), "the elements"
    ),
    "city_population_total": _of_each(
        _TOTAL, of_each("city", 2, ("population",), TOTAL), "the cities"
    ),
    "population_gap": _of_each(_GAP, of_each("country", 2, ("population",), GAP)),
    "discovery_gap": _of_each(_GAP, of_each("element", 2, ("year",), GAP), "the elements"),
    "area_times": _of_each(_TIMES, of_each("country", 2, ("area",), TIMES)),
    "mean_population_of_three": _of_each(_MEAN, of_each("country", 3, ("population",), MEAN)),
    "mean_elevation_of_four": _of_each(_MEAN, of_each("country", 4, ("elevation",), MEAN)),
    "neighbour_count_total": _of_each(_TOTAL, of_each("country", 5, ("neighbour_count",), TOTAL)),
    "density": (of_each("country", 1, ("population", "area"), DENSITY), _DENSITY),
    "capital_share": (of_capitals(1, SHARE, home=True), _SHARE),
    "neighbours_population": (
        of_neighbours("population", TOTAL),
        _put(_TOTAL, "population", f"all {_AROUND}"),
    ),
    "large_countries": _of_each(_ABOVE, of_each("country", 4, ("population",), ABOVE)),
}
_HELD_OUT: Mapping[str, tuple[Formula, tuple[str, ...]]] = {
    "population_times": _of_each(_TIMES, of_each("country", 2, ("population",), TIMES)),
    "density_gap": (of_each("country", 2, ("population", "area"), DENSITY_GAP), _DENSITY_GAP),
    "neighbours_mean_area": (
        of_neighbours("area", MEAN),
        _put(_MEAN, "area", f"all {_AROUND}"),
    ),
    "discovery_span_of_three": _of_each(
        _SPAN, of_each("element", 3, ("year",), SPAN), "the elements"
    ),
    "capital_population_total": (
        of_capitals(2, TOTAL),
        _put(_TOTAL, "population", "the capitals of {first} and {second}"),
    ),
}

CODE_FAMILIES: Mapping[str, Family] = {
    name: Family(name, formula, name in _HELD_OUT)
    for name, (formula, _) in {**_TRAINED, **_HELD_OUT}.items()
}
CODE_PHRASINGS: Mapping[str, tuple[str, ...]] = {
    name: phrasings for name, (_, phrasings) in {**_TRAINED, **_HELD_OUT}.items()
}
