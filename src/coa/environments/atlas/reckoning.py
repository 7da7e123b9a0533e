"""Numbers put in order and subtracted, in words that a small model can learn to write.

What it cannot do in one step (which of two numbers is larger, how far they are apart) it can do in
many that copy, count and notice what is equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from string import ascii_letters, digits
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
    letter: str
    """What it is called while it is compared."""


_SCALES = ((10**9, "billion"), (10**6, "million"), (10**3, "thousand"))
_WORDS = ("ones", *(word for _, word in reversed(_SCALES)))
_PLAIN = 10_000
"""Numbers below, years among them, are compared as they are."""


def side_by_side(first: int, second: int, letters: str = "AB") -> str:
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
            letters, (left, right), (scale, other), lengths, strict=True
        )
    ]
    if scale != other:
        steps, smaller = _met(scale or "ones", other or "ones", _WORDS, letters)
    elif lengths[0] != lengths[1]:
        steps, smaller = _met(str(lengths[0]), str(lengths[1]), digits, letters)
    else:
        steps, smaller = _by_digits(left.replace(".", ""), right.replace(".", ""), letters)
    larger = letters.replace(smaller, "") if smaller else ""
    ordered = f"Smaller {smaller}, larger {larger}" if larger else "They are equal"
    return f"{'. '.join(said)}. {steps}. {ordered}"


def _met(one: str, other: str, ladder: Sequence[str], letters: str) -> tuple[str, str]:
    """Two rungs of a ladder, climbed until one of them is met: '7 1: 0 1 B', and the letter."""
    climbed = ladder[: min(ladder.index(one), ladder.index(other)) + 1]
    letter = letters[climbed[-1] != one]
    return f"{one} {other}: {' '.join(climbed)} {letter}", letter


def _by_digits(left: str, right: str, letters: str) -> tuple[str, str]:
    said: list[str] = []
    for one, other in zip_longest(left, right, fillvalue="0"):
        if one != other:
            steps, letter = _met(one, other, digits, letters)
            return ", ".join([*said, steps]), letter
        said.append(f"{one} {other}")
    return ", ".join(said), ""


def lettered(rows: Iterable[tuple[str, str, int]]) -> list[Side]:
    """What is compared, by letters: a small model that has to name the winner takes the name it
    wrote last; a letter it can decide on, and what stood behind that letter it copies. A letter is
    one name's for good: where the winner of two became the A of the next two, it copied the first
    A that it found."""
    return [Side(*row, letter) for row, letter in zip(rows, ascii_letters.swapcase(), strict=False)]


def weighed(one: Side, other: Side, *, smaller: bool) -> tuple[Side, str]:
    """The larger (or smaller) of two, and how that is found out."""
    chosen = (min if smaller else max)(one, other, key=lambda side: side.number)
    extreme = "smaller" if smaller else "larger"
    return chosen, f"{_listed(one, other)}. The {extreme} is {chosen.letter}: {chosen.name}"


def _listed(one: Side, other: Side) -> str:
    steps = side_by_side(one.number, other.number, one.letter + other.letter)
    named = (f"{side.letter}: {side.name} {side.printed}" for side in (one, other))
    return f"{'. '.join(named)}. {steps}"


def apart(one: Side, other: Side) -> tuple[int, str]:
    """How far two numbers are apart, and how that is found out."""
    low, high = sorted((one, other), key=lambda side: side.number)
    gap = high.number - low.number
    steps = f"{_listed(one, other)}. From {low.letter} to {high.letter}"
    return gap, f"{steps}, {counted_up(low.number, high.number, low.letter + high.letter)}"


def _scaled(number: int, plain: bool) -> tuple[str, str]:
    """'57.9', 'million' for 57,900,000."""
    for size, word in _SCALES:
        if number >= size and not plain:
            whole, rest = divmod(number, size)
            point = f".{rest:0{len(str(size)) - 1}d}".rstrip("0") if rest else ""
            return f"{whole}{point}", word
    return str(number), ""


_PLACES = ("ones", "tens", "hundreds", "thousands")


def counted_up(low: int, high: int, letters: str = "AB") -> str:
    """From 8 to 14: 'length 2: ones, tens. A ones 8. B ones 4, tens 1. Ones 8 to 4: 8 0, 9 1, over,
    0 2, 1 3, 2 4, 3 5, 4 6: ones 6, over. Tens none, one more, 1, to 1: 1 0: tens 0, not over. That
    is tens 0, ones 6: 06, so 6'.

    A count ends at a digit that was named just before it: a small model stops where it meets what
    it was told to look for. Whole numbers it counts past, and their differences it loses; places it
    was not told of it makes up.
    """
    width = len(str(high))
    said = [f"length {width}: {', '.join(_places(high))}"]
    said += [
        f"{letter} "
        + ", ".join(map(" ".join, zip(_places(number), reversed(str(number)), strict=True)))
        for letter, number in zip(letters, (low, high), strict=True)
    ]
    counts, over = list[str](), False
    for place, name in enumerate(_places(high)):
        start, goal = (number // 10**place % 10 for number in (low, high))
        begun = f"{name.capitalize()} {start if place < len(str(low)) else 'none'}"
        if over:
            over = start == 9
            start = (start + 1) % 10
            begun += f", one more{', over' if over else ''}, {start},"
        count = (goal - start) % 10
        over = over or goal < start
        steps = ", ".join(
            f"{'over, ' if i and i == 10 - start else ''}{(start + i) % 10} {i}"
            for i in range(count + 1)
        )
        counts.insert(0, f"{name} {count}")
        said.append(f"{begun} to {goal}: {steps}: {counts[0]}, {'over' if over else 'not over'}")
    gap = high - low
    return f"{'. '.join(said)}. That is {', '.join(counts)}: {gap:0{width}d}, so {gap}"


def _places(number: int) -> list[str]:
    """What the digits of a number are called, from the last one on."""
    named = len(_PLACES)
    return [_PLACES[i] if i < named else f"10^{i}" for i in range(len(str(number)))]
