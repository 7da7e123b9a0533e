"""Numbers with intervals: proportions, means over tasks, and paired differences.

Every task of the set counts, answered or not. Proportions of single attempts get Wilson intervals,
which stay honest at 0 and 1; other means a bootstrap over tasks with a fixed seed, so that a table
can be made again to the digit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

Z95 = 1.959964
RESAMPLES = 2000


class Estimate(NamedTuple):
    """A mean with its 95% interval."""

    value: float
    low: float
    high: float
    n: int


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
    """Wilson for zeros and ones, bootstrap for the rest."""
    if all(value in (0.0, 1.0) for value in values):
        return wilson(sum(values), len(values))
    return bootstrap(values)


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
    wins = sum(d > 0 for d in differences)
    losses = sum(d < 0 for d in differences)
    return Paired(
        bootstrap(differences),
        wins,
        losses,
        len(differences) - wins - losses,
        sign_test(wins, losses),
    )


def sign_test(wins: int, losses: int) -> float:
    """Probability of a split at least this uneven if both were equally good."""
    n, smaller = wins + losses, min(wins, losses)
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(smaller + 1))
    return float(min(1.0, 2 * tail / 2**n))
