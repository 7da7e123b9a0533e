"""JSON arguments of a tool: read what the model wrote, repair what is unambiguous, check it.

Small models write JSON almost right: with single quotes, a trailing comma, a brace missing at the
end, a sentence around it, or the bare value of the only argument. Each way to read such a text is a
candidate; when all candidates that fit the schema agree, that value is meant. Otherwise the model
is told what is expected.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from coa.errors import ToolMistake

Value = Any
MAX_LETTERS = 100_000
_MAX_DEPTH = 60
_MAX_EXAMPLE = 4
"""How deep an example goes: schemas may refer to themselves."""
_FENCE = re.compile(r"\A```[a-z]*\n(.*?)\n?```\Z", re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
_CONSTANT = re.compile(
    r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(true|false|null)\b""", re.DOTALL
)
_PYTHON_CONSTANTS = {"true": "True", "false": "False", "null": "None"}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def read_arguments(text: str, schema: Mapping[str, Any]) -> dict[str, Value]:
    """The arguments that `text` means under an object schema; ToolMistake when that is unclear."""
    if len(text) > MAX_LETTERS:
        raise ToolMistake(f"The arguments have {len(text)} characters; {MAX_LETTERS} are allowed.")
    if not schema.get("properties") and not text.strip():
        return {}
    strict = _parsed(text, json.loads)
    if isinstance(strict, dict):
        strict = _unwrapped(strict, schema)
        if problem := find_problem(strict, schema):
            raise ToolMistake(f"{problem} Expected {shape_of(schema)}")
        return strict
    meant: list[dict[str, Value]] = []
    for value in _candidates(text, schema):
        if not isinstance(value, dict):
            continue
        value = _unwrapped(value, schema)
        if not find_problem(value, schema) and value not in meant:
            meant.append(value)
    if len(meant) == 1:
        return meant[0]
    what = "can be read in several ways" if meant else "cannot be read as JSON"
    raise ToolMistake(f"The arguments {what}. Expected {shape_of(schema)}")


def unwrap(text: str, parameter: str) -> str:
    """The text of a tool that takes only text, where a model wrote it as `{"parameter": "text"}`,
    which is how most frameworks write calls."""
    if not text.lstrip().startswith("{"):
        return text
    value = _parsed(text, json.loads)
    only = value.get(parameter) if isinstance(value, dict) and len(value) == 1 else None
    return only if isinstance(only, str) else text


def only_text(schema: Mapping[str, Any]) -> str:
    """The name of the only argument, where that is a text that must be given and may be any; empty:
    the arguments are others. Such a call is written as the text alone."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or len(properties) != 1:
        return ""
    name, part = next(iter(properties.items()))
    plain = isinstance(part, dict) and part.get("type") == "string"
    free = plain and not {"enum", "const"} & part.keys()
    return name if free and name in schema.get("required", ()) else ""


def canonical(argument: str, only: str = "") -> str:
    """The same text for all ways to write the same arguments: JSON with its keys in order, where a
    bare text is that of the `only` argument."""
    bare = argument.strip()
    value = _parsed(bare, json.loads)
    if not isinstance(value, dict):
        if not only:
            return bare
        value = {only: bare}
    elif only and isinstance(text := value.get(only), str):
        value = {**value, only: text.strip()}  # a block cannot keep what stands around it
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def in_order(argument: str, schema: Mapping[str, Any]) -> str:
    """JSON arguments in the order of their schema, which is that of constrained decoding."""
    value = _parsed(argument, json.loads)
    if not isinstance(value, dict) or not schema.get("properties"):
        return argument
    first = [name for name in schema.get("properties", {}) if name in value]
    names = [*first, *sorted(value.keys() - {*first})]
    return json.dumps({name: value[name] for name in names}, ensure_ascii=False)


def _unwrapped(value: dict[str, Value], schema: Mapping[str, Any]) -> dict[str, Value]:
    """Arguments that fit once their quotes are taken off: "3" where a number is expected."""
    fitting = dict(value)
    for key, part in schema.get("properties", {}).items():
        given = value.get(key)
        if isinstance(given, str) and _problem(given, part, schema, key):
            inner = _parsed(given, json.loads)
            if inner is not None and not _problem(inner, part, schema, key):
                fitting[key] = inner
    return fitting


def _candidates(text: str, schema: Mapping[str, Any]) -> Iterator[Value]:
    """Every way in which a text that is not a JSON object may be meant."""
    bare = text.strip()
    if fenced := _FENCE.match(bare):
        bare = fenced[1].strip()
    objects = [bare[start:end] for start, end, _ in _scan(bare)]
    if len(objects) <= 1:  # of two objects, nobody knows which was meant
        for piece in dict.fromkeys([bare, *objects]):
            for form in dict.fromkeys([piece, _closed(piece)]):
                yield _parsed(form, json.loads)
                yield _parsed(form, _loosely)
                yield _parsed(_as_python(form), ast.literal_eval)
    required = schema.get("required", [])
    if len(required) == 1 and bare and bare[0] != "[" and "{" not in bare:
        value = {required[0]: _parsed(bare, json.loads)}
        yield {required[0]: bare} if find_problem(value, schema) else value


def _parsed(text: str, read: Callable[[str], Value]) -> Value:
    """None when it cannot be read, which no schema of arguments allows."""
    try:
        value = read(text)
        json.dumps(value, allow_nan=False)  # literals such as sets and bytes are no JSON
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return value


def _loosely(text: str) -> Value:
    """With line breaks inside strings and commas before closing brackets."""
    return json.loads(_TRAILING_COMMA.sub(lambda match: match[1] or "", text), strict=False)


def _as_python(text: str) -> str:
    """JSON's constants as Python writes them, outside of strings, for mixtures of the two."""
    return _CONSTANT.sub(lambda match: match[1] or _PYTHON_CONSTANTS[match[2]], text)


