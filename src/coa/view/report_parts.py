"""What a report is made of: run directories in, their figures out, checked once.

A directory may be a run itself or hold runs at any depth (that of a speedrun holds all kinds). What
is not finished or not there is noted and left out; what is there and damaged is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from coa.distillation.funnel import Funnel, read_funnel
from coa.errors import CoaError, RecordError, UsageError
from coa.evaluation.compare import CHAINS, SCORES, SUMMARY, inputs_of
from coa.evaluation.spending import LATENCY
from coa.grammar.load import GrammarBook
from coa.io.runs import MANIFEST, METRICS, TIMINGS, Json, read_jsonl, read_records
from coa.models.references import base_of
from coa.statistics import Estimate
from coa.tasks import Task, TaskSet
from coa.trajectory import Chain, Trajectory
from coa.view.browse import object_of
from coa.view.chains import check_texts, read_scores
from coa.view.plots import finite

FUNNEL, RESULT, TEXTS = "funnel.json", "result.json", "texts.jsonl"
TEAM = "team.json"
"""What the teacher came to in a speedrun; it is no run of a model and has no summary."""
_SKIPPED = {"adapter", "checkpoints", "rollouts"}
"""Folders inside a run that hold no runs."""
_DEPTH = 4
_ORDER = ("distill", "sft", "rl")
"""Stages in the order of the work; what no table has an order for comes in that of its name."""
_NUMBERS = ("tokens_per_task", "tokens_per_task_uncached", "tokens_per_solved")
_RECIPE = ("model", "preset", "rank", "lr", "epochs", "batch_size", "tasks_per_update")
"""What a page says of a training."""


@dataclass
class EvaluationRun:
    """A finished `coa eval`, or a line of a table whose trajectories are elsewhere: a teacher."""

    name: str
    accuracy: Estimate
    model: str = ""
    reward: str = "exact"
    k: int = 1
    observations: str = "real"
    figures: dict[str, float] = field(default_factory=dict)
    """What it cost, by the names that files have; money is `money_per_task` and `_per_solved`."""
    currency: str = ""
    stops: dict[str, int] = field(default_factory=dict)
    groups: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    pass_at: list[tuple[int, Estimate]] = field(default_factory=list)
    together: dict[str, Estimate] = field(default_factory=dict)
    """What the samples of a task are worth together: mean, vote, best."""
    calls: dict[str, float] = field(default_factory=dict)
    """Mean calls of each tool role for a rollout."""
    scores: dict[tuple[str, int], float] = field(default_factory=dict)
    chains: list[Chain] = field(default_factory=list)
    tasks: dict[str, Task] = field(default_factory=dict)
    team: bool = False
    on: str = ""
    """What its tasks are called: runs with the same name have the same tasks."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of what it worked with."""

    @property
    def is_control(self) -> bool:
        """Whether its tools did not answer as they do."""
        return self.observations != "real"

    @cached_property
    def by_task(self) -> dict[str, Chain]:
        """Task -> the chain that stands for it: its first sample."""
        ordered = sorted(self.chains, key=lambda chain: -chain.trajectory.sample)
        first = {chain.trajectory.task_id: chain for chain in ordered}
        return {name: first[name] for name in dict.fromkeys(map(_task_of, self.chains))}

    @cached_property
    def means(self) -> dict[str, float]:
        """Score of each task, the mean of its samples."""
        return _means((task_id, score) for (task_id, _), score in self.scores.items())

    @cached_property
    def tokens(self) -> list[float]:
        """Tokens of each task, the mean of its samples."""
        spent = ((_task_of(each), each.trajectory.usage.total_tokens) for each in self.chains)
        return list(_means(spent).values())


def _task_of(chain: Chain) -> str:
    return chain.trajectory.task_id


