"""Tasks over catalogues of tools: what is asked, what is on offer, and the answer.

A task is made by working on a service as somebody would who knows everything: its calls are made,
and what they return is the gold answer. What stands in `meta` are the tools on offer and the
service behind them, from which its state can be drawn; which calls are needed, and what they
return, is gold.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from coa.environments import TOOLBOX, chosen_names
from coa.environments.toolbox.catalogue import ApiCatalogue, Field, Operation, Thing, generated
from coa.environments.toolbox.services import DATE_FORMS, KEY, ServiceState, draw
from coa.environments.toolbox.wording import ask, my_own, nouns, pairs, say, the_one, the_one_with
from coa.errors import ToolMistake, UsageError, did_you_mean
from coa.io.runs import Json
from coa.tasks import Task, TaskSet
from coa.tools.arguments import words_of

SPLITS = ("train", "test")
SOURCES = ("generated", "openapi")
NO_TOOL = "no tool fits"
MISSING = "missing: {}"
"""The fixed words of an answer where nothing can be called."""
PATIENCE = 400
"""Drafts in a row that come to nothing before the maker gives up."""
_MOST = 12
_BUSY = 0.06
"""Share of tasks in which a service is busy at first."""


@dataclass(frozen=True)
class ToolboxMaking:
    """What tasks are made of."""

    schemas: int = 10_000
    """About so many tools, of which train draws."""
    sources: tuple[str, ...] = ("generated",)
    offered: int = _MOST
    """Most tools on offer."""
    masked: float = 0.15
    """Share of tasks in which tools and their arguments have names without a meaning."""

    def __post_init__(self) -> None:
        for name in self.sources:
            if name not in SOURCES:
                raise UsageError(f"sources: {name!r} is none.{did_you_mean(name, SOURCES)}")
        if not self.sources or len(set(self.sources)) < len(self.sources):
            raise UsageError(f"sources: {', '.join(self.sources)!r}, expected each of them once.")
        if self.schemas < 1 or not 1 <= self.offered <= 64 or not 0 <= self.masked <= 1:
            raise UsageError(
                f"schemas {self.schemas}, offered {self.offered}, masked {self.masked}: expected "
                "at least 1, 1 to 64, and 0 to 1."
            )


@dataclass
class Draft:
    """A task before it is known what is on offer."""

    question: str
    calls: list[tuple[Operation, Json]] = field(default_factory=list)
    answers: tuple[str, ...] = ()
    hidden: list[Operation] = field(default_factory=list)
    """What would do it as well, or supply what is missing, and must not be on offer."""
    lacks: str = ""
    """The argument that is missing; empty: none is."""


# -- the families ----------------------------------------------------------------------------


class Asking:
    """Makes drafts over one catalogue, whose state is the first of a rollout."""

    def __init__(self, catalogue: ApiCatalogue, seed: int, rng: random.Random) -> None:
        self.catalogue, self.seed, self.rng = catalogue, seed, rng
        self.state = ServiceState(service_of(seed, catalogue.things.values(), catalogue.operations))

    def call(self, draft: Draft, operation: Operation, values: Mapping[str, Any]) -> Json:
        """Make a call of the plan; values are by field."""
        arguments: Json = {}
        by = {of: path for path, of in operation.does["by"].items()}
        for name, value in values.items():
            path = by[name]
            *outer, last = path.split(".")
            place = arguments
            for part in outer:
                place = place.setdefault(part, {})
            place[last] = written(value, operation.does.get("forms", {}).get(path, ""))
        draft.calls.append((operation, arguments))
        return self.state.call(operation.name, arguments)

    def draft(self, family: str) -> Draft | None:
        """A draft of a family; None where this catalogue has none, or none that is clear."""
        made: Draft | None = getattr(self, f"_{family}")()
        return made

    # -- choices ----------------------------------------------------------------------------

    def _one_of(self, does: str, thing: str = "") -> Operation | None:
        found = self.catalogue.of(does, thing)
        return self.rng.choice(found) if found else None

    def _thing(self, operation: Operation) -> Thing:
        return self.catalogue.things[operation.does["thing"]]

    def _key(self, thing: Thing) -> str:
        return self.rng.choice(list(self.state.records[thing.name]))

    def _readable(self, get: Operation, *but: str) -> Field | None:
        """A field that a tool gives and that says something by itself."""
        fields = [
            each
            for each in self._thing(get).fields
            if each.name in get.does["gives"] and not each.refers_to and each.name not in but
        ]
        return self.rng.choice(fields) if fields else None

    def _new(self, each: Field, old: Any = None) -> Any:
        """Another value for a field."""
        if each.refers_to:
            return self._key(self.catalogue.things[each.refers_to])
        for _ in range(20):
            value = draw(each.kind, self.rng)
            if value != old:
                return value
        return None

    def _said(self, each: Field) -> str:
        return self.rng.choice(each.said)

    def _ask_read(self, draft: Draft, one: str, get: Operation, key: str, *but: str) -> bool:
        """Make the last call of a question for a field, and word the question."""
        wanted = self._readable(get, *but)
        if wanted is None:
            return False
        draft.question = ask("read", self.rng, field=self._said(wanted), one=one)
        draft.answers = shown(self.call(draft, get, {KEY: key})[wanted.name])
        return True

    # -- one call ---------------------------------------------------------------------------

    def _read(self) -> Draft | None:
        get = self._one_of("get")
        if get is None:
            return None
        draft, thing = Draft(""), self._thing(get)
        key = self._key(thing)
        return draft if self._ask_read(draft, the_one(thing, key, self.rng), get, key) else None

    def _count(self) -> Draft | None:
        filtered = self._one_of("list")
        if filtered is None:
            return None
        draft, thing = Draft(""), self._thing(filtered)
        chosen = self._filters(filtered, self._key(thing))
        told = pairs([(each, value) for each, value in chosen], self.rng)
        draft.question = ask("count", self.rng, nouns=nouns(thing), pairs=told)
        found = self.call(draft, filtered, {each.name: value for each, value in chosen})
        draft.answers = shown(found["count"])
        return draft

    def _filters(self, filtered: Operation, key: str) -> list[tuple[Field, Any]]:
        """Some of a list's filters, with what a record has there."""
        record = self.state.records[filtered.does["thing"]][key]
        drawn = self.rng.sample(filtered.fields, self.rng.randint(1, len(filtered.fields)))
        must = _required(filtered)
        fields = [each for each in filtered.fields if each in drawn or each.name in must]
        return [(each, record[each.name]) for each in fields]

    def _sum(self) -> Draft | None:
        compute = self._one_of("compute")
        if compute is None:
            return None
        draft = Draft("")
        given = [f for f in compute.fields if not f.kind.endswith("?") or self.rng.random() < 0.5]
        values = [(each, draw(each.kind, self.rng)) for each in given]
        told = pairs(self.rng.sample(values, len(values)), self.rng)
        (quantity,) = compute.does["gives"]
        called = compute.does["thing"].replace("_", " ")
        draft.question = ask("sum", self.rng, sum=called, pairs=told)
        by = compute.does["by"]
        draft.answers = shown(
            self.call(draft, compute, {by[each.name]: value for each, value in values})[quantity]
        )
        return draft

    def _create(self) -> Draft | None:
        create = self._one_of("create")
        if create is None:
            return None
        draft, thing = Draft(""), self._thing(create)
        must = _required(create)
        given = [f for f in create.fields if f.name in must or self.rng.random() < 0.5]
        given = given or [self.rng.choice(create.fields)]
        values = [(each, self._new(each)) for each in given]
        told = pairs([(each, value) for each, value in values], self.rng)
        label = thing.id.rpartition("_")[2]
        draft.question = ask("create", self.rng, noun=thing.noun, pairs=told, key=label)
        made = self.call(draft, create, {each.name: value for each, value in values})
        draft.answers = (str(made[thing.id]),)
        return draft

    def _update(self) -> Draft | None:
        update = self._one_of("update")
        if update is None:
            return None
        key = self._key(self._thing(update))
        one = the_one(self._thing(update), key, self.rng)
        return self._updated(Draft(""), update, key, one)

    def _updated(self, draft: Draft, update: Operation, key: str, one: str) -> Draft | None:
        must = _required(update)
        fields = [each for each in update.fields if each.name in must] or list(update.fields)
        if len([each for each in update.fields if each.name in must]) > 1:
            return None
        each = self.rng.choice(fields)
        value = self._new(each, self.state.records[update.does["thing"]][key][each.name])
        text = say(each.kind, value, self.rng)
        draft.question = ask("update", self.rng, field=self._said(each), one=one, value=text)
        draft.answers = (str(self.call(draft, update, {KEY: key, each.name: value})["receipt"]),)
        return draft

    def _remove(self) -> Draft | None:
        remove = self._one_of("remove")
        if remove is None:
            return None
        draft, thing = Draft(""), self._thing(remove)
        key = self._key(thing)
        draft.question = ask("remove", self.rng, one=the_one(thing, key, self.rng))
        draft.answers = (str(self.call(draft, remove, {KEY: key})["receipt"]),)
        return draft

    # -- several calls ----------------------------------------------------------------------

    def _find(self) -> Draft | None:
        """A record by another field, then what is wanted of it."""
        found = self._found()
        if found is None:
            return None
        draft, thing, key, one, by = found
        update = self._one_of("update", thing.name)
        if update is not None and self.rng.random() < 0.4:
            return self._updated(draft, update, key, one)
        get = self._one_of("get", thing.name)
        return draft if get and self._ask_read(draft, one, get, key, by.name) else None

    def _found(self) -> tuple[Draft, Thing, str, str, Field] | None:
        """The first call of a question about a record by another field of it."""
        find = self._one_of("find")
        if find is None:
            return None
        draft, thing = Draft(""), self._thing(find)
        (by,) = find.fields
        key = self._key(thing)
        value = self.state.records[thing.name][key][by.name]
        if self.call(draft, find, {by.name: value})[thing.id] != key:
            return None
        return draft, thing, key, the_one_with(thing, by, value, self.rng), by

    def _follow(self) -> Draft | None:
        """One or two steps from a record to one that it refers to, and a field of that."""
        if self.rng.random() < 0.5:
            get = self._one_of("get")
            if get is None:
                return None
            draft, thing = Draft(""), self._thing(get)
            key = self._key(thing)
            one = the_one(thing, key, self.rng)
        else:
            found = self._found()
            if found is None:
                return None
            draft, thing, key, one, _ = found
        for step in range(2):
            get = self._one_of("get", thing.name)
            refers = [each for each in thing.fields if each.refers_to]
            if get is None or not refers:
                return draft if step and get and self._ask_read(draft, one, get, key) else None
            if step and self.rng.random() < 0.5:
                return draft if self._ask_read(draft, one, get, key) else None
            each = self.rng.choice(refers)
            key = str(self.call(draft, get, {KEY: key})[each.name])
            thing = self.catalogue.things[each.refers_to]
            one = f"the {thing.noun} of {one}"
        get = self._one_of("get", thing.name)
        return draft if get and self._ask_read(draft, one, get, key) else None

    def _compare(self) -> Draft | None:
        get = self._one_of("get")
        if get is None:
            return None
        draft, thing = Draft(""), self._thing(get)
        first, second = self.rng.sample(list(self.state.records[thing.name]), 2)
        numbers = [f for f in thing.fields if isinstance(self._value(thing, first, f), int | float)]
        numbers = [f for f in numbers if f.kind != "flag"]
        if not numbers:
            return None
        each = self.rng.choice(numbers)
        values = [self.call(draft, get, {KEY: key})[each.name] for key in (first, second)]
        if values[0] == values[1]:
            return None
        more = self.rng.choice(("higher", "larger", "lower", "smaller"))
        least = more in ("lower", "smaller")
        draft.answers = ((second if (values[0] > values[1]) == least else first),)
        parts = {"noun": thing.noun, "nouns": nouns(thing), "a": first, "b": second}
        draft.question = ask("compare", self.rng, field=self._said(each), more=more, **parts)
        return draft

    def _value(self, thing: Thing, key: str, each: Field) -> Any:
        return self.state.records[thing.name][key][each.name]

    def _pick(self) -> Draft | None:
        """A field of the only record with certain values."""
        filtered = self._one_of("list")
        get = self._one_of("get", filtered.does["thing"]) if filtered else None
        if filtered is None or get is None:
            return None
        draft, thing = Draft(""), self._thing(get)
        key = self._key(thing)
        chosen = self._filters(filtered, key)
        found = self.call(draft, filtered, {each.name: value for each, value in chosen})
        if found["count"] != 1:
            return None
        one = f"the only {thing.noun} with {pairs(chosen, self.rng)}"
        return draft if self._ask_read(draft, one, get, key, *(f.name for f, _ in chosen)) else None

    def _change(self) -> Draft | None:
        """A change, and what a list says then."""
        update = self._one_of("update")
        filtered = self._one_of("list", update.does["thing"]) if update else None
        if update is None or filtered is None:
            return None
        draft, thing = Draft(""), self._thing(update)
        key = self._key(thing)
        one = the_one(thing, key, self.rng)
        shared = [each for each in update.fields if each in filtered.fields]
        if not shared or len(_required(update) - {KEY}) > 1:
            return None
        each = self.rng.choice(shared)
        if _required(update) - {KEY} - {each.name}:
            return None
        value = self._new(each, self._value(thing, key, each))
        self.call(draft, update, {KEY: key, each.name: value})
        found = self.call(draft, filtered, {each.name: value})
        text, said = say(each.kind, value, self.rng), self._said(each)
        parts = {"field": said, "one": one, "value": text, "nouns": nouns(thing)}
        draft.question = ask("change", self.rng, pairs=f"{said} {text}", **parts)
        draft.answers = shown(found["count"])
        return draft

    def _feed(self) -> Draft | None:
        """A sum with a value that a record has."""
        compute, get = self._one_of("compute"), self._one_of("get")
        if compute is None or get is None:
            return None
        draft, thing = Draft(""), self._thing(get)
        fits = [
            (into, each)
            for into in compute.fields
            for each in thing.fields
            if into.kind == each.kind and into.kind != "flag" and "|" not in into.kind
        ]
        if not fits:
            return None
        into, each = self.rng.choice(fits)
        key = self._key(thing)
        by = compute.does["by"]
        rest = [f for f in compute.fields if f is not into and not f.kind.endswith("?")]
        values = [(f, draw(f.kind, self.rng)) for f in rest]
        fed = self.call(draft, get, {KEY: key})[each.name]
        told = f"the {self._said(each)} of {the_one(thing, key, self.rng)} as {self._said(into)}"
        told = f"{told} and {pairs(values, self.rng)}" if values else told
        called = compute.does["thing"].replace("_", " ")
        draft.question = ask("sum", self.rng, sum=called, pairs=told)
        given = {by[into.name]: fed} | {by[f.name]: value for f, value in values}
        (quantity,) = compute.does["gives"]
        draft.answers = shown(self.call(draft, compute, given)[quantity])
        return draft

    # -- nothing to call --------------------------------------------------------------------

    def _none(self) -> Draft | None:
        """A question whose last call no tool on offer can make."""
        draft = self.draft(self.rng.choice(_PLAIN))
        if draft is None:
            return None
        last, _ = draft.calls[-1]
        same = self.catalogue.of(last.does["does"], last.does["thing"])
        return Draft(draft.question, [], (NO_TOOL,), [last, *same])

    def _missing(self) -> Draft | None:
        """A question that lacks something that a tool must be given."""
        does = self.rng.choice(("get", "get", "update", "remove", "create", "compute"))
        operation = self._one_of(does)
        if operation is None:
            return None
        if does in ("create", "compute"):
            return self._without_a_value(operation)
        thing = self._thing(operation)
        (lacks,) = (path for path, of in operation.does["by"].items() if of == KEY)
        one = my_own(thing, self.rng)
        if does == "get":
            wanted = self._readable(operation)
            if wanted is None:
                return None
            question = ask("read", self.rng, field=self._said(wanted), one=one)
        elif does == "update":
            each = self.rng.choice(operation.fields)
            text = say(each.kind, self._new(each), self.rng)
            question = ask("update", self.rng, field=self._said(each), one=one, value=text)
        else:
            question = ask("remove", self.rng, one=one)
        others = [o for d in ("find", "list") for o in self.catalogue.of(d, thing.name)]
        draft = Draft(question, [(operation, {})], (), others, lacks)
        return draft

    def _without_a_value(self, operation: Operation) -> Draft | None:
        must = _required(operation)
        fields = [each for each in operation.fields if each.name in must]
        if len(fields) < 2:
            return None
        gone = self.rng.choice(fields)
        values = [(f, self._new(f)) for f in fields if f is not gone]
        if operation.does["does"] == "compute":
            called = operation.does["thing"].replace("_", " ")
            question = ask("sum", self.rng, sum=called, pairs=pairs(values, self.rng))
        else:
            thing = self._thing(operation)
            parts = {"noun": thing.noun, "key": thing.id.rpartition("_")[2]}
            question = ask("create", self.rng, pairs=pairs(values, self.rng), **parts)
        meant = gone.base if operation.does["does"] == "compute" else gone.name
        (lacks,) = (path for path, of in operation.does["by"].items() if of == meant)
        return Draft(question, [(operation, {})], (), [], lacks)


