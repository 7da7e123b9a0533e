"""Replies of agents: read where they have one reading, otherwise refused with a word of advice."""

from __future__ import annotations

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
from coa.recording.recorder import CRITERIA
from coa.recording.replies import (
    MAX_STEPS,
    Called,
    Malformed,
    PlannedStep,
    Report,
    read_answer,
    read_call,
    read_check,
    read_judgement,
    read_plan,
    read_report,
)
from coa.tools import Tool


async def _run(text: str) -> str:
    return text


SEARCH, CRAWL = Tool("wiki_search", _run), Tool("crawl_page", _run)
CODE, JSON = Tool("code", _run, body="code"), Tool("weather", _run, body="json")
TEAM = ["searcher", "coder"]
READERS: dict[str, Any] = {
    "plan": lambda text: read_plan(text, TEAM),
    "first plan": lambda text: read_plan(text, ["searcher"], first=True),
    "call": lambda text: read_call(text, [SEARCH], {"made"}),
    "calls": lambda text: read_call(text, [SEARCH, JSON]),
    "program": lambda text: read_call(text, [CODE]),
    "report": lambda text: read_report(text, []),
    "report or call": lambda text: read_report(text, [CRAWL]),
    "judgement": lambda text: read_judgement(text, False),
    "rated judgement": lambda text: read_judgement(text, True),
    "suggestion": read_answer,
    "check": read_check,
}
PIECES = st.sampled_from(
    ["THOUGHT:", "**INPUT:**", "TOOL: code", "REPORT:", "MISSING:", "VERDICT: approve", "REASON:"]
    + ["ANSWER:", "SCORE: 3", "score: 2-3", "1. searcher: a (after none)", "2. b (after 1)", "3)"]
    + ["```py\nprint(1)\n```", "```", "<think>", "</think>", "Tool Effectiveness: poor", "\n", " x"]
    + [f"{name}: good" for name in CRITERIA]
    + ['{"input": "x"}', '{"name": "weather", "arguments": {"a": [1]}}', '{"score": 4.5}', "\uff1a"]
)
TEXTS = st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=8))).map("\n".join))


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_any_text_is_read_or_refused(name: str, text: str) -> None:
    """What was read is never empty, and grammars can read the scores that it holds."""
    try:
        found = READERS[name](text)
    except Malformed as wrong:
        assert str(wrong) and "\n" not in str(wrong)
        return
    if isinstance(found, Called):
        assert found.argument.strip() and found.argument != "made"
    elif isinstance(found, Report):
        assert found.text.strip() and "\n" not in found.text
    elif name == "rated judgement":
        assert parse_ratings(found.text, CRITERIA) is not None
    elif name == "check":
        assert found[1] and parse_score(found[1]) in (None, found[2])
    elif name == "suggestion":
        assert found[1].strip()
    elif "plan" in name and not found.impossible:
        for number, step in enumerate(found.steps, 1):
            assert step.agent in (*TEAM, "verifier") and step.text
            assert step.after <= set(range(1, number))


@pytest.mark.parametrize(
    ("name", "contract"),
    [
        ("plan", plan_contract(TEAM)),
        ("call", call_contract([SEARCH])),
        ("calls", call_contract([SEARCH, JSON])),
        ("program", call_contract([CODE])),
        ("report", report_contract([])),
        ("report or call", report_contract([CRAWL])),
        ("judgement", judge_contract(rated=False, coding=False)),
        ("judgement", judge_contract(rated=False, coding=True)),
        ("suggestion", verify_contract()),
        ("check", verify_contract()),
    ],
)
def test_a_reply_that_repeats_its_contract_is_refused(name: str, contract: str) -> None:
    form = contract[contract.index("nothing else:\n") + 14 :] if "nothing else" in contract else ""
    for text in (contract, form, form.split("\nEvery step")[0]):
        with pytest.raises(Malformed):
            READERS[name](text)


# -- plans ---------------------------------------------------------------------------------------


def test_a_plan_says_who_does_what_after_what() -> None:
    found = read_plan(
        "THOUGHT: Two look-ups.\n"
        "1. searcher: the capital of Peru (after none)\n"
        "2. Searcher: the area of Peru (after none).\n"
        "3. **coder**: divide them (after steps 1 and 2)\n"
        "4. the currency of Peru\n"
        "5. verifier: say it (after: 3)",
        TEAM,
    )
    assert found.thought == "Two look-ups."
    assert found.steps == (
        PlannedStep("searcher", "the capital of Peru", frozenset()),
        PlannedStep("searcher", "the area of Peru", frozenset()),
        PlannedStep("coder", "divide them", frozenset({1, 2})),
        PlannedStep("searcher", "the currency of Peru", frozenset({1, 2, 3})),
        PlannedStep("verifier", "say it", frozenset({3})),
    )
    assert found.text.startswith("1. the capital of Peru\n2. the area of Peru\n3. divide them")


