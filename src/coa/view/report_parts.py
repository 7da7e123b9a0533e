"""What a report is made of: run directories in, their figures out, checked once.

A directory may be a run itself or hold runs at any depth (that of a speedrun holds all kinds). What
is not finished or not there is noted and left out; what is there and damaged is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coa.errors import CoaError, RecordError, UsageError
from coa.grammar.load import GrammarBook
from coa.io.runs import MANIFEST, METRICS, TIMINGS, Json, read_jsonl, read_records
from coa.models.references import base_of
from coa.tasks import Task, TaskSet
from coa.trajectory import Chain, Trajectory
from coa.view.browse import object_of
from coa.view.chains import check_texts
from coa.view.evaluations import EvaluationRun, checked, finite, model_name

SUMMARY, FUNNEL, RESULT, LATENCY = "summary.json", "funnel.json", "result.json", "latency.json"
SCORES, TEXTS = "scores.jsonl", "texts.jsonl"
TEAM = "team.json"
"""What the teacher came to in a speedrun; it is no run of a model and has no summary."""
_SKIPPED = {"adapter", "checkpoints", "rollouts"}
"""Folders inside a run that hold no runs."""
_DEPTH = 4
_ORDER = ("distill", "sft", "rl")
"""Stages in the order of the work; what no table has an order for comes in that of its name."""


@dataclass
class Training:
    """A `coa sft` or `coa rl`, finished or not."""

    name: str
    stage: str
    records: list[Json]
    about: str
    finished: bool


@dataclass
class Distillation:
    name: str
    episodes: int
    kept: int
    stages: list[tuple[str, int, int, int, dict[str, int]]]
    """Stage, what left it, what it dropped, what it repeated, and its reasons."""


@dataclass
class Parts:
    """Everything that was found in the directories, in their order."""

    evaluations: list[EvaluationRun] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    distillations: list[Distillation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=dict)
    """What manifests and timings say, for the head of the page."""
    task_names: dict[str, str] = field(default_factory=dict)
    """Fingerprint of a task set -> what it is called."""

    def learn(self, name: str, value: object) -> None:
        known = self.facts.setdefault(name, [])
        if value not in ("", None) and str(value) not in known:
            known.append(str(value))

    def name_tasks(self, fingerprint: str, name: str) -> str:
        """The name of a task set; of two that are called the same, one is told apart."""
        if fingerprint not in self.task_names:
            taken = name in self.task_names.values()
            self.task_names[fingerprint] = f"{name} {fingerprint[:8]}" if taken else name
        return self.task_names[fingerprint]

    @property
    def empty(self) -> bool:
        return not (self.evaluations or self.trainings or self.distillations)


def read_parts(directories: Sequence[Path]) -> Parts:
    """Read all runs in the directories."""
    parts = Parts()
    listed = [(top, run) for top in directories for run in _runs_in(top)]
    rows = _speedrun_rows(directories)
    names = _names([run for _, run in listed]) | {run: str(rows[run]["name"]) for run in rows}
    for top, run in listed:
        before = len(parts.evaluations)
        _read_run(run, top, names[run], parts)
        for found in parts.evaluations[before:] if run in rows else ():
            found.on = str(rows[run].get("on", ""))
    if len(directories) == 1:  # the rows of a teacher stand where the table has them
        order = [str(row["name"]) for row in _table(directories[0])]
        places = {name: at for at, name in enumerate(order)}
        parts.evaluations.sort(key=lambda each: places.get(each.name, len(order)))
    if parts.empty:
        said = f" {parts.notes[0]}" if parts.notes else ""
        raise UsageError(f"{directories[0]}: nothing in it can be reported yet.{said}")
    return parts


def _runs_in(top: Path) -> list[Path]:
    """The runs in a directory, those of a speedrun in the order of its table."""
    if not top.is_dir():
        found = "is a file, expected a run directory" if top.is_file() else "no such directory"
        raise UsageError(f"{top}: {found}.")
    runs = list(_walk(top, _DEPTH))
    if not runs:
        raise UsageError(
            f"{top}: holds no run. Give a directory that coa eval, coa sft, coa rl, coa distill "
            "or coa speedrun wrote, or one that holds such directories."
        )
    order = [top.name, *(Path(row["run"]).name for row in _table(top))]

    def place(run: Path) -> tuple[int, int]:
        kind = _kind(run)
        stage = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
        return order.index(run.name) if run.name in order else len(order), stage

    return sorted(runs, key=place)


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if _kind(folder):
        yield folder
    if depth and _kind(folder) in ("", "speedrun"):
        inside = sorted(each for each in folder.iterdir() if each.is_dir())
        for each in inside:
            if each.name not in _SKIPPED and not each.name.startswith("."):
                yield from _walk(each, depth - 1)


def _kind(folder: Path) -> str:
    """What wrote a directory, read off its files; empty when it is none of ours."""
    stage = str(object_of(folder / MANIFEST).get("stage", ""))
    if stage in ("eval", "sft", "rl", "speedrun", "distill"):
        return stage
    known = ((SUMMARY, "eval"), (TEAM, "team"), (FUNNEL, "distill"), (RESULT, "speedrun"))
    if (folder / TEXTS).is_file():  # of a study, which sums up more than rollouts by that name
        return ""
    for name, kind in known:
        if (folder / name).is_file():
            return kind
    return ""


def _names(runs: Sequence[Path]) -> dict[Path, str]:
    """As short as they can be while they differ: a folder's name, or more of its path."""
    names = {}
    whole = {run: run.resolve().parts[1:] or (str(run),) for run in runs}
    for run, parts in whole.items():
        length = 1
        while length < len(parts) and any(
            other != parts and other[-length:] == parts[-length:] for other in whole.values()
        ):
            length += 1
        names[run] = "/".join(parts[-length:])
    return names


