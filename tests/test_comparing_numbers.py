"""How the team compares numbers: in steps, each of which a small model can take."""

from __future__ import annotations

import re
from decimal import Decimal
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.tasks import make_tasks
from coa.tasks.atlas_inquiries import Tally
from coa.tasks.reckoning import Side, apart, counted_up, side_by_side, weighed
from coa.teachers.plans import conclude, plan_for

numbers = st.integers(0, 10**10)


@given(numbers, numbers)
def test_the_order_is_the_one_that_the_steps_find(first: int, second: int) -> None:
    said = side_by_side(first, second)
    if first == second:
        assert said.endswith("They are equal")
        return
    *_, steps, order = said.split(". ")
    *before, last = steps.split(", ")
    pair, climbed = last.split(": ")
    one, other = pair.split()
    *_, met, letter = climbed.split()
    assert one != other and met == {"A": one, "B": other}[letter]
    assert (letter == "A") == (first < second)
    assert order == f"Smaller {letter}, larger {'B' if letter == 'A' else 'A'}"
    assert all(len({*equal.split()}) == 1 for equal in before)


@given(numbers, numbers)
def test_what_is_said_of_a_side_is_true_of_its_number(first: int, second: int) -> None:
    for letter, number in zip("AB", (first, second), strict=True):
        found = re.search(rf"{letter} ([\d.]+)( \w+)?, length (\d+)", side_by_side(first, second))
        assert found is not None
        text, scale, length = found.groups()
        size = {"": 1, "thousand": 10**3, "million": 10**6, "billion": 10**9}
        assert Decimal(text) * size[(scale or "").strip()] == number
        assert len(text.partition(".")[0]) == int(length)


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [
        (
            57_900_000,
            51_500_000,
            "A 57.9 million, length 2. B 51.5 million, length 2. 5 5, 7 1: 0 1 B. "
            "Smaller B, larger A",
        ),
        (
            5_000_000,
            5_560_000,
            "A 5 million, length 1. B 5.56 million, length 1. 5 5, 0 5: 0 A. Smaller A, larger B",
        ),
        (
            284_000,
            65_200,
            "A 284 thousand, length 3. B 65.2 thousand, length 2. 3 2: 0 1 2 B. "
            "Smaller B, larger A",
        ),
        (
            163_000,
            1_290_000,
            "A 163 thousand, length 3. B 1.29 million, length 1. thousand million: "
            "ones thousand A. Smaller A, larger B",
        ),
        (
            443,
            9_630_000,
            "A 443, length 3. B 9.63 million, length 1. ones million: ones A. Smaller A, larger B",
        ),
        (
            1789,
            1994,
            "A 1789, length 4. B 1994, length 4. 1 1, 7 9: 0 1 2 3 4 5 6 7 A. Smaller A, larger B",
        ),
    ],
)
def test_scales_come_before_lengths_and_lengths_before_digits(
    first: int, second: int, steps: str
) -> None:
    assert side_by_side(first, second) == steps


@given(st.integers(0, 2100), st.integers(0, 2100))
def test_a_difference_is_counted_up_in_ones_and_then_in_tens(one: int, other: int) -> None:
    low, high = sorted((one, other))
    ones, tens = counted_up(low, high).split(". ")
    assert ones.startswith(f"Ending in {high % 10}: ") and tens.startswith(f"Tens to {high}: ")
    counts = [
        [tuple(map(int, step)) for step in re.findall(r"(\d+) is (\d+)", said)]
        for said in (ones, tens)
    ]
    assert all(mark - low == so_far for count in counts for mark, so_far in count)
    first, second = ([mark for mark, _ in count] for count in counts)
    assert first[0] == low and first[-1] == second[0] and second[-1] == high
    assert [mark % 10 == high % 10 for mark in first] == [False] * (len(first) - 1) + [True]
    assert all(after - before == 1 for before, after in pairwise(first))
    assert all(after - before == 10 for before, after in pairwise(second))