@pytest.mark.parametrize(
    "text",
    [
        "Here is the plan:\n\n1. searcher: the capital of Peru\n2. verifier: say it",
        "## Plan\n**1.** searcher: the capital of Peru\n**2.** verifier: say it\n\nGood luck!",
        "- 1) searcher: the capital of Peru (after none)\n- 2) verifier: say it (after 1)",
        "<think>Which tool?\n1. maybe</think>1. searcher: the capital of Peru\n2. verifier: say it",
        "maybe so</think>\n1. Searcher: the capital of Peru\n2. Verifier: say it",
        "THOUGHT: So\n1. a\n2. b\nPLAN:\n1. searcher: the capital of Peru\n2. verifier: say it",
        "Step 1: [searcher] the capital of Peru\nStep 2: [verifier] say it",
        "1. searcher - the capital of Peru\n2. Verifier agent: say it",
        "1. searcher\uff1athe capital of Peru\uff08after none\uff09\n2. verifier\uff1asay it",
        "1. searcher: the capital\n   of Peru (after none)\n2. verifier: say it\nIMPOSSIBLE: none",
    ],
)
def test_a_plan_may_be_marked_up(text: str) -> None:
    found = read_plan(text, TEAM)
    assert found.text == "1. the capital of Peru\n2. say it"
    assert [step.agent for step in found.steps] == ["searcher", "verifier"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("I would search first.", "There is no plan"),
        ("1. a\n3. b", "Number the steps 1, 2, 3"),
        ("1. a\n1. b", "Number the steps 1, 2, 3"),
        ("1. a (after 2)\n2. b", "Step 1 can only need steps before it"),
        ("1. reader: read it", "Step 1 is for the reader. Steps are for: searcher, coder or veri"),
        ("1. <what to do>", "step 1 holds only a placeholder"),
        ("\n".join(f"{n}. a" for n in range(1, MAX_STEPS + 2)), "steps are too many"),
        ("1. verifier: say it", "Nobody does anything"),
        ("1. searcher: say it\nIMPOSSIBLE: no tool", "either steps or IMPOSSIBLE"),
        ("<think>I think and think", "Your reply ends while you think"),
        ("  \n", "Your reply is empty"),
    ],
)
def test_what_is_wrong_with_a_plan_is_said(text: str, complaint: str) -> None:
    with pytest.raises(Malformed, match=complaint):
        read_plan(text, TEAM, first=True)


def test_a_plan_may_be_impossible() -> None:
    assert read_plan("IMPOSSIBLE: no tool for it", TEAM).impossible == "no tool for it"


# -- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "THOUGHT: I search.\nINPUT: capital of Peru",
        "**Thought:** I search.\n**Input:** capital of Peru",
        "thought: I search.\n\ninput:\n\ncapital of  Peru\n",
        'THOUGHT: I search.\nTOOL: wiki_search\nINPUT: "capital of Peru"',
        "THOUGHT: I search.\nINPUT: wiki_search(`capital of Peru`)",
        "<thinking>hm</thinking>\nTHOUGHT: I search.\nINPUT: ```\ncapital of Peru\n```",
        "THOUGHT: I search.\nINPUT: capital of Peru\n<think>Enough.</think>",
        "THOUGHT\uff1aI search.\nINPUT\uff1a\u201ccapital of Peru\u201d",
        "**THOUGHT: I search.**\n**INPUT: capital of Peru**",
        'THOUGHT: I search.\nINPUT: {"query": "capital of Peru"}',
        '{"thought": "I search.", "input": "capital of Peru"}',
        '```json\n{"THOUGHT": "I search.", "TOOL": "wiki_search", "INPUT": "capital of Peru"}\n```',
        '<tool_call>{"thought": "I search.", "name": "wiki_search", "arguments": '
        '{"query": "capital of Peru"}}</tool_call>',
    ],
)
def test_a_call_may_be_written_in_many_ways(text: str) -> None:
    assert read_call(text, [SEARCH]) == Called("wiki_search", "capital of Peru", "I search.")


def test_a_line_alone_can_only_be_what_the_tool_is_given() -> None:
    assert read_call("capital of Peru", [SEARCH]).argument == "capital of Peru"
    with pytest.raises(Malformed, match="There is no call"):
        read_call("I would search\nfor the capital", [SEARCH])


