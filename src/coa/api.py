"""The stages as functions: objects in, objects out. The command line is a thin shell over these.

    made = record(env, "episodes.jsonl")
    dataset = distill("episodes.jsonl", env=env, out="dataset")
    trained = sft("dataset", out="runs/sft")
    better = rl(env, model=trained.model, out="runs/rl")  # or `improve`
    measured = evaluate(env, model=better.model, out="runs/eval")

Each writes a run directory and continues what is there; the same call again gives the same result.
Settings that a function does not name are those of the recipe, by their dotted names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coa.errors import UsageError, did_you_mean
from coa.io.runs import Json
from coa.rollouts import References
from coa.trajectory import Trajectory, load_trajectories

if TYPE_CHECKING:
    from coa.distillation.dataset import Distilled
    from coa.recording.record import Recorded


Place = str | Path
S = TypeVar("S")
Note = Callable[[str], None]


def _silent(line: str) -> None:
    """For whoever does not want to be told."""


@dataclass(frozen=True)
class Trained:
    """What training made."""

    adapter: Path
    model: str
    """A model reference, for `evaluate`, `rl`, `serve` and `load_engine`."""


@dataclass(frozen=True)
class Evaluation:
    """A finished evaluation."""

    directory: Path
    summary: Json

    @property
    def accuracy(self) -> float:
        return float(self.summary["accuracy"])

    @property
    def ci95(self) -> tuple[float, float]:
        low, high = self.summary["ci95"]
        return float(low), float(high)

    @property
    def trajectories(self) -> list[Trajectory]:
        return load_trajectories(self.directory)


def ask(
    question: str,
    env: References = (),
    model: str = "auto",
    *,
    quiet: bool = True,
    **how: Any,
) -> Trajectory:
    """Answer one question; `how` is what `AgentSettings` takes: grammar, prompt, tools ..."""
    from coa.asking import ask_once
    from coa.rollouts import AgentSettings

    return asyncio.run(
        ask_once(question, _made(AgentSettings, model=model, env=env, **how), None, quiet)
    )


def record(env: References, out: Place, *, teacher: Any = "", **how: Any) -> Recorded:
    """Record a teacher at work on the environment's training tasks; `how` is what a `Recording`
    takes: tasks, split, options, settings, tools, seed, workers."""
    from coa.recording.record import Recording, run_recording

    return run_recording(_made(Recording, env=env, teacher=teacher, **how), Path(out))


def distill(
    episodes: Place,
    env: References = (),
    *,
    out: Place,
    tasks: Place | None = None,
    against: Sequence[Place] = (),
    recipe: Mapping[str, Any] | None = None,
    **how: Any,
) -> Distilled:
    """Turn episodes into a dataset of trajectories; `recipe` is what `DistillSettings` takes, `how`
    is what a `Distilling` takes: settings, tools, workers."""
    from coa.distillation.dataset import Distilling, DistillSettings, run_distillation
    from coa.io.settings import load_recipe

    chosen = load_recipe(None, [], DistillSettings, dict(recipe or {}))
    given = Path(tasks) if tasks else None
    paths = [Path(each) for each in against]
    asked = _made(
        Distilling,
        episodes=Path(episodes),
        tasks=given,
        recipe=chosen,
        env=env,
        against=paths,
        **how,
    )
    return run_distillation(asked, Path(out))


def sft(
    dataset: Place,
    *,
    out: Place,
    recipe: Place | None = None,
    note: Note = _silent,
    **settings: Any,
) -> Trained:
    """Fine-tune on a dataset; `settings` are those of the table `[sft]`: model, rank, lr."""
    from coa.train.sft import sft_from_recipe

    chosen = [f"trajectories={dataset}", f"out={out}", *_overrides("sft", settings)]
    adapter = sft_from_recipe(_recipe(recipe), chosen, note)
    return _trained(adapter, out)


def rl(
    env: References = (),
    *,
    out: Place,
    recipe: Place | None = None,
    note: Note = _silent,
    **settings: Any,
) -> Trained:
    """Improve a model by what its own rollouts earn. `settings` are those of the table `[rl]`:
    model, updates, group_size; with two underscores of another: `check__split="test"`."""
    from coa.train.rl_stage import read_rl_recipe, run_rl, with_own_tasks

    overrides = [f"out={out}", *_overrides("rl", settings)]
    read = read_rl_recipe(_recipe(recipe), overrides)
    if env:
        read = with_own_tasks(read, {each.partition("=")[0] for each in overrides})
    result = run_rl(read, env=env, note=note)
    return _trained(result.adapter, out)


def improve(
    env: References = (),
    *,
    out: Place,
    model: str = "",
    recipe: Place | None = None,
    note: Note = _silent,
    **settings: Any,
) -> Trained:
    """Fine-tune a model on its own right attempts, in rounds. `model` is the start, `settings` are
    those of the table `[improve]`: rounds, samples, keep; with two underscores of another:
    `check__split="test"`, `sft__lr=5e-4`."""
    from coa.train.improve import run_improve
    from coa.train.rl_stage import read_improve_recipe, with_own_tasks

    overrides = [f"out={out}", *_overrides("improve", settings)]
    overrides += [f"sft.model={model}"] if model else []
    read = read_improve_recipe(_recipe(recipe), overrides)
    if env:
        read = with_own_tasks(read, {each.partition("=")[0] for each in overrides})
    result = run_improve(read, env=env, note=note)
    note(result.line)
    return _trained(result.adapter, out)


def evaluate(env: References, *, model: str = "auto", out: Place, **settings: Any) -> Evaluation:
    """Measure a model on the environment's test tasks; `settings` are those of `EvalSettings`."""
    from coa.evaluation.run import EvalSettings, run_eval

    directory = Path(out)
    summary = run_eval(_made(EvalSettings, model=model, env=env, **settings), directory, quiet=True)
    return Evaluation(directory, summary)


