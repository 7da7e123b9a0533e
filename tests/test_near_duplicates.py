"""Near-duplicates: the fast join finds exactly what comparing all pairs finds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.distillation.convert import convert
from coa.distillation.filters import Twin, near_duplicates, told_text
from coa.environments import make_tasks
from coa.grammar import load_grammar
from coa.tasks import Task
from coa.trajectory import Author, Segment, Trajectory
from scripts import TOOLBOX_OF, episodes_of


def bag(text: str, size: int) -> Counter[tuple[str, ...]]:
    words = text.lower().split()
    return Counter(tuple(words[at : at + size]) for at in range(max(1, len(words) - size + 1)))


def jaccard(one: str, other: str, size: int) -> float:
    """Of bags of word runs, written in the plainest way."""
    mine, theirs = bag(one, size), bag(other, size)
    return (mine & theirs).total() / (mine | theirs).total()


def all_pairs(texts: list[str], similarity: float, size: int) -> dict[int, Twin]:
    kept: list[int] = []
    twins: dict[int, Twin] = {}
    for index, text in enumerate(texts):
        likes = ((other, jaccard(text, texts[other], size)) for other in kept)
        found = next((Twin(other, like) for other, like in likes if like >= similarity), None)
        if found is None:
            kept.append(index)
        else:
            twins[index] = found
    return twins


WORDS = st.lists(st.sampled_from("a b c d e".split()), max_size=14).map(" ".join)


@given(
    st.lists(WORDS, max_size=14),
    st.sampled_from([0.1, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 1.0]),
    st.integers(1, 4),
)
def test_the_join_finds_what_all_pairs_find(texts: list[str], similarity: float, size: int) -> None:
    assert near_duplicates(texts, similarity, size) == all_pairs(texts, similarity, size)


def test_longer_texts_with_small_changes_are_found_as_by_all_pairs() -> None:
    dice = random.Random(5)
    words = [f"w{number}" for number in range(60)]
    texts = []
    for _ in range(40):
        text = dice.choices(words, k=dice.randint(30, 80))
        for _ in range(4):
            changed = list(text)
            for place in dice.sample(range(len(text)), dice.randint(0, 5)):
                changed[place] = dice.choice(words)
            texts.append(" ".join(changed))
    dice.shuffle(texts)
    for similarity in (0.6, 0.8, 0.95):
        found = near_duplicates(texts, similarity, 3)
        assert found == all_pairs(texts, similarity, 3)
        assert found, "the changes should leave some near-duplicates"


def test_the_first_stays_and_a_row_of_small_changes_keeps_its_far_end() -> None:
    row = ["a b c d e f g h", "a b c d e f g x", "a b c d e f y x"]
    similarity = jaccard(row[0], row[1], 1)
    assert jaccard(row[1], row[2], 1) >= similarity > jaccard(row[0], row[2], 1)
    assert near_duplicates(row, similarity, 1) == {1: Twin(0, similarity)}
    assert near_duplicates(row[::-1], similarity, 1) == {1: Twin(0, similarity)}


def test_a_share_that_floating_point_cannot_hold_is_met_exactly() -> None:
    many, some = " ".join("abcdefghijklmnopqrstuvwxy"), " ".join("abcdefghijklmn")
    assert 0.56 * 25 > 14, "or this test shows nothing"
    assert near_duplicates([many, some], 0.56, 1) == {1: Twin(0, 0.56)}


def test_two_grids_of_noughts_and_ones_are_not_the_same_though_their_runs_are() -> None:
    one, other = "0 0 0 1 0 1 1", "0 1 1 1 1 0 0"
    assert set(bag(one, 2)) == set(bag(other, 2))
    assert near_duplicates([one, other], 0.95, 2) == {}


def test_texts_without_words_are_the_same_text() -> None:
    assert near_duplicates(["", "word", " \n"], 0.9, 3) == {2: Twin(0, 1.0)}
    assert near_duplicates([], 0.9, 3) == {}


def test_case_tags_and_observations_do_not_count_and_the_question_does() -> None:
    def told(question: str, model: str, seen: str) -> str:
        segments = [Segment(Author.PROMPT, seen), Segment(Author.MODEL, model)]
        segments.append(Segment(Author.ENV, seen))
        return told_text(Trajectory("t", question, "mhqa", segments))

    first = told("Where is Lima?", "<think> It is in Peru.</think>", "one")
    assert near_duplicates([first, told("where is LIMA?", "It is in Peru.", "two")], 1.0, 2)
    assert not near_duplicates([first, told("Where is Cusco?", "It is in Peru.", "one")], 0.9, 2)


@pytest.mark.parametrize("name", ["atlas-mhqa", "atlas-web"])
def test_at_the_default_questions_of_one_template_stay_and_the_same_one_again_goes(
    name: str,
) -> None:
    grammar = load_grammar("web" if name == "atlas-web" else "mhqa")
    tasks = list(make_tasks(name, "train", 150, seed=2))
    texts = [
        told_text(convert(episode, TOOLBOX_OF(task).bind(grammar)))
        for task, episode in zip(tasks, episodes_of(tasks), strict=True)
        if episode.answer is not None
    ]

    def about(task: Task) -> set[str]:
        return {word.strip("?.,:'s") for word in task.question.split() if not word.islower()}

    for index, twin in near_duplicates(texts, 0.95).items():
        assert about(tasks[index]) & about(tasks[twin.first]), (tasks[index], tasks[twin.first])
    again = near_duplicates([*texts, f"{texts[7]} indeed"], 0.95)
    assert again[len(texts)].first in (7, again.get(7, Twin(7, 1.0)).first)
