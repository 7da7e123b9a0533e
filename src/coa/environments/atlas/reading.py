"""Read a fact out of passage text, by the sentences pages are written in.

This is what a reader who knows the house style can do: it is given text only, never the World, so
what it returns is stated in the text. It takes a passage or a line of search results.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache

from coa.environments.atlas.pages import TOPICS
from coa.environments.atlas.world import RELATIONS
from coa.errors import UsageError, did_you_mean

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
    """The values of a relation of a subject that the text states; empty when it states none."""
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
