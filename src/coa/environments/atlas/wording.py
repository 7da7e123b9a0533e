"""How the experts speak of a relation: what they need, and what they found.

Short on purpose: every word of a thought is a token that a student model must learn to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from coa.environments.atlas.pages import listing


class Wording(NamedTuple):
    """`need` completes 'I need ...'; `found` is a sentence with subject {s} and value {v}."""

    need: str
    found: str


WORDINGS: dict[str, Wording] = {
    "capital": Wording("the capital of {s}", "The capital of {s} is {v}."),
    "capital_of": Wording("the country whose capital is {s}", "{s} is the capital of {v}."),
    "country": Wording("the country of {s}", "{s} is in {v}."),
    "continent": Wording("the continent of {s}", "{s} is in {v}."),
    "region": Wording("the region of {s}", "{s} is in {v}."),
    "population": Wording("the population of {s}", "The population of {s} is {v}."),
    "area": Wording("the area of {s}", "The area of {s} is {v}."),
    "languages": Wording("the official language of {s}", "The official language of {s} is {v}."),
    "currency": Wording("the currency of {s}", "The currency of {s} is the {v}."),
    "neighbours": Wording("the neighbours of {s}", "The neighbours of {s} are {v}."),
    "neighbour_count": Wording("the number of neighbours of {s}", "{s} has {v} neighbours."),
    "calling_code": Wording("the calling code of {s}", "The calling code of {s} is {v}."),
    "domain": Wording("the internet domain of {s}", "The internet domain of {s} is {v}."),
    "summit": Wording("the highest point of {s}", "The highest point of {s} is {v}."),
    "elevation": Wording(
        "the height of the highest point of {s}", "The highest point of {s} is {v} metres high."
    ),
    "time_zone": Wording("the time zone of {s}", "The time zone of {s} is {v}."),
    "currency_code": Wording("the ISO code of the {s}", "The ISO code of the {s} is {v}."),
    "users": Wording("the countries that use the {s}", "The {s} is used in {v}."),
    "language_family": Wording("the family of {s}", "{s} belongs to the {v} family."),
    "symbol": Wording("the symbol of {s}", "The symbol of {s} is {v}."),
    "number": Wording("the atomic number of {s}", "The atomic number of {s} is {v}."),
    "year": Wording("the year of the discovery of {s}", "{s} was discovered in {v}."),
    "place": Wording("the place of the discovery of {s}", "{s} was discovered in {v}."),
}


def wanted(relation: str, subject: str) -> str:
    """What is looked for: 'the capital of Peru'."""
    return WORDINGS[relation].need.format(s=subject)


def sentence_for(relation: str, subject: str, values: Sequence[str]) -> str:
    """What was found: 'The capital of Peru is Lima.'"""
    return WORDINGS[relation].found.format(s=subject, v=", ".join(values))


def wanted_of(relations: Sequence[str], subjects: Sequence[str]) -> str:
    """Several facts of several subjects: 'the area and the capital of Peru and Chile'."""
    *others, last = relations
    nouns = [WORDINGS[name].need.removesuffix(" of {s}") for name in others]
    return listing([*nouns, wanted(last, listing(list(subjects)))])