def _speedrun_rows(directories: Iterable[Path]) -> dict[Path, Json]:
    """The rows of runs that have one: they have the names of a speedrun's table, when there is one
    table only."""
    tops = [top for top in directories if _table(top)]
    if len(tops) != 1:
        return {}
    top = tops[0]
    return {top / Path(row["run"]).name: row for row in _table(top)}


def _table(top: Path) -> list[Json]:
    rows = object_of(top / RESULT).get("rows", [])
    good = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not good or any(not {"name", "run"} <= row.keys() for row in rows):
        raise RecordError(f"{top / RESULT}: not a result of coa speedrun.")
    return [row | {"run": str(row["run"])} for row in rows]


def _read_run(run: Path, top: Path, name: str, parts: Parts) -> None:
    kind, manifest = _kind(run), object_of(run / MANIFEST)
    _learn(run, kind, manifest, parts)
    if kind == "speedrun":
        for row in _table(run):
            if not _kind(run / Path(row["run"]).name):
                evaluation = checked(run / RESULT, row, str(row["name"]))
                evaluation.team, evaluation.on = not evaluation.model, str(row.get("on", ""))
                parts.evaluations.append(evaluation)
    elif kind == "team":
        evaluation = checked(run / TEAM, object_of(run / TEAM), name)
        evaluation.team, evaluation.on = True, run.name.replace("eval-team-", "tasks-", 1)
        parts.evaluations.append(evaluation)
    elif kind == "distill":
        _add_distillation(run, name, parts)
    elif kind in ("sft", "rl"):
        _add_training(run, kind, name, manifest, parts)
    elif not (run / SUMMARY).is_file():
        parts.notes.append(f"{name}: the evaluation is not finished, so it is left out.")
    else:
        parts.evaluations.append(_evaluation(run, top, name, manifest, parts))


def _learn(run: Path, kind: str, manifest: Json, parts: Parts) -> None:
    """What the head of the page says of all parts."""
    recipe, packages = (_mapping(manifest.get(key)) for key in ("recipe", "packages"))
    inner = _mapping(recipe.get("rl")) | _mapping(recipe.get("sft"))
    model = str(recipe.get("model", inner.get("model", "")))
    parts.learn("base model", model_name(base_of(model)))
    if "seed" in manifest:
        parts.learn("seeds", f"{kind} {manifest['seed']}")
    if "coa" in packages:
        parts.learn("made with", f"coa {packages['coa']}")
    if manifest.get("commit"):
        parts.learn("commit", str(manifest["commit"])[:12])
    if (run / TIMINGS).is_file():
        for _, record in read_jsonl(run / TIMINGS, growing=True):
            if isinstance(record.get("at"), str):
                parts.learn("when", record["at"][:16])


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


# -- evaluations ----------------------------------------------------------------------------