def _means(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in pairs:
        found[name].append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def model_name(ref: str) -> str:
    """Return a reference without the folders of this machine: a report may be sent to others."""
    base, adapter = base_of(ref) if "+" in ref else ref, ref.partition("+")[2]
    kind, colon, where = base.partition(":")
    if colon and kind in ("hf", "scripted") and (where.count("/") > 1 or Path(where).is_absolute()):
        base = f"{kind}:{Path(where).name}"
    elif colon and kind == "openai":  # neither where the server is nor where its files are
        base = f"{kind}:{Path(where.partition('@')[0]).name}"
    return f"{base} + {'/'.join(Path(adapter).parts[-2:])}" if adapter else base


@dataclass
class Training:
    """A `coa sft` or `coa rl`, finished or not."""

    name: str
    stage: str
    records: list[Json]
    about: str
    finished: bool


@dataclass
class Parts:
    """Everything that was found in the directories, in their order."""

    evaluations: list[EvaluationRun] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    distillations: list[tuple[str, Funnel]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, list[str]] = field(default_factory=dict)
    """What manifests and timings say, for the head of the page."""
    task_names: dict[str, str] = field(default_factory=dict)
    """Fingerprint of a task set -> what it is called."""

    def learn(self, name: str, value: str) -> None:
        known = self.facts.setdefault(name, [])
        if value and value not in known:
            known.append(value)

    def name_tasks(self, fingerprint: str, name: str) -> str:
        """The name of a task set; of two that are called the same, one is told apart."""
        if fingerprint not in self.task_names:
            taken = name in self.task_names.values()
            self.task_names[fingerprint] = f"{name} {fingerprint[:8]}" if taken else name
        return self.task_names[fingerprint]


def read_parts(directories: Sequence[Path]) -> Parts:
    """Read all runs in the directories."""
    parts = Parts()
    listed = [(top, run) for top in directories for run in _runs_in(top)]
    names, rows = _names([run for _, run in listed]), dict[Path, Json]()
    tables = [(top, found) for top in directories if (found := _table(top))]
    for top, found in tables if len(tables) == 1 else ():  # then its names are those of the page
        rows = {top / Path(row["run"]).name: row for row in found}
        names |= {run: str(row["name"]) for run, row in rows.items()}
    for top, run in listed:
        before = len(parts.evaluations)
        _read_run(run, top, names[run], parts)
        for each in parts.evaluations[before:] if run in rows else ():
            each.on = str(rows[run].get("on", ""))
    if len(directories) == 1:  # the rows of a teacher stand where the table has them
        order = [str(row["name"]) for row in _table(directories[0])]
        places = {name: at for at, name in enumerate(order)}
        parts.evaluations.sort(key=lambda each: places.get(each.name, len(order)))
    if not (parts.evaluations or parts.trainings or parts.distillations):
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
    if (folder / TEXTS).is_file():  # of a study, which sums up more than rollouts by that name
        return ""
    known = {SUMMARY: "eval", TEAM: "team", FUNNEL: "distill", RESULT: "speedrun"}
    return next((kind for name, kind in known.items() if (folder / name).is_file()), "")


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
                found = _read_evaluation(run / RESULT, row, str(row["name"]))
                found.team, found.on = not found.model, str(row.get("on", ""))
                parts.evaluations.append(found)
    elif kind == "team":
        found = _read_evaluation(run / TEAM, object_of(run / TEAM), name)
        found.team, found.on = True, run.name.replace("eval-team-", "tasks-", 1)
        parts.evaluations.append(found)
    elif kind == "distill" and (funnel := object_of(run / FUNNEL)):
        parts.distillations.append((name, read_funnel(run / FUNNEL, funnel)))
    elif kind in ("sft", "rl"):
        _add_training(run, kind, name, manifest, parts)
    elif kind == "distill" or not (run / SUMMARY).is_file():
        what = "distillation" if kind == "distill" else "evaluation"
        parts.notes.append(f"{name}: the {what} is not finished, so it is left out.")
    else:
        parts.evaluations.append(_evaluation(run, top, name, manifest, parts))


def _learn(run: Path, kind: str, manifest: Json, parts: Parts) -> None:
    """What the head of the page says of all parts."""
    recipe, packages = (_mapping(manifest.get(key)) for key in ("recipe", "packages"))
    inner = _mapping(recipe.get("rl")) | _mapping(recipe.get("sft"))
    model = str(recipe.get("model", inner.get("model", "")))
    parts.learn("base model", model_name(base_of(model)))
    parts.learn("seeds", f"{kind} {manifest['seed']}" if "seed" in manifest else "")
    parts.learn("made with", f"coa {packages['coa']}" if "coa" in packages else "")
    parts.learn("commit", str(manifest.get("commit") or "")[:12])
    for record in _lines(run / TIMINGS):
        if isinstance(record.get("at"), str):
            parts.learn("when", record["at"][:16])


def _mapping(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _lines(path: Path) -> list[Json]:
    """Read the records of a file that may be growing, or not there yet."""
    return [record for _, record in read_jsonl(path, growing=True)] if path.is_file() else []


# -- evaluations ----------------------------------------------------------------------------


def _read_evaluation(path: Path, summary: Json, name: str) -> EvaluationRun:
    """Read the figures of a summary, each of which is a number or is not there."""
    try:
        return _figures(summary, name)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"{path}: not a summary of coa eval ({exc!r}).") from None


def _figures(summary: Json, name: str) -> EvaluationRun:
    n, k = int(finite(summary["n"])), int(finite(summary.get("k", 1)))
    money, samples = summary.get("money") or {}, summary.get("pass_at", {})
    costs = {key: summary.get(key) for key in (*_NUMBERS, "tool_calls_per_task")}
    costs |= {f"money_{key}": money.get(key) for key in ("per_task", "per_solved")}
    together = {}
    for key, label in (("avg_at_k", "mean"), ("majority", "vote"), ("best_of", "best")):
        if key in summary and k > 1:
            by = summary[key].get("by")
            together[f"{label}, by {by}" if by else label] = _estimate(summary[key], n)
    return EvaluationRun(
        name,
        _estimate(summary, n, "accuracy"),
        model=str(summary.get("model", "")),
        reward=str(summary.get("reward", "exact")),
        k=k,
        figures={key: finite(value) for key, value in costs.items() if value is not None},
        currency=str(money.get("currency", "")),
        stops={
            str(stop): int(finite(count)) for stop, count in summary.get("stop_reasons", {}).items()
        },
        groups={
            key.removeprefix("by_"): {
                str(group): _estimate(found, int(finite(found["n"])), "accuracy")
                for group, found in groups.items()
            }
            for key, groups in summary.items()
            if key.startswith("by_") and groups
        },
        pass_at=sorted((int(at), _estimate(found, n)) for at, found in samples.items()),
        together=together,
        calls={
            str(role): finite(mean) for role, mean in summary.get("tool_calls_by_agent", {}).items()
        },
    )


def _estimate(record: Mapping[str, Any], n: int, key: str = "value") -> Estimate:
    value, (low, high) = record[key], record["ci95"]
    return Estimate(finite(value), finite(low), finite(high), n)


def _evaluation(run: Path, top: Path, name: str, manifest: Json, parts: Parts) -> EvaluationRun:
    summary = object_of(run / SUMMARY)
    found = _read_evaluation(run / SUMMARY, summary, name)
    found.observations = str(_mapping(manifest.get("recipe")).get("observations", "real"))
    fingerprint = str(_mapping(manifest.get("inputs")).get("tasks", ""))
    named = Path(str(summary.get("tasks", "")))
    found.on = parts.name_tasks(fingerprint, named.stem)
    found.inputs = inputs_of(manifest)
    seconds = object_of(run / LATENCY)
    with suppress(KeyError, ValueError):  # of a run whose timings were lost
        found.figures |= {key: finite(seconds[key]) for key in ("p50", "p95")}
    if (run / SCORES).is_file():
        found.scores = read_scores(run / SCORES)
    else:
        parts.notes.append(f"{name}: no {SCORES}, so it is in no comparison.")
    found.tasks = _tasks(
        (run / "tasks.jsonl", named, run.parent / named.name, top / named.name), fingerprint
    )
    if (run / CHAINS).is_file():
        found.chains = _chains(run / CHAINS)
    else:
        parts.notes.append(f"{name}: no {CHAINS}, so none of its chains is shown.")
    if found.chains and not found.tasks:
        parts.notes.append(
            f"{name}: its tasks {named.name!r} are not there or have changed, so its chains stand "
            "without the right answers."
        )
    return found


def _tasks(paths: Iterable[Path], fingerprint: str) -> dict[str, Task]:
    """Read the tasks with their right answers, if a file is still the one that was evaluated."""
    for path in paths:
        if path.name and path.is_file():
            try:
                tasks = TaskSet.load(path)
            except CoaError:
                continue
            if tasks.fingerprint() == fingerprint:
                return {task.id: task for task in tasks}
    return {}


def _chains(path: Path) -> list[Chain]:
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


# -- training -------------------------------------------------------------------------------


def _add_training(run: Path, kind: str, name: str, manifest: Json, parts: Parts) -> None:
    if not (records := _lines(run / METRICS)):
        parts.notes.append(f"{name}: {METRICS} has no update yet, so its training is left out.")
        return
    recipe = _mapping(manifest.get("recipe"))
    used = recipe | _mapping(recipe.get(kind))
    if "model" in used:
        used["model"] = model_name(str(used["model"]))
    known = (key for key in (*_RECIPE, "group_size") if key in used)
    said = ", ".join(f"{key.replace('_', ' ')} {used[key]}" for key in known)
    finished = any(record.get("event") == "finished" for record in _lines(run / TIMINGS))
    parts.trainings.append(Training(name, kind, records, said, finished))
