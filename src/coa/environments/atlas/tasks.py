"""Questions over the Atlas, with gold answers and reference searches, of any of its catalogues.

Splits: `train`; `heldout_entity`, where every entity that is mentioned or looked up was held out;
`heldout_family`, where entities are trained ones and the composition of relations is new. Held-out
phrasings never occur in `train` and make up about a quarter of `heldout_entity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import count, islice
from random import Random
from typing import Any

from coa.environments import chosen_names
from coa.environments.atlas.catalogues import MHQA, is_held_out
from coa.environments.atlas.families import Catalogue, Fact, Family, Slots, Solution
from coa.environments.atlas.pages import passage_for
from coa.environments.atlas.world import World, load_world, query_for, with_article
from coa.errors import UsageError, did_you_mean
from coa.tasks import Task, TaskSet, in_turn

HELD_OUT_SHARE = 0.25
CLUSTER = 8


@cache
def held_out(world: World) -> frozenset[tuple[str, str]]:
    """The held-out entities of a world: kind and name."""
    for attempt in count():
        rng = Random(f"atlas split of world {world.seed}, attempt {attempt}")
        countries = _clusters(world, rng) | _islands(world, rng)
        share = sum(city.country in countries for city in world.cities.values()) / len(world.cities)
        if abs(share - HELD_OUT_SHARE) < 0.03:
            break
    elements = sorted(world.elements)
    kinds: dict[str, Iterable[str]] = {
        "country": countries,
        "city": (name for name, city in world.cities.items() if city.country in countries),
        "currency": (n for n, users in world.currency_users.items() if countries >= {*users}),
        "language": (n for n, users in world.language_users.items() if countries >= {*users}),
        "element": rng.sample(elements, round(len(elements) * HELD_OUT_SHARE)),
    }
    return frozenset((kind, name) for kind, names in kinds.items() for name in names)


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


SPLITS = ("train", "heldout_entity", "heldout_family")
_MISLEADING_COUNTRIES = frozenset(["Georgia", "DR Congo", "Republic of the Congo"])


def make_tasks(
    split: str,
    n: int,
    seed: int,
    world_seed: int = 0,
    families: Sequence[str] | None = None,
    catalogue: Catalogue = MHQA,
) -> TaskSet:
    """`n` distinct tasks of a split, spread evenly over its families (or over those named).

    The same arguments give the same tasks, and a smaller `n` gives the first of them.
    """
    known = families_of(split, catalogue)
    if not known:
        raise UsageError(
            f"{catalogue.name} holds out no family: it is there to train on. Take {MHQA.name}."
        )
    chosen = chosen_names("family", families, known, catalogue.families, split)
    if n < 1:
        raise UsageError(f"n = {n!r}: expected a positive number of tasks.")
    world = load_world(world_seed)
    queues = [_shuffled(world, split, catalogue.families[name], seed, catalogue) for name in chosen]
    tasks = tuple(islice(in_turn(queues), n))
    if len(tasks) < n:
        raise UsageError(
            f"{n} tasks of split {split!r} are more than the {len(tasks)} that these families "
            f"have in world {world_seed}. Ask for fewer, or for more families."
        )
    prefix = "atlas" if catalogue is MHQA else catalogue.name
    return TaskSet(tasks, name=f"{prefix}-{split}-w{world_seed}-s{seed}")


def families_of(split: str, catalogue: Catalogue = MHQA) -> tuple[str, ...]:
    """Names of the families a split draws from."""
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    wanted = split == "heldout_family"
    every = catalogue.families.items()
    return tuple(name for name, family in every if family.held_out == wanted)


def _shuffled(
    world: World, split: str, family: Family, seed: int, catalogue: Catalogue
) -> Iterator[Task]:
    candidates = _candidates(world, split, family, catalogue.most)
    phrasings = [
        index
        for index in range(len(catalogue.phrasings[family.name]))
        if split != "train" or not is_held_out(index)
    ]
    order = list(range(len(candidates) * len(phrasings)))
    Random(f"{seed}/{split}/{world.seed}/{family.name}").shuffle(order)
    for place in order:
        slots, solution = candidates[place // len(phrasings)]
        phrasing = phrasings[place % len(phrasings)]
        yield _task(world, split, catalogue, family, slots, solution, phrasing)


@cache
def _candidates(
    world: World, split: str, family: Family, most: int
) -> list[tuple[Slots, Solution]]:
    """Every way to fill the family's slots that has one clear answer and keeps to the split."""
    shape = family.shape
    outside = held_out(world)
    found: list[tuple[Slots, Solution]] = []
    for slots in _fillings(world, split, family, 4 * most):
        if len(found) >= most:
            break
        solution = shape.solve(world, slots)
        if solution is None:
            continue
        mentioned = [(shape.slots[slot], slots[slot]) for slot in slots]
        entities = {*solution.bridges, *mentioned}
        answer = (solution.answer_kind, solution.answer)
        if any(_is_ambiguous(world, family.name, entity) for entity in (*entities, answer)):
            continue
        if split == "heldout_entity":
            kept = all(entity in outside for entity in entities)
        else:
            kept = not any(entity in outside for entity in (*entities, answer))
        if kept:
            found.append((slots, solution))
    return found


