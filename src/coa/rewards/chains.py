"""Rewards of the chain itself: `format`, whether it keeps to its grammar, and `calls`, whether it
called the tools that its task asks for.

`format` is binary, as the paper multiplies it: the whole text is legal, no turn was malformed, it
ends with an answer, and every program stands in one ```py fence, followed by nothing but one ```sh
fence with its input. Graded: the share of turns that keep to all this, of which the answer counts
as one more when it is missing. What a budget cut has no answer, so it is not well formed either.

`calls` has the rules of the Berkeley Function Calling Leaderboard, written anew: as many calls as
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from coa.errors import GrammarError, ToolMistake
from coa.grammar import Block, Fault, Grammar, GrammarState, check, parse
from coa.io.runs import Json
from coa.rewards.answers import Part
from coa.tasks import Task
from coa.tools.arguments import read_arguments
from coa.trajectory import Author, StopReason, Trajectory

_FENCED = re.compile(
    r"\s*```(?:py|python)[ \t]*\n(?:(?!```).)*?\n[ \t]*```"
    r"(?:\s*```sh[ \t]*\n(?:(?!```).)*?\n?[ \t]*```)?\s*",
    re.S,
)
NOT_FENCED = "a program is not in a ```py fence, with at most a ```sh fence after it"
SOME = "some"
"""Gold of a task that needs a call, whichever."""
_MARKS = str.maketrans(dict.fromkeys(" ,./-_*^", "") | {"'": '"'})
_TYPES: dict[str, type] = {
    **{"string": str, "integer": int, "number": float, "boolean": bool},
    **{"array": list, "object": dict},
}


@dataclass(frozen=True)
class FormatSettings:
    """What counts as well formed; see docs/rewards.md."""

    graded: bool = False
    """The share of turns that are well formed; otherwise 1 or 0."""
    fences: bool = True
    """Programs must stand in fences."""


def check_format(trajectory: Trajectory, settings: FormatSettings | None = None) -> Part:
    """How well formed a trajectory is."""
    settings = settings or FormatSettings()
    if not trajectory.steps:  # what has ended so has no answer either
        return Part(None if trajectory.stop is None else 0.0, "the model wrote nothing")
    bound = trajectory.protocol
    if settings.graded:
        faults = list(_faults(trajectory, bound, settings.fences))
        first = next((f"turn {n}: {fault}" for n, fault in enumerate(faults, 1) if fault), "")
        return Part(1.0 - sum(map(bool, faults)) / len(faults), first)
    parsed = parse(bound, trajectory.text, env=True)
    fault = check(bound, parsed)
    if fault is not None:
        return Part(0.0, fault.message)
    if trajectory.usage.malformed:
        return Part(0.0, f"{trajectory.usage.malformed} malformed turns")
    if settings.fences and not all(_is_fenced(bound, block) for block in parsed.blocks):
        return Part(0.0, NOT_FENCED)
    return Part(1.0)


def _faults(trajectory: Trajectory, grammar: Grammar, fences: bool) -> Iterator[str]:
    """What is wrong with each turn, empty where nothing is; one more when no turn answers."""
    state = GrammarState()
    for step in trajectory.steps:
        parsed = parse(grammar, step.model.text)
        fault = parsed.faults[0] if parsed.faults else None
        for block in parsed.blocks:
            if fault is not None and fault.at < block.end:
                break
            moved = grammar.advance(state, block)
            if isinstance(moved, Fault):
                fault = moved
                break
            state = moved
        wrong = fault.message if fault else ""
        if not wrong and not (state.awaiting or state.done):
            wrong = "it ends without a call or an answer"
        if not wrong and fences and not all(_is_fenced(grammar, b) for b in parsed.blocks):
            wrong = NOT_FENCED
        yield wrong
        if step.observation is not None:
            moved = grammar.advance(state, Block(grammar.observation, ""))
            assert isinstance(moved, GrammarState), moved
            state = moved
    if not state.done:
        yield "the answer is missing"


def _is_fenced(grammar: Grammar, block: Block) -> bool:
    role = grammar.by_name.get(block.role)
    return role is None or role.body != "code" or bool(_FENCED.fullmatch(block.body))


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
    # Without repeats, told apart by how they are written: 10 and 10.0 are not the same call.
    once = list({repr(call): call for call in made}.values())
    return float(same_calls(made, wanted, declared) or same_calls(once, wanted, declared))


def calls_in(trajectory: Trajectory, declared: Mapping[str, Json]) -> list[Call]:
    """The calls that a model wrote, refused ones included: its first word is what counts.

    Of a grammar that is not known by its name the declared blocks are read as they stand.
    """
    written = [s.text for s in trajectory.segments if s.author is Author.MODEL]
    blocks = list[tuple[str, str]]()
    try:
        for text in written:
            parsed = parse(trajectory.protocol, text)
            legal = parsed.faults[0].at if parsed.faults else len(text)
            blocks += [(each.role, each.body) for each in parsed.blocks if each.end <= legal]
    except GrammarError:
        tags = "|".join(map(re.escape, declared))
        blocks = re.findall(rf"<({tags})>(.*?)</\1>", "\n".join(written), re.DOTALL) if tags else []
    return [
        Call(role, _arguments(body, declared[role])) for role, body in blocks if role in declared
    ]


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
    given = all(
        name in known and name in possible and _value_fits(value, possible[name], known[name])
        for name, value in arguments.items()
    )
    return given and all(name in arguments or "" in options for name, options in possible.items())


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
