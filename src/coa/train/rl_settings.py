"""What decides an RL run; read from recipes, so it needs no torch. docs/rl.md explains each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from coa.config import read_toml, to_json
from coa.engines.store import OURS
from coa.environment import ToolSettings
from coa.errors import ConfigError
from coa.rewards import RewardSettings
from coa.runtime import Budget, Decoding
from coa.train.loss_settings import PRESETS, RlLossSettings
from coa.train.settings import Schedule

Log = Literal["none", "tensorboard", "trackio"]


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How a group is sampled. top-p and top-k stay off: ratios need the whole distribution."""

    engine: str = ""
    """A server to sample with, openai:NAME@URL; empty: the model in this process."""
    temperature: float = 1.0
    turns: int = 8
    turn_tokens: int = 256
    tokens: int = 2048
    """Most sampled tokens of a rollout; overlong shaping counts towards it."""
    context: int = 2048
    malformed: int = 2
    seconds: float = 600.0
    concurrency: int = 96
    memory_gb: float | None = None

    def __post_init__(self) -> None:
        for name in ("turns", "turn_tokens", "tokens", "context", "concurrency"):
            if (found := getattr(self, name)) < 1:
                raise ConfigError(f"rollout.{name}: found {found}, expected at least 1.")
        if not self.temperature > 0:
            raise ConfigError(
                f"rollout.temperature: found {self.temperature}, expected more than 0: the rollouts"
                " of a group must differ."
            )
        Decoding(temperature=self.temperature)
        if not self.seconds > 0:
            raise ConfigError(f"rollout.seconds: found {self.seconds}, expected more than 0.")
        if self.malformed < 0:
            raise ConfigError(f"rollout.malformed: found {self.malformed}, expected 0 or more.")

    def budget(self) -> Budget:
        return Budget(
            turns=self.turns,
            tokens=self.tokens,
            turn_tokens=self.turn_tokens,
            context=self.context,
            seconds=self.seconds,
            malformed=self.malformed,
        )


@dataclass(frozen=True, slots=True)
class SelectSettings:
    """Which tasks are worth training on, found out before the first update; 0 samples: all are."""

    no_tool_samples: int = 0
    """Attempts without any tool; a task that succeeds too often needs none."""
    no_tool_most: float = 0.3
    """Kept: tasks whose pass rate without tools is at most this."""
    no_tool_engine: str = ""
    """Who makes these attempts, by reference (openai:NAME@URL); empty: the model to be trained."""
    samples: int = 0
    """Attempts with tools; what always succeeds has nothing to teach."""
    least: float = 0.0
    most: float = 1.0
    """Kept: tasks whose pass rate with tools is at least `least` and below `most`."""

    def __post_init__(self) -> None:
        for name in ("no_tool_samples", "samples"):
            if (found := getattr(self, name)) < 0:
                raise ConfigError(f"select.{name}: found {found}, expected 0 or more.")
        for name in ("no_tool_most", "least", "most"):
            if not 0 <= (rate := getattr(self, name)) <= 1:
                raise ConfigError(f"select.{name}: found {rate}, expected between 0 and 1.")
        if self.least >= self.most:
            raise ConfigError(
                f"select.least: found {self.least} with select.most {self.most}, which no pass rate"
                " can meet. Expected least below most."
            )
        if self.no_tool_engine and not self.no_tool_samples:
            raise ConfigError(
                f"select.no_tool_engine: found {self.no_tool_engine!r} with select.no_tool_samples "
                "0, so it has nothing to do. Set the samples, 32 for instance."
            )

    @property
    def on(self) -> bool:
        return bool(self.no_tool_samples or self.samples)


