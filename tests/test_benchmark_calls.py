"""BFCL: its files become tasks with tools of their own, and `calls` judges the calls of a chain.

The rules were compared with BFCL's own checker (bfcl-eval 2026.3.23) on 25,543 cases made from all
its gold, right and perturbed: the verdicts are the same. The cases below are of each kind.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.environments.published import load_benchmark
from coa.environments.published.function_calls import CATEGORIES
from coa.errors import RecordError, UsageError
from coa.grammar import PRESETS, load_grammar
from coa.rewards.chains import calls, calls_in
from coa.rewards.reward import auto
from coa.tasks import Task
from coa.trajectory import Author, Segment, StopReason, Trajectory

NUMBER, TEXT = {"type": "number"}, {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}


def task_with(wanted: Any, required: tuple[str, ...] = (), **properties: Any) -> Task:
    """A task with the tools `draw`, whose arguments are given, and `stop`, which has none."""
    tools = [
        {"name": "draw", "parameters": {"properties": properties, "required": list(required)}},
        {"name": "stop", "parameters": {"properties": {}, "required": []}},
    ]
    return Task("Draw it.", meta={"tools": tools}, gold={"calls": wanted})


def chain(*made: tuple[str, Any], answered: bool = True) -> Trajectory:
    segments = [Segment(Author.PROMPT, "Draw it.")]
    for name, arguments in made:
        body = arguments if isinstance(arguments, str) else json.dumps(arguments)
        segments.append(Segment(Author.MODEL, f"<think>so</think><{name}>{body}</{name}>"))
        segments.append(Segment(Author.ENV, "\n<observation>Noted.</observation>\n"))
    if answered:
        segments.append(Segment(Author.MODEL, "<think>so</think><answer>done</answer>"))
    stop = StopReason.ANSWERED if answered else StopReason.TURNS
    return Trajectory(
        *("id", "Draw it.", "react"), segments=segments, tools=["draw", "stop"], stop=stop
    )


def draw(**possible: list[Any]) -> list[dict[str, Any]]:
    return [{"name": "draw", "arguments": possible}]


# -- the rules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "possible", "given_value", "right"),
    [
        ({"type": "integer"}, [10], 10, True),
        ({"type": "integer"}, [10], 11, False),
        ({"type": "integer"}, [10], 10.0, False),
        ({"type": "integer"}, [10], "ten", False),
        ({"type": "integer"}, [10], "10", False),  # the tool would forgive it, BFCL does not
        ({"type": "boolean"}, [True], "true", False),
        (TEXTS, [["a"]], '["a"]', False),
        ({"type": "integer"}, [1], True, False),
        (NUMBER, [2.0, 2.5], 2, True),
        (NUMBER, [2.5], 2, False),
        ({"type": "boolean"}, [True], True, True),
        ({"type": "boolean"}, [True], 1, False),
        (TEXT, ["April 1, 2024"], "april 1 2024", True),
        (TEXT, ["New York"], "new-york.", True),
        (TEXT, ["New York"], "York", False),
        (TEXT, ["it's"], 'it"s', True),
        (TEXT, ["", "x"], "", True),  # as BFCL has it: what may be missing may be empty
        (TEXTS, [["a b", "c"]], ["A-B", "C"], True),
        (TEXTS, [["a", "c"]], ["c", "a"], False),
        (TEXTS, [["a"]], "a", False),
        (TEXTS, [["a"]], [1], False),
        ({"type": "array", "items": NUMBER}, [[1, 2]], [1, 2], True),
        ({"type": "array"}, [[1]], [1], True),
        ({"type": "object"}, [{"x": [1], "y": [2, ""]}], {"x": 1}, True),
        ({"type": "object"}, [{"x": [1], "y": [2, ""]}], {"x": 1, "y": 2}, True),
        ({"type": "object"}, [{"x": [1], "y": [2]}], {"x": 1}, False),
        ({"type": "object"}, [{"x": [1]}], {"x": 1, "z": 1}, False),
        ({"type": "object"}, [{"x": ["Big One"]}], {"x": "big one"}, True),
        (
            {"type": "array", "items": {"type": "object"}},
            [[{"x": [1]}, {"x": [2]}]],
            [{"x": 1}, {"x": 2}],
            True,
        ),
        (
            {"type": "array", "items": {"type": "object"}},
            [[{"x": [1]}, {"x": [2]}]],
            [{"x": 2}, {"x": 1}],
            False,
        ),
        ({"type": "integer"}, ["count"], "count", True),  # gold names a variable
        ({"type": "integer"}, ["count"], "Count", False),
        ({"anyOf": [TEXT, NUMBER]}, ["Red", 1], "red", True),  # no type: that of gold counts
    ],
)
def test_a_value_is_judged_by_its_type_and_what_gold_lists(
    schema: dict[str, Any], possible: list[Any], given_value: Any, right: bool
) -> None:
    task = task_with(draw(size=possible), size=schema)
    assert calls(task, chain(("draw", {"size": given_value}))) == float(right)


def test_arguments_are_all_there_and_none_is_invented() -> None:
    task = task_with(
        draw(size=[1], colour=["red", ""]), ("size",), size=NUMBER, colour=TEXT, name=TEXT
    )
    assert calls(task, chain(("draw", {"size": 1}))) == 1.0
    assert calls(task, chain(("draw", {"size": 1, "colour": "red"}))) == 1.0
    assert calls(task, chain(("draw", {"size": 1, "colour": "blue"}))) == 0.0
    assert calls(task, chain(("draw", {"colour": "red"}))) == 0.0
    assert calls(task, chain(("draw", {"size": 1, "name": "x"}))) == 0.0
    assert calls(task, chain(("draw", {"size": 1, "other": 1}))) == 0.0


def test_calls_count_in_any_order_and_none_may_be_over() -> None:
    task = task_with([*draw(size=[1]), *draw(size=[2])], size=NUMBER)
    one, two = ("draw", {"size": 1}), ("draw", {"size": 2})
    assert calls(task, chain(one, two)) == calls(task, chain(two, one)) == 1.0
    assert calls(task, chain(one, two, answered=False)) == 1.0
    assert calls(task, chain(one)) == calls(task, chain(one, two, ("stop", {}))) == 0.0
    assert calls(task, chain(one, ("stop", {}))) == calls(task, chain()) == 0.0


def test_a_call_that_is_repeated_word_for_word_counts_once_unless_gold_wants_it_twice() -> None:
    one = ("draw", {"size": 1})
    assert calls(task_with(draw(size=[1]), size=NUMBER), chain(one, one)) == 1.0
    twice = task_with([*draw(size=[1]), *draw(size=[1])], size=NUMBER)
    assert calls(twice, chain(one, one)) == 1.0
    assert calls(twice, chain(one)) == 0.0


def test_numbers_that_are_equal_are_not_the_same_call() -> None:
    whole = {"type": "integer"}
    task = task_with([*draw(size=[10]), *draw(size=[10])], size=whole)
    assert calls(task, chain(("draw", {"size": 10.0}), ("draw", {"size": 10}))) == 0.0
    once = task_with(draw(size=[10]), size=whole)
    assert calls(once, chain(("draw", {"size": 10}), ("draw", {"size": 10.0}))) == 0.0


def test_a_question_without_a_fitting_tool_is_answered_without_a_call() -> None:
    task = task_with([], size=NUMBER)
    assert calls(task, chain()) == 1.0
    assert calls(task, chain(answered=False)) == calls(task, chain(("stop", {}))) == 0.0
    some = task_with("some", size=NUMBER)
    assert calls(some, chain(("stop", {}))) == 1.0 and calls(some, chain()) == 0.0


def test_almost_json_is_read_as_the_tool_reads_it_and_what_nobody_can_read_is_wrong() -> None:
    task = task_with(draw(size=[1], name=["x"]), size=NUMBER, name=TEXT)
    assert calls(task, chain(("draw", "{'size': 1, 'name': 'x',}"))) == 1.0
    assert calls(task, chain(("draw", "size one"))) == calls(task, chain(("draw", "[1]"))) == 0.0


def test_tasks_that_name_the_reward_are_judged_by_it_also_where_nothing_is_opened() -> None:
    task = task_with(draw(size=[1]), size=NUMBER)
    task = replace(task, meta={**task.meta, "reward": "calls"})
    assert auto(task, chain(("draw", {"size": 1}))) == 1.0
    assert auto(task, chain(("draw", {"size": 2}))) == 0.0


def test_a_task_without_wanted_calls_is_not_judged() -> None:
    assert calls(Task("Draw it."), chain()) is None


def test_text_that_is_not_a_legal_block_is_no_call() -> None:
    task = task_with([], size=NUMBER)
    loose = chain(("draw", {"size": 1}))
    loose.segments[1] = Segment(Author.MODEL, "draw it: <draw>{}")
    assert not calls_in(loose, {"draw": {}}) and calls(task, loose) == 1.0


def test_calls_are_judged_in_a_grammar_that_has_no_name_here() -> None:
    task = task_with(draw(size=[1]), size=NUMBER)
    own = chain(("draw", {"size": 1}))
    own.grammar = "one of mine"
    assert calls(task, own) == 1.0
    own.segments[1] = Segment(Author.MODEL, "draw it: <draw>{}")
    assert calls(task, own) == 0.0


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(_JSON | st.text(), st.sampled_from(["integer", "string", "array", "object", "boolean"]))
def test_whatever_a_model_writes_is_right_or_wrong(written: Any, kind: str) -> None:
    gold = {"integer": 3, "string": "x", "array": ["x"], "object": {"x": [1]}, "boolean": True}
    task = task_with(draw(size=[gold[kind], ""]), size={"type": kind, "items": TEXT})
    body = written if isinstance(written, str) else json.dumps({"size": written})
    assert calls(task, chain(("draw", body))) in (0.0, 1.0)


# -- the files -------------------------------------------------------------------------------


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "dict", "properties": properties, "required": [*properties][:1]}
    return {"name": name, "description": f"About {name}.", "parameters": parameters}


AREA = function(
    "Geo.area",
    base={"type": "float", "description": "Of the triangle."},
    sides={"type": "tuple", "items": {"type": "integer"}},
    extra={"type": "dict", "properties": {"unit": {"type": "any", "enum": ["cm"]}}},
)


def bfcl(folder: Path, category: str = "simple_python", **changed: Any) -> Path:
    row = {
        "id": f"{category}_0",
        "question": [[{"role": "user", "content": "How large is it?"}]],
        "function": [AREA, function("answer", x={"type": "string"})],
    }
    gold = {"id": row["id"], "ground_truth": [{"Geo.area": {"base": [2.0], "sides": [""]}}]}
    (folder / "possible_answer").mkdir(parents=True, exist_ok=True)
    name = f"BFCL_v4_{category}.json"
    (folder / name).write_text(json.dumps(row | changed) + "\n")
    (folder / "possible_answer" / name).write_text(json.dumps(gold) + "\n")
    return folder


def test_functions_become_tools_with_names_and_schemas_that_a_grammar_takes(tmp_path: Path) -> None:
    (task,) = load_benchmark("bfcl", bfcl(tmp_path)).tasks
    assert (task.id, task.question) == ("bfcl-simple_python_0", "How large is it?")
    assert (task.meta["grammar"], task.meta["family"]) == ("react", "simple_python")
    area, other = task.meta["tools"]
    assert (area["name"], other["name"]) == ("geo_area", "call_answer")
    assert area["parameters"] == {
        "type": "object",
        "properties": {
            "base": {"type": "number", "description": "Of the triangle."},
            "sides": {"type": "array", "items": {"type": "integer"}},
            "extra": {
                "type": "object",
                "properties": {"unit": {"type": "string", "enum": ["cm"]}},
                "required": [],
            },
        },
        "required": ["base"],
        "additionalProperties": False,
    }
    assert task.gold["calls"] == [{"name": "geo_area", "arguments": {"base": [2.0], "sides": [""]}}]
    assert "calls" not in task.public().gold and not task.answers


@pytest.mark.parametrize("grammar", PRESETS)
def test_no_function_is_named_like_a_block_of_any_grammar(grammar: str, tmp_path: Path) -> None:
    tags = sorted(load_grammar(grammar).tags)
    functions = [AREA, *(function(name.capitalize(), x=TEXT) for name in tags)]
    (task,) = load_benchmark("bfcl", bfcl(tmp_path, function=functions)).tasks
    named = {each["name"] for each in task.meta["tools"]}
    assert len(named) == len(functions) and not named & {*tags}


def test_another_gold_changes_nothing_that_is_public(tmp_path: Path) -> None:
    (before,) = load_benchmark("bfcl", bfcl(tmp_path)).tasks
    gold = {"id": "simple_python_0", "ground_truth": [{"answer": {"x": ["other"]}}]}
    (tmp_path / "possible_answer" / "BFCL_v4_simple_python.json").write_text(json.dumps(gold))
    (after,) = load_benchmark("bfcl", tmp_path).tasks
    assert before.public() == after.public() and before.gold != after.gold
    assert {*before.meta} == {"set", "grammar", "reward", "family", "tools"}


def test_one_file_of_a_folder_can_be_read_alone(tmp_path: Path) -> None:
    bfcl(tmp_path), bfcl(tmp_path, "parallel")
    assert len(load_benchmark("bfcl", tmp_path).tasks) == 2
    (task,) = load_benchmark("bfcl", tmp_path / "BFCL_v4_parallel.json").tasks
    assert task.meta["family"] == "parallel"


def test_questions_without_gold_calls_are_known_by_their_category(tmp_path: Path) -> None:
    bfcl(tmp_path, "irrelevance", function=[]), bfcl(tmp_path, "live_relevance")
    none, some = load_benchmark("bfcl", tmp_path).tasks
    assert (none.gold["calls"], some.gold["calls"]) == ([], "some")
    assert none.meta["tools"] == []


def test_a_conversation_says_who_speaks(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "How large?"}]
    (task,) = load_benchmark("bfcl", bfcl(tmp_path, question=[said])).tasks
    assert task.question == "System: Be exact.\n\nUser: How large?"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"function": ["area"]}, "row 1: 'function' holds no list of name, description"),
        ({"question": [[], []]}, "row 1: 'question' is not one turn of messages"),
        ({"id": "other_1"}, "row 1: 'other_1' is not in possible_answer/BFCL_v4_simple_python"),
        ({"function": [function("area")]}, r"row 1: gold .* is not one call of a declared"),
    ],
)
def test_a_row_that_does_not_fit_is_one_line(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=message):
        load_benchmark("bfcl", bfcl(tmp_path, **changed))


def test_a_wrong_file_or_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file BFCL_v4_CATEGORY.json there"):
        load_benchmark("bfcl", tmp_path)
    folder = bfcl(tmp_path)
    java = folder / "BFCL_v4_simple_java.json"
    java.write_text("{}\n")
    with pytest.raises(UsageError, match=f"expected .* with one of {CATEGORIES[0]}"):
        load_benchmark("bfcl", java)
    (folder / "possible_answer" / "BFCL_v4_simple_python.json").unlink()
    with pytest.raises(RecordError, match=r"its gold, .* is not there"):
        load_benchmark("bfcl", folder)
