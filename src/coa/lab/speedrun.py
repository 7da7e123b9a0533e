"""The whole way in one command: record, distil, fine-tune, improve by RL, measure, report.

Each stage writes into its own folder of the run directory. What is done is skipped and what was
interrupted continues, because every stage by itself does; so a long recipe may take several
calls. Trainer and engine follow one another: only RL has both in memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from coa.asking import answer
from coa.distillation.dataset import Distilling, DistillSettings, run_distillation
from coa.engines import load_engine
from coa.engines.base import Engine
from coa.environment import ToolSettings, load_environment, open_environments
from coa.environments import ATLAS_WEB, DEFAULT_SET, GYM, make_tasks
from coa.errors import ConfigError, MissingExtra, UsageError
from coa.evaluation.compare import SUMMARY, compare
from coa.evaluation.run import run_eval
from coa.io.progress import duration
from coa.io.runs import TIMINGS, Json, Run, read_jsonl, read_object, read_records, write_atomic
from coa.io.settings import to_json, without_speed
from coa.lab.speedrun_recipe import (
    STAGES,
    EvalPart,
    MeasuredPart,
    SpeedrunRecipe,
    TaskPart,
    Who,
    read_speedrun_recipe,
)
from coa.loop import Budget, Decoding
from coa.models.bases import BASE
from coa.models.codec import Codec
from coa.models.references import (
    OURS,
    identity,
    listed,
    model_folder,
    pull_missing,
    resolve,
    trained_on,
)
from coa.models.weights import MANIFEST
from coa.recording.episode import Episode, ToolUse
from coa.recording.record import Recording, run_recording
from coa.rewards import RewardSettings, Scored
from coa.rollouts import choose_environments, choose_prompt
from coa.sandbox import SandboxError
from coa.statistics import estimate
from coa.tasks import Task, TaskSet
from coa.train.rl_stage import among, run_rl
from coa.train.sft import train_on
from coa.trajectory import StopReason, Trajectory, load_trajectories
from coa.view.report import write_report
from coa.view.terminal import LABEL, console, harmless, percent, print_chain, significance

if TYPE_CHECKING:
    from rich.console import Console


# ------------------------------------------------------------------------------------------------
# A speedrun on the terminal: the table, what each stage gained, and chains to read.
# ------------------------------------------------------------------------------------------------


NAMES = {
    "team": "team of experts",
    "base": "untrained",
    "sft": "fine-tuned",
    "rl": "fine-tuned, then RL",
    "longer": "fine-tuned for longer",
    "all": "tuned on all chains",
}
CHAINS = 3


def print_speedrun(out: Console, result: Json) -> None:
    """Accuracy and cost by tasks and by model, paired differences, and chains of the last model."""
    columns = f"{'n':>5}{'calls':>7}{'tokens/task':>13}{'uncached':>10}"
    out.print(f"{'':<24}{'accuracy, 95% interval':<24}{columns}")
    for name, rows in groupby(result["rows"], key=lambda row: row["on"]):
        out.print(name, style="bold")
        for row in rows:
            _print_row(out, row)
        for gain in result["gains"]:
            if gain["on"] == name:
                out.print(_gain_line(gain), style="dim")
    out.print()
    _print_chains(out, result)
    if report := result.get("report"):
        out.print(f"report: {report}")
    question = "What is the capital of the country where Osaka is located?"
    out.print(f'now try: {Path(sys.argv[0])} ask --model {result["model"]} "{question}"')


def _print_row(out: Console, row: Json) -> None:
    accuracy = percent(row["accuracy"], row["ci95"])
    out.print(
        f"  {NAMES[row['who']]:<22}{accuracy:<24}{row['n']:>5}{row['tool_calls_per_task']:>7}"
        f"{row['tokens_per_task']:>13.0f}{row['tokens_per_task_uncached']:>10.0f}"
    )
    phrasings = row.get("by_phrasing_heldout", {})
    if len(phrasings) > 1 and row["who"] not in ("team", "base"):
        new = phrasings["True"]
        figure = percent(new["accuracy"], new["ci95"])
        out.print(f"  {'  in new phrasings':<22}{figure:<24}{new['n']:>5}", style="dim")


def _gain_line(gain: Json) -> str:
    low, high = gain["difference_ci95"]
    return (
        f"  {NAMES[gain['who']]} against {NAMES[gain['against']]}: {100 * gain['difference']:+.1f} "
        f"points [{100 * low:+.1f}, {100 * high:+.1f}], wins {gain['wins']}, losses "
        f"{gain['losses']}, {significance(gain['p_value'])}"
    )


def _print_chains(out: Console, result: Json) -> None:
    """The first tasks of the first measurement, by the last model: not chosen."""
    rows = [row for row in result["rows"] if row["who"] in ("sft", "rl")]
    measured = [row for row in rows if row["on"] == rows[0]["on"]]
    for trajectory in load_trajectories(Path(measured[-1]["run"]))[:CHAINS] if measured else ():
        print_chain(out, trajectory)
        out.print()


# ------------------------------------------------------------------------------------------------
# The shipped model at work before anything is trained: a held-out question of each kind.
#
# One engine answers all; the chains are shown as they are written, the right answer after each.
# ------------------------------------------------------------------------------------------------


ASKED = ((DEFAULT_SET, "heldout_entity"), (ATLAS_WEB, "heldout_entity"), (GYM, "heldout_seed"))
SEED = 12
"""Decides which questions; chosen before any answer to them was looked at."""
CONTEXT = 3072
BUDGET = Budget(turns=10, turn_tokens=512, context=CONTEXT)


def answer_questions(
    note: Note,
    model: str = OURS,
    tasks: Sequence[Task] = (),
    budget: Budget = BUDGET,
) -> list[Trajectory]:
    """Answer tasks on the terminal, by default one of each kind that the model knows and this
    machine can run."""
    chosen = tasks or list(_one_of_each_kind(note, model))
    try:
        return asyncio.run(_answer_all(chosen, model, budget))
    except SandboxError as reason:  # it is opened before the first question
        note(f"no question for programs: {reason}")
        without = [task for task in chosen if task.meta.get("set") != GYM]
        return asyncio.run(_answer_all(without, model, budget))


def _one_of_each_kind(note: Note, model: str) -> Iterator[Task]:
    known = listed(trained_on(model).get("grammar"))
    for name, split in ASKED:
        if load_environment(name).value().name not in known:
            continue
        try:
            yield make_tasks(name, split, 1, SEED)[0]
        except MissingExtra as reason:
            note(f"no question of {name}: {reason}")


async def _answer_all(tasks: Sequence[Task], model: str, budget: Budget) -> list[Trajectory]:
    if not tasks:
        return []
    answered, out = [], console()
    environments, known = choose_environments((), TaskSet(tuple(tasks)), model=model)
    decoding = Decoding(prompt=choose_prompt("auto", model))
    async with open_environments(environments, known) as opened:
        engine = load_engine(model, slots=1, context=CONTEXT)
        try:
            for task in known:
                out.print(f"{'question':>{LABEL}}  {harmless(task.question)}", style="bold")
                answered.append(await answer(task, engine, opened, decoding, budget, out))
                right = harmless(" | ".join(task.answers))  # which nobody knew until this line
                out.print(f"{'right is':>{LABEL}}  {right}\n", style="bold")
        finally:
            await engine.close()
    return answered


Note = Callable[[str], None]


class Stages:
    def __init__(self, run: Run, note: Note) -> None:
        self.root: Path = run.root
        self.note = note
        self.seconds = 0.0
        """Of the stages of this call."""
        self._run = run

    def taken(self, what: str) -> float:
        """Seconds of a stage, over all calls."""
        records = (record for _, record in read_jsonl(self.root / TIMINGS))
        return float(sum(each["seconds"] for each in records if each.get("stage") == what))

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        self.note(f"== {what}")
        begun = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begun
            self.seconds += seconds
            self._run.timing({"stage": what, "seconds": round(seconds, 1)})
            gc.collect()  # a policy is full of cycles, and the next stage loads a model of its own
        self.note(f"   {what}: {duration(seconds)}")


# ------------------------------------------------------------------------------------------------
# The measurements: the team and each model on held-out tasks, and what was gained. Each leaves a
# directory `eval-WHO-NAME`; one that has its summary is not done again.
# ------------------------------------------------------------------------------------------------


TEAM = "team.json"
"""What a measurement of the team ends with, which is no run of a model."""


def measure_all(recipe: SpeedrunRecipe, models: Mapping[Who, str], stages: Stages) -> Json:
    """Rows by measurement, in the recipe's order, and the paired differences between models."""
    root = stages.root
    asked = [(part, who) for part in recipe.measure for who in recipe.measured(part)]
    left = [(part, who) for part, who in asked if not summary_file(root, who, part).is_file()]
    for part, who in left:
        if who == "team":
            with stages.timed(f"measure the team: {part.name}"):
                _measure_team(recipe, part, root, models["base"])
    for who, model in models.items():
        own = [part for part, measured in left if measured == who]
        if own:
            with recipe.eval.loaded(model) as engine:
                for part in own:
                    with stages.timed(f"measure {who}: {part.name}"):
                        _measure_model(recipe.eval, model, part, who, root, engine)
    rows = [_row(root, who, part) for part, who in asked]
    return {"rows": rows, "gains": list(_gains(recipe, root))}


