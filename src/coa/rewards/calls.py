"""calls: whether a chain called the tools that its task asks for, with the right arguments.

The rules are those of the Berkeley Function Calling Leaderboard, written anew: as many calls as
wanted, in any order; every required argument, none that is unknown; each value of the declared type
and one of those that gold lists, where an empty text means that the argument may be missing. Texts
are compared without case, spaces and the marks , . / - _ * ^.

Three things differ. Calls come one a turn here, so one that is repeated word for word, which the
runtime answers from memory, counts once. And a question that needs no call must be answered, where
BFCL takes any text that is not a call. Arguments that are a JSON object count as they stand; text
that is none is read as the tool would read it, where BFCL sees no call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from coa.errors import GrammarError, ToolMistake
from coa.grammar.parse import parse
from coa.io.runs import Json
from coa.tasks import Task
from coa.tools.arguments import read_arguments
from coa.trajectory import Author, StopReason, Trajectory

SOME = "some"
"""Gold of a task that needs a call, whichever."""
_MARKS = str.maketrans(dict.fromkeys(" ,./-_*^", "") | {"'": '"'})
_TYPES: dict[str, type] = {
    **{"string": str, "integer": int, "number": float, "boolean": bool},
    **{"array": list, "object": dict},
}


class Call(NamedTuple):
    """A call that a model made; the arguments are None where they cannot be read."""

    name: str
    arguments: Json | None


def calls(task: Task, trajectory: Trajectory) -> float | None:
    """1 if the calls of a chain are those that are wanted; a task without them is not judged."""
    wanted = task.gold.get("calls")
    if wanted is None:
        return None
    declared = {each["name"]: each["parameters"] for each in task.meta.get("tools", ())}
    made = calls_in(trajectory, declared)
    if wanted == SOME:
        return float(bool(made))
    if not wanted:
        return float(not made and trajectory.stop is StopReason.ANSWERED)
    return float(
        same_calls(made, wanted, declared) or same_calls(_without_repeats(made), wanted, declared)
    )


def calls_in(trajectory: Trajectory, declared: Mapping[str, Json]) -> list[Call]:
    """The calls that a model wrote, refused ones included: its first word is what counts.

    Of a grammar that is not known by its name the declared blocks are read as they stand.
    """
    found = list[Call]()
    try:
        grammar = trajectory.protocol
    except GrammarError:
        tags = "|".join(map(re.escape, declared))
        written = "\n".join(s.text for s in trajectory.segments if s.author is Author.MODEL)
        blocks = re.findall(rf"<({tags})>(.*?)</\1>", written, re.DOTALL) if tags else []
        return [Call(name, _arguments(body, declared[name])) for name, body in blocks]
    for segment in trajectory.segments:
        if segment.author is not Author.MODEL:
            continue
        parsed = parse(grammar, segment.text)
        legal = parsed.faults[0].at if parsed.faults else len(segment.text)
        for block in parsed.blocks:
            if block.role in declared and block.end <= legal:
                found.append(Call(block.role, _arguments(block.body, declared[block.role])))
    return found


def _arguments(body: str, schema: Json) -> Json | None:
    """A JSON object as it stands: quotes around a number are a mistake, which the tool forgives and
    BFCL does not. What is no object is read as the tool would read it."""
    try:
        held = json.loads(body)
    except (ValueError, RecursionError):
        held = None
    if isinstance(held, dict):
        return held
    try:
        return read_arguments(body.strip(), schema)
    except ToolMistake:
        return None


def _without_repeats(made: Sequence[Call]) -> list[Call]:
    """Told apart by how they are written: 10 and 10.0 are equal, and not the same call."""
    return list({repr(call): call for call in made}.values())


def same_calls(made: Sequence[Call], wanted: Sequence[Json], declared: Mapping[str, Json]) -> bool:
    """Whether each wanted call takes one that was made, and none is over."""
    left = list(made)
    if len(left) != len(wanted):
        return False
    for each in wanted:
        name, possible = each["name"], each["arguments"]
        fitting = (
            place
            for place, call in enumerate(left)
            if call.name == name and _fits(call.arguments, possible, declared[name])
        )
        taken = next(fitting, None)
        if taken is None:
            return False
        del left[taken]  # by its place: 10 and 10.0 are equal, and not both right
    return True


def _fits(arguments: Json | None, possible: Json, schema: Json) -> bool:
    known = schema.get("properties", {})
    if arguments is None or any(name not in arguments for name in schema.get("required", ())):
        return False
    for name, value in arguments.items():
        if name not in known or name not in possible:
            return False
        if not _value_fits(value, possible[name], known[name]):
            return False
    return all(name in arguments or "" in options for name, options in possible.items())


def _value_fits(value: Any, options: Sequence[Any], schema: Json) -> bool:
    """A value against the values that gold lists. Where gold's own type is another than the
    declared one, it names a variable, and has to be met as it stands."""
    example = _first_type(options)
    kind: Any = _TYPES.get(str(schema.get("type")), example)
    item = _TYPES.get(str(schema.get("items", {}).get("type"))) if kind is list else None
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is kind:
        if item is not None and not any(_items_fit(value, each, item) for each in options):
            return False
        as_it_stands = example not in (None, kind)
    elif example is not None and type(value) is example:
        as_it_stands = True
    else:
        return False
    if as_it_stands:
        return value in options
    if kind is dict:
        return any(_object_fits(value, each) for each in options if each != "")
    if kind is list and item is dict:
        return any(_objects_fit(value, each) for each in options)
    if kind is list:
        return _bare(value) in [_bare(list(each)) for each in options]
    return _bare(value) in map(_bare, options)


def _first_type(options: Sequence[Any]) -> type | None:
    return next((type(each) for each in options if each != ""), None)


def _items_fit(value: list[Any], option: Any, item: type) -> bool:
    if not isinstance(option, list):
        return True
    allowed = (item, _first_type(option))
    return all(type(each) in allowed for each in value)


def _object_fits(value: Json, option: Any) -> bool:
    if not isinstance(option, dict) or any(key not in option for key in value):
        return False
    given = all(_bare(each) in map(_bare, option[key]) for key, each in value.items())
    return given and all(key in value or "" in options for key, options in option.items())


def _objects_fit(value: list[Any], option: Any) -> bool:
    return len(value) == len(option) and all(
        isinstance(each, dict) and _object_fits(each, wanted)
        for each, wanted in zip(value, option, strict=True)
    )


def _bare(value: Any) -> Any:
    """A text as it is compared, also in a list."""
    if isinstance(value, list):
        return [_bare(each) if isinstance(each, str) else each for each in value]
    return _bare_text(value) if isinstance(value, str) else value


@cache
def _bare_text(text: str) -> str:
    return text.translate(_MARKS).lower()
