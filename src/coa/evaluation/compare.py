"""Finished evaluations: read, and compared on the same tasks, in figures and side by side.

Pairing takes out what both have in common: a hard task is hard for both. Intervals are bootstraps
over tasks; significance is the exact sign test, which for one sample per task is McNemar's.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING

from coa.errors import CoaError, UsageError
from coa.grammar import parse
from coa.io.runs import MANIFEST, Json, read_object, read_records
from coa.statistics import RESAMPLES, RIGHT, SAME, Estimate, bootstrap, estimate, paired, tally
from coa.trajectory import Trajectory, Usage, load_trajectories
from coa.view.terminal import FOLD, closing_line, colour_of, fold, harmless, observed

if TYPE_CHECKING:
    from rich.console import Console

PAIRED_RESAMPLES = 10_000
SCORES, SUMMARY, CHAINS = "scores.jsonl", "summary.json", "trajectories.jsonl"


# -- finished evaluations -------------------------------------------------------------------


def brief(found: Estimate) -> Json:
    """Return an accuracy as files have it."""
    return {"n": found.n, **found.rounded("accuracy")}


def count_outcomes(judged: Iterable[tuple[float, str | None]]) -> Json:
    """How many rollouts, by score and answer, were right, wrong, and without an answer."""
    found = {"right": 0, "wrong": 0, "no answer": 0}
    for score, answer in judged:
        found["right" if score >= RIGHT else "wrong" if answer is not None else "no answer"] += 1
    return found


def outcome_line(directory: Path) -> str:
    """How many rollouts of an evaluation were right, wrong and without an answer; empty where a
    folder holds no evaluation."""
    scores = directory / SCORES
    if not scores.is_file():
        return ""
    pairs = read_records(scores, lambda r: (float(r["score"]), r.get("answer")))
    listed = ", ".join(f"{count} {name}" for name, count in count_outcomes(pairs).items())
    return f"{len(pairs)} rollouts: {listed}"


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
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what it worked with, as its manifest has them."""

    def mean(self, task_id: str) -> float:
        found = self.scores[task_id]
        return fsum(found) / len(found)  # 0.1 + 0.2 + 0.3, in any order, is the same

    @property
    def means(self) -> list[float]:
        return [self.mean(task_id) for task_id in self.scores]

    def family(self, task_id: str) -> str:
        return self.families.get(task_id, "")


def load_measured(directory: Path) -> Measured:
    """Read what a finished evaluation found; tokens only where its trajectories are kept."""
    summary = _finished(directory)
    scores: dict[str, list[float]] = defaultdict(list)
    families: dict[str, str] = {}

    def add_score(record: Json) -> None:
        scores[record["task_id"]].append(float(record["score"]))
        if "family" in (groups := record.get("groups", {})):
            families[record["task_id"]] = groups["family"]

    tokens: dict[str, list[int]] = defaultdict(list)

    def add_tokens(record: Json) -> None:
        tokens[record["task_id"]].append(Usage(**record["usage"]).total_tokens)

    read_records(directory / SCORES, add_score)
    if (directory / CHAINS).is_file():
        read_records(directory / CHAINS, add_tokens)
    path = directory / MANIFEST
    manifest = read_object(path) if path.is_file() else {}
    judged_by = (manifest.get("recipe") or {}).get("rewards")
    return Measured(
        str(directory),
        str(summary.get("reward", "exact")),
        scores,
        {name: sum(found) / len(found) for name, found in tokens.items()},
        families,
        str((manifest.get("inputs") or {}).get("tasks", "")),
        json.dumps(judged_by, sort_keys=True) if judged_by else "",
        inputs_of(manifest),
    )


_WORKED_WITH = {
    "binding": "tools",
    "answers": "corpus",
    "observations": "observations",
    "grammar": "grammar",
    "web": "web",
    "tools": "recorded answers of tools",
}
"""What a manifest says that the rollouts of a run depend on, apart from tasks and model."""


def inputs_of(manifest: Json) -> dict[str, str]:
    """What a run worked with; observations that are real are not in a manifest."""
    held = manifest.get("inputs") or {}
    if "binding" not in held:  # of a version that did not keep it
        return {}
    named = {name: str(held[name]) for name in _WORKED_WITH if name in held}
    return {"observations": "real", **named}


