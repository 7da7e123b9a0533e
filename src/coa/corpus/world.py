"""The facts of the Atlas as one frozen value: entities by kind and name.

World 0 is the real world, read from the embedded file. World K > 0 has the same shape and no fact
in common with it: a model that memorised the real world fails there, one that reads succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from coa.errors import UsageError


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
    from coa.corpus.counterfactual import invent_world

    return invent_world(_real_world(), seed)


@cache
def _real_world() -> World:
    text = files("coa.corpus").joinpath("atlas_facts.json").read_text(encoding="utf-8")
    facts: dict[str, list[Any]] = json.loads(text)
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
