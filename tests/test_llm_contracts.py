"""Replies of agents: JSON by a schema, read where it has one reading, otherwise refused with a word
of advice; and the worked example that each agent is shown."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.grammar.grammar import parse_ratings, parse_score
from coa.recording.agents import (
    call_contract,
    judge_contract,
    plan_contract,
    report_contract,
    verify_contract,
)
from coa.recording.chat import as_sent
from coa.recording.recorder import CRITERIA
from coa.recording.replies import (
    MAX_STEPS,
    Called,
    Malformed,
    PlannedStep,
    ReplyForm,
    Report,
    answer_form,
    call_form,
    check_form,
    judge_form,
    plan_form,
    report_form,
)
from coa.tools import Tool
from coa.tools.arguments import find_problem


async def _run(text: str) -> str:
    return text


POINT = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Place"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["at", "days"],
    "$defs": {"Place": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
SEARCH, CRAWL = Tool("wiki_search", _run), Tool("crawl_page", _run)
CODE = Tool("code", _run, body="code")
JSON = Tool("weather", _run, body="json", schema=json.dumps(POINT))
TEAM = ["searcher", "coder"]
FORMS: dict[str, ReplyForm[Any]] = {
    "plan": plan_form(TEAM),
    "plan of one": plan_form(["searcher"]),
    "plan of programs": plan_form(["coder"]),
    "step": plan_form(TEAM, whole=False),
    "call": call_form([SEARCH]),
    "call of JSON": call_form([JSON]),
    "calls": call_form([SEARCH, JSON]),
    "program": call_form([CODE]),
    "report": report_form([]),
    "report or call": report_form([CRAWL]),
    "judgement": judge_form(False, coding=False),
    "judgement of programs": judge_form(False, coding=True),
    "rated judgement": judge_form(True, coding=False),
    "answer": answer_form(),
    "check": check_form(),
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(["", "so", "approve", "good"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["agent", "task", "after", "tool", "input"]), inner)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=60, deadline=None)
@given(drawn=st.data())
def test_any_reply_is_read_or_refused(name: str, drawn: st.DataObject) -> None:
    """What was read is never empty, and grammars can read the scores that it holds."""
    form = FORMS[name]
    known = st.fixed_dictionaries({}, optional=dict.fromkeys(form.schema["properties"], VALUES))
    near = {k: st.just(v) | VALUES for k, v in form.example.items()}
    reply = st.one_of(st.text(), known.map(json.dumps), st.fixed_dictionaries(near).map(json.dumps))
    try:
        found = form.read(drawn.draw(reply), drawn.draw(st.booleans()))
    except Malformed as wrong:
        assert str(wrong) and "\n" not in str(wrong)
        return
    if isinstance(found, Called):
        assert found.argument.strip()
    elif isinstance(found, Report):
        assert found.text.strip() and "\n" not in found.text
    elif name == "rated judgement":
        assert parse_ratings(found.text, CRITERIA) is not None
    elif name == "check":
        assert found[0] and parse_score(found[0]) in (None, found[1])
    elif name == "answer":
        assert found[1].strip()
    elif name in ("plan", "plan of one") and not found.impossible:
        for number, step in enumerate(found.steps, 1):
            assert step.agent in (*TEAM, "verifier")
            assert step.after <= set(range(1, number))


@pytest.mark.parametrize("name", FORMS)
def test_an_example_fits_its_schema_and_is_refused_as_a_reply(name: str) -> None:
    form = FORMS[name]
    assert find_problem(form.example, form.schema) == ""
    assert list(form.example) == list(form.schema["properties"])
    assert form.schema["additionalProperties"] is False
    with pytest.raises(Malformed, match="That is the example"):
        form.read(json.dumps(form.example))
    sent = as_sent("json_schema", f"{name} 1", form.schema)["response_format"]["json_schema"]
    assert sent["schema"] == form.schema and sent["strict"] and " " not in sent["name"]


@pytest.mark.parametrize(
    "contract",
    [
        plan_contract(TEAM),
        call_contract([SEARCH]),
        call_contract([SEARCH, JSON]),
        report_contract([]),
        report_contract([CRAWL]),
        judge_contract(rated=False, coding=False),
        judge_contract(rated=True, coding=False),
        verify_contract(),
    ],
)
def test_a_contract_shows_replies_and_no_placeholder(contract: str) -> None:
    shown = [json.loads(line) for line in contract.splitlines() if line.startswith("{")]
    assert len(shown) == contract.count("An example: for ") > 0
    for word in ("<", "...", "one short sentence:", "what to do", "its name"):
        assert word not in contract


def told(**fields: Any) -> str:
    return json.dumps(fields)


# -- plans ---------------------------------------------------------------------------------------


def test_a_plan_says_who_does_what_after_what() -> None:
    steps = [
        {"agent": "searcher", "task": "the capital of Peru", "after": []},
        {"agent": "searcher", "task": "the area\nof Peru", "after": []},
        {"agent": "coder", "task": "divide them", "after": [1, 2]},
    ]
    found = plan_form(TEAM).read(told(thought="Two look-ups.", steps=steps, combine="say it"))
    assert found.thought == "Two look-ups."
    assert found.steps == (
        PlannedStep("searcher", "the capital of Peru", frozenset()),
        PlannedStep("searcher", "the area of Peru", frozenset()),
        PlannedStep("coder", "divide them", frozenset({1, 2})),
        PlannedStep("verifier", "say it", frozenset({1, 2, 3})),
    )
    assert found.text.startswith("1. the capital of Peru\n2. the area of Peru\n3. divide them")


def test_one_step_is_changed_alone() -> None:
    reply = told(steps=[{"agent": "coder", "task": "divide", "after": [3]}])
    found = plan_form(TEAM, whole=False).read(reply)
    assert found.text == "1. divide"


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ("I would search first.", "Your reply is no JSON object. Expected {"),
        ("{a plan}", "Your reply cannot be read as JSON. Expected {"),
        ("", "Your reply is empty. Expected {"),
        ([{"task": "a", "after": [2]}, {"task": "b", "after": []}], "Step 1 can only need steps b"),
        ([{"task": "a", "after": [0]}], "is 0, expected 1 to 8"),
        ([{"task": "a", "after": []}] * (MAX_STEPS + 1), "steps has 9 items, expected at most 8"),
        ([{"task": " ", "after": []}], "the task of step 1 is empty"),
        ([{"after": []}], "task is missing"),
        ([], "nobody does anything"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said(steps: Any, complaint: str) -> None:
    reply = steps if isinstance(steps, str) else told(steps=steps, combine="so")
    with pytest.raises(Malformed) as caught:
        plan_form(["searcher"], first=True).read(reply)
    assert complaint in str(caught.value)


def test_a_step_is_for_one_of_the_team() -> None:
    reply = told(steps=[{"agent": "reader", "task": "read", "after": []}], combine="so")
    with pytest.raises(Malformed, match='is "reader", expected one of "searcher", "coder"'):
        plan_form(TEAM).read(reply)


def test_a_plan_without_steps_is_impossible() -> None:
    reply = told(thought="no tool for it", steps=[], combine="")
    assert plan_form(TEAM).read(reply).impossible == "no tool for it"
    with pytest.raises(Malformed, match="thought is empty"):
        plan_form(TEAM).read(told(steps=[], combine=""))
    (step,) = plan_form(TEAM).read(told(steps=[], combine="count them again")).steps
    assert (step.agent, step.text) == ("verifier", "count them again")


# -- how a reply may be written ------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"thought": "I search.", "input": "capital of  Peru"}',
        '```json\n{"thought": "I search.", "input": "capital of Peru"}\n```',
        '<think>hm {"input": 1}</think>{"thought": "I search.", "input": "capital of Peru"}',
        'hm</thinking>\n{"thought": "I search.", "input": " capital of Peru "}',
        'Sure: {"thought": "I search.", "input": "capital of Peru",}',
        "{'thought': 'I search.', 'input': 'capital of Peru'",
        '{"thought": "I search.", "input": "capital of Peru", "tool": "wiki_search"}',
    ],
)
def test_what_has_one_reading_is_read(text: str) -> None:
    called = Called("wiki_search", "capital of Peru", "I search.")
    assert call_form([SEARCH]).read(text) == called


def test_what_was_cut_is_not_repaired() -> None:
    for text in ('{"thought": "so", "input": "capital', "", "{"):
        with pytest.raises(Malformed, match=r"cut because it is too long\. Write a shorter one"):
            call_form([SEARCH]).read(text, cut=True)
    whole = told(thought="so", input="capital")
    assert call_form([SEARCH]).read(whole, cut=True).argument == "capital"


def test_a_longer_thought_is_no_reason_to_ask_again() -> None:
    assert call_form([SEARCH]).read(told(thought="so " * 900, input="x")).argument == "x"
    assert call_form([SEARCH]).read(told(input="x")).thought == ""
    with pytest.raises(Malformed, match="input is empty"):
        call_form([SEARCH]).read(told(input="  "))


# -- calls and reports ---------------------------------------------------------------------------


def test_which_tool_is_named_where_there_are_several() -> None:
    form = call_form([SEARCH, JSON])
    assert form.schema["$defs"] == POINT["$defs"]
    given = {"at": {"city": "Lima"}, "days": 2}
    called = form.read(told(call={"tool": "weather", "input": given}))
    assert (called.tool, json.loads(called.argument)) == ("weather", given)
    assert form.read(told(call={"tool": "wiki_search", "input": "x"})).argument == "x"
    for wrong in ({"tool": "weather", "input": "x"}, {"tool": "wether", "input": "x"}, {}):
        with pytest.raises(Malformed):
            form.read(told(call=wrong))


def test_a_program_is_put_into_a_fence() -> None:
    form = call_form([CODE])
    assert form.read(told(program="print(1 + 2)")).argument == "```py\nprint(1 + 2)\n```"
    fenced = "```py\nprint(input())\n```\n```sh\n7\n```"
    assert form.read(told(program=fenced)).argument == fenced


def test_a_report_is_found_or_missing_and_a_reader_with_a_tool_may_open_something() -> None:
    form = report_form([])
    found = form.read(told(found=True, report="Lima is\nthe capital."))
    assert found == Report("Lima is the capital.")
    assert form.read(told(found=False, report="the area")) == Report("Not found: the area", False)
    with pytest.raises(Malformed, match="report is empty"):
        form.read(told(found=True, report=""))
    form = report_form([CRAWL])
    called = form.read(told(open="https://a.example/", found=False, report=""))
    assert called == Called("crawl_page", "https://a.example/")
    assert form.read(told(open="", found=True, report="so")) == Report("so")


# -- judgements, answers and checks --------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdict", "todo"),
    [("approve", ""), ("read again", "read"), ("search again", "call"), ("plan again", "plan")],
)
def test_a_verdict_is_one_of_four(verdict: str, todo: str) -> None:
    found = judge_form(False, coding=False).read(told(reason="So.", verdict=verdict))
    assert found.todo == todo and found.text == found.reason == "So."
    with pytest.raises(Malformed, match='expected one of "approve", "write again"'):
        judge_form(False, coding=True).read(told(reason="So.", verdict="approve or not"))


def rated(*ratings: str, reason: str = "It missed.") -> str:
    return told(**dict(zip(CRITERIA, ratings, strict=True)), reason=reason)


def test_the_worst_rating_says_what_is_done() -> None:
    form = judge_form(True, coding=False)
    assert form.read(rated("good", "good", "good")).todo == ""
    assert form.read(rated("good", "average", "good")).todo == "read"
    found = form.read(rated("average", "poor", "good"))
    assert found.todo == "plan" and found.text == (
        "Information Conflict: average. Tool Effectiveness: poor. Trajectory Monitoring: good. "
        "It missed."
    )
    with pytest.raises(Malformed, match="The reason states other ratings"):
        form.read(rated("good", "good", "average", reason="The Tool Effectiveness is poor."))


def test_an_answer_keeps_its_lines_and_a_check_has_one_score() -> None:
    assert answer_form().read(told(thought="So.", answer="1 2\n3 4")) == ("So.", "1 2\n3 4")
    assert check_form().read(told(reason="It agrees.", score=4)) == ("It agrees.", 4)
    assert check_form().read(told(reason="It agrees.", score="3")) == ("It agrees.", 3)
    with pytest.raises(Malformed, match="states another score"):
        check_form().read(told(reason="I would score it 2.", score=4))
    with pytest.raises(Malformed, match="expected one of 1, 2, 3, 4"):
        check_form().read(told(reason="x", score=5))
