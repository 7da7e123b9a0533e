"""Atlas, the embedded encyclopedia: a World written out as linked pages of short passages.

A passage has one topic and at most a few dozen words, because a small model is trained on what a
search returns and every token costs time. The wording of a topic varies from subject to subject by
a checksum of the name, so that reading is more than one fixed pattern; lists too long for a passage
are split into numbered parts, so that each part is true by itself.

`atlas_corpus` is the pages as a corpus; `read` reads a fact out of them again.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path

from coa.corpus.index import INDEX_VERSION, SearchIndex
from coa.corpus.page import Page, Passage
from coa.corpus.site import Corpus
from coa.environments.atlas.world import (
    RELATIONS,
    WORDS,
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
from coa.errors import UsageError, did_you_mean

TOPICS: Mapping[str, list[list[str]]] = WORDS["pages"]
"""Topic -> variants -> sentences."""
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


@cache
def atlas_index(seed: int = 0) -> SearchIndex:
    """The index of one world, built once for a process."""
    return SearchIndex.build(atlas_passages(seed), titles_are_names=True)


class _AtlasSite:
    """The pages of a world of the Atlas."""

    def __init__(self, seed: int) -> None:
        self._pages = {page.url.removeprefix(f"{SITE}/"): page for page in pages(load_world(seed))}

    def find(self, keys: Iterable[str]) -> Page | None:
        return next((self._pages[key] for key in keys if key in self._pages), None)

    def pages(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def digest(self) -> str:
        """Of what can be read and how it is found: another release may say it otherwise."""
        made = hashlib.sha256(str(INDEX_VERSION).encode())
        for page in self._pages.values():
            made.update(repr(page).encode())
        return made.hexdigest()[:16]


class _AtlasCorpus(Corpus):
    """The Atlas of a world as a corpus; its index is the one that `atlas_index` keeps. Nothing of
    it can be missing, so pages are written and indexed when somebody looks for one: the first
    words of an answer do not wait for that."""

    def __init__(self, seed: int) -> None:
        self._seed, self.address = seed, SITE

    @cached_property
    def index(self) -> SearchIndex:  # type: ignore[override]
        return atlas_index(self._seed)

    @cached_property
    def _site(self) -> _AtlasSite:  # type: ignore[override]
        return _AtlasSite(self._seed)

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        return f"atlas:{self._seed}:{self._site.digest()}"


@cache
def atlas_corpus(seed: int = 0) -> Corpus:
    """The Atlas of a world, one for a process."""
    return _AtlasCorpus(seed)


def any_corpus(name: str) -> Corpus:
    """The corpus that a command names: `atlas`, `atlas:K` for world K, or a corpus directory."""
    kind, _, world = name.partition(":")
    if kind == "atlas" and (not world or world.isdecimal()):
        return atlas_corpus(int(world or 0))
    if not Path(name).is_dir():
        raise UsageError(
            f"corpus {name!r}: expected atlas, atlas:K for world K, or the directory of a corpus "
            "made with: coa corpus build FOLDER"
        )
    return Corpus.open(Path(name))


_SLOT = re.compile(r"\{(\w+)\}")
_START = r"(?:^|(?<=[.:] ))"
_END = r"\.(?= |$)"
_NUMBERS = (
    "area", "decimals", "elevation", "latitude", "neighbour_count", "number", "period",
    "population", "user_count", "year",
)  # fmt: skip
_VALUE = {"domain": r"\.[a-z]+", "mass": r"[\d.]+", "time_zone": r"UTC[\d:+-]+"} | dict.fromkeys(
    _NUMBERS, r"\d[\d,]*"
)
_LISTS = ("languages", "neighbours", "users")
_STATED_AS = {"country": ("country", "capital_of")}


def read(relation: str, subject: str, text: str) -> list[str]:
    """The values of a relation of a subject that the text states; empty when it states none.

    This is what a reader who knows the house style can do, by the sentences that pages are written
    in: it is given text only (a passage, or a line of search results), never the World, so what it
    returns is stated in the text.
    """
    if relation not in RELATIONS:
        raise UsageError(f"unknown relation {relation!r}.{did_you_mean(relation, RELATIONS)}")
    if subject[1:] not in text:
        return []
    found: list[str] = []
    for pattern in _compiled(relation, subject):
        for match in pattern.finditer(text):
            found += _split(relation, match["value"])
    return list(dict.fromkeys(found))


@lru_cache(maxsize=4096)  # compiling took more than a third of a recording
def _compiled(relation: str, subject: str) -> tuple[re.Pattern[str], ...]:
    name = rf"(?:[Tt]he )?[{re.escape(subject[:1].upper() + subject[:1].lower())}]"
    name += re.escape(subject[1:])
    named = (pattern.replace("SUBJECT", name) for pattern in _patterns(relation))
    return tuple(re.compile(pattern, re.MULTILINE) for pattern in named)


def _split(relation: str, value: str) -> list[str]:
    parts = re.split(r", and |, | and ", value) if relation in _LISTS else [value]
    if RELATIONS[relation].value == "country":
        parts = [re.sub(r"^[Tt]he ", "", part) for part in parts]
    return parts


@cache
def _patterns(relation: str) -> tuple[str, ...]:
    """One pattern for each sentence that states the relation."""
    slots = _STATED_AS.get(relation, (relation,))
    sentences = dict.fromkeys(
        sentence for variants in TOPICS.values() for variant in variants for sentence in variant
    )
    found = [_pattern(sentence, "subject", slot) for sentence in sentences for slot in slots]
    if relation in ("capital_of", "country"):
        found += [_pattern(sentence, "capital", "subject") for sentence in sentences]
    return tuple(dict.fromkeys(pattern for pattern in found if pattern))


def _pattern(sentence: str, subject: str, value: str) -> str:
    names = _SLOT.findall(sentence)
    if subject not in names or value not in names:
        return ""
    parts = _SLOT.split(sentence.removesuffix("."))
    for place in range(1, len(parts), 2):
        inner = _VALUE.get(parts[place], r"[^.:\n]+?")
        parts[place] = (
            "SUBJECT"
            if parts[place] == subject
            else f"(?P<value>{inner})"
            if parts[place] == value
            else f"(?:{inner})"
        )
    for place in range(0, len(parts), 2):
        parts[place] = re.escape(parts[place])
    return _START + "".join(parts) + _END
