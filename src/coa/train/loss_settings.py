"""What decides an RL loss, and the published recipes by name; read from recipes, so no torch.

A recipe of the field is a point in one space: how rewards become advantages (baseline, scale), what
is clipped (ratio, clip_low, clip_high, dual_clip), how tokens are averaged (normalise), what is
added (kl, entropy) and what makes up for a sampler that is not the trainer (correction). The names
in `PRESETS` are those points; each says which paper it is from. See docs/losses.md.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from coa.errors import ConfigError, did_you_mean

Baseline = Literal["group", "leave_one_out", "batch", "value", "none"]
Scale = Literal["group", "batch", "none"]
Ratio = Literal["token", "sequence", "trajectory"]
Normalise = Literal["token", "sequence", "constant", "group"]
KlEstimator = Literal["k1", "k2", "k3"]
Level = Literal["none", "token", "sequence"]


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
    """Of which probabilities: one token; a sequence, as geometric mean (GSPO); all its tokens
    together, as product (RLOO)."""
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
    correction: Level = "none"
    """Truncated importance sampling between sampler and trainer, by token or by sequence."""
    correction_cap: float = 2.0
    correction_floor: float | None = None
    correction_mode: Literal["truncate", "mask"] = "truncate"
    """Beyond cap and floor: the weight is cut to them, or the token is left out."""
    gamma: float = 1.0
    lam: float = 1.0
    """Discount and lambda of GAE, per token the model wrote."""
    value_clip: float | None = None
    """Most that a value may move away from the old one before its gradient ends."""
    value_weight: float = 0.5
    overlong_buffer: float = 0.0
    """Share of the length limit, at its end, in which a penalty grows from 0; 0 turns it off."""
    overlong_penalty: float = 1.0
    """That penalty at the limit."""

    def __post_init__(self) -> None:
        # Written so that NaN fails, too.
        checks = {
            "clip_low": (0 < self.clip_low <= 1, "above 0, at most 1"),
            "clip_high": (self.clip_high > 0, "above 0"),
            "std_epsilon": (self.std_epsilon >= 0, "0 or more"),
            "kl": (self.kl >= 0, "0 or more"),
            "correction_cap": (self.correction_cap >= 1, "at least 1"),
            "gamma": (0 <= self.gamma <= 1, "between 0 and 1"),
            "lam": (0 <= self.lam <= 1, "between 0 and 1"),
            "overlong_buffer": (0 <= self.overlong_buffer < 1, "at least 0, below 1"),
            "overlong_penalty": (self.overlong_penalty >= 0, "0 or more"),
            "value_weight": (self.value_weight >= 0, "0 or more"),
        }
        if self.dual_clip is not None:
            above = self.dual_clip > 1 + self.clip_high
            checks["dual_clip"] = (above, f"above 1 + clip_high ({1 + self.clip_high:g})")
        if self.constant_length is not None:
            checks["constant_length"] = (self.constant_length >= 1, "at least 1")
        if self.value_clip is not None:
            checks["value_clip"] = (self.value_clip > 0, "above 0")
        if self.correction_floor is not None:
            checks["correction_floor"] = (0 < self.correction_floor <= 1, "above 0, at most 1")
        for name, (fine, expected) in checks.items():
            if not fine:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected {expected}.")
        self._check_together()

    def _check_together(self) -> None:
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
