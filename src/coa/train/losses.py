"""Losses as pure functions of flat tensors, in float32, checked by hand and against TRL and verl.

One layout throughout: the tokens of all sequences one after another, with a tensor that says whose
each token is. Rows of an agent differ in length by a factor of ten and most of their tokens are not
trained, so nothing is padded, and a caller passes only what it computed logits for. Tokens of
weight 0 may be there and have no influence, whatever their values. docs/losses.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.errors import ConfigError, TrainingError
from coa.train.settings import KlEstimator, Ratio, RlLossSettings


@dataclass(frozen=True, slots=True)
class Totals:
    """What a batch is divided by. Take it of the whole batch and pass it to each of its parts.

    A sequence must not be split over parts; a group may be.
    """

    weight: float
    sequences: int
    """Those that have a trained token."""
    groups: Mapping[int, float]
    """Group -> its weight; empty when no groups were given."""

    @classmethod
    def of(cls, weights: Tensor, sequence: Tensor, group: Tensor | None = None) -> Totals:
        kept = trained(weights)
        weights, sequence = weights[kept].double(), sequence[kept]
        by_group: dict[int, float] = {}
        if group is not None:
            names, index = torch.unique(group[kept], return_inverse=True)
            sums = sum_by(index, weights, len(names))
            by_group = dict(zip(names.tolist(), sums.tolist(), strict=True))
        return cls(float(weights.sum()), len(torch.unique(sequence)), by_group)


def shares(
    weights: Tensor,
    sequence: Tensor,
    settings: RlLossSettings,
    group: Tensor | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """The factor of each token's loss: a loss is the sum of share times loss of a token. float32.

    `token`: weight over the weight of the batch. `sequence`: over that of its sequence, and the
    number of sequences. `constant`: over `constant_length` and that number. `group`: over the
    weight of its group, and the number of groups.
    """
    weights, normalise = weights.float(), settings.normalise
    if totals is None:
        totals = Totals.of(weights, sequence, group)
    if normalise == "token":
        return weights / totals.weight
    if normalise == "sequence":
        index, count = numbered(sequence)
        return weights / sum_by(index, weights, count).clamp_min(1e-30)[index] / totals.sequences
    if normalise == "constant":
        if settings.constant_length is None:
            raise ConfigError(
                "normalise = 'constant' needs constant_length, the same number throughout a run."
            )
        return weights / (settings.constant_length * totals.sequences)
    if group is None or not totals.groups:
        raise ConfigError("normalise = 'group' needs the group of every token.")
    names, index = torch.unique(group, return_inverse=True)
    of_group = [totals.groups.get(int(name), 1.0) for name in names]  # absent: all weights are 0
    return weights / torch.tensor(of_group, device=weights.device)[index] / len(totals.groups)


def trained(weights: Tensor) -> Tensor:
    """Places of the tokens that count; an error when there are none, or weights are no weights."""
    assert weights.dim() == 1, f"expected flat tokens, found shape {tuple(weights.shape)}"
    bad = ~(torch.isfinite(weights) & (weights >= 0))
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise TrainingError(
            f"Loss: the weight of token {at} is {float(weights[at])}; expected 0 or more."
        )
    kept = (weights > 0).nonzero()[:, 0]
    if len(kept) == 0:
        raise TrainingError(
            f"Loss: none of {len(weights)} tokens has a weight above 0; expected at least one that "
            "the model wrote."
        )
    return kept


def pick(what: str, values: Tensor, kept: Tensor, sequence: Tensor | None = None) -> Tensor:
    """The float32 values of the tokens that count; an error that names the first not finite."""
    assert values.dim() == 1, f"{what}: expected flat tokens, found shape {tuple(values.shape)}"
    picked = values[kept].float()
    finite = torch.isfinite(picked)
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0])
        at = int(kept[place])
        whose = "" if sequence is None else f" (sequence {int(sequence[at])})"
        raise TrainingError(
            f"Loss: the {what} of token {at}{whose} is {picked[place].item()}; expected a finite "
            f"number ({int((~finite).sum())} of {len(picked)} are not)."
        )
    return picked


def numbered(keys: Tensor) -> tuple[Tensor, int]:
    """The same keys as 0, 1, 2 ..., and how many there are."""
    names, index = torch.unique(keys, return_inverse=True)
    return index, len(names)


def sum_by(index: Tensor, values: Tensor, count: int) -> Tensor:
    """Sums of values [n] by index [n] -> [count]."""
    return values.new_zeros(count).index_add(0, index, values)


# ------------------------------------------------------------------------------------------------
# What the probabilities of tokens say: cross-entropy, divergence, entropy.
#
# The traps are in gradients. `-logprob` of a sampled token estimates the entropy, and k1 the
# divergence, but the expected gradient of either is zero, because the mean of the score function
# is.
# ------------------------------------------------------------------------------------------------


LOG_BOUND = 20.0
"""Differences of logprobs beyond this count as this: exp(20) is 5e8, exp(89) is infinite."""


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """float32 log-probability of each target under logits [n, vocab] / temperature."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return -F.cross_entropy(scaled, targets, reduction="none")