@dataclass(frozen=True, slots=True)
class AlarmSettings:
    """Signs of collapse; each stops the run. 0 turns one off."""

    window: int = 8
    """Updates over which means are taken."""
    reward_drop: float = 0.5
    """Mean reward below this share of the best window's."""
    malformed_most: float = 0.6
    """Share of malformed rollouts, once it was at half of that; the same for truncated ones."""
    truncated_most: float = 0.8
    gap_most: float = 0.5
    """Mean of |log trainer - log sampler|."""
    ess_least: float = 0.1
    """Effective sample size of the sampler correction, as a share."""
    entropy_rise: float = 4.0
    """Mean entropy above so many times that of the first window, and above 0.5 nats."""
    entropy_least: float = 0.0
    entropy_most: float = 0.0
    """Nats a token; off, since what is normal depends on the model and the grammar."""
    barren: int = 5
    """Updates in a row without one group to learn from."""

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ConfigError(f"alarms.window: found {self.window}, expected at least 2.")
        for name in ("reward_drop", "malformed_most", "truncated_most", "ess_least"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ConfigError(f"alarms.{name}: found {share}, expected between 0 and 1.")
        for name in ("gap_most", "entropy_rise", "entropy_least", "entropy_most", "barren"):
            if not (found := getattr(self, name)) >= 0:
                raise ConfigError(f"alarms.{name}: found {found}, expected 0 or more.")


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """Evaluation during training, on tasks that are not trained on."""

    tasks: str = ""
    """A task file; empty: those of `split`, or no evaluation."""
    split: str = ""
    """Measure with this split of the environments' own tasks."""
    every: int = 10
    """Updates between two; the first is before training, the last after it."""
    samples: int = 1
    temperature: float = 0.0
    keep: Literal["best", "last"] = "best"
    """Which weights become `adapter`: those with the best evaluation, or the last."""

    def __post_init__(self) -> None:
        for name in ("every", "samples"):
            if (found := getattr(self, name)) < 1:
                raise ConfigError(f"check.{name}: found {found}, expected at least 1.")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"check.temperature: found {self.temperature}, expected 0 (the most likely token) "
                "or more."
            )


