"""Part and Scored, what rewards say of a trajectory; and answers compared as text.

Exact match and token F1 come after the same normalisation. An answer may list alternatives joined
by `|`: every one of them must be right, so that listing guesses never pays; `guarded` has the same
for F1, whose metric does pay.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from coa.errors import ConfigError
from coa.grammar import alternatives
from coa.io.runs import Json
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


@dataclass(frozen=True, slots=True)
class Part:
    """One checker's number, or None when it cannot judge; and why, in a few words."""

    score: float | None
    reason: str = ""
    suspect: bool = False
    """It looks like an attempt to be paid for something else than a right answer. A hint for
    whoever watches a run: the score does not depend on it."""

    def to_json(self) -> Json:
        said = {"reason": self.reason, "suspect": self.suspect}
        return {"score": self.score, **{name: value for name, value in said.items() if value}}


@dataclass(frozen=True, slots=True)
class Scored:
    """A number from 0 to 1, or None when nobody can say; and the parts that were asked, by name."""

    score: float | None
    parts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def suspect(self) -> bool:
        return any(part.suspect for part in self.parts.values())

    @property
    def reason(self) -> str:
        """Why it could not be judged, or what the parts found; for a person to read."""
        asked = self.parts.items()
        if self.score is None:
            asked = {name: part for name, part in asked if part.score is None}.items()
        return "; ".join(f"{name}: {part.reason}" for name, part in asked if part.reason)

    def to_json(self) -> Json:
        parts = {name: part.to_json() for name, part in self.parts.items()}
        return {"score": self.score, "parts": parts}

    @classmethod
    def from_json(cls, record: Json) -> Scored:
        return cls(record["score"], {name: Part(**part) for name, part in record["parts"].items()})


Scorer = Callable[[Task, Trajectory], float | None]
"""A reward that needs nothing to be opened."""


Checker = Callable[..., Awaitable[Part]]
"""A part of an opened reward: of a task and a trajectory, and of the rollout's state if it asks."""


def part_of(found: Any, reward: str, task: Task) -> Part:
    """What a reward returned, if it is a number from 0 to 1, None, or one of these in a `Part`."""
    part = found if isinstance(found, Part) else Part(found)
    score: Any = part.score
    if score is None:
        return part
    is_number = hasattr(score, "__float__")  # numpy and torch have types of their own
    if not is_number or math.isnan(score) or not 0.0 <= score <= 1.0:
        raise ConfigError(
            f"reward {reward!r}, on task {task.id}: found {score!r}, expected a number from 0 to 1,"
            " or None when it cannot judge."
        )
    return replace(part, score=float(score))


def normalise(text: str, *, keep_articles: bool = False) -> str:
    """Lower case, without articles, punctuation, thousands separators and repeated spaces. What
    an expression is made of (`x - 1`, `n^2`, `C++`) is no punctuation."""
    # Patterns that begin with spaces take forever over many of them.
    text = _DIGIT_COMMA.sub("", " ".join(text.lower().split()))
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
    if answer.strip() and answer.strip() in map(str.strip, golds):
        return 1.0  # also of `+`, of which no normalisation leaves anything
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


def token_f1(
    answer: str,
    golds: tuple[str, ...],
    bare: Callable[[str], str] = normalise,
    least: float = 0.0,
) -> float:
    """Best F1 of the answer's words against any gold answer, of which at least that share of the
    answer's words must be."""
    given = Counter(bare(answer).split())
    best = 0.0
    for gold in golds:
        wanted = Counter(bare(gold).split())
        common = (given & wanted).total()
        if common:
            precision, recall = common / given.total(), common / wanted.total()
            if precision < least:
                continue
            best = max(best, 2 * precision * recall / (precision + recall))
    return best


def exact(task: Task, trajectory: Trajectory) -> float | None:
    """Exact match; no answer scores 0, a task without gold cannot be judged."""
    return exact_match(trajectory.answer or "", task.answers) if task.answers else None


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


_GUESSES = re.compile(r"\s*(?:[|;\n]+|,?\s+\bor\b)\s*", re.I)
_LEAST_OWN = 0.5
"""The share of an answer's words that must be the gold's, for F1 to pay."""
_FEW_GUESSES = 2
_CLOSED = {"yes", "no", "noanswer", "true", "false"}
"""Answers that are right or wrong and never in part, as HotpotQA's own F1 has it: else
`yes no` would always earn two thirds."""


def guesses(answer: str, golds: tuple[str, ...]) -> list[str]:
    """What an answer lists, joined by `|`, `;`, lines or `or`; a separator that a gold answer has
    itself joins nothing."""
    if any(_GUESSES.search(gold) for gold in golds):
        return [answer]
    lines = (" ".join(line.split()) for line in answer.splitlines())  # no run of spaces
    return [part for part in _GUESSES.split("\n".join(lines)) if part.strip()]


def guarded(scorer: Scorer) -> Callable[[Task, Trajectory], Part]:
    """A scorer of answers as a reward, for a model that learns what pays.

    Naming many guesses never does, and is suspect. F1 as a metric pays for it, so that as a reward
    it is the least of what is listed, and 0 where most words are not the gold's.
    """

    def reward(task: Task, trajectory: Trajectory) -> Part:
        score = scorer(task, trajectory)
        if score is None:
            return Part(None)
        listed = guesses(trajectory.answer or "", task.answers)
        if scorer is f1 and score:
            bare = squad_normalise if task.meta.get("reward") == "squad" else normalise
            score = min(token_f1(each, task.answers, bare, _LEAST_OWN) for each in listed)
            if score < 1.0 and _CLOSED.issuperset(map(bare, task.answers)):
                score = 0.0
        many = len(listed) > max(_FEW_GUESSES, len(task.answers))
        if score < 1.0 and many:
            return Part(score, f"it lists {len(listed)} guesses", suspect=True)
        return Part(score)

    return reward
