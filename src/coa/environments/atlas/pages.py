"""Atlas, the embedded encyclopedia: a World written out as linked pages of short passages.

A passage has one topic and at most a few dozen words, because a small model is trained on what a
search returns and every token costs time. The wording of a topic varies from subject to subject by
a checksum of the name, so that reading is more than one fixed pattern; lists too long for a passage
are split into numbered parts, so that each part is true by itself.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from coa.corpus.page import Page, Passage
from coa.environments.atlas.world import (
    City,
    Country,
    Currency,
    Element,
    Language,
    World,
    load_world,
    number,
    with_article,
)

Variant = tuple[str, ...]

TOPICS: Mapping[str, tuple[Variant, ...]] = {
    "country place": (
        (
            "{subject} is a {kind} in {region}, on the continent of {continent}.",
            "The capital of {subject} is {capital}.",
        ),
        (
            "{subject} lies in {region}, which is a part of the continent of {continent}.",
            "The capital city of {subject} is {capital}.",
        ),
        (
            "{capital} is the capital of {subject}.",
            "{subject} belongs to the continent of {continent} and to the region of {region}.",
        ),
    ),
    "country place without region": (
        (
            "{subject} is a {kind} on the continent of {continent}.",
            "The capital of {subject} is {capital}.",
        ),
        (
            "{subject} lies on the continent of {continent}.",
            "The capital city of {subject} is {capital}.",
        ),
        (
            "{capital} is the capital of {subject}.",
            "{subject} is a part of the continent of {continent}.",
        ),
    ),
    "country size": (
        (
            "The population of {subject} is about {population}.",
            "The area of {subject} is {area} square kilometres.",
        ),
        (
            "{subject} has a population of about {population} and an area of {area} square "
            "kilometres.",
        ),
        (
            "{subject} has an area of {area} square kilometres.",
            "About {population} people make up the population of {subject}.",
        ),
    ),
    "country language": (
        (
            "The official language of {subject} is {languages}.",
            "The currency of {subject} is the {currency}.",
        ),
        ("{subject} has one official language, {languages}, and its currency is the {currency}.",),
        (
            "The {currency} is the currency of {subject}.",
            "{languages} is the only official language of {subject}.",
        ),
    ),
    "country languages": (
        (
            "The official languages of {subject} are {languages}.",
            "The currency of {subject} is the {currency}.",
        ),
        (
            "{subject} has these official languages: {languages}.",
            "The currency used in {subject} is the {currency}.",
        ),
        (
            "The {currency} is the currency of {subject}.",
            "The official languages in {subject} are {languages}.",
        ),
    ),
    "country borders": (
        ("{subject} has land borders with {neighbour_count} neighbours: {neighbours}.",),
        ("{subject} has {neighbour_count} neighbours along its land borders: {neighbours}.",),
        ("The land borders of {subject} touch {neighbour_count} neighbours: {neighbours}.",),
    ),
    "country border": (
        ("{subject} has a land border with {neighbour_count} neighbour: {neighbours}.",),
        ("{subject} has {neighbour_count} neighbour along its land borders: {neighbours}.",),
        ("The land borders of {subject} touch {neighbour_count} neighbour: {neighbours}.",),
    ),
    "country without borders": (
        ("{subject} has no land borders and {neighbour_count} land neighbours.",),
        ("{subject} has {neighbour_count} neighbours by land, as it has no land borders.",),
    ),
    "country codes": (
        ("The calling code of {subject} is {calling_code}, and its internet domain is {domain}.",),
        (
            "Phone numbers in {subject} have the calling code {calling_code}.",
            "The internet domain of {subject} is {domain}.",
        ),
        ("{subject} has the calling code {calling_code} and the internet domain {domain}.",),
    ),
    "country summit": (
        ("The highest point of {subject} is {summit}, at {elevation} metres.",),
        ("At {elevation} metres, {summit} is the highest point of {subject}.",),
        ("{summit}, the highest point of {subject}, rises to {elevation} metres.",),
    ),
    "city place": (
        ("{subject} is a city in {country}.",),
        ("The city of {subject} lies in {country}.",),
        ("{subject} is a city of {country}, on the continent of {continent}.",),
    ),
    "capital place": (
        ("{subject} is the capital city of {capital_of}.",),
        ("The city of {subject} lies in {country}.", "{subject} is the capital of {capital_of}."),
        ("The capital city of {capital_of} is {subject}.",),
    ),
    "city size": (
        ("The population of {subject} is about {population}.",),
        ("{subject} has a population of about {population}.",),
        ("About {population} people make up the population of {subject}.",),
    ),
    "city time": (
        ("{subject} lies at {latitude} degrees {hemisphere}, in the time zone {time_zone}.",),
        ("{subject} is in the time zone {time_zone}, at {latitude} degrees {hemisphere}.",),
    ),
    "currency code": (
        ("The {subject} has the ISO code {currency_code} and {decimals} decimal places.",),
        (
            "The ISO code of the {subject} is {currency_code}.",
            "Amounts in the {subject} are written with {decimals} decimal places.",
        ),
        ("{currency_code} is the ISO code of the {subject}, which has {decimals} decimal places.",),
    ),
    "currency user": (("The {subject} is the currency of one country or territory: {users}.",),),
    "currency users": (
        ("The {subject} is the currency of {user_count} countries and territories: {users}.",),
        ("{user_count} countries and territories use the {subject} as their currency: {users}.",),
    ),
    "currency users part": (
        ("Users of the {subject} as currency, part {part} of {parts}: {users}.",),
        ("The {subject} is a currency used in (list {part} of {parts}): {users}.",),
    ),
    "language family": (
        (
            "{subject} is a language of the {language_family} family.",
            "The ISO code of {subject} is {language_code}.",
        ),
        (
            "The {subject} language belongs to the {language_family} family and has the ISO code "
            "{language_code}.",
        ),
        ("{subject}, ISO code {language_code}, is a language of the {language_family} family.",),
    ),
    "language user": (
        ("{subject} is an official language of one country or territory: {users}.",),
    ),
    "language users": (
        ("{subject} is an official language of {user_count} countries and territories: {users}.",),
        ("{user_count} countries and territories have {subject} as official language: {users}.",),
    ),
    "language users part": (
        ("{subject} as an official language, part {part} of {parts}: {users}.",),
        ("{subject} is an official language in (list {part} of {parts}): {users}.",),
    ),
    "element identity": (
        ("{subject} is a chemical element with the symbol {symbol} and atomic number {number}.",),
        ("The chemical symbol of {subject} is {symbol}, and its atomic number is {number}.",),
        ("{subject}, symbol {symbol}, is the chemical element with the atomic number {number}.",),
    ),
    "element table": (
        (
            "{subject} is {category} in period {period}, {group} of the periodic table.",
            "The atomic mass of {subject} is about {mass}.",
        ),
        (
            "In the periodic table, {subject} is {category} in period {period}, {group}.",
            "{subject} has an atomic mass of about {mass}.",
        ),
    ),
    "element discovery": (
        ("{subject} was discovered in {year}, in {place}.",),
        ("{subject} was first discovered in {year}, in {place}.",),
        ("{subject} was discovered in {place} in the year {year}.",),
    ),
    "element year": (
        ("{subject} was discovered in {year}.",),
        ("{subject} was first discovered in the year {year}.",),
    ),
    "element unknown discovery": (
        ("It is not known when {subject} was discovered.",),
        ("The year when {subject} was discovered is not known.",),
    ),
    "continent count": (
        ("The continent of {subject} has {country_count} countries and territories.",),
        ("There are {country_count} countries and territories on the continent of {subject}.",),
    ),
    "continent part": (
        ("Countries and territories of {subject}, list {part} of {parts}: {countries}.",),
    ),
}


SITE = "https://atlas.example"
LIST_PART = 9
"""How many names of a long list one passage holds."""

Slots = Mapping[str, str]
Topic = tuple[str, str, Slots]
"""Section of the page, topic in `TOPICS`, and what fills its slots."""

SECTION_OF = {
    "capital": "place",
    "continent": "place",
    "region": "place",
    "country": "place",
    "capital_of": "place",
    "population": "size",
    "area": "size",
    "languages": "language",
    "currency": "language",
    "neighbours": "borders",
    "neighbour_count": "borders",
    "calling_code": "codes",
    "domain": "codes",
    "summit": "summit",
    "elevation": "summit",
    "time_zone": "time",
    "currency_code": "code",
    "users": "users",
    "language_family": "family",
    "symbol": "identity",
    "number": "identity",
    "year": "discovery",
    "place": "discovery",
}
"""Which section of its subject's page states a relation."""


