"""Catalogues: the tools of one provider, generated from a seed, and what stands behind each.

A catalogue has a few things that refer to one another, operations on them, and sums. Each operation
has a declaration, which a model sees, and says what it does (`services`). Catalogues differ in
their things, in which operations there are, in how everything is named and described, and in what
they demand of an argument's form. Some things and sums occur in held-out catalogues only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from coa.environments.toolbox.services import DATE_FORMS, KEY, KEY_FORMS, UNITS, schema_of, words
from coa.io.runs import Json

OPERATIONS = 8
"""About so many a generated catalogue has."""


@dataclass(frozen=True)
class Field:
    """A field of a thing, or an argument of a sum."""

    name: str
    """In answers of the service."""
    kind: str
    base: str
    """Under which people's words for it are listed."""

    @property
    def said(self) -> tuple[str, ...]:
        """What people say for it."""
        usual = self.base.replace("_", " ")
        return tuple(words("phrases").get(self.base, (usual,)))

    @property
    def refers_to(self) -> str:
        return self.kind[1:].rstrip("!?") if self.kind.startswith(">") else ""

    @property
    def is_unique(self) -> bool:
        return self.kind.endswith("!")


@dataclass(frozen=True)
class Thing:
    """A kind of record."""

    name: str
    noun: str
    id: str
    """What its key is called in answers."""
    prefix: str
    fields: tuple[Field, ...]

    def spec(self) -> Json:
        fields = {each.name: each.kind for each in self.fields}
        return {"noun": self.noun, "id": self.id, "prefix": self.prefix, "fields": fields}


@dataclass(frozen=True)
class Operation:
    """A tool of a catalogue: what a model is told, and what it does."""

    declaration: Json
    does: Json
    fields: tuple[Field, ...] = ()
    """What its arguments mean, the key aside; of a sum all of them."""

    @property
    def name(self) -> str:
        return str(self.declaration["name"])


@dataclass(frozen=True)
class ApiCatalogue:
    """The tools of one provider."""

    provider: str
    seed: int
    things: dict[str, Thing]
    operations: tuple[Operation, ...]
    source: str = "generated"
    held_out: bool = field(default=False)

    def of(self, does: str, thing: str = "") -> list[Operation]:
        """Operations of a kind, of a thing where one is named."""
        found = [each for each in self.operations if each.does["does"] == does]
        return [each for each in found if not thing or each.does["thing"] == thing]


_VERBS: dict[str, tuple[str, ...]] = {
    "get": ("get", "fetch", "show", "read", "retrieve", "describe", "view", "lookup"),
    "find": ("find", "locate", "resolve", "identify"),
    "list": ("list", "search", "filter", "query", "select", "browse"),
    "create": ("create", "add", "register", "open", "submit", "insert", "enter"),
    "update": ("update", "set", "change", "edit", "modify", "adjust"),
    "remove": ("delete", "remove", "cancel", "close", "withdraw", "drop"),
    "compute": ("calculate", "estimate", "compute", "quote", "work_out", "predict"),
}
_SAYS: dict[str, tuple[str, ...]] = {
    "get": (
        "Get the {gives} of one {noun} by its {key}.",
        "Show what is on record for one {noun}: {gives}.",
        "Returns {gives} for the {noun} with the given {key}.",
        "Look up one {noun}; the answer has its {gives}.",
        "Details of one {noun} ({gives}).",
    ),
    "find": (
        "Find the {key} of the {noun} with this {by}.",
        "Returns the {key} of a {noun}, given its {by}.",
        "Look for a {noun} by {by}; the answer is its {key}.",
        "Turn the {by} of a {noun} into its {key}.",
    ),
    "list": (
        "List the {nouns} that match all filters, and count them.",
        "Search {nouns} by {by}. Returns how many there are and their {key}s.",
        "Count and list {nouns}, optionally by {by}.",
        "All {nouns} with the given {by}.",
    ),
    "create": (
        "Create a {noun}. Returns its new {key}.",
        "Register a new {noun} with {by}; answers with its {key}.",
        "Add a {noun} to the records and return the {key} that it gets.",
        "Enter a new {noun}.",
    ),
    "update": (
        "Change the {by} of a {noun}. Returns a receipt.",
        "Set another {by} for one {noun}; answers with a receipt.",
        "Update a {noun}: {by}. The answer is the receipt of the change.",
    ),
    "remove": (
        "Remove a {noun} from the records. Returns a receipt.",
        "Cancel one {noun} by its {key}; answers with a receipt.",
        "Delete the {noun} with this {key} and return a receipt.",
    ),
    "compute": (
        "Calculate the {noun} from {by}.",
        "Returns the {noun} for the given {by}.",
        "Estimate a {noun}; needs {by}.",
        "Work out the {noun} by the rates of this provider.",
    ),
}
_OBJECTS = ("details", "attributes", "payload", "info", "properties")
_STRANGE = "alpha beta gamma delta kappa lambda sigma omega theta zeta".split()


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"