def _row(root: Path, who: Who, part: MeasuredPart) -> Json:
    path = summary_file(root, who, part)
    summary: Json = json.loads(path.read_text(encoding="utf-8"))
    row = {"name": f"{who}, {part.name}", "who": who, "on": part.name, "run": str(path.parent)}
    return row | summary


def task_file(root: Path, part: MeasuredPart) -> Path:
    return root / f"tasks-{part.slug}.jsonl"


def eval_folder(root: Path, who: Who, part: MeasuredPart) -> Path:
    return root / f"eval-{who}-{part.slug}"


def summary_file(root: Path, who: Who, part: MeasuredPart) -> Path:
    return eval_folder(root, who, part) / (TEAM if who == "team" else SUMMARY)


def _measure_model(
    how: EvalPart, model: str, part: MeasuredPart, who: Who, root: Path, engine: Engine
) -> None:
    settings = how.settings(model, task_file(root, part), tools=ToolSettings(part.observations))
    run_eval(settings, eval_folder(root, who, part), engine=engine)


def _measure_team(recipe: SpeedrunRecipe, part: MeasuredPart, root: Path, base: str) -> None:
    """The teacher on the same tasks, its tokens counted with the student's tokenizer."""
    path, out = task_file(root, part), summary_file(root, "team", part)
    recorded = out.with_name("episodes.jsonl")
    options = {"error_rate": recipe.teacher.error_rate}
    run_recording(Recording(tasks=path, options=options, seed=recipe.teacher.seed), recorded)
    tasks, episodes = TaskSet.load(path), read_records(recorded, Episode.from_json)
    scores = [each.score or 0.0 for each in asyncio.run(_judged(tasks, episodes))]
    codec = Codec.from_folder(model_folder(resolve(base)))
    tokens = [episode.count_tokens(lambda text: len(codec.encode(text))) for episode in episodes]
    calls = sum(isinstance(event, ToolUse) for episode in episodes for event in episode.events)
    result, n, total = estimate(scores), len(tasks), sum(count.total_cached for count in tokens)
    summary: Json = {
        "n": n,
        "accuracy": round(result.value, 4),
        "ci95": [round(result.low, 4), round(result.high, 4)],
        "tokens_per_task": round(total / n, 1),
        "tokens_per_task_uncached": round(sum(count.total for count in tokens) / n, 1),
        "tokens_per_solved": round(total / sum(scores), 1) if any(scores) else None,
        "tool_calls_per_task": round(calls / n, 2),
    }
    write_atomic(out, json.dumps(summary, indent=2) + "\n")


