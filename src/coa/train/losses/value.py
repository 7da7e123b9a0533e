"""Advantages over a value head (GAE) and the loss that trains it.

An observation is not the model's doing: its tokens have no value, no reward and no step of time.
The step from the last token the model wrote before an observation to the first one after it is one
step, like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coa.errors import TrainingError
from coa.train.loss_settings import Normalise
from coa.train.losses.tokens import Totals, numbered, pick, shares, trained


@dataclass(frozen=True, slots=True)
class Gae:
    """[n] each, 0 for tokens that take no part."""

    advantages: Tensor
    returns: Tensor
    """What the value head is trained towards."""


def last_token_rewards(rewards: Tensor, weights: Tensor, sequence: Tensor) -> Tensor:
    """Rewards [n] of tokens: that of each sequence on the last token of it that the model wrote.

    `rewards` [k] belong to the sequences in ascending order of their numbers.
    """
    kept = trained(weights)
    index, count = numbered(sequence)
    assert len(rewards) == count, (len(rewards), count)
    last = torch.full((count,), -1, device=weights.device).scatter_reduce(
        0, index[kept], kept, reduce="amax"
    )
    if bool((last < 0).any()):
        at = int((last < 0).nonzero()[0])
        found = int(sequence[(index == at).nonzero()[0]])
        raise TrainingError(f"Sequence {found} has no token that could take its reward.")
    placed = torch.zeros(len(weights), device=weights.device)
    placed[last] = rewards.float().to(weights.device)
    return placed


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


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The loss to call backward on, and what happened."""

    loss: Tensor
    weight: float
    """Sum of the weights of tokens, by which to join the means of parts."""
    clipped: float
    """Share of tokens whose gradient the clip stopped."""
    error: float
    """Mean of (value - return) squared."""
    value_mean: float
    return_mean: float


def value_loss(
    values: Tensor,
    returns: Tensor,
    weights: Tensor,
    sequence: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    normalise: Normalise = "token",
    constant_length: int | None = None,
    group: Tensor | None = None,
    totals: Totals | None = None,
) -> ValueLoss:
    """Half the squared error of values [n]; with `clip`, moves beyond it from the old values end.

    Like PPO's: the larger of the error and the error of the clipped value.
    """
    kept = trained(weights)
    value = pick("value", values, kept, sequence)
    target = pick("return", returns, kept, sequence).detach()
    share = shares(
        weights[kept],
        sequence[kept],
        normalise,
        group=None if group is None else group[kept],
        constant_length=constant_length,
        totals=totals,
    )
    square = loss = (value - target).square()
    if clip is not None:
        assert old_values is not None, "clip needs old_values"
        old = pick("old value", old_values, kept, sequence).detach()
        held = torch.minimum(torch.maximum(value, old - clip), old + clip)
        loss = torch.maximum(square, (held - target).square())
    weight = weights[kept].float()
    means = torch.stack([(loss > square).float(), square, value, target]).detach() @ weight
    numbers = (means / weight.sum()).tolist()
    return ValueLoss(0.5 * (share * loss).sum(), float(weight.sum()), *numbers)