def masked_cross_entropy(
    logprobs: Tensor, weights: Tensor, total: Tensor | float | None = None
) -> Tensor:
    """Weighted mean of -logprob: sum(w * -logprob) / total, where total defaults to sum(w).

    A caller that splits a batch into parts passes the whole batch's total to each part.
    """
    kept = trained(weights)
    logprobs, weights = pick("logprob", logprobs, kept), weights[kept].float()
    if total is None:
        total = weights.sum()
    return (-logprobs * weights).sum() / total


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """An estimate of KL(policy || reference) at each token, from one sample of the policy.

    k1 = log ratio: unbiased, may be negative. k2 = its half square: biased, low variance, and its
    gradient is that of the KL. k3 = exp(-k1) - 1 + k1: unbiased, never negative; its gradient is
    that of KL(reference || policy).
    """
    gap = (logprobs.float() - reference.float()).clamp(-LOG_BOUND, LOG_BOUND)
    if estimator == "k1":
        return gap
    return 0.5 * gap.square() if estimator == "k2" else torch.expm1(-gap) + gap


def sampled_entropy(logprobs: Tensor) -> Tensor:
    """An estimate of the entropy at each token, from the sampled token alone.

    Its value is -logprob. Its gradient is that of -logprob**2 / 2, whose mean over samples is the
    gradient of the entropy; that of -logprob has mean zero, and as a bonus would do nothing.
    """
    logprobs = logprobs.float()
    slope = -0.5 * logprobs.square()
    return slope - slope.detach() - logprobs.detach()


# ------------------------------------------------------------------------------------------------
# The policy loss: clipped ratios times advantages, plus KL, minus entropy, by settings.
#
# Three policies may differ. `logprobs` is the one being trained, `old` the same model before the
# updates of this batch, `sampled` what the engine computed when it wrote the token. The ratio of
# the first two is clipped; that of the last two is corrected for, without a gradient. With
# `settings.old` of "sampler" the last two are one: the ratio to what was sampled from is clipped,
# and there is nothing to correct for (verl calls it bypass mode).
# ------------------------------------------------------------------------------------------------


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
    old: Tensor, sampled: Tensor | None, sequence: Tensor, settings: RlLossSettings
) -> Correction:
    """p(trainer) / p(sampler) of each token, or of its sequence as geometric mean or as product
    (`trajectory`), kept within bounds.

    `truncate` cuts it to cap and floor; `mask` leaves out what is beyond them.
    """
    if settings.correction == "none":
        return Correction(torch.ones_like(old), torch.zeros_like(old, dtype=torch.bool))
    if sampled is None:
        raise ConfigError(
            f"correction = {settings.correction!r} needs the logprobs of the sampler; found none."
        )
    cap, floor = settings.correction_cap, settings.correction_floor
    gap = (old.detach().float() - sampled.float()).clamp(-LOG_BOUND, LOG_BOUND)
    if settings.correction != "token":
        index, count = numbered(sequence)
        total = sum_by(index, gap, count)
        if settings.correction == "sequence":  # a product of 1,000 tokens is 0 or beyond any cap
            total /= torch.bincount(index, minlength=count)
        gap = total.clamp(-LOG_BOUND, LOG_BOUND)[index]
    raw = torch.exp(gap)
    changed = (raw > cap) | (raw < (0.0 if floor is None else floor))
    if settings.correction_mode == "mask":
        return Correction(raw.masked_fill(changed, 0.0), changed)
    return Correction(raw.clamp(min=floor, max=cap), changed)


Metrics = dict[str, float]
"""Means over trained tokens, by weight, of a part or of a batch; docs/rl.md says what each is."""
_LARGEST = ("ratio_max", "sampler_gap_max")
"""The metrics that are no means."""