def _closed(text: str) -> str:
    """The text with what its last object lacks at the end: a quote, brackets."""
    missing = "".join(missing for _, _, missing in _scan(text))  # only the last lacks something
    return text.rstrip() + missing


def _scan(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, what is missing to close it) of each outermost object."""
    stack: list[str] = []
    start, quote, escaped = 0, "", False
    for at, letter in enumerate(text):
        if quote:
            if escaped:
                escaped = False
            elif letter == "\\":
                escaped = True
            elif letter == quote:
                quote = ""
        elif not stack:
            if letter == "{":
                stack, start = ["}"], at
        elif letter == '"':
            quote = letter
        elif letter in "{[":
            stack.append("}" if letter == "{" else "]")
            if len(stack) > _MAX_DEPTH:
                return
        elif letter == stack[-1]:
            stack.pop()
            if not stack:
                yield start, at + 1, ""
    if stack:
        yield start, len(text), quote + "".join(reversed(stack))


def find_problem(value: Value, schema: Mapping[str, Any]) -> str:
    """What is wrong with a value, in one sentence; empty when nothing is.

    Knows the keywords that describe arguments; others are left to the tool.
    """
    return _problem(value, schema, schema, "")


def _problem(value: Value, schema: Mapping[str, Any], root: Mapping[str, Any], at: str) -> str:
    schema = _resolved(schema, root)
    name = at or "The argument"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        problems = [_problem(value, option, root, at) for option in options]
        return "" if "" in problems else problems[0]
    if "enum" in schema and value not in schema["enum"]:
        known = ", ".join(json.dumps(each) for each in schema["enum"])
        return f"{name} is {_shown(value)}, expected one of {known}."
    if "const" in schema and value != schema["const"]:
        return f"{name} is {_shown(value)}, expected {json.dumps(schema['const'])}."
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{name} is {_shown(value)}, expected {' or '.join(map(_a, kinds))}."
    if isinstance(value, dict):
        return _object_problem(value, schema, root, at)
    problem = _size_problem(value, schema, name)
    items = schema.get("items")
    if not problem and isinstance(value, list) and isinstance(items, dict):
        inside = (_problem(v, items, root, f"{name}[{i}]") for i, v in enumerate(value))
        return next(filter(None, inside), "")
    return problem


def _object_problem(
    value: dict[str, Value], schema: Mapping[str, Any], root: Mapping[str, Any], at: str
) -> str:
    before = f"{at}." if at else ""
    for key in schema.get("required", []):
        if key not in value:
            return f"{before}{key} is missing."
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    for key, each in value.items():
        part = known.get(key, rest)
        if part is False:
            return f"{before}{key} is not an argument."
        if isinstance(part, dict) and (problem := _problem(each, part, root, f"{before}{key}")):
            return problem
    return ""


def _size_problem(value: Value, schema: Mapping[str, Any], name: str) -> str:
    """What is wrong with how large a number is, or how long a list or a text."""
    size: float
    if isinstance(value, list):
        size, of, found = len(value), "Items", f"has {len(value)} items"
    elif isinstance(value, str):
        size, of, found = len(value), "Length", f"has {len(value)} characters"
    elif isinstance(value, int | float) and not isinstance(value, bool):
        size, of, found = value, "imum", f"is {value}"
    else:
        return ""
    low, high = schema.get(f"min{of}"), schema.get(f"max{of}")
    if (low is not None and size < low) or (high is not None and size > high):
        one_end = f"at least {low}" if high is None else f"at most {high}"
        both = low is not None and high is not None
        return f"{name} {found}, expected {f'{low} to {high}' if both else one_end}."
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if of == "imum" and (
        (above is not None and size <= above) or (below is not None and size >= below)
    ):
        return f"{name} is {value}, which is out of range."
    return ""


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    for _ in range(_MAX_DEPTH):  # a reference to itself ends somewhere
        reference = schema.get("$ref", "")
        if not reference.startswith("#/$defs/"):
            break
        schema = root.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
    return schema


def _is(value: Value, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeio' else 'a'} {kind}" if kind != "null" else "null"


def _shown(value: Value) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def shape_of(schema: Mapping[str, Any]) -> str:
    """The arguments in one line, for a prompt: {"city": string, "days": integer (optional)}."""
    return _shape(schema, schema, ())


def _shape(schema: Mapping[str, Any], root: Mapping[str, Any], inside: tuple[str, ...]) -> str:
    required = set(schema.get("required", []))
    parts = [
        f"{json.dumps(name)}: {_kind(part, root, inside)}"
        + ("" if name in required else " (optional)")
        for name, part in schema.get("properties", {}).items()
    ]
    return f"{{{', '.join(parts)}}}"


_CONTENT = "the content is a JSON object "
_PLAUSIBLE: Mapping[str, Value] = {
    "string": "Lima",
    "integer": 3,
    "number": 2.5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}
_BY_NAME = {
    "date": "2025-03-01",
    "time": "09:30",
    "mail": "ada@example.org",
    "url": "https://example.org/arlen",
    "path": "notes/arlen.txt",
    "file": "notes/arlen.txt",
    "currency": "EUR",
    "country": "Peru",
    "id": "A-17",
    "number": "A-17",
    "query": "founder of Arlen",
}
"""What a text may be, by a word in the name of its argument."""


def plausible(schema: Mapping[str, Any]) -> dict[str, Value]:
    """Arguments that a worked example may show: what the schema names, or a value by its type."""
    found: dict[str, Value] = _plausible({**schema, "type": "object"}, schema, "", 0)
    return found


def _plausible(schema: Mapping[str, Any], root: Mapping[str, Any], name: str, depth: int) -> Value:
    schema = _resolved(schema, root)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        schema = _resolved(options[0], root)
    for value in (*schema.get("examples", ()), schema.get("default"), schema.get("const")):
        if value is not None and not _problem(value, schema, root, ""):
            return value
    if schema.get("enum"):
        return schema["enum"][0]
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else next(iter(kinds), "string")
    if kind == "object" and depth < _MAX_EXAMPLE:
        known = schema.get("properties", {})
        wanted = schema.get("required") or list(known)[:1]
        return {key: _plausible(known.get(key, {}), root, key, depth + 1) for key in wanted}
    if kind == "array" and isinstance(schema.get("items"), dict) and depth < _MAX_EXAMPLE:
        return [_plausible(schema["items"], root, name, depth + 1)]
    if kind == "string":
        words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
        return next((_BY_NAME[word] for word in reversed(words) if word in _BY_NAME), "Lima")
    value = _PLAUSIBLE.get(kind, "Lima")
    if _problem(value, schema, root, ""):
        return schema.get("minimum", schema.get("maximum", value))
    return value


def described(about: str, schema: Mapping[str, Any]) -> str:
    """What a prompt says of a tool with JSON arguments: what it does, their shape and meaning."""
    shape = f"{_CONTENT}{shape_of(schema)}"
    said = f"{about}; {shape}" if about else shape[0].upper() + shape[1:]
    meanings = [f"{name}: {meaning}" for name, meaning in _meanings(schema, schema, ())]
    return f"{said}. {'; '.join(meanings)}" if meanings else said


_SENTENCE = re.compile(r"(?<=\w\w[.!?])\s|\s[-\u2013]\s")
_ASIDE = re.compile(r"\([^()]*\)|,? (?:e\.g\.|such as|for example)[^;]*|\s+")
_MOST_OPTIONS, _MOST_ABOUT, _MOST_MEANING = 12, 120, 60


def signature_of(about: str, schema: Mapping[str, Any]) -> str:
    """One line of a compact prompt on a tool with JSON arguments: their names and types, `?` behind
    those that may be left out, what those mean whose names do not say it, and the first sentence on
    what the tool does."""
    said = re.split(rf";? ?{_CONTENT}", about, maxsplit=1, flags=re.IGNORECASE)[0]
    line = f"{_brief_shape(schema, schema, 0)} {_opening(said, _MOST_ABOUT)}"
    return line.strip()


def _brief_shape(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    required = schema.get("required", ())
    parts = []
    for name, part in schema.get("properties", {}).items():
        optional = "" if name in required else "?"
        about = _opening(str(part.get("description") or ""), _MOST_MEANING)
        told = f" ({about})" if about and not _says(name, about) else ""
        parts.append(f"{json.dumps(name)}{optional}: {_brief_kind(part, root, depth)}{told}")
    return f"{{{', '.join(parts)}}}"


def _brief_kind(part: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    part = _resolved(part, root)
    options = part.get("enum", ())
    if len(options) > _MOST_OPTIONS:
        first = " | ".join(map(json.dumps, options[:_MOST_OPTIONS]))
        return f"{first} | {len(options) - _MOST_OPTIONS} more"
    if part.get("type") == "array" and isinstance(part.get("items"), dict):
        return f"list of {_brief_kind(part['items'], root, depth)}"
    if part.get("properties") and depth < 2:
        return _brief_shape(part, root, depth + 1)
    return _kind(part, root)


def _opening(text: str, most: int) -> str:
    """The first sentence of a description, cut at a word where it is long."""
    first = _SENTENCE.split(" ".join(_ASIDE.sub(" ", text).split()), maxsplit=1)[0].rstrip(". ,")
    if len(first) <= most:
        return first
    return f"{first[:most].rsplit(' ', 1)[0].rstrip(' ,')} ..."


def _says(name: str, about: str) -> bool:
    """Whether the name of an argument says what its description does."""
    known = set(words_of(name))
    told = [word for word in words_of(about) if len(word) > 2 and word not in _PLAIN_WORDS]
    return sum(word not in known for word in told) < max(1, len(told) / 2)


_PLAIN_WORDS = frozenset("the and for its with that this which given from value".split())
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Za-z])(?=\d)")


def words_of(text: str) -> list[str]:
    """The words of a text or a name, in small letters, without the endings of the plural."""
    found = re.findall(r"[a-z]+|\d+", _CAMEL.sub(" ", text).lower())
    return [_stem(word) for word in found]


def _stem(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return f"{word[:-3]}y"
    if len(word) > 4 and word.endswith(("ses", "xes", "ches", "shes")):
        return word[:-2]
    plural = len(word) > 3 and word[-1] == "s" and word[-2] not in "su"
    return word[:-1] if plural or word == "ids" else word


def _meanings(
    schema: Mapping[str, Any], root: Mapping[str, Any], inside: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """What arguments mean, also those of models inside of models."""
    for name, each in schema.get("properties", {}).items():
        if each.get("description"):
            yield name, each["description"].strip().rstrip(".")
        model = each.get("$ref", "")
        if model and model not in inside:
            inner = _meanings(_resolved(each, root), root, (*inside, model))
            yield from ((f"{name}.{part}", meaning) for part, meaning in inner)


def without_words(schema: Any, words: Collection[str] = ("description",)) -> Any:
    """The schema without keywords that decide about no value."""
    if isinstance(schema, list):
        return [without_words(each, words) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in ("properties", "$defs") and isinstance(value, dict):  # names, not keywords
            kept[key] = {name: without_words(part, words) for name, part in value.items()}
        elif key not in words:
            kept[key] = without_words(value, words)
    return kept


def _kind(schema: Mapping[str, Any], root: Mapping[str, Any], inside: tuple[str, ...] = ()) -> str:
    model = schema.get("$ref", "")
    schema = _resolved(schema, root)
    if "enum" in schema:
        return " | ".join(json.dumps(each) for each in schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(_kind(each, root, inside) for each in options))
    kind = schema.get("type", "any")
    if kind == "array" and isinstance(schema.get("items"), dict):
        return f"list of {_kind(schema['items'], root, inside)}"
    if model and kind == "object" and model not in inside:  # its fields; a task's own are not shown
        return _shape(schema, root, (*inside, model))
    return kind if isinstance(kind, str) else " | ".join(kind)


# -- schemas that a stranger wrote -------------------------------------------------------------

_KNOWN_PARTS, _MAX_LEVELS, _MAX_OPTIONS, _MAX_WORDS = 300, 6, 64, 200
_TAG_LIKE = re.compile(r"<(?=[/\s]*\w)")
_BOUNDS = tuple(f"{end}{of}" for end in ("min", "max") for of in ("imum", "Length", "Items"))
_BOUNDS += ("exclusiveMinimum", "exclusiveMaximum")


def plain_words(text: str, most: int) -> str:
    """A stranger's words for a prompt or a message: one line, no tags, and not too many."""
    text = "".join(letter if letter.isprintable() else " " for letter in text[: 20 * most])
    text = _TAG_LIKE.sub("&lt;", " ".join(text.split()))
    return text if len(text) <= most else f"{text[:most].rpartition(' ')[0] or text[:most]}..."