async def _judged(tasks: TaskSet, episodes: Sequence[Episode]) -> list[Scored]:
    """What the answers are worth by the reward of each task."""
    answers = [
        Trajectory(
            task.id,
            task.question,
            "",
            answer=episode.answer,
            stop=None if episode.answer is None else StopReason.ANSWERED,
        )
        for task, episode in zip(tasks, episodes, strict=True)
    ]
    environments, known = choose_environments((), tasks)
    async with open_environments(environments, dry=True) as opened:
        await opened.open_rewards(RewardSettings(), known)
        return await opened.score_all(zip(known, answers, strict=True))


def _gains(recipe: SpeedrunRecipe, root: Path) -> Iterator[Json]:
    """Each model against the one before it, and RL against its controls, paired by task."""
    for part in recipe.measure:
        whose = [who for who in ("base", *recipe.trained) if who in recipe.measured(part)]
        for before, after in pairwise(whose):
            yield _gain(root, part, before, after)
        for control in recipe.compared:
            if {control, "rl"} <= {*recipe.measured(part)}:
                yield _gain(root, part, control, "rl")


def _gain(root: Path, part: MeasuredPart, before: Who, after: Who) -> Json:
    folders = [eval_folder(root, who, part) for who in (before, after)]
    compared: Json = compare(folders)["runs"][1]
    return {"on": part.name, "who": after, "against": before} | compared


