"""What the studies that train have in common: chains, arms, and how an arm is measured.

Chains are recorded, distilled and trained on per seed; the tasks to measure with are the same for
all seeds and arms, and what is like one of them is not trained on. Every arm is a run directory of
the usual stages, so a killed study continues where it was; a model is loaded only for measurements
that are missing.
"""

from __future__ import annotations

import gc
import json
import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coa.distillation.dataset import Distilling, DistillSettings, run_distillation
from coa.engines.base import Engine
from coa.environments import make_tasks
from coa.errors import ConfigError, RecordError, UsageError
from coa.evaluation.compare import PAIRED_RESAMPLES, SCORES, SUMMARY
from coa.evaluation.run import EvalSettings, run_eval
from coa.io.runs import Json, read_jsonl, read_object, write_atomic
from coa.io.settings import load_recipe, to_json, without_speed
from coa.lab.speedrun_recipe import PACE, EvalPart
from coa.models.references import identity, resolve
from coa.models.weights import MANIFEST
from coa.recording.record import Recording, run_recording
from coa.statistics import Z95, Estimate, as_share, difference_of, tally
from coa.tasks import TaskSet, in_turn
from coa.train.settings import SftSettings
from coa.trajectory import Trajectory, load_trajectories

if TYPE_CHECKING:
    from coa.models.codec import Codec


Scores = Mapping[str, float]
"""A number for each task."""
BySeed = Mapping[int, Scores]


def pooled(table: Sequence[Sequence[float]], resamples: int = PAIRED_RESAMPLES) -> Estimate:
    """The mean of a table (a row for each seed, a column for each task) with its interval."""
    n, seeds = len(table[0]) if table else 0, len(table)
    assert n and all(len(row) == n for row in table), [len(row) for row in table]
    mean = sum(map(sum, table)) / (n * seeds)
    if len({value for row in table for value in row}) == 1:
        return Estimate(mean, mean, mean, n)
    sums: dict[tuple[int, ...], list[float]] = {}
    means = []
    for chosen, tasks in _draws(seeds, n, resamples):
        if chosen not in sums:  # there are few: 10 of three seeds
            sums[chosen] = [sum(values) for values in zip(*(table[s] for s in chosen), strict=True)]
        means.append(sum(map(sums[chosen].__getitem__, tasks)) / (n * seeds))
    means.sort()
    low, high = means[int(0.025 * resamples)], means[max(0, int(0.975 * resamples) - 1)]
    return Estimate(mean, low, high, n)


@lru_cache(maxsize=2)
def _draws(seeds: int, n: int, resamples: int) -> list[tuple[tuple[int, ...], array[int]]]:
    """Seeds and tasks of every resample: the same for all tables of one shape, and kept, since
    drawing takes longer than summing."""
    rng = random.Random(0)
    return [
        (
            tuple(sorted(rng.choices(range(seeds), k=seeds))),
            array("L", rng.choices(range(n), k=n)),
        )
        for _ in range(resamples)
    ]


def measure(
    arms: Mapping[str, BySeed],
    against: str,
    resamples: int = PAIRED_RESAMPLES,
    *,
    rerun: bool = True,
    share: bool = True,
) -> Json:
    """One measure of all arms, and of each the difference to the arm `against`.

    `rerun`: the seeds are repetitions on the same tasks. Otherwise they only made the tasks, and
    all of those are one sample. `share`: the numbers are 0 or 1 and their mean is a share of tasks.
    """
    seeds = list(arms[against])
    order = {seed: sorted(arms[against][seed]) for seed in seeds}
    tables: dict[str, list[list[float]]] = {}
    for name, by_seed in arms.items():
        for seed in seeds:
            if sorted(by_seed.get(seed, ())) != order[seed]:
                raise RecordError(
                    f"arms {name!r} and {against!r} were not measured on the same tasks under "
                    f"seed {seed}. Delete the study's directory to start again."
                )
        tables[name] = [[by_seed[seed][task] for task in order[seed]] for seed in seeds]
    found: Json = {"seeds": seeds, "rerun": rerun, "share": share, "against": against}
    found |= {"arms": {}, "differences": {}}
    for name, table in tables.items():
        # Where all but a few tasks had 0, or 1, a bootstrap has little width or none. Tasks that
        # were not drawn may differ all the same: Wilson's interval over tasks says by how much.
        found["arms"][name] = _shown(table, resamples, rerun, as_share if share else None)
        if name == against:
            continue
        pairs = [
            [mine - theirs for mine, theirs in zip(row, other, strict=True)]
            for row, other in zip(table, tables[against], strict=True)
        ]
        every = [difference for row in pairs for difference in row]
        widen = partial(difference_of, every) if share and not rerun else None
        shown = found["differences"][name] = _shown(pairs, resamples, rerun, widen)
        if rerun and len(seeds) > 1:
            over_seeds = student([sum(row) / len(row) for row in pairs])
            shown["seeds_ci95"] = over_seeds.rounded(digits=5)["ci95"]
        # Not wins and losses: of some measures less is better.
        shown["above"], shown["below"] = tally(every)
    return found


