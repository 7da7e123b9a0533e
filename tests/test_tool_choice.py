"""Prompts that describe tools in a line each, and long catalogues of which few are offered."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.distillation.contamination import OFFERS, find_known_tools
from coa.environment import Environment, ToolSettings
from coa.errors import ConfigError
from coa.grammar import PRESETS, load_grammar, system_prompt
from coa.grammar.load import GrammarBook
from coa.tasks import Task
from coa.tools.arguments import signature_of, words_of
from coa.tools.base import Tool, Toolbox
from coa.tools.choice import nearest, overlaps
from coa.tools.functions import declared_tools, tool


def find_parcel(recipient: str, sent_on: str = "") -> str:
    """Find the code of a parcel. It is slow.

    Args:
        recipient: who gets it
        sent_on: day, as in 2025-12-31
    """
    return recipient + sent_on


def shout(word: str) -> str:
    """Say a word loudly."""
    return word.upper()


def test_a_compact_prompt_has_a_line_for_each_tool_that_the_grammar_did_not_know() -> None:
    box = Toolbox([tool(find_parcel), tool(shout)])
    prompt = system_prompt(box.bind(load_grammar("react")))
    assert prompt == (
        "Answer the question by searching the encyclopedia. Blocks: <think> <answer>\n"
        "Tools:\n"
        '<find_parcel> {"recipient": string (who gets it), "sent_on"?: string (day, as in '
        "2025-12-31)} Find the code of a parcel\n"
        "<shout> text. Say a word loudly"
    )


@pytest.mark.parametrize("name", PRESETS)
def test_prompts_of_presets_and_their_own_tools_are_as_they_were(name: str) -> None:
    grammar = load_grammar(name)
    listed = " ".join(f"<{name}>" for name in grammar.tagged)
    named = f" Tools: {' '.join(grammar.tool_roles)}" if grammar.call else ""
    assert system_prompt(grammar) == f"{grammar.brief} Blocks: {listed}{named}"
    tools = [Tool(grammar.by_name[r].tool or r, _none, body="text") for r in grammar.tool_roles]
    assert system_prompt(Toolbox(tools).bind(grammar)) == system_prompt(grammar)
    (again,) = GrammarBook.from_json(json.loads(json.dumps(GrammarBook([grammar]).to_json())))
    assert again.fingerprint() == grammar.fingerprint()


async def _none(argument: str) -> str:
    return ""


@pytest.mark.parametrize(
    ("about", "parameters", "line"),
    [
        ("Get a user", {}, "{} Get a user"),
        ("Get a user. Then more.", {"user_id": {"type": "string", "description": "The user's ID"}},
         '{"user_id"?: string} Get a user'),
        ("", {"p1": {"type": "integer", "description": "Number of guests, e.g. 3. Or so."}},
         '{"p1"?: integer (Number of guests)}'),
        ("Do", {"a": {"type": "array", "items": {"type": "number"}}}, '{"a"?: list of number} Do'),
        ("Do", {"a": {"enum": ["x", "y"]}}, '{"a"?: "x" | "y"} Do'),
        ("Do", {"a": {"enum": list(range(20))}},
         '{"a"?: 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | 11 | 8 more} Do'),
        ("Do", {"to": {"type": "object", "properties": {"city": {"type": "string"}},
                       "required": ["city"]}}, '{"to"?: {"city": string}} Do'),
        ("word " * 60, {}, "{} " + "word " * 24 + "..."),
        ("Do; the content is a JSON object {}. a: b", {}, "{} Do"),
    ],
)  # fmt: skip
def test_a_signature_is_one_line(about: str, parameters: dict[str, object], line: str) -> None:
    found = signature_of(about, {"type": "object", "properties": parameters})
    assert found == line and "\n" not in found


@given(st.text(max_size=400), st.text(max_size=400))
def test_a_signature_of_any_description_is_short_and_one_line(about: str, meaning: str) -> None:
    schema = {"properties": {"x": {"type": "string", "description": meaning}}}
    found = signature_of(about, schema)
    assert len(found) < 300 and len(found.splitlines()) <= 1


def test_words_are_those_of_names_in_any_spelling() -> None:
    assert words_of("getUserIDs by_city-name v2") == "get user id by city name v 2".split()
    assert words_of("boxes cities glass bus") == ["box", "city", "glass", "bus"]


def catalogue(n: int) -> list[Tool]:
    about = ["weather of a city", "price of a share", "way to a station", "name of a song"]
    return [Tool(f"tool_{k}", _none, about=f"Say the {about[k % 4]} {k}") for k in range(n)]


def test_the_nearest_tools_keep_their_order_and_are_always_the_same() -> None:
    tools = catalogue(40)
    chosen = nearest("What is the weather of the city of Lima?", tools, 10, {})
    assert [each.name for each in chosen] == [f"tool_{k}" for k in range(0, 40, 4)]
    assert nearest("x", tools, 3, {}) == tools[:3]
    kept = nearest("What is the weather?", tools, 2, {"tool_1": "", "tool_2": "", "tool_3": ""})
    assert [each.name for each in kept] == ["tool_1", "tool_2", "tool_3"]
    assert overlaps("x", []) == []


def test_a_rare_word_counts_more_and_a_long_description_has_no_advantage() -> None:
    texts = [["parcel"], ["parcel", "weight"], ["parcel", *["other"] * 40, "weight"]]
    scores = overlaps("the weight of the parcel", texts)
    assert scores[1] > scores[2] > scores[0]


def test_of_a_long_catalogue_a_task_is_offered_so_many(capsys: pytest.CaptureFixture[str]) -> None:
    env = Environment("many", tools=catalogue(40))
    tasks = [Task("What is the price of this share?"), Task("Name the song.")]

    async def offered() -> list[list[str]]:
        async with env.open(tasks, ToolSettings(most=5)) as opened:
            return [list(await opened.toolbox(task)) for task in tasks]

    first, second = asyncio.run(offered())
    assert first == [f"tool_{k}" for k in (1, 5, 9, 13, 17)]
    assert second == [f"tool_{k}" for k in (3, 7, 11, 15, 19)]
    said = capsys.readouterr().err
    assert said.count("coa: many: 5 of 40 tools are offered") == 1 and "35 are left out" in said


def test_how_many_tools_are_offered_is_part_of_what_a_run_depends_on() -> None:
    assert ToolSettings(most=5).identity() != ToolSettings().identity() == {}
    with pytest.raises(ConfigError, match="most tools -1"):
        ToolSettings(most=-1)


def test_a_tool_that_an_evaluation_declares_is_found_in_any_spelling() -> None:
    def declared(name: str, *parameters: str) -> dict[str, object]:
        return {"name": name, "parameters": {"properties": {key: {} for key in parameters}}}

    exam = [Task("q", id="one", meta={"tools": [declared("math.hypot", "xValue", "y")]})]
    offered = [
        [declared("other", "x"), declared("math_hypot", "y", "x_value")],
        [declared("math_hypot", "y")],
        [],
    ]
    found = find_known_tools(offered, {"exam.jsonl": exam})  # type: ignore[arg-type]
    assert found == {0: (OFFERS, "exam.jsonl", "one")}


def test_declared_tools_have_a_signature_with_what_their_arguments_mean() -> None:
    properties = {"p1": {"type": "string", "description": "Code of the parcel"}}
    listed = {"name": "t", "description": "Gets it.", "parameters": {"properties": properties}}
    (made,) = declared_tools(Task("q", meta={"tools": [listed]}))
    assert made.role().signature == '{"p1"?: string (Code of the parcel)} Gets it'
