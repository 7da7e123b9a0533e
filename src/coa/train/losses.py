"""Losses as pure functions of tensors; checked by hand and against other libraries.

Position t of a row predicts token t+1, so the hidden state at t is weighted with the weight of the
token at t+1. Only weighted positions go through the output layer: logits of a 49k vocabulary are
the largest tensor of a small model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_positions(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat indices of positions that predict a weighted token, those tokens, and their weights.

    `ids` and `weights` are [rows, length]; the indices address a [rows * length, ...] tensor.
    """
    rows, length = ids.shape
    shifted = weights.new_zeros(rows, length)
    shifted[:, :-1] = weights[:, 1:]
    places = shifted.reshape(-1).nonzero()[:, 0]
    return places, ids.reshape(-1)[places + 1], shifted.reshape(-1)[places]


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
    if total is None:
        total = weights.sum()
    return (-logprobs * weights).sum() / total


def entropy(logits: Tensor) -> Tensor:
    """float32 entropy in nats of each row of logits [n, vocab]."""
    logs = torch.log_softmax(logits.float(), dim=-1)
    return -(logs.exp() * logs).sum(dim=-1)
