"""The whole way in one command: record, distil, fine-tune, improve by RL, measure, report.

Each stage writes into its own folder of the run directory. What is done is skipped and what was
interrupted continues, because every stage by itself does; so a long recipe may take several
calls. Trainer and engine follow one another: only RL has both in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from coa.config import to_json, without_speed
from coa.distill.stage import DistillSettings, run_distillation
from coa.engines.lora import MANIFEST
from coa.engines.store import BASE, identity, is_shipped, pull_missing, resolve
from coa.errors import ConfigError
from coa.pages.report import write_report
from coa.progress import duration
from coa.runs import Json, Run, read_object, write_atomic
from coa.speedrun.measure import measure_all, task_file
from coa.speedrun.questions import answer_questions
from coa.speedrun.recipe import STAGES, SpeedrunRecipe, TaskPart, Who, read_speedrun_recipe
from coa.speedrun.stages import Note, Stages
from coa.tasks.task import TaskSet
from coa.teachers.stage import Recording, run_recording
from coa.train.rl_stage import among, run_rl
from coa.train.stage import train_on
from coa.trajectory import Trajectory

TASKS, RL_TASKS, CHECK_TASKS = (f"tasks-{stage}.jsonl" for stage in STAGES)


def run_speedrun(
    directory: Path,
    recipe_path: Path | None,
    overrides: Sequence[str],
    note: Note,
    *,
    full: bool = False,
    questions: bool = False,
) -> Json:
    """Run every stage that is not done yet; returns what `result.json` holds.

    `full` starts from the recipe of AFM-135M. With `questions` a new run begins with the shipped
    model, when there is one, answering three questions on the terminal.
    """
    recipe = read_speedrun_recipe(recipe_path, overrides, full=full)
    source = resolve(recipe.sft.model)
    if source.kind != "local":
        raise ConfigError(f"sft.model is {source.ref!r}, expected one whose weights are here.")
    base = source.base
    tasks = _make_tasks(recipe)  # first: without a directory, what is wrong can be mended
    pull_missing(base, note)
    inputs = _inputs(directory, tasks, recipe.sft.model)
    settings = without_speed(to_json(recipe))
    seed = recipe.sft.seed
    with Run.open(directory, "speedrun", settings, inputs, seed, counting=without_speed) as run:
        stages = Stages(run, note)
        for name, made in tasks.items():
            if not (directory / name).is_file():
                made.save(directory / name)
        if questions and not run.resumed and base == BASE and is_shipped():
            with stages.timed("three questions"):
                answer_questions(note)
        for line in recipe.plan():
            note(line)
        models: dict[Who, str] = {"base": base}
        if recipe.tasks:
            models["sft"] = f"{base}+{_fine_tune(recipe, stages)}"
        if recipe.rl_tasks:
            start = models.get("sft", recipe.sft.model)
            models["rl"] = f"{base}+{_improve(recipe, start, stages)}"
        measured = measure_all(recipe, models, stages)
        report = directory / "report.html"
        result = {"out": str(directory), "model": [*models.values()][-1], "report": str(report)}
        result |= measured
        write_atomic(directory / "result.json", json.dumps(result, indent=2) + "\n")
        with stages.timed("report"):
            write_report([directory], report)
        note(f"{duration(stages.seconds)} in this call; everything is in {directory}")
    return result


def _inputs(directory: Path, tasks: Mapping[str, TaskSet], model: str) -> dict[str, str]:
    """Fingerprints of the task files and hashes of the weights that everything begins with."""
    manifest = directory / MANIFEST
    if manifest.is_file() and not read_object(manifest, "Delete the run directory.").get("inputs"):
        return {}  # a run from before they were kept goes on as it began
    return {name: made.fingerprint() for name, made in tasks.items()} | identity(model)


def _make_tasks(recipe: SpeedrunRecipe) -> dict[str, TaskSet]:
    """All task files by name."""
    parts: dict[str, Sequence[TaskPart]] = {
        TASKS: recipe.tasks,
        RL_TASKS: recipe.rl_tasks,
        CHECK_TASKS: recipe.check_tasks,
    }
    parts |= {task_file(Path(), part).name: [part] for part in recipe.measure}
    made = {  # parts may overlap: what two of them ask for is there once
        name: list({task.id: task for part in own for task in part.make()}.values())
        for name, own in parts.items()
    }
    for part in recipe.measure:
        measured = made[task_file(Path(), part).name]
        if seen := among(measured, [*made[TASKS], *made[RL_TASKS]]):
            raise ConfigError(
                f"measure {part.name!r}: {len(seen)} of its {len(measured)} tasks would be trained "
                f"on, the first is {seen[0].id}. Choose another split or seed."
            )
    practised = {task.id for task in among(made[CHECK_TASKS], made[RL_TASKS])}
    made[CHECK_TASKS] = [task for task in made[CHECK_TASKS] if task.id not in practised]
    if recipe.check_tasks and not made[CHECK_TASKS]:
        raise ConfigError(
            "check_tasks: RL trains on every one of them. Choose another world or seed."
        )
    return {name: TaskSet(tuple(tasks), name) for name, tasks in made.items() if tasks}


def _fine_tune(recipe: SpeedrunRecipe, stages: Stages) -> Path:
    """Distil what the teacher does and train on it."""
    adapter = stages.root / "sft" / "adapter"
    if (adapter / MANIFEST).is_file():
        stages.note(f"== fine-tune: {adapter} is finished already")
        return adapter
    with stages.timed("record and distil"):
        trajectories = _distil(recipe, stages)
    with stages.timed("fine-tune"):
        return train_on(trajectories, recipe.sft, stages.root / "sft", stages.note)


def _distil(recipe: SpeedrunRecipe, stages: Stages) -> list[Trajectory]:
    """Chains of all sets, each in the grammar of its set, in one file."""
    tasks, episodes = stages.root / TASKS, stages.root / "episodes.jsonl"
    options = {"error_rate": recipe.teacher.error_rate}
    run_recording(Recording(tasks=tasks, options=options, seed=recipe.teacher.seed), episodes)
    out = stages.root / "distilled"
    distilled = run_distillation(episodes, out, tasks, DistillSettings(filter=recipe.filter))
    stages.note(f"   {len(distilled.kept)} trajectories of {distilled.funnel['episodes']} episodes")
    return distilled.kept


def _improve(recipe: SpeedrunRecipe, start: str, stages: Stages) -> Path:
    """Reinforcement learning from where fine-tuning ended."""
    out = stages.root / "rl"
    adapter = out / "adapter"
    if (adapter / MANIFEST).is_file():
        stages.note(f"== improve by RL: {adapter} is finished already")
        return adapter
    check_tasks = stages.root / CHECK_TASKS if recipe.check_tasks else None
    with stages.timed("improve by RL"):
        asked = recipe.rl_recipe(start, stages.root / RL_TASKS, check_tasks, out)
        return run_rl(asked, note=stages.note).adapter
