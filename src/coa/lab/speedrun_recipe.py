"""What a speedrun does, as settings: tasks to learn from, two ways to learn, and what is measured.

Tasks come in tables, one for each set, so one adapter can learn several grammars. A stage without
tasks is left out: with `rl_tasks=[]` there is no RL, with `tasks=[]` RL starts from `sft.model`.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from coa.distillation.filters import FilterSettings
from coa.engines import load_engine, slots_for
from coa.environments import (
    ATLAS_CODE,
    ATLAS_REWORDED,
    ATLAS_WEB,
    ATLAS_WIDE,
    DEFAULT_SET,
    GYM,
    SETS,
    TOOLBOX,
    make_tasks,
)
from coa.errors import ConfigError, did_you_mean
from coa.evaluation.run import EvalSettings
from coa.io.progress import duration
from coa.io.settings import load_recipe, read_toml
from coa.loop import Budget
from coa.tasks import Task
from coa.tools.sources import check_observations
from coa.train.settings import (
    AlarmSettings,
    CheckSettings,
    RlRecipe,
    RlSettings,
    RolloutSettings,
    SelectSettings,
    SftSettings,
    preset_defaults,
    with_length,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coa.engines.base import Engine


class Pace(NamedTuple):
    """Seconds of a task of one set."""

    row: float
    """To train on its chain, at `TOKENS_PER_SECOND`: one of atlas-mhqa has 330 tokens."""
    rollout: float
    """To roll it out greedily, trained, with as many beside it as there is room for."""


PACE = {
    DEFAULT_SET: Pace(0.9, 0.35),
    ATLAS_REWORDED: Pace(0.9, 0.35),
    ATLAS_WIDE: Pace(0.9, 0.35),
    ATLAS_WEB: Pace(3.6, 1.6),
    ATLAS_CODE: Pace(1.5, 0.8),
    GYM: Pace(0.8, 0.5),
    TOOLBOX: Pace(0.8, 0.5),
}


_LEARNT = 1.5
"""What a rollout of RL costs, as a multiple: it is sampled, and some are trained on."""
STAGES = ("train", "rl", "check", "all")
"""What the files of tasks are called that are not measured on: tasks-STAGE.jsonl."""
Who = Literal["team", "base", "sft", "rl", "longer", "all"]
"""The teacher, the model before training, after fine-tuning, and after RL; and two to compare RL
with: fine-tuned on the same chains for as long as RL took, and fine-tuned on all chains."""


@dataclass(frozen=True)
class TaskPart:
    """Tasks of one set."""

    set: str = DEFAULT_SET
    split: str = "train"
    families: tuple[str, ...] = ()
    """Of the set, or generators of gym-code; empty: all of the split."""
    n: int = 100
    worlds: tuple[int, ...] = (0,)
    """In equal parts; 0 is the real world, the others are invented."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.set not in SETS:
            raise ConfigError(f"set is {self.set!r}.{did_you_mean(self.set, SETS)}")
        if not self.worlds or len({*self.worlds}) < len(self.worlds):
            raise ConfigError(f"worlds is {list(self.worlds)}, expected one or more, all different")
        if self.n < len(self.worlds):
            raise ConfigError(f"n is {self.n}, expected a task for each world at least")

    def make(self) -> list[Task]:
        share, rest = divmod(self.n, len(self.worlds))
        made: list[Task] = []
        for index, world in enumerate(self.worlds):
            made += make_tasks(
                self.set,
                self.split,
                share + (index < rest),
                self.seed,
                world_seed=world,
                families=list(self.families) or None,
            )
        return made


@dataclass(frozen=True)
class MeasuredPart(TaskPart):
    """Tasks that are never trained on, and who is measured on them."""

    split: str = "heldout_entity"
    seed: int = 1
    name: str = "held-out entities"
    models: tuple[Who, ...] = ()
    """Empty: the one that comes out at the end."""
    observations: str = "real"
    """What the tools answer: real; withheld, wrong and closed_book are controls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_observations(self.observations)
        if self.split == "train":
            raise ConfigError("split is 'train', expected one that is held out")
        if not self.slug:
            raise ConfigError(f"name is {self.name!r}, expected one with letters or digits")
        if self.slug in STAGES:  # its file would be theirs: measured on what is trained on
            raise ConfigError(f"name is {self.name!r}, expected another than {', '.join(STAGES)}")

    @property
    def slug(self) -> str:
        """The name as a part of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class TeacherPart:
    error_rate: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class EvalPart:
    """How the rollouts of several measurements are made: greedily, within these limits."""

    turns: int = 8
    turn_tokens: int = 192
    malformed: int = 1
    context: int = 1536
    """Prompt, written and observed together: the budget of a rollout, the same for all models."""
    concurrency: int = 96
    deterministic: bool = False
    seed: int = 1

    def settings(self, model: str, tasks: Path, **more: Any) -> EvalSettings:
        """Those of one measurement."""
        limits = {name: getattr(self, name) for name in EvalPart.__dataclass_fields__}
        return EvalSettings(model=model, tasks=str(tasks), **limits, **more)

    def budget(self) -> Budget:
        return self.settings("", Path()).budget()

    @contextmanager
    def loaded(self, model: str) -> Iterator[Engine]:
        """One engine for several measurements: a model is loaded once."""
        engine = load_engine(
            model,
            slots=slots_for(self.concurrency),
            context=self.context,
            deterministic=self.deterministic,
        )
        try:
            yield engine
        finally:
            asyncio.run(engine.close())


