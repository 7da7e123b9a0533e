"""The policy loss: clipped ratios times advantages, plus KL, minus entropy, by settings.

Three policies may differ. `logprobs` is the one being trained, `old` the same model before the
updates of this batch, `sampled` what the engine computed when it wrote the token. The ratio of the
first two is clipped; that of the last two is corrected for, without a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from coa.errors import ConfigError
from coa.train.loss_settings import Level, Ratio, RlLossSettings
from coa.train.losses.likelihood import LOG_BOUND, kl_estimate, sampled_entropy
from coa.train.losses.tokens import Totals, numbered, pick, shares, sum_by, trained


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What is known of tokens before the forward pass; flat tensors of one length."""

    weights: Tensor
    sequence: Tensor
    advantages: Tensor
    old: Tensor | None = None
    """None: this batch is updated on once, so the policy is its own old one."""
    sampled: Tensor | None = None
    reference: Tensor | None = None
    group: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = {f.name: len(t) for f in fields(self) if (t := getattr(self, f.name)) is not None}
        assert len(set(sizes.values())) == 1, sizes


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights between trainer and sampler, without a gradient."""

    factors: Tensor
    """[n], 0 where a token is left out."""
    changed: Tensor
    """[n], whether cap or floor had a say."""


def sampler_correction(
    old: Tensor,
    sampled: Tensor,
    sequence: Tensor,
    level: Level = "token",
    *,
    cap: float = 2.0,
    floor: float | None = None,
    mode: str = "truncate",
) -> Correction:
    """p(trainer) / p(sampler) of each token, or of its sequence as a product, kept within bounds.

    `truncate` cuts it to cap and floor; `mask` leaves out what is beyond them.
    """
    gap = (old.detach().float() - sampled.float()).clamp(-LOG_BOUND, LOG_BOUND)
    if level == "sequence":
        index, count = numbered(sequence)
        gap = sum_by(index, gap, count).clamp(-LOG_BOUND, LOG_BOUND)[index]
    raw = torch.exp(gap)
    changed = (raw > cap) | (raw < (0.0 if floor is None else floor))
    bounded = raw.clamp(min=floor, max=cap) if mode == "truncate" else raw.masked_fill(changed, 0.0)
    return Correction(bounded, changed)


def _mean() -> Any:
    return field(default=0.0, metadata={"join": "mean"})


@dataclass(frozen=True, slots=True)
class PolicyMetrics:
    """Means over trained tokens, by weight, of one part or of a batch. All are plain numbers."""

    weight: float
    """Sum of the weights of tokens."""
    clip_low: float = _mean()
    """Share of tokens at which the lower bound had a say; likewise the next two."""
    clip_high: float = _mean()
    clip_dual: float = _mean()
    ratio_mean: float = _mean()
    ratio_max: float = field(default=0.0, metadata={"join": "max"})
    kl_old: float = _mean()
    """Divergence of the old policy from the new one, by k1: log old - log new."""
    kl_reference: float = _mean()
    """Divergence from the reference by the estimator of the settings; 0 without a reference."""
    entropy: float = _mean()
    """As given; else -logprob of the sampled tokens, which estimates it for fresh samples."""
    advantage_mean: float = _mean()
    sampler_gap: float = _mean()
    """|log trainer - log sampler|; the next is the largest."""
    sampler_gap_max: float = field(default=0.0, metadata={"join": "max"})
    sampler_kl: float = _mean()
    """Divergence of the sampler from the trainer, by k1: log sampler - log trainer."""
    correction_mean: float = _mean()
    correction_square: float = _mean()
    correction_changed: float = _mean()
    """Share of tokens whose importance weight met its cap or floor."""

    @property
    def ess(self) -> float:
        """Effective sample size of the importance weights, as a share; 1 when all are the same."""
        if self.correction_square == 0.0:
            return 0.0
        return self.correction_mean**2 / self.correction_square

    @classmethod
    def join(cls, parts: Sequence[PolicyMetrics]) -> PolicyMetrics:
        """The metrics of a batch from those of its parts."""
        weight = sum(part.weight for part in parts)
        joined = {"weight": weight}
        for one in fields(cls):
            values = [getattr(part, one.name) for part in parts]
            if one.metadata.get("join") == "mean":
                pairs = zip(values, parts, strict=True)
                joined[one.name] = sum(value * part.weight for value, part in pairs) / weight
            elif one.metadata.get("join") == "max":
                joined[one.name] = max(values)
        return cls(**joined)

    def record(self) -> dict[str, float]:
        """For metrics.jsonl."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        del named["correction_square"]
        return named | {"ess": self.ess}


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss to call backward on, its parts as numbers, and what happened."""

    loss: Tensor
    policy: float
    kl: float
    """As it is in the loss, with its coefficient; likewise the entropy."""
    entropy: float
    metrics: PolicyMetrics


def policy_loss(
    logprobs: Tensor,
    tokens: PolicyTokens,
    settings: RlLossSettings,
    totals: Totals | None = None,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """The loss of tokens of which `logprobs` [n] were computed with a gradient.

    `totals` are those of the whole batch when this is a part of it; the sum of the parts' losses is
    then the loss of the batch. `entropy` [n] is that of the full distributions, where known; else a
    bonus uses the sampled tokens (`sampled_entropy`).
    """
    part = _select(logprobs, tokens, entropy)
    share = shares(
        part.weights,
        part.sequence,
        settings.normalise,
        group=part.group,
        constant_length=settings.constant_length,
        totals=totals,
    )
    ratio = torch.exp(_log_ratio(part, settings.ratio))
    correction = _correct(part, settings)
    by_token = clipped(ratio, part.advantages, settings)
    if settings.surrogate == "cispo":
        bounded = ratio.detach().clamp(1 - settings.clip_low, 1 + settings.clip_high)
        by_token = -bounded * part.advantages * part.new
    policy = loss = (share * by_token * correction.factors).sum()
    kl_term = entropy_term = torch.zeros_like(policy)
    if settings.kl > 0 and settings.kl_place == "loss":
        kl = _reference_kl(part, settings)
        kl_term = settings.kl * (share * (kl * ratio if settings.kl_reweighted else kl)).sum()
        loss = loss + kl_term
    if settings.entropy != 0.0:
        bonus = sampled_entropy(part.new) if part.entropy is None else part.entropy
        entropy_term = settings.entropy * (share * bonus).sum()
        loss = loss - entropy_term
    numbers = torch.stack([policy, kl_term, entropy_term]).detach().tolist()
    metrics = _measure(part, ratio, correction, settings)
    return PolicyLoss(loss, numbers[0], numbers[1], numbers[2], metrics)


@dataclass(frozen=True, slots=True)
class _Part:
    """The tokens that count, checked, in float32."""

    new: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    sequence: Tensor
    sampled: Tensor | None
    reference: Tensor | None
    group: Tensor | None
    entropy: Tensor | None


def _select(logprobs: Tensor, tokens: PolicyTokens, entropy: Tensor | None) -> _Part:
    assert len(logprobs) == len(tokens.weights), (len(logprobs), len(tokens.weights))
    kept = trained(tokens.weights)

    def known(what: str, values: Tensor | None) -> Tensor | None:
        return None if values is None else pick(what, values, kept, tokens.sequence)

    new = pick("logprob", logprobs, kept, tokens.sequence)
    old = known("old logprob", tokens.old)
    return _Part(
        new=new,
        old=(new if old is None else old).detach(),
        advantages=pick("advantage", tokens.advantages, kept, tokens.sequence).detach(),
        weights=tokens.weights[kept].float(),
        sequence=tokens.sequence[kept],
        sampled=known("sampled logprob", tokens.sampled),
        reference=known("reference logprob", tokens.reference),
        group=None if tokens.group is None else tokens.group[kept],
        entropy=known("entropy", entropy),
    )


def clipped(ratio: Tensor, advantages: Tensor, settings: RlLossSettings) -> Tensor:
    """The loss of each token: the pessimistic one of clipped and not, and its dual limit."""
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * bounded)
    if settings.dual_clip is None:
        return loss
    limit = -advantages * settings.dual_clip
    return torch.where(advantages < 0, torch.minimum(loss, limit), loss)


def _log_ratio(part: _Part, level: Ratio) -> Tensor:
    gap = part.new - part.old
    if level == "token":
        return gap.clamp(-LOG_BOUND, LOG_BOUND)
    index, count = numbered(part.sequence)
    total = sum_by(index, gap * part.weights, count)
    if level == "trajectory":
        return total.clamp(-LOG_BOUND, LOG_BOUND)[index]
    # The form that GSPO calls "token": the value is the sequence's, the gradient the token's own.
    # With one advantage per sequence it is the same, and with several each keeps its token.
    mean = (total / sum_by(index, part.weights, count)).detach()
    return mean.clamp(-LOG_BOUND, LOG_BOUND)[index] + part.new - part.new.detach()


def _correct(part: _Part, settings: RlLossSettings) -> Correction:
    if settings.correction == "none":
        return Correction(torch.ones_like(part.old), torch.zeros_like(part.old, dtype=torch.bool))
    if part.sampled is None:
        raise ConfigError(
            f"correction = {settings.correction!r} needs the logprobs of the sampler; found none."
        )
    return sampler_correction(
        part.old,
        part.sampled,
        part.sequence,
        settings.correction,
        cap=settings.correction_cap,
        floor=settings.correction_floor,
        mode=settings.correction_mode,
    )


def _reference_kl(part: _Part, settings: RlLossSettings) -> Tensor:
    if part.reference is None:
        raise ConfigError(f"kl = {settings.kl} needs the reference's logprobs; found none.")
    return kl_estimate(part.new, part.reference, settings.kl_estimator)


@torch.no_grad()
def _measure(
    part: _Part, ratio: Tensor, correction: Correction, settings: RlLossSettings
) -> PolicyMetrics:
    down, up = part.advantages < 0, part.advantages > 0
    if settings.surrogate == "cispo":  # the bounds hold whatever the advantage
        down = up = torch.ones_like(down)
    none = torch.zeros_like(part.old)
    gap = none if part.sampled is None else part.old - part.sampled
    limit = math.inf if settings.dual_clip is None else settings.dual_clip
    means = {
        "clip_low": down & (ratio < 1 - settings.clip_low),
        "clip_high": up & (ratio > 1 + settings.clip_high),
        "clip_dual": down & (ratio > limit),
        "ratio_mean": ratio,
        "kl_old": part.old - part.new,
        "kl_reference": none if part.reference is None else _reference_kl(part, settings),
        "entropy": -part.new if part.entropy is None else part.entropy,
        "advantage_mean": part.advantages,
        "sampler_gap": gap.abs(),
        "sampler_kl": -gap,
        "correction_mean": correction.factors,
        "correction_square": correction.factors.square(),
        "correction_changed": correction.changed,
    }
    table = torch.stack([values.float() for values in means.values()])
    weight = part.weights.sum()
    averages = (table @ part.weights / weight).tolist()
    return PolicyMetrics(
        weight=float(weight),
        ratio_max=float(ratio.max()),
        sampler_gap_max=float(gap.abs().max()),
        **dict(zip(means, averages, strict=True)),
    )
