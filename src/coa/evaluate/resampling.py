"""Ratios of sums over tasks, with paired bootstrap intervals.

Every resample draws tasks with replacement and takes all columns of a drawn task together, so that
what two columns have in common (a hard task is hard for both) does not widen the interval of their
ratio. Draws come from Python's own generator: the same seed gives the same table everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence

from coa.estimates import Estimate

RESAMPLES = 10_000


class Resamples:
    """Sums of named columns, one number per task, over all tasks and over each resample."""

    def __init__(
        self, columns: Mapping[str, Sequence[float]], seed: int = 0, resamples: int = RESAMPLES
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
