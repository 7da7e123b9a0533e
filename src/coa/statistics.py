"""Numbers with intervals: proportions, means over tasks, and paired differences.

Every task of the set counts, answered or not. Proportions of single attempts get Wilson intervals,
which stay honest at 0 and 1; other means a bootstrap over tasks with a fixed seed, so that a table
can be made again to the digit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Z95 = 1.959964
RESAMPLES = 2000
SAME = 1e-9
"""Scores that differ by no more are equal: a mean of several is rounded."""
RIGHT = 1.0 - SAME
"""The score from which a rollout is right: all of it, whatever sums of weights round to."""
FEW = 5
"""Successes, or failures, below which a bootstrap of a share is not trusted."""


class Estimate(NamedTuple):
    """A mean with its 95% interval."""

    value: float
    low: float
    high: float
    n: int

    def rounded(self, name: str = "value", digits: int = 4) -> dict[str, float | list[float]]:
        """Return the mean by this name and the interval, for JSON, to so many digits."""
        value, low, high = (round(each, digits) for each in self[:3])
        return {name: value, "ci95": [low, high]}

    def figures(self, digits: int = 6) -> dict[str, float | list[float | None]]:
        """For JSON, to so many significant digits; it has no infinity, so None is no bound."""
        value, *sides = (float(f"{each:.{digits}g}") for each in self[:3])
        return {"value": value, "ci95": [side if math.isfinite(side) else None for side in sides]}


def interval(ci95: Sequence[float | None], form: str) -> str:
    """The bounds of an interval, each written in this form."""
    return f"[{', '.join('no bound' if x is None else format(x, form) for x in ci95)}]"


def wilson(successes: float, n: int) -> Estimate:
    """The Wilson score interval of a proportion."""
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    p, z2 = successes / n, Z95 * Z95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Estimate(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)), n)


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean with a percentile bootstrap interval over the values."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    rng = random.Random(seed)
    means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(RESAMPLES))
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]
    return Estimate(sum(values) / n, low, high, n)


def estimate(values: Sequence[float]) -> Estimate:
    """Wilson for zeros and ones, bootstrap for the rest.

    Where all numbers are between 0 and 1, the mean is a share; see `as_share`.
    """
    if all(value in (0.0, 1.0) for value in values):
        return wilson(sum(values), len(values))
    found = bootstrap(values)
    return as_share(found) if all(0.0 <= value <= 1.0 for value in values) else found


def as_share(found: Estimate) -> Estimate:
    """A mean of numbers from 0 to 1 with Wilson's interval around the bootstrap's, where that has
    too little to draw from: one partial credit among zeros must not make it narrower than none.
    Of such numbers Wilson's is never too narrow."""
    total = found.value * found.n
    if min(total, found.n - total) >= FEW:
        return found
    around = wilson(total, found.n)
    return found._replace(low=min(found.low, around.low), high=max(found.high, around.high))


class Paired(NamedTuple):
    """B against A on the same tasks."""

    difference: Estimate
    wins: int
    losses: int
    ties: int
    p_value: float
    """Two-sided exact sign test over the tasks that differ."""


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Mean of b - a over tasks, with interval, wins, losses and significance."""
    assert len(a) == len(b), (len(a), len(b))
    differences = [y - x for x, y in zip(a, b, strict=True)]
    wins, losses = tally(differences)
    return Paired(
        difference_of(differences, bootstrap(differences)),
        wins,
        losses,
        len(differences) - wins - losses,
        sign_test(wins, losses),
    )


def tally(differences: Iterable[float]) -> tuple[int, int]:
    """How many are above 0 and how many below; what rounding alone may have made is neither."""
    found = list(differences)
    return sum(each > SAME for each in found), sum(each < -SAME for each in found)


def difference_of(differences: Sequence[float], drawn: Estimate) -> Estimate:
    """A bootstrapped mean of differences with `few_differ` around its interval, where so few tasks
    differ that there is little to draw from: four wins and no loss are not significant, and no
    difference at all is no certainty."""
    wins, losses = tally(differences)
    if not differences or wins + losses >= 2 * FEW or not all(-1 <= d <= 1 for d in differences):
        return drawn
    low, high = few_differ(wins, losses, len(differences))
    return drawn._replace(low=min(drawn.low, low), high=max(drawn.high, high))


def few_differ(wins: int, losses: int, n: int) -> tuple[float, float]:
    """An interval of (wins - losses) / n that is never too narrow: the share of tasks that differ,
    by Wilson, times how one-sided they are, by the sign test turned round."""
    share = wilson(wins + losses, n)

    def bound(won: int, lost: int) -> float:
        """The least that the winning side may lead by."""
        at_least, at_most = 0.0, won / (won + lost) if won else 0.0
        for _ in range(50):  # the chance of a win at which so many have 2.5%
            chance = (at_least + at_most) / 2
            tail = sum(
                math.comb(won + lost, i) * chance**i * (1 - chance) ** (won + lost - i)
                for i in range(won, won + lost + 1)
            )
            at_least, at_most = (chance, at_most) if tail < 0.025 else (at_least, chance)
        lead = 2 * at_least - 1
        return lead * (share.high if lead < 0 else share.low)

    return bound(wins, losses), -bound(losses, wins)


def sign_test(wins: int, losses: int) -> float:
    """Probability of a split at least this uneven if both were equally good."""
    n, smaller = wins + losses, min(wins, losses)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(smaller + 1))
    return float(min(1.0, 2 * tail / 2**n))
