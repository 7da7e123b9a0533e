"""One evaluation against another on the same tasks: paired differences, ratios, wins and losses.

Pairing takes out what both have in common: a hard task is hard for both. Intervals are bootstraps
over tasks; significance is the exact sign test, which for one sample per task is McNemar's.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import fsum

from coa.io.runs import Json
from coa.statistics import RESAMPLES, SAME, Estimate, bootstrap, paired, tally

PAIRED_RESAMPLES = 10_000


class Resamples:
    """Sums of named columns, one number per task, over all tasks and over each resample."""

    def __init__(
        self,
        columns: Mapping[str, Sequence[float]],
        seed: int = 0,
        resamples: int = PAIRED_RESAMPLES,
    ) -> None:
        sizes = {len(column) for column in columns.values()}
        assert len(sizes) == 1 and sizes != {0}, sizes
        self.n = sizes.pop()
        self._sums: dict[str, list[float]] = {name: [sum(columns[name])] for name in columns}
        rng = random.Random(seed)
        for _ in range(resamples):
            drawn = rng.choices(range(self.n), k=self.n)
            for name, column in columns.items():
                self._sums[name].append(sum(map(column.__getitem__, drawn)))

    def ratio(self, over: str, under: str) -> Estimate:
        """Sum of one column over the sum of another."""
        return self._estimate(zip(self._sums[over], self._sums[under], strict=True))

    def times(self, one: tuple[str, str], other: tuple[str, str]) -> Estimate:
        """How many times the ratio `other` the ratio `one` is."""
        a, b, c, d = (self._sums[name] for name in (*one, *other))
        return self._estimate((w * z, x * y) for w, x, y, z in zip(a, b, c, d, strict=True))

    def reduction(self, one: tuple[str, str], other: tuple[str, str]) -> Estimate:
        """By what part the ratio `other` is below the ratio `one`."""
        kept = self.times(other, one)
        return Estimate(1 - kept.value, 1 - kept.high, 1 - kept.low, kept.n)

    def _estimate(self, pairs: Iterable[tuple[float, float]]) -> Estimate:
        """The first pair is of all tasks; a resample without anything to divide by has no bound."""
        whole, *rest = [over / under if under else math.inf for over, under in pairs]
        assert whole < math.inf, "the sum to divide by is zero"
        found = sorted(rest)
        low = found[int(0.025 * len(found))]
        return Estimate(whole, low, found[max(0, int(0.975 * len(found)) - 1)], self.n)


@dataclass(frozen=True)
class Measured:
    """What a finished evaluation says of each task, by its id, in the order of the tasks."""

    name: str
    reward: str
    scores: Mapping[str, Sequence[float]]
    """Of every sample."""
    tokens: Mapping[str, float] = field(default_factory=dict)
    """Mean of the samples; empty when the trajectories are not there."""
    families: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""
    """Of the tasks with their gold, in order; empty: not known."""
    judged_by: str = ""
    """What the reward depends on beyond its name: a judge, its instructions."""

    def mean(self, task_id: str) -> float:
        found = self.scores[task_id]
        return fsum(found) / len(found)  # 0.1 + 0.2 + 0.3, in any order, is the same

    @property
    def means(self) -> list[float]:
        return [self.mean(task_id) for task_id in self.scores]

    def family(self, task_id: str) -> str:
        return self.families.get(task_id, "")


def against(first: Measured, other: Measured) -> Json:
    """The figures of `other` compared with `first`; above 0 is better for it, a win is its."""
    order = list(first.scores)
    pair = paired([first.mean(i) for i in order], [other.mean(i) for i in order])
    gains = {i: other.mean(i) - first.mean(i) for i in order}
    row: Json = {
        **_with_interval("difference", pair.difference, 4),
        **{"wins": pair.wins, "losses": pair.losses, "ties": pair.ties},
        "p_value": round(pair.p_value, 5),
        "won": [task_id for task_id, gain in gains.items() if gain > SAME],
        "lost": [task_id for task_id, gain in gains.items() if gain < -SAME],
    }
    if first.families:
        row["by_family"] = _by_family(first, gains)
    if first.tokens and other.tokens:
        row |= _token_figures(first, other, order)
    return row


def _by_family(first: Measured, gains: Mapping[str, float]) -> Json:
    groups: dict[str, list[float]] = defaultdict(list)
    for task_id, gain in gains.items():
        groups[first.family(task_id)].append(gain)
    return {
        name: {
            "n": len(found),
            **dict(zip(("wins", "losses"), tally(found), strict=True)),
            "difference": round(sum(found) / len(found), 4),
        }
        for name, found in sorted(groups.items())
    }


def _token_figures(first: Measured, other: Measured, order: Sequence[str]) -> Json:
    """Tokens of a task, subtracted; tokens of a solved task, divided. Nothing solved: no ratio."""
    spent = bootstrap([other.tokens[i] - first.tokens[i] for i in order])
    row = _with_interval("tokens_difference", spent, 1) | {"tokens_per_solved_ratio": None}
    columns = {
        "tokens": [first.tokens[i] for i in order],
        "solved": [first.mean(i) for i in order],
        "other tokens": [other.tokens[i] for i in order],
        "other solved": [other.mean(i) for i in order],
    }
    if all(map(sum, columns.values())):
        drawn = Resamples(columns, resamples=RESAMPLES)
        ratio = drawn.times(("other tokens", "other solved"), ("tokens", "solved"))
        row["tokens_per_solved_ratio"] = ratio.figures(5)
    return row


def _with_interval(name: str, found: Estimate, digits: int) -> Json:
    figures = found.rounded(name, digits)
    return {name: figures[name], f"{name}_ci95": figures["ci95"]}


def spread(task_ids: Iterable[str], first: Measured, n: int) -> list[str]:
    """The first n of these tasks, one of each family in turn, so that no family is all of them."""
    groups: dict[str, list[str]] = defaultdict(list)
    for task_id in task_ids:
        groups[first.family(task_id)].append(task_id)
    turns = zip_longest(*groups.values())
    return [task_id for turn in turns for task_id in turn if task_id is not None][:n]
