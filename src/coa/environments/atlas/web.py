"""The set `atlas-web`: questions over the Atlas as a web site.

A search shows one passage of each page. These questions need several passages of a page, or pages
that only another page names: one search for every fact is the long way, and opening pages, several
at once, the short one. Families are made of a few shapes and frames: a frame is a way to put any
question of its shape.
"""

from __future__ import annotations

from collections.abc import Mapping

from coa.environments.atlas.families import Family
from coa.environments.atlas.inquiries import Choice, Kin, Tally, Trail
from coa.environments.atlas.phrasings import filled

_CHOICE = (
    "What is the ASK of {first} or {second}, whichever is MORE?",
    "Of {first} and {second}, one is MORE. What is its ASK?",
    "Find out which of {first} and {second} is MORE, and give its ASK.",
    "Tell me the ASK of whichever is MORE: {first} or {second}.",
    "Take the country that is MORE, {first} or {second}. What is its ASK?",
    "Compare {first} with {second}. What is the ASK of the one that is MORE?",
    "I need the ASK of the country that is MORE: {first} or {second}.",
    "Whichever of {first} and {second} is MORE, name its ASK.",
)
_TALLY = (
    "How many land neighbours of HOME DO?",
    "Of the land neighbours of HOME, how many DO?",
    "Count the land neighbours of HOME that DO.",
    "What is the number of land neighbours of HOME that DO?",
    "HOME has land neighbours. How many of them DO?",
    "How many countries that border HOME by land DO?",
    "Look at every land neighbour of HOME: how many DO?",
    "Among the countries with a land border to HOME, how many DO?",
)
_KIN = (
    "Which land neighbour of {country} has the same ASK?",
    "Which country borders {country} by land and has the same ASK?",
    "Name the land neighbour of {country} that has the same ASK.",
    "Among the land neighbours of {country}, which one shares its ASK?",
    "One land neighbour of {country} has the same ASK. Which one is it?",
    "Find the land neighbour of {country} with the same ASK.",
    "The ASK of {country} is also the ASK of which land neighbour?",
    "Across the land borders of {country}, which neighbour has the same ASK?",
)
_TRAIL = (
    "What is GOAL of HOME?",
    "Find GOAL of HOME.",
    "Name GOAL of HOME.",
    "Consider HOME: what is GOAL?",
    "I would like to know GOAL of HOME.",
    "Tell me GOAL of HOME.",
    "Look up GOAL of HOME.",
    "Starting from HOME, find GOAL.",
)

_MORE = {
    ("population", False): "more populous",
    ("population", True): "less populous",
    ("area", False): "larger in area",
    ("area", True): "smaller in area",
}
_ASK = {
    "capital": "capital",
    "currency": "currency",
    "languages": "official language",
    "calling_code": "calling code",
    "summit": "highest point",
}
_DO = {
    ("population", "more"): "have more people than it has",
    ("area", "more"): "are larger in area than it is",
    ("area", "less"): "are smaller in area than it is",
    ("currency", "same"): "use the same currency as it does",
}
_HOME = {
    "country": "the country where the city of {city} lies",
    "capital_of": "the country whose capital is {city}",
}
_GOAL = {
    ("summit",): "the highest point",
    ("domain",): "the internet domain",
    ("capital", "time_zone"): "the time zone of the capital",
    ("capital", "population"): "the population of the capital",
}


def _phrasings(shape: Choice | Tally | Kin | Trail) -> tuple[str, ...]:
    if isinstance(shape, Choice):
        return filled(_CHOICE, ASK=_ASK[shape.ask], MORE=_MORE[shape.by, shape.smaller])
    if isinstance(shape, Tally):
        home = _HOME["capital_of"] if shape.capital else "{country}"
        return filled(_TALLY, HOME=home, DO=_DO[shape.by, shape.than])
    if isinstance(shape, Kin):
        return filled(_KIN, ASK=_ASK[shape.by])
    return filled(_TRAIL, GOAL=_GOAL[shape.relations[1:]], HOME=_HOME[shape.relations[0]])


_TRAINED: Mapping[str, Choice | Tally | Kin | Trail] = {
    "capital_of_more_populous": Choice("population", "capital"),
    "currency_of_more_populous": Choice("population", "currency"),
    "language_of_less_populous": Choice("population", "languages", smaller=True),
    "summit_of_larger": Choice("area", "summit"),
    "currency_of_larger": Choice("area", "currency"),
    "capital_of_smaller": Choice("area", "capital", smaller=True),
    "calling_code_of_smaller": Choice("area", "calling_code", smaller=True),
    "more_populous_neighbours": Tally("population"),
    "smaller_neighbours": Tally("area", "less"),
    "language_kin": Kin("languages"),
    "city_summit": Trail("city", ("country", "summit")),
    "city_capital_time_zone": Trail("city", ("country", "capital", "time_zone")),
    "capital_domain": Trail("city", ("capital_of", "domain")),
}
_HELD_OUT: Mapping[str, Choice | Tally | Kin | Trail] = {
    "calling_code_of_more_populous": Choice("population", "calling_code"),
    "capital_of_larger": Choice("area", "capital"),
    "capital_larger_neighbours": Tally("area", capital=True),
    "currency_neighbours": Tally("currency", "same"),
    "city_capital_population": Trail("city", ("country", "capital", "population")),
}

WEB_FAMILIES: Mapping[str, Family] = {
    name: Family(name, shape, name in _HELD_OUT)
    for name, shape in {**_TRAINED, **_HELD_OUT}.items()
}
WEB_PHRASINGS: Mapping[str, tuple[str, ...]] = {
    name: _phrasings(shape) for name, shape in {**_TRAINED, **_HELD_OUT}.items()
}
