"""What a solved task costs a trained student, against the team it learnt from, on the same tasks.

The rest of `coa study cost` counts a chain, a student that never errs. Here a real one is run: on
held-out tasks, failures and detours paid. `per_solved` is the tokens of all tasks over the number
of solved ones. A saving means little where fewer tasks are solved, so the difference in success is
told with it, paired by task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coa.environments import GYM, SETS, TOOLBOX, make_tasks
from coa.errors import ConfigError, did_you_mean
from coa.evaluation.compare import PAIRED_RESAMPLES, SCORES, SUMMARY, Resamples
from coa.evaluation.run import run_eval
from coa.evaluation.samples import Sample, majority
from coa.io.runs import Json, Run, read_jsonl
from coa.io.settings import to_json, without_speed
from coa.lab.speedrun_recipe import PACE, EvalPart
from coa.lab.study_arms import Note, StudyPiece
from coa.models.codec import Codec
from coa.models.references import identity, model_folder, resolve, resolve_default
from coa.recording.episode import Episode, load_episodes
from coa.recording.record import Recording, run_recording
from coa.rewards import auto
from coa.statistics import interval, paired
from coa.tasks import Task
from coa.trajectory import Trajectory, load_trajectories

CACHES = {"none": "no cache", "task": "cache of a task"}


@dataclass(frozen=True)
class StudentPart(EvalPart):
    """The measured student; without a model there is none."""

    model: str = ""
    tokenizer: str = ""
    """Counts the team's tokens; empty: that of the student's base. The student's own are counted
    as they were sampled."""
    n: int = 500
    """Held-out tasks of each set."""
    sets: tuple[str, ...] = ("atlas-mhqa", "atlas-web", GYM)
    seed: int = 5
    error_rate: float = 0.1
    turns: int = 10
    turn_tokens: int = 512
    context: int = 3072
    """These are the budget that AFM-135M is trained and measured with (recipes/full.toml)."""
    concurrency: int = 64
    k: int = 1
    """Rollouts of a task. Of several the most frequent answer counts, and all are paid."""
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name in self.sets:
            if name not in SETS:
                raise ConfigError(f"student.sets: {name!r} is no set.{did_you_mean(name, SETS)}")
        if self.n < 1:
            raise ConfigError(f"student.n: found {self.n}, expected at least 1.")
        if (self.k > 1) is not (self.temperature > 0):
            raise ConfigError(
                f"student.k is {self.k} and student.temperature {self.temperature:g}: several "
                "rollouts need a temperature, 0.7 for instance, and one is greedy."
            )


def student_pieces(part: StudentPart) -> list[StudyPiece]:
    if not part.model:
        return []
    return [
        StudyPiece(_titled(part, name), 1, part.n * part.k * PACE[name].rollout)
        for name in part.sets
    ]


def _titled(part: StudentPart, name: str) -> str:
    votes = f", {part.k} rollouts each," if part.k > 1 else ""
    return f"student and team on {part.n} tasks of {name}{votes}"


def study_student(
    root: Path, part: StudentPart, note: Note, resamples: int = PAIRED_RESAMPLES
) -> Json:
    """Run the student and the team on held-out tasks of every set; it continues."""
    model = resolve_default(part.model)
    found: Json = {"model": model, "sets": {}}
    recipe = without_speed({"eval": to_json(part)})["eval"]
    with Run.open(root, "study student", recipe, identity(model), part.seed):
        for name in part.sets:
            note(f"== student on {name}")
            found["sets"][name] = _compare(root / name, name, part, model, resamples)
    return found


def _compare(folder: Path, name: str, part: StudentPart, model: str, resamples: int) -> Json:
    split = {GYM: "heldout_seed", TOOLBOX: "test"}.get(name, "heldout_entity")
    tasks, path = make_tasks(name, split, part.n, part.seed), folder / "tasks.jsonl"
    tasks.save(path)
    episodes = folder / "episodes.jsonl"
    how = Recording(tasks=path, options={"error_rate": part.error_rate}, seed=part.seed)
    run_recording(how, episodes)
    out = folder / "student"
    if not (out / SUMMARY).is_file():
        run_eval(part.settings(model, path, k=part.k, temperature=part.temperature), out)
    codec = Codec.from_folder(model_folder(resolve(part.tokenizer or resolve(model).base)))
    columns = _columns(list(tasks), load_episodes(episodes), out, codec)
    return compared(columns, resamples)


def _columns(
    tasks: Sequence[Task], episodes: Sequence[Episode], out: Path, codec: Codec
) -> dict[str, list[float]]:
    """Tokens and success of both, a number for each task."""
    recorded = {episode.task_id: episode for episode in episodes}
    rollouts = _rollouts(out)
    columns: dict[str, list[float]] = {}
    for task in tasks:
        episode, own = recorded[task.id], rollouts[task.id]
        usages = [sample.trajectory.usage for sample in own]
        spent = episode.count_tokens(lambda text: len(codec.encode(text)))
        answered = Trajectory(task.id, task.question, "", answer=episode.answer)
        row = {
            "team none": spent.total,
            "team task": spent.total_cached,
            "team solved": auto(task, answered) == 1.0,
            "student none": sum(used.prompt_tokens + used.sampled_tokens for used in usages),
            "student task": sum(used.total_tokens for used in usages),
            "student solved": majority(task, own).score == 1.0,
        }
        for column, value in row.items():
            columns.setdefault(column, []).append(float(value))
    return columns


def _rollouts(out: Path) -> dict[str, list[Sample]]:
    """The judged rollouts of each task."""
    scores = {(r["task_id"], r["sample"]): float(r["score"]) for _, r in read_jsonl(out / SCORES)}
    found: dict[str, list[Sample]] = {}
    for made in load_trajectories(out / "trajectories.jsonl"):
        sample = Sample(made, scores[made.task_id, made.sample])
        found.setdefault(made.task_id, []).append(sample)
    return found


def compared(columns: dict[str, list[float]], resamples: int = PAIRED_RESAMPLES) -> Json:
    """Tokens for a solved task of both, how many times fewer the student needs, and success."""
    table = Resamples(columns, resamples=resamples)
    success = paired(columns["team solved"], columns["student solved"])
    found: Json = {
        "n": table.n,
        "solved": {who: int(sum(columns[f"{who} solved"])) for who in ("team", "student")},
        "success": {
            **success.difference.rounded(digits=5),
            "wins": success.wins,
            "losses": success.losses,
            "p_value": round(success.p_value, 5),
        },
        "tokens": {},
    }
    if not all(found["solved"].values()):  # tokens for a solved task are then a division by 0
        return found
    for cache in CACHES:
        team, student = ((f"{who} {cache}", f"{who} solved") for who in ("team", "student"))
        found["tokens"][cache] = {
            "team": table.ratio(*team).figures(),
            "student": table.ratio(*student).figures(),
            "reduction": table.reduction(team, student).figures(),
            "times_fewer": table.times(team, student).figures(),
        }
    return found


def student_lines(found: Json) -> Iterable[str]:
    """The measured student, for people."""
    yield f"a measured student: {found['model']}, on held-out tasks; failures are paid for"
    for name, one in found["sets"].items():
        success, solved, n = one["success"], one["solved"], one["n"]
        low, high = success["ci95"]
        word = "lower" if high < 0 else "higher" if low > 0 else "not told apart"
        yield ""
        yield f"{name}: {n} tasks"
        yield (
            f"  solved: team {solved['team'] / n:.1%}, student {solved['student'] / n:.1%}, "
            f"difference {success['value']:+.1%} [{low:+.1%}, {high:+.1%}]: {word}"
        )
        if not one["tokens"]:
            yield "  nothing to divide by: one of them solved no task"
        for cache, row in one["tokens"].items():
            fewer, times = row["reduction"], row["times_fewer"]
            yield (
                f"  tokens for a solved task, {CACHES[cache]}: team {row['team']['value']:,.0f}, "
                f"student {row['student']['value']:,.0f}: {fewer['value']:.1%} fewer "
                f"{interval(fewer['ci95'], '.1%')}, {times['value']:.2f} times "
                f"{interval(times['ci95'], '.2f')}"
            )