def join_metrics(parts: Sequence[Metrics]) -> Metrics:
    """The metrics of a batch from those of its parts, with the effective sample size of its
    importance weights (1 when all are the same)."""
    weight = sum(part["weight"] for part in parts)
    joined = {"weight": weight}
    for name in list(parts[0])[1:]:
        if name in _LARGEST:
            joined[name] = max(part[name] for part in parts)
        else:
            joined[name] = sum(part[name] * part["weight"] for part in parts) / weight
    square = joined.pop("correction_square")
    joined["ess"] = joined["correction_mean"] ** 2 / square if square else 0.0
    return joined


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss to call backward on, and what happened."""

    loss: Tensor
    metrics: Metrics


def policy_loss(
    logprobs: Tensor,
    tokens: PolicyTokens,
    settings: RlLossSettings,
    totals: Totals | None = None,
) -> PolicyLoss:
    """The loss of tokens of which `logprobs` [n] were computed with a gradient.

    `totals` are those of the whole batch when this is a part of it; the sum of the parts' losses is
    then the loss of the batch.
    """
    part = _select(logprobs, tokens, settings)
    share = shares(part.weights, part.sequence, settings, part.group, totals)
    ratio = torch.exp(_log_ratio(part, settings.ratio))
    correction = sampler_correction(part.old, part.sampled, part.sequence, settings)
    by_token = clipped(ratio, part.advantages, settings)
    if settings.surrogate == "cispo":
        bounded = ratio.detach().clamp(1 - settings.clip_low, 1 + settings.clip_high)
        by_token = -bounded * part.advantages * part.new
    loss = (share * by_token * correction.factors).sum()
    if settings.kl > 0 and settings.kl_place == "loss":
        kl = _reference_kl(part, settings)
        loss = loss + settings.kl * (share * (kl * ratio if settings.kl_reweighted else kl)).sum()
    if settings.entropy != 0.0:
        loss = loss - settings.entropy * (share * sampled_entropy(part.new)).sum()
    return PolicyLoss(loss, _measure(part, ratio, correction, settings))


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


def _select(logprobs: Tensor, tokens: PolicyTokens, settings: RlLossSettings) -> _Part:
    assert len(logprobs) == len(tokens.weights), (len(logprobs), len(tokens.weights))
    kept = trained(tokens.weights)

    def known(what: str, values: Tensor | None) -> Tensor | None:
        return None if values is None else pick(what, values, kept, tokens.sequence)

    new = pick("logprob", logprobs, kept, tokens.sequence)
    sampled = known("sampled logprob", tokens.sampled)
    if settings.old == "sampler":
        if sampled is None:
            raise ConfigError("old = 'sampler' needs the logprobs of the sampler; found none.")
        old: Tensor | None = sampled
    else:
        old = known("old logprob", tokens.old)
    return _Part(
        new=new,
        old=(new if old is None else old).detach(),
        advantages=pick("advantage", tokens.advantages, kept, tokens.sequence).detach(),
        weights=tokens.weights[kept].float(),
        sequence=tokens.sequence[kept],
        sampled=sampled,
        reference=known("reference logprob", tokens.reference),
        group=None if tokens.group is None else tokens.group[kept],
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


def _reference_kl(part: _Part, settings: RlLossSettings) -> Tensor:
    if part.reference is None:
        raise ConfigError(f"kl = {settings.kl} needs the reference's logprobs; found none.")
    return kl_estimate(part.new, part.reference, settings.kl_estimator)


@torch.no_grad()
def _measure(
    part: _Part, ratio: Tensor, correction: Correction, settings: RlLossSettings
) -> Metrics:
    down, up = part.advantages < 0, part.advantages > 0
    if settings.surrogate == "cispo":  # the bounds hold whatever the advantage
        down = up = torch.ones_like(down)
    none = torch.zeros_like(part.old)
    trainer = part.new if settings.old == "sampler" else part.old
    gap = none if part.sampled is None else trainer - part.sampled
    limit = math.inf if settings.dual_clip is None else settings.dual_clip
    by_token = {
        "clip_low": down & (ratio < 1 - settings.clip_low),
        "clip_high": up & (ratio > 1 + settings.clip_high),
        "clip_dual": down & (ratio > limit),
        "ratio_mean": ratio,
        "ratio_max": ratio,
        "kl_old": part.old - part.new,
        "kl_reference": none if part.reference is None else _reference_kl(part, settings),
        "entropy": -part.new,
        "advantage_mean": part.advantages,
        "sampler_gap": gap.abs(),
        "sampler_gap_max": gap.abs(),
        "sampler_kl": -gap,
        "correction_mean": correction.factors,
        "correction_square": correction.factors.square(),
        "correction_changed": correction.changed,
    }
    table = torch.stack([v.float() for name, v in by_token.items() if name not in _LARGEST])
    weight = part.weights.sum()
    means = iter((table @ part.weights / weight).tolist())
    return {"weight": float(weight)} | {
        name: float(values.max()) if name in _LARGEST else next(means)
        for name, values in by_token.items()
    }


# ------------------------------------------------------------------------------------------------
# Advantages over a value head (GAE) and the loss that trains it.
#
# An observation is not the model's doing: its tokens have no value, no reward and no step of
# time. The step from the last token the model wrote before an observation to the first one after
# it is one step, like any other.
# ------------------------------------------------------------------------------------------------


class Gae(NamedTuple):
    """[n] each, 0 for tokens that take no part."""

    advantages: Tensor
    returns: Tensor
    """What the value head is trained towards."""


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    weights: Tensor,
    sequence: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Gae:
    """Generalised advantage estimation along each sequence; what follows its end is worth 0.

    The tokens of a sequence are in their order. A reward on a token that takes no part would be
    lost, so it is an error.
    """
    kept = trained(weights)
    lost = (rewards != 0) & (weights == 0)
    if bool(lost.any()):
        at = int(lost.nonzero()[0])
        raise TrainingError(
            f"Token {at} (sequence {int(sequence[at])}) has the reward {float(rewards[at])} and "
            "weight 0, so it would be lost; expected rewards on tokens the model wrote."
        )
    reward = pick("reward", rewards, kept, sequence)
    value = pick("value", values, kept, sequence)
    index, count = numbered(sequence[kept])
    # [steps, sequences], so that the loop is over time only and its rows are contiguous.
    order = torch.argsort(index, stable=True)
    lengths = torch.bincount(index, minlength=count)
    starts = lengths.cumsum(0) - lengths
    step = torch.empty_like(index)
    step[order] = torch.arange(len(index), device=index.device) - starts[index[order]]
    table = torch.zeros(3, int(lengths.max()) + 1, count, device=reward.device)
    table[0, step, index], table[1, step, index] = reward, value
    for at in range(table.shape[1] - 2, -1, -1):
        # Beyond the end of a shorter sequence all of this is 0.
        surprise = table[0, at] + gamma * table[1, at + 1] - table[1, at]
        table[2, at] = surprise + gamma * lam * table[2, at + 1]
    advantage = table[2, step, index]
    found = torch.zeros(2, len(weights), device=reward.device)
    found[0, kept], found[1, kept] = advantage, advantage + value
    return Gae(found[0], found[1])


@torch.no_grad()
def whiten(values: Tensor, weights: Tensor) -> Tensor:
    """Values with mean 0 and variance 1 over the tokens that count; 0 elsewhere. Whole batches."""
    kept = trained(weights)
    picked = pick("advantage", values, kept)
    if len(kept) < 2:
        raise TrainingError("One token cannot be whitened; expected at least two in a batch.")
    whitened = torch.zeros(len(values), device=picked.device)
    whitened[kept] = (picked - picked.mean()) * torch.rsqrt(picked.var() + 1e-8)
    return whitened


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    tokens: PolicyTokens,
    settings: RlLossSettings,
    totals: Totals | None = None,
) -> Tensor:
    """Half the squared error of values [n], like PPO's: with a `value_clip` the larger of that
    error and the error of the value held so near to the old one."""
    kept, sequence = trained(tokens.weights), tokens.sequence
    value = pick("value", values, kept, sequence)
    target = pick("return", returns, kept, sequence).detach()
    loss = (value - target).square()
    if (clip := settings.value_clip) is not None:
        old = pick("old value", old_values, kept, sequence).detach()
        held = torch.minimum(torch.maximum(value, old - clip), old + clip)
        loss = torch.maximum(loss, (held - target).square())
    group = None if tokens.group is None else tokens.group[kept]
    share = shares(tokens.weights[kept], sequence[kept], settings, group, totals)
    return 0.5 * (share * loss).sum()
