"""Contamination: evaluation questions are found in whatever dress, template mates are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.distillation.contamination import GRAMS, SAME, WITHIN, find_leaks
from coa.environments import make_tasks
from coa.tasks import Task

OSAKA = Task("What is the capital of the country where Osaka is located?", ("Tokyo",), id="osaka")


def rule(question: str, *asked: str, ngram: int = 8, overlap: float = 0.5) -> str:
    """The rule by which a question is found among others; empty: it is not."""
    exam = [Task(each) for each in asked] or [OSAKA]
    found = find_leaks([question], {"exam.jsonl": exam}, ngram, overlap)
    return found[0].rule if found else ""


@pytest.mark.parametrize(
    ("question", "wanted"),
    [
        (OSAKA.question, SAME),
        ("what is the capital of the country where OSAKA is located", SAME),
        ("Tell me the capital of the country in which Osaka is located.", SAME),
        ("What is the capital city of the country where Osaka is located?", WITHIN),
        (
            "Here is a riddle: what is the capital of the country where Osaka is located? Go!",
            WITHIN,
        ),
        ("What is the capital of the country where Nagoya is located?", ""),
        ("What is the currency of the country where Osaka is located?", ""),
        ("What is the capital of Japan?", ""),
        ("", ""),
    ],
)
def test_the_same_question_in_other_words_is_found_and_its_template_mates_are_not(
    question: str, wanted: str
) -> None:
    assert rule(question) == wanted


@pytest.mark.parametrize(
    ("question", "asked"),
    [
        ("What is the world\u2019s largest lake\u2026", "What is the world's largest lake?"),
        ("Who wrote \u201cEmma\u201d \u2013 and when", 'Who wrote "Emma" - and when?'),
        ("Where was Jos\u00e9 Rizal born?", "Where was Jose\u0301 Rizal born?"),
        ("What is the\u00a0cap\u00adital of\u200b Peru?", "What is the capital of Peru?"),
        ("How many of 1,400 hens are left?", "How many of 1400 hens are left?"),
        ("Which city (in Japan) hosted Expo 1970?", "Which city in Japan hosted Expo 1970?"),
        ("Which city hosted the Expo (in 1970)?", "Which city hosted the Expo in 1970?"),
        ("Who directed Jaws (1975)?", "Who directed Jaws 1975?"),
        ("Who directed the film *Jaws*?", "Who directed the film Jaws?"),
        ("Who wrote the novel **1984**?", "Who wrote the novel 1984?"),
        ("Who wrote the novel _Emma_?", "Who wrote the novel Emma?"),
        ("# Geography\nWhere is Lima?", "Geography: where is Lima?"),
        ("Where was [the singer] Adele born?", "Where was the singer Adele born?"),
        ("Who wrote <i>Dune</i> and its sequels?", "Who wrote Dune and its sequels?"),
        ("Which river is in Peru & Chile together?", "Which river is in Peru and Chile together?"),
        ("Which river is in Peru &amp; Chile?", "Which river is in Peru and Chile?"),
        ("Who lives in S\u00e3o Tom\u00e9?", "Who lives in Sao Tome?"),
        (
            "\u65e5\u672c\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f",
            "\u65e5\u672c\u7684\u9996\u90fd\u662f\u54ea\u91cc",
        ),
    ],
)
def test_the_typesetting_of_a_question_does_not_hide_it(question: str, asked: str) -> None:
    assert rule(question, asked) == rule(asked, question) == SAME


def test_questions_without_blanks_are_told_apart_by_their_letters() -> None:
    japan, peru = (
        f"{name}\u7684\u9996\u90fd\u662f\u54ea\u91cc" for name in ("\u65e5\u672c", "\u79d8\u9c81")
    )
    assert rule(f"\u8bf7\u56de\u7b54: {japan}? \u8c22\u8c22", japan) == WITHIN
    assert rule(peru, japan) == ""


@pytest.mark.parametrize(
    ("question", "asked", "wanted"),
    [
        ("What is 3 + 5?", "Tell me: what is 3 + 5", SAME),
        ("What is 3 + 5?", "What is 3 * 5?", ""),
        ("What is 3 - 5?", "What is 5 - 3?", ""),
        ("Sort 3, 1, 2.", "Sort 1, 2, 3.", ""),
        ("Compute the sum 10 + 20 + 3 + 5 now", "Compute the sum 3 + 5", WITHIN),
        ("Compute the sum 3 + 15 + 5 now", "Compute the sum 3 + 5", ""),
        ("Who wrote the well-known novel Emma?", "Who wrote the well known novel Emma", SAME),
        ("Who?", "Which?", ""),
        ("What is a * b now?", "What is a + b now?", ""),
        ("What is 2 x y now?", "What is 2*x*y now?", ""),
        ("Is x \u2260 y here?", "Is x = y here?", ""),
        ("Is x <b and c> d?", "Is x > b and c < d?", ""),
        ("What is (2 + 3) * 4?", "What is 2 + (3 * 4)?", ""),
        ("What is x - (y - z) now?", "What is (x - y) - z now?", ""),
        ("Reverse [1, 2], [3] now", "Reverse [1], [2, 3] now", ""),
        ("Close the brackets ( [ {", "Close the brackets { [ (", ""),
        ("Solve the maze # . # #", "Solve the maze # . #. # #", ""),
        ("Who plays next: X O?", "Who plays next: X _ O?", ""),
        ("Who designed C#?", "Who designed C++?", ""),
    ],
)
def test_figures_count_in_their_order_and_words_do_not(
    question: str, asked: str, wanted: str
) -> None:
    assert rule(question, asked) == wanted


def test_words_of_a_short_question_must_lie_close_together() -> None:
    filler = " ".join(f"word{number}" for number in range(30))
    assert rule("Osaka belongs to a country with a capital, it is located there") == WITHIN
    assert rule(f"Osaka is nice. {filler} The country has a capital, located inland.") == ""


RULES = (
    "You play on a board with numbered cells and you may move a stone one cell up, down, left or "
    "right in every turn, but never onto a cell that is marked as blocked. The stone begins in the "
    "upper left corner and has to reach the lower right corner in as few moves as you can manage. "
)
BOARDS = ["0 0 1 / 1 0 0 / 1 1 0", "0 1 1 / 0 0 1 / 1 0 0", "0 0 0 / 1 1 0 / 1 1 0"]


def puzzle(board: str) -> str:
    return f"{RULES}How many moves does the best player need on the board {board} then?"


def test_long_questions_of_one_template_are_told_apart_by_their_figures() -> None:
    exam = {"exam.jsonl": [Task(puzzle(BOARDS[0]), id="p0")]}
    given = [puzzle(BOARDS[1]), puzzle(BOARDS[2]), f"Dear all! {puzzle(BOARDS[0])} Good luck!"]
    found = find_leaks(given, exam)
    assert set(found) == {2} and found[2].rule == GRAMS
    assert (found[2].evaluation, found[2].task_id) == ("exam.jsonl", "p0")


STORY = (
    "A farmer from Arequipa sells quinoa on the market of a small town every Saturday, and her "
    "brother carries the sacks with an old donkey that stops at each bridge to drink. One day the "
    "donkey refuses to cross at all, so they walk around the lake and arrive when the market is "
    "nearly over. Which animal carried the sacks, and why did they come too late to the market?"
)


def test_a_long_formula_is_found_within_another_question() -> None:
    product = "Multiply the complex numbers: (3.0 - 9.0i) * (-2.0 + 6.0i)"
    assert rule(f"Reply with care. {product}", product) == WITHIN
    assert rule(f"Reply with care. {product.replace('6.0', '7.0')}", product) == ""


def claims(true: int, false: int) -> str:
    return (
        f"The first says that at least {true} of these seven claims are true and none of them is "
        f"idle, the second says that at most {false} of these seven claims are false: who is right?"
    )


def test_a_question_without_a_passage_of_its_own_is_found_within_another() -> None:
    asked = [claims(true, false) for true in range(1, 6) for false in range(1, 6)]
    assert rule(f"Reply with care. {claims(2, 3)}", *asked) == WITHIN
    assert rule(f"Reply with care. {claims(2, 7)}", *asked) == ""
    exam = {"exam.jsonl": [Task(each) for each in asked]}
    (leak,) = find_leaks([asked[0]], exam, template=99).values()
    assert leak.rule == SAME
    (leak,) = find_leaks([f"Reply with care. {asked[0]}"], exam, template=99).values()
    assert leak.rule == GRAMS


def test_a_long_question_is_found_by_the_share_of_its_passages() -> None:
    changed = STORY.replace("every Saturday", "each Sunday").replace("old donkey", "aged donkey")
    shorter = STORY.split("One day")[0]
    assert rule(changed, STORY) == GRAMS
    assert rule(changed, STORY, overlap=1.0) == ""
    assert rule(shorter, STORY, overlap=0.8) == "" and rule(shorter, STORY, overlap=0.3) == GRAMS
    assert rule(" ".join(reversed(STORY.split())), STORY) == ""


def test_copies_of_a_contaminated_question_do_not_hide_it() -> None:
    given = [f"Number {name}: {STORY}" for name in ("one", "two", "three")] * 2
    assert len(find_leaks(given, {"exam.jsonl": [Task(STORY)]})) == len(given)


def test_the_file_and_the_task_are_named_and_the_first_file_wins() -> None:
    exams = {"a.jsonl": [Task("Who wrote Emma?", id="1")], "b.csv": [OSAKA, Task("Who wrote Emma")]}
    found = find_leaks(["Who wrote Emma?", OSAKA.question, "Who wrote Ivanhoe?"], exams)
    assert found == {
        0: (SAME, "a.jsonl", "1"),
        1: (SAME, "b.csv", "osaka"),
    }
    assert find_leaks(["Who wrote Emma?"], {}) == {}


@given(st.text(min_size=1, max_size=120).filter(str.strip), st.integers(1, 12))
def test_a_question_gives_itself_away_as_long_as_it_has_a_word(question: str, ngram: int) -> None:
    exam = [OSAKA, Task(question, id="itself")]
    found = find_leaks([question, f"{question} ?!", "?"], {"exam.jsonl": exam}, ngram)
    assert 2 not in found
    if any(map(str.isalnum, question)):
        assert set(found) == {0, 1}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("atlas-mhqa", "heldout_entity"),
        ("atlas-mhqa", "heldout_family"),
        ("atlas-web", "heldout_entity"),
        ("gym-code", "heldout_seed"),
    ],
)
def test_held_out_tasks_are_no_contamination_and_planted_ones_are_found(
    name: str, split: str
) -> None:
    if name == "gym-code":
        pytest.importorskip("reasoning_gym")
    train = [task.question for task in make_tasks(name, "train", 400, seed=0)]
    exam = make_tasks(name, split, 120, seed=5)
    assert find_leaks(train, {"exam.jsonl": exam}) == {}
    planted = [
        f"Please solve this for me. {task.question} Thank you very much." for task in exam[:20]
    ]
    found = find_leaks([*train, *planted], {"exam.jsonl": exam})
    assert min(found) >= len(train) and len(found) >= 19