def test_which_tool_is_named_where_there_are_several() -> None:
    text = "TOOL: `weather`\nINPUT: {'city': 'Lima',\n 'days': 2}"
    assert read_call(text, [SEARCH, JSON]).argument == "{'city': 'Lima',\n 'days': 2}"
    for wrong in ("INPUT: x", "TOOL: wether\nINPUT: x", "x"):
        with pytest.raises(Malformed, match="names wiki_search or weather"):
            read_call(wrong, [SEARCH, JSON])


@pytest.mark.parametrize(
    "text",
    [
        "THOUGHT: I add.\nINPUT:\n```py\nprint(1 + 2)\n```",
        "THOUGHT: I add.\n\n```py\nprint(1 + 2)\n```\nThis prints 3.",
        "THOUGHT: I add.\nINPUT:\nprint(1 + 2)",
        "THOUGHT: I add.\nINPUT: ```py\nprint(1 + 2)\n```",
        "THOUGHT: I add.\n```\none and two\n```\nINPUT:\n```py\nprint(1 + 2)\n```",
        "```\nTHOUGHT: I add.\nINPUT:\n```py\nprint(1 + 2)\n```\n```",
        '{"thought": "I add.", "input": "print(1 + 2)"}',
    ],
)
def test_a_program_is_what_stands_in_the_fence(text: str) -> None:
    assert read_call(text, [CODE]) == Called("code", "```py\nprint(1 + 2)\n```", "I add.")


def test_what_a_model_imagines_after_its_call_is_not_part_of_it() -> None:
    text = "INPUT:\n```py\nprint(1)\n```\nOutput:\n```\n1\n```"
    assert read_call(text, [CODE]).argument == "```py\nprint(1)\n```"
    fed = "```py\nprint(input())\n```\n```sh\n7\n```"
    assert read_call(f"INPUT:\n{fed}\nIt prints 7.", [CODE]).argument == fed
    text = "INPUT: capital of Peru\nOBSERVATION: Lima\n\nTHOUGHT: I know it."
    assert read_call(text, [SEARCH]).argument == "capital of Peru"


def test_a_program_may_hold_words_that_are_labels() -> None:
    text = "INPUT:\n```py\nprint('''\nANSWER: 1\nINPUT: 2\nTHOUGHT: 3''')\n```"
    assert read_call(text, [CODE]).argument.endswith("INPUT: 2\nTHOUGHT: 3''')\n```")
    for wrong in ("INPUT:\n```py\nprint(", "print it"):
        with pytest.raises(Malformed, match="There is no whole program"):
            read_call(wrong, [CODE])


def test_a_call_that_was_made_is_refused_and_so_is_one_that_says_nothing() -> None:
    with pytest.raises(Malformed, match="made before"):
        read_call("INPUT: 'so'", [SEARCH], {"so"})
    with pytest.raises(Malformed, match="INPUT is empty"):
        read_call("THOUGHT: x\nINPUT:", [SEARCH])
    with pytest.raises(Malformed, match="INPUT holds only a placeholder"):
        read_call("INPUT: <query>", [SEARCH])


# -- reports -------------------------------------------------------------------------------------


def test_a_report_is_found_missing_or_plain_text() -> None:
    assert read_report("REPORT: Lima is\nthe capital.", []) == Report("Lima is the capital.")
    assert read_report("Lima is the capital.", []) == Report("Lima is the capital.")
    assert read_report("**REPORT: So.**\nMISSING: none", []) == Report("So.")
    assert read_report('{"REPORT": "So."}', []) == Report("So.")
    assert read_report("**REPORT**: It is **so**", []) == Report("It is **so**")
    assert read_report("MISSING: the area", []) == Report("Not found: the area", False)
    for wrong in ("REPORT: a\nMISSING: b", "REPORT:", "REPORT: a\nREPORT: b", "THOUGHT: only"):
        with pytest.raises(Malformed):
            read_report(wrong, [])


def test_a_reader_with_a_tool_calls_or_reports() -> None:
    called = read_report("THOUGHT: I open it.\nINPUT: https://a.example/", [CRAWL])
    assert called == Called("crawl_page", "https://a.example/", "I open it.")
    assert read_report("REPORT: so", [CRAWL]) == Report("so")
    with pytest.raises(Malformed, match="not both"):
        read_report("INPUT: x\nREPORT: y", [CRAWL])
    with pytest.raises(Malformed, match="You have no tool"):
        read_report("INPUT: x", [])


