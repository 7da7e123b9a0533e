"""The studies that train: `coa study mask`, `coa study react` and `coa study rl`.

* `mask`: does it help to leave observations out of the loss? Two arms train on the same chains with
  the same seeds, order and number of updates. In one what tools answered has weight 0, in the other
  it counts like the model's own words. Both are measured in the usual loop, which stops a turn at
  the end of a call, and once more with nobody to stop them there: what does the model write where
  an observation belongs?
* `react`: is a chain of agents better than reasoning and acting, at equal cost? The same episodes
  are written down twice: with planner, searcher and critic as agents of their own (`mhqa`), and as
  thoughts between calls (`react`). What is equal: the team whose work it is and its words, the
  trained tokens, the base, the learning rate, and the budget of a rollout. ReAct's chains are
  shorter, so more of them are trained on, and there are more updates. A rollout is greedy, so what
  a smaller budget would have cut is known without running it again: the accuracy under a budget of
  B tokens counts the tasks that were solved within B.
* `rl`: what does reinforcement learning add to imitation? For every seed there is one start, fine-
  tuned on few chains as in `coa speedrun`, whose settings of SFT and RL it has. From it one arm
  goes on with reinforcement learning on further training tasks, and another with more imitation:
  the team's chains for those same tasks, again from the first if need be, until as many tokens were
  trained on as in all updates of the other. Sampling, which takes RL about as long as training, is
  not given to the control; what both took is in the timings of their runs. A third samples as many
  tokens as RL did, in rounds, and is fine-tuned on the right attempts (`coa improve`): what is
  comparing attempts worth, beyond having them? No held-out task chooses a checkpoint: the last
  weights are measured.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from pathlib import Path

from coa.engines import rollouts_at_once
from coa.engines.base import Engine, Sampling, sampling_key
from coa.environment import load_environment, open_environments
from coa.errors import ConfigError, UsageError
from coa.evaluation.compare import SUMMARY
from coa.grammar import FaultKind, Grammar, load_grammar, parse, system_prompt
from coa.io.collect import Line, collect
from coa.io.runs import METRICS, Json, read_jsonl, write_atomic
from coa.io.settings import load_recipe, to_json
from coa.lab.speedrun_recipe import PACE, read_speedrun_recipe, shipped_recipe
from coa.lab.study_arms import (
    SET,
    SPARE,
    TITLES,
    ChainPart,
    Measurement,
    MeasurePart,
    Note,
    Scores,
    Study,
    StudyPiece,
    TrainedArms,
    TrainingStudy,
    counted,
    differences,
    first,
    lines,
    pieces,
    reader,
    solved,
    to_record,
    train,
    trained_on,
    with_tokens,
)
from coa.models.references import resolve
from coa.models.weights import MANIFEST
from coa.rewards import RewardSettings
from coa.tasks import Task, TaskSet
from coa.train.settings import (
    AlarmSettings,
    CheckSettings,
    ImproveRecipe,
    ImproveSettings,
    RlRecipe,
    RlSettings,
    RolloutSettings,
    SftSettings,
    preset_defaults,
    with_length,
)
from coa.trajectory import Trajectory

_TITLES = TITLES | {
    "called": "texts that begin with a call, nobody stopping it",
    "invented": "texts with an invented observation",
    "tokens": "tokens of a rollout, prompt and observations included",
    "tool calls": "tool calls of a rollout",
    "written tokens": "tokens that the model writes in a rollout",
}


def _shown(result: Json) -> Iterable[str]:
    """Every measure as a small table."""
    for name, found in result["measures"].items():
        yield ""
        yield from lines(_TITLES.get(name, f"solved {name}, held-out entities"), found)
        for other in ("against_control", "against_improve"):
            if other in result:
                yield from differences(result[other][name])


# -- mask --------------------------------------------------------------------------------------

WEIGHTS = {"masked": 0.0, "trained on": 1.0}
"""Arms of `mask`: the weight of observations in each."""
TEXTS = "texts.jsonl"


@dataclass(frozen=True)
class MaskStudy(TrainingStudy):
    unstopped_tokens: int = 160
    """Sampled without a stop at the end of a call: room for a call and what follows it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unstopped_tokens < 1:
            raise ConfigError(
                f"unstopped_tokens: found {self.unstopped_tokens}, expected at least 1."
            )
        if self.sft.observation_weight:
            raise ConfigError("sft.observation_weight: is what this study compares; leave it out.")


