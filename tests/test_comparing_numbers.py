"""How the team compares numbers: in steps, each of which a small model can take."""

from __future__ import annotations

import re
from decimal import Decimal
from string import ascii_uppercase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.environments import make_tasks
from coa.environments.atlas.families import Superlative
from coa.environments.atlas.inquiries import Tally
from coa.environments.atlas.reckoning import (
    Side,
    apart,
    counted_up,
    lettered,
    side_by_side,
    weighed,
)
from coa.environments.atlas.team import Plan, conclude, plan_for

numbers = st.integers(0, 10**10)


def _two(first: int, second: int) -> list[Side]:
    return lettered([("Aa", f"{first:,}", first), ("Bb", f"{second:,}", second)])


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


@given(st.integers(0, 210_000), st.integers(0, 2100))
def test_a_difference_is_counted_up_digit_by_digit(one: int, other: int) -> None:
    low, high = sorted((one, other))
    named, first, second, *places, last = counted_up(low, high).split(". ")
    start, goal = str(low), str(high)
    assert named.startswith(f"length {len(goal)}: ones")
    assert named.partition(": ")[2].split(", ") == [p.split()[0].lower() for p in places]
    for side, letter, number in ((first, "A", start), (second, "B", goal)):
        assert side.startswith(f"{letter} ones ")
        assert re.findall(r" (\d)(?:,|$)", side) == list(reversed(number))
    assert len(places) == len(goal)
    spoken = [*reversed(start), *["none"] * (len(goal) - len(start))]
    over, found, digits = False, list[str](), ""
    for place, was, end in zip(places, spoken, reversed(goal), strict=True):
        begun, counted, result = place.split(": ")
        more = re.fullmatch(r"\S+ (\d|none)(?:, one more(, over)?, (\d),)? to (\d)", begun)
        assert more is not None and (more[1], more[4]) == (was, end)
        assert (more[3] is not None) == over, "one more exactly when the place before went over"
        begins = (0 if was == "none" else int(was)) + over
        assert more[3] in (None, str(begins % 10)) and bool(more[2]) == (begins == 10)
        steps = [tuple(map(int, step)) for step in re.findall(r"(\d) (\d)", counted)]
        assert steps == [((begins + i) % 10, i) for i in range(len(steps))]
        assert [digit for digit, _ in steps].index(int(end)) == len(steps) - 1
        assert ("over, 0 " in counted) == any(digit == 0 and count for digit, count in steps)
        over = bool(more[2]) or "over" in counted
        count = steps[-1][1]
        found.insert(0, f"{begun.split()[0].lower()} {count}")
        assert result == f"{found[0]}, {'over' if over else 'not over'}"
        digits = f"{count}{digits}"
    assert not over and last == f"That is {', '.join(found)}: {digits}, so {high - low}"
    assert int(digits) == high - low


@given(numbers, numbers)
def test_how_far_two_are_apart_does_not_depend_on_their_order(first: int, second: int) -> None:
    first, second = first % 3000, second % 3000
    one, other = _two(first, second)
    gap, said = apart(one, other)
    assert gap == abs(first - second) == apart(other, one)[0]
    low, high = sorted((first, second))
    assert said.endswith(f", so {gap}")
    way = "B to A" if second < first else "A to B"
    assert f"From {way}, length {len(str(high))}: ones" in said
    assert f". {way[0]} ones {low % 10}" in said
    assert f". {way[-1]} ones {high % 10}" in said


def test_a_difference_is_counted_from_the_smaller_of_the_two() -> None:
    plan = plan_for("How far apart are the atomic numbers of Fermium and Argon?")
    assert plan is not None
    verdict = conclude(plan, [["100"], ["78"]])
    assert verdict is not None and verdict.answer == "22"
    assert verdict.thought == (
        "A: Fermium 100. B: Argon 78. A 100, length 3. B 78, length 2. 3 2: 0 1 2 B. Smaller B, "
        "larger A. From B to A, length 3: ones, tens, hundreds. B ones 8, tens 7. A ones 0, tens "
        "0, hundreds 1. Ones 8 to 0: 8 0, 9 1, over, 0 2: ones 2, over. Tens 7, one more, 8, to 0: "
        "8 0, 9 1, over, 0 2: tens 2, over. Hundreds none, one more, 1, to 1: 1 0: hundreds 0, not "
        "over. That is hundreds 0, tens 2, ones 2: 022, so 22."
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
        "A: Tunisia 12,000,000. C: Hungary 19,860,000. A 12 million, length 2. C 19.86 million, "
        "length 2. 1 1, 2 9: 0 1 2 A. Smaller A, larger C. The larger is C: Hungary.",
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
    one, other = _two(first, second)
    chosen, said = weighed(one, other, smaller=smaller)
    assert chosen.number == (min if smaller else max)(first, second)
    end = "A: Aa" if chosen is one else "B: Bb"
    assert said.endswith(f"The {'smaller' if smaller else 'larger'} is {end}")


def test_what_two_have_in_common_is_found_name_by_name() -> None:
    plan = plan_for("Which country borders both Gabon and Nigeria?")
    assert plan is not None
    second = ["Benin", "Cameroon", "Chad"]
    verdict = conclude(plan, [["Angola", "Cameroon", "Equatorial Guinea"], second])
    assert verdict == ("Cameroon", "Angola no; Cameroon yes. Both have Cameroon.")
    verdict = conclude(plan, [["Angola", "Nigeria", "Chad"], second])
    assert verdict == ("Chad", "Angola no; Nigeria itself; Chad yes. Both have Chad.")
    for first in (["Angola"], ["Benin", "Chad"], second):
        assert conclude(plan, [first, second]) is None, "exactly one is asked for"


@given(st.lists(numbers, min_size=2, max_size=14, unique=True), st.booleans())
def test_of_many_each_has_a_letter_that_is_no_other_s(found: list[int], smaller: bool) -> None:
    names = [f"N{i}" for i in range(len(found))]
    shape = Superlative("area", smaller=smaller)
    plan = Plan(shape, {"country": "Home"}, ())
    verdict = conclude(plan, [names, *([f"{number:,}"] for number in found)])
    assert verdict is not None
    assert verdict.answer == names[found.index((min if smaller else max)(found))]
    said = set(re.findall(r"\b([A-Z]): (N\d+)", verdict.thought))
    assert said == {(ascii_uppercase[i], name) for i, name in enumerate(names)}


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
