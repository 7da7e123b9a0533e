"""The task sets over the Atlas, by name: the same world, splits and rules, other questions.

* `atlas-mhqa`: look-ups of one fact after another.
* `atlas-reworded`: its trained questions in other words, to train on.
* `atlas-wide`: more compositions of relations than `atlas-mhqa` has, to train on. A model that
  knows two dozen kinds of questions learns the kinds; one that knows many learns to put look-ups
  together. Goals are crossed with ways to reach a country, so this set has the compositions that
  `atlas-mhqa` leaves out, except those that it and `atlas-web` hold out: these occur nowhere.
* `atlas-web`: a search shows one passage of each page. These questions need several passages of a
  page, or pages that only another page names: one search for every fact is the long way, and
  opening pages, several at once, the short one.
* `atlas-code`: two to five look-ups and then a calculation.

The words of questions stand in `words.toml`. `understand` traces a question back to its family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from coa.environments import ATLAS_CODE, ATLAS_REWORDED, ATLAS_WEB, ATLAS_WIDE, DEFAULT_SET
from coa.environments.atlas.families import (
    FAMILIES,
    Catalogue,
    Comparison,
    Difference,
    Family,
    Inquiry,
    LookupChain,
    Superlative,
)
from coa.environments.atlas.inquiries import (
    ABOVE,
    DENSITY,
    DENSITY_GAP,
    GAP,
    MEAN,
    SHARE,
    SPAN,
    TIMES,
    TOTAL,
    Choice,
    Formula,
    Kin,
    Tally,
    of_capitals,
    of_each,
    of_neighbours,
)
from coa.environments.atlas.world import WORDS

HELD_OUT_EVERY = 4
Phrasings = tuple[str, ...]


def is_held_out(phrasing: int) -> bool:
    return phrasing % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def _texts(named: Mapping[str, list[str]]) -> dict[str, Phrasings]:
    return {name: tuple(texts) for name, texts in named.items()}


def _filled(frames: Phrasings, **words: str) -> Phrasings:
    """The frames of several families with their words in capitals replaced."""
    for word, text in words.items():
        frames = tuple(frame.replace(word, text) for frame in frames)
    return frames


_WEB = _texts(WORDS["frames"]["web"])
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


def _web_phrasings(shape: Choice | Tally | Kin | LookupChain) -> Phrasings:
    if isinstance(shape, Choice):
        return _filled(_WEB["choice"], ASK=_ASK[shape.ask], MORE=_MORE[shape.by, shape.smaller])
    if isinstance(shape, Tally):
        home = _HOME["capital_of"] if shape.capital else "{country}"
        return _filled(_WEB["tally"], HOME=home, DO=_DO[shape.by, shape.than])
    if isinstance(shape, Kin):
        return _filled(_WEB["kin"], ASK=_ASK[shape.by])
    return _filled(_WEB["trail"], GOAL=_GOAL[shape.relations[1:]], HOME=_HOME[shape.relations[0]])


_WEB_TRAINED: Mapping[str, Choice | Tally | Kin | LookupChain] = {
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
    "city_summit": LookupChain("city", ("country", "summit")),
    "city_capital_time_zone": LookupChain("city", ("country", "capital", "time_zone")),
    "capital_domain": LookupChain("city", ("capital_of", "domain")),
}
_WEB_HELD_OUT: Mapping[str, Choice | Tally | Kin | LookupChain] = {
    "calling_code_of_more_populous": Choice("population", "calling_code"),
    "capital_of_larger": Choice("area", "capital"),
    "capital_larger_neighbours": Tally("area", capital=True),
    "currency_neighbours": Tally("currency", "same"),
    "city_capital_population": LookupChain("city", ("country", "capital", "population")),
}

_WIDE = _texts(WORDS["frames"]["wide"])
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
_LIGHT = 15
"""Small numbers, of which any two elements have few."""


def _wide_families() -> dict[str, tuple[Inquiry, Phrasings]]:
    made: dict[str, tuple[Inquiry, Phrasings]] = {}
    for start, (entity, way, goals) in _STARTS.items():
        for goal in goals:
            frames = _filled(_WIDE[start], GOAL=_CALLED[goal], SUBJECT=_NAMED[entity])
            made[f"{start}_{goal}"] = LookupChain(entity, (*way, *_GOALS[goal])), frames
    for entity, relation in (("city", "population"), ("element", "number"), ("element", "year")):
        frames = _filled(_WIDE["country"], GOAL=_CALLED[relation], SUBJECT=_NAMED[entity])
        made[f"{entity}_own_{relation}"] = LookupChain(entity, (relation,)), frames
    for name, (shape, most) in _COMPARED.items():
        frames = _filled(_WIDE["pair"], KINDS=_KINDS[shape.entity], KIND=shape.entity, MOST=most)
        made[name] = shape, frames
    three = Comparison("country", ("area",), names=("first", "second", "third"))
    made["largest_of_three"] = three, _WIDE["largest_of_three"]
    for name, beside, most in (
        ("largest_neighbour", Superlative("area"), "largest area"),
        ("least_populous_neighbour", Superlative("population", smaller=True), "fewest people"),
    ):
        made[name] = beside, _filled(_WIDE["neighbours"], MOST=most)
    light = Difference("element", "number", below=_LIGHT)
    made["light_element_gap"] = light, _WIDE["light_gap"]
    made["discovery_gap"] = Difference("element", "year"), _WIDE["years"]
    return made


_CODE = _texts(WORDS["frames"]["code"])
_LISTS = (
    "",
    "{country}",
    "{first} and {second}",
    "{first}, {second}, and {third}",
    "{first}, {second}, {third}, and {fourth}",
    "{first}, {second}, {third}, {fourth}, and {fifth}",
)
_AROUND = "land neighbours of {country}"
_NOUNS = {
    "population": ("population", "populations"),
    "area": ("area in square kilometres", "areas in square kilometres"),
    "neighbour_count": ("number of land neighbours", "numbers of land neighbours"),
    "elevation": ("height of the highest point", "heights of the highest points in metres"),
    "number": ("atomic number", "atomic numbers"),
    "year": ("year of discovery", "years of discovery"),
}
"""What a relation's numbers are called: one of them, and several."""


