"""Answers compared as text: exact match and token F1, after the same normalisation.

An answer may list alternatives joined by `|`: every one of them must be right, so that listing
guesses never pays.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable

from coa.grammar import alternatives
from coa.tasks import Task
from coa.trajectory import Trajectory

_ARTICLES = re.compile(r"(?<![\w+*/^<>=-])(?:a|an|the)(?![\w+*/^<>=#-])")
_ARTICLE_WORDS = re.compile(r"\b(?:a|an|the)\b")
_DIGIT_COMMA = re.compile(r"(?<=\d),(?=\d{3}\b)")
_DECIMAL_ZERO = re.compile(r"(?<![.\w])(\d+)\.0+(?!\.?\w)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION = str.maketrans({c: " " for c in string.punctuation if c not in ".-+*/^<>=#"})
_OPERATOR = re.compile(r"\s*([+*/^<>=#]+)\s*|\s+(-)\s+|^\s*(-)\s+")
_BEFORE, _AFTER = re.compile(r"(?:[^\W_]+|\))$"), re.compile(r"[^\W_]+|\(")
"""What stands beside an operator; of what stands before it the last few letters tell enough."""


def normalise(text: str, *, keep_articles: bool = False) -> str:
    """Lower case, without articles, punctuation, thousands separators and repeated spaces. What
    an expression is made of (`x - 1`, `n^2`, `C++`) is no punctuation."""
    text = _DIGIT_COMMA.sub("", text.lower())
    text = _DECIMAL_ZERO.sub(r"\1", text)
    text = _OPERATOR.sub(_operator, text).translate(_PUNCTUATION)
    words = [] if keep_articles else _ARTICLES.sub(" ", text).split()
    words = words or text.split()  # 'A' is an answer, too
    return " ".join(filter(None, map(_bare, words)))


def _operator(found: re.Match[str]) -> str:
    """An operator without the spaces around it, where it stands beside a number or a single letter;
    elsewhere, as in `AC/DC` or `**Paris**`, it is punctuation."""
    sign = found[1] or "-"
    before, after = (
        _BEFORE.search(found.string, max(0, found.start() - 9), found.start()),
        _AFTER.match(found.string, found.end()),
    )
    sides = [side and (side[0].isdigit() or len(side[0]) == 1) for side in (before, after)]
    if found[3]:
        return "-" if after and after[0].isdigit() else " "
    if sign.strip("+#") == "" and sides[0] and not after:
        return f"{sign} "  # C++, F#, A+
    wanted = all if sign == "-" else any  # "Apollo - 11" is no difference
    return sign if before and after and "#" not in sign and wanted(sides) else " "


def _bare(word: str) -> str:
    """A word without dots and dashes at its ends; a number keeps its sign."""
    word = word.rstrip(".-")
    return word if _NUMBER.fullmatch(word) else word.lstrip(".-")


def exact_match(
    answer: str, golds: tuple[str, ...], bare: Callable[[str], str] = normalise
) -> float:
    """1 if every alternative given is one of the gold answers after normalisation."""
    wanted = {bare(gold) for gold in golds}
    if bare(answer) in wanted - {""}:  # `P(A|B)` lists nothing
        return 1.0
    given = [bare(part) for part in alternatives(answer)]
    return float(bool(given) and all(part and part in wanted for part in given))


def squad_normalise(text: str) -> str:
    """As SQuAD's scorer has it, which the published multi-hop sets use: lower case, without any
    punctuation (`J.K. Rowling` is `jk rowling`), articles and repeated spaces."""
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE_WORDS.sub(" ", text).split() or text.split())  # 'The The' is a band


def same_words(answer: str, golds: tuple[str, ...]) -> bool:
    """Whether an answer is a gold answer word for word, but for case, spaces and a full stop at its
    end: what needs no judge, whatever it is about."""
    return _spelled(answer) in set(map(_spelled, golds))


def _spelled(text: str) -> str:
    return " ".join(_DIGIT_COMMA.sub("", text).casefold().split()).rstrip(".").rstrip()


def token_f1(answer: str, golds: tuple[str, ...], bare: Callable[[str], str] = normalise) -> float:
    """Best F1 of the answer's words against any gold answer."""
    given = Counter(bare(answer).split())
    best = 0.0
    for gold in golds:
        wanted = Counter(bare(gold).split())
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
    bare = squad_normalise if task.meta.get("reward") == "squad" else normalise
    return token_f1(trajectory.answer or "", task.answers, bare)


# ------------------------------------------------------------------------------------------------
# Scored: what a reward says of one trajectory, with what each of its parts said and why.
# ------------------------------------------------------------------------------------------------


# ------------------------------------------------------------------------------------------------
# Rewards that need nothing to be opened: plain functions of a task and a trajectory.
# ------------------------------------------------------------------------------------------------
