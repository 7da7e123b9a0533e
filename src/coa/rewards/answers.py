"""Answers compared as text: exact match and token F1, after the same normalisation.

An answer may list alternatives joined by `|`: every one of them must be right, so that listing
guesses never pays.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable

from coa.protocol import alternatives
from coa.tasks.task import Task
from coa.trajectory import Trajectory

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DIGIT_COMMA = re.compile(r"(?<=\d),(?=\d{3}\b)")
_DECIMAL_ZERO = re.compile(r"\b(\d+)\.0+\b")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION = str.maketrans({c: " " for c in string.punctuation if c not in ".-"})


def normalise(text: str) -> str:
    """Lower case, without articles, punctuation, thousands separators and repeated spaces."""
    text = _DIGIT_COMMA.sub("", text.lower())
    text = _DECIMAL_ZERO.sub(r"\1", text)
    text = text.translate(_PUNCTUATION)
    words = _ARTICLES.sub(" ", text).split() or text.split()  # 'A' is an answer, too
    return " ".join(filter(None, map(_bare, words)))


def _bare(word: str) -> str:
    """A word without dots and dashes at its ends; a number keeps its sign."""
    word = word.rstrip(".-")
    return word if _NUMBER.fullmatch(word) else word.lstrip(".-")


def exact_match(
    answer: str, golds: tuple[str, ...], bare: Callable[[str], str] = normalise
) -> float:
    """1 if every alternative given is one of the gold answers after normalisation."""
    wanted = {bare(gold) for gold in golds}
    given = [bare(part) for part in alternatives(answer)]
    return float(bool(given) and all(part and part in wanted for part in given))


def squad_normalise(text: str) -> str:
    """As SQuAD's scorer has it, which the published multi-hop sets use: lower case, without any
    punctuation (`J.K. Rowling` is `jk rowling`), articles and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(answer: str, golds: tuple[str, ...]) -> float:
    """Best F1 of the answer's words against any gold answer."""
    given = Counter(normalise(answer).split())
    best = 0.0
    for gold in golds:
        wanted = Counter(normalise(gold).split())
        common = (given & wanted).total()
        if common:
            precision, recall = common / given.total(), common / wanted.total()
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def exact(task: Task, trajectory: Trajectory) -> float | None:
    """Exact match; no answer scores 0, a task without gold cannot be judged."""
    if not task.answers:
        return None
    return exact_match(trajectory.answer or "", task.answers)


def squad(task: Task, trajectory: Trajectory) -> float | None:
    """Exact match as SQuAD's scorer and those of the multi-hop sets have it."""
    if not task.answers:
        return None
    return exact_match(trajectory.answer or "", task.answers, squad_normalise)


def f1(task: Task, trajectory: Trajectory) -> float | None:
    """Token F1; no answer scores 0, a task without gold cannot be judged."""
    if not task.answers:
        return None
    return token_f1(trajectory.answer or "", task.answers)
