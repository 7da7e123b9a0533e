"""Quality: wrong answers, broken replay, violations of the protocol and redundant calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.distillation.filters import Candidate, FilterSettings, apply_filters
from coa.loop import REPEATED
from coa.trajectory import Author, Segment, StopReason, Trajectory
from made_chains import (
    LENIENT,
    LIMA,
    LOOK,
    PLAN,
    POOR,
    SEARCH,
    Said,
    chain,
    checked,
    closing,
    filtered,
    reason_for,
    searched,
)


def test_wrong_unjudged_and_broken_chains_are_told_apart() -> None:
    good = searched("a")
    given = [Candidate(good, 1.0), Candidate(good, 0.5), Candidate(good, None)]
    given.append(Candidate(good, 1.0, "turns: no answer"))
    done = apply_filters(given, LENIENT)
    assert len(done.kept) == 2 and done.unjudged == 1
    assert [(note["reason"], note["detail"]) for note in done.notes] == [
        ("wrong answer", "score 0.5"),
        ("does not replay", "turns: no answer"),
    ]
    strict = replace(LENIENT, keep_unjudged=False)
    done = apply_filters(given, strict)
    assert done.stages[2]["reasons"] == {
        "answer cannot be judged": 1,
        "does not replay": 1,
        "wrong answer": 1,
    }
    assert apply_filters(given, strict, judged=False).unjudged == 1


@pytest.mark.parametrize(
    ("said", "grammar", "reason"),
    [
        ([PLAN, LOOK, LIMA], "mhqa", ""),
        ([LOOK, LIMA], "mhqa", "breaks the protocol (illegal)"),
        ([PLAN, LOOK], "mhqa", "breaks the protocol (unclosed)"),
        ([PLAN, LOOK, ("answer", " ")], "mhqa", "breaks the protocol (empty)"),
        ([("plan", " "), LOOK, LIMA], "mhqa", "empty block"),
        ([PLAN, LOOK, ("answer", " Li< / think >ma")], "mhqa", "a block holds what reads as a tag"),
        (
            [("plan", " look<|im_end|>"), LOOK, LIMA],
            "mhqa",
            "a block holds a marker of a chat template",
        ),
        (
            [PLAN, SEARCH, ("reflection", " Fine."), ("suggested_answer", " Lima")],
            "web",
            "breaks the protocol (unscored)",
        ),
        (
            [PLAN, SEARCH, ("suggested_answer", " Cusco"), ("double_check", " Score: 4"), LIMA],
            "web",
            "answer is not the one suggested",
        ),
        (
            [PLAN, SEARCH, ("suggested_answer", " lima."), ("double_check", " Score: 4"), LIMA],
            "web",
            "",
        ),
        (
            [PLAN, SEARCH, ("reflection", f" {POOR}"), ("suggested_answer", " Lima")],
            "web",
            "breaks the protocol (illegal)",
        ),
    ],
)
def test_a_violation_of_the_instructions_is_named(
    said: list[Said], grammar: str, reason: str
) -> None:
    assert reason_for(chain(said, grammar)) == reason


def test_a_chain_that_a_budget_cut_is_no_example() -> None:
    made = chain([PLAN, LOOK, LIMA], stop=StopReason.RELEASED)
    assert reason_for(made) == "did not end with an answer"


def test_the_last_check_and_the_length_of_the_answer_have_thresholds() -> None:
    assert reason_for(checked(3)) == ""
    assert reason_for(checked(3), replace(LENIENT, min_final_check=4)) == "last check is too low"
    assert reason_for(checked(1, 4), replace(LENIENT, min_final_check=4)) == ""
    long = searched("a", answer="a city by the sea")
    assert reason_for(long) == ""
    assert reason_for(long, replace(LENIENT, max_answer_words=5)) == ""
    assert reason_for(long, replace(LENIENT, max_answer_words=4)) == "answer too long"


PROGRAM = " ```py\nprint(1)\n```"


@pytest.mark.parametrize(
    ("first", "second", "repeated"),
    [
        ("capital of Peru", "The capital of Peru?", True),
        ("capital of Peru", "capital of Chile", False),
        ("hepatitis symptoms", "hepatitis A symptoms", False),
        ("An opera by Verdi", "opera by Verdi", True),
        ("a page|another page", "another page|a page", True),
        ("a page|another page", "a page", False),
        ("3 + 5", "3 * 5", False),
        ("3 + 5", "3 + 5 ?", True),
        ("history of C", "history of C++", False),
        ('{"x": 1, "op": "+"}', '{"op": "+", "x": 1}', True),
        ('{"x": 1, "op": "+"}', '{"x": 1, "op": "*"}', False),
    ],
)
def test_a_call_that_was_made_before_is_redundant(first: str, second: str, repeated: bool) -> None:
    made = searched(first, second)
    assert reason_for(made) == ("redundant tool call" if repeated else "")
    assert reason_for(made, replace(LENIENT, max_repeated_calls=1)) == ""


ERROR = "Error: no plant 'Vanilla'; plants are written in lower case"
LATE = "Error: find_plant gave no answer in time."


@pytest.mark.parametrize(
    ("queries", "seen", "repeated"),
    [
        (["Vanilla", "vanilla"], [ERROR, "Palm House"], False),
        (['{"plant": "Vanilla"}', '{"plant": "vanilla"}'], [ERROR, "Palm House"], False),
        (["Vanilla", "vanilla"], ["There is no such plant.", "Palm House"], False),
        (["Vanilla", "vanilla"], ["Palm House", "Palm House"], True),
        (["Vanilla", "vanilla", "vanilla"], [ERROR, "Palm House", "Palm House"], True),
        (["vanilla", "vanilla"], ["Palm House", f"{REPEATED}\nPalm House"], True),
        (["vanilla", "vanilla"], [LATE, "Palm House"], False),
        (["vanilla", "vanilla", "vanilla"], [LATE, LATE, "Palm House"], False),
        (["Vanilla", "Vanilla", "vanilla"], [ERROR, ERROR, "Palm House"], True),
        (["basket", "pay", "basket"], ["2 plants", "Paid.", "empty"], False),
    ],
)
def test_a_call_is_redundant_only_where_it_is_answered_as_before(
    queries: list[str], seen: list[str], repeated: bool
) -> None:
    assert reason_for(searched(*queries, seen=seen)) == ("redundant tool call" * repeated)


def test_nearly_the_same_words_after_a_mistake_are_a_correction() -> None:
    near = replace(LENIENT, max_query_similarity=0.7)
    south, all_of_it = " population of South Sudan", " population of Sudan"
    made = searched(south, all_of_it, seen=[ERROR])
    assert reason_for(made, near) == ""
    marked = chain([PLAN, ("wiki_search", south, True), ("wiki_search", all_of_it), LIMA])
    assert reason_for(marked, near) == ""


def test_nearly_equal_queries_are_redundant_by_a_threshold() -> None:
    made = searched("population of South Sudan", "population of Sudan")  # 3 of 4 words
    assert reason_for(made, replace(LENIENT, max_query_similarity=0.75)) == ""
    near = replace(LENIENT, max_query_similarity=0.7)
    done = filtered(made, settings=near)
    assert done.notes[0]["reason"] == "redundant tool call"
    assert done.notes[0]["detail"] == "wiki_search: population of Sudan"


def test_the_same_words_for_two_tools_are_two_calls() -> None:
    made = chain([PLAN, SEARCH, ("crawl_page", " capital of Peru"), *closing("Lima")], "web")
    assert reason_for(made) == ""


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (" ```py\n\nprint(1)  \n```", "redundant tool call"),
        (" ```py\nprint(2)\n```", ""),
        (" ```py\nprint(1)\n```\n```sh\n5\n```", ""),
    ],
)
def test_a_changed_program_is_no_repeated_one(second: str, reason: str) -> None:
    step: list[Said] = [("think", " Run it.")]
    again: list[Said] = [("reflection", " Once more."), *step, ("code", second)]
    end: list[Said] = [("reflection", " Good."), ("think", " Done."), ("answer", " 1")]
    made = chain([PLAN, *step, ("code", PROGRAM), *again, *end], "code")
    assert reason_for(made) == reason
    assert reason_for(made, replace(LENIENT, max_query_similarity=0.0)) == reason


@given(st.text(max_size=200), st.text(max_size=80), st.sampled_from(["mhqa", "web", "code"]))
def test_whatever_a_stranger_wrote_is_kept_or_dropped_with_a_reason(
    text: str, answer: str, grammar: str
) -> None:
    segments = [Segment(Author.PROMPT, "Work."), Segment(Author.MODEL, text)]
    stop = StopReason.ANSWERED
    strange = Trajectory("t", "Why?", grammar, segments, stop=stop, answer=answer)
    sound = chain([PLAN, ("think", answer), LIMA], grammar)
    done = apply_filters([Candidate(strange, 1.0), Candidate(sound, 1.0)], FilterSettings())
    assert len(done.kept) + len(done.notes) == 2
