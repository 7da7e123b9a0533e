"""Trace a question back to its family and slots, from the text alone.

The phrasing templates become patterns. A question may fit several ('the capital of {country}' also
fits 'the capital of the country where X is located'); the one with the most fixed words is meant.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from coa.environments.atlas.catalogues import MHQA
from coa.environments.atlas.families import Catalogue, Family

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
    """The family and slots of a question, or None when it is not one of the catalogue's."""
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
