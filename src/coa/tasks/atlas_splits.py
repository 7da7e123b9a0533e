"""Which entities of a world are held out.

Countries are held out in clusters of neighbours, so that a question about a country and all its
neighbours can be about held-out entities only; a city is held out with its country, a currency or a
language when all its users are. The choice depends on the world alone, never on n or a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import count
from random import Random

from coa.corpus.world import World

HELD_OUT_SHARE = 0.25
CLUSTER = 8


@dataclass(frozen=True)
class HeldOut:
    """The held-out names of one world."""

    countries: frozenset[str]
    cities: frozenset[str]
    currencies: frozenset[str]
    languages: frozenset[str]
    elements: frozenset[str]

    def __contains__(self, entity: tuple[str, str]) -> bool:
        kind, name = entity
        return name in {
            "country": self.countries,
            "city": self.cities,
            "currency": self.currencies,
            "language": self.languages,
            "element": self.elements,
        }.get(kind, frozenset())


@cache
def held_out(world: World) -> HeldOut:
    for attempt in count():
        rng = Random(f"atlas split of world {world.seed}, attempt {attempt}")
        countries = _clusters(world, rng) | _islands(world, rng)
        share = sum(city.country in countries for city in world.cities.values()) / len(world.cities)
        if abs(share - HELD_OUT_SHARE) < 0.03:
            break
    elements = sorted(world.elements)
    return HeldOut(
        countries=countries,
        cities=frozenset(c.name for c in world.cities.values() if c.country in countries),
        currencies=frozenset(
            n for n, users in world.currency_users.items() if countries >= {*users}
        ),
        languages=frozenset(
            n for n, users in world.language_users.items() if countries >= {*users}
        ),
        elements=frozenset(rng.sample(elements, round(len(elements) * HELD_OUT_SHARE))),
    )


def _islands(world: World, rng: Random) -> frozenset[str]:
    alone = sorted(country.name for country in world.countries.values() if not country.borders)
    return frozenset(rng.sample(alone, round(len(alone) * HELD_OUT_SHARE)))


def _clusters(world: World, rng: Random) -> frozenset[str]:
    """Grow clusters along borders until a quarter of the countries with borders is held out."""
    joined = sorted(country.name for country in world.countries.values() if country.borders)
    wanted = round(len(joined) * HELD_OUT_SHARE)
    chosen: list[str] = []
    for start in rng.sample(joined, len(joined)):
        reach = [start] if start not in chosen else []
        for name in reach:
            if len(reach) >= CLUSTER:
                break
            near = sorted(set(world.countries[name].borders) - {*chosen, *reach})
            reach += near[: CLUSTER - len(reach)]
        if len(reach) >= 3:
            chosen += reach
        if len(chosen) >= wanted:
            break
    return frozenset(chosen[:wanted])