def _shown(
    table: Sequence[Sequence[float]],
    resamples: int,
    rerun: bool,
    widen: Callable[[Estimate], Estimate] | None,
) -> Json:
    """The mean, its interval, which may not be narrower than few tasks allow, and each seed's."""
    rows = table if rerun else [[value for row in table for value in row]]
    value = pooled(rows, resamples)
    return {
        **(widen(value) if widen else value).rounded(digits=5),
        "n": value.n,
        "by_seed": [round(sum(row) / len(row), 5) for row in table],
    }


def student(values: Sequence[float]) -> Estimate:
    """The mean with Student's t interval: for a handful of repetitions, which is too few to draw
    from."""
    n = len(values)
    if n < 2:
        return Estimate(sum(values) / n if n else math.nan, -math.inf, math.inf, n)
    mean = sum(values) / n
    half = _t95(n - 1) * math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)
    return Estimate(mean, mean - half, mean + half, n)


def _t95(freedom: int) -> float:
    """The 97.5% quantile of Student's distribution."""
    few = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
    if freedom <= len(few):
        return few[freedom - 1]
    z, d = Z95, freedom  # Cornish and Fisher's expansion, right to four digits from here on
    return (
        z
        + (z**3 + z) / (4 * d)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * d**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * d**3)
    )


class Tables:
    """The numbers of a study, by measure, arm, seed and task."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, dict[int, Scores]]] = {}

    def put(self, measured: str, arm: str, seed: int, scores: Scores) -> None:
        self._held.setdefault(measured, {}).setdefault(arm, {})[seed] = scores

    def of_seed(self, seed: int) -> dict[str, dict[str, Scores]]:
        """The numbers of one seed, by measure and arm."""
        return {
            measured: {arm: by_seed[seed] for arm, by_seed in arms.items()}
            for measured, arms in self._held.items()
        }

    def only(self, arms: Sequence[str]) -> Tables:
        """The same of these arms alone."""
        chosen = Tables()
        for name, held in self._held.items():
            chosen._held[name] = {arm: held[arm] for arm in arms}
        return chosen

    def compared(self, against: str, *, rerun: bool = True, counts: Sequence[str] = ()) -> Json:
        """Every measure of all arms against one of them; see `measure`. `counts` are no shares."""
        return {
            name: measure(arms, against, rerun=rerun, share=name not in counts)
            for name, arms in self._held.items()
        }


def verdict(difference: Json) -> str:
    """What the intervals of a difference say, in a word: over tasks and seeds, and over seeds."""
    intervals = [difference["ci95"], difference.get("seeds_ci95", difference["ci95"])]
    if all(low > 0 for low, _ in intervals):
        return "higher"
    return "lower" if all(high < 0 for _, high in intervals) else "not told apart"


def lines(title: str, found: Json) -> Iterable[str]:
    """A measure as a small table: every arm, every seed, and the differences."""
    n, seeds = next(iter(found["arms"].values()))["n"], len(found["seeds"])
    yield f"{title}, n = {n}" + (f", each under {seeds} seeds" if found["rerun"] else "")
    for name, shown in found["arms"].items():
        yield _row(name, shown, found["share"])
    yield from differences(found)


def differences(found: Json) -> Iterable[str]:
    """Each arm less the one that it is compared with."""
    for name, shown in found["differences"].items():
        told = f"{verdict(shown)}: above in {shown['above']}, below in {shown['below']}"
        yield f"{_row(f'{name} vs ' + found['against'], shown, found['share'], '+')}  {told}"


def _row(name: str, shown: Json, share: bool, sign: str = "") -> str:
    def number(value: float) -> str:
        return f"{value:{sign}.1%}" if share else f"{value:{sign}.4g}"

    interval = "[{}, {}]".format(*map(number, shown["ci95"]))
    seeds = "  ".join(map(number, shown["by_seed"]))
    return f"  {name:<38}{number(shown['value']):>8}  {interval:<18}  by seed  {seeds}"


Note = Callable[[str], None]
SET = "atlas-mhqa"
FAMILIES = (
    "city_currency",
    "capital_currency",
    "city_capital",
    "city_language",
    "country_capital",
    "more_populous_country",
)
CHAINS, FINISHED = "trajectories.jsonl", "README.md"
"""What distillation writes, and what it writes last."""
WITHIN = 0.01
"""How far the tokens of arms may be apart that are to have the same."""
SPARE = 1.25
"""Tasks to record for each chain that is wanted: the team errs, and filters drop some."""


@dataclass(frozen=True)
class ChainPart:
    """What is trained on: chains of the experts' work on training tasks, other ones per seed."""

    rows: int = 200
    families: tuple[str, ...] = FAMILIES
    worlds: tuple[int, ...] = (0, 1, 2, 3)
    """Recorded in the real world and in three invented ones, in equal parts."""
    error_rate: float = 0.1

    def __post_init__(self) -> None:
        if self.rows < 1 or not self.worlds:
            raise ConfigError(
                f"chains: found rows {self.rows} and worlds {list(self.worlds)}, expected at least "
                "one of each."
            )


