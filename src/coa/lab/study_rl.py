"""`coa study rl`: what does reinforcement learning add to imitation?

For every seed there is one start, fine-tuned on the first chains. From it one arm goes on with
reinforcement learning on further training tasks, and another with more imitation: the team's chains
for those same tasks, again from the first if need be, until as many tokens were trained on as in
all updates of the other. Sampling, which takes RL about as long as training, is not given to the
control; what both took is in the timings of their runs. No held-out task chooses a checkpoint: the
last weights are measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

from coa.errors import ConfigError, UsageError
from coa.io.runs import METRICS, Json, read_jsonl
from coa.io.settings import load_recipe, to_json
from coa.lab.speedrun_recipe import PACE
from coa.lab.study_arms import (
    SET,
    ChainPart,
    MeasurePart,
    Note,
    StudyPiece,
    Tables,
    TrainingStudy,
    counted,
    differences,
    first,
    held_out,
    lines,
    make_chains,
    measured,
    pieces,
    put_usual,
    to_record,
    train,
    trained_on,
    with_tokens,
)
from coa.lab.study_arms import TITLES as USUAL
from coa.models.references import resolve
from coa.models.weights import MANIFEST
from coa.rewards import RewardSettings
from coa.tasks import TaskSet
from coa.train.rl_settings import AlarmSettings, RlRecipe, RlSettings, RolloutSettings
from coa.trajectory import Trajectory

QUESTION = "what does reinforcement learning add to imitation, and to more of it?"
AGAINST = "SFT"
COUNTS = ("written tokens",)
UPDATE_SECONDS = 60.0
"""Of six groups of eight rollouts, sampled and trained on."""
RECIPE = (
    "rl.updates=6",
    "rl.tasks_per_update=6",
    "rl.refills=1",
    "rl.void_turns=keep",
    "rl.lr=1e-4",
    "rl.warmup=0.34",
    "rl.loss.overlong_buffer=0.2",
    "rl.loss.correction=token",
    "rollout.turn_tokens=192",
    "rollout.tokens=640",
    "rollout.context=1536",
)
"""As the recipe rl-135m has them, with fewer updates and so a gentler start: 2e-4 from the first
update on took a model of 97% to 87%."""


@dataclass(frozen=True)
class RlStudy(TrainingStudy):
    chains: ChainPart = field(default_factory=lambda: ChainPart(rows=150))
    eval: MeasurePart = field(default_factory=lambda: MeasurePart(world_seed=0))
    more: int = 320
    """Further training tasks: RL draws from them, the control imitates the team on them."""
    rl: RlSettings = field(default_factory=RlSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    alarms: AlarmSettings = field(default_factory=AlarmSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = RlSettings()
        if (self.rl.model, self.rl.seed) != (usual.model, usual.seed):
            raise ConfigError(
                "rl.model, rl.seed: RL starts where SFT ended, with its seed; use seeds."
            )
        if self.more < 1:
            raise ConfigError(f"more: found {self.more}, expected at least 1.")


def read(overrides: Sequence[str]) -> RlStudy:
    """Settings; those of RL are read like a recipe of its own, with what its preset says."""
    from coa.train.rl_stage import read_rl_recipe

    tables = ("rl.", "rollout.", "reward.", "alarms.")
    of_rl = [each for each in overrides if each.lstrip().startswith(tables)]
    rest = [each for each in overrides if each not in of_rl]
    recipe = read_rl_recipe(None, [*RECIPE, *of_rl])
    usual = to_json(
        RlStudy(rl=recipe.rl, rollout=recipe.rollout, reward=recipe.reward, alarms=recipe.alarms)
    )
    return load_recipe(None, rest, RlStudy, usual)


def plan(settings: RlStudy) -> list[StudyPiece]:
    seeds, updates = len(settings.seeds), settings.rl.updates
    groups = settings.rl.tasks_per_update * settings.rl.group_size / 48
    kept = settings.chains.rows + settings.more
    recorded, tuned, evaluated = pieces(settings, 1, to_record(kept))
    rows = round(updates * groups * 48)
    return [
        recorded,
        tuned,
        StudyPiece(f"{updates} updates of RL", seeds, updates * groups * UPDATE_SECONDS),
        StudyPiece(f"fine-tune further on about {rows} chains", seeds, rows * PACE[SET].row),
        evaluated._replace(times=evaluated.times * 3),
    ]


def run(settings: RlStudy, root: Path, note: Note) -> Json:
    part, rows = settings.eval, settings.chains.rows
    files = held_out(root, part, settings.chains.families)
    tables, equal = Tables(), dict[str, list[Json]]()
    for seed in settings.seeds:
        made = make_chains(
            root / f"chains-{seed}",
            settings.chains,
            seed,
            files.values(),
            n=to_record(rows + settings.more),
        )
        chains = made.by_grammar["mhqa"]
        start = first(chains, rows)
        seen = {chain.task_id for chain in start}
        further = [chain for chain in chains[rows:] if chain.task_id not in seen]
        folder = root / f"seed-{seed}"
        note(f"== seed {seed}: SFT")
        models = {"SFT": train(start, settings.sft, seed, folder / "sft", note)}
        note(f"== seed {seed}: SFT + RL")
        tasks = _tasks(made.tasks, further[: settings.more], folder / "tasks-rl.jsonl")
        models["SFT + RL"] = _reinforce(settings, models["SFT"], seed, tasks, folder / "rl", note)
        spent = _spent(folder / "rl", settings.rl.passes)
        more, tokens = further[: settings.more], spent["tokens"]
        again = with_tokens(cycle(more), tokens, settings.sft, "tokens")
        note(f"== seed {seed}: SFT + SFT")
        sft = replace(settings.sft, model=models["SFT"])
        models["SFT + SFT"] = train(again, sft, seed, folder / "more-sft", note)
        trained = {"SFT": trained_on(start, settings.sft), "SFT + RL": spent}
        trained["SFT + SFT"] = trained_on(again, settings.sft)
        for arm, model in models.items():
            equal.setdefault(arm, []).append(trained[arm])
            outs = measured(model, files, folder / "measured" / arm.replace(" + ", "-"), part)
            put_usual(tables, arm, seed, outs)
            written = counted(outs["held out"], lambda t: t.usage.sampled_tokens)
            tables.put("written tokens", arm, seed, written)
    control = tables.only(["SFT + SFT", "SFT + RL"]).compared("SFT + SFT", counts=COUNTS)
    measures = tables.compared(AGAINST, counts=COUNTS)
    return {"equal": equal, "measures": measures, "against_control": control}


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


def _spent(folder: Path, passes: int) -> Json:
    """What RL trained on, over all its updates; each goes over its rows so many times."""
    records = [record for _, record in read_jsonl(folder / METRICS) if "tokens" in record]
    return {
        "rows": sum(int(record["rows"]) for record in records),
        "tokens": passes * sum(int(record["tokens"]) for record in records),
        "trained_tokens": passes * sum(int(record["trained_tokens"]) for record in records),
        "updates": len(records),
    }


TITLES = USUAL | {
    "written tokens": "tokens that the model writes in a rollout",
}


def show(result: Json) -> Iterable[str]:
    for arm, each in result["equal"].items():
        told = "; ".join(f"{one['tokens']} tokens in {one['updates']} updates" for one in each)
        yield f"{arm}, by seed: {told}"
    for name, found in result["measures"].items():
        yield ""
        yield from lines(TITLES[name], found)
        yield from differences(result["against_control"][name])
