"""Evaluation: what attempts are worth, with a fixed denominator, and which of two is better.

The rollouts are `coa.attempts`; controls use the same loop with tools that withhold what they know
or return another page.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from coa.errors import RecordError, UsageError
from coa.estimates import Estimate, estimate, paired
from coa.rewards import Scored, f1, mean_parts
from coa.runs import Json, read_jsonl, write_atomic, write_jsonl
from coa.tasks.task import Task
from coa.trajectory import StopReason, Trajectory


def summarise(
    tasks: Sequence[Task], trajectories: Sequence[Trajectory], scored: Sequence[Scored]
) -> tuple[Json, list[Json]]:
    """The evaluation object and one score record per trajectory, given what the reward said.

    Every task counts. With several samples a task's accuracy is the mean over them.
    """
    _check_judged(trajectories, scored)
    by_id = {task.id: task for task in tasks}
    scores: dict[str, list[float]] = {task.id: [] for task in tasks}
    records: list[Json] = []
    f1_sum = 0.0
    for trajectory, found in zip(trajectories, scored, strict=True):
        task, score = by_id[trajectory.task_id], found.score
        assert score is not None, task.id
        scores[task.id].append(score)
        f1_sum += f1(task, trajectory) or 0.0
        record: Json = {"task_id": task.id, "sample": trajectory.sample, "score": score}
        record |= {"answer": trajectory.answer, "stop": trajectory.stop}
        if len(found.parts) > 1 or found.reason:  # otherwise they say nothing new
            record["parts"] = found.to_json()["parts"]
        records.append(record)
    means = {task_id: sum(values) / max(1, len(values)) for task_id, values in scores.items()}
    overall = estimate(list(means.values()))
    n = max(1, len(trajectories))
    solved = sum(sum(values) for values in scores.values())
    tokens = sum(t.usage.total_tokens for t in trajectories)
    uncached = sum(t.usage.prompt_tokens + t.usage.sampled_tokens for t in trajectories)
    stops = Counter(str(t.stop) for t in trajectories)
    summary: Json = {
        "n": len(tasks),
        "k": max(len(values) for values in scores.values()),
        "accuracy": round(overall.value, 4),
        "ci95": [round(overall.low, 4), round(overall.high, 4)],
        "f1": round(f1_sum / n, 4),
        "tokens_per_task": round(tokens / n, 1),
        "tokens_per_task_uncached": round(uncached / n, 1),
        "tokens_per_solved": round(tokens / solved, 1) if solved else None,
        "sampled_tokens_per_task": round(sum(t.usage.sampled_tokens for t in trajectories) / n, 1),
        "tool_calls_per_task": round(sum(t.usage.tool_calls for t in trajectories) / n, 2),
        "malformed_per_task": round(sum(t.usage.malformed for t in trajectories) / n, 3),
        "stop_reasons": dict(sorted(stops.items())),
        "truncated": sum(t.truncated for t in trajectories),
        "malformed": stops[StopReason.MALFORMED.value],
        "environment": sum(t.failed_outside for t in trajectories),
    }
    if len(parts := mean_parts(scored)) > 1:
        summary["parts"] = parts
    for field in ("family", "hops", "phrasing_heldout"):
        groups = _grouped(tasks, means, field)
        if groups:
            summary[f"by_{field}"] = groups
    return summary, records


def _check_judged(trajectories: Sequence[Trajectory], scored: Sequence[Scored]) -> None:
    """What nobody could judge is no 0, and leaving it out would change the denominator."""
    unknown = [t for t, found in zip(trajectories, scored, strict=True) if found.score is None]
    if unknown:
        why = next(found.reason for found in scored if found.score is None)
        raise RecordError(
            f"task {unknown[0].task_id}: the reward cannot judge it ({why or 'no gold answer?'}), "
            f"and so it is with {len(unknown)} of {len(scored)} rollouts. "
            "They are kept: put it right and give the same command again."
        )


def _grouped(tasks: Iterable[Task], means: dict[str, float], field: str) -> Json:
    values: dict[str, list[float]] = defaultdict(list)
    for task in tasks:
        if field in task.meta:
            values[str(task.meta[field])].append(means[task.id])
    return {name: _brief(estimate(scores)) for name, scores in sorted(values.items())}


def _brief(value: Estimate) -> Json:
    return {
        "n": value.n,
        "accuracy": round(value.value, 4),
        "ci95": [round(value.low, 4), round(value.high, 4)],
    }


def save_summary(directory: Path, summary: Json, records: Sequence[Json]) -> None:
    write_jsonl(directory / "scores.jsonl", records)
    write_atomic(directory / "summary.json", json.dumps(summary, indent=2) + "\n")


def load_scores(directory: Path) -> dict[str, float]:
    """Mean score per task of a finished evaluation."""
    path = directory / "scores.jsonl"
    if not path.is_file():
        raise UsageError(f"{directory}: no scores.jsonl; is it the --out of a finished `coa eval`?")
    values: dict[str, list[float]] = defaultdict(list)
    for _, record in read_jsonl(path):
        values[record["task_id"]].append(float(record["score"]))
    return {task_id: sum(v) / len(v) for task_id, v in values.items()}


def _reward_of(directory: Path) -> str:
    path = directory / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return str(summary.get("reward", "exact"))


def compare(directories: Sequence[Path]) -> Json:
    """Each later run against the first, paired by task; tasks must be the same."""
    runs = [load_scores(directory) for directory in directories]
    first, names = runs[0], [str(directory) for directory in directories]
    rewards = {_reward_of(directory): str(directory) for directory in directories}
    if len(rewards) > 1:
        listed = ", ".join(f"{reward} ({name})" for reward, name in rewards.items())
        raise UsageError(f"the runs have different rewards: {listed}; compare like with like.")
    rows: list[Json] = []
    for name, scores in zip(names, runs, strict=True):
        if scores.keys() != first.keys():
            only = len(scores.keys() ^ first.keys())
            raise UsageError(
                f"{name} and {names[0]} differ in {only} tasks; compare runs of the same task file."
            )
        row: Json = {"run": name, **_brief(estimate(list(scores.values())))}
        if scores is not first:
            order = sorted(first)
            pair = paired([first[i] for i in order], [scores[i] for i in order])
            row["difference"] = round(pair.difference.value, 4)
            row["difference_ci95"] = [round(pair.difference.low, 4), round(pair.difference.high, 4)]
            row |= {"wins": pair.wins, "losses": pair.losses, "ties": pair.ties}
            row["p_value"] = round(pair.p_value, 5)
        rows.append(row)
    return {"n": len(first), "baseline": names[0], "runs": rows}