@dataclass(frozen=True, slots=True)
class RlSettings:
    """The table `[rl]` of a recipe."""

    model: str = "smollm2-135m"
    full: bool = False
    """Train all weights instead of an adapter."""
    rank: int = 16
    alpha: float | None = None
    preset: str = "dapo"
    """The published loss that `[rl.loss]` changes."""
    loss: RlLossSettings = field(default_factory=RlLossSettings)
    updates: int = 100
    tasks_per_update: int = 8
    group_size: int = 8
    refills: int = 2
    """Rounds of further tasks when groups turn out flat; 0 turns dynamic sampling off."""
    passes: int = 1
    """Times that a batch is gone over."""
    minibatches: int = 1
    """Optimiser steps of one pass."""
    void_turns: Literal["leave_out", "keep"] = "leave_out"
    """What becomes of failed rollouts with a turn that neither called nor answered."""
    truncated: Literal["keep", "leave_out"] = "keep"
    """What becomes of failed rollouts that a budget cut."""
    lr: float = 2e-4
    value_lr: float = 1e-3
    schedule: Schedule = "constant"
    warmup: float = 0.0
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    micro_tokens: int = 4096
    """Most tokens computed at once; gradients of the parts add up to that of the batch."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, more time."""
    checkpoint_every: int = 1
    keep_rollouts: bool = True
    dtype: str = "auto"
    deterministic: bool = False
    seed: int = 0
    threads: int | None = None
    log: Log = "none"

    def __post_init__(self) -> None:
        ones = ("rank", "updates", "tasks_per_update", "passes", "minibatches")
        for name in (*ones, "checkpoint_every", "micro_tokens", "group_size"):
            if (found := getattr(self, name)) < 1:
                raise ConfigError(f"rl.{name}: found {found}, expected at least 1.")
        if self.preset not in PRESETS:
            names = ", ".join(PRESETS)
            raise ConfigError(f"rl.preset: found {self.preset!r}, expected one of {names}.")
        for name in ("lr", "value_lr", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rl.{name}: found {getattr(self, name)}, expected more than 0.")
        for name in ("refills", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"rl.{name}: found {getattr(self, name)}, expected 0 or more.")
        for name in ("alpha", "threads"):
            if (given := getattr(self, name)) is not None and not given > 0:
                raise ConfigError(f"rl.{name}: found {given}, expected more than 0.")
        if not 0 <= self.warmup <= 1:
            raise ConfigError(f"rl.warmup: found {self.warmup}, expected between 0 and 1.")
        if self.compares and self.group_size < 2:
            raise ConfigError(
                f"rl.group_size: found 1 with baseline {self.loss.baseline!r} and scale "
                f"{self.loss.scale!r}, which compare the rollouts of a task. Expected at least 2."
            )

    @property
    def compares(self) -> bool:
        """Whether advantages come from comparing the rollouts of one task."""
        return self.loss.baseline in ("group", "leave_one_out") or self.loss.scale == "group"

    @property
    def steps_per_update(self) -> int:
        return self.passes * self.minibatches


@dataclass(frozen=True, slots=True)
class RlRecipe:
    """What `coa rl` reads."""

    env: str | list[str] = ""
    """An environment, or several; empty: the shipped ones that the tasks belong to."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the environments."""
    tasks: str = ""
    """A task file with gold answers; empty: the environments' own for training."""
    out: str = "runs/rl"
    grammar: str = "auto"
    prompt: str = "auto"
    rl: RlSettings = field(default_factory=RlSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    select: SelectSettings = field(default_factory=SelectSettings)
    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    check: CheckSettings = field(default_factory=CheckSettings)
    tools: ToolSettings = field(default_factory=ToolSettings)

    def __post_init__(self) -> None:
        if self.rollout.engine and self.rl.deterministic:
            raise ConfigError(
                "rl.deterministic: a server cannot promise it; leave rollout.engine out."
            )
        if self.rollout.engine and self.rl.full:
            raise ConfigError(
                "rl.full: a server takes new weights only as an adapter; set it to false, or leave "
                "rollout.engine out."
            )


def preset_defaults(
    path: Path | None, overrides: Sequence[str], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`defaults` of a recipe with a table `[rl]`, on what the loss preset says that it names.

    It is looked for before anything is validated: settings that go with one preset are wrong with
    another.
    """
    named = RlSettings().preset
    for values in (defaults or {}, {} if path is None else read_toml(path)):
        table = values.get("rl")
        named = str(table.get("preset", named)) if isinstance(table, dict) else named
    for override in overrides:
        key, _, value = override.partition("=")
        if key.strip() == "rl.preset":
            named = value.strip().strip("\"'")
    rl = dict((defaults or {}).get("rl", {}))
    loss = to_json(PRESETS[named]) if named in PRESETS else {}  # RlSettings refuses it
    return {**(defaults or {}), "rl": rl | {"loss": loss | rl.get("loss", {})}}


def with_length(rl: RlSettings, rollout: RolloutSettings) -> RlSettings:
    """A loss that divides by a constant, and does not say which, divides by the longest rollout."""
    if rl.loss.normalise != "constant" or rl.loss.constant_length is not None:
        return rl
    return replace(rl, loss=replace(rl.loss, constant_length=rollout.tokens))


def ignored(recipe: RlRecipe) -> Iterator[str]:
    """A line for each setting that has no effect because of another one; what a recipe leaves as
    the defaults or its preset have it is not spoken of."""
    rl, loss = recipe.rl, recipe.rl.loss
    kl_in_loss = loss.kl > 0 and loss.kl_place == "loss"
    idle = (
        (
            loss.baseline != "value",
            f"rl.loss.baseline is {loss.baseline!r}, so there is no value head",
            "rl.value_lr rl.loss.gamma rl.loss.lam rl.loss.value_clip rl.loss.value_weight",
        ),
        (rl.refills > 0 and not rl.compares, "the loss compares no groups", "rl.refills"),
        (rl.full, "rl.full trains all weights", "rl.rank rl.alpha"),
        (
            ("+" in rl.model or rl.model == OURS) and not rl.full,
            "the adapter of rl.model keeps its own",
            "rl.rank rl.alpha",
        ),
        (not loss.kl, "rl.loss.kl is 0", "rl.loss.kl_estimator rl.loss.kl_place"),
        (not kl_in_loss, "there is no KL in the loss", "rl.loss.kl_reweighted"),
        (
            loss.correction == "none",
            "rl.loss.correction is 'none'",
            "rl.loss.correction_cap rl.loss.correction_floor rl.loss.correction_mode",
        ),
        (
            loss.normalise != "constant",
            f"rl.loss.normalise is {loss.normalise!r}",
            "rl.loss.constant_length",
        ),
        (
            loss.scale == "none" or loss.baseline == "value",
            "no deviation of rewards divides",
            "rl.loss.std_epsilon",
        ),
        (not loss.overlong_buffer, "rl.loss.overlong_buffer is 0", "rl.loss.overlong_penalty"),
        (not recipe.select.no_tool_samples, "select.no_tool_samples is 0", "select.no_tool_most"),
        (not recipe.select.samples, "select.samples is 0", "select.least select.most"),
        (
            not (recipe.check.tasks or recipe.check.split),
            "check.tasks is not set",
            "check.every check.samples check.temperature check.keep",
        ),
        (bool(recipe.rollout.engine), "rollout.engine is a server", "rollout.memory_gb"),
    )
    usual = RlRecipe(rl=RlSettings(preset=rl.preset, loss=PRESETS[rl.preset]))
    for holds, why, names in idle:
        for name in names.split() if holds else ():
            if (found := attrgetter(name)(recipe)) != attrgetter(name)(usual):
                yield f"{name} = {json.dumps(found)} is ignored: {why}"
