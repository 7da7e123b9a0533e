"""One evaluation as a report needs it: the figures of its summary, checked once, and its chains."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.io.runs import Json
from coa.models.references import base_of
from coa.statistics import Estimate
from coa.tasks import Task
from coa.trajectory import Chain

GROUPS = {
    "family": "Family",
    "hops": "Hops",
    "world": "World",
    "level": "Level",
    "set": "Set",
    "environment": "Environment",
}
"""What tasks are grouped by in a summary -> its name on the page; environments declare others."""
HELD_OUT = "_heldout"
"""Ends the name of a group by whether something was held out of training."""


_NUMBERS = (
    *("tokens_per_task", "tokens_per_task_uncached", "tokens_per_solved"),
    *("tool_calls_per_task", "malformed_per_task"),
)


@dataclass
class EvaluationRun:
    """A finished `coa eval`, or a line of a table whose trajectories are elsewhere: a teacher."""

    name: str
    accuracy: Estimate
    model: str = ""
    reward: str = "exact"
    k: int = 1
    observations: str = "real"
    figures: dict[str, float | None] = field(default_factory=dict)
    """What it cost, by the names that a summary has."""
    stops: dict[str, int] = field(default_factory=dict)
    groups: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    pass_at: list[tuple[int, Estimate]] = field(default_factory=list)
    together: list[tuple[str, Estimate]] = field(default_factory=list)
    """What the samples of a task are worth together: mean, vote, best."""
    calls: dict[str, float] = field(default_factory=dict)
    """Mean calls of each tool role for a rollout."""
    latency: dict[str, float] = field(default_factory=dict)
    money: tuple[float, float | None, str] | None = None
    """Of a task, of a solved one, and the currency."""
    scores: dict[tuple[str, int], float] = field(default_factory=dict)
    chains: list[Chain] = field(default_factory=list)
    tasks: dict[str, Task] = field(default_factory=dict)
    team: bool = False
    on: str = ""
    """What its tasks are called: runs with the same name have the same tasks."""

    @property
    def is_control(self) -> bool:
        """Whether its tools did not answer as they do."""
        return self.observations != "real"

    @cached_property
    def by_task(self) -> dict[str, Chain]:
        """Task -> the chain that stands for it: its first sample."""
        found: dict[str, Chain] = {}
        for chain in self.chains:
            known = found.get(chain.trajectory.task_id)
            if known is None or chain.trajectory.sample < known.trajectory.sample:
                found[chain.trajectory.task_id] = chain
        return found

    @cached_property
    def means(self) -> dict[str, float]:
        """Score of each task, the mean of its samples."""
        found: dict[str, list[float]] = defaultdict(list)
        for (task_id, _), score in self.scores.items():
            found[task_id].append(score)
        return {task_id: sum(values) / len(values) for task_id, values in found.items()}

    @cached_property
    def tokens(self) -> list[float]:
        """Tokens of each task, the mean of its samples."""
        found: dict[str, list[float]] = defaultdict(list)
        for chain in self.chains:
            found[chain.trajectory.task_id].append(chain.trajectory.usage.total_tokens)
        return [sum(values) / len(values) for values in found.values()]


def by_tasks(runs: Iterable[EvaluationRun]) -> dict[str, list[EvaluationRun]]:
    """Runs on the same tasks together, in the order in which they come."""
    found: dict[str, list[EvaluationRun]] = defaultdict(list)
    for run in runs:
        found[run.on].append(run)
    return dict(found)


def model_name(ref: str) -> str:
    """A reference without the folders of this machine: a report may be sent to others."""
    base, adapter = base_of(ref) if "+" in ref else ref, ref.partition("+")[2]
    kind, colon, where = base.partition(":")
    if colon and kind in ("hf", "scripted") and (where.count("/") > 1 or Path(where).is_absolute()):
        base = f"{kind}:{Path(where).name}"
    elif colon and kind == "openai":  # neither where the server is nor where its files are
        base = f"{kind}:{Path(where.partition('@')[0]).name}"
    return f"{base} + {'/'.join(Path(adapter).parts[-2:])}" if adapter else base


def checked(path: Path, summary: Json, name: str) -> EvaluationRun:
    """The figures of a summary, each of which is a number or is not there."""
    try:
        return _figures(summary, name)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"{path}: not a summary of coa eval ({exc!r}).") from None


def _figures(summary: Json, name: str) -> EvaluationRun:
    n = int(finite(summary["n"]))
    found = EvaluationRun(
        name,
        _estimate(summary["accuracy"], summary["ci95"], n),
        model=str(summary.get("model", "")),
        reward=str(summary.get("reward", "exact")),
        k=int(finite(summary.get("k", 1))),
    )
    for key in _NUMBERS:
        if key in summary:
            found.figures[key] = None if summary[key] is None else finite(summary[key])
    stops = summary.get("stop_reasons", {})
    found.stops = {str(stop): int(finite(count)) for stop, count in stops.items()}
    for key, groups in summary.items():
        for group, each in groups.items() if key.startswith("by_") else ():
            value = _estimate(each["accuracy"], each["ci95"], int(finite(each["n"])))
            found.groups.setdefault(key.removeprefix("by_"), {})[str(group)] = value
    several = summary.get("pass_at", {})
    found.pass_at = sorted((int(k), _brief(each, n)) for k, each in several.items())
    for key, label in (("avg_at_k", "mean"), ("majority", "vote"), ("best_of", "best")):
        if key in summary and found.k > 1:
            by = summary[key].get("by")
            found.together.append((f"{label}, by {by}" if by else label, _brief(summary[key], n)))
    calls = summary.get("tool_calls_by_agent", {})
    found.calls = {str(role): finite(mean) for role, mean in calls.items()}
    if money := summary.get("money"):
        solved = money.get("per_solved")
        per_solved = None if solved is None else finite(solved)
        found.money = (finite(money["per_task"]), per_solved, str(money.get("currency", "")))
    return found


def _brief(record: Mapping[str, Any], n: int) -> Estimate:
    return _estimate(record["value"], record["ci95"], n)


def _estimate(value: Any, ends: Any, n: int) -> Estimate:
    low, high = ends
    return Estimate(finite(value), finite(low), finite(high), n)


def finite(value: Any) -> float:
    """A number as a file must have it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"found {value!r}, expected a number")
    return float(value)