def known_schema(schema: Any) -> dict[str, Value]:
    """What is known here of an object schema that a stranger wrote: a finite tree of the keywords
    that `find_problem` reads, with references followed. What is odd, or too deep or large, may be
    anything here, and is checked by whoever wrote it. `ToolMistake` says why there can be none."""
    known = _KnownSchema(schema if isinstance(schema, Mapping) else {}).part(schema, 0)
    known = {"type": "object", "properties": {}, **known}
    if known["type"] != "object":
        raise ToolMistake(f"its arguments are {_shown(known['type'])}, expected an object.")
    return known


class _KnownSchema:
    """Reads one schema, so many parts of it in all."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._left = root, _KNOWN_PARTS

    def part(self, schema: Any, level: int) -> dict[str, Value]:
        self._left -= 1
        if not isinstance(schema, Mapping) or level > _MAX_LEVELS or self._left < 0:
            return {}
        schema = self._followed(schema)
        for each in _listed(schema.get("allOf"))[:8]:
            inner = self._followed(each) if isinstance(each, Mapping) else {}
            schema = {**inner, **schema}
            schema.pop("additionalProperties", None)  # what one part forbids another may name
        made: dict[str, Value] = {}
        kinds = [k for k in _listed(schema.get("type")) if isinstance(k, str) and k in _TYPES]
        if kinds:
            made["type"] = kinds[0] if len(kinds) == 1 else kinds
        if _harmless(schema.get("enum")):
            made["enum"] = schema["enum"]
        if "const" in schema and _harmless([schema["const"]]):
            made["const"] = schema["const"]
        for key in ("anyOf", "oneOf"):
            options = [
                self.part(each, level + 1) for each in _listed(schema.get(key))[:_MAX_OPTIONS]
            ]
            if options and all(options):
                made[key] = options
        for key in _BOUNDS:
            if isinstance(size := schema.get(key), int | float) and abs(size) < 1e15:
                made[key] = size
        if isinstance(schema.get("items"), Mapping):
            made["items"] = self.part(schema["items"], level + 1)
        if isinstance(said := schema.get("description"), str) and said.strip():
            made["description"] = plain_words(said, _MAX_WORDS)
        return made | self._members(schema, level)

    def _members(self, schema: Mapping[str, Any], level: int) -> dict[str, Value]:
        """The arguments of an object, and which of them have to be given."""
        given = schema.get("properties")
        wanted = _listed(schema.get("required"))
        named = {**given} if isinstance(given, Mapping) else {}
        named |= {name: {} for name in wanted if isinstance(name, str) and name not in named}
        made: dict[str, Value] = {}
        for name, part in named.items():
            if _harmless([name]) and name and len(made) < _MAX_OPTIONS:
                made[name] = self.part(part, level + 1)
            elif name in wanted:
                raise ToolMistake(f"an argument is called {_shown(name)}.")
        found: dict[str, Value] = {"properties": made} if made or given is not None else {}
        if required := [name for name in made if name in wanted]:
            found["required"] = required
        rest = schema.get("additionalProperties")
        if isinstance(rest, bool):
            found["additionalProperties"] = rest or len(made) < len(named)
        elif isinstance(rest, Mapping):
            found["additionalProperties"] = self.part(rest, level + 1)
        return found

    def _followed(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a reference stands for, with what is said beside it."""
        for _ in range(_MAX_LEVELS):
            reference = schema.get("$ref")
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            found: Any = self._root
            for name in reference[2:].split("/"):
                found = found.get(name) if isinstance(found, Mapping) else None
            beside = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**found, **beside} if isinstance(found, Mapping) else beside
        return schema


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def _harmless(values: Any) -> bool:
    """Whether values can stand in a prompt and in a block: a few, short, and without tags."""
    if not isinstance(values, list) or not 0 < len(values) <= _MAX_OPTIONS:
        return False
    plain = (str, int, float, bool, type(None))
    texts = [each for each in values if isinstance(each, str)]
    return all(isinstance(each, plain) for each in values) and all(
        len(text) <= _MAX_WORDS and text.isprintable() and "<" not in text for text in texts
    )
