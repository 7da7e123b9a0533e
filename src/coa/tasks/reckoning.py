"""Numbers put in order and subtracted, in words that a small model can learn to write.

What it cannot do in one step (which of two numbers is larger, how far they are apart) it can do in
many that copy, count and notice what is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from string import digits
from typing import NamedTuple


def amount(text: str) -> int | None:
    """The whole number that a page prints; None if the text is something else."""
    bare = text.replace(",", "")
    return int(bare) if bare.isdecimal() else None


class Side(NamedTuple):
    """One of two that are compared."""

    name: str
    printed: str
    """Its number as the page has it."""
    number: int


_SCALES = ((10**9, "billion"), (10**6, "million"), (10**3, "thousand"))
_WORDS = ("ones", *(word for _, word in reversed(_SCALES)))
_PLAIN = 10_000
"""Numbers below, years among them, are compared as they are."""


def side_by_side(first: int, second: int) -> str:
    """How two numbers are put in order, in steps that a small model can take.

    Their scales are held against each other, then how long they are before the point, then digit
    by digit; what decides is found by counting up until one of the two is met, which is the
    smaller: 'A 57.9 million, length 2. B 51.5 million, length 2. 5 5, 7 1: 0 1 B. Smaller B,
    larger A'. Which of two digits is larger, and that the smaller is not the one with more, is
    harder to learn from some hundred examples than to count, to notice and to copy.
    """
    plain = max(first, second) < _PLAIN
    (left, scale), (right, other) = (_scaled(number, plain) for number in (first, second))
    lengths = [len(text.partition(".")[0]) for text in (left, right)]
    said = [
        f"{letter} {text}{f' {word}' if word else ''}, length {length}"
        for letter, text, word, length in zip(
            "AB", (left, right), (scale, other), lengths, strict=True
        )
    ]
    if scale != other:
        steps, smaller = _met(scale or "ones", other or "ones", _WORDS)
    elif lengths[0] != lengths[1]:
        steps, smaller = _met(str(lengths[0]), str(lengths[1]), digits)
    else:
        steps, smaller = _by_digits(left.replace(".", ""), right.replace(".", ""))
    larger = {"A": "B", "B": "A"}.get(smaller)
    ordered = f"Smaller {smaller}, larger {larger}" if larger else "They are equal"
    return f"{'. '.join(said)}. {steps}. {ordered}"


def _met(one: str, other: str, ladder: Sequence[str]) -> tuple[str, str]:
    """Two rungs of a ladder, climbed until one of them is met: '7 1: 0 1 B', and the letter."""
    climbed = ladder[: min(ladder.index(one), ladder.index(other)) + 1]
    letter = "A" if climbed[-1] == one else "B"
    return f"{one} {other}: {' '.join(climbed)} {letter}", letter


def _by_digits(left: str, right: str) -> tuple[str, str]:
    said: list[str] = []
    for one, other in zip_longest(left, right, fillvalue="0"):
        if one != other:
            steps, letter = _met(one, other, digits)
            return ", ".join([*said, steps]), letter
        said.append(f"{one} {other}")
    return ", ".join(said), ""


def weighed(one: Side, other: Side, *, smaller: bool) -> tuple[Side, str]:
    """The larger (or smaller) of two, and how that is found out. The sides have letters: a small
    model that has to name the winner takes the name it wrote last; a letter it can decide on, and
    what stood behind that letter it copies."""
    chosen = (min if smaller else max)(one, other, key=lambda side: side.number)
    letter = "A" if chosen is one else "B"
    extreme = "smaller" if smaller else "larger"
    return chosen, f"{_listed(one, other)}. The {extreme} is {letter}: {chosen.name}"


def _listed(one: Side, other: Side) -> str:
    steps = side_by_side(one.number, other.number)
    return f"A: {one.name} {one.printed}. B: {other.name} {other.printed}. {steps}"


def apart(one: Side, other: Side) -> tuple[int, str]:
    """How far two numbers are apart, and how that is found out: from the smaller up in ones until
    the last digit is that of the larger, then in tens until all are."""
    low, high = sorted((one.number, other.number))
    way = "B to A" if other.number < one.number else "A to B"
    counted = f"{counted_up(low, high)}. {high} - {low} = {high - low}"
    return high - low, f"{_listed(one, other)}. From {way}: {low} to {high}. {counted}"


def _scaled(number: int, plain: bool) -> tuple[str, str]:
    """'57.9', 'million' for 57,900,000."""
    for size, word in _SCALES:
        if number >= size and not plain:
            whole, rest = divmod(number, size)
            point = f".{rest:0{len(str(size)) - 1}d}".rstrip("0") if rest else ""
            return f"{whole}{point}", word
    return str(number), ""


def counted_up(low: int, high: int) -> str:
    """From 78 to 100: 'Ending in 0: 78 is 0, 79 is 1, 80 is 2. Tens to 100: 80 is 2, 90 is 12, 100
    is 22'. What ends each count is said before it begins: a small model stops where it meets what
    it was told to look for, and not where it would have to see that one number is above another."""
    level = low + (high - low) % 10
    ones, tens = (
        ", ".join(f"{mark} is {mark - low}" for mark in marks)
        for marks in (range(low, level + 1), range(level, high + 1, 10))
    )
    return f"Ending in {high % 10}: {ones}. Tens to {high}: {tens}"