@given(numbers, numbers)
def test_how_far_two_are_apart_does_not_depend_on_their_order(first: int, second: int) -> None:
    first, second = first % 3000, second % 3000
    one, other = Side("Aa", f"{first:,}", first), Side("Bb", f"{second:,}", second)
    gap, said = apart(one, other)
    assert gap == abs(first - second) == apart(other, one)[0]
    low, high = sorted((first, second))
    assert said.endswith(f"{high} - {low} = {gap}")
    way = "B to A" if second < first else "A to B"
    assert f"From {way}: {low} to {high}. " in said


def test_a_difference_is_counted_from_the_smaller_of_the_two() -> None:
    plan = plan_for("How far apart are the atomic numbers of Fermium and Argon?")
    assert plan is not None
    verdict = conclude(plan, [["100"], ["78"]])
    assert verdict is not None and verdict.answer == "22"
    assert verdict.thought == (
        "A: Fermium 100. B: Argon 78. A 100, length 3. B 78, length 2. 3 2: 0 1 2 B. Smaller B, "
        "larger A. From B to A: 78 to 100. Ending in 0: 78 is 0, 79 is 1, 80 is 2. Tens to 100: "
        "80 is 2, 90 is 12, 100 is 22. 100 - 78 = 22."
    )
    assert conclude(plan, [["100"], ["unknown"]]) is None


def test_of_several_the_better_one_is_held_against_the_next() -> None:
    question = "Which has the largest population: Tunisia, Mongolia or Hungary?"
    plan = plan_for(question)
    assert plan is not None
    verdict = conclude(plan, [["12,000,000"], ["3,280,000"], ["19,860,000"]])
    assert verdict is not None
    assert verdict == (
        "Hungary",
        "A: Tunisia 12,000,000. B: Mongolia 3,280,000. A 12 million, length 2. B 3.28 million, "
        "length 1. 2 1: 0 1 B. Smaller B, larger A. The larger is A: Tunisia. "
        "A: Tunisia 12,000,000. B: Hungary 19,860,000. A 12 million, length 2. B 19.86 million, "
        "length 2. 1 1, 2 9: 0 1 2 A. Smaller A, larger B. The larger is B: Hungary.",
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
        ending = f"6 7 A. Smaller A, larger B. The smaller is A: {plan.names[0]}."
        assert verdict.thought.endswith(ending)


@given(numbers, numbers, st.booleans())
def test_the_letter_and_the_name_are_of_the_side_that_wins(
    first: int, second: int, smaller: bool
) -> None:
    one, other = Side("Aa", f"{first:,}", first), Side("Bb", f"{second:,}", second)
    chosen, said = weighed(one, other, smaller=smaller)
    assert chosen.number == (min if smaller else max)(first, second)
    end = "A: Aa" if chosen is one else "B: Bb"
    assert said.endswith(f"The {'smaller' if smaller else 'larger'} is {end}")


def test_what_two_have_in_common_is_found_name_by_name() -> None:
    plan = plan_for("Which country borders both Gabon and Nigeria?")
    assert plan is not None
    verdict = conclude(plan, [["Cameroon", "Equatorial Guinea"], ["Benin", "Cameroon", "Chad"]])
    assert verdict == ("Cameroon", "Cameroon yes; Equatorial Guinea no. Both have Cameroon.")


def test_a_count_over_neighbours_goes_on_from_name_to_name() -> None:
    facts = {
        ("neighbours", "Costa Rica"): ("Nicaragua", "Panama"),
        ("area", "Costa Rica"): ("51,100",),
        ("area", "Nicaragua"): ("129,000",),
        ("area", "Panama"): ("41,200",),
    }
    end = Tally("area", than="less").conclude({"country": "Costa Rica"}, facts)
    assert end is not None and end.answer == "1"
    assert end.because == (
        "Against 51,100: Nicaragua 129,000: A 129 thousand, length 3. B 51.1 thousand, length 2. "
        "3 2: 0 1 2 B. Smaller B, larger A. The smaller is B: no, 0; Panama 41,200: A 41.2 "
        "thousand, length 2. B 51.1 thousand, length 2. 4 5: 0 1 2 3 4 A. Smaller A, larger B. "
        "The smaller is A: yes, 1. That is 1."
    )
    more = Tally("area").conclude({"country": "Costa Rica"}, facts)
    assert more is not None and more.answer == "1"
    assert "The larger is A: yes, 1; Panama" in more.because
    assert more.because.endswith("The larger is B: no, 1. That is 1.")
