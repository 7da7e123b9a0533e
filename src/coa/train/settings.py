"""What decides the result of a training run; read from recipes, so it needs no torch.

docs/training.md explains each setting of fine-tuning, docs/rl.md each of reinforcement learning,
docs/improve.md each of rejection sampling.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from coa.environment import ToolSettings
from coa.errors import ConfigError, did_you_mean
from coa.io.settings import check_ranges, read_toml, to_json
from coa.loop import Budget
from coa.models.references import OURS
from coa.rewards import RewardSettings

Baseline = Literal["group", "leave_one_out", "batch", "value", "none"]
Scale = Literal["group", "batch", "none"]
Ratio = Literal["token", "sequence", "trajectory"]
"""Of the probabilities of a token; of a sequence, as geometric mean; of all its tokens together, as
product."""
Normalise = Literal["token", "sequence", "constant", "group"]
KlEstimator = Literal["k1", "k2", "k3"]
Log = Literal["none", "tensorboard", "trackio"]
Schedule = Literal["constant", "linear", "cosine"]
"""How the learning rate goes on after its rise: stays, or falls to 0."""
Layout = Literal["bucket", "pack"]
"""How rows are put together: by similar length, or into packs of equal size."""
TOKENS_PER_SECOND = 370
"""Of rows that a 135M model is fine-tuned on, on two cores: what estimates go by that may not load
a model. `coa sft --dry-run` measures it."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """What the tables `[sft]` and `[rl]` of recipes have in common."""

    model: str = "smollm2-135m"
    full: bool = False
    """Train all weights instead of an adapter."""
    rank: int = 16
    alpha: float | None = None
    """LoRA alpha; None means twice the rank."""
    lr: float = 1e-3
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    """Share of the updates in which the learning rate rises; then it follows the schedule."""
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    micro_tokens: int = 4096
    """Most tokens computed at once; a larger batch is split, with the same result. A pack is not
    split: it is what is computed at once."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, more time."""
    checkpoint_every: int = 20
    dtype: str = "auto"
    deterministic: bool = False
    seed: int = 0
    threads: int | None = None

    def check(self, table: str, counts: str) -> None:
        """Raise unless the numbers of a table are in their ranges; `counts` are at least 1."""
        ranges = {
            "at least 1": f"rank checkpoint_every micro_tokens {counts}",
            "more than 0": "lr grad_clip alpha threads",
            "0 or more": "weight_decay",
            "between 0 and 1": "warmup",
        }
        check_ranges(self, table, ranges)


@dataclass(frozen=True, slots=True)
class SftSettings(TrainingSettings):
    """The table `[sft]` of a recipe."""

    epochs: float = 1
    """Times that every row is trained on; of a last one that is not whole, a part drawn anew."""
    layout: Layout = "bucket"
    batch_size: int = 8
    """Rows of an update, or packs."""
    max_length: int = 2048
    """Most tokens of a row; a longer one loses whole segments from its end."""
    pack_tokens: int | None = None
    """Most tokens of a pack; None means max_length."""
    skip_too_long: bool = False
    """Leave out, and count, trajectories of which nothing to train fits; else they are an error."""
    tokens: int | None = None
    """Most tokens of this run, by whole updates; `continues` goes on where they ended."""
    minutes: float | None = None
    """The same by the clock; Ctrl-C or a kill begins them anew."""
    continues: bool = False
    """The adapter in `model` is where an earlier run over the same rows ended: go on at its next
    update, with the learning rate that the schedule has there."""
    err_weight: float = 0.0
    observation_weight: float = 0.0
    """Of what tools answered. Above 0 the model learns to write it itself: docs/evidence.md."""

    def __post_init__(self) -> None:
        self.check("sft", "batch_size max_length")
        ranges = {
            "between 0 and 1": "err_weight observation_weight",
            "more than 0 and finite": "epochs",
            "at least 1": "tokens",
            "more than 0": "minutes",
        }
        check_ranges(self, "sft", ranges)
        if self.pack_tokens is not None and self.pack_tokens < self.max_length:
            raise ConfigError(
                f"sft.pack_tokens: found {self.pack_tokens}, expected at least max_length "
                f"{self.max_length}: a row must fit into a pack."
            )

    @property
    def pack_limit(self) -> int:
        """Most tokens of a pack."""
        return self.pack_tokens or self.max_length


