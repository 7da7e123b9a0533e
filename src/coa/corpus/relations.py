"""The relations of the Atlas: what a page can say about a subject, and how to ask for it.

Values are strings as the pages print them; `value_of` reads them from a World, `query_for` is the
search that finds the passage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coa.corpus.world import Country, World

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
