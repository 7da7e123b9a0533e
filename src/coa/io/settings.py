"""Recipes: a TOML file and `a.b=value` overrides become one validated, frozen dataclass.

The settings of a stage are a frozen dataclass beside that stage; its fields, types and defaults are
the schema, and the comments in the TOML are the documentation. There is no flag per field and no
registry. `find_recipe` finds a file, or a shipped recipe by its name. Overrides are written as TOML
values (`sft.epochs=2`, `rl.clip=[0.2, 0.28]`); what is not one is taken as plain text, so
`model=hf:some/name` needs no quotes, and `none` unsets an optional. Of a list of tables a number
names one, from 0: `tasks.0.n=50`.

Types are checked strictly (no `"3"` for 3, no `true` for 1; an int is fine where a float is
expected), and a key nobody reads is an error, because a misspelt setting that is ignored costs a
training run.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from coa.errors import ConfigError, did_you_mean
from coa.io.runs import Json

S = TypeVar("S")
Key = tuple[str, ...]

_BOUNDS = ("greater_than", "less_than", "too_", "string_too", "string_pattern")
"""How the names of pydantic's errors begin whose messages say more than the type."""


@dataclasses.dataclass(frozen=True)
class Option:
    """Makes a field of settings an option of the commands that take these settings, as in
    `k: Annotated[int, Option("Rollouts per task.")] = 1`."""

    help: str
    name: str = ""
    """Of the option; empty: that of the field."""
    least: float | None = None
    many: bool = False
    """Whether it may be given several times."""


_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def load_recipe(
    path: Path | None,
    overrides: Sequence[str],
    schema: type[S],
    defaults: Mapping[str, Any] | None = None,
) -> S:
    """Settings from `defaults`, then the recipe at `path`, then `overrides`: the last one wins."""
    merged: Json = {}
    _merge(merged, defaults or {})
    if path is not None:
        _merge(merged, read_toml(path))
    origins: dict[Key, str] = {}
    for override in overrides:
        key, text = _split(override)
        origins[key] = override
        try:
            _put(merged, key, _parse_value(text, _annotation(schema, key)))
        except IndexError as exc:
            raise ConfigError(f"override {override!r}: {exc}.") from None

    def where(key: Key) -> str:
        for depth in range(len(key), 0, -1):
            if key[:depth] in origins:
                return f"override {origins[key[:depth]]!r}"
        return str(path) if path is not None else "settings"

    return _validate(merged, schema, where)