def compare(*runs: Place | Evaluation) -> Json:
    """Compare finished evaluations of the same tasks with the first one, paired by task."""
    from coa.evaluation.compare import compare as compare_runs

    folders = [run.directory if isinstance(run, Evaluation) else Path(run) for run in runs]
    if len(folders) < 2:
        raise UsageError("compare needs at least two runs.")
    return compare_runs(folders)


def serve(env: References = (), *, note: Note = print, **settings: Any) -> None:
    """Answer OpenAI-compatible clients until a signal comes; `settings` are those of `Serving`."""
    from coa.serving.server import serve as serve_until_stopped
    from coa.serving.session import Serving

    serve_until_stopped(_made(Serving, env=env, **settings), note)


def _made(kind: type[S], **given: Any) -> S:
    """Settings of that kind; a name that they do not have is a user's mistake."""
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise UsageError(f"{kind.__name__} has no {name!r}.{did_you_mean(name, known)}")
    return kind(**given)


def _recipe(given: Place | None) -> Path | None:
    from coa.io.settings import find_recipe

    return None if given is None else find_recipe(given)


def _overrides(table: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings as a recipe's overrides: `a__b` is `a.b`, and a plain name is of the table."""
    import json

    made = []
    for name, value in settings.items():
        key = name.replace("__", ".") if "__" in name else f"{table}.{name}"
        made.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    return made


def _trained(adapter: Path, out: Place) -> Trained:
    """The result of a training with the reference by which it is loaded."""
    import json

    from coa.models.references import base_of
    from coa.models.weights import MANIFEST, is_whole

    if is_whole(adapter):
        return Trained(adapter, f"hf:{adapter}")
    manifest = json.loads((adapter / MANIFEST).read_text(encoding="utf-8"))
    start = str((manifest.get("settings") or {}).get("model", ""))
    return Trained(adapter, f"{base_of(start)}+{adapter}")