def _put(frames: str, relation: str, everything: str) -> Phrasings:
    one, several = _NOUNS[relation]
    return _filled(_CODE[frames], NUMBERS=several, NUMBER=one, ALL=everything)


def _of_each(frames: str, formula: Formula, kind: str = "") -> tuple[Formula, Phrasings]:
    """A family about named entities; `kind` stands before the list ('the elements')."""
    listed = f"{kind} {_LISTS[formula.count]}".strip()
    return formula, _put(frames, formula.terms[0][0], listed)


_CODE_TRAINED: Mapping[str, tuple[Formula, Phrasings]] = {
    "population_total": _of_each("total", of_each("country", 2, ("population",), TOTAL)),
    "area_total_of_three": _of_each("total", of_each("country", 3, ("area",), TOTAL)),
    "atomic_number_total": _of_each(
        "total", of_each("element", 4, ("number",), TOTAL), "the elements"
    ),
    "city_population_total": _of_each(
        "total", of_each("city", 2, ("population",), TOTAL), "the cities"
    ),
    "population_gap": _of_each("gap", of_each("country", 2, ("population",), GAP)),
    "discovery_gap": _of_each("gap", of_each("element", 2, ("year",), GAP), "the elements"),
    "area_times": _of_each("times", of_each("country", 2, ("area",), TIMES)),
    "mean_population_of_three": _of_each("mean", of_each("country", 3, ("population",), MEAN)),
    "mean_elevation_of_four": _of_each("mean", of_each("country", 4, ("elevation",), MEAN)),
    "neighbour_count_total": _of_each("total", of_each("country", 5, ("neighbour_count",), TOTAL)),
    "density": (of_each("country", 1, ("population", "area"), DENSITY), _CODE["density"]),
    "capital_share": (of_capitals(1, SHARE, home=True), _CODE["share"]),
    "neighbours_population": (
        of_neighbours("population", TOTAL),
        _put("total", "population", f"all {_AROUND}"),
    ),
    "large_countries": _of_each("above", of_each("country", 4, ("population",), ABOVE)),
}
_CODE_HELD_OUT: Mapping[str, tuple[Formula, Phrasings]] = {
    "population_times": _of_each("times", of_each("country", 2, ("population",), TIMES)),
    "density_gap": (
        of_each("country", 2, ("population", "area"), DENSITY_GAP),
        _CODE["density_gap"],
    ),
    "neighbours_mean_area": (
        of_neighbours("area", MEAN),
        _put("mean", "area", f"all {_AROUND}"),
    ),
    "discovery_span_of_three": _of_each(
        "span", of_each("element", 3, ("year",), SPAN), "the elements"
    ),
    "capital_population_total": (
        of_capitals(2, TOTAL),
        _put("total", "population", "the capitals of {first} and {second}"),
    ),
}