@dataclass(frozen=True)
class MeasurePart(EvalPart):
    """How arms are measured: held-out entities, in the real world and in one never trained on."""

    n: int = 200
    world_seed: int = 11
    """0: no invented world."""
    seed: int = 5

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"eval.n: found {self.n}, expected at least 1.")


@dataclass(frozen=True)
class TrainingStudy:
    """Settings of a study that trains."""

    seeds: tuple[int, ...] = (0, 1, 2)
    chains: ChainPart = field(default_factory=ChainPart)
    sft: SftSettings = field(default_factory=lambda: SftSettings(rank=32, batch_size=4))
    eval: MeasurePart = field(default_factory=MeasurePart)

    def __post_init__(self) -> None:
        if self.sft.seed != SftSettings().seed:
            raise ConfigError("sft.seed: every arm has the seeds of the study; use seeds=[...].")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds: found {list(self.seeds)}, expected different numbers.")
        if self.eval.world_seed and self.eval.world_seed in self.chains.worlds:
            raise ConfigError(
                f"eval.world_seed: found {self.eval.world_seed}, which is one of chains.worlds; "
                "expected a world that nothing is trained in."
            )


class Study(NamedTuple):
    """How to read its settings, what it will do, how it is done and told."""

    question: str
    read: Callable[[Sequence[str]], Any]
    plan: Callable[[Any], list[StudyPiece]]
    run: Callable[[Any, Path, Note], Json]
    show: Callable[[Json], Iterable[str]]


def reader(schema: type[Any]) -> Callable[[Sequence[str]], Any]:
    """Reads settings. Where a part is overridden, the rest of it stays as the study has it, not as
    the part's own defaults are."""
    return lambda overrides: load_recipe(None, overrides, schema, to_json(schema()))


class StudyPiece(NamedTuple):
    """A part of the work, for the estimate."""

    what: str
    times: int
    seconds: float
    """Of one time, on two cores without a GPU."""


RECORD_SECONDS = 0.12
"""Of recording, distilling and replaying a task."""


def pieces(settings: TrainingStudy, arms: int, recorded: int | None = None) -> list[StudyPiece]:
    """What a study with so many trained arms does, evaluations included."""
    rows, n, seeds = settings.chains.rows, settings.eval.n, len(settings.seeds)
    sets = 1 + bool(settings.eval.world_seed)
    recorded = recorded or to_record(rows)
    return [
        StudyPiece(f"record and distil {recorded} tasks", seeds, recorded * RECORD_SECONDS),
        StudyPiece(f"fine-tune on about {rows} chains", arms * seeds, rows * PACE[SET].row),
        StudyPiece(f"evaluate on {n} held-out tasks", arms * seeds * sets, n * PACE[SET].rollout),
    ]


# -- what is trained on ----------------------------------------------------------------------


def held_out(root: Path, part: MeasurePart, families: Sequence[str]) -> dict[str, Path]:
    """The task files to measure with, by what they are."""
    worlds = {"held out": 0} | ({"invented world": part.world_seed} if part.world_seed else {})
    paths = {}
    for name, world in worlds.items():
        made = make_tasks(
            SET, "heldout_entity", part.n, part.seed, world_seed=world, families=families or None
        )
        if len(made) < part.n:
            raise UsageError(f"eval.n: found {part.n}, and there are {len(made)} such tasks.")
        paths[name] = root / f"tasks-{name.replace(' ', '-')}.jsonl"
        made.save(paths[name])
    return paths