_PLAIN = ("read", "count", "sum", "create", "update", "remove")
FAMILIES: dict[str, int] = {
    **{"read": 5, "count": 3, "sum": 6, "create": 5, "update": 3, "remove": 2},
    **{"find": 4, "follow": 5, "compare": 2, "pick": 2, "change": 2, "feed": 2},
    **{"none": 6, "missing": 4},
}
"""Family -> how many of a round of tasks are of it."""
_OF_REAL = ("read", "count", "create", "update", "remove", "compare", "pick", "change")
_OF_SOURCE = {"generated": tuple(FAMILIES), "openapi": (*_OF_REAL, "none", "missing")}
"""Source -> the families that its catalogues have operations for."""


def _required(operation: Operation) -> set[str]:
    """Fields whose arguments must be given."""
    parameters = operation.declaration["parameters"]
    found = set(parameters["required"])
    for name, part in parameters["properties"].items():
        if part.get("type") == "object":
            found |= {f"{name}.{each}" for each in part.get("required", ())}
    by = operation.does["by"]
    if operation.does["does"] == "compute":
        return {each.name for each in operation.fields if each.name in found}
    return {of for path, of in by.items() if path in found}


def written(value: Any, form: str) -> Any:
    """A value in the form that a service demands."""
    if form in DATE_FORMS:
        year, month, day = str(value).split("-")
        return f"{day}.{month}.{year}" if form == "dotted" else f"{month}/{day}/{year}"
    if form == "joined":
        return str(value).replace("-", "").lower()
    return f"#{value}" if form == "hashed" else value