_Put = Mapping[str, tuple[Inquiry, Phrasings]]
"""By name what is asked and the ways in which it is put."""


def _catalogue(name: str, trained: _Put, held_out: _Put | None = None) -> Catalogue:
    every = {**trained, **(held_out or {})}
    return Catalogue(
        name,
        {each: Family(each, shape, each not in trained) for each, (shape, _) in every.items()},
        {each: phrasings for each, (_, phrasings) in every.items()},
    )


def _on_the_web(shapes: Mapping[str, Choice | Tally | Kin | LookupChain]) -> _Put:
    return {name: (shape, _web_phrasings(shape)) for name, shape in shapes.items()}


_PHRASINGS, _REWORDINGS = _texts(WORDS["phrasings"]), _texts(WORDS["rewordings"])

MHQA = Catalogue(DEFAULT_SET, FAMILIES, _PHRASINGS, most=3000)
REWORDED = Catalogue(
    ATLAS_REWORDED, {name: FAMILIES[name] for name in _REWORDINGS}, _REWORDINGS, most=3000
)
WIDE = _catalogue(ATLAS_WIDE, _wide_families())
WEB = _catalogue(ATLAS_WEB, _on_the_web(_WEB_TRAINED), _on_the_web(_WEB_HELD_OUT))
CODE = _catalogue(ATLAS_CODE, _CODE_TRAINED, _CODE_HELD_OUT)
CATALOGUES: Mapping[str, Catalogue] = {
    each.name: each for each in (MHQA, REWORDED, WIDE, WEB, CODE)
}

LONGEST = 1000
"""Characters of a question that is looked at: a longer one is not ours."""
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Understanding:
    family: str
    slots: Mapping[str, str]
    phrasing: int
    meaning: Family
    """The family as a value: its shape says what to look up and what follows."""


def understand(question: str, catalogue: Catalogue = MHQA) -> Understanding | None:
    """The family and slots of a question, or None when it is not one of the catalogue's.

    The phrasings become patterns. A question may fit several ('the capital of {country}' also fits
    'the capital of the country where X is located'); the one with the most fixed words is meant.
    """
    text = " ".join(question.split())
    if len(text) > LONGEST:
        return None
    for pattern, name, phrasing in _patterns(catalogue):
        match = pattern.fullmatch(text)
        if match:
            family = catalogue.families[name]
            kinds = family.shape.slots
            slots = {slot: _bare(kinds[slot], name) for slot, name in match.groupdict().items()}
            return Understanding(family.name, slots, phrasing, family)
    return None


def _bare(kind: str, name: str) -> str:
    return re.sub(r"^[Tt]he ", "", name) if kind == "country" else name


@cache
def _patterns(catalogue: Catalogue) -> tuple[tuple[re.Pattern[str], str, int], ...]:
    found = []
    for family, templates in catalogue.phrasings.items():
        for phrasing, template in enumerate(templates):
            parts = _SLOT.split(template)
            fixed = sum(len(part) for part in parts[::2])
            # No name holds a comma, so a list of five can be split in one way only.
            parts[1::2] = [rf"(?P<{slot}>[^\s,][^,]*?)" for slot in parts[1::2]]
            parts[::2] = [re.escape(part) for part in parts[::2]]
            found.append((-fixed, family, phrasing, re.compile("".join(parts), re.IGNORECASE)))
    found.sort(key=lambda row: row[:3])
    return tuple((pattern, family, phrasing) for _, family, phrasing, pattern in found)
