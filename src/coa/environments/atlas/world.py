"""The facts of the Atlas as one frozen value: entities by kind and name.

World 0 is the real world, read from the embedded file. World K > 0 has the same shape and no fact
in common with it: a model that memorised the real world fails there, one that reads succeeds.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from coa.errors import UsageError


def _shipped(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


WORDS: Mapping[str, Any] = tomllib.loads(_shipped("words.toml"))
"""How questions are put, how pages state facts, and how experts speak of them."""


@dataclass(frozen=True, slots=True)
class Country:
    name: str
    kind: str
    """'country' or 'territory'."""
    article: bool
    """Whether a sentence says 'the' before the name."""
    continent: str
    region: str
    capital: str
    population: int
    area: int
    languages: tuple[str, ...]
    currency: str
    calling: str
    domain: str
    summit: str
    """Name of the highest point, or '' when the sources give none."""
    elevation: int
    borders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class City:
    name: str
    country: str
    population: int
    time_zone: str
    latitude: int
    shares_name: bool
    """Whether a place elsewhere has the same name, so that the name alone is ambiguous."""
    is_capital: bool


@dataclass(frozen=True, slots=True)
class Currency:
    name: str
    code: str
    decimals: int


@dataclass(frozen=True, slots=True)
class Language:
    name: str
    code: str
    family: str


@dataclass(frozen=True, slots=True)
class Element:
    name: str
    symbol: str
    number: int
    mass: float
    period: int
    group: int
    """0 for the elements outside the numbered groups."""
    category: str
    year: int
    """Year of discovery, 0 when it is not known."""
    place: str
    """Country of discovery, '' when it is not one country."""


@dataclass(frozen=True, eq=False)
class World:
    """All entities by name; the reverse relations are derived from them."""

    seed: int
    countries: Mapping[str, Country]
    cities: Mapping[str, City]
    currencies: Mapping[str, Currency]
    languages: Mapping[str, Language]
    elements: Mapping[str, Element]

    @cached_property
    def currency_users(self) -> Mapping[str, tuple[str, ...]]:
        return _group((country.currency, country.name) for country in self.countries.values())

    @cached_property
    def language_users(self) -> Mapping[str, tuple[str, ...]]:
        return _group((n, c.name) for c in self.countries.values() for n in c.languages)

    @cached_property
    def continents(self) -> Mapping[str, tuple[str, ...]]:
        return _group((country.continent, country.name) for country in self.countries.values())

    @cached_property
    def cities_of(self) -> Mapping[str, tuple[str, ...]]:
        return _group((city.country, city.name) for city in self.cities.values())


def _group(pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return {key: tuple(sorted(members)) for key, members in sorted(groups.items())}


@cache
def load_world(seed: int = 0) -> World:
    """The world of this seed: 0 is the real one, every other seed an invented one."""
    if seed < 0:
        raise UsageError(f"world seed {seed!r}: expected 0 (the real world) or a positive number.")
    if seed == 0:
        return _real_world()
    from coa.environments.atlas.counterfactual import invent_world

    return invent_world(_real_world(), seed)


@cache
def _real_world() -> World:
    facts: dict[str, list[Any]] = json.loads(_shipped("atlas_facts.json"))
    countries = {
        row["name"]: Country(
            **row | {"languages": tuple(row["languages"]), "borders": tuple(row["borders"])}
        )
        for row in facts["countries"]
    }
    capitals = {country.capital for country in countries.values()}
    return World(
        seed=0,
        countries=countries,
        cities={
            name: City(name, country, population, zone, latitude, bool(shared), name in capitals)
            for name, country, population, zone, latitude, shared in facts["cities"]
        },
        currencies={row["name"]: Currency(**row) for row in facts["currencies"]},
        languages={row["name"]: Language(**row) for row in facts["languages"]},
        elements={row["name"]: Element(**row) for row in facts["elements"]},
    )


# ------------------------------------------------------------------------------------------------
# The relations of the Atlas: what a page can say about a subject, and how to ask for it.
#
# Values are strings as the pages print them; `value_of` reads them from a World, `query_for` is
# the search that finds the passage.
# ------------------------------------------------------------------------------------------------


Values = tuple[str, ...]


def number(value: int) -> str:
    """A whole number as pages print it: 1,234,567."""
    return f"{value:,}"


def with_article(world: World, country: str) -> str:
    """The name of a country as a sentence says it: 'the Netherlands', 'France'."""
    known = world.countries.get(country)
    return f"the {country}" if known and known.article else country


@dataclass(frozen=True, slots=True)
class Relation:
    """`subject` and `value` are kinds of entity; `value` is '' when the value is a plain one."""

    name: str
    subject: str
    value: str
    query: str
    of: Callable[[World, str], Values]


def _country(read: Callable[[Country], str | int | Values]) -> Callable[[World, str], Values]:
    def of(world: World, subject: str) -> Values:
        value = read(world.countries[subject])
        if isinstance(value, tuple):
            return value
        if isinstance(value, int):
            return (number(value),)
        return (value,) if value else ()

    return of


def _capital_of(world: World, subject: str) -> Values:
    city = world.cities[subject]
    return (city.country,) if city.is_capital else ()


def _population(world: World, subject: str) -> Values:
    entity = world.countries.get(subject) or world.cities[subject]
    return (number(entity.population),)


def _known(value: str | int) -> Values:
    return (str(value),) if value else ()


_ALL = (
    Relation("capital", "country", "city", "capital of {}", _country(lambda c: c.capital)),
    Relation("continent", "country", "continent", "{} continent", _country(lambda c: c.continent)),
    Relation(
        "region",
        "country",
        "",
        "{} region continent",
        _country(lambda c: c.region * (c.region != c.continent)),
    ),
    Relation("population", "country", "", "population of {}", _population),
    Relation("area", "country", "", "area of {}", _country(lambda c: c.area)),
    Relation(
        "languages",
        "country",
        "language",
        "official language of {}",
        _country(lambda c: c.languages),
    ),
    Relation("currency", "country", "currency", "currency of {}", _country(lambda c: c.currency)),
    Relation(
        "neighbours", "country", "country", "land borders of {}", _country(lambda c: c.borders)
    ),
    Relation(
        "neighbour_count",
        "country",
        "",
        "land borders of {}",
        lambda world, subject: (str(len(world.countries[subject].borders)),),
    ),
    Relation("calling_code", "country", "", "calling code of {}", _country(lambda c: c.calling)),
    Relation("domain", "country", "", "internet domain of {}", _country(lambda c: c.domain)),
    Relation("summit", "country", "", "highest point of {}", _country(lambda c: c.summit)),
    Relation(
        "elevation", "country", "", "highest point of {}", _country(lambda c: c.elevation or "")
    ),
    Relation("country", "city", "country", "city of {}", lambda w, s: (w.cities[s].country,)),
    Relation("capital_of", "city", "country", "{} capital", _capital_of),
    Relation("time_zone", "city", "", "time zone of {}", lambda w, s: (w.cities[s].time_zone,)),
    Relation(
        "currency_code",
        "currency",
        "",
        "ISO code of the {}",
        lambda w, s: (w.currencies[s].code,),
    ),
    Relation(
        "users",
        "currency",
        "country",
        "{} currency countries",
        lambda w, s: w.currency_users[s],
    ),
    Relation(
        "language_family",
        "language",
        "",
        "family of the language {}",
        lambda w, s: (w.languages[s].family,),
    ),
    Relation("symbol", "element", "", "{} symbol", lambda w, s: (w.elements[s].symbol,)),
    Relation(
        "number", "element", "", "{} atomic number", lambda w, s: (str(w.elements[s].number),)
    ),
    Relation("year", "element", "", "{} discovered", lambda w, s: _known(w.elements[s].year)),
    Relation(
        "place", "element", "country", "{} discovered", lambda w, s: _known(w.elements[s].place)
    ),
)

RELATIONS: Mapping[str, Relation] = {relation.name: relation for relation in _ALL}


def values_of(world: World, relation: str, subject: str) -> Values:
    """The values of a relation as the pages print them; empty when there is none."""
    return RELATIONS[relation].of(world, subject)


def query_for(relation: str, subject: str) -> str:
    """The search that finds the passage which states this relation of this subject."""
    return RELATIONS[relation].query.format(subject)