def shown(value: Any) -> tuple[str, ...]:
    """The answers that are right for a value of a result."""
    if isinstance(value, bool):
        return ("true", "yes") if value else ("false", "no")
    return (str(value), str(value).replace("_", " ")) if "_" in str(value) else (str(value),)


def service_of(seed: int, things: Iterable[Thing], operations: Sequence[Operation]) -> Json:
    """What stands behind tools, as `meta` holds it."""
    return {
        "seed": seed,
        "things": {each.name: each.spec() for each in things},
        "tools": {each.name: each.does for each in operations},
    }


# -- what is on offer ------------------------------------------------------------------------


def _offer(
    draft: Draft,
    catalogue: ApiCatalogue,
    others: Sequence[ApiCatalogue],
    most: int,
    rng: random.Random,
) -> tuple[list[Operation], dict[str, Thing]]:
    """The needed tools among others, of this catalogue first, and the things behind all of them."""
    needed = list({operation.name: operation for operation, _ in draft.calls}.values())
    hidden = {each.name for each in draft.hidden}
    taken = {each.name for each in needed}
    size = max(len(needed), min(most, rng.choice((1, 2, 3, 3, 4, 4, 5, 6, 8, 12))), 1)
    own = [o for o in catalogue.operations if o.name not in taken | hidden]
    chosen, things = list(needed), dict(catalogue.things)
    near = rng.sample(own, min(len(own), round((size - len(needed)) * rng.uniform(0.3, 1))))
    chosen += near
    for other in others:
        if len(chosen) >= size:
            break
        names = {each.name for each in chosen}
        fresh = [o for o in other.operations if o.name not in names | hidden]
        about = {o.does["thing"] for o in draft.hidden} | {o.does["thing"] for o in needed}
        fresh = [o for o in fresh if o.does["thing"] not in about]  # which might do it as well
        for operation in rng.sample(fresh, min(len(fresh), size - len(chosen))):
            chosen.append(_elsewhere(operation, other, things))
    if not chosen:
        return [], things
    rng.shuffle(chosen)
    return chosen, things


