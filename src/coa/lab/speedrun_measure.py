"""The measurements of a speedrun: the team and each model on held-out tasks, and what was gained.

Each leaves a directory `eval-WHO-NAME`; one that has its summary is not done again.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from coa.engines.base import Engine
from coa.environment import ToolSettings, open_environments
from coa.evaluation.compare import SUMMARY, compare
from coa.evaluation.run import EvalPart, run_eval
from coa.io.progress import duration
from coa.io.runs import Json, Run, read_records, write_atomic
from coa.lab.speedrun_recipe import MeasuredPart, SpeedrunRecipe, Who
from coa.models.codec import Codec
from coa.models.references import model_folder, resolve
from coa.recording.episode import Episode, ToolUse
from coa.recording.record import Recording, run_recording
from coa.rewards import RewardSettings, Scored
from coa.rollouts import choose_environments
from coa.statistics import estimate
from coa.tasks import TaskSet
from coa.trajectory import StopReason, Trajectory

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
    settings = how.settings(
        model, task_file(root, part), tools=ToolSettings(observations=part.observations)
    )
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
    """Each model against the one before it, paired by task."""
    for part in recipe.measure:
        whose = [who for who in ("base", *recipe.trained) if who in recipe.measured(part)]
        for before, after in pairwise(whose):
            folders = [eval_folder(root, who, part) for who in (before, after)]
            yield {"on": part.name, "who": after, "against": before} | compare(folders)["runs"][1]


Note = Callable[[str], None]


class Stages:
    def __init__(self, run: Run, note: Note) -> None:
        self.root: Path = run.root
        self.note = note
        self.seconds = 0.0
        """Of the stages of this call."""
        self._run = run

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
