"""Invent a world: the shape of the real one, other names, facts dealt out anew.

Every list of facts (populations, currencies, borders ...) is kept whole and given to other owners,
so that an invented world is as hard to read as the real one. What must agree is dealt together: a
country's cities come with its population, its borders with its continent, and an element's period
with its number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from random import Random
from typing import TypeVar

from coa.environments.atlas.world import City, Country, Currency, Element, Language, World

T = TypeVar("T")

_ONSETS = "b br d dr f g gl h j k kr l m n p pl r s sk t tr v z".split()
_VOWELS = "a e i o u".split()
_CODAS = ["", "", "", "n", "l", "r", "m", "k", "x", "th"]
_COMPASS = ("Northern", "Southern", "Eastern", "Western", "Central")
_ORDINARY_WORDS = frozenset(
    "about animal area banal basal begin berlin bikini bonus canal cabin capital central china "
    "city colon dinar divan dollar drama element euro final focus franc global habit hotel "
    "human humor koran label legal level local logic lunar major mantra manual marathon maximum "
    "medal metal minor minus model modal moral motel motor mural nasal natal naval novel opal "
    "panel pedal penal period plural pupil rebel region robin rural sedan siren solar sonar talon "
    "tenor total trial tribal trivial tulip turban valor venal villa vital vixen zonal".split()
)


def invent_world(real: World, seed: int) -> World:
    """The invented world of this seed. Same seed, same world, in any process."""
    names = _names(real, Random(f"atlas names {seed}"))
    rng = Random(f"atlas facts {seed}")
    renamed = {name: next(names) for name in real.countries}
    continents = {name: next(names) for name in real.continents}
    currencies = {name: next(names).lower() for name in real.currencies}
    languages = {name: next(names) for name in real.languages}

    old = list(real.countries.values())
    homes = dict(zip(renamed, _dealt(list(real.countries), rng), strict=True))
    cities = _deal_cities(real, homes, renamed, names, rng)
    capital = {city.country: city.name for city in cities if city.is_capital}
    areas = _dealt([country.area for country in old], rng)
    moneys = _dealt([country.currency for country in old], rng)
    tongues = _dealt([country.languages for country in old], rng)
    callings = _dealt([country.calling for country in old], rng)
    summits = _dealt([country.elevation for country in old], rng)
    domains = _codes([renamed[country.name] for country in old], 2)
    countries = [
        Country(
            name=renamed[country.name],
            kind="country",
            article=False,
            continent=continents[country.continent],
            region=_region(country, continents),
            capital=capital[renamed[country.name]],
            population=real.countries[homes[country.name]].population,
            area=areas[place],
            languages=tuple(sorted(languages[name] for name in tongues[place])),
            currency=currencies[moneys[place]],
            calling=callings[place],
            domain=f".{domains[place].lower()}",
            summit=f"Mount {next(names)}" if summits[place] else "",
            elevation=summits[place],
            borders=tuple(sorted(renamed[name] for name in country.borders)),
        )
        for place, country in enumerate(old)
    ]
    return World(
        seed=seed,
        countries={country.name: country for country in sorted(countries, key=lambda c: c.name)},
        cities={city.name: city for city in sorted(cities, key=lambda c: c.name)},
        currencies=_deal_currencies(real, currencies, rng),
        languages=_deal_languages(real, languages, rng),
        elements=_deal_elements(real, renamed, names, rng),
    )


def _dealt(values: Sequence[T], rng: Random) -> list[T]:
    return rng.sample(values, len(values))


def _region(country: Country, continents: dict[str, str]) -> str:
    direction = _COMPASS[sum(map(ord, country.region)) % len(_COMPASS)]
    return f"{direction} {continents[country.continent]}"


def _deal_cities(
    real: World, homes: dict[str, str], renamed: dict[str, str], names: Iterator[str], rng: Random
) -> list[City]:
    found = []
    for country, home in homes.items():
        group = [real.cities[name] for name in real.cities_of[home]]
        populations = _dealt([city.population for city in group], rng)
        capital = rng.randrange(len(group))
        for place, city in enumerate(group):
            found.append(
                replace(
                    city,
                    name=next(names),
                    country=renamed[country],
                    population=populations[place],
                    shares_name=False,
                    is_capital=place == capital,
                )
            )
    return found


def _deal_currencies(real: World, names: dict[str, str], rng: Random) -> dict[str, Currency]:
    invented = sorted(names.values())
    decimals = _dealt([currency.decimals for currency in real.currencies.values()], rng)
    codes = _codes(invented, 3)
    return {n: Currency(n, codes[i], decimals[i]) for i, n in enumerate(invented)}


def _deal_languages(real: World, names: dict[str, str], rng: Random) -> dict[str, Language]:
    invented = sorted(names.values())
    families = _dealt([language.family for language in real.languages.values()], rng)
    codes = _codes(invented, 2)
    return {n: Language(n, codes[i].lower(), families[i]) for i, n in enumerate(invented)}


def _deal_elements(
    real: World, renamed: dict[str, str], names: Iterator[str], rng: Random
) -> dict[str, Element]:
    old = list(real.elements.values())
    stems = dict.fromkeys(next(names).rstrip("aeiou") for _ in range(2 * len(old)))
    invented = [f"{stem}ium" for stem in stems][: len(old)]
    symbols = _codes(invented, 2)
    found_when = _dealt([(element.year, element.place) for element in old], rng)
    elements = {}
    for place, element in enumerate(old):
        year, country = found_when[place]
        elements[invented[place]] = replace(
            element,
            name=invented[place],
            symbol=symbols[place].capitalize(),
            year=year,
            place=renamed[country] if country else "",
        )
    return elements


def _codes(names: Sequence[str], length: int) -> list[str]:
    """A distinct upper-case code for each name, made of its own letters where they suffice."""
    codes: dict[str, None] = {}
    for name in names:
        letters = name.upper()
        own = (
            letters[0] + letters[i] + (letters[j] if length == 3 else "")
            for i in range(1, len(letters))
            for j in (range(i + 1, len(letters)) if length == 3 else (0,))
        )
        every = (
            first + second + ("X" if length == 3 else "")
            for first in letters[0] + "QWXYABCDEFGHIJKLMNOPRSTUVZ"
            for second in "XYZQWABCDEFGHIJKLMNOPRSTUV"
        )
        code = next((code for code in chain(own, every) if code not in codes), "")
        assert code, f"no code of length {length} left for {name!r}"
        codes[code] = None
    return list(codes)


def _names(real: World, rng: Random) -> Iterator[str]:
    """Pronounceable names of two or three syllables, no two alike and none a real one."""
    real_names = (
        set(real.countries) | set(real.cities) | set(real.currencies) | set(real.languages)
    ) | set(real.elements)
    taken = {word for name in real_names for word in name.lower().split()} | _ORDINARY_WORDS
    while True:
        syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 3)))]
        name = "".join(syllables) + rng.choice(_CODAS)
        if 5 <= len(name) <= 8 and name not in taken:
            taken.add(name)
            yield name.capitalize()