def _evaluation(run: Path, top: Path, name: str, manifest: Json, parts: Parts) -> EvaluationRun:
    summary = object_of(run / SUMMARY)
    found = checked(run / SUMMARY, summary, name)
    recipe = _mapping(manifest.get("recipe"))
    found.observations = str(recipe.get("observations", "real"))
    fingerprint = str(_mapping(manifest.get("inputs")).get("tasks", ""))
    found.on = parts.name_tasks(fingerprint, Path(str(summary.get("tasks", ""))).stem)
    seconds = object_of(run / LATENCY)
    try:
        found.latency = {key: finite(seconds[key]) for key in ("mean", "p50", "p95") if seconds}
    except (KeyError, ValueError):
        found.latency = {}  # of a run whose timings were lost
    found.scores = _scores(run, name, parts)
    found.tasks = _tasks(run, top, summary, manifest)
    found.chains = _chains(run, name, parts)
    if found.chains and not found.tasks:
        parts.notes.append(
            f"{name}: its tasks {Path(str(summary.get('tasks', ''))).name!r} are not there or have "
            "changed, so its chains stand without the right answers."
        )
    return found


def _scores(run: Path, name: str, parts: Parts) -> dict[tuple[str, int], float]:
    path = run / SCORES
    if not path.is_file():
        parts.notes.append(f"{name}: no scores.jsonl, so it is in no comparison.")
        return {}

    def score(record: Json) -> tuple[tuple[str, int], float]:
        return (str(record["task_id"]), int(record["sample"])), finite(record["score"])

    return dict(read_records(path, score))


def _tasks(run: Path, top: Path, summary: Json, manifest: Json) -> dict[str, Task]:
    """The tasks with their right answers, if the file is still the one that was evaluated."""
    named = Path(str(summary.get("tasks", "")))
    wanted = _mapping(manifest.get("inputs")).get("tasks")
    for path in (run / "tasks.jsonl", named, run.parent / named.name, top / named.name):
        if path.name and path.is_file():
            try:
                tasks = TaskSet.load(path)
            except CoaError:
                continue
            if tasks.fingerprint() == wanted:
                return {task.id: task for task in tasks}
    return {}


def _chains(run: Path, name: str, parts: Parts) -> list[Chain]:
    path = run / "trajectories.jsonl"
    if not path.is_file():
        parts.notes.append(f"{name}: no trajectories.jsonl, so none of its chains is shown.")
        return []
    book = GrammarBook.beside(path)

    def read(record: Json) -> Chain:
        trajectory = Trajectory.from_json(record, book)
        check_texts(trajectory)
        for count in (trajectory.sample, *asdict(trajectory.usage).values()):
            finite(count)
        if not isinstance(trajectory.meta, dict):
            raise TypeError(f"meta is {trajectory.meta!r}, expected an object")
        for segment in trajectory.segments:
            segment.ids = segment.logprobs = segment.allowed = None  # a page has no use for them
        return Chain.read(trajectory)

    return read_records(path, read)


# -- training and distillation --------------------------------------------------------------


def _add_training(run: Path, kind: str, name: str, manifest: Json, parts: Parts) -> None:
    path = run / METRICS
    records = [record for _, record in read_jsonl(path, growing=True)] if path.is_file() else []
    if not records:
        parts.notes.append(f"{name}: {METRICS} has no update yet, so its training is left out.")
        return
    recipe = _mapping(manifest.get("recipe"))
    used = recipe | _mapping(recipe.get(kind))
    if "model" in used:
        used["model"] = model_name(str(used["model"]))
    known = ("model", "preset", "rank", "lr", "epochs", "batch_size", "tasks_per_update")
    said = [f"{key.replace('_', ' ')} {used[key]}" for key in (*known, "group_size") if key in used]
    ends = read_jsonl(run / TIMINGS, growing=True) if (run / TIMINGS).is_file() else ()
    finished = any(record.get("event") == "finished" for _, record in ends)
    parts.trainings.append(Training(name, kind, records, ", ".join(said), finished))


def _add_distillation(run: Path, name: str, parts: Parts) -> None:
    funnel = object_of(run / FUNNEL)
    if not funnel:
        parts.notes.append(f"{name}: the distillation is not finished, so it is left out.")
        return
    try:
        stages = []
        before = int(finite(funnel["episodes"]))
        for each in funnel.get("stages", ()):
            left, repeated = (int(finite(each.get(key, 0))) for key in ("left", "repeated"))
            entered = int(finite(each.get("entered", before)))
            dropped = int(finite(each.get("dropped", entered + repeated - left)))
            reasons = {str(why): int(finite(count)) for why, count in each["reasons"].items()}
            stages.append((str(each["stage"]), left, dropped, repeated, reasons))
            before = left
        made = Distillation(
            name, int(finite(funnel["episodes"])), int(finite(funnel["kept"])), stages
        )
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"{run / FUNNEL}: not a funnel of coa distill ({exc!r}).") from None
    parts.distillations.append(made)