def other_means(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """In what two runs worked differently: a difference between them is not of the models alone."""
    if not first or not other:
        return []
    return [word for name, word in _WORKED_WITH.items() if first.get(name) != other.get(name)]


def _finished(directory: Path) -> Json:
    """Read the summary of an evaluation, or say why there is none."""
    manifest, summary = directory / MANIFEST, directory / SUMMARY
    if manifest.is_file() and not summary.is_file():
        stage = read_object(manifest).get("stage")
        if stage != "eval":
            raise UsageError(f"{directory}: is a run of {stage!r}, expected one of `coa eval`.")
        chains = directory / CHAINS
        done = chains.read_bytes().count(b"\n") if chains.is_file() else 0
        raise UsageError(
            f"{directory}: the evaluation is not finished, it has {done} rollouts so far. "
            "Give the same `coa eval` again, it continues."
        )
    if not (directory / SCORES).is_file():
        raise UsageError(f"{directory}: no {SCORES}; is it the --out of a finished `coa eval`?")
    return read_object(summary) if summary.is_file() else {}


def _load_alike(directories: Sequence[Path]) -> list[Measured]:
    """Read finished evaluations of the same tasks by the same reward."""
    runs = [load_measured(directory) for directory in directories]
    rewards = {run.reward: run.name for run in runs}
    if len(rewards) > 1:
        listed = ", ".join(f"{reward} ({name})" for reward, name in rewards.items())
        raise UsageError(f"the runs have different rewards: {listed}; compare like with like.")
    first = runs[0]
    for run in runs[1:]:
        both = f"{run.name} and {first.name}"
        known = run.fingerprint and first.fingerprint  # of tasks in their order
        same_order = list(run.scores) == list(first.scores)
        if only := len(run.scores.keys() ^ first.scores.keys()):
            raise UsageError(f"{both} differ in {only} tasks; compare runs of the same task file.")
        if run.judged_by != first.judged_by:
            raise UsageError(
                f"{both} have the reward {run.reward!r} with other settings (its judge, for one); "
                "compare like with like."
            )
        if known and same_order and run.fingerprint != first.fingerprint:
            raise UsageError(
                f"{both} have tasks of the same ids with other contents, other gold answers for "
                "one; evaluate both on the same task file."
            )
    return runs


# -- figures --------------------------------------------------------------------------------


def compare(directories: Sequence[Path]) -> Json:
    """Compare each later run with the first, paired by task; tasks must be the same."""
    runs = _load_alike(directories)
    first = runs[0]
    rows: list[Json] = []
    for run in runs:
        row: Json = {"run": run.name, **brief(estimate(run.means))}
        if run.tokens:
            spent, solved = sum(run.tokens.values()), sum(run.means)
            row["tokens_per_task"] = round(spent / len(run.tokens), 1)
            row["tokens_per_solved"] = round(spent / solved, 1) if solved else None
        if means := other_means(first.inputs, run.inputs):
            row["other"] = means
        rows.append(row | (against(first, run) if run is not first else {}))
    return {"n": len(first.scores), "baseline": first.name, "runs": rows}


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


# -- side by side on a terminal -------------------------------------------------------------


def spread(task_ids: Iterable[str], first: Measured, n: int) -> list[str]:
    """The first n of these tasks, one of each family in turn, so that no family is all of them."""
    groups: dict[str, list[str]] = defaultdict(list)
    for task_id in task_ids:
        groups[first.family(task_id)].append(task_id)
    return in_turn(groups.values())[:n]


def in_turn(groups: Iterable[Sequence[str]]) -> list[str]:
    """Return the first of each group, then the second of each, and so on; each name once."""
    turns = zip_longest(*groups)
    return list(dict.fromkeys(name for turn in turns for name in turn if name is not None))


Styled = tuple[str, str]
"""A text and its style."""


def print_sides(out: Console, directories: Sequence[Path], result: Json, n: int) -> None:
    """For each run after the first, n tasks that it won and n that it lost, both chains of each."""
    first = _Side(directories[0])
    for directory, row in zip(directories[1:], result["runs"][1:], strict=True):
        other = _Side(directory)
        for word, task_ids in (("won", row["won"]), ("lost", row["lost"])):
            chosen = spread(task_ids, first.measured, n)
            out.print()
            out.print(f"{directory} {word} {len(task_ids)}, {len(chosen)} shown", style="bold")
            for task_id in chosen:
                won = word == "won"
                left = first.sample(task_id, best=not won)
                _print_pair(out, left, other.sample(task_id, best=won), (first.name, other.name))


class _Side:
    """A run with its chains."""

    def __init__(self, directory: Path) -> None:
        self.measured: Measured = load_measured(directory)
        self.name = str(directory)
        self._chains: dict[str, list[Trajectory]] = {}
        for trajectory in load_trajectories(directory):
            self._chains.setdefault(trajectory.task_id, []).append(trajectory)

    def sample(self, task_id: str, *, best: bool) -> Trajectory:
        """Of several samples the first that shows why the task was won, or lost."""
        scores = self.measured.scores[task_id]
        wanted = max(scores) if best else min(scores)
        return self._chains[task_id][list(scores).index(wanted)]


def _print_pair(out: Console, left: Trajectory, right: Trajectory, names: tuple[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for name in names:
        table.add_column(Text(name, "underline"), ratio=1, overflow="fold")
    table.show_header, table.header_style = True, ""
    lines = ((Text(*line) for line in _lines(chain)) for chain in (left, right))
    table.add_row(*(Text("\n").join(each) for each in lines))
    out.print()
    out.print(fold(left.question, 600), style="bold")
    out.print(table, soft_wrap=False)


def _lines(chain: Trajectory) -> Iterator[Styled]:
    """Yield a chain block by block; what cannot be read under its grammar as it was written."""
    try:
        grammar = chain.protocol
    except CoaError:  # a grammar of one's own, whose file is not known here
        yield fold(chain.text, 8 * FOLD), ""
    else:
        for step in chain.steps:
            parsed = parse(grammar, step.model.text)
            yield from ((f"{b.role}: {fold(b.body)}", colour_of(b.role)) for b in parsed.blocks)
            if parsed.faults:
                yield f"malformed: {harmless(parsed.faults[0].message)}", "red"
            if step.observation is not None:
                yield f"{grammar.observation}: {fold(observed(step.observation, grammar))}", "dim"
    yield closing_line(chain).strip(), "bold" if chain.answer else "red"
