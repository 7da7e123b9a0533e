"""Tools from typed functions, arguments in JSON, limits, usage and sessions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from coa import ScriptedEngine, Task, ToolCall, load_grammar, run, tool
from coa.errors import ConfigError, ToolMistake
from coa.grammar import system_prompt
from coa.tools import Toolbox
from coa.tools.arguments import find_problem, plausible, read_arguments, shape_of
from coa.tools.base import Tool
from coa.trajectory import StopReason


class Unit(StrEnum):
    C = "celsius"
    F = "fahrenheit"


@dataclass
class Place:
    city: str
    country: str = ""


@tool
async def weather(
    place: Place, days: Annotated[int, Field(ge=1, le=7)] = 3, unit: Unit = Unit.C
) -> str:
    """Forecast the weather of a place. Further lines are not shown."""
    return f"{place.city}, {place.country or '?'}: {days} days in {unit}"


@tool
def look_up(name: str, year: int | None = None) -> dict[str, Any]:
    """Look up a name."""
    return {"name": name, "year": year}


SCHEMA = json.loads(look_up.schema)


def test_schema_role_and_prompt_line_are_derived() -> None:
    schema = json.loads(weather.schema)
    assert schema["required"] == ["place"] and schema["additionalProperties"] is False
    assert schema["properties"]["days"] == {"type": "integer", "minimum": 1, "maximum": 7}
    assert "title" not in weather.schema
    grammar = Toolbox([weather]).bind(load_grammar("react"))
    assert grammar.by_name["weather"].body == "json"
    prompt = system_prompt(grammar, "full")
    expected = '"place": {"city": string, "country": string (optional)}, '
    expected += '"days": integer (optional), "unit": "celsius" | "fahrenheit"'
    assert "- <weather>: Forecast the weather of a place. Further lines are not shown" in prompt
    assert expected in prompt
    assert Toolbox([weather]).schemas(grammar) == (("weather", weather.schema),)


def test_the_worked_example_shows_arguments_that_the_schema_allows() -> None:
    for made in (weather, look_up):
        grammar = Toolbox([made]).bind(load_grammar("react"))
        shown = json.loads(grammar.by_name[made.name].example)
        assert find_problem(shown, json.loads(made.schema)) == ""
        example = system_prompt(grammar, "full").split("An example with another question")[1]
        assert f"<{made.name}>{json.dumps(shown)}</{made.name}>" in example


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"type": "string"}, "Lima"),
        ({"enum": ["b", "a"]}, "b"),
        ({"const": 4}, 4),
        ({"type": "integer", "minimum": 10}, 10),
        ({"type": "number"}, 2.5),
        ({"type": "array", "items": {"type": "boolean"}}, [True]),
        ({"type": "string", "default": "x"}, "x"),
        ({"type": ["integer", "null"]}, 3),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ({"$ref": "#/$defs/Self"}, None),
        ({}, "Lima"),
    ],
)
def test_a_plausible_value_follows_from_the_type(part: dict[str, Any], value: Any) -> None:
    schema = {"type": "object", "properties": {"x": part}, "required": ["x"], "$defs": {}}
    schema["$defs"]["Self"] = {**schema, "properties": {"x": {"$ref": "#/$defs/Self"}}}
    found = plausible(schema)["x"]
    assert found == value or isinstance(found, dict)  # one that holds itself ends somewhere
    assert plausible({"properties": {"dueDate": {}}, "required": ["dueDate"]}) == {
        "dueDate": "2025-03-01"
    }


async def test_arguments_arrive_with_their_types() -> None:
    box = Toolbox([weather, look_up])
    seen = await box.call(
        ToolCall("weather", '{"place": {"city": "Lima"}, "days": 2, "unit": "fahrenheit"}')
    )
    assert (seen.text, seen.failure) == ("Lima, ?: 2 days in fahrenheit", None)
    seen = await box.call(ToolCall("look_up", '{"name": "Lima"}'))
    assert seen.text == '{"name": "Lima", "year": null}'


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Lima", "year": 5}',
        "{'name': 'Lima', 'year': 5}",
        '{"name": "Lima", "year": 5,}',
        '{"name": "Lima", "year": 5',
        '{"name": "Lima", "year": "5"}',
        '```json\n{"name": "Lima", "year": 5}\n```',
        'Here you are: {"name": "Lima", "year": 5}. Thank you!',
        '{"year": 5, "name": "Lima',
    ],
)
def test_json_that_is_almost_right_is_repaired(text: str) -> None:
    assert read_arguments(text, SCHEMA) == {"name": "Lima", "year": 5}


def test_a_bare_value_is_the_only_argument_that_is_required() -> None:
    assert read_arguments("San Marino", SCHEMA) == {"name": "San Marino"}
    assert read_arguments('"San Marino"', SCHEMA) == {"name": "San Marino"}
    assert read_arguments('{"name": "a\nb"}', SCHEMA) == {"name": "a\nb"}
    assert read_arguments("", {"type": "object", "properties": {}}) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": 5}', "name is 5, expected a string."),
        ('{"year": 5}', "name is missing."),
        ('{"name": "x", "town": 1}', "town is not an argument."),
        ('{"name": "x", "year": "soon"}', 'year is "soon", expected an integer.'),
        ('{"name": "a"} {"name": "b"}', "The arguments cannot be read as JSON."),
        ("[1, 2]", "The arguments cannot be read as JSON."),
        ("", "The arguments cannot be read as JSON."),
    ],
)
def test_what_cannot_be_repaired_is_explained(text: str, message: str) -> None:
    with pytest.raises(ToolMistake) as caught:
        read_arguments(text, SCHEMA)
    assert str(caught.value).startswith(message)
    assert 'Expected {"name": string, "year": integer | null (optional)}' in str(caught.value)


@pytest.mark.parametrize(
    ("value", "part", "problem"),
    [
        (8, {"type": "integer", "maximum": 7}, "x is 8, expected at most 7."),
        (0, {"type": "number", "minimum": 1, "maximum": 7}, "x is 0, expected 1 to 7."),
        (True, {"type": "integer"}, "x is true, expected an integer."),
        ("d", {"enum": ["a", "b"]}, 'x is "d", expected one of "a", "b".'),
        ([1, "a"], {"type": "array", "items": {"type": "integer"}}, 'x[1] is "a", expected'),
        ([], {"type": "array", "minItems": 1}, "x has 0 items, expected at least 1."),
        ("", {"type": "string", "minLength": 1}, "x has 0 characters, expected at least 1."),
        ({"y": 1}, {"type": "object", "properties": {"y": {"const": 2}}}, "x.y is 1, expected 2."),
        (2, {"exclusiveMaximum": 2}, "x is 2, which is out of range."),
        (2.0, {"type": "integer"}, ""),
        ("a", {"anyOf": [{"type": "string"}, {"type": "null"}]}, ""),
    ],
)
def test_values_are_checked_against_a_schema(value: Any, part: Any, problem: str) -> None:
    schema = {"type": "object", "properties": {"x": part}}
    found = find_problem({"x": value}, schema)
    assert found.startswith(problem) and bool(found) == bool(problem)


@given(st.text(max_size=60) | st.text(alphabet="{}[]\"':, name\\1", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_explained(text: str) -> None:
    try:
        value = read_arguments(text, SCHEMA)
    except ToolMistake:
        return
    assert not find_problem(value, SCHEMA)


@given(
    st.fixed_dictionaries(
        {"name": st.text()}, optional={"year": st.none() | st.integers(-(10**9), 10**9)}
    )
)
@settings(max_examples=200, deadline=None)
def test_right_json_is_never_changed(value: dict[str, Any]) -> None:
    assert read_arguments(json.dumps(value), SCHEMA) == value
    assert read_arguments(json.dumps(value, ensure_ascii=False), SCHEMA) == value


async def test_a_mistake_in_the_arguments_is_an_observation() -> None:
    seen = await Toolbox([weather]).call(ToolCall("weather", '{"place": {"city": 3}}'))
    assert seen.failure == "mistake" and seen.text.startswith("Error: place.city is 3")


async def test_a_tool_with_a_schema_of_its_own_gets_repaired_json() -> None:
    async def echo(argument: str) -> str:
        return argument

    own = Tool("own", echo, body="json", schema=json.dumps(SCHEMA))
    seen = await Toolbox([own]).call(ToolCall("own", "{'name': 'x',}"))
    assert seen.text == '{"name": "x"}'


def test_functions_without_a_schema_are_refused() -> None:
    def untyped(a, b):  # type: ignore[no-untyped-def]
        return ""

    def starred(*args: str) -> str:
        return ""

    def odd(a: Toolbox, b: int) -> str:
        return ""

    with pytest.raises(ConfigError, match="parameter 'a' has no type; write one"):
        tool(untyped)
    with pytest.raises(ConfigError, match="parameter 'args' has no name in JSON"):
        tool(starred)
    with pytest.raises(ConfigError, match="a parameter's type has no schema"):
        tool(odd)
    with pytest.raises(ConfigError, match="concurrency -1; expected"):
        tool(look_up.run, name="x", concurrency=-1)


def test_constrained_decoding_is_given_a_schema_it_can_use() -> None:
    assert shape_of(json.loads(weather.schema)).startswith('{"place": {"city": string')

    @tool
    async def choose(side: Literal["left", "right"], speed: float = 1.0) -> str:
        """Choose."""
        return side

    assert shape_of(json.loads(choose.schema)) == (
        '{"side": "left" | "right", "speed": number (optional)}'
    )


async def test_at_most_so_many_calls_run_at_once_and_all_are_counted() -> None:
    running = most = 0

    @tool(concurrency=2)
    async def slow(text: str) -> str:
        """Wait."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        if text == "3":
            raise ToolMistake("not three")
        return text

    box = Toolbox([slow])
    seen = await asyncio.gather(*(box.call(ToolCall("slow", str(i))) for i in range(7)))
    assert most == 2
    assert [each.text for each in seen] == [*"012", "Error: not three", *"456"]
    usage = box.usage["slow"]
    assert (usage.calls, usage.mistakes, usage.failed, usage.timeouts) == (7, 1, 0, 0)
    assert usage.characters == sum(len(each.text) for each in seen)