TASKS, RL_TASKS, CHECK_TASKS, ALL_TASKS = (f"tasks-{stage}.jsonl" for stage in STAGES)


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
    settings = _counting(to_json(recipe))
    seed = recipe.sft.seed
    with Run.open(directory, "speedrun", settings, inputs, seed, counting=_counting) as run:
        stages = Stages(run, note)
        for name, made in tasks.items():
            if not (directory / name).is_file():
                made.save(directory / name)
        if questions and not run.resumed and base == BASE:
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
        result_model = [*models.values()][-1]
        if recipe.controls:
            models["longer"] = f"{base}+{_fine_tune_longer(recipe, models['sft'], stages)}"
            models["all"] = f"{base}+{_fine_tune(recipe, stages, '-all')}"
        measured = measure_all(recipe, models, stages)
        report = directory / "report.html"
        result = {"out": str(directory), "model": result_model, "report": str(report)}
        result |= measured
        write_atomic(directory / "result.json", json.dumps(result, indent=2) + "\n")
        with stages.timed("report"):
            write_report([directory], report)
        note(f"{duration(stages.seconds)} in this call; everything is in {directory}")
    return result


def _counting(recipe: Json) -> Json:
    """What has to be the same for a run to go on: controls may be added to a finished one."""
    return {name: table for name, table in without_speed(recipe).items() if name != "controls"}


def _inputs(directory: Path, tasks: Mapping[str, TaskSet], model: str) -> dict[str, str]:
    """Fingerprints of the task files and hashes of the weights that everything begins with."""
    manifest, held = directory / MANIFEST, None
    if manifest.is_file():
        held = read_object(manifest, "Delete the run directory.").get("inputs")
        if not held:
            return {}  # a run from before they were kept goes on as it began
    # Those of the controls follow from the recipe, and may be made later.
    named = {
        name: made for name, made in tasks.items() if name != ALL_TASKS or name in (held or ())
    }
    return {name: made.fingerprint() for name, made in named.items()} | identity(model)


def _make_tasks(recipe: SpeedrunRecipe) -> dict[str, TaskSet]:
    """All task files by name."""
    parts: dict[str, Sequence[TaskPart]] = {
        TASKS: recipe.tasks,
        RL_TASKS: recipe.rl_tasks,
        CHECK_TASKS: recipe.check_tasks,
        ALL_TASKS: recipe.all_tasks if recipe.controls else (),
    }
    parts |= {task_file(Path(), part).name: [part] for part in recipe.measure}
    made = {  # parts may overlap: what two of them ask for is there once
        name: list({task.id: task for part in own for task in part.make()}.values())
        for name, own in parts.items()
    }
    for part in recipe.measure:
        measured = made[task_file(Path(), part).name]
        if seen := among(measured, [*made[TASKS], *made[RL_TASKS], *made[ALL_TASKS]]):
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


def _fine_tune(recipe: SpeedrunRecipe, stages: Stages, control: str = "") -> Path:
    """Distil what the teacher does and train on it; for the control `-all` on all tasks."""
    out = stages.root / f"sft{control}"
    adapter = out / "adapter"
    if (adapter / MANIFEST).is_file():
        stages.note(f"== fine-tune: {adapter} is finished already")
        return adapter
    with stages.timed(f"record and distil{control}"):
        trajectories = _distil(recipe, stages, control)
    settings = replace(recipe.sft, epochs=recipe.all_epochs) if control else recipe.sft
    with stages.timed(f"fine-tune{control}"):
        return train_on(trajectories, settings, out, stages.note)


def _fine_tune_longer(recipe: SpeedrunRecipe, start: str, stages: Stages) -> Path:
    """From the same start, on the same chains, for as many seconds as RL took."""
    out = stages.root / "sft-longer"
    adapter = out / "adapter"
    if (adapter / MANIFEST).is_file():
        return adapter
    seconds = [stages.taken(stage) for stage in ("improve by RL", "fine-tune")]
    if not all(seconds):
        raise UsageError(f"{stages.root / TIMINGS}: does not say how long fine-tuning and RL took.")
    taken = seconds[0] / seconds[1]
    settings = replace(recipe.sft, model=start, epochs=round(taken * recipe.sft.epochs, 2))
    with stages.timed(f"fine-tune for longer ({settings.epochs:g} epochs)"):
        return train_on(_distil(recipe, stages), settings, out, stages.note)


def _distil(recipe: SpeedrunRecipe, stages: Stages, control: str = "") -> list[Trajectory]:
    """Chains of all sets, each in the grammar of its set, in one file."""
    root = stages.root
    tasks, episodes = root / (ALL_TASKS if control else TASKS), root / f"episodes{control}.jsonl"
    options = {"error_rate": recipe.teacher.error_rate}
    run_recording(Recording(tasks=tasks, options=options, seed=recipe.teacher.seed), episodes)
    asked = Distilling(episodes, tasks, DistillSettings(filter=recipe.filter))
    distilled = run_distillation(asked, root / f"distilled{control}")
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