def find_recipe(given: str | Path) -> Path:
    """The file itself; where there is none, the shipped recipe of that name.

    `sft-135m`, `sft-135m.toml` and `recipes/sft-135m.toml` are names. A path into another folder
    is not: who misspells a folder must not get settings that were never meant.
    """
    path = Path(given)
    if path.exists() and not path.is_dir():
        return path
    folder = Path(str(resources.files("coa").joinpath("recipes")))
    shipped = {each.stem: each for each in sorted(folder.glob("*.toml"))}
    name = path.name.removesuffix(".toml")
    if name in shipped and path.parent.name in ("", "recipes"):
        return shipped[name]
    if path.is_dir():
        return path  # whoever reads it says so
    near = difflib.get_close_matches(name, shipped, n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{given}: no such recipe file.{meant} Shipped: {', '.join(shipped)}.")


def read_pairs(overrides: Sequence[str]) -> Json:
    """`name=value` for what has no schema: a value is read as TOML, or else is text."""
    merged: Json = {}
    for override in overrides:
        key, text = _split(override)
        _put(merged, key, _parse_value(text, Any))
    return merged


def read_toml(path: Path) -> Json:
    """Read a TOML file; what is wrong with it is one line with the path and the line number."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe file.") from None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({exc.reason}).") from None
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}.") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        found = re.search(r" \(at line (\d+), column \d+\)$", str(exc))
        line = int(found[1]) if found else text.count("\n") + 1
        message = re.sub(r" \(at [^)]*\)$", "", str(exc))
        raise ConfigError(f"{path}:{line}: not TOML: {message}.") from None


def to_json(settings: object) -> Json:
    """The resolved settings as plain JSON values, for a manifest."""
    assert dataclasses.is_dataclass(settings) and not isinstance(settings, type), settings
    plain: Json = json.loads(json.dumps(dataclasses.asdict(settings), default=_plain))
    return plain


_SPEED = {
    "sft": ("threads", "checkpoint_every"),
    "rl": ("threads", "log", "checkpoint_every", "keep_rollouts"),
    "rollout": ("concurrency", "memory_gb", "seconds", "seeded"),
    "eval": ("concurrency",),
}
_ROUNDING = ("micro_tokens", "checkpointing")
"""What changes no more than the last bits, which only `deterministic` promises."""


def without_speed(recipe: Json) -> Json:
    """A recipe's tables without what changes no result: a run may be continued with other numbers
    of threads, with less at once after it ran out of memory, or without the alarm that stopped it.
    """
    made = {name: table for name, table in recipe.items() if name != "alarms"}
    for table in _SPEED.keys() & made.keys():
        free = _SPEED[table] + (() if made[table].get("deterministic") else _ROUNDING)
        made[table] = {k: v for k, v in made[table].items() if k not in free}
    return made


_RANGES: dict[str, Callable[[float], bool]] = {  # written so that NaN is in none of them
    "at least 1": lambda found: found >= 1,
    "at least 2": lambda found: found >= 2,
    "more than 0": lambda found: found > 0,
    "more than 0 and finite": lambda found: 0 < found < math.inf,
    "0 or more and finite": lambda found: 0 <= found < math.inf,
    "0 or more": lambda found: found >= 0,
    "between 0 and 1": lambda found: 0 <= found <= 1,
    "at least 0, below 1": lambda found: 0 <= found < 1,
    "more than 0, at most 1": lambda found: 0 < found <= 1,
    "between 1 and 4": lambda found: 1 <= found <= 4,
}


def check_ranges(settings: object, table: str, ranges: Mapping[str, str]) -> None:
    """Raise unless the settings named for a range are in it, or none at all."""
    for expected, names in ranges.items():
        for name in names.split():
            found = getattr(settings, name)
            if found is not None and not _RANGES[expected](found):
                where = f"{table}.{name}" if table else name
                raise ConfigError(f"{where}: found {found}, expected {expected}.")


def _merge(into: Json, other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, Mapping):
            held = into.get(name)
            table = into[name] = held if isinstance(held, dict) else {}
            _merge(table, value)
        else:
            into[name] = copy.deepcopy(value)  # an override may change an item of a list


def _put(values: Json, key: Key, value: Any) -> None:
    """Set what `key` names, making the tables on the way; an item of a list has to be there."""
    at: Any = values
    for depth, name in enumerate(key, start=1):
        place: Any = _place(at, key[:depth]) if isinstance(at, list) else name
        if depth == len(key) and isinstance(at, dict):
            _merge(at, {name: value})
        elif depth == len(key):
            at[place] = value
        else:
            inner = at[place] if isinstance(at, list) else at.get(place)
            if not isinstance(inner, (dict, list)):
                inner = at[place] = {}
            at = inner


def _place(found: list[Any], key: Key) -> int:
    """The last part of `key` as the number of an item of a list."""
    if not (key[-1].isdecimal() and int(key[-1]) < len(found)):
        numbers = f"0 to {len(found) - 1}" if found else "no number: it is empty"
        raise IndexError(f"{'.'.join(key[:-1])} is a list, found {key[-1]!r}, expected {numbers}")
    return int(key[-1])


def _split(override: str) -> tuple[Key, str]:
    name, equals, text = override.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key):
        raise ConfigError(f"override {override!r}: expected key=value, such as sft.epochs=2.")
    return key, text.strip()


def _parse_value(text: str, annotation: Any) -> Any:
    options = _options(annotation)
    if type(None) in options and text.lower() == "none":
        return None
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    wants_text = set(options) - {type(None)} in ({str}, {Path})
    if len(parsed) > 1 or (wants_text and not isinstance(value, str)):
        return text
    return value


def _options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone, without `Annotated`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _options(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(o for a in typing.get_args(annotation) for o in _options(a))
    return (annotation,)


def _schema_of(annotation: Any) -> Any:
    """The dataclass among the options of an annotation, or None."""
    return next((o for o in _options(annotation) if dataclasses.is_dataclass(o)), None)


def _fields(schema: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(schema, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema) if field.init}


def _annotation(schema: Any, key: Key) -> Any:
    """The annotation of the setting at `key`, or None where the schema does not say."""
    annotation = schema
    for name in key:
        annotation = _inside(annotation, name)
    return annotation


def _inside(annotation: Any, name: str) -> Any:
    """The annotation of a field of a table, or of an item of a list; None: there is no such."""
    schema = _schema_of(annotation)
    if schema is not None:
        return _fields(schema).get(name)
    for option in _options(annotation):
        args = typing.get_args(option)
        if name.isdecimal() and typing.get_origin(option) in (list, tuple, Sequence) and args:
            return args[0] if len(args) == 1 or Ellipsis in args else args[int(name) % len(args)]
    return None


def _validate(values: Json, schema: type[S], where: Callable[[Key], str]) -> S:
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    # JSON, not Python objects: strict validation then still reads a list as a tuple, a string as
    # a Path or an Enum, and a table as a dataclass. In a list, because a dataclass takes no config.
    strictly = TypeAdapter(list[schema], config=ConfigDict(extra="forbid", strict=True))  # type: ignore[valid-type]
    try:
        return strictly.validate_json(json.dumps([values], default=str))[0]
    except ValidationError as exc:
        errors = exc.errors(include_url=False)
    unknown = [each for each in errors if each["type"] == "unexpected_keyword_argument"]
    # Of a union each member complains; who got furthest was meant.
    error = max(unknown or errors, key=lambda e: (len(e["loc"]), e["type"] == "value_error"))
    *table, last = location = error["loc"][1:] or ("",)
    key = _named(schema, location)
    name = ".".join(key)
    if unknown:
        key = _named(schema, table)
        known = _fields(_schema_of(_annotation(schema, key)))
        key = (*key, str(last))
        raise ConfigError(
            f"{where(key)}: {'.'.join(key)} is not a setting.{did_you_mean(key[-1], known)}"
        )
    expected = _expected(_annotation(schema, key)) if key else "a table"
    if error["type"] == "missing" and isinstance(last, str):
        full = ".".join(map(str, location))
        wanted = f"; expected {expected}" if full == name else ""
        raise ConfigError(f"{where(key)}: {full} is not set, and has no default{wanted}.")
    if error["type"] in ("value_error", "assertion_error"):
        reason = str(error["ctx"]["error"]).rstrip(".")
        raise ConfigError(f"{where(key)}: {name + ': ' if name else ''}{reason}.")
    reason = ""
    if error["type"].startswith(_BOUNDS):
        reason = f" ({error['msg'][0].lower()}{error['msg'][1:]})"
    found = _lookup(values, key)
    raise ConfigError(f"{where(key)}: {name} is {found!r}, expected {expected}{reason}.")


def _named(schema: Any, location: Sequence[str | int]) -> Key:
    """The part of an error's location that names settings and tables in lists, not the members of
    unions or plain items."""
    key: Key = ()
    annotation = schema
    for part in location:
        inner = _inside(annotation, str(part))
        if inner is None or (isinstance(part, int) and _schema_of(inner) is None):
            continue
        key, annotation = (*key, str(part)), inner
    return key


def _lookup(values: Any, key: Key) -> Any:
    for name in key:
        if isinstance(values, list) and name.isdecimal():
            values = values[int(name)]
        elif isinstance(values, Mapping):
            values = values.get(name)
    return values


def _expected(annotation: Any) -> str:
    """An annotation in words: 'an integer', "one of 'a', 'b'", 'a list of strings'."""
    return " or ".join(dict.fromkeys(_in_words(option) for option in _options(annotation)))


def _in_words(option: Any) -> str:
    origin, args = typing.get_origin(option), typing.get_args(option)
    if option is type(None):
        return "nothing"
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if isinstance(option, type) and issubclass(option, enum.Enum):
        return "one of " + ", ".join(repr(member.value) for member in option)
    if option is Path:
        return "a path in quotes"
    if dataclasses.is_dataclass(option) or (origin or option) in (dict, Mapping):
        return "a table"
    if origin is tuple and Ellipsis not in args:
        return f"a list of {len(args)} ({', '.join(_expected(arg) for arg in args)})"
    if (origin or option) in (list, tuple, set, frozenset, Sequence):
        return f"a list ({_expected(args[0])} each)" if args else "a list"
    return _TYPE_NAMES.get(option, str(getattr(option, "__name__", option)))


def _plain(value: Any) -> Any:
    """What JSON has no word for: the value of a member of an enumeration, else a text."""
    if isinstance(value, enum.Enum):
        return value.value
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