# -- judgements ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "todo"),
    [
        ("VERDICT: approve\nREASON: It agrees.", ""),
        ("VERDICT: Approved.", ""),
        ('{"verdict": "search again", "reason": "It missed."}', "call"),
        ("**Verdict:** read again\n**Reason:** Another value.", "read"),
        ("VERDICT: search again\nREASON: It missed.", "call"),
        ("VERDICT: write again\nREASON: It crashed.", "call"),
        ("VERDICT: plan again\nREASON: It leads nowhere.", "plan"),
    ],
)
def test_a_verdict_is_one_of_four(text: str, todo: str) -> None:
    found = read_judgement(text, False)
    assert found.todo == todo and found.text == found.reason


@pytest.mark.parametrize(
    "text",
    [
        "VERDICT: one of: approve, read again, search again, plan again\nREASON: x",
        "VERDICT: I do not approve\nREASON: x",
        "VERDICT: read again",
        "REASON: It is fine.",
        "The report agrees.",
        "VERDICT: approve\nVERDICT: plan again\nREASON: x",
    ],
)
def test_a_verdict_with_two_readings_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        read_judgement(text, False)


def rated(*ratings: str) -> str:
    return "\n".join(f"{name}: {each}" for name, each in zip(CRITERIA, ratings, strict=True))


def test_the_worst_rating_says_what_is_done() -> None:
    assert read_judgement(rated("good", "good", "good"), True).todo == ""
    assert read_judgement(rated("good", "fair", "good") + "\nREASON: x", True).todo == "read"
    found = read_judgement(rated("average", "poor", "good") + "\nREASON: It missed.", True)
    assert found.todo == "plan" and found.text == (
        "Information Conflict: average. Tool Effectiveness: poor. Trajectory Monitoring: good. "
        "It missed."
    )
    with pytest.raises(Malformed, match="Rate each of Information Conflict"):
        read_judgement(f"{CRITERIA[0]}: good\nREASON: x", True)
    with pytest.raises(Malformed, match="with one word"):
        read_judgement(rated("good", "good, average or poor", "good") + "\nREASON: x", True)
    with pytest.raises(Malformed, match="says what is wrong"):
        read_judgement(rated("good", "poor", "good"), True)
    contrary = rated("good", "good", "average") + "\nREASON: The Tool Effectiveness is poor."
    with pytest.raises(Malformed, match="The reason states other ratings"):
        read_judgement(contrary, True)
    thought = read_judgement("THOUGHT: I compare.\n" + rated("good", "good", "good"), True).thought
    assert thought == "I compare."
    in_one_line = rated("good", "good", "poor").replace("\n", ", ") + "\nREASON: x"
    assert read_judgement(in_one_line, True).todo == "plan"


# -- answers and checks --------------------------------------------------------------------------


def test_an_answer_is_what_stands_after_its_label_or_a_line_alone() -> None:
    assert read_answer("THOUGHT: So.\nANSWER: Lima") == ("So.", "Lima")
    assert read_answer("Lima")[1] == "Lima"
    assert read_answer("ANSWER: **Lima**\nSCORE: 4")[1] == "Lima"
    assert read_answer("FINAL ANSWER: Lima")[1] == "Lima"
    assert read_answer('{"thought": "So.", "answer": 42}') == ("So.", "42")
    assert read_answer("ANSWER:\n```text\n1 2\n\n3 4\n```")[1] == "1 2\n\n3 4"
    with pytest.raises(Malformed, match="Something follows the answer"):
        read_answer("ANSWER: Lima\n\nLet me know if you need more!")
    assert read_answer("ANSWER: [[1, 2],\n [3, 4]]")[1] == "[[1, 2],\n [3, 4]]"
    for wrong in ("THOUGHT: So.", "It is\nLima", "ANSWER: <answer>", "ANSWER: a\nANSWER: b"):
        with pytest.raises(Malformed):
            read_answer(wrong)


def test_a_check_has_one_score() -> None:
    found = read_check("THOUGHT: I look.\nREASON: It agrees.\nSCORE: 4/4")
    assert found == ("I look.", "It agrees.", 4)
    assert read_check("Score: 2") == ("", "Score: 2", 2)
    with pytest.raises(Malformed, match="states another score"):
        read_check("REASON: I would score it 2.\nSCORE: 4")
    assert read_check("I would give it three out of four.")[2] == 3
    for wrong in ("REASON: good", "SCORE: 5", "SCORE: 2-3", "SCORE: 2\nSCORE: 4"):
        with pytest.raises(Malformed):
            read_check(wrong)