@cache
def pages(world: World) -> tuple[Page, ...]:
    """All pages of the world's encyclopedia, in a fixed order."""
    return tuple(page for page, _ in _written(world).values())


@cache
def atlas_passages(seed: int = 0) -> tuple[Passage, ...]:
    return tuple(passage for page in pages(load_world(seed)) for passage in page.passages)


def passage_for(world: World, relation: str, subject: str) -> Passage:
    """The passage that states a relation of a subject."""
    _, sections = _written(world)[subject]
    return sections[SECTION_OF[relation]]


@cache
def _written(world: World) -> dict[str, tuple[Page, dict[str, Passage]]]:
    written = {}
    for kind, entities, topics_of in (
        ("country", world.countries, _country_topics),
        ("city", world.cities, _city_topics),
        ("currency", world.currencies, _currency_topics),
        ("language", world.languages, _language_topics),
        ("element", world.elements, _element_topics),
        ("continent", world.continents, _continent_topics),
    ):
        for name in entities:
            assert name not in written, f"two pages called {name!r}"
            written[name] = _page(world, kind, name, topics_of(world, name))
    return written


def title_of(world: World, name: str) -> str:
    """The title of an entity's page."""
    if name in world.languages:
        return f"{name} language"
    return name[0].upper() + name[1:]