def _elsewhere(operation: Operation, other: ApiCatalogue, things: dict[str, Thing]) -> Operation:
    """A tool of another provider, whose things are called so that none has the name of ours."""

    def named(thing: str) -> str:
        return f"{other.provider}/{thing}"

    for thing in other.things.values():
        fields = tuple(
            replace(f, kind=f">{named(f.refers_to)}") if f.refers_to else f for f in thing.fields
        )
        things.setdefault(named(thing.name), replace(thing, name=named(thing.name), fields=fields))
    return replace(operation, does={**operation.does, "thing": named(operation.does["thing"])})


def _masked(operation: Operation, rng: random.Random, taken: set[str]) -> tuple[Operation, Json]:
    """A tool with names that say nothing, and path -> what it is called now; what it does and needs
    stands in its description."""
    while True:
        name = rng.choice(
            (f"tool_{rng.randint(1, 99)}", f"f{rng.randint(100, 999)}", _letters(rng))
        )
        if name not in taken:
            break
    taken.add(name)
    paths: dict[str, str] = {}
    style = rng.choice(("arg_{}", "p{}", "x{}", "param_{}"))
    numbers = count(1)

    def renamed(properties: Json, before: str, after: str) -> Json:
        made: Json = {}
        for old, part in properties.items():
            new = style.format(next(numbers))
            part = dict(part)
            part.setdefault("description", " ".join(words_of(old)).capitalize())
            if part.get("type") == "object":
                inner = renamed(part["properties"], f"{before}{old}.", f"{after}{new}.")
                must = [paths[f"{before}{old}.{each}"] for each in part["required"]]
                part |= {"properties": inner, "required": [m.rpartition(".")[2] for m in must]}
            paths[f"{before}{old}"] = f"{after}{new}"
            made[new] = part
        return made

    old = operation.declaration["parameters"]
    properties = renamed(old["properties"], "", "")
    parameters = {**old, "properties": properties, "required": [paths[n] for n in old["required"]]}
    declaration = {**operation.declaration, "name": name, "parameters": parameters}
    does = {**operation.does, "by": {paths[p]: of for p, of in operation.does["by"].items()}}
    if "forms" in does:
        does["forms"] = {paths[path]: form for path, form in does["forms"].items()}
    return replace(operation, declaration=declaration, does=does), paths


