"""Simulated services: records that a seed draws, and operations that answer from them.

A service is plain JSON (`meta["service"]` of a task): its seed, its things with their fields, and
what each tool does. So a task file is all that the tools need. What a call changes is seen by later
calls of the same rollout. New codes, receipts and sums are made from the arguments: nobody can know
them without having made the right call.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import tomllib
from collections.abc import Callable, Mapping
from datetime import date, timedelta
from functools import cache
from importlib import resources
from typing import Any

from coa.errors import RecordError, ToolMistake
from coa.io.runs import Json

KEY, NO_EFFECT = "#", "~"
"""Stand for the key of a record, and for no field, where an argument is told what it means."""
BUSY = "the service is busy at the moment; the same call may work now."
UNITS: dict[str, tuple[float, float, int]] = {
    **{"kg": (0.5, 90, 1), "mg": (5, 900, 0), "tons": (20, 9000, 0), "km": (3, 900, 0)},
    **{"m": (1.5, 60, 1), "cm": (120, 210, 0), "mm": (10, 900, 0), "sqm": (20, 300, 0)},
    **{"m3": (1, 90, 1), "hectares": (2, 400, 0), "litres": (1, 200, 1), "kwh": (2, 90, 1)},
    **{"gb": (2, 512, 0), "mb": (3, 900, 0), "celsius": (1, 39, 1), "percent": (1, 99, 0)},
    **{"euros": (5, 4000, 2), "minutes": (5, 400, 0), "ms": (1, 900, 0), "decimal": (1, 900, 2)},
}
"""Unit -> lowest and highest value of a field, and its decimals."""
_RANGE = re.compile(r"(\d+)-(\d+)")
_FIRST_DAY, _DAYS = date(2023, 1, 1), 1700


@cache
def words(table: str) -> Mapping[str, Any]:
    """A table of `words.toml`."""
    text = resources.files(__package__).joinpath("words.toml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = tomllib.loads(text)[table]
    return found


@cache
def _listed(kind: str) -> tuple[str, ...]:
    return tuple(words("values")[kind].split())


# -- values ----------------------------------------------------------------------------------


def draw(kind: str, rng: random.Random) -> Any:
    """A value of a kind; of `>thing` nothing, since a key is drawn with the records."""
    kind = kind.rstrip("!?")
    if "|" in kind:
        return rng.choice(kind.split("|"))
    if found := _RANGE.fullmatch(kind):
        return rng.randint(int(found[1]), int(found[2]))
    if kind in UNITS:
        low, high, places = UNITS[kind]
        value = round(rng.uniform(low, high), places)
        return value if places else int(value)
    return _DRAWN[kind](rng)


def _two(first: str, second: str) -> Callable[[random.Random], str]:
    return lambda rng: f"{rng.choice(_listed(first))} {rng.choice(_listed(second))}"


def _one(kind: str) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(_listed(kind))


def _shaped(pattern: str) -> Callable[[random.Random], str]:
    """A text in which each A is some letter and each 0 some digit."""

    def make(rng: random.Random) -> str:
        letters = {"A": "ABCDEFGHJKLMNPRSTUVWXYZ", "0": "0123456789", "9": "123456789"}
        return "".join(rng.choice(letters.get(each, each)) for each in pattern)

    return make


_DRAWN: dict[str, Callable[[random.Random], Any]] = {
    "person": _two("first", "last"),
    "firm": _two("last", "firm"),
    "place": _two("quality", "spot"),
    "topic": _two("quality", "topic"),
    "product": _two("quality", "product"),
    "dish": _two("quality", "dish"),
    "pet": _one("pet"),
    "city": _one("city"),
    "country": _one("country"),
    "colour": _one("colour"),
    "date": lambda rng: (_FIRST_DAY + timedelta(days=rng.randrange(_DAYS))).isoformat(),
    "flag": lambda rng: rng.random() < 0.5,
    "phone": _shaped("0900-900000"),
    "code": _shaped("AA90000"),
    "gate": _shaped("A90"),
    "plate": _shaped("AA-900-AA"),
    "version": _shaped("9.0.9"),
    "street": lambda rng: f"{rng.randint(1, 180)} {_two('quality', 'spot')(rng)}",
    "route": lambda rng: " - ".join(rng.sample(_listed("city"), 2)),
    "email": lambda rng: (
        f"{rng.choice(_listed('first'))}.{rng.choice(_listed('last'))}@example.com".lower()
    ),
    "host": lambda rng: f"{rng.choice(_listed('product'))}{rng.randint(1, 99)}.example.com".lower(),
    "list": lambda rng: [rng.randint(2, 99) for _ in range(rng.randint(2, 4))],
}


def schema_of(kind: str) -> Json:
    """The JSON schema of the values of a kind."""
    kind = kind.rstrip("!?")
    if "|" in kind:
        return {"type": "string", "enum": kind.split("|")}
    if _RANGE.fullmatch(kind):
        return {"type": "integer"}
    if kind in UNITS:
        return {"type": "number" if UNITS[kind][2] else "integer"}
    if kind == "list":
        return {"type": "array", "items": {"type": "number"}}
    return {"type": "boolean"} if kind == "flag" else {"type": "string"}


# -- forms in which a service wants an argument ----------------------------------------------


def _dotted(text: str) -> str:
    day, month, year = _matched(r"(\d\d)\.(\d\d)\.(\d{4})", text)
    return f"{year}-{month}-{day}"


def _american(text: str) -> str:
    month, day, year = _matched(r"(\d\d)/(\d\d)/(\d{4})", text)
    return f"{year}-{month}-{day}"


def _iso(text: str) -> str:
    year, month, day = _matched(r"(\d{4})-(\d\d)-(\d\d)", text)
    return f"{year}-{month}-{day}"


def _joined(text: str) -> str:
    letters, digits = _matched(r"([a-z]{2,4})(\d{4,5})", text)
    return f"{letters.upper()}-{digits}"


def _hashed(text: str) -> str:
    return "-".join(_matched(r"#([A-Z]{2,4})-(\d{4,5})", text))


def _matched(pattern: str, text: str) -> tuple[str, ...]:
    found = re.fullmatch(pattern, text.strip())
    if found is None:
        raise ValueError(text)
    return found.groups()


FORMS: dict[str, tuple[Callable[[str], str], str]] = {
    "iso": (_iso, "a date as in 2025-12-31"),
    "dotted": (_dotted, "day.month.year as in 31.12.2025"),
    "american": (_american, "month/day/year as in 12/31/2025"),
    "joined": (_joined, "small letters and no hyphen as in ab1234"),
    "hashed": (_hashed, "a # before the code as in #AB-1234"),
}
"""Form -> how it is read, and how a service says what it expected."""
DATE_FORMS, KEY_FORMS = ("dotted", "american"), ("joined", "hashed")


# -- the state -------------------------------------------------------------------------------


def key_of(seed: int, thing: str, prefix: str, number: int) -> str:
    """The key of a thing's record by its number; no two are the same."""
    digest = hashlib.sha256(f"{seed}|{thing}".encode()).digest()
    return f"{prefix}-{1000 + (int.from_bytes(digest[:4], 'big') + 457 * number) % 9000}"