def url_of(kind: str, name: str) -> str:
    return f"{SITE}/{kind}/{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"


def _page(
    world: World, kind: str, name: str, topics: Iterator[Topic]
) -> tuple[Page, dict[str, Passage]]:
    title, url = title_of(world, name), url_of(kind, name)
    subject = with_article(world, name) if kind == "country" else name
    passages: list[Passage] = []
    sections: dict[str, Passage] = {}
    for section, topic, slots in topics:
        variants = TOPICS[topic]
        variant = variants[zlib.crc32(f"{topic}/{name}/{section}".encode()) % len(variants)]
        sentences = (sentence.format(subject=subject, **slots) for sentence in variant)
        text = " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
        passages.append(Passage(title, url, text))
        sections[section] = passages[-1]
    return Page(title, url, tuple(passages), tuple(_links(world, kind, name))), sections


def _links(world: World, kind: str, name: str) -> Iterator[str]:
    if kind == "country":
        country = world.countries[name]
        yield url_of("continent", country.continent)
        yield from (url_of("city", city) for city in world.cities_of[name])
        yield from (url_of("language", language) for language in country.languages)
        yield url_of("currency", country.currency)
        yield from (url_of("country", neighbour) for neighbour in country.borders)
        return
    if kind == "city":
        yield url_of("country", world.cities[name].country)
    elif kind == "element":
        place = world.elements[name].place
        yield from [url_of("country", place)] if place else []
    else:
        users = {
            "currency": world.currency_users,
            "language": world.language_users,
            "continent": world.continents,
        }[kind]
        yield from (url_of("country", user) for user in users[name])


def listing(names: Sequence[str]) -> str:
    """'A', 'A and B', 'A, B, and C': no name holds ' and ' or a comma, so it can be split again."""
    if len(names) < 3:
        return " and ".join(names)
    return ", ".join(names[:-1]) + f", and {names[-1]}"


def _countries(world: World, names: Sequence[str]) -> str:
    return listing([with_article(world, name) for name in names])