@dataclass(frozen=True)
class SftRecipe:
    """What `coa sft` reads: trajectories in, where to write, and how to train."""

    trajectories: str = ""
    """Path of a trajectories.jsonl, or of the directory that `coa distill` wrote."""
    out: str = "runs/sft"
    sft: SftSettings = field(default_factory=SftSettings)


@dataclass(frozen=True, slots=True)
class RlLossSettings:
    """A policy loss; the defaults are DAPO's without its overlong shaping."""

    baseline: Baseline = "group"
    """What is subtracted from a reward: the mean of its group, of the others in its group, of the
    batch, a value head's estimate (GAE), or nothing."""
    scale: Scale = "group"
    """Whose standard deviation divides: the group's, the batch's, or nobody's. With the baseline
    `value`, `batch` whitens the advantages of all tokens, and `group` has no meaning."""
    std_epsilon: float = 1e-6
    """Added to that standard deviation."""
    ratio: Ratio = "token"
    """New to old: `sequence` is GSPO's, `trajectory` RLOO's."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """`clip`: beyond the bounds a token has no gradient. `cispo`: it keeps the gradient of its
    logprob, with the bounded ratio as a weight."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """The ratio counts between 1 - clip_low and 1 + clip_high."""
    dual_clip: float | None = None
    """Most that a ratio counts when the advantage is negative; None means without limit."""
    normalise: Normalise = "token"
    """Mean over all tokens of the batch; of the means of sequences; of sums of sequences divided by
    `constant_length`; of the means of groups."""
    constant_length: int | None = None
    """For `constant`: the same number throughout a run, usually the most tokens of a rollout."""
    kl: float = 0.0
    """Coefficient of the divergence from the reference policy; 0 needs no reference."""
    kl_estimator: KlEstimator = "k3"
    kl_place: Literal["loss", "reward"] = "loss"
    kl_reweighted: bool = False
    """In the loss: times the ratio, so that value and gradient are those of the KL for samples of
    the old policy, too (DeepSeek-V3.2)."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    correction: Ratio | Literal["none"] = "none"
    """Truncated importance sampling between sampler and trainer, by the same kinds of ratio."""
    correction_cap: float = 2.0
    correction_floor: float | None = None
    correction_mode: Literal["truncate", "mask"] = "truncate"
    """Beyond cap and floor: the weight is cut to them, or the token is left out."""
    old: Literal["trainer", "sampler"] = "trainer"
    """Whose logprobs the ratio divides by: the trainer's, which several steps of an update compute
    anew before the first, or the sampler's, which are there already."""
    gamma: float = 1.0
    lam: float = 1.0
    """Discount and lambda of GAE, per token the model wrote."""
    value_clip: float | None = None
    """Most that a value may move away from the old one before its gradient ends."""
    value_weight: float = 0.5
    overlong_buffer: float = 0.0
    """Share of a limit, at its end, in which a penalty grows from 0; 0 turns it off. The limits are
    `rollout.tokens` for what the model wrote and `rollout.context` for the whole chain."""
    overlong_penalty: float = 1.0
    """That penalty at the nearer limit, and of every chain that the context cut."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            "rl.loss",
            {
                "more than 0, at most 1": "clip_low correction_floor",
                "more than 0": "clip_high value_clip",
                "0 or more": "std_epsilon kl overlong_penalty value_weight",
                "at least 1": "correction_cap constant_length",
                "between 0 and 1": "gamma lam",
                "at least 0, below 1": "overlong_buffer",
            },
        )
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ConfigError(
                f"rl.loss.dual_clip: found {self.dual_clip}, expected above 1 + clip_high "
                f"({1 + self.clip_high:g})."
            )
        if self.surrogate == "cispo" and (self.ratio != "token" or self.dual_clip is not None):
            raise ConfigError(
                f"surrogate: found 'cispo' with ratio {self.ratio!r} and dual_clip "
                f"{self.dual_clip}; expected 'token' and none."
            )
        if self.baseline == "value" and self.scale == "group":
            raise ConfigError(
                "scale: found 'group' with baseline 'value', whose advantages have no groups. "
                "Expected 'batch' or 'none'."
            )
        in_loss = self.kl > 0 and self.kl_place == "loss"
        if in_loss and self.kl_estimator == "k1" and not self.kl_reweighted:
            raise ConfigError(
                "kl_estimator: found 'k1' in the loss, where its expected gradient is zero. "
                "Use 'k2' or 'k3', or kl_place = 'reward'."
            )


def preset(name: str, **changes: Any) -> RlLossSettings:
    """The settings of a published recipe, with changes."""
    if name not in PRESETS:
        raise ConfigError(f"Loss {name!r} is not known.{did_you_mean(name, PRESETS)}")
    return dataclasses.replace(PRESETS[name], **changes)


PRESETS: MappingProxyType[str, RlLossSettings] = MappingProxyType(
    {
        # DeepSeekMath, arXiv 2402.03300: the means of sequences count the same; k3 in the loss.
        "grpo": RlLossSettings(clip_high=0.2, normalise="sequence", kl=0.04),
        # DAPO, arXiv 2503.14476: clip-higher, every token counts the same, no KL, and a penalty
        # that grows over the last 4,096 of 20,480 tokens.
        "dapo": RlLossSettings(overlong_buffer=0.2),
        # Understanding R1-Zero-Like Training, arXiv 2503.20783: neither length nor spread of
        # rewards divides. The trainer sets constant_length.
        "dr_grpo": RlLossSettings(scale="none", clip_high=0.2, normalise="constant"),
        # Back to Basics, arXiv 2402.14740: a whole answer is one action, its baseline the others.
        "rloo": RlLossSettings(
            baseline="leave_one_out",
            scale="none",
            ratio="trajectory",
            clip_high=0.2,
            normalise="sequence",
        ),
        # GSPO, arXiv 2507.18071: the ratio of a sequence, clipped very near to 1.
        "gspo": RlLossSettings(
            ratio="sequence", clip_low=3e-4, clip_high=4e-4, normalise="sequence"
        ),
        # MiniMax-M1, arXiv 2506.13585: only the upper bound is used. It is not published; 5 is what
        # ScaleRL (arXiv 2510.13786) found to work.
        "cispo": RlLossSettings(surrogate="cispo", clip_low=1.0, clip_high=4.0),
        # PPO, arXiv 1707.06347, with GAE (1506.02438) and a clipped value loss.
        "ppo": RlLossSettings(
            baseline="value", scale="batch", clip_high=0.2, lam=0.95, value_clip=0.2
        ),
    }
)
"""Name -> settings."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """How a group is sampled. top-p and top-k stay off: ratios need the whole distribution."""

    engine: str = ""
    """A server to sample with, openai:NAME@URL; empty: the model in this process."""
    temperature: float = 1.0
    turns: int = 8
    turn_tokens: int = 256
    tokens: int = 2048
    """Most sampled tokens of a rollout."""
    context: int = 2048
    malformed: int = 2
    seconds: float = 600.0
    concurrency: int = 96
    memory_gb: float | None = None
    seeded: bool = False
    """Whether a server gets a seed with every request, which slows vLLM's sampler. The engine in
    this process always has one, and so have evaluations."""

    def __post_init__(self) -> None:
        ranges = {
            "at least 1": "turns turn_tokens tokens context concurrency",
            "more than 0": "seconds",
            "0 or more": "malformed",
            "more than 0 and finite": "temperature",  # the rollouts of a group must differ
        }
        check_ranges(self, "rollout", ranges)

    def budget(self) -> Budget:
        names = ("turns", "tokens", "turn_tokens", "context", "seconds", "malformed")
        return Budget(**{name: getattr(self, name) for name in names})


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
        ranges = {
            "0 or more": "no_tool_samples samples",
            "between 0 and 1": "no_tool_most least most",
        }
        check_ranges(self, "select", ranges)
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
        ranges = {
            "at least 2": "window",
            "between 0 and 1": "reward_drop malformed_most truncated_most ess_least",
            "0 or more": "gap_most entropy_rise entropy_least entropy_most barren",
        }
        check_ranges(self, "alarms", ranges)


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
        ranges = {"at least 1": "every samples", "0 or more and finite": "temperature"}
        check_ranges(self, "check", ranges)


@dataclass(frozen=True, slots=True)
class RlSettings(TrainingSettings):
    """The table `[rl]` of a recipe."""

    lr: float = 2e-4
    schedule: Schedule = "constant"
    warmup: float = 0.0
    micro_tokens: int = 2048
    """Fewer than SFT's, as the sampler's weights and slots take memory, too."""
    checkpoint_every: int = 1
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
    """Optimiser steps of one pass, each on its share of the groups."""
    void_turns: Literal["keep", "leave_out"] = "keep"
    """What becomes of rollouts with a turn that neither called nor answered, failed or not."""
    truncated: Literal["keep", "leave_out"] = "keep"
    """What becomes of rollouts that a budget cut, failed or not."""
    scale_steps: bool = True
    """Whether a step on fewer groups than `tasks_per_update` is smaller by as much."""
    value_lr: float = 1e-3
    keep_rollouts: bool = True
    log: Log = "none"

    def __post_init__(self) -> None:
        self.check("rl", "updates tasks_per_update group_size passes minibatches")
        check_ranges(self, "rl", {"more than 0": "value_lr", "0 or more": "refills"})
        if self.minibatches > self.tasks_per_update:
            raise ConfigError(
                f"rl.minibatches: found {self.minibatches} with tasks_per_update "
                f"{self.tasks_per_update}; a step is on whole groups, so expected at most as many."
            )
        if self.preset not in PRESETS:
            names = ", ".join(PRESETS)
            raise ConfigError(f"rl.preset: found {self.preset!r}, expected one of {names}.")
        if self.compares and self.group_size < 2:
            raise ConfigError(
                f"rl.group_size: found 1 with baseline {self.loss.baseline!r} and scale "
                f"{self.loss.scale!r}, which compare the rollouts of a task. Expected at least 2."
            )

    @property
    def without(self) -> frozenset[Literal["void", "truncated"]]:
        """Which rollouts take no part although they could."""
        chosen: dict[Literal["void", "truncated"], str]
        chosen = {"void": self.void_turns, "truncated": self.truncated}
        return frozenset(name for name, what in chosen.items() if what == "leave_out")

    @property
    def compares(self) -> bool:
        """Whether advantages come from comparing the rollouts of one task."""
        return self.loss.baseline in ("group", "leave_one_out") or self.loss.scale == "group"

    @property
    def steps_per_update(self) -> int:
        return self.passes * self.minibatches


@dataclass(frozen=True, slots=True)
class TaskRecipe:
    """What recipes have in common that learn from their own rollouts on tasks."""

    env: str | list[str] = ""
    """An environment, or several; empty: the shipped ones that the tasks belong to."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the environments."""
    tasks: str = ""
    """A task file with gold answers; empty: the environments' own for training."""
    out: str = ""
    grammar: str = "auto"
    prompt: str = "auto"
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    check: CheckSettings = field(default_factory=CheckSettings)
    tools: ToolSettings = field(default_factory=ToolSettings)

    @property
    def training(self) -> TrainingSettings:
        """The table that says how it trains."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RlRecipe(TaskRecipe):
    """What `coa rl` reads."""

    out: str = "runs/rl"
    rl: RlSettings = field(default_factory=RlSettings)
    select: SelectSettings = field(default_factory=SelectSettings)
    alarms: AlarmSettings = field(default_factory=AlarmSettings)

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

    @property
    def training(self) -> TrainingSettings:
        return self.rl


@dataclass(frozen=True, slots=True)
class ImproveSettings:
    """The table `[improve]` of a recipe: rejection sampling."""

    rounds: int = 3
    samples: int = 8
    """Attempts of a task in a round."""
    keep: int = 1
    """Most attempts of a task that are trained on: the shortest right ones, no two the same."""
    right: float = 1.0
    """The score from which an attempt is right."""
    min_tool_calls: int = 0
    """Fewest tool calls of an attempt that is kept: the shortest right one may be a guess."""
    train_from: Literal["start", "last"] = "start"
    """Where each round's training begins: at the start again, with what all rounds have kept (STaR,
    ReST-EM), or at the weights of the round before, with what this one has (RAFT)."""
    tasks_per_round: int = 0
    """Each round goes on in the stream of tasks; 0: all of them in every round."""
    tokens: int = 0
    """Most tokens sampled by all rounds, each its equal part; 0: no limit. A task that does not fit
    is not used."""

    def __post_init__(self) -> None:
        ranges = {
            "at least 1": "rounds keep",
            "at least 2": "samples",  # of one attempt no pass rate is between 0 and 1
            "more than 0 and finite": "right",
            "0 or more": "min_tool_calls tasks_per_round tokens",
        }
        check_ranges(self, "improve", ranges)


@dataclass(frozen=True, slots=True)
class ImproveRecipe(TaskRecipe):
    """What `coa improve` reads. Every round is measured, so `check.every` has no meaning here."""

    out: str = "runs/improve"
    improve: ImproveSettings = field(default_factory=ImproveSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    """How each round trains; `model` is the start."""

    def __post_init__(self) -> None:
        if self.sft.full:
            raise ConfigError(
                "sft.full: every round makes an adapter of the start; expected false."
            )
        if self.rollout.engine and self.sft.deterministic:
            raise ConfigError(
                "sft.deterministic: a server cannot promise it; leave rollout.engine out."
            )
        if self.sft.max_length < self.rollout.context:
            raise ConfigError(
                f"sft.max_length: found {self.sft.max_length} with rollout.context "
                f"{self.rollout.context}, so attempts could lose their end, which is the answer. "
                "Expected at least as much."
            )
        if self.check.every != CheckSettings().every:
            raise ConfigError("check.every: every round is measured; leave it out.")

    @property
    def training(self) -> TrainingSettings:
        return self.sft


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
    rl, loss, check = recipe.rl, recipe.rl.loss, recipe.check
    of_values = "rl.value_lr rl.loss.gamma rl.loss.lam rl.loss.value_clip rl.loss.value_weight"
    no_values = f"rl.loss.baseline is {loss.baseline!r}, so there is no value head"
    bounds = "rl.loss.correction_cap rl.loss.correction_floor rl.loss.correction_mode"
    from_adapter = "+" in rl.model or rl.model == OURS
    kl_in_loss = loss.kl > 0 and loss.kl_place == "loss"
    no_deviation = loss.scale == "none" or loss.baseline == "value"
    of_check = "check.every check.samples check.temperature check.keep"
    idle = (  # settings, when they have no effect, and why
        (of_values, loss.baseline != "value", no_values),
        ("rl.refills", rl.refills > 0 and not rl.compares, "the loss compares no groups"),
        ("rl.rank rl.alpha", rl.full, "rl.full trains all weights"),
        ("rl.rank rl.alpha", from_adapter and not rl.full, "the adapter of rl.model keeps its own"),
        ("rl.loss.kl_estimator rl.loss.kl_place", not loss.kl, "rl.loss.kl is 0"),
        ("rl.loss.kl_reweighted", not kl_in_loss, "there is no KL in the loss"),
        (bounds, loss.correction == "none", "rl.loss.correction is 'none'"),
        (bounds, loss.old == "sampler" and loss.correction != "none", "rl.loss.old is 'sampler'"),
        ("rl.loss.correction", loss.old == "sampler", "rl.loss.old is 'sampler'"),
        (
            "rl.loss.constant_length",
            loss.normalise != "constant",
            f"rl.loss.normalise is {loss.normalise!r}",
        ),
        ("rl.loss.std_epsilon", no_deviation, "no deviation of rewards divides"),
        ("rl.loss.overlong_penalty", not loss.overlong_buffer, "rl.loss.overlong_buffer is 0"),
        (
            "select.no_tool_most",
            not recipe.select.no_tool_samples,
            "select.no_tool_samples is 0",
        ),
        ("select.least select.most", not recipe.select.samples, "select.samples is 0"),
        (of_check, not (check.tasks or check.split), "check.tasks is not set"),
        ("rollout.memory_gb", bool(recipe.rollout.engine), "rollout.engine is a server"),
        ("rollout.seeded", not recipe.rollout.engine, "the engine in this process has its seeds"),
    )
    usual = RlRecipe(rl=RlSettings(preset=rl.preset, loss=PRESETS[rl.preset]))
    for names, holds, why in idle:
        for name in names.split() if holds else ():
            if (found := attrgetter(name)(recipe)) != attrgetter(name)(usual):
                yield f"{name} = {json.dumps(found)} is ignored: {why}"


def advice(recipe: RlRecipe) -> Iterator[str]:
    """A line for each choice that is allowed and seldom meant."""
    loss = recipe.rl.loss
    if recipe.rollout.engine and loss.correction == "none" and loss.old == "trainer":
        yield (
            "rl.loss.correction is 'none', and a server computes other probabilities than the "
            "trainer; 'token' corrects for that"
        )