def _digest(*parts: Any) -> int:
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _canonical(value: Any) -> Any:
    """The same for all ways to write the same value."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, list):
        return [_canonical(each) for each in value]
    return " ".join(str(value).split()).casefold()


def flattened(arguments: Json, before: str = "") -> Json:
    """Arguments by their path: those of an object inside have its name and a dot before them."""
    found: Json = {}
    for name, value in arguments.items():
        if isinstance(value, dict):
            found |= flattened(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


class ServiceState:
    """The records of one rollout, and what was done to them."""

    def __init__(self, service: Json) -> None:
        try:
            self.seed, self.things, self.tools = (service[k] for k in ("seed", "things", "tools"))
            self.records = {thing: self._drawn(thing) for thing in self.things}
        except (KeyError, TypeError, AttributeError) as wrong:
            raise RecordError(
                f"a service is {str(service)[:60]!r}, expected seed, things and tools ({wrong!r})."
            ) from None
        self._called: set[str] = set()

    def _drawn(self, thing: str) -> dict[str, Json]:
        about = self.things[thing]
        rng = random.Random(f"{self.seed}|{thing}")
        keys = [key_of(self.seed, thing, about["prefix"], k) for k in range(self.count(thing))]
        made: dict[str, Json] = {}
        taken: dict[str, set[Any]] = {}
        for key in keys:
            made[key] = {
                field: self._value(kind, rng, taken.setdefault(field, set()))
                for field, kind in about["fields"].items()
            }
        return made

    def count(self, thing: str) -> int:
        return 9 + _digest(self.seed, thing) % 8

    def _value(self, kind: str, rng: random.Random, taken: set[Any]) -> Any:
        if kind.startswith(">"):
            other = kind[1:].rstrip("!?")
            about, number = self.things[other], rng.randrange(self.count(other))
            return key_of(self.seed, other, about["prefix"], number)
        for _ in range(200):
            value = draw(kind, rng)
            if not kind.endswith("!") or value not in taken:
                break
        if kind.endswith("!"):
            taken.add(value)
        return value

    # -- calls ------------------------------------------------------------------------------

    def call(self, name: str, arguments: Json) -> Json:
        """What a tool answers; ToolMistake says what is wrong with a call."""
        does = self.tools[name]
        if does.get("busy") and name not in self._called:
            self._called.add(name)
            raise ToolMistake(BUSY)
        values: Json = {}
        for path, value in flattened(arguments).items():
            field = does["by"].get(path)
            if field is None:
                raise ToolMistake(f"{path} is not an argument of {name}.")
            if field != NO_EFFECT:
                values[field] = self._read(does, path, value)
        done: Json = getattr(self, f"_{does['does']}")(does, values)
        return done

    def _read(self, does: Json, path: str, value: Any) -> Any:
        form = does.get("forms", {}).get(path)
        if form is None:
            return value
        read, expected = FORMS[form]
        try:
            return read(str(value))
        except ValueError:
            raise ToolMistake(f"{path} is {value!r}, expected {expected}.") from None

    def _record(self, does: Json, values: Json) -> tuple[str, Json]:
        key, records = str(values.get(KEY, "")).strip(), self.records[does["thing"]]
        if key not in records:
            raise ToolMistake(f"there is no {self.things[does['thing']]['noun']} {key!r}.")
        return key, records[key]

    def _get(self, does: Json, values: Json) -> Json:
        key, record = self._record(does, values)
        about = self.things[does["thing"]]
        return {about["id"]: key, **{field: record[field] for field in does["gives"]}}

    def _find(self, does: Json, values: Json) -> Json:
        about, noun = self.things[does["thing"]], self.things[does["thing"]]["noun"]
        found = self._matching(does["thing"], values)
        if not found:
            told = ", ".join(str(value) for value in values.values())
            raise ToolMistake(f"there is no {noun} with {told}.")
        return {about["id"]: found[0]}

    def _list(self, does: Json, values: Json) -> Json:
        found = self._matching(does["thing"], values)
        return {"count": len(found), f"{self.things[does['thing']]['id']}s": found[:5]}

    def _matching(self, thing: str, values: Json) -> list[str]:
        wanted = {field: _canonical(value) for field, value in values.items()}
        return [
            key
            for key, record in self.records[thing].items()
            if all(_meets(record, field, value) for field, value in wanted.items())
        ]

    def _create(self, does: Json, values: Json) -> Json:
        thing, about = does["thing"], self.things[does["thing"]]
        number = _digest(self.seed, thing, {k: _canonical(v) for k, v in values.items()})
        key = f"{about['prefix']}-{number % 90000 + 10000}"
        self.records[thing][key] = {**dict.fromkeys(about["fields"]), **values}
        return {about["id"]: key}

    def _update(self, does: Json, values: Json) -> Json:
        key, record = self._record(does, values)
        changed = {field: value for field, value in values.items() if field != KEY}
        record.update(changed)
        told = {k: _canonical(v) for k, v in changed.items()}
        return {"receipt": f"R{_digest(self.seed, key, told) % 900000 + 100000}"}

    def _remove(self, does: Json, values: Json) -> Json:
        key, _ = self._record(does, values)
        told = {k: _canonical(v) for k, v in values.items()}
        del self.records[does["thing"]][key]
        return {"receipt": f"R{_digest(self.seed, key, told) % 900000 + 100000}"}

    def _compute(self, does: Json, values: Json) -> Json:
        total, factor = self._rate(does, "") * 10, 1.0
        for field, value in sorted(values.items()):
            rate = self._rate(does, field)
            if isinstance(value, list):
                total += rate * sum(each for each in value if isinstance(each, int | float))
            elif isinstance(value, int | float):  # a flag counts as 0 or 1
                total += rate * (25 * value if isinstance(value, bool) else value)
            else:
                factor *= 0.5 + self._rate(does, f"{field}={_canonical(value)}")
        (quantity,) = does["gives"]
        return {quantity: round(total * factor, 2)}

    def _rate(self, does: Json, of: str) -> float:
        return 0.2 + _digest(self.seed, does["thing"], of) % 1000 / 500


def _meets(record: Json, field: str, value: Any) -> bool:
    """Whether a record has a value; `field>` is a lowest value, `field<` a highest one."""
    held = record.get(field.rstrip("<>"))
    if held is None:
        return False
    held = _canonical(held)
    if field[-1] not in "<>" or type(held) is not type(value):
        return bool(held == value)
    return bool(held >= value if field.endswith(">") else held <= value)
