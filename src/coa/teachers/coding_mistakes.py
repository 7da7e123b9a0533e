"""Mistakes that a coder makes, and how a critic sees them.

A mistake is another program: a misread literal, a wrong operator, a range that ends one early, a
forgotten print, a syntax error. The critic is not told; it compares the program with its own
reading of the task.
"""

from __future__ import annotations

import random
import re
from itertools import zip_longest

_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.]*[A-Za-z_])")
_QUOTED = re.compile(r'"[^"\n]*"')
_WORD = re.compile(r"[A-Za-z]{3,}")
_TOKEN = re.compile(r"\w+|[^\w\s]+")
_SWAPS = (
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" // ", " % "),
    (" < ", " > "),
    (" > ", " < "),
    (" == ", " != "),
    ("min(", "max("),
    ("max(", "min("),
    ("math.gcd", "math.lcm"),
    ("math.lcm", "math.gcd"),
    (", reverse=True", ""),
    ("[::-1]", ""),
    ('.count("1")', '.count("0")'),
)
_SHORT = (
    (" + 1):", "):"),
    (" + 1))", "))"),
    ("range(1, ", "range(2, "),
    ("range(2, ", "range(1, "),
)


def careless(program: str, question: str, rng: random.Random) -> str:
    """The program with a mistake of a kind drawn at random; the same program if none fits."""
    kinds = [
        _misread(program, question),
        _replaced(program, _SWAPS),
        _replaced(program, _SHORT),
        _unprinted(program),
        _misspelt(program),
    ]
    choices = [sorted(variants - {program}) for variants in kinds]
    choices = [variants for variants in choices if variants]
    return rng.choice(rng.choice(choices)) if choices else program


def _misread(program: str, question: str) -> set[str]:
    """Two digits or letters of the question in the wrong order, or a digit that is off by one."""
    spans = [number.span() for number in _NUMBER.finditer(program)]
    for quoted in _QUOTED.finditer(program):
        spans += [word.span() for word in _WORD.finditer(program, *quoted.span())]
    return {
        program[:start] + _garbled(program[start:end]) + program[end:]
        for start, end in spans
        if program[start:end] in question
    }


def _garbled(text: str) -> str:
    for i in range(len(text) - 2, -1, -1):
        if text[i] != text[i + 1] and not (i == 0 and text[1] == "0"):
            return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    if text[-1].isdigit():
        return text[:-1] + ("8" if text[-1] == "9" else str(int(text[-1]) + 1))
    return text


def _replaced(program: str, swaps: tuple[tuple[str, str], ...]) -> set[str]:
    """One replacement each. A loop with a condition is left alone, lest it never ends."""
    if "while " in program:
        return set()
    return {
        program[: place.start()] + wrong + program[place.end() :]
        for right, wrong in swaps
        for place in re.finditer(re.escape(right), program)
    }


def _unprinted(program: str) -> set[str]:
    """The result of the last line is kept and not printed."""
    *lines, last = program.split("\n")
    match = re.fullmatch(r"( *)print\(\*?(.+)\)", last)
    return {"\n".join([*lines, f"{match[1]}result = {match[2]}"])} if match else set()


def _misspelt(program: str) -> set[str]:
    """A colon or the last parenthesis is missing."""
    if ":\n" in program:
        before, _, after = program.rpartition(":\n")
        return {f"{before}\n{after}"}
    before, closing, after = program.rpartition(")")
    return {before + after} if closing else set()


def difference(program: str, expected: str) -> str:
    """What a reader of the task says about a program that is not what it expected; empty if it is.

    Where one token differs it is named, otherwise the line that was expected is.
    """
    lines = zip_longest(program.split("\n"), expected.split("\n"), fillvalue="")
    for number, (line, wanted) in enumerate(lines, start=1):
        if line == wanted:
            continue
        pairs = list(zip_longest(_TOKEN.findall(line), _TOKEN.findall(wanted), fillvalue=""))
        wrong = [(one, other) for one, other in pairs if one != other]
        if len(wrong) == 1 and all(wrong[0]):
            return f"Line {number} has {wrong[0][0]} where the task needs {wrong[0][1]}."
        return f"Line {number} should be: {wanted.strip()}"
    return ""