def _plan_mask(settings: MaskStudy) -> list[StudyPiece]:
    n, runs = settings.eval.n, len(WEIGHTS) * len(settings.seeds)
    return [*pieces(settings, len(WEIGHTS)), StudyPiece(f"{n} texts without stops", runs, n * 0.3)]


def _run_mask(settings: MaskStudy, root: Path, note: Note) -> Json:
    grammar, arms = load_grammar("mhqa"), TrainedArms(settings, root)
    for seed in arms.seeds():
        chains = first(arms.chains(seed).by_grammar["mhqa"], settings.chains.rows)
        for arm, weight in WEIGHTS.items():
            note(f"== seed {seed}: observations {arm}")
            folder = root / f"seed-{seed}" / arm.replace(" ", "-")
            sft = replace(settings.sft, observation_weight=weight)
            model = train(chains, sft, seed, folder / "sft", note)
            free = folder / "unstopped"
            also = [unstopped(arms.files["held out"], free, grammar, settings)]
            arms.measure(arm, seed, model, trained_on(chains, sft), folder, also=also)
            for name in ("called", "invented"):
                noted = {r["task_id"]: float(r[name]) for _, r in read_jsonl(free / TEXTS)}
                arms.tables.put(name, arm, seed, noted)
    return {"equal": arms.equal, "measures": arms.tables.compared("trained on")}


def _show_mask(result: Json) -> Iterable[str]:
    for arm, each in result["equal"].items():
        counts = [f"{one['trained_tokens']} of {one['tokens']} tokens" for one in each]
        yield f"{arm}, by seed: {each[0]['rows']} chains; {', '.join(counts)} count"
    yield from _shown(result)


def unstopped(tasks: Path, out: Path, grammar: Grammar, settings: MaskStudy) -> Measurement:
    """What the model writes for each task when a call does not end its turn."""
    return Measurement(
        out,
        lambda engine: asyncio.run(_unstopped(TaskSet.load(tasks), out, grammar, settings, engine)),
    )


