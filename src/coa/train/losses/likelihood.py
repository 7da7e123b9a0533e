"""What the probabilities of tokens say: cross-entropy, divergence, entropy.

The traps are in gradients. `-logprob` of a sampled token estimates the entropy, and k1 the
divergence, but the expected gradient of either is zero, because the mean of the score function is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from coa.train.loss_settings import KlEstimator
from coa.train.losses.tokens import pick, trained

LOG_BOUND = 20.0
"""Differences of logprobs beyond this count as this: exp(20) is 5e8, exp(89) is infinite."""
_POSITIONS = 256


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


def kl_estimate(
    logprobs: Tensor, reference: Tensor, estimator: KlEstimator = "k3", straight: bool = False
) -> Tensor:
    """Of each token, an estimate of KL(policy || reference) from one sample of the policy.

    k1 = log ratio: unbiased, may be negative. k2 = its half square: biased, low variance, and its
    gradient is that of the KL. k3 = exp(-k1) - 1 + k1: unbiased, never negative; its gradient is
    that of KL(reference || policy). `straight` keeps the value and takes the gradient of k2.
    """
    gap = (logprobs.float() - reference.float()).clamp(-LOG_BOUND, LOG_BOUND)
    half_square = 0.5 * gap.square()
    if estimator == "k1":
        value = gap
    elif estimator == "k2":
        return half_square
    else:
        value = torch.expm1(-gap) + gap
    return half_square - half_square.detach() + value.detach() if straight else value


@torch.no_grad()
def kl_penalty(
    logprobs: Tensor,
    reference: Tensor,
    weights: Tensor,
    coefficient: float,
    estimator: KlEstimator = "k1",
) -> Tensor:
    """What a divergence from the reference takes from each token's reward: [n], 0 at weight 0.

    Subtract it from the rewards that `gae` is given, or its sum over a sequence from the sequence's
    reward. Here k1 is right: no gradient passes through, and its mean is the KL.
    """
    kept = trained(weights)
    new = pick("logprob", logprobs, kept)
    kl = kl_estimate(new, pick("reference logprob", reference, kept), estimator)
    penalty = torch.zeros(len(weights), device=kl.device)
    penalty[kept] = coefficient * kl
    return penalty


def entropy_of_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """float32 entropy in nats of each row of logits [n, vocab] / temperature."""
    found = []
    for part in logits.split(_POSITIONS):  # a vocabulary in float32 is large
        logs = torch.log_softmax(part.float() / temperature, dim=-1)
        # A token with logit -inf (a constraint) has probability 0 and adds nothing.
        found.append(-(logs.exp() * logs.clamp_min(torch.finfo(logs.dtype).min)).sum(dim=-1))
    return torch.cat(found) if found else logits.new_zeros(0, dtype=torch.float32)


def sampled_entropy(logprobs: Tensor) -> Tensor:
    """An estimate of the entropy at each token, from the sampled token alone.

    Its value is -logprob. Its gradient is that of -logprob**2 / 2, whose mean over samples is the
    gradient of the entropy; that of -logprob has mean zero, and as a bonus would do nothing.
    """
    logprobs = logprobs.float()
    slope = -0.5 * logprobs.square()
    return slope - slope.detach() - logprobs.detach()