def listing(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


@cache
def held_out_words(table: str) -> frozenset[str]:
    """The things (sums) that occur in held-out catalogues only: whole families, since a thing comes
    with those that it refers to."""
    names = list(words(table))
    rng = random.Random(f"held out|{table}")
    chosen = set(rng.sample(names, len(names) // 7))
    if table == "things":
        for name in list(chosen):
            chosen |= set(_referred(name))
        for name in names:  # what refers to a held-out thing would show it
            if set(_referred(name)) & chosen:
                chosen.add(name)
    return frozenset(chosen)


def _referred(name: str) -> list[str]:
    found, todo = [], [name]
    while todo:
        for other in re.findall(r":>(\w+)", words("things")[todo.pop()]):
            found.append(other)
            todo.append(other)
    return found


@cache
def generated(number: int, held_out: bool = False) -> ApiCatalogue:
    """The catalogue of that number; the same one whenever it is asked for."""
    return _Maker(number, held_out).catalogue()


class _Maker:
    def __init__(self, number: int, held_out: bool) -> None:
        self.held_out, self.number = held_out, number
        self.rng = random.Random(f"catalogue|{number}|{held_out}")
        rng = self.rng
        self.joined = rng.choice(("snake", "snake", "snake", "behind", "glued"))
        self.with_units = rng.random() < 0.5
        self.key = rng.choice(("id", "code", "number", "reference"))
        self.short_key = rng.random() < 0.2
        self.prefix = rng.choice(("", "", "", "", f"{rng.choice(_STRANGE)}_"))
        self.wordy = rng.random()
        """How often an argument is described."""
        self.names: set[str] = set()

    def catalogue(self) -> ApiCatalogue:
        rng, kept = self.rng, held_out_words("things")
        known = [name for name in words("things") if (name in kept) == self.held_out]
        first, second = rng.choice(known), rng.choice(known)
        names = [first, *_referred(first)]
        names += [second, *_referred(second)] if len(names) < 3 else []
        things = {name: self._thing(name) for name in dict.fromkeys(names)}
        made: list[Operation] = []
        for place, thing in enumerate(things.values()):
            made += self._operations(thing, whole=place == 0)
        spare = held_out_words("sums")
        sums = [name for name in words("sums") if (name in spare) == self.held_out]
        made += [self._sum(name) for name in rng.sample(sums, rng.randint(1, 3))]
        rng.shuffle(made)
        provider = f"{'held' if self.held_out else 'made'}-{self.number}"
        return ApiCatalogue(
            provider, rng.randrange(10**6), things, tuple(made), held_out=self.held_out
        )

    def _thing(self, name: str) -> Thing:
        fields = []
        for each in words("things")[name].split():
            base, _, kind = each.partition(":")
            named = f"{base}_{kind}" if self.with_units and kind in UNITS else base
            if kind.startswith(">"):
                named = f"{base}_{self.key}"
            fields.append(Field(named, kind, base))
        prefix = (name[:2] if self.rng.random() < 0.7 else name[0] + name[-1]).upper()
        return Thing(name, name.replace("_", " "), f"{name}_{self.key}", prefix, tuple(fields))

    # -- operations -------------------------------------------------------------------------

    def _operations(self, thing: Thing, whole: bool) -> list[Operation]:
        rng = self.rng
        made = [self._get(thing)]
        unique = [each for each in thing.fields if each.is_unique]
        if unique:
            made.append(self._find(thing, unique[0]))
        if whole or rng.random() < 0.4:
            made.append(self._list(thing))
        if rng.random() < (0.8 if whole else 0.25):
            made.append(self._create(thing))
        if rng.random() < (0.8 if whole else 0.25):
            made.append(self._update(thing))
        if rng.random() < 0.4:
            made.append(self._remove(thing))
        return made

    def _get(self, thing: Thing) -> Operation:
        gives = [each.name for each in thing.fields]
        return self._made("get", thing, [], gives=gives)

    def _find(self, thing: Thing, by: Field) -> Operation:
        return self._made("find", thing, [by], key=False)

    def _list(self, thing: Thing) -> Operation:
        plain = [f for f in thing.fields if "|" in f.kind or f.kind in ("city", "flag", "country")]
        others = [f for f in thing.fields if f.kind.rstrip("!?") in ("person", "topic")]
        chosen = (plain + others)[: self.rng.randint(1, 3)] or [thing.fields[0]]
        return self._made("list", thing, chosen, key=False, optional=len(chosen))

    def _create(self, thing: Thing) -> Operation:
        count = min(len(thing.fields), self.rng.randint(2, 4))
        chosen = self.rng.sample(thing.fields, count)
        optional = self.rng.randint(0, max(0, count - 2))
        return self._made("create", thing, chosen, key=False, optional=optional)

    def _update(self, thing: Thing) -> Operation:
        chosen = self.rng.sample(thing.fields, min(len(thing.fields), self.rng.randint(1, 3)))
        return self._made("update", thing, chosen, optional=len(chosen) if len(chosen) > 1 else 0)

    def _remove(self, thing: Thing) -> Operation:
        return self._made("remove", thing, [])

    def _made(
        self,
        does: str,
        thing: Thing,
        fields: Sequence[Field],
        *,
        key: bool = True,
        optional: int = 0,
        gives: Sequence[str] = (),
    ) -> Operation:
        """An operation on a thing; the last `optional` fields need not be given."""
        rng = self.rng
        properties: Json = {}
        by: dict[str, str] = {}
        forms: dict[str, str] = {}
        required: list[str] = []
        told = thing.noun if rng.random() < 0.8 else "record"
        if key:
            name = self.key if self.short_key else f"{thing.name}_{self.key}"
            properties[name] = {
                "type": "string",
                "description": f"{self.key.title()} of the {told}",
            }
            by[name] = KEY
            required.append(name)
            if rng.random() < 0.12:
                forms[name] = rng.choice(KEY_FORMS)
        inside = rng.choice(_OBJECTS) if does == "create" and rng.random() < 0.25 else ""
        nested: Json = {}
        for place, each in enumerate(fields):
            name = each.name
            wanted = place < len(fields) - optional
            part = self._argument(each, thing.noun)
            if inside:
                nested[name] = part
            else:
                properties[name] = part
                required += [name] if wanted else []
            path = f"{inside}.{name}" if inside else name
            by[path] = each.name
            if each.kind.rstrip("!?") == "date":
                odd = rng.random() < 0.25
                forms[path] = rng.choice(DATE_FORMS) if odd else "iso"
                if not odd or rng.random() < 0.3:
                    part["description"] = _begun(f"{each.said[0]}, {_FORM_SAID[forms[path]]}")
        if inside:
            must = list(nested)[: len(fields) - optional]
            properties[inside] = {"type": "object", "properties": nested, "required": must}
            required.append(inside)
        said = self._says(does, thing.noun, thing.fields if does == "get" else fields)
        declaration = self._declared(does, thing.name, said, properties, required)
        doing: Json = {"does": does, "thing": thing.name, "by": by}
        doing |= {"gives": list(gives)} if gives else {}
        doing |= {"forms": forms} if forms else {}
        return Operation(declaration, doing, tuple(fields))

    def _sum(self, name: str) -> Operation:
        rng = self.rng
        taken, _, gives = words("sums")[name].partition(" -> ")
        quantity, _, unit = gives.partition(" ")
        given = rng.random() < 0.5 and unit
        fields: list[Field] = []
        properties: Json = {}
        required: list[str] = []
        for each in taken.split():
            base, _, kind = each.partition(":")
            label = f"{base}_{kind}" if self.with_units and kind in UNITS else base
            fields.append(Field(label, kind, base))
            properties[label] = self._argument(fields[-1], "")
            required += [] if kind.endswith("?") else [label]
        said = self._says("compute", name.replace("_", " "), fields)
        declaration = self._declared("compute", name, said, properties, required)
        by = {each.name: each.base for each in fields}
        out = f"{quantity}_{unit}" if given else quantity
        does: Json = {"does": "compute", "thing": name, "by": by, "gives": [out]}
        return Operation(declaration, does, tuple(fields))

    # -- words ------------------------------------------------------------------------------

    def _argument(self, each: Field, noun: str) -> Json:
        part = schema_of(each.kind)
        unit = each.kind.rstrip("!?")
        about = self.rng.choice(each.said)
        about = f"{about} of the {noun}" if noun and self.rng.random() < 0.3 else about
        if unit in UNITS and not each.name.endswith(unit):
            about = f"{about} in {unit}"
        if each.refers_to:
            about = f"{self.key} of the {each.refers_to}"
        if self.rng.random() < self.wordy or each.name not in about.replace(" ", "_"):
            part["description"] = _begun(about)
        return part

    def _says(self, does: str, noun: str, fields: Sequence[Field]) -> str:
        said = listing([self.rng.choice(each.said) for each in fields]) if fields else "data"
        text = self.rng.choice(_SAYS[does])
        if noun[0] in "aeiou":
            text = re.sub(r"\ba (?=\{noun\})", "an ", text, flags=re.I)
        return text.format(
            noun=noun,
            nouns=plural(noun),
            key=self.key,
            by=said.replace(" and ", " or "),
            gives=said,
        )

    def _declared(
        self, does: str, thing: str, said: str, properties: Json, required: list[str]
    ) -> Json:
        order = list(properties)
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        parameters: Json = {"type": "object", "properties": {n: properties[n] for n in order}}
        parameters |= {"required": [n for n in order if n in required]}
        parameters["additionalProperties"] = False
        return {"name": self._name(does, thing), "description": said, "parameters": parameters}

    def _name(self, does: str, thing: str) -> str:
        verb = self.rng.choice(_VERBS[does])
        noun = plural(thing) if does == "list" else thing
        tail = (
            self.rng.choice(("", "", "", "_details", "_record", "_data")) if does == "get" else ""
        )
        if does == "find":
            tail = self.rng.choice(("", f"_{self.key}", f"_by_{'name'}"))
        made = {"behind": f"{noun}_{verb}{tail}", "snake": f"{verb}_{noun}{tail}"}
        name = made.get(self.joined, made["snake"].replace("_", ""))
        name = f"{self.prefix}{name}"
        while name in self.names:
            name += "_2"
        self.names.add(name)
        return name


def _begun(text: str) -> str:
    return text[:1].upper() + text[1:]


_FORM_SAID = {
    "iso": "written YYYY-MM-DD",
    "dotted": "written DD.MM.YYYY",
    "american": "written MM/DD/YYYY",
}
