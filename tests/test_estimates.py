"""Intervals: by hand, near 0 and 1, for a handful of repetitions, paired, and as JSON."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.evaluation.compare import Measured, against
from coa.lab.study_arms import student
from coa.statistics import (
    Z95,
    Estimate,
    bootstrap,
    estimate,
    interval,
    paired,
    sign_test,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.490162, 0.943318),
        (5, 10, 0.236593, 0.763407),
        (0, 10, 0.0, Z95**2 / (10 + Z95**2)),
        (10, 10, 10 / (10 + Z95**2), 1.0),
        (1, 1, 1 / (1 + Z95**2), 1.0),
        (90, 100, 0.825634, 0.944771),
    ],
)
def test_wilson(successes: int, n: int, low: float, high: float) -> None:
    found = wilson(successes, n)
    assert (found.value, found.n) == (successes / n, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=2e-6)
    for bound in (found.low, found.high):  # the score test is just significant at a bound
        if 0 < bound < 1:
            gap = abs(found.value - bound)
            assert gap == pytest.approx(Z95 * math.sqrt(bound * (1 - bound) / n))


def test_bootstrap() -> None:
    assert bootstrap([0.5] * 7)[:3] == (0.5, 0.5, 0.5)
    assert bootstrap([0.0, 1.0]) == (0.5, 0.0, 1.0, 2)  # a quarter of resamples at either end
    values = [i / 99 for i in range(100)]
    found = bootstrap(values)
    error = math.sqrt(sum((v - 0.5) ** 2 for v in values)) / 100
    assert found.value == pytest.approx(0.5)
    assert found.low == pytest.approx(0.5 - Z95 * error, abs=0.2 * error)
    assert found.high == pytest.approx(0.5 + Z95 * error, abs=0.2 * error)
    assert bootstrap(values) == found and bootstrap(values, seed=1) != found


def test_nothing_measured_is_not_a_number() -> None:
    for found in (wilson(0, 0), bootstrap([])):
        assert found.n == 0 and all(math.isnan(x) for x in found[:3])


def test_zeros_and_ones_get_wilson_and_means_get_the_bootstrap() -> None:
    assert estimate([1.0, 0.0, 1.0]) == wilson(2, 3)
    values = [0.25, 0.5, 1.0] * 10
    assert estimate(values) == bootstrap(values)


@given(st.integers(1, 60), st.integers(0, 60), st.booleans())
def test_a_partial_credit_makes_no_share_surer_than_none(n: int, k: int, ones: bool) -> None:
    """A bootstrap of forty zeros and a quarter ends at 0.02, Wilson's of forty zeros at 0.09."""
    values = [0.0] * n
    values[k % n] = 0.25
    if ones:
        values = [1.0 - value for value in values]
    found, certain = estimate(values), wilson(n if ones else 0, n)
    assert found.high - found.low >= certain.high - certain.low - 1e-9
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0


@pytest.mark.parametrize(
    ("n", "t"), [(2, 12.706), (3, 4.303), (6, 2.571), (11, 2.228), (31, 2.042)]
)
def test_students_interval(n: int, t: float) -> None:
    values = [float(i % 2) for i in range(n)]
    mean = sum(values) / n
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    found = student(values)
    assert found.value == mean and found.high - mean == pytest.approx(t * error, rel=1e-3)
    assert mean - found.low == pytest.approx(found.high - mean)
    assert student([0.5])[1:3] == (-math.inf, math.inf)


def test_json_has_no_infinity_and_a_person_reads_that_there_is_no_bound() -> None:
    shown = Estimate(2.0, 1 / 3, math.inf, 7).figures(3)
    assert shown == {"value": 2.0, "ci95": [0.333, None]}
    assert interval([0.333, None], ".2f") == "[0.33, no bound]"


def test_paired() -> None:
    found = paired([0, 0, 1, 1, 0], [1, 0, 1, 0, 1])
    assert (found.wins, found.losses, found.ties) == (2, 1, 2)
    assert found.difference.value == pytest.approx(0.2)
    assert found.p_value == 1.0
    better = paired([0] * 8, [1] * 8)
    assert better.difference.value == better.difference.high == 1.0
    assert 0 < better.difference.low < 0.5 and better.p_value == 2 / 2**8, "eight are few"
    clear = paired([0] * 10, [1] * 10)
    assert clear.difference[:3] == (1.0, 1.0, 1.0)


def test_where_few_tasks_differ_an_interval_leaves_zero_out_only_if_the_sign_test_does() -> None:
    for n in (20, 200, 500):
        for wins, losses in product(range(10), range(10)):
            if wins + losses < 10:
                a = [0] * wins + [1] * losses + [1] * (n - wins - losses)
                b = [1] * wins + [0] * losses + [1] * (n - wins - losses)
                found = paired(a, b)
                low, high = found.difference.low, found.difference.high
                assert low <= (wins - losses) / n <= high and low < high
                assert not (low > 0 or high < 0) or found.p_value < 0.05, (wins, losses, n)


def test_the_order_of_samples_decides_no_win() -> None:
    one = Measured("one", "exact", {"t": [0.1, 0.2, 0.3]})
    other = Measured("other", "exact", {"t": [0.3, 0.2, 0.1]})
    row = against(one, other)
    assert (row["wins"], row["losses"], row["ties"], row["won"], row["lost"]) == (0, 0, 1, [], [])


def test_the_sign_test() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(5, 0) == sign_test(0, 5) == 2 * 1 / 2**5
    assert sign_test(6, 1) == 2 * (1 + 7) / 2**7
    assert sign_test(2000, 1000) < 1e-60