def _letters(rng: random.Random) -> str:
    return "".join(rng.choice("bcdfghjklmnpqrstvwxz") for _ in range(5))


# -- tasks -----------------------------------------------------------------------------------


def make_tasks(
    split: str,
    n: int,
    seed: int,
    families: Sequence[str] | None = None,
    making: ToolboxMaking | None = None,
) -> TaskSet:
    """So many tasks of a split; the same arguments give the same ones, and fewer the first."""
    making = making or ToolboxMaking()
    if split not in SPLITS:
        raise UsageError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    if n < 1:
        raise UsageError(f"n = {n}: expected at least 1.")
    chosen = chosen_names("family", families, tuple(FAMILIES), FAMILIES, split)
    drawn = [
        (_rounds(source, chosen, seed), _pool(source, split, making)) for source in making.sources
    ]
    made: dict[str, Task] = {}
    for number in count():
        if len(made) == n:
            break
        at, turn = number % len(drawn), number // len(drawn)
        rounds, pool = drawn[at]
        turn %= len(rounds)
        rng = random.Random(f"{TOOLBOX}|{split}|{seed}|{number}")
        for family in dict.fromkeys([*rounds[turn:], *rounds[:turn]]):  # few have all of them
            tries = (_task(family, pool, split, making, rng) for _ in range(PATIENCE))
            task = next((each for each in tries if each and each.id not in made), None)
            if task is not None:
                made[task.id] = task
                break
        else:
            raise UsageError(
                f"no further task of {', '.join(chosen)} could be made of so few schemas "
                f"({making.schemas}). Ask for more schemas, or for fewer tasks."
            )
    return TaskSet(tuple(made.values()), name=f"{TOOLBOX}-{split}-s{seed}")


