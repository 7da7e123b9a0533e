"""Evaluation: what attempts are worth, with a fixed denominator, and which of two is better.

The rollouts are `coa.rollouts`; controls use the same loop with tools that withhold what they know
or return another page.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from coa.distill.chain import Chain
from coa.errors import RecordError, UsageError
from coa.estimates import Estimate, estimate
from coa.evaluate.comparing import Measured, against
from coa.evaluate.samples import OWN_CHECK, Sample, own_check, sample_figures
from coa.evaluate.spending import Tariff, calls_by_agent, money
from coa.rewards import Scored, f1, mean_parts
from coa.runs import MANIFEST, Json, read_records, write_atomic, write_jsonl
from coa.tasks.task import Task
from coa.trajectory import StopReason, Trajectory, Usage

SCORES, SUMMARY = "scores.jsonl", "summary.json"
GroupsOf = Callable[[Task], Mapping[str, str]]
"""What the results of a task are grouped by, as its environment declares it."""


def summarise(
    tasks: Sequence[Task],
    trajectories: Sequence[Trajectory],
    scored: Sequence[Scored],
    *,
    ratings: Sequence[float | None] | None = None,
    chosen_by: str = OWN_CHECK,
    tariff: Tariff | None = None,
    groups_of: GroupsOf = lambda task: {},
) -> tuple[Json, list[Json]]:
    """The evaluation object and one score record per trajectory, given what the reward said.

    Every task counts. With several samples a task's accuracy is the mean over them. `ratings` are
    what `best_of` goes by and `chosen_by` names them; without, the models' own checks.
    """
    _check_judged(trajectories, scored)
    by_id = {task.id: task for task in tasks}
    samples: dict[str, list[Sample]] = {task.id: [] for task in tasks}
    records: list[Json] = []
    if ratings is None:
        ratings = [own_check(Chain.read(trajectory)) for trajectory in trajectories]
    for trajectory, found, rating in zip(trajectories, scored, ratings, strict=True):
        assert found.score is not None, trajectory.task_id
        sample = Sample(trajectory, found.score, rating)
        samples[trajectory.task_id].append(sample)
        task = by_id[trajectory.task_id]
        records.append(_record(task, sample, found, groups_of(task)))
    means = {name: sum(s.score for s in own) / max(1, len(own)) for name, own in samples.items()}
    overall = estimate(list(means.values()))
    solved = sum(sample.score for own in samples.values() for sample in own)
    summary: Json = {
        "n": len(tasks),
        "k": max(map(len, samples.values())),
        "accuracy": round(overall.value, 4),
        "ci95": [round(overall.low, 4), round(overall.high, 4)],
        **sample_figures(tasks, samples, chosen_by),
        **_overlap(by_id, trajectories),
        **_spent(trajectories, solved),
    }
    if tariff is not None:
        summary["money"] = money(trajectories, solved, tariff)
    if len(parts := mean_parts(scored)) > 1:
        summary["parts"] = parts
    for field, groups in _grouped(tasks, means, groups_of).items():
        summary[f"by_{field}"] = groups
    return summary, records


def _overlap(by_id: Mapping[str, Task], trajectories: Sequence[Trajectory]) -> Json:
    """Token F1 over the tasks that have gold answers; of tests and calls there is none."""
    judged = [f1(by_id[trajectory.task_id], trajectory) for trajectory in trajectories]
    found = [score for score in judged if score is not None]
    return {"f1": round(sum(found) / len(found), 4)} if found else {}


def _record(task: Task, sample: Sample, found: Scored, groups: Mapping[str, str]) -> Json:
    """A line of scores.jsonl."""
    trajectory = sample.trajectory
    record: Json = {"task_id": task.id, "sample": trajectory.sample, "score": sample.score}
    record |= {"answer": trajectory.answer, "stop": trajectory.stop}
    if sample.rating is not None:
        record["rating"] = sample.rating
    if groups:
        record["groups"] = dict(groups)
    if len(found.parts) > 1 or found.reason:  # otherwise they say nothing new
        record["parts"] = found.to_json()["parts"]
    return record


def _spent(trajectories: Sequence[Trajectory], solved: float) -> Json:
    """What rollouts took and how they ended; `tokens` count with a perfect cache."""
    n = max(1, len(trajectories))
    tokens = sum(t.usage.total_tokens for t in trajectories)
    uncached = sum(t.usage.prompt_tokens + t.usage.sampled_tokens for t in trajectories)
    stops = Counter(str(t.stop) for t in trajectories)
    return {
        "tokens_per_task": round(tokens / n, 1),
        "tokens_per_task_uncached": round(uncached / n, 1),
        "tokens_per_solved": round(tokens / solved, 1) if solved else None,
        "sampled_tokens_per_task": round(sum(t.usage.sampled_tokens for t in trajectories) / n, 1),
        "tool_calls_per_task": round(sum(t.usage.tool_calls for t in trajectories) / n, 2),
        "tool_calls_by_agent": calls_by_agent(trajectories),
        "malformed_per_task": round(sum(t.usage.malformed for t in trajectories) / n, 3),
        "stop_reasons": dict(sorted(stops.items())),
        "truncated": sum(t.truncated for t in trajectories),
        "malformed": stops[StopReason.MALFORMED.value],
        "environment": sum(t.failed_outside for t in trajectories),
    }


def _check_judged(trajectories: Sequence[Trajectory], scored: Sequence[Scored]) -> None:
    """What nobody could judge is no 0, and leaving it out would change the denominator."""
    unknown = [t for t, found in zip(trajectories, scored, strict=True) if found.score is None]
    if unknown:
        why = next(found.reason for found in scored if found.score is None)
        raise RecordError(
            f"task {unknown[0].task_id}: the reward cannot judge it ({why or 'no gold answer?'}), "
            f"and so it is with {len(unknown)} of {len(scored)} rollouts. They are kept: where "
            "what failed works again (a judge, a sandbox), the same command asks it once more. "
            "Other gold or another reward needs another --out."
        )


def _grouped(tasks: Iterable[Task], means: dict[str, float], groups_of: GroupsOf) -> Json:
    """Estimates by field and group, in the order in which fields first appear."""
    values: dict[str, dict[str, list[float]]] = {}
    for task in tasks:
        for field, name in groups_of(task).items():
            values.setdefault(field, defaultdict(list))[name].append(means[task.id])
    return {
        field: {name: _brief(estimate(scores)) for name, scores in sorted(groups.items())}
        for field, groups in values.items()
    }


def _brief(value: Estimate) -> Json:
    return {
        "n": value.n,
        "accuracy": round(value.value, 4),
        "ci95": [round(value.low, 4), round(value.high, 4)],
    }


def save_summary(directory: Path, summary: Json, records: Sequence[Json]) -> None:
    """The summary comes last: where it is, the evaluation is finished."""
    write_jsonl(directory / SCORES, records)
    write_atomic(directory / SUMMARY, json.dumps(summary, indent=2) + "\n")


# -- finished evaluations ---------------------------------------------------------------------


def load_measured(directory: Path) -> Measured:
    """What a finished evaluation found, by task; tokens only where its trajectories are kept."""
    summary = _finished(directory)
    scores: dict[str, list[float]] = defaultdict(list)
    families: dict[str, str] = {}
    for name, score, family in read_records(directory / SCORES, _scored_line):
        scores[name].append(score)
        if family is not None:
            families[name] = family
    tokens: dict[str, list[int]] = defaultdict(list)
    if (chains := directory / "trajectories.jsonl").is_file():
        for name, usage in read_records(chains, lambda r: (r["task_id"], Usage(**r["usage"]))):
            tokens[name].append(usage.total_tokens)
    path = directory / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    judged_by = (manifest.get("recipe") or {}).get("rewards")
    return Measured(
        str(directory),
        str(summary.get("reward", "exact")),
        scores,
        {name: sum(found) / len(found) for name, found in tokens.items()},
        families,
        str((manifest.get("inputs") or {}).get("tasks", "")),
        json.dumps(judged_by, sort_keys=True) if judged_by else "",
    )


def _scored_line(record: Json) -> tuple[str, float, str | None]:
    return record["task_id"], float(record["score"]), record.get("groups", {}).get("family")


def _finished(directory: Path) -> Json:
    """The summary of an evaluation, or why there is none."""
    manifest, summary = directory / MANIFEST, directory / SUMMARY
    if manifest.is_file() and not summary.is_file():
        stage = json.loads(manifest.read_text(encoding="utf-8")).get("stage")
        if stage != "eval":
            raise UsageError(f"{directory}: is a run of {stage!r}, expected one of `coa eval`.")
        chains = directory / "trajectories.jsonl"
        done = chains.read_bytes().count(b"\n") if chains.is_file() else 0
        raise UsageError(
            f"{directory}: the evaluation is not finished, it has {done} rollouts so far. "
            "Give the same `coa eval` again, it continues."
        )
    if not (directory / SCORES).is_file():
        raise UsageError(f"{directory}: no {SCORES}; is it the --out of a finished `coa eval`?")
    found: Json = json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {}
    return found


def load_alike(directories: Sequence[Path]) -> list[Measured]:
    """Finished evaluations of the same tasks by the same reward."""
    runs = [load_measured(directory) for directory in directories]
    rewards = {run.reward: run.name for run in runs}
    if len(rewards) > 1:
        listed = ", ".join(f"{reward} ({name})" for reward, name in rewards.items())
        raise UsageError(f"the runs have different rewards: {listed}; compare like with like.")
    first = runs[0]
    for run in runs[1:]:
        if only := len(run.scores.keys() ^ first.scores.keys()):
            raise UsageError(
                f"{run.name} and {first.name} differ in {only} tasks; "
                "compare runs of the same task file."
            )
        if run.judged_by != first.judged_by:
            raise UsageError(
                f"{run.name} and {first.name} have the reward {run.reward!r} with other settings "
                "(its judge, for one); compare like with like."
            )
        known = run.fingerprint and first.fingerprint  # of tasks in their order
        same_order = list(run.scores) == list(first.scores)
        if known and same_order and run.fingerprint != first.fingerprint:
            raise UsageError(
                f"{run.name} and {first.name} have tasks of the same ids with other contents, "
                "other gold answers for one; evaluate both on the same task file."
            )
    return runs


def compare(directories: Sequence[Path]) -> Json:
    """Each later run against the first, paired by task; tasks must be the same."""
    runs = load_alike(directories)
    first = runs[0]
    rows: list[Json] = []
    for run in runs:
        row: Json = {"run": run.name, **_brief(estimate(run.means))}
        if run.tokens:
            spent, solved = sum(run.tokens.values()), sum(run.means)
            row["tokens_per_task"] = round(spent / len(run.tokens), 1)
            row["tokens_per_solved"] = round(spent / solved, 1) if solved else None
        rows.append(row | (against(first, run) if run is not first else {}))
    return {"n": len(first.scores), "baseline": first.name, "runs": rows}
