"""The whole way in one command: record, distil, train, measure, print the table.

Each stage writes into its own folder of the run directory and is skipped when it is done, so an
interrupted speedrun continues where it was.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

from coa.config import load_recipe, read_toml, to_json
from coa.distill.filters import FilterSettings
from coa.distill.pipeline import distill, save_distilled
from coa.engines import load_engine, slots_for
from coa.engines.base import Engine
from coa.engines.codec import Codec
from coa.engines.store import BASE, is_pulled, model_folder, pull, resolve
from coa.estimates import estimate
from coa.evaluate.run import compare
from coa.evaluate.stage import EvalSettings, run_eval
from coa.progress import counted, duration
from coa.protocol import load_grammar
from coa.rewards import exact_match
from coa.runs import Json, Run, write_atomic
from coa.tasks import make_tasks
from coa.tasks.task import Task, TaskSet
from coa.teachers import load_teacher, record_all
from coa.teachers.episode import Use
from coa.tools.kits import toolbox_for
from coa.train.settings import SftSettings
from coa.train.stage import train_on
from coa.trajectory import Trajectory

Note = Callable[[str], None]


@dataclass(frozen=True)
class TaskPart:
    """Which training tasks to record."""

    families: tuple[str, ...] = ()
    n: int = 320
    worlds: tuple[int, ...] = (0,)
    seed: int = 0


@dataclass(frozen=True)
class TeacherPart:
    error_rate: float = 0.1
    grammar: str = "mhqa"
    seed: int = 0


@dataclass(frozen=True)
class EvalPart:
    """Held-out tasks: what they name and pass through never occurs in a training question."""

    n: int = 100
    world_seed: int = 7
    controls: int = 50
    seed: int = 1
    turns: int = 8
    turn_tokens: int = 128
    malformed: int = 1
    context: int = 1536
    concurrency: int = 96
    deterministic: bool = False


@dataclass(frozen=True)
class SpeedrunRecipe:
    tasks: TaskPart = field(default_factory=TaskPart)
    teacher: TeacherPart = field(default_factory=TeacherPart)
    filter: FilterSettings = field(default_factory=FilterSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    eval: EvalPart = field(default_factory=EvalPart)


def run_speedrun(
    directory: Path, recipe_path: Path | None, overrides: Sequence[str], note: Note
) -> Json:
    """Run every stage that is not done yet; returns what `result.json` holds."""
    with resources.as_file(resources.files("coa").joinpath("recipes/speedrun.toml")) as shipped:
        recipe = load_recipe(recipe_path, overrides, SpeedrunRecipe, read_toml(shipped))
    with Run.open(directory, "speedrun", to_json(recipe), {}, recipe.sft.seed) as run:
        clock = _Clock(run, note)
        if recipe.sft.model.startswith(BASE) and not is_pulled():
            with clock("pull the base model"):
                pull(progress=note)
        with clock("record and distil"):
            trajectories = _distil(recipe, directory, note)
        with clock("fine-tune"):
            adapter = train_on(trajectories, recipe.sft, directory / "sft", note)
        trained = f"{recipe.sft.model.partition('+')[0]}+{adapter}"
        result = {"out": str(directory)} | _measure(recipe, directory, trained, clock)
        write_atomic(directory / "result.json", json.dumps(result, indent=2) + "\n")
        note(f"{duration(clock.total())} in this call; everything is in {directory}")
    return result


class _Clock:
    """Says what starts and records how long it took, apart from the results."""

    def __init__(self, run: Run, note: Note) -> None:
        self._run, self._note = run, note
        self.seconds: dict[str, float] = {}
        self._what, self._begun = "", 0.0

    def total(self) -> float:
        return sum(self.seconds.values())

    def __call__(self, what: str) -> _Clock:
        self._what = what
        return self

    def __enter__(self) -> None:
        self._begun = time.monotonic()
        self._note(f"== {self._what}")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        seconds = time.monotonic() - self._begun
        self.seconds[self._what] = seconds
        self._run.timing({"stage": self._what, "seconds": round(seconds, 1)})
        if error is None:
            self._note(f"   {self._what}: {duration(seconds)}")


def _distil(recipe: SpeedrunRecipe, directory: Path, note: Note) -> list[Trajectory]:
    """Tasks, episodes and trajectories of every world, in one file each."""
    part = recipe.tasks
    made: list[Task] = []
    share, rest = divmod(part.n, len(part.worlds))
    for index, world in enumerate(part.worlds):
        count = share + (index < rest)
        families = list(part.families) or None
        made += make_tasks(
            "atlas-mhqa", "train", count, part.seed, world_seed=world, families=families
        )
    tasks = TaskSet(tuple(made), "train")
    tasks.save(directory / "tasks-train.jsonl")
    teacher = load_teacher("experts", error_rate=recipe.teacher.error_rate)
    with counted("record", len(tasks)) as on_done:
        episodes = asyncio.run(
            record_all(
                tasks,
                teacher,
                toolbox_for(),
                directory / "episodes.jsonl",
                seed=recipe.teacher.seed,
                on_done=on_done,
            )
        )
    distilled = asyncio.run(
        distill(
            episodes,
            load_grammar(recipe.teacher.grammar),
            toolbox_for(),
            {task.id: task for task in tasks},
            filters=recipe.filter,
        )
    )
    save_distilled(directory / "distilled", distilled)
    note(f"   {distilled.lines()[-2]}: {directory}/distilled/README.md")
    return distilled.kept


def _measure(recipe: SpeedrunRecipe, directory: Path, trained: str, clock: _Clock) -> Json:
    """Base and trained model on held-out tasks, an invented world and the two controls."""
    part = recipe.eval
    families = list(recipe.tasks.families) or None

    def tasks(name: str, n: int, world: int) -> Path:
        path = directory / f"tasks-{name}.jsonl"
        made = make_tasks(
            "atlas-mhqa", "heldout_entity", n, part.seed, world_seed=world, families=families
        )
        made.save(path)
        return path

    heldout = tasks("heldout", part.n, 0)
    world = tasks("world", part.n, part.world_seed)
    controls = tasks("controls", part.controls, 0)
    plan = {
        recipe.sft.model: [("base", heldout, "real")],
        trained: [
            ("sft", heldout, "real"),
            ("sft, invented world", world, "real"),
            ("sft, nothing found", controls, "withheld"),
            ("sft, wrong passages", controls, "wrong"),
        ],
    }
    with clock("measure the team"):
        rows = [_team_row(recipe, directory, TaskSet.load(heldout))]
    for model, measurements in plan.items():
        with _loaded(model, part) as engine:
            for name, path, observations in measurements:
                settings = EvalSettings(
                    model=model,
                    tasks=str(path),
                    grammar=recipe.teacher.grammar,
                    observations=observations,
                    turns=part.turns,
                    turn_tokens=part.turn_tokens,
                    malformed=part.malformed,
                    context=part.context,
                    concurrency=part.concurrency,
                    deterministic=part.deterministic,
                    seed=part.seed,
                )
                out = directory / f"eval-{name.replace(', ', '-').replace(' ', '-')}"
                with clock(f"measure {name}"):
                    rows.append(
                        {"name": name, "run": str(out), **run_eval(settings, out, engine=engine)}
                    )
    gain = compare([directory / "eval-base", directory / "eval-sft"])["runs"][1]
    return {"rows": rows, "gain": gain}


def _team_row(recipe: SpeedrunRecipe, directory: Path, tasks: TaskSet) -> Json:
    """The teacher on the same held-out tasks, its tokens counted with the student's tokenizer."""
    teacher = load_teacher("experts", error_rate=recipe.teacher.error_rate)
    path = directory / "eval-team" / "episodes.jsonl"
    episodes = asyncio.run(
        record_all(tasks, teacher, toolbox_for(), path, seed=recipe.teacher.seed)
    )
    pairs = list(zip(tasks, episodes, strict=True))
    scores = [exact_match(episode.answer or "", task.answers) for task, episode in pairs]
    codec = Codec.from_folder(model_folder(resolve(recipe.sft.model)))
    tokens = [episode.count_tokens(lambda text: len(codec.encode(text))) for episode in episodes]
    calls = sum(isinstance(event, Use) for episode in episodes for event in episode.events)
    result, n = estimate(scores), len(tasks)
    return {
        "name": "team of experts",
        "run": str(path.parent),
        "n": n,
        "accuracy": round(result.value, 4),
        "ci95": [round(result.low, 4), round(result.high, 4)],
        "tokens_per_task": round(sum(count.total_cached for count in tokens) / n, 1),
        "tokens_per_task_uncached": round(sum(count.total for count in tokens) / n, 1),
        "tool_calls_per_task": round(calls / n, 2),
    }


@contextmanager
def _loaded(model: str, part: EvalPart) -> Iterator[Engine]:
    """One engine for several measurements: a model is loaded once."""
    engine = load_engine(
        model,
        slots=slots_for(part.concurrency),
        context=part.context,
        deterministic=part.deterministic,
    )
    try:
        yield engine
    finally:
        asyncio.run(engine.close())
