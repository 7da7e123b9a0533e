"""How the team compares numbers: in steps, each of which a small model can take."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.tasks import make_tasks
from coa.tasks.atlas_families import counted_up, side_by_side
from coa.teachers.plans import conclude, plan_for

numbers = st.integers(0, 10**10)


@given(numbers, numbers)
def test_the_last_step_alone_says_which_is_larger(first: int, second: int) -> None:
    *before, last = side_by_side(first, second).split(", ")
    if "digits" in last or not before:
        left, right = (_value(side) for side in last.removesuffix(" digits").split(" and "))
    else:
        left, right = map(int, last.split())
        assert all(len({*pair.split()}) == 1 for pair in before if re.fullmatch(r"\d \d", pair))
    assert (left > right, left < right) == (first > second, first < second)


def _value(side: str) -> float:
    """What '1.29 million' or a plain number stands for; scales that are said are different."""
    number, _, scale = side.partition(" ")
    return float(number) * {"": 1, "thousand": 1e3, "million": 1e6, "billion": 1e9}[scale]


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [
        (57_900_000, 51_500_000, "57.9 million and 51.5 million, 2 and 2 digits, 5 5, 7 1"),
        (5_000_000, 5_560_000, "5 million and 5.56 million, 1 and 1 digits, 5 5, 0 5"),
        (284_000, 65_200, "284 thousand and 65.2 thousand, 3 and 2 digits"),
        (163_000, 1_290_000, "163 thousand and 1.29 million"),
        (443, 9_630_000, "443 and 9.63 million"),
        (1789, 1994, "4 and 4 digits, 1 1, 7 9"),
    ],
)
def test_scales_come_before_lengths_and_lengths_before_digits(
    first: int, second: int, steps: str
) -> None:
    assert side_by_side(first, second) == steps


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_difference_is_counted_up_in_tens(one: int, other: int) -> None:
    low, high = sorted((one, other))
    steps = [tuple(map(int, step)) for step in re.findall(r"(\d+) is (\d+)", counted_up(low, high))]
    assert steps[-1] == (high, high - low)
    assert all(mark - low == so_far for mark, so_far in steps)
    marks = [low, *(mark for mark, _ in steps)]
    assert all(after - before <= 10 for before, after in pairwise(marks))


def test_of_several_the_better_one_is_held_against_the_next() -> None:
    question = "Which has the largest population: Tunisia, Mongolia or Hungary?"
    plan = plan_for(question)
    assert plan is not None
    verdict = conclude(plan, [["12,000,000"], ["3,280,000"], ["19,860,000"]])
    assert verdict is not None
    assert verdict == (
        "Hungary",
        "12,000,000 for Tunisia and 3,280,000 for Mongolia: 12 million and 3.28 million, 2 and 1 "
        "digits. The larger is Tunisia. 12,000,000 for Tunisia and 19,860,000 for Hungary: "
        "12 million and 19.86 million, 2 and 2 digits, 1 1, 2 9. The larger is Hungary.",
    )
    assert conclude(plan, [["12,000,000"], ["unknown"], ["19,860,000"]]) is None


def test_the_smaller_of_two_years_is_the_earlier() -> None:
    tasks = make_tasks("atlas-mhqa", "train", 4, seed=3, families=["earlier_element"])
    for task in tasks:
        plan = plan_for(task.question)
        assert plan is not None and len(plan.names) == 2
        verdict = conclude(plan, [["1789"], ["1994"]])
        assert verdict is not None
        assert verdict.answer == plan.names[0]
        assert f"4 and 4 digits, 1 1, 7 9. The smaller is {plan.names[0]}." in verdict.thought
