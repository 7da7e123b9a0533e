"""Run directories for tests of reports: the files that stages write, from small chains by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coa.evaluation.run import save_summary, summarise
from coa.io.runs import Json, Run, write_jsonl
from coa.rewards import Scored, exact
from coa.tasks import Task, TaskSet
from coa.trajectory import StopReason, Trajectory, Usage, save_trajectories
from coa.view.report import write_report
from made_chains import GOOD, PLAN, chain
from made_pages import Page, read

LOOK, AGAIN = ("wiki_search", " capital of Peru"), ("wiki_search", " Peru")
WRONG, LIMA = ("answer", " Cusco"), ("answer", " Lima")
AT_ONCE = chain([PLAN, LOOK, LIMA])
RECOVERED = chain([PLAN, LOOK, ("reflection", f" {GOOD}"), PLAN, AGAIN, LIMA])
MISTAKEN = chain([PLAN, LOOK, WRONG])
CUT = chain([PLAN, LOOK, AGAIN])
STUCK = chain([PLAN], stop=StopReason.MALFORMED)
LOST = chain([PLAN, LOOK], stop=StopReason.TOOL_FAILED, error="the site is gone")


def tasks(n: int) -> TaskSet:
    return TaskSet(
        tuple(
            Task(f"Question {at}?", ("Lima",), f"t{at}", {"family": f"family_{at % 2}", "hops": 2})
            for at in range(n)
        )
    )


def attempt(task: Task, like: Trajectory, sample: int = 0) -> Trajectory:
    """A chain of a task, as another one went."""
    made = Trajectory.from_json(like.to_json())
    made.task_id, made.question, made.sample = task.id, task.question, sample
    made.usage = Usage(prompt_tokens=100 + sample, sampled_tokens=50, tool_calls=1, turns=2)
    return made


def evaluated(
    directory: Path,
    given: TaskSet,
    made: Sequence[Trajectory],
    model: str = "m",
    observations: str = "real",
    **more: Any,
) -> Path:
    """The directory of a finished evaluation, with the figures that `coa eval` makes."""
    directory.mkdir(parents=True)
    given.save(directory.parent / "tasks.jsonl")
    recipe = {"model": model, "observations": observations}
    inputs = {"tasks": given.fingerprint()}
    with Run.open(directory, "eval", recipe, inputs, seed=3) as run:
        run.timing({"event": "finished"})
    save_trajectories(directory / "trajectories.jsonl", made)
    by_id = {task.id: task for task in given}
    scored = [Scored(exact(by_id[each.task_id], each)) for each in made]
    summary, records = summarise(given, made, scored, groups_of=_groups_of)
    named = {"model": model, "tasks": str(directory.parent / "tasks.jsonl"), "reward": "exact"}
    save_summary(directory, named | summary | more, records)
    return directory


def _groups_of(task: Task) -> dict[str, str]:
    """By what the tasks say of themselves, as environments declare it."""
    return {key: str(value) for key, value in task.meta.items()}


def run_of(directory: Path, *likes: Trajectory, **more: Any) -> Path:
    """An evaluation with one task for each of these chains."""
    given = tasks(len(likes))
    made = [attempt(task, like) for task, like in zip(given, likes, strict=True)]
    return evaluated(directory, given, made, **more)


def trained(directory: Path, stage: str = "sft", updates: int = 20, finished: bool = True) -> Path:
    """The directory of a training."""
    recipe: Json = {"model": "base-model", "lr": 0.001}
    with Run.open(directory, stage, recipe if stage == "sft" else {"rl": recipe}, {}, 0) as run:
        for update in range(1, updates + 1):
            record: Json = {"update": update, "loss": math.exp(-update / 5), "lr": 0.001}
            if stage == "rl":
                record |= {"reward": update / 40, "pass_rate": 0.5, "entropy": 0.2}
                record |= {"length_mean": 100, "sampler_gap": 0.01}
            run.metrics(record)
        if stage == "rl":
            found = {"eval_accuracy": 0.5, "eval_low": 0.4, "eval_high": 0.6, "eval_n": 60}
            run.metrics({"update": updates, **found})
        if finished:
            run.timing({"event": "finished"})
    return directory


def distilled(directory: Path) -> Path:
    """What `coa distill` leaves of its funnel."""
    stages = [
        {"stage": "quality", "entered": 10, "left": 8, "reasons": {"wrong answer": 2}},
        {"stage": "correction", "entered": 8, "left": 9, "repeated": 1, "reasons": {"again": 1}},
    ]
    directory.mkdir(parents=True)
    funnel = {"episodes": 10, "kept": 9, "stages": stages}
    (directory / "funnel.json").write_text(json.dumps(funnel))
    return directory


def speedrun(directory: Path) -> Path:
    """A directory with everything: funnel, training, two evaluations, and a teacher."""
    with Run.open(directory, "speedrun", {"sft": {"model": "base-model"}}, {}, seed=0):
        pass
    distilled(directory / "distilled")
    trained(directory / "sft")
    run_of(directory / "eval-base-new", *[STUCK] * 4)
    run_of(directory / "eval-sft-new", AT_ONCE, RECOVERED, MISTAKEN, AT_ONCE, model="m+adapter")
    team: Json = {"n": 4, "accuracy": 1.0, "ci95": [0.51, 1.0], "tokens_per_task": 2000.0}
    (directory / "eval-team-new").mkdir()
    (directory / "eval-team-new" / "team.json").write_text(json.dumps(team))
    rows: list[Json] = [
        {"name": "team of experts", "run": "elsewhere/eval-team-new", "on": "new", **team},
        {"name": "the base", "run": "elsewhere/eval-base-new", "on": "new"},
        {"name": "the trained", "run": "elsewhere/eval-sft-new", "on": "new"},
    ]
    (directory / "result.json").write_text(json.dumps({"rows": rows}))
    return directory


def report(out: Path, *directories: Path, **options: Any) -> Page:
    """The report of these directories, taken apart again."""
    write_report(directories, out, **options)
    return read(out)


def damage(path: Path, record: Json) -> None:
    """Write something else into a file of one object."""
    path.write_text(json.dumps(record))


def lines(path: Path, *records: Json) -> Path:
    write_jsonl(path, records)
    return path