def _country_topics(world: World, name: str) -> Iterator[Topic]:
    country: Country = world.countries[name]
    slots = {
        "kind": country.kind,
        "region": country.region,
        "continent": country.continent,
        "capital": country.capital,
        "population": number(country.population),
        "area": number(country.area),
        "languages": listing(country.languages),
        "currency": country.currency,
        "neighbour_count": str(len(country.borders)),
        "neighbours": _countries(world, country.borders),
        "calling_code": country.calling,
        "domain": country.domain,
        "summit": country.summit,
        "elevation": number(country.elevation),
    }
    inside = country.region != country.continent
    yield "place", "country place" if inside else "country place without region", slots
    yield "size", "country size", slots
    yield "language", f"country language{'s' * (len(country.languages) > 1)}", slots
    borders = ("without borders", "border")[: len(country.borders) + 1][-1]
    yield "borders", f"country {'borders' if len(country.borders) > 1 else borders}", slots
    yield "codes", "country codes", slots
    if country.summit:
        yield "summit", "country summit", slots


def _city_topics(world: World, name: str) -> Iterator[Topic]:
    city: City = world.cities[name]
    country = with_article(world, city.country)
    slots = {
        "country": country,
        "capital_of": country,
        "continent": world.countries[city.country].continent,
        "population": number(city.population),
        "latitude": str(abs(city.latitude)),
        "hemisphere": "south" if city.latitude < 0 else "north",
        "time_zone": city.time_zone,
    }
    yield "place", "capital place" if city.is_capital else "city place", slots
    yield "size", "city size", slots
    yield "time", "city time", slots


def _currency_topics(world: World, name: str) -> Iterator[Topic]:
    currency: Currency = world.currencies[name]
    yield (
        "code",
        "currency code",
        {"currency_code": currency.code, "decimals": str(currency.decimals)},
    )
    yield from _user_topics(world, "currency", world.currency_users[name])


def _language_topics(world: World, name: str) -> Iterator[Topic]:
    language: Language = world.languages[name]
    slots = {"language_family": language.family, "language_code": language.code}
    yield "family", "language family", slots
    yield from _user_topics(world, "language", world.language_users[name])


def _user_topics(world: World, kind: str, users: Sequence[str]) -> Iterator[Topic]:
    if len(users) <= LIST_PART:
        topic = f"{kind} user{'s' * (len(users) > 1)}"
        slots = {"users": _countries(world, users), "user_count": str(len(users))}
        yield "users", topic, slots
        return
    for part, names in _parts(users):
        yield (
            f"users {part['part']}",
            f"{kind} users part",
            part | {"users": _countries(world, names)},
        )


def _element_topics(world: World, name: str) -> Iterator[Topic]:
    element: Element = world.elements[name]
    article = "an" if element.category[0] in "aeiou" else "a"
    yield "identity", "element identity", {"symbol": element.symbol, "number": str(element.number)}
    slots = {
        "category": f"{article} {element.category}",
        "period": str(element.period),
        "group": f"group {element.group}" if element.group else "outside the groups",
        "mass": f"{element.mass:.1f}",
    }
    yield "table", "element table", slots
    discovery = {"year": str(element.year), "place": with_article(world, element.place)}
    if not element.year:
        yield "discovery", "element unknown discovery", {}
    else:
        yield "discovery", f"element {'discovery' if element.place else 'year'}", discovery


def _continent_topics(world: World, name: str) -> Iterator[Topic]:
    countries = world.continents[name]
    yield "count", "continent count", {"country_count": str(len(countries))}
    for part, names in _parts(countries):
        yield (
            f"countries {part['part']}",
            "continent part",
            part | {"countries": _countries(world, names)},
        )


def _parts(names: Sequence[str]) -> Iterator[tuple[dict[str, str], Sequence[str]]]:
    starts = range(0, len(names), LIST_PART)
    for place, start in enumerate(starts, start=1):
        slots = {"part": str(place), "parts": str(len(starts))}
        yield slots, names[start : start + LIST_PART]