@dataclass(frozen=True)
class SpeedrunRecipe:
    deterministic: bool = False
    """fp32 and fixed shapes in every stage: the same seeds give the same files."""
    tasks: tuple[TaskPart, ...] = ()
    rl_tasks: tuple[TaskPart, ...] = ()
    check_tasks: tuple[TaskPart, ...] = ()
    """To choose RL's weights by, see `check`; those that RL trains on are taken out."""
    all_tasks: tuple[TaskPart, ...] = ()
    """What the team would be recorded on if its work cost nothing; for a control."""
    all_epochs: float = 1.0
    controls: bool = False
    """Also make the two models to compare RL with."""
    measure: tuple[MeasuredPart, ...] = ()
    teacher: TeacherPart = field(default_factory=TeacherPart)
    filter: FilterSettings = field(default_factory=FilterSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    rl: RlSettings = field(default_factory=RlSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    select: SelectSettings = field(default_factory=SelectSettings)
    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    check: CheckSettings = field(default_factory=CheckSettings)
    eval: EvalPart = field(default_factory=EvalPart)

    def __post_init__(self) -> None:
        if not self.tasks and not self.rl_tasks:
            raise ConfigError("tasks and rl_tasks are empty: there is nothing to learn from")
        if self.controls and not (self.tasks and self.rl_tasks and self.all_tasks):
            raise ConfigError(
                "controls is true, which compares RL with fine-tuning: expected tables [[tasks]], "
                "[[rl_tasks]] and [[all_tasks]]"
            )
        if self.sft.full or self.rl.full:
            raise ConfigError("sft.full, rl.full: a speedrun makes an adapter; expected false")
        if self.rl.model != RlSettings().model:
            raise ConfigError(
                f"rl.model is {self.rl.model!r}, but RL starts where fine-tuning ended; set "
                "sft.model, and tasks=[] to leave fine-tuning out"
            )
        if self.check.tasks:
            raise ConfigError("check.tasks: expected tables [[check_tasks]] instead")
        slugs = [part.slug for part in self.measure]
        if twice := [part.name for part in self.measure if slugs.count(part.slug) > 1]:
            raise ConfigError(f"measure: two of them have the name {twice[0]!r}")

    @property
    def trained(self) -> tuple[Who, ...]:
        """The models that will be made, in order."""
        made: list[Who] = ["sft"] if self.tasks else []
        return (*made, "rl") if self.rl_tasks else tuple(made)

    @property
    def compared(self) -> tuple[Who, ...]:
        """The models that will be made to compare RL with."""
        return ("longer", "all") if self.controls else ()

    def measured(self, part: MeasuredPart) -> tuple[Who, ...]:
        """Who is measured: without those that are not made."""
        made = ("team", "base", *self.trained, *self.compared)
        return tuple(who for who in part.models or self.trained[-1:] if who in made)

    def plan(self) -> Iterator[str]:
        """What will be done, in a line for each kind of work, and how long that may take."""
        parts = [f"{part.n} {part.set}" for part in self.tasks]
        if parts:
            yield f"plan: fine-tune on the teacher's chains of {' + '.join(parts)} tasks"
        if self.rl_tasks:
            size = f"{self.rl.tasks_per_update} x {self.rl.group_size}"
            yield f"      then {self.rl.updates} RL updates of {size} rollouts"
        if self.controls:
            yield "      then fine-tune for as long as RL took, and on all chains, to compare"
        measured = [(part, self.measured(part)) for part in self.measure]
        rollouts = sum(part.n * sum(who != "team" for who in whose) for part, whose in measured)
        times = sum(len(whose) for _, whose in measured)
        yield f"      then measure {times} times, {rollouts} rollouts in all"
        yield f"      about {duration(self._seconds())} with a 135M model on two cores"

    def _seconds(self) -> float:
        rows = sum(part.n * PACE[part.set].row for part in self.tasks) * self.sft.epochs
        if self.controls:
            rows += sum(part.n * PACE[part.set].row for part in self.all_tasks) * self.all_epochs
        drawn = self.rl.updates * self.rl.tasks_per_update * self.rl.group_size
        dear = [PACE[part.set].rollout for part in self.rl_tasks for _ in range(part.n)]
        updates = drawn * _LEARNT * sum(dear) / len(dear) if dear else 0.0
        updates *= 2 if self.controls else 1
        measured = sum(
            part.n * PACE[part.set].rollout * sum(who != "team" for who in self.measured(part))
            for part in self.measure
        )
        return (rows + updates + measured) * (3 if self.deterministic else 1)

    def rl_recipe(self, model: str, tasks: Path, check_tasks: Path | None, out: Path) -> RlRecipe:
        """What `coa rl` would be given."""
        return RlRecipe(
            tasks=str(tasks),
            out=str(out),
            rl=replace(self.rl, model=model),
            rollout=self.rollout,
            select=self.select,
            alarms=self.alarms,
            check=replace(self.check, tasks=str(check_tasks or "")),
        )


def read_speedrun_recipe(
    path: Path | None, overrides: Sequence[str], *, full: bool = False
) -> SpeedrunRecipe:
    """The shipped recipe (`full`: that of AFM-135M), changed by one's own and by overrides."""
    defaults = shipped_recipe("full.toml" if full else "speedrun.toml")
    defaults = preset_defaults(path, overrides, defaults)
    recipe = load_recipe(path, overrides, SpeedrunRecipe, defaults)
    recipe = replace(recipe, rl=with_length(recipe.rl, recipe.rollout))
    if recipe.deterministic:
        recipe = replace(
            recipe,
            sft=replace(recipe.sft, deterministic=True),
            rl=replace(recipe.rl, deterministic=True),
            eval=replace(recipe.eval, deterministic=True),
        )
    return recipe


def shipped_recipe(name: str = "speedrun.toml") -> dict[str, Any]:
    """The tables of a recipe of this package."""
    with resources.as_file(resources.files("coa").joinpath("recipes", name)) as shipped:
        return read_toml(shipped)