async def _unstopped(
    tasks: TaskSet, out: Path, grammar: Grammar, settings: MaskStudy, engine: Engine
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokens, env = settings.unstopped_tokens, load_environment("atlas-mhqa", grammar=grammar.name)
    stop = tuple(f"</{name}>" for name in grammar.of_kind("answer"))

    def work(task: Task) -> Callable[[], Awaitable[Line]]:
        async def write() -> Line:
            bound = await opened.bound(task.public())
            prompt = engine.encode_prompt(system_prompt(bound), task.question)
            key = sampling_key(settings.eval.seed, task.id, 0, 0)
            made = await engine.generate(prompt, Sampling(max_tokens=tokens, stop=stop, key=key))
            text = engine.decode(made.ids)
            return Line({"task_id": task.id, "text": text, **judge(bound, text)})

        return write

    async with open_environments((env,)) as opened:
        found = await collect(
            out / TEXTS,
            {task.id: work(task) for task in tasks},
            parse=Line,
            key=lambda line: str(line.record["task_id"]),
            concurrency=rollouts_at_once(engine, settings.eval.concurrency),
        )
    shares = {
        name: sum(line.record[name] for line in found) / len(found) for name in judge(grammar, "")
    }
    write_atomic(out / SUMMARY, json.dumps({"n": len(found), **shares}, indent=2) + "\n")


def judge(grammar: Grammar, text: str) -> dict[str, bool]:
    """Whether a text has a whole call before anything is wrong with it, and whether its author
    wrote an observation, which is not the author's to write."""
    parsed = parse(grammar, text)
    begins = parsed.faults[0].at if parsed.faults else len(text)
    called = any(b.role in grammar.tool_roles and b.end <= begins for b in parsed.blocks)
    invented = any(fault.kind is FaultKind.FORGED for fault in parsed.faults)
    return {"called": called, "invented": invented}


# -- react -------------------------------------------------------------------------------------

GRAMMARS = {"chain of agents": "mhqa", "ReAct": "react"}
"""Arms of `react`."""


@dataclass(frozen=True)
class ReactStudy(TrainingStudy):
    budgets: tuple[int, ...] = (256, 320, 384, 512, 768)
    """Tokens of a rollout under which accuracy is told, besides eval.context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(budget < 1 for budget in self.budgets):
            raise ConfigError(f"budgets: found {list(self.budgets)}, expected numbers above 0.")


def _recorded(settings: ReactStudy) -> int:
    """More tasks than elsewhere, since more of the shorter chains are needed."""
    return to_record(round(settings.chains.rows * SPARE))


def _plan_react(settings: ReactStudy) -> list[StudyPiece]:
    return pieces(settings, len(GRAMMARS), _recorded(settings))


def _run_react(settings: ReactStudy, root: Path, note: Note) -> Json:
    arms, (ours, theirs) = TrainedArms(settings, root), GRAMMARS
    for seed in arms.seeds():
        made = arms.chains(seed, list(GRAMMARS.values()), _recorded(settings)).by_grammar
        chains = {ours: first(made[GRAMMARS[ours]], settings.chains.rows)}
        tokens = trained_on(chains[ours], settings.sft)["trained_tokens"]
        equal = with_tokens(made[GRAMMARS[theirs]], tokens, settings.sft, "trained_tokens")
        for arm, own in (chains | {theirs: equal}).items():
            note(f"== seed {seed}: {arm}")
            folder = root / f"seed-{seed}" / GRAMMARS[arm]
            model = train(own, settings.sft, seed, folder / "sft", note)
            trained = trained_on(own, settings.sft)
            out = arms.measure(arm, seed, model, trained, folder, GRAMMARS[arm])
            put = arms.tables.put
            for budget in settings.budgets:
                put(f"within {budget} tokens", arm, seed, within(out, budget))
            put("tokens", arm, seed, counted(out, lambda t: len(t.ids)))
            put("tool calls", arm, seed, counted(out, lambda t: t.usage.tool_calls))
    measures = arms.tables.compared(theirs, counts=("tokens", "tool calls"))
    return {"equal": arms.equal, "measures": measures}


def within(folder: Path, budget: int) -> Scores:
    """Whether each task was solved with at most so many tokens, the prompt included."""
    length = counted(folder, lambda trajectory: len(trajectory.ids))
    return {task: score * (length[task] <= budget) for task, score in solved(folder).items()}


def _show_react(result: Json) -> Iterable[str]:
    for arm, each in result["equal"].items():
        told = "; ".join(
            f"{one['rows']} chains, {one['trained_tokens']} tokens, {one['updates']} updates"
            for one in each
        )
        yield f"{arm}, trained on, by seed: {told}"
    yield from _shown(result)


# -- rl ----------------------------------------------------------------------------------------

UPDATE_SECONDS = 30.0
"""Of 48 rollouts, sampled and trained on: 18 with two threads that had bfloat16, 35 with one."""
TRAINED = 0.45
"""The share of them that is trained on: groups in which all earned the same are not."""
ROWS = 8
"""Chains of the start: as many as `coa speedrun` keeps of its recording."""


@dataclass(frozen=True)
class RlStudy(TrainingStudy):
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    eval: MeasurePart = field(default_factory=lambda: MeasurePart(world_seed=0))
    more: int = 200
    """Further training tasks: RL draws from them, the control imitates the team on them."""
    more_worlds: tuple[int, ...] = (0,)
    """Where these are; 0 is the real world."""
    rl: RlSettings = field(default_factory=RlSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    improve: ImproveSettings = field(default_factory=lambda: ImproveSettings(min_tool_calls=1))
    """Of the arm that keeps right attempts; it samples what RL sampled, a group for each task."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.improve.samples, self.improve.tokens) != (8, 0):
            raise ConfigError(
                "improve.samples, improve.tokens: it has as many attempts as rl.group_size, and as "
                "many tokens as RL sampled; leave them out."
            )
        usual = RlSettings()
        if (self.rl.model, self.rl.seed) != (usual.model, usual.seed):
            raise ConfigError(
                "rl.model, rl.seed: RL starts where SFT ended, with its seed; use seeds."
            )
        if self.more < 1:
            raise ConfigError(f"more: found {self.more}, expected at least 1.")
        if not self.more_worlds or self.eval.world_seed in {*self.more_worlds} - {0}:
            raise ConfigError(
                f"more_worlds: found {list(self.more_worlds)}, expected one or more, and not "
                "eval.world_seed, where nothing is trained."
            )


def _read_rl(overrides: Sequence[str]) -> RlStudy:
    """Settings: those of `coa speedrun` for chains, SFT and RL, unless told otherwise. The tables
    of RL are read like a recipe of its own, with what its preset says."""
    tables = ("rl.", "rollout.", "reward.", "alarms.")  # `improve.` is read with the rest
    of_rl = [each for each in overrides if each.lstrip().startswith(tables)]
    rest = [each for each in overrides if each not in of_rl]
    known, tables_of_rl = read_speedrun_recipe(None, []), shipped_recipe()
    defaults = {name: tables_of_rl[name] for name in ("rl", "rollout")}
    recipe = load_recipe(None, of_rl, RlRecipe, preset_defaults(None, of_rl, defaults))
    taught, practised = known.tasks[0], known.rl_tasks[0]
    usual = RlStudy(
        chains=ChainPart(ROWS, taught.families, taught.worlds, known.teacher.error_rate),
        sft=known.sft,
        eval=MeasurePart(**asdict(known.eval), world_seed=0),
        more=practised.n,
        more_worlds=practised.worlds,
        rl=with_length(recipe.rl, recipe.rollout),
        rollout=recipe.rollout,
        reward=recipe.reward,
        alarms=recipe.alarms,
    )
    return load_recipe(None, rest, RlStudy, to_json(usual))


def _plan_rl(settings: RlStudy) -> list[StudyPiece]:
    seeds, updates = len(settings.seeds), settings.rl.updates
    groups = settings.rl.tasks_per_update * settings.rl.group_size / 48
    to_do = to_record(settings.chains.rows) + to_record(settings.more)
    recorded, tuned, evaluated = pieces(settings, 1, to_do)
    tuned = tuned._replace(seconds=tuned.seconds * settings.sft.epochs)
    rows = round(updates * groups * 48 * TRAINED)
    return [
        recorded,
        tuned,
        StudyPiece(f"{updates} updates of RL", seeds, updates * groups * UPDATE_SECONDS),
        StudyPiece(f"fine-tune further on about {rows} chains", seeds, rows * PACE[SET].row),
        StudyPiece(  # it samples as much as RL, and trains on less
            f"{settings.improve.rounds} rounds of right attempts",
            seeds,
            updates * groups * UPDATE_SECONDS * 0.6,
        ),
        evaluated._replace(times=evaluated.times * 4),
    ]


def _run_rl(settings: RlStudy, root: Path, note: Note) -> Json:
    arms, rows = TrainedArms(settings, root), settings.chains.rows
    for seed in arms.seeds():
        start = first(arms.chains(seed).by_grammar["mhqa"], rows)
        seen = {chain.task_id for chain in start}
        further = replace(settings.chains, rows=settings.more, worlds=settings.more_worlds)
        made = arms.chains(seed, part=further, name="further-chains")
        chains = made.by_grammar["mhqa"]
        more = [chain for chain in chains if chain.task_id not in seen][: settings.more]
        folder = root / f"seed-{seed}"
        note(f"== seed {seed}: SFT")
        models = {"SFT": train(start, settings.sft, seed, folder / "sft", note)}
        note(f"== seed {seed}: SFT + RL")
        tasks = _tasks(made.tasks, more, folder / "tasks-rl.jsonl")
        models["SFT + RL"] = _reinforce(settings, models["SFT"], seed, tasks, folder / "rl", note)
        spent = _spent(folder / "rl", settings.rl.passes)
        note(f"== seed {seed}: SFT + SFT")
        # Once over: 200 chains are enough to go on without repeating any before its turn.
        sft = replace(settings.sft, model=models["SFT"], seed=seed, epochs=1)
        again = with_tokens(cycle(more), spent["tokens"], sft, "tokens")
        models["SFT + SFT"] = train(again, sft, seed, folder / "more-sft", note)
        trained = {"SFT": trained_on(start, settings.sft), "SFT + RL": spent}
        trained["SFT + SFT"] = trained_on(again, sft)
        note(f"== seed {seed}: SFT + improve")
        made_by = _improve(settings, sft, spent["sampled_tokens"], tasks, folder / "improve", note)
        models["SFT + improve"], trained["SFT + improve"] = made_by
        for arm, model in models.items():
            place = folder / "measured" / arm.replace(" + ", "-")
            out = arms.measure(arm, seed, model, trained[arm], place)
            written = counted(out, lambda t: t.usage.sampled_tokens)
            arms.tables.put("written tokens", arm, seed, written)
    counts = ("written tokens",)
    result = {"equal": arms.equal, "measures": arms.tables.compared("SFT", counts=counts)}
    for name, control in (("against_control", "SFT + SFT"), ("against_improve", "SFT + improve")):
        both = arms.tables.only([control, "SFT + RL"])
        result[name] = both.compared(control, counts=counts)
    return result


def _tasks(tasks: TaskSet, chains: Sequence[Trajectory], path: Path) -> Path:
    """The tasks of these chains, with their gold, for RL to draw from."""
    wanted = {chain.task_id for chain in chains}
    if not wanted:
        raise UsageError("more: no further chain was kept, so there is nothing to go on with.")
    TaskSet(tuple(task for task in tasks if task.id in wanted), "further").save(path)
    return path


def _reinforce(
    settings: RlStudy, model: str, seed: int, tasks: Path, folder: Path, note: Note
) -> str:
    """Go on with RL, unless that is done; the reference of the trained model."""
    from coa.train.rl_stage import run_rl

    adapter = folder / "adapter"
    if not (adapter / MANIFEST).is_file():
        recipe = RlRecipe(
            tasks=str(tasks),
            out=str(folder),
            rl=replace(settings.rl, model=model, seed=seed),
            rollout=settings.rollout,
            reward=settings.reward,
            alarms=settings.alarms,
        )
        adapter = run_rl(recipe, note=note).adapter
    return f"{resolve(model).base}+{adapter}"


def _improve(
    settings: RlStudy, sft: SftSettings, tokens: int, tasks: Path, folder: Path, note: Note
) -> tuple[str, Json]:
    """Go on with rejection sampling, `tokens` of them; the trained model and what that took. Where
    the start's attempts have nothing to learn from, the arm is the start."""
    from coa.train.improve import NothingToLearn, run_improve

    recipe = ImproveRecipe(
        tasks=str(tasks),
        out=str(folder),
        improve=replace(settings.improve, samples=max(2, settings.rl.group_size), tokens=tokens),
        sft=replace(sft, max_length=max(sft.max_length, settings.rollout.context)),
        rollout=settings.rollout,
        reward=settings.reward,
        check=CheckSettings(keep="last"),
    )
    names = ("rows", "tokens", "trained_tokens", "updates", "sampled_tokens")
    try:
        result = run_improve(recipe, note=note)
    except NothingToLearn as why:
        note(f"   {why}")
        return sft.model, dict.fromkeys(names, 0)
    spent = {name: sum(record.get(name, 0) for record in result.records) for name in names}
    return f"{resolve(sft.model).base}+{result.adapter}", spent


def _spent(folder: Path, passes: int) -> Json:
    """What RL trained on, over all its updates, each of which goes over its rows so many times, and
    what it sampled."""
    records = [record for _, record in read_jsonl(folder / METRICS) if "tokens" in record]
    return {
        "rows": sum(int(record["rows"]) for record in records),
        "tokens": passes * sum(int(record["tokens"]) for record in records),
        "trained_tokens": passes * sum(int(record["trained_tokens"]) for record in records),
        "updates": len(records),
        "sampled_tokens": sum(round(r["length_mean"] * r["rollouts"]) for r in records),
    }


def _show_rl(result: Json) -> Iterable[str]:
    for arm, each in result["equal"].items():
        told = "; ".join(
            f"{one['tokens']} tokens in {one['updates']} updates"
            + (f", {one['sampled_tokens']} sampled" if "sampled_tokens" in one else "")
            for one in each
        )
        yield f"{arm}, by seed: {told}"
    yield from _shown(result)


MASK = Study(
    "does leaving observations out of the loss help?",
    reader(MaskStudy),
    _plan_mask,
    _run_mask,
    _show_mask,
)
REACT = Study(
    "is a chain of agents better than ReAct with equal training tokens and equal budget?",
    reader(ReactStudy),
    _plan_react,
    _run_react,
    _show_react,
)
RL = Study(
    "what does reinforcement learning add to imitation, to more of it, and to right attempts?",
    _read_rl,
    _plan_rl,
    _run_rl,
    _show_rl,
)