def _rounds(source: str, families: Sequence[str], seed: int) -> list[str]:
    """Families in the order in which a source makes tasks of them, over and over."""
    able = [name for name in families if name in _OF_SOURCE[source]]
    if not able:
        raise UsageError(
            f"source {source!r} has no tasks of {', '.join(families)}; it has "
            f"{', '.join(_OF_SOURCE[source])}."
        )
    rounds = [name for name in FAMILIES if name in able for _ in range(FAMILIES[name])]
    random.Random(f"rounds|{seed}").shuffle(rounds)
    return rounds


Pool = Callable[[random.Random], ApiCatalogue]


def _pool(source: str, split: str, making: ToolboxMaking) -> Pool:
    """Draws catalogues of a source, those that are kept for the test only there."""
    held_out = split == "test"
    if source == "openapi":
        from coa.environments.toolbox.openapi import catalogues

        known = catalogues(held_out)
        return lambda rng: rng.choice(known)
    size = max(1, making.schemas // PER_CATALOGUE)
    return lambda rng: generated(rng.randrange(size), held_out)


PER_CATALOGUE = 13
"""Tools of a generated catalogue, on average."""


def _task(
    family: str, pool: Pool, split: str, making: ToolboxMaking, rng: random.Random
) -> Task | None:
    catalogue, seed = pool(rng), rng.randrange(10**9)
    try:
        draft = Asking(catalogue, seed, rng).draft(family)
    except ToolMistake:  # a record that somebody took away
        return None
    needed = {operation.name for operation, _ in draft.calls} if draft is not None else set()
    if draft is None or len(draft.calls) > 4 or len(needed) > making.offered:
        return None
    others = [pool(rng) for _ in range(3)]
    others = [each for each in others if each.provider != catalogue.provider]
    offered, things = _offer(draft, catalogue, others, making.offered, rng)
    if not offered:
        return None
    if draft.calls and family not in ("none", "missing") and rng.random() < _BUSY:
        busy, _ = rng.choice(draft.calls)
        offered = [
            replace(o, does={**o.does, "busy": True}) if o.name == busy.name else o for o in offered
        ]
    calls: list[Json] = [{"name": o.name, "arguments": given} for o, given in draft.calls]
    lacks = draft.lacks
    is_masked = rng.random() < making.masked
    if is_masked:
        taken: set[str] = set()
        renamed = {o.name: _masked(o, rng, taken) for o in offered}
        if lacks:
            lacks = renamed[calls[0]["name"]][1][lacks]
        calls = [_renamed(call, *renamed[call["name"]]) for call in calls]
        offered = [new for new, _ in renamed.values()]
    used = {thing for o in offered for thing in _behind(o.does["thing"], things)}
    service = service_of(seed, [t for t in things.values() if t.name in used], offered)
    meta: Json = {"set": TOOLBOX, "family": family, "split": split, "source": catalogue.source}
    meta |= {"provider": catalogue.provider, "calls": 0 if lacks else len(calls)}
    meta |= {"offered": len(offered), "masked": is_masked}
    meta |= {"tools": [o.declaration for o in offered], "service": service}
    answers = (MISSING.format(lacks.rpartition(".")[2]),) if lacks else draft.answers
    gold = {"calls": [] if lacks else calls}
    named = json.dumps([draft.question, service], sort_keys=True).encode()
    return Task(draft.question, answers, hashlib.sha256(named).hexdigest()[:16], meta, gold)


def _behind(thing: str, things: Mapping[str, Thing]) -> Iterator[str]:
    """A thing and those that it refers to."""
    if thing in things:
        yield thing
        for each in things[thing].fields:
            if each.refers_to:
                yield from _behind(each.refers_to, things)


def _renamed(call: Json, operation: Operation, paths: Mapping[str, str]) -> Json:
    def inside(arguments: Json, before: str) -> Json:
        return {
            paths[f"{before}{name}"].rpartition(".")[2]: (
                inside(value, f"{before}{name}.") if isinstance(value, dict) else value
            )
            for name, value in arguments.items()
        }

    return {"name": operation.name, "arguments": inside(call["arguments"], "")}