class Chains(NamedTuple):
    """Tasks and, by grammar, the chains that were kept of the team's work on them."""

    tasks: TaskSet
    by_grammar: Mapping[str, list[Trajectory]]


def make_chains(
    folder: Path,
    part: ChainPart,
    seed: int,
    against: Iterable[Path],
    grammars: Sequence[str] = ("mhqa",),
    *,
    n: int | None = None,
) -> Chains:
    """Record the experts on training tasks of this seed and distil their work, once per grammar.

    Worlds take turns, so that any first part of the chains is a fair sample.
    """
    recorded = n or to_record(part.rows)
    each = -(-recorded // len(part.worlds))
    worlds = [
        make_tasks(SET, "train", each, seed, world_seed=w, families=part.families or None)
        for w in part.worlds
    ]
    tasks = TaskSet(tuple(in_turn(map(iter, worlds)))[:recorded], "train")
    path, episodes = folder / "tasks.jsonl", folder / "episodes.jsonl"
    outs = {grammar: folder / f"distilled-{grammar}" for grammar in grammars}
    missing = [g for g, out in outs.items() if not (out / FINISHED).is_file()]
    if missing:
        tasks.save(path)
        how = Recording(tasks=path, options={"error_rate": part.error_rate}, seed=seed)
        run_recording(how, episodes)
    for grammar in missing:
        settings = DistillSettings(grammar=grammar)
        asked = Distilling(episodes, path, settings, against=list(against))
        run_distillation(asked, outs[grammar])
    kept = {grammar: load_trajectories(out / CHAINS) for grammar, out in outs.items()}
    return Chains(tasks, kept)


def to_record(rows: int) -> int:
    """Tasks to record for so many chains."""
    return round(rows * SPARE) + 4


def first(chains: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """So many chains; fewer would make arms unequal."""
    if len(chains) < count:
        raise UsageError(
            f"chains.rows: {count} chains are wanted and {len(chains)} were kept of the team's "
            "work. Lower it, or the team's mistakes (chains.error_rate)."
        )
    return list(chains[:count])


# -- arms ------------------------------------------------------------------------------------


def train(
    chains: Sequence[Trajectory], sft: SftSettings, seed: int, folder: Path, note: Note
) -> str:
    """Fine-tune, unless that is done; the reference of the trained model."""
    from coa.train.sft import train_on

    adapter = folder / "adapter"
    if not (adapter / MANIFEST).is_file():
        adapter = train_on(chains, replace(sft, seed=seed), folder, note)
        gc.collect()  # a policy has cycles, and the next model needs its memory
    return f"{resolve(sft.model).base}+{adapter}"


class Measurement(NamedTuple):
    """A folder that holds `summary.json` when it is done, and how to get there."""

    out: Path
    run: Callable[[Engine], Any]


def measure_all(model: str, measurements: Iterable[Measurement], part: MeasurePart) -> None:
    """Take the measurements that are missing, with one engine; without any, nothing is loaded."""
    missing = [each for each in measurements if not (each.out / SUMMARY).is_file()]
    if not missing:
        return
    with part.loaded(model) as engine:
        for each in missing:
            each.run(engine)
    del engine
    gc.collect()


def with_tokens(
    chains: Iterable[Trajectory], tokens: int, sft: SftSettings, what: str
) -> list[Trajectory]:
    """As many of the first chains as have `tokens` tokens together, as nearly as whole chains can;
    at least one. `what` is a count of `trained_on`."""
    total, chosen = 0, list[Trajectory]()
    for chain in chains:
        more = int(trained_on([chain], sft)[what])
        if chosen and abs(total + more - tokens) >= abs(total - tokens):
            return chosen
        total += more
        chosen.append(chain)
    if total < (1 - WITHIN) * tokens:
        raise UsageError(
            f"arms are to have {tokens} {what.replace('_', ' ')} each, and all {len(chosen)} chains"
            f" have {total}. Record more of them, or train on fewer (chains.rows)."
        )
    return chosen


def solved(folder: Path) -> Scores:
    """The score of each task of a finished evaluation, by its one rollout."""
    return {str(r["task_id"]): float(r["score"]) for _, r in read_jsonl(folder / SCORES)}


def counted(folder: Path, what: Callable[[Trajectory], float]) -> Scores:
    """A number for each task from its rollout."""
    trajectories = load_trajectories(folder / CHAINS)
    return {each.task_id: float(what(each)) for each in trajectories}


TITLES = {
    "held out": "solved, held-out entities",
    "invented world": "solved, a world never trained on",
    "malformed": "rollouts with a malformed turn",
}
"""What all of them measure."""


SEED_FILES = "seed-*.json"


def common_settings(settings: Json) -> Json:
    """What all seeds of a study have in common, without what changes no result."""
    return {name: table for name, table in without_speed(settings).items() if name != "seeds"}


class TrainedArms:
    """The arms of a study that trains, as they are made and measured."""

    def __init__(self, settings: TrainingStudy, root: Path) -> None:
        self.settings, self.root = settings, root
        self.files = held_out(root, settings.eval, settings.chains.families)
        self.tables = Tables()
        self.equal: dict[str, list[Json]] = {}
        """By arm what it was trained on, for each seed."""

    def seeds(self) -> Iterator[int]:
        """Those that are not measured yet. What a seed gave is kept in a file, `seed-N.json`, once
        the next is asked for: seeds of several machines are put together by copying files."""
        for seed in self.settings.seeds:
            path = self.root / SEED_FILES.replace("*", str(seed))
            if path.is_file():
                self._recall(seed, path)
                continue
            yield seed
            arms = {arm: each[-1] for arm, each in self.equal.items()}
            measured = {"equal": arms, "scores": self.tables.of_seed(seed)}
            write_atomic(path, json.dumps(self._of(seed) | measured) + "\n")

    def _recall(self, seed: int, path: Path) -> None:
        kept = read_object(path, "Delete it to run this seed again.")
        for name, value in self._of(seed).items():
            if kept.get(name) != value:
                raise UsageError(
                    f"{path}: it has another {name} than this study. Give the same, or delete the "
                    "file to run this seed again."
                )
        for arm, trained in kept["equal"].items():
            self.equal.setdefault(arm, []).append(trained)
        for measured, arms in kept["scores"].items():
            for arm, scores in arms.items():
                self.tables.put(measured, arm, seed, scores)

    def _of(self, seed: int) -> Json:
        """What a file of a seed is of."""
        settings = common_settings(to_json(self.settings))
        return {"seed": seed, "base": identity(self.settings.sft.model), "settings": settings}

    def chains(
        self,
        seed: int,
        grammars: Sequence[str] = ("mhqa",),
        n: int | None = None,
        part: ChainPart | None = None,
        name: str = "chains",
    ) -> Chains:
        folder, against = self.root / f"{name}-{seed}", self.files.values()
        return make_chains(folder, part or self.settings.chains, seed, against, grammars, n=n)

    def measure(
        self,
        arm: str,
        seed: int,
        model: str,
        trained: Json,
        folder: Path,
        grammar: str = "mhqa",
        also: Iterable[Measurement] = (),
    ) -> Path:
        """Measure a model on the task files, as far as that is missing; where its rollouts on
        held-out entities are."""
        part, outs = self.settings.eval, dict[str, Path]()
        wanted: list[Measurement] = []
        for name, file in self.files.items():
            out = outs[name] = folder / f"eval-{name.replace(' ', '-')}"
            settings = part.settings(model, file, grammar=grammar)
            wanted.append(Measurement(out, partial(_evaluate, settings, out)))
        measure_all(model, [*wanted, *also], part)
        self.equal.setdefault(arm, []).append(trained)
        for name, out in outs.items():
            self.tables.put(name, arm, seed, solved(out))
        faulty = counted(outs["held out"], lambda t: t.usage.malformed > 0)
        self.tables.put("malformed", arm, seed, faulty)
        return outs["held out"]


def _evaluate(settings: EvalSettings, out: Path, engine: Engine) -> None:
    run_eval(settings, out, engine=engine)


def trained_on(chains: Sequence[Trajectory], sft: SftSettings) -> Json:
    """Rows, their tokens and those that have a weight, each as often as it is trained on: what arms
    have in common."""
    from coa.train.rows import total_tokens
    from coa.train.sft import Order, choose

    rows = choose(chains, sft, _codec(resolve(sft.model).base)).rows
    order = Order(rows, sft)
    batches = map(order.batch, range(order.updates))
    trained = [row for batch in batches for unit in batch for row in unit]
    return {
        "rows": len(rows),
        "tokens": total_tokens(trained),
        "trained_tokens": sum(row.trained for row in trained),
        "updates": order.updates,
    }


@cache
def _codec(model: str) -> Codec:
    from coa.models.codec import codec_of

    return codec_of(model)