async def test_waiting_for_a_place_ends_with_the_rollouts_time() -> None:
    gate = asyncio.Event()

    @tool(concurrency=1)
    async def held(text: str) -> str:
        """Hold."""
        await gate.wait()
        return text

    box = Toolbox([held])
    first = asyncio.create_task(box.call(ToolCall("held", "a")))
    await asyncio.sleep(0)
    seen = await box.call(ToolCall("held", "b"), limit_s=0.01)
    assert seen.failure == "timeout"
    gate.set()
    assert (await first).text == "a"
    assert (await box.call(ToolCall("held", "c"))).text == "c"


def test_a_toolbox_outlives_an_event_loop() -> None:
    @tool(concurrency=1)
    async def brief(text: str) -> str:
        """Be brief."""
        await asyncio.sleep(0)
        return text

    box = Toolbox([brief])

    async def several() -> list[str]:
        calls = (box.call(ToolCall("brief", str(i))) for i in range(3))
        return [seen.text for seen in await asyncio.gather(*calls)]

    assert asyncio.run(several()) == asyncio.run(several()) == ["0", "1", "2"]


def counter(events: list[str]) -> Tool:
    @asynccontextmanager
    async def session() -> AsyncIterator[Any]:
        events.append("open")
        count = 0

        async def run(text: str) -> str:
            nonlocal count
            count += 1
            return f"call {count}"

        try:
            yield run
        finally:
            events.append("close")

    async def outside(text: str) -> str:
        raise AssertionError("called without a session")

    return Tool("counter", outside, about="Count", session=session)


async def test_each_rollout_has_a_session_of_its_own_and_closes_it() -> None:
    events: list[str] = []
    box = Toolbox([counter(events)])
    turns = ["<think>a</think>\n<counter>x</counter>"] * 2
    turns.append("<think>b</think>\n<answer>y</answer>")
    for _ in range(2):
        done = await run(Task("What?"), ScriptedEngine(turns), load_grammar("react"), box)
        assert "call 1" in done.text and "call 2" in done.text  # a repeated call is made again
        assert done.stop is StopReason.ANSWERED
    assert events == ["open", "close"] * 2
    assert box.usage["counter"].calls == 4


async def test_a_session_that_cannot_be_opened_is_a_failed_tool() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[Any]:
        raise OSError("no room")
        yield

    async def never(text: str) -> str:
        return ""

    box = Toolbox([Tool("broken", never, session=broken)])
    done = await run(Task("What?"), ScriptedEngine(["x"]), load_grammar("react"), box)
    assert done.stop is StopReason.TOOL_FAILED
    assert done.error == "broken failed: OSError: no room"
