"""Arms of a study against each other: paired by task, pooled over seeds, with intervals.

Every arm has a number for every task under every seed. A resample draws seeds and tasks, both with
replacement, and takes the same draw for all arms: what two arms have in common (a hard task, an
unlucky start) does not widen the interval of their difference, and what a seed changes is in it.
Three seeds say little about seeds: all of a resample can be one seed. So the number of each is kept
beside the pooled one, and arms are told apart only where Student's interval over seeds agrees.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial

from coa.errors import RecordError
from coa.estimates import Estimate, as_share, difference_of, student, tally
from coa.evaluate.resampling import RESAMPLES
from coa.runs import Json

Scores = Mapping[str, float]
"""A number for each task."""
BySeed = Mapping[int, Scores]


def pooled(table: Sequence[Sequence[float]], resamples: int = RESAMPLES) -> Estimate:
    """The mean of a table (a row for each seed, a column for each task) with its interval."""
    n, seeds = len(table[0]) if table else 0, len(table)
    assert n and all(len(row) == n for row in table), [len(row) for row in table]
    mean = sum(map(sum, table)) / (n * seeds)
    if len({value for row in table for value in row}) == 1:
        return Estimate(mean, mean, mean, n)
    sums: dict[tuple[int, ...], list[float]] = {}
    means = []
    for chosen, tasks in _draws(seeds, n, resamples):
        if chosen not in sums:  # there are few: 10 of three seeds
            sums[chosen] = [sum(values) for values in zip(*(table[s] for s in chosen), strict=True)]
        means.append(sum(map(sums[chosen].__getitem__, tasks)) / (n * seeds))
    means.sort()
    low, high = means[int(0.025 * resamples)], means[max(0, int(0.975 * resamples) - 1)]
    return Estimate(mean, low, high, n)


@lru_cache(maxsize=2)
def _draws(seeds: int, n: int, resamples: int) -> list[tuple[tuple[int, ...], array[int]]]:
    """Seeds and tasks of every resample: the same for all tables of one shape, and kept, since
    drawing takes longer than summing."""
    rng = random.Random(0)
    return [
        (
            tuple(sorted(rng.choices(range(seeds), k=seeds))),
            array("L", rng.choices(range(n), k=n)),
        )
        for _ in range(resamples)
    ]


def measure(
    arms: Mapping[str, BySeed],
    against: str,
    resamples: int = RESAMPLES,
    *,
    rerun: bool = True,
    share: bool = True,
) -> Json:
    """One measure of all arms, and of each the difference to the arm `against`.

    `rerun`: the seeds are repetitions on the same tasks. Otherwise they only made the tasks, and
    all of those are one sample. `share`: the numbers are 0 or 1 and their mean is a share of tasks.
    """
    seeds = list(arms[against])
    order = {seed: sorted(arms[against][seed]) for seed in seeds}
    tables: dict[str, list[list[float]]] = {}
    for name, by_seed in arms.items():
        for seed in seeds:
            if sorted(by_seed.get(seed, ())) != order[seed]:
                raise RecordError(
                    f"arms {name!r} and {against!r} were not measured on the same tasks under "
                    f"seed {seed}. Delete the study's directory to start again."
                )
        tables[name] = [[by_seed[seed][task] for task in order[seed]] for seed in seeds]
    found: Json = {"seeds": seeds, "rerun": rerun, "share": share, "against": against}
    found |= {"arms": {}, "differences": {}}
    for name, table in tables.items():
        shown = _shown(table, resamples, rerun)
        # Where all but a few tasks had 0, or 1, a bootstrap has little width or none. Tasks that
        # were not drawn may differ all the same: Wilson's interval over tasks says by how much.
        found["arms"][name] = _widened(shown, as_share) if share else shown
        if name == against:
            continue
        pairs = [
            [mine - theirs for mine, theirs in zip(row, other, strict=True)]
            for row, other in zip(table, tables[against], strict=True)
        ]
        every = [difference for row in pairs for difference in row]
        shown = _shown(pairs, resamples, rerun)
        if share and not rerun:
            shown = _widened(shown, partial(difference_of, every))
        above, below = tally(every)
        found["differences"][name] = shown | {
            **(_over_seeds(pairs) if rerun and len(seeds) > 1 else {}),
            # Not wins and losses: of some measures less is better.
            "above": above,
            "below": below,
        }
    return found


def _shown(table: Sequence[Sequence[float]], resamples: int, rerun: bool) -> Json:
    rows = table if rerun else [[value for row in table for value in row]]
    value = pooled(rows, resamples)
    return {
        "value": round(value.value, 5),
        "ci95": [round(value.low, 5), round(value.high, 5)],
        "n": value.n,
        "by_seed": [round(sum(row) / len(row), 5) for row in table],
    }


def _over_seeds(table: Sequence[Sequence[float]]) -> Json:
    found = student([sum(row) / len(row) for row in table])
    return {"seeds_ci95": [round(found.low, 5), round(found.high, 5)]}


def _widened(shown: Json, widen: Callable[[Estimate], Estimate]) -> Json:
    """The same figures with an interval that is not narrower than few tasks allow."""
    low, high = shown["ci95"]
    found = widen(Estimate(shown["value"], low, high, shown["n"]))
    return shown | {"ci95": [round(found.low, 5), round(found.high, 5)]}


class Tables:
    """The numbers of a study, by measure, arm, seed and task."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, dict[int, Scores]]] = {}

    def put(self, measured: str, arm: str, seed: int, scores: Scores) -> None:
        self._held.setdefault(measured, {}).setdefault(arm, {})[seed] = scores

    def only(self, arms: Sequence[str]) -> Tables:
        """The same of these arms alone."""
        chosen = Tables()
        for name, held in self._held.items():
            chosen._held[name] = {arm: held[arm] for arm in arms}
        return chosen

    def compared(self, against: str, *, rerun: bool = True, counts: Sequence[str] = ()) -> Json:
        """Every measure of all arms against one of them; see `measure`. `counts` are no shares."""
        return {
            name: measure(arms, against, rerun=rerun, share=name not in counts)
            for name, arms in self._held.items()
        }


def verdict(difference: Json) -> str:
    """What the intervals of a difference say, in a word: over tasks and seeds, and over seeds."""
    intervals = [difference["ci95"], difference.get("seeds_ci95", difference["ci95"])]
    if all(low > 0 for low, _ in intervals):
        return "higher"
    return "lower" if all(high < 0 for _, high in intervals) else "not told apart"


def lines(title: str, found: Json) -> Iterable[str]:
    """A measure as a small table: every arm, every seed, and the differences."""
    n, seeds = next(iter(found["arms"].values()))["n"], len(found["seeds"])
    yield f"{title}, n = {n}" + (f", each under {seeds} seeds" if found["rerun"] else "")
    for name, shown in found["arms"].items():
        yield _row(name, shown, found["share"])
    yield from differences(found)


def differences(found: Json) -> Iterable[str]:
    """Each arm less the one that it is compared with."""
    for name, shown in found["differences"].items():
        told = f"{verdict(shown)}: above in {shown['above']}, below in {shown['below']}"
        yield f"{_row(f'{name} vs ' + found['against'], shown, found['share'], '+')}  {told}"


def _row(name: str, shown: Json, share: bool, sign: str = "") -> str:
    def number(value: float) -> str:
        return f"{value:{sign}.1%}" if share else f"{value:{sign}.4g}"

    interval = "[{}, {}]".format(*map(number, shown["ci95"]))
    seeds = "  ".join(map(number, shown["by_seed"]))
    return f"  {name:<38}{number(shown['value']):>8}  {interval:<18}  by seed  {seeds}"