def _fillings(world: World, split: str, family: Family, draws: int) -> Iterator[Slots]:
    shape, outside = family.shape, held_out(world)
    rng = Random(f"{world.seed}/{split}/{family.name}")
    kinds = {
        "country": [c.name for c in world.countries.values() if c.kind == "country"],
        "city": list(world.cities),
        "element": list(world.elements),
    }
    (kind,) = set(shape.slots.values())
    wanted = split == "heldout_entity"
    pool = [entity for entity in kinds[kind] if ((kind, entity) in outside) == wanted]
    seen: set[tuple[str, ...]] = set()
    if len(shape.slots) == 1:
        (slot,) = shape.slots
        yield from ({slot: entity} for entity in rng.sample(pool, len(pool)))
        return
    for _ in range(draws):
        picked = rng.sample(pool, len(shape.slots))
        if shape.kind == "intersection":
            middle = world.countries[picked[0]].borders
            around = {far for near in middle for far in world.countries[near].borders}
            choices = sorted(around & set(pool) - {picked[0]})
            picked[1:] = rng.sample(choices, min(1, len(choices)))
        if len(picked) == len(shape.slots) and tuple(picked) not in seen:
            seen.add(tuple(picked))
            yield dict(zip(shape.slots, picked, strict=True))


def _is_ambiguous(world: World, family: str, entity: tuple[str, str]) -> bool:
    """Whether a name could mean something else to a reader of the question or the answer."""
    kind, name = entity
    if kind == "country":
        country = world.countries[name]
        alike = country.capital.endswith("(city)")
        return alike or name in _MISLEADING_COUNTRIES or country.kind != "country"
    if kind == "city":
        city = world.cities[name]
        return "(" in name or (city.shares_name and family.startswith("city_"))
    return False


def _task(
    world: World,
    split: str,
    catalogue: Catalogue,
    family: Family,
    slots: Slots,
    solution: Solution,
    phrasing: int,
) -> Task:
    template = catalogue.phrasings[family.name][phrasing]
    question = template.format(**{slot: with_article(world, name) for slot, name in slots.items()})
    is_first = catalogue is MHQA  # elsewhere held-out families are put like trained ones
    meta: dict[str, Any] = {
        "family": family.name,
        "kind": family.kind,
        "hops": len(solution.facts),
        "split": split,
        "phrasing": phrasing,
        "phrasing_heldout": is_held_out(phrasing) or (split == "heldout_family" and is_first),
        "world": world.seed,
    }
    if not is_first:  # tasks of the first set were made without it and stay as they are
        meta["set"] = catalogue.name
    return Task(
        question=question[0].upper() + question[1:],
        answers=(*answers_for(world, solution.answer), *solution.also),
        meta=meta,
        gold={"hops": [_hop(world, fact) for fact in solution.facts]},
    )


def _hop(world: World, fact: Fact) -> Mapping[str, Any]:
    passage = passage_for(world, fact.relation, fact.subject)
    return {
        "query": query_for(fact.relation, fact.subject),
        "page": passage.title,
        "passage": passage.text,
        "answer": ", ".join(fact.values),
        "relation": fact.relation,
        "subject": fact.subject,
    }


def answers_for(world: World, answer: str) -> tuple[str, ...]:
    """The answer as pages print it, and the other ways in which it may rightly be written."""
    forms = [answer]
    if answer in world.countries:
        if world.countries[answer].article:
            forms.append(f"the {answer}")
    elif answer.startswith("+") or "," in answer:
        forms.append(answer.removeprefix("+").replace(",", ""))
    forms += [form.replace("&", "and") for form in forms if "&" in form]
    return tuple(forms)
